//! Who wants to know what a row holds: told after each heartbeat. The first rows are read along with the leases, the others
//! then, page by page, so that no statement and no reply grows with their number.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    ops::Bound,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
};

use tokio_postgres::types::Type;

use super::{
    CALL_DEADLINE, Sessions,
    error::{Reason, StoreError},
    session::Lenient,
    sql::{self, Table},
};

/// Told what the row holds; returns whether it wants to go on being told.
pub type Heard = Box<dyn Fn(Option<&str>) -> bool + Send + Sync>;

/// Rows read with one statement.
const PAGE: usize = 1_000;

/// A row that is watched: those of whole destinations come first, then by key.
type Row = (bool, String);

/// The rows that are watched.
#[derive(Default)]
pub(super) struct Watches {
    rows: Mutex<BTreeMap<Row, Heard>>,
    /// The pages after the first are being read.
    reading: AtomicBool,
}

impl Watches {
    /// Watches one more row, `first` or later; a second wish for the same row takes the place of the first.
    pub(super) fn add(&self, key: String, first: bool, heard: Heard) {
        self.lock().insert((!first, key), heard);
    }

    /// The keys to read with a heartbeat.
    pub(super) fn keys(&self) -> Vec<String> {
        let page = self.page_after(None);
        page.into_iter().map(|(_, key)| key).collect()
    }

    fn page_after(&self, last: Option<&Row>) -> Vec<Row> {
        let from = last.map_or(Bound::Unbounded, Bound::Excluded);
        let rows = self.lock();
        let page = rows.range::<Row, _>((from, Bound::Unbounded));
        page.take(PAGE).map(|(row, _)| row.clone()).collect()
    }

    /// Tells of the rows that were read; `keys` without a row are not there.
    pub(super) fn tell(&self, keys: &[String], rows: &HashMap<&str, &str>) {
        for key in keys {
            for later in [false, true] {
                self.tell_one((later, key.clone()), rows.get(key.as_str()).copied());
            }
        }
    }

    fn tell_one(&self, row: Row, text: Option<&str>) {
        // Not under the lock: whoever is told may want to watch something.
        let Some(heard) = self.lock().remove(&row) else {
            return;
        };
        if heard(text) {
            self.lock().entry(row).or_insert(heard);
        }
    }

    /// Reads the rows beyond those that a heartbeat reads, and tells of them. Not awaited by the heart, which beats on: a
    /// page at a time stands in its way at most. While one round lasts, no other begins.
    pub(super) fn read_on(self: &Arc<Self>, sessions: &Arc<Sessions>, table: &Table) {
        if self.lock().len() <= PAGE || self.reading.swap(true, SeqCst) {
            return;
        }
        let (watches, sessions, text) = (self.clone(), sessions.clone(), sql::watched(table));
        tokio::spawn(async move {
            if let Err(e) = watches.read_pages(&sessions, &text).await {
                tracing::debug!(reason = e.reason().label(), "throttles were not read: {e}");
            }
            watches.reading.store(false, SeqCst);
        });
    }

    async fn read_pages(&self, sessions: &Sessions, text: &str) -> Result<(), StoreError> {
        let mut page = self.page_after(None);
        while let (Some(last), PAGE) = (page.last(), page.len()) {
            page = self.page_after(Some(last));
            let keys: Vec<&str> = page.iter().map(|(_, key)| key.as_str()).collect();
            let params = [(
                &keys as &(dyn tokio_postgres::types::ToSql + Sync),
                Type::TEXT_ARRAY,
            )];
            let call = sessions.heart.client.query_typed(text, &params);
            let found = tokio::time::timeout(CALL_DEADLINE, call)
                .await
                .map_err(|_| StoreError::new(Reason::Timeout, "no reply from Postgres"))??;
            let mut rows = HashMap::new();
            for row in &found {
                let (key, text): (&str, Option<Lenient>) = (row.try_get(0)?, row.try_get(1)?);
                rows.insert(key, text.map(|t| t.0));
            }
            for row in &page {
                let held = rows.get(row.1.as_str()).and_then(Option::as_deref);
                self.tell_one(row.clone(), held);
            }
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Row, Heard>> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Watches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watches")
            .field("rows", &self.lock().len())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_on_one_page_and_whole_destinations_come_first() {
        let watches = Watches::default();
        for n in 0..2_500 {
            watches.add(format!("a/{n}"), false, Box::new(|_| true));
        }
        watches.add("z".to_owned(), true, Box::new(|_| true));
        let first = watches.page_after(None);
        assert_eq!(first.first(), Some(&(false, "z".to_owned())));
        let (mut page, mut seen) = (first, Vec::new());
        while let Some(last) = page.last().cloned() {
            assert!(page.len() <= PAGE);
            seen.extend(page);
            page = watches.page_after(Some(&last));
        }
        let mut all = seen.clone();
        all.sort();
        all.dedup();
        assert_eq!((seen.len(), all.len()), (2_501, 2_501));
    }

    #[test]
    fn who_wants_no_more_is_told_no_more() {
        let watches = Watches::default();
        watches.add("a".to_owned(), false, Box::new(|text| text.is_some()));
        let rows = HashMap::from([("a", "2 {}")]);
        watches.tell(&watches.keys(), &rows);
        assert_eq!(watches.keys(), ["a"]);
        watches.tell(&watches.keys(), &HashMap::new());
        assert!(watches.keys().is_empty());
    }
}

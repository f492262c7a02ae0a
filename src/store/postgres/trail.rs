//! Where cursors' rows lie in their table, and when to look for one there and not by its key. Pure.
//!
//! While a transaction is held open on the database, no dead version of a row can be removed. The key then leads to every
//! version that the cursor ever had since, and the way to the last one grows with each reservation. Where the last one
//! lies, the reply to the one before has said. What a statement does with that, this file does not know.

use std::{
    collections::HashMap,
    error::Error,
    ops::Range,
    sync::{Mutex, MutexGuard, PoisonError},
};

use bytes::BytesMut;
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, to_sql_checked};

/// Pages that are looked at, from the one where the row was seen last. When a page is full, the row's next version is
/// usually in the next new one; a replica that comes seldom is some pages behind the others.
const PAGES: u32 = 8;
/// Replies from one page after which it counts as settled. A page takes about 100 versions, so a row that stays in one for
/// longer is rid of its dead ones: its key leads straight to it.
const SETTLED: u16 = 1_000;
/// So many misses in a row, and the key is used for a while: others move the row faster than this replica can follow.
const MISSES: u8 = 2;
/// For so many reservations.
const REST: u8 = 16;
/// Rows remembered. One that is forgotten costs the way by the key until it changes its page again.
const ROWS: usize = 10_000;

/// The place of a row's version: `ctid`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The page, counted from the table's first.
    pub page: u32,
    /// Its number in the page, from 1.
    pub item: u16,
}

impl<'a> FromSql<'a> for Place {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Place, Box<dyn Error + Sync + Send>> {
        let &[a, b, c, d, e, f] = raw else {
            return Err("a tid that is not six bytes".into());
        };
        Ok(Place {
            page: u32::from_be_bytes([a, b, c, d]),
            item: u16::from_be_bytes([e, f]),
        })
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::TID
    }
}

impl ToSql for Place {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        out.extend_from_slice(&self.page.to_be_bytes());
        out.extend_from_slice(&self.item.to_be_bytes());
        Ok(IsNull::No)
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::TID
    }

    to_sql_checked!();
}

/// The trails of all rows in use, by key.
#[derive(Debug, Default)]
pub(super) struct Trails(Mutex<HashMap<String, Trail>>);

impl Trails {
    /// The places to look at for the row `key`; `None`: by its key.
    pub(super) fn near(&self, key: &str) -> Option<Range<Place>> {
        self.lock().get_mut(key)?.near()
    }

    /// The row was there now, found `near` its place or by its key.
    pub(super) fn seen(&self, key: &str, place: Place, near: bool) {
        let mut all = self.lock();
        match all.get_mut(key) {
            Some(trail) => trail.seen(place, near),
            None => {
                if all.len() >= ROWS {
                    all.clear();
                }
                all.insert(key.to_owned(), Trail::new(place));
            }
        }
    }

    /// The row was not where it was looked for.
    pub(super) fn missed(&self, key: &str) {
        if let Some(trail) = self.lock().get_mut(key) {
            trail.missed();
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Trail>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One row's.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Trail {
    page: u32,
    /// Replies from that page since the row came to it, up to [`SETTLED`].
    stayed: u16,
    misses: u8,
    rest: u8,
}

impl Trail {
    fn new(place: Place) -> Trail {
        Trail {
            page: place.page,
            stayed: SETTLED,
            misses: 0,
            rest: 0,
        }
    }

    fn near(&mut self) -> Option<Range<Place>> {
        if self.stayed >= SETTLED {
            return None;
        }
        if self.rest > 0 {
            self.rest -= 1;
            return None;
        }
        let at = |page| Place { page, item: 0 };
        Some(at(self.page)..at(self.page.saturating_add(PAGES)))
    }

    fn seen(&mut self, place: Place, near: bool) {
        if near {
            self.misses = 0;
        }
        if place.page == self.page {
            self.stayed = (self.stayed + 1).min(SETTLED);
        } else {
            (self.page, self.stayed) = (place.page, 0);
        }
    }

    fn missed(&mut self) {
        self.misses += 1;
        if self.misses >= MISSES {
            (self.misses, self.rest) = (0, REST);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(page: u32) -> Place {
        Place { page, item: 1 }
    }

    #[test]
    fn a_row_is_looked_for_near_its_place_from_when_it_moved_until_it_settles() {
        let trails = Trails::default();
        assert_eq!(trails.near("a"), None);
        trails.seen("a", at(7), false);
        assert_eq!(trails.near("a"), None, "nothing says that it moves");
        trails.seen("a", at(9), false);
        let near = Place { page: 9, item: 0 }..Place { page: 17, item: 0 };
        for _ in 0..SETTLED {
            assert_eq!(trails.near("a"), Some(near.clone()));
            assert_eq!(trails.near("b"), None);
            trails.seen("a", at(9), true);
        }
        assert_eq!(trails.near("a"), None, "its page is kept clean");
    }

    #[test]
    fn misses_in_a_row_leave_it_to_the_key_for_a_while() {
        let mut trail = Trail::new(at(1));
        trail.seen(at(2), false);
        trail.missed();
        assert!(trail.near().is_some(), "one is nothing");
        trail.seen(at(3), true);
        trail.missed();
        assert!(trail.near().is_some(), "they were not in a row");
        trail.missed();
        for _ in 0..REST {
            assert_eq!(trail.near(), None);
        }
        assert!(trail.near().is_some());
    }

    #[test]
    fn the_number_of_rows_is_bounded_and_so_is_a_page() {
        let trails = Trails::default();
        for n in 0..2 * ROWS {
            trails.seen(&n.to_string(), at(1), false);
            assert!(trails.lock().len() <= ROWS);
        }
        let mut last = Trail::new(at(1));
        last.seen(at(u32::MAX), false);
        assert!(last.near().is_some_and(|places| places.start == places.end));
    }

    proptest! {
        #[test]
        fn a_place_is_read_as_it_was_written(page: u32, item: u16) {
            let (place, mut raw) = (Place { page, item }, BytesMut::new());
            place.to_sql(&Type::TID, &mut raw).expect("six bytes");
            prop_assert_eq!(Place::from_sql(&Type::TID, &raw).expect("a place"), place);
        }

        #[test]
        fn garbage_is_no_place(raw in prop::collection::vec(any::<u8>(), 0..12)) {
            prop_assert_eq!(Place::from_sql(&Type::TID, &raw).is_ok(), raw.len() == 6);
        }

        /// However a row moves, a miss costs at most one statement in nine.
        #[test]
        fn a_row_that_is_never_where_it_was_costs_few_statements_more(pages in prop::collection::vec(any::<u32>(), 200..400)) {
            let mut trail = Trail::new(at(0));
            let mut misses = 0;
            for page in &pages {
                if trail.near().is_some() {
                    trail.missed();
                    misses += 1;
                }
                trail.seen(at(*page), false);
            }
            prop_assert!(misses <= pages.len() / 9 + 2, "{misses} of {}", pages.len());
        }
    }
}

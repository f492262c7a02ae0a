//! Who wants to know what a row holds: told with each heartbeat, which reads these rows along with the leases.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Told what the row holds; returns whether it wants to go on being told.
pub type Heard = Box<dyn Fn(Option<&str>) -> bool + Send + Sync>;

/// Rows read with one heartbeat at most. What is beyond learns of a change with its next reservation.
const LIMIT: usize = 1_000;

/// The rows that are watched, by key.
#[derive(Default)]
pub(super) struct Watches {
    rows: Mutex<BTreeMap<String, Heard>>,
}

impl Watches {
    /// Watches one more row; a second wish for the same row takes the place of the first.
    pub(super) fn add(&self, key: String, heard: Heard) {
        self.lock().insert(key, heard);
    }

    /// The keys to read.
    pub(super) fn keys(&self) -> Vec<String> {
        self.lock().keys().take(LIMIT).cloned().collect()
    }

    /// Tells of the rows that were read; `keys` without a row are not there.
    pub(super) fn tell(&self, keys: &[String], rows: &HashMap<&str, &str>) {
        for key in keys {
            // Not under the lock: whoever is told may want to watch something.
            let Some(heard) = self.lock().remove(key) else {
                continue;
            };
            if heard(rows.get(key.as_str()).copied()) {
                self.lock().entry(key.clone()).or_insert(heard);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Heard>> {
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

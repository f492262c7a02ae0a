//! The embedded store: cursors in memory, on this machine's own clock.
//!
//! It executes the same rule as Postgres does. Its reply takes no time, so its clock bounds are exact.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::pacing::{
    clock::ClockBounds,
    cursor::{Ask, Granted, take},
    time::{LocalTime, Nanos, StoreTime},
};

/// Where lanes find their cursors: each lane has its own, or those of one name share one.
#[derive(Clone, Debug, Default)]
pub struct Cursors(Option<Arc<Mutex<HashMap<String, Held>>>>);

/// A cursor, held by the lanes on it.
#[derive(Clone, Debug, Default)]
pub struct Held(Arc<Mutex<Cursor>>);

impl Cursors {
    /// One cursor for each name, whichever replica of this process asks. It is never forgotten: for a few names only.
    pub fn shared() -> Self {
        Cursors(Some(Arc::default()))
    }

    /// The cursor for a lane of that name.
    pub fn find(&self, name: &str) -> Held {
        let Some(all) = &self.0 else {
            return Held::default();
        };
        let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
        all.entry(name.to_owned()).or_default().clone()
    }
}

impl Held {
    /// The cursor itself, for one step.
    pub fn lock(&self) -> MutexGuard<'_, Cursor> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One cursor.
#[derive(Debug, Default)]
pub struct Cursor {
    next: Option<StoreTime>,
    clock: ClockBounds,
}

impl Cursor {
    /// Takes slots. The store's clock is the local one.
    pub fn reserve(&mut self, now: LocalTime, ask: &Ask) -> Granted {
        let here = StoreTime(now.0);
        self.clock.observe(now, now, here);
        let granted = take(self.next, here, ask);
        self.next = Some(granted.end());
        granted
    }

    /// How long a request would have to wait now; nothing is taken.
    pub fn preview(&self, now: LocalTime, ask: &Ask) -> Nanos {
        let here = StoreTime(now.0);
        take(self.next, here, ask).start.since(here)
    }

    /// The bounds of this store's clock: exact.
    pub fn clock(&self) -> &ClockBounds {
        &self.clock
    }

    /// Whether the cursor lies in the past, so that a new one would give the same slots.
    pub fn has_passed(&self, now: LocalTime) -> bool {
        self.next.is_none_or(|next| next.0 <= now.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pacing::time::SECOND;

    #[test]
    fn a_name_is_one_cursor_where_cursors_are_shared_and_each_ones_own_elsewhere() {
        let ask = Ask {
            slots: 1,
            interval: SECOND,
            lead: 0,
            floor: None,
            horizon: 60 * SECOND,
            disbelieved: None,
            held: 0,
        };
        let waits = |cursors: &Cursors, name| {
            let (now, held) = (LocalTime(5), cursors.find(name));
            let granted = held.lock().reserve(now, &ask);
            granted.start.since(granted.now)
        };
        let (shared, own) = (Cursors::shared(), Cursors::default());
        let other_replica = shared.clone();
        assert_eq!(waits(&shared, "a"), 0);
        assert_eq!(waits(&other_replica, "a"), SECOND);
        assert_eq!(waits(&shared, "b"), 0);
        assert_eq!((waits(&own, "a"), waits(&own, "a")), (0, 0));
    }
}

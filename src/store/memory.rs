//! The embedded store: one cursor in memory, on this machine's own clock.
//!
//! It executes the same rule as Postgres does. Its reply takes no time, so its clock bounds are exact.

use crate::pacing::{
    clock::ClockBounds,
    cursor::{Ask, Granted, reserve},
    time::{LocalTime, Nanos, StoreTime},
};

/// A cursor that one replica keeps by itself.
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
        let granted = reserve(self.next, here, ask);
        self.next = Some(granted.end());
        granted
    }

    /// How long a request would have to wait now; nothing is taken.
    pub fn preview(&self, now: LocalTime, ask: &Ask) -> Nanos {
        let here = StoreTime(now.0);
        reserve(self.next, here, ask).start.since(here)
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

//! The last five minutes of a destination: what was sent second by second, and how long requests waited.

use std::sync::PoisonError;

use super::Destination;
use crate::{
    pacing::{
        time::{LocalTime, Nanos},
        waits::Quantiles,
    },
    store::Store,
};

/// Requests sent in each of the last whole seconds, oldest first, at most 300 of them. Both lists end now, though not on
/// the same clock: seconds of one and of the other may be shifted by one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PerSecond {
    /// By all replicas, in slots of the store's clock. `None` where this one has not heard of it: the last three seconds,
    /// and while the store was away.
    pub all_replicas: Vec<Option<u64>>,
    /// By this one, on its own clock.
    pub this_replica: Vec<u64>,
}

impl Destination {
    /// What was sent, second by second.
    pub fn per_second(&self, now: LocalTime) -> PerSecond {
        let this_replica = self
            .observed
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .per_second(now);
        let all_replicas = match &self.ground.store {
            Store::Memory(_) => this_replica.iter().copied().map(Some).collect(),
            Store::Postgres(store) => store.membership().per_second(self.name(), now),
        };
        PerSecond {
            all_replicas,
            this_replica,
        }
    }

    /// How long requests waited in this replica; `None` if none was sent lately.
    pub fn waits(&self, now: LocalTime) -> Option<Quantiles> {
        let waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        waits.quantiles(now)
    }

    /// A request that went out at `at` had waited for `wait`.
    pub(super) fn waited(&self, at: LocalTime, wait: Nanos) {
        let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        waits.dispatched(at, wait);
    }
}

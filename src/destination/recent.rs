//! The last five minutes of a destination: what was sent second by second, and how long requests waited.

use std::sync::{MutexGuard, PoisonError};

use super::{Destination, Sent};
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
        let this_replica = self.recent().observed.per_second(now);
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
        self.recent().waits.quantiles(now)
    }

    /// A request went out at `at`, and had waited for `wait`.
    pub(super) fn sent(&self, at: LocalTime, wait: Nanos) {
        let mut sent = self.recent();
        sent.observed.dispatched(at);
        sent.waits.dispatched(at, wait);
    }

    pub(super) fn recent(&self) -> MutexGuard<'_, Sent> {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

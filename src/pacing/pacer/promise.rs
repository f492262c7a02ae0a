//! What a pacer can say beforehand: when a request will have its slot, and when a refused one is to come back.

use super::{Cause, Pacer, Refusal};
use crate::pacing::{
    throttle::{self, Halt},
    time::{LocalTime, MILLISECOND, Nanos, SECOND},
};

/// A refused client is never told to come back later than this after the queue itself has room.
const PROMISE_CAP: Nanos = 60 * SECOND;

impl Pacer {
    /// When the request that stands behind `rank` others will have its slot, as far as can be told.
    pub(super) fn predicted(&self, now: LocalTime, rank: usize) -> LocalTime {
        if let Some(slot) = self.slots.get(rank) {
            return slot.at.max(now);
        }
        let beyond = Nanos::try_from(rank - self.slots.len()).unwrap_or(Nanos::MAX);
        let next = self
            .last_slot
            .map_or(now, |t| t.plus(self.spacing))
            .max(now)
            .max(self.held_until(now).unwrap_or(now));
        next.plus(self.spacing.saturating_mul(beyond))
    }

    /// How long before its deadline a request should have its slot: slots are mapped a little late, and timers fire late.
    pub(super) fn margin(&self) -> Nanos {
        MILLISECOND + self.interval() / 1_000
    }

    /// A refusal whose `Retry-After` comes true. A request of this patience finds room once the queue has drained to
    /// what it can wait for; and each refused request is promised a later instant than the one before, one slot
    /// apart, so that all of them coming back as told do not meet the same full queue again.
    pub(super) fn refusal(&mut self, now: LocalTime, cause: Cause, patience: Nanos) -> Refusal {
        let end_of_line = self.predicted(now, self.line.len());
        // A tenth of the patience is left for what the pace may yet bring, and two places for others who come first; but
        // at least half of it counts, or a slow pace would make two places longer than the whole wait.
        let sure = (patience - patience / 10 - self.margin() - 2 * self.spacing).max(patience / 2);
        let room_at = now.plus(end_of_line.since(now).saturating_sub(sure).max(0));
        let retry_at = self.promise.max(room_at).min(room_at.plus(PROMISE_CAP));
        self.promise = retry_at.plus(self.spacing);
        Refusal {
            cause,
            retry_after: retry_at.since(now),
        }
    }

    /// What a new request would be told, and each that waits, while the destination is locked or paused.
    pub(super) fn closed(&self, now: LocalTime) -> Option<Refusal> {
        let halt = self.regime.halt.filter(|h| h.until > now)?;
        let cause = match halt.cause {
            throttle::Cause::Hold => return None,
            throttle::Cause::Lockout(status) => Cause::LockedOut(status),
            throttle::Cause::Pause => Cause::Paused,
        };
        Some(Refusal {
            cause,
            retry_after: halt.until.since(now),
        })
    }

    /// When a halt ends that the queue waits for.
    pub(super) fn held_until(&self, now: LocalTime) -> Option<LocalTime> {
        let Halt { until, .. } = self.regime.halt?;
        (until > now).then_some(until)
    }

    /// The interval between slots that is in force: the longest that any replica is configured with, times the multiplier.
    pub(super) fn interval(&self) -> Nanos {
        self.settings
            .interval
            .max(self.agreed)
            .saturating_mul(Nanos::from(self.regime.multiplier.max(1)))
    }
}

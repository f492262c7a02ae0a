//! A lane under its throttle: answers and orders go in, the pacer is brought under what is in force, and the row that
//! all replicas share is heard and, by the driver, written.

use std::sync::{Arc, MutexGuard, PoisonError, Weak, atomic::Ordering::Relaxed};

use super::{Core, Lane};
use crate::{
    pacing::{
        throttle::{Cause, Moment, Regime, tracker::Event},
        time::{LocalTime, SECOND, seconds},
    },
    store::Store,
};

impl Lane {
    /// Whether a clean answer bears on the pace.
    pub fn is_widened(&self) -> bool {
        self.widened.load(Relaxed)
    }

    /// The name of its cursor, without the prefix.
    pub fn cursor(&self) -> &str {
        &self.name.cursor
    }

    /// Whether all that is known here of the throttle is in the store, if there is one.
    pub fn is_told(&self) -> bool {
        matches!(self.store, Store::Memory(_)) || self.lock().tracker.is_settled()
    }

    /// What is in force.
    pub fn regime(&self) -> Regime {
        let now = LocalTime::now();
        self.lock().tracker.regime(now)
    }

    /// Takes in what bears on the pace; it is in force here at once, and is told to the others. Returns whether it changed
    /// anything; what it led to, [`Lane::settled`] waits for.
    pub fn apply(self: &Arc<Self>, event: Event) -> bool {
        let now = LocalTime::now();
        let at = self.moment(now);
        let mut core = self.lock();
        let changed = core.tracker.apply(at, event);
        self.pump(&mut core, now);
        self.watch(&mut core);
        drop(core);
        self.tell_below();
        changed
    }

    /// Waits until the others can know what this replica knows of the throttle, or the store is away.
    pub async fn settled(&self) {
        let Store::Postgres(store) = &self.store else {
            return;
        };
        loop {
            let told = self.settled.notified();
            if self.lock().tracker.is_settled() || !store.membership().has_read() {
                return;
            }
            told.await;
        }
    }

    /// What the throttle's row holds, as it was read by others than this lane.
    pub fn heard(self: &Arc<Self>, text: Option<&str>) {
        let now = LocalTime::now();
        let at = self.moment(now);
        let mut core = self.lock();
        let changed = core.tracker.seen(at, text);
        self.pump(&mut core, now);
        drop(core);
        if changed {
            self.tell_below();
        }
    }

    /// Has the store tell of the throttle's row from now on, with each heartbeat: always for the lane of a whole
    /// destination, and for others while there is something to tell.
    pub fn watch_row(self: &Arc<Self>) {
        self.watch(&mut self.lock());
    }

    fn watch(self: &Arc<Self>, core: &mut Core) {
        let Store::Postgres(store) = &self.store else {
            return;
        };
        if std::mem::replace(&mut core.watched, true) {
            return;
        }
        let lane = Arc::downgrade(self);
        store.watch(
            self.name.throttle_key.clone(),
            self.above.is_none(),
            Box::new(move |text| {
                let Some(lane) = lane.upgrade() else {
                    return false;
                };
                lane.heard(text);
                let mut core = lane.lock();
                core.watched = lane.above.is_none() || !core.tracker.is_neutral();
                core.watched
            }),
        );
    }

    pub(super) fn below(&self) -> MutexGuard<'_, Vec<Weak<Lane>>> {
        self.below.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the lanes below look at what is paused here.
    fn tell_below(&self) {
        let below: Vec<_> = self.below().iter().filter_map(Weak::upgrade).collect();
        for lane in below {
            lane.with_pacer(|_, _| {});
        }
    }

    pub(super) fn moment(&self, now: LocalTime) -> Moment {
        let offset = match &self.store {
            Store::Memory(_) => Some(0),
            Store::Postgres(store) => store
                .with_clock(|clock| clock.to_store(now, now))
                .map(|there| there.0.saturating_sub(now.0)),
        };
        Moment { now, offset }
    }

    /// One line for each change of what is in force, whichever replica it began with.
    fn tell(&self, before: Regime, regime: Regime, now: LocalTime) {
        let cursor = self.cursor();
        let destination = &*self.name.destination;
        if regime.multiplier != before.multiplier {
            let multiplier = regime.multiplier;
            if multiplier > before.multiplier {
                tracing::warn!(
                    cursor,
                    multiplier,
                    "throttled: the destination asks for less, and every replica multiplies the interval"
                );
            } else {
                tracing::info!(cursor, multiplier, "the throttle lets go");
            }
        }
        let cause = |r: Regime| r.halt.map(|h| h.cause);
        let Some(halt) = regime.halt else {
            if let Some(halt) = before.halt {
                tracing::info!(cursor, after = halt.cause.word(), "requests go out again");
            }
            return;
        };
        // What a reader of the row makes of one instant on its own clock differs a little each time.
        let same = |until: LocalTime| (0..SECOND).contains(&until.since(halt.until));
        if cause(before) == Some(halt.cause) && before.halt.is_some_and(|b| same(b.until)) {
            return;
        }
        let rest_s = seconds(halt.until.since(now)).ceil();
        match halt.cause {
            Cause::Hold => tracing::warn!(
                cursor,
                rest_s,
                "the destination asked for a pause with Retry-After: nothing is sent for so long"
            ),
            Cause::Lockout(status) => tracing::warn!(
                cursor,
                status,
                rest_s,
                "locked out: the destination forbade several URLs; its requests are refused for so long, or until `paceline unlock {destination}`"
            ),
            Cause::Pause => tracing::warn!(
                cursor,
                rest_s,
                "paused by an operator: requests are refused for so long, or until `paceline resume {destination}`"
            ),
        }
    }

    /// Brings the pacer under what the throttle has in force.
    pub(super) fn regulate(&self, core: &mut Core, now: LocalTime) {
        if core.tracker.is_due(now) {
            core.tracker.lapse(self.moment(now));
        }
        let mut episode = core.tracker.episode();
        match &self.store {
            Store::Memory(_) => core.tracker.settle_alone(self.moment(now)),
            Store::Postgres(store) if core.course.is_alone() => {
                if !store.membership().has_read() {
                    core.tracker.count_alone(self.moment(now));
                }
            }
            Store::Postgres(_) => episode = core.tracker.row_episode(),
        }
        let mut regime = core.tracker.regime(now);
        if regime != core.told {
            self.tell(core.told, regime, now);
            core.told = regime;
        }
        self.widened.store(regime.multiplier > 1, Relaxed);
        if regime.halt.is_none_or(|h| h.cause == Cause::Hold)
            && let Some(above) = &self.above
        {
            // Locked from below to above, never the other way round.
            let above = above.lock().tracker.halt(now);
            regime.halt = above.filter(|h| h.cause == Cause::Pause).or(regime.halt);
        }
        core.pacer.regulate(now, regime, episode);
    }
}

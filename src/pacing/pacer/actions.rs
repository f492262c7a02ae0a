//! What a pacer wants done at an instant, and when it will want more: dispatches first, then refusals, connections, and
//! slots.

use super::{Action, Cause, Dispatched, Id, Pacer, Waiter};
use crate::pacing::{
    cursor::{Ask, furthest, held, horizon},
    time::{LocalTime, MILLISECOND, Nanos, SECOND},
};

/// How often at most the waits that were promised are looked at again.
const REASSESS_EVERY: Nanos = 250 * MILLISECOND;

impl Pacer {
    /// What to do next, or `None` until [`Pacer::wake_at`] or the next event.
    pub fn next_action(&mut self, now: LocalTime) -> Option<Action> {
        self.drop_useless_slots(now);
        // A request is late after its deadline, not at it: a slot at that very instant still serves it.
        self.refuse_late(LocalTime(now.0.saturating_sub(1)), now);
        if let Some(dispatch) = self.dispatch(now) {
            return Some(dispatch);
        }
        self.refuse_late(now, now);
        self.refuse_closed(now);
        self.refuse_hopeless(now);
        if let Some(refuse) = self.outbox.pop_front() {
            return Some(refuse);
        }
        self.connect(now).or_else(|| self.reserve(now))
    }

    /// When [`Pacer::next_action`] may have something new without an event. Always later than the last call of it, once
    /// that has returned `None`: what waits for something else than time must not keep the shell awake.
    pub fn wake_at(&self) -> Option<LocalTime> {
        let may_send = !self.dials.ready().is_empty() && self.has_room(0);
        let slot = self.slots.front().filter(|_| may_send).map(|s| s.at);
        let deadline = self.deadlines.first().map(|(t, _)| *t);
        let wants = !self.reserving && self.slots_wanted() > 0;
        let store = self.retry_store_at.filter(|_| wants);
        let halt = self.regime.halt.filter(|_| wants).map(|h| h.until);
        let slow = self.dials.wake_at();
        let store = [store, halt].into_iter().flatten().max();
        [slot, deadline, store, slow].into_iter().flatten().min()
    }

    pub(super) fn drop_useless_slots(&mut self, now: LocalTime) {
        while self.slots.front().is_some_and(|s| now > s.until) {
            self.slots.pop_front();
            self.void(1);
        }
        // Further ahead than any can honestly be: the cursor behind it will not be believed either.
        let furthest = furthest(self.interval(), self.horizon());
        let honest = now.plus(furthest).plus(SECOND);
        if self.slots.front().is_some_and(|s| s.at > honest) {
            self.void(self.slots.len());
            self.slots.clear();
            self.last_slot = None;
        }
    }

    /// Counts slots that pass unused. The gap they leave says nothing about the pace of the others.
    pub(super) fn void(&mut self, slots: usize) {
        self.voided += slots as u64;
        self.busy_since = None;
    }

    pub(super) fn dispatch(&mut self, now: LocalTime) -> Option<Action> {
        let slot = *self
            .slots
            .front()
            .filter(|s| s.at <= now && self.has_room(0))?;
        let place = *self.dials.ready().first()?;
        let id = *self.by_place.get(&place)?;
        let Waiter {
            client,
            deadline,
            patience,
            target,
            ..
        } = *self.waiters.get(&id)?;
        self.slots.pop_front();
        self.remove(id, true);
        self.in_flight += 1;
        self.last_dispatch = Some(now);
        if let Some(before) = self.busy_since {
            // One long gap (a pause, a foreign burst) must not make the whole queue look hopeless.
            let gap = slot.at.since(before).min(self.spacing.saturating_mul(4));
            self.spacing = (self.spacing + (gap - self.spacing) / 4).max(self.interval());
        }
        self.busy_since = (!self.line.is_empty()).then_some(slot.at);
        Some(Action::Dispatch(
            Dispatched {
                id,
                place,
                client,
                deadline,
                patience,
                target,
            },
            slot,
        ))
    }

    /// Refuses those whose deadline is at or before `late`.
    pub(super) fn refuse_late(&mut self, late: LocalTime, now: LocalTime) {
        while let Some(&(_, id)) = self.deadlines.first().filter(|(t, _)| *t <= late) {
            let patience = self.waiters.get(&id).map_or(0, |w| w.patience);
            self.remove(id, false);
            let cause = if self.store_away {
                Cause::StoreAway
            } else {
                Cause::WaitTooLong
            };
            let refusal = self.refusal(now, cause, patience);
            self.outbox.push_back(Action::Refuse(id, refusal));
        }
    }

    /// Refuses all that wait, if the destination is locked or paused.
    pub(super) fn refuse_closed(&mut self, now: LocalTime) {
        if self.line.is_empty() {
            return;
        }
        let Some(refusal) = self.closed(now) else {
            return;
        };
        let all: Vec<Id> = self.waiters.keys().copied().collect();
        for id in all {
            self.remove(id, false);
            self.outbox.push_back(Action::Refuse(id, refusal));
        }
    }

    /// Refuses, now and then, those that were promised a slot in time and clearly will not have one.
    pub(super) fn refuse_hopeless(&mut self, now: LocalTime) {
        if now < self.reassess_at || self.line.is_empty() {
            return;
        }
        self.reassess_at = now.plus(REASSESS_EVERY);
        let mut hopeless = Vec::new();
        for (rank, place) in self.line.iter().enumerate() {
            let Some(id) = self.by_place.get(&place).copied() else {
                continue;
            };
            let Some(w) = self.waiters.get(&id) else {
                continue;
            };
            // A promise is broken only when it is clearly lost: the pace of the last slots is an estimate.
            let doubt = self.spacing.max(w.deadline.since(now) / 10);
            if self.predicted(now, rank - hopeless.len()) > w.deadline.plus(doubt) {
                hopeless.push((id, w.patience));
            }
        }
        for (id, patience) in hopeless {
            self.remove(id, false);
            let refusal = self.refusal(now, Cause::WaitTooLong, patience);
            self.outbox.push_back(Action::Refuse(id, refusal));
        }
    }

    /// Tells requests to connect: the first in line always, and others behind them while too few are ready, because
    /// the connections of the first are slow.
    pub(super) fn connect(&mut self, now: LocalTime) -> Option<Action> {
        let ahead = self.dials.ahead(self.interval());
        let window = self.slots.len().max(self.reach) + ahead;
        let place = self.dials.next(now, window)?;
        let id = *self.by_place.get(&place)?;
        let w = self.waiters.get_mut(&id)?;
        w.stage = self.dials.tell(now, place, w.target);
        Some(Action::Connect(id))
    }

    pub(super) fn reserve(&mut self, now: LocalTime) -> Option<Action> {
        let retry = self.retry_store_at.is_some_and(|t| now < t);
        if self.reserving || retry || self.held_until(now).is_some() {
            return None;
        }
        let wanted = self.slots_wanted();
        if wanted == 0 {
            return None;
        }
        self.reserving = true;
        self.retry_store_at = None;
        Some(Action::Reserve(Ask {
            slots: u32::try_from(wanted).unwrap_or(u32::MAX),
            interval: self.interval(),
            lead: 0,
            floor: self.floor,
            horizon: self.horizon(),
            disbelieved: None,
            held: match self.floor_is_carried {
                // It was made good already what others may hold, and the cursor is of another time: it is not lost.
                true => 0,
                false => held(self.interval(), self.others_hold()),
            },
        }))
    }

    /// How many more slots could be used now: never more than are ready, than the round trip needs, than may be under way.
    pub(super) fn slots_wanted(&self) -> usize {
        let room = self
            .settings
            .max_in_flight
            .map_or(usize::MAX, |m| m.saturating_sub(self.in_flight));
        let usable = self.dials.ready().len().min(self.reach).min(room);
        usable.saturating_sub(self.slots.len())
    }

    /// For how many slots from now on others may hold them: their round trips are much like ours, and the last of them
    /// lasts until its end.
    pub(crate) fn others_hold(&self) -> usize {
        match usize::try_from(self.shares).unwrap_or(usize::MAX) {
            0 | 1 => 0,
            n => (n - 1).saturating_mul(self.reach).saturating_add(1),
        }
    }

    pub(super) fn horizon(&self) -> Nanos {
        horizon(self.interval(), self.shares)
    }

    pub(super) fn has_room(&self, more: usize) -> bool {
        self.settings
            .max_in_flight
            .is_none_or(|m| self.in_flight + more < m)
    }
}

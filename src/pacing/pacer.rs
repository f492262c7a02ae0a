//! When each waiting request goes out: the state machine of one cursor in one replica.
//!
//! It knows who waits, whose connection is ready, which slots are held and what the store last said; it answers with
//! [`Action`]s. Slots are reserved just in time, given at their instant to the first in line that is ready, and void
//! once their grace has passed. It reads no clock and does no I/O: `now` is an argument, and the shell
//! (`pacing/lane.rs`, or the simulation) carries the actions out.

mod actions;
mod dials;
mod promise;
mod terms;

use std::collections::{BTreeSet, VecDeque};

use rustc_hash::FxHashMap;

use self::dials::{Dials, Stage};
pub use self::terms::{Action, Arrival, Cause, Dispatched, Id, Refusal, Settings, Slot, Target};
use crate::pacing::{
    clock::ClockBounds,
    cursor::{Granted, held},
    queue::{Client, Line, Place},
    throttle::Regime,
    time::{LocalTime, MILLISECOND, Nanos, SECOND, StoreTime},
};

/// Whoever reaches the store has seen a step of its clock this long after it: with a heartbeat, the next after a second,
/// which is given up a second later.
const STEP_SEEN_WITHIN: Nanos = 2_200 * MILLISECOND;

/// The state machine. See the module's text.
#[derive(Debug)]
pub struct Pacer {
    settings: Settings,
    line: Line,
    waiters: FxHashMap<Id, Waiter>,
    by_place: FxHashMap<Place, Id>,
    dials: Dials,
    deadlines: BTreeSet<(LocalTime, Id)>,
    slots: VecDeque<Slot>,
    /// Slots that may be held at once: what the store's round trip needs.
    reach: usize,
    reserving: bool,
    store_away: bool,
    retry_store_at: Option<LocalTime>,
    floor: Option<StoreTime>,
    /// The floor is what was known before a step of the store's clock, and no cursor has been seen since.
    floor_is_carried: bool,
    /// The steps of the store's clock that were taken notice of.
    clock_steps: Option<u64>,
    not_before: LocalTime,
    regime: Regime,
    /// The episode of the slots that are granted now.
    episode: u64,
    in_flight: usize,
    last_slot: Option<LocalTime>,
    last_dispatch: Option<LocalTime>,
    /// The slot used last, if others have been waiting ever since.
    busy_since: Option<LocalTime>,
    /// How far apart this replica's own slots come while requests wait; at least the interval.
    spacing: Nanos,
    promise: LocalTime,
    reassess_at: LocalTime,
    outbox: VecDeque<Action>,
    voided: u64,
    next_id: Id,
}

#[derive(Debug)]
struct Waiter {
    place: Place,
    client: Client,
    deadline: LocalTime,
    /// From arrival to deadline.
    patience: Nanos,
    target: Target,
    stage: Stage,
}

impl Pacer {
    /// A pacer that has seen nothing.
    pub fn new(settings: Settings) -> Self {
        Pacer {
            settings,
            line: Line::default(),
            waiters: FxHashMap::default(),
            by_place: FxHashMap::default(),
            dials: Dials::default(),
            deadlines: BTreeSet::new(),
            slots: VecDeque::new(),
            reach: 1,
            reserving: false,
            store_away: false,
            retry_store_at: None,
            floor: None,
            floor_is_carried: false,
            clock_steps: None,
            not_before: LocalTime(Nanos::MIN),
            regime: Regime::default(),
            episode: 0,
            in_flight: 0,
            last_slot: None,
            last_dispatch: None,
            busy_since: None,
            spacing: settings.interval,
            promise: LocalTime(Nanos::MIN),
            reassess_at: LocalTime(Nanos::MIN),
            outbox: VecDeque::new(),
            voided: 0,
            next_id: 0,
        }
    }

    /// Takes a request into the queue, or refuses it at once when its slot would come after its deadline.
    pub fn arrive(&mut self, now: LocalTime, arrival: Arrival) -> Result<Id, Refusal> {
        let Arrival {
            client,
            urgency,
            deadline,
            target,
        } = arrival;
        let patience = deadline.since(now).max(0);
        if let Some(refusal) = self.closed(now) {
            return Err(refusal);
        }
        if self.line.len() >= self.settings.queue_limit {
            return Err(self.refusal(now, Cause::QueueFull, patience));
        }
        if self.line.is_empty() {
            // What was learnt of the pace of a queue that is gone says nothing about this one.
            self.spacing = self.interval();
            self.busy_since = None;
        }
        let predicted = self.predicted(now, self.line.rank_of_next(client, urgency));
        if predicted.plus(self.margin()) > deadline {
            return Err(self.refusal(now, Cause::WaitTooLong, patience));
        }
        let id = self.next_id;
        self.next_id += 1;
        let place = self.line.join(client, urgency);
        self.stand(
            id,
            Waiter {
                place,
                client,
                deadline,
                patience,
                target,
                stage: Stage::Far,
            },
        );
        Ok(id)
    }

    /// The upstream connection of `id` is ready; it was `dialled`, or had been kept from a request before.
    pub fn ready(&mut self, now: LocalTime, id: Id, dialled: bool) {
        if let Some(w) = self.waiters.get_mut(&id) {
            let (place, target) = (w.place, w.target);
            w.stage = self.dials.connected(now, place, target, w.stage, dialled);
        }
    }

    /// The upstream connection of `id` was lost; it keeps its place while it makes another.
    pub fn unready(&mut self, now: LocalTime, id: Id) {
        if let Some(w) = self.waiters.get_mut(&id)
            && w.stage == Stage::Ready
        {
            w.stage = self.dials.lost(now, w.place, w.target);
        }
    }

    /// `id` has left the queue: its client is gone, or its connection could not be made. It spends nothing.
    pub fn leave(&mut self, id: Id) {
        self.remove(id, false);
    }

    /// The request that [`Action::Dispatch`] named never went out. Its slot goes to the next in line if it is fresh;
    /// with `again` the request itself goes back to its place, its connection `ready` or not.
    pub fn undispatched(
        &mut self,
        now: LocalTime,
        who: Dispatched,
        slot: Slot,
        again: Option<bool>,
    ) {
        self.in_flight = self.in_flight.saturating_sub(1);
        if slot.is_fresh(now) {
            self.slots.push_front(slot);
        } else {
            self.void(1);
        }
        if let Some(ready) = again {
            self.rejoin(now, who, ready);
        }
    }

    /// A request that was sent is to be sent again, on a slot of its own: it goes back to its old place, ahead of those
    /// that came after it, and has to make a connection.
    pub fn again(&mut self, now: LocalTime, who: Dispatched) {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.rejoin(now, who, false);
    }

    /// Whether a request that was sent would have another slot in time.
    pub fn may_again(&self, now: LocalTime, who: &Dispatched) -> bool {
        let in_time = self.predicted(now, 0).plus(self.margin()) <= who.deadline;
        in_time && self.closed(now).is_none()
    }

    fn rejoin(&mut self, now: LocalTime, who: Dispatched, ready: bool) {
        let Dispatched {
            id,
            place,
            client,
            deadline,
            patience,
            target,
        } = who;
        self.line.rejoin(place, client);
        self.stand(
            id,
            Waiter {
                place,
                client,
                deadline,
                patience,
                target,
                stage: Stage::Far,
            },
        );
        if let Some(w) = self.waiters.get_mut(&id) {
            w.stage = match ready {
                true => self.dials.connected(now, place, target, w.stage, false),
                false => self.dials.tell(now, place, target),
            };
        }
    }

    /// So many dispatched requests have ended, however.
    pub fn finished(&mut self, requests: usize) {
        self.in_flight = self.in_flight.saturating_sub(requests);
    }

    /// The store answered a reservation; `clock` has already taken the call in.
    pub fn granted(&mut self, now: LocalTime, granted: Granted, clock: &ClockBounds) {
        if self.take(now, granted, clock, false) {
            self.floor_is_carried = false;
            self.raise_floor(granted.end());
        }
    }

    /// A slot of this replica's own share. It was never on the cursor, so the floor rises only if it is used: see
    /// [`Pacer::departed`].
    pub fn granted_alone(&mut self, now: LocalTime, granted: Granted, clock: &ClockBounds) {
        self.take(now, granted, clock, true);
        // Its instants are known beforehand: none needs to be held ahead, and what is held is lost when the store returns.
        self.reach = 1;
    }

    /// A request goes out in `slot`: one of our own share, once used, counts against the cursor too.
    pub fn departed(&mut self, slot: &Slot) {
        if slot.alone {
            self.raise_floor(slot.start.plus(slot.interval));
        }
    }

    /// Nothing before `end` is to be reserved any more.
    pub fn raise_floor(&mut self, end: StoreTime) {
        self.floor = self.floor.max(Some(end));
    }

    /// Slots of this replica's own share are not to be used any more: the others no longer leave room for them.
    pub fn discard_alone(&mut self) {
        let before = self.slots.len();
        self.slots.retain(|s| !s.alone);
        if self.slots.len() < before {
            self.void(before - self.slots.len());
            self.last_slot = self.slots.back().map(|s| s.at);
        }
    }

    /// Takes notice of what `clock` saw: once it has stepped, slots of before lie on a time scale that is gone. To be asked
    /// whenever the clock is at hand, so that others can count on it.
    ///
    /// What is known of that time is carried over: an interval passes after what this replica sent last, and what others
    /// hold of it lasts until they have seen the step too. Both count from then, and not from now.
    pub fn look(&mut self, now: LocalTime, clock: &ClockBounds) {
        if self.clock_steps == Some(clock.steps()) {
            return;
        }
        self.clock_steps = Some(clock.steps());
        let Some(step) = clock.last_step() else {
            return;
        };
        self.void(self.slots.len());
        self.slots.clear();
        self.last_slot = None;
        let others = held(self.interval(), self.others_hold()).min(STEP_SEEN_WITHIN);
        let others = step.at.plus(others);
        self.not_before = self
            .last_dispatch
            .map_or(others, |t| others.max(t.plus(self.interval())));
        let carried = clock.to_store(self.not_before, now);
        let carried = carried.filter(|_| self.not_before > now);
        self.floor_is_carried = carried.is_some();
        // A small step may have been seen long after it: what is known is of the new time then.
        let kept = self.floor.filter(|_| step.by.abs() <= SECOND);
        self.floor = carried.max(kept);
    }

    /// Takes what was granted, unless it is of a time that is gone.
    fn take(&mut self, now: LocalTime, granted: Granted, clock: &ClockBounds, alone: bool) -> bool {
        self.reserving = false;
        self.store_away = false;
        self.retry_store_at = None;
        self.look(now, clock);
        let here = clock.to_store(now, now);
        if here.is_some_and(|here| granted.now.since(here) > SECOND) {
            // The clock was set back while the reply was under way.
            self.void(granted.slots as usize);
            return false;
        }
        let grace = grace(granted.interval);
        // What this call taught about the clock holds for the slots held before, too.
        for slot in &mut self.slots {
            if let Some(at) = clock.to_local(slot.start, now) {
                slot.opens_at(at);
            }
        }
        let mut start = granted.start;
        for _ in 0..granted.slots {
            let at = clock.to_local(start, now).unwrap_or(now);
            // The clock may have been told more exactly since the floor was carried over.
            let early = self.not_before.since(at) > MILLISECOND;
            if early || self.regime.halt.is_some_and(|h| at < h.until) {
                self.void(1);
            } else {
                self.slots.push_back(Slot {
                    start,
                    at,
                    until: at.plus(grace),
                    interval: granted.interval,
                    alone,
                    episode: self.episode,
                });
            }
            start = start.plus(granted.interval);
        }
        let last = self.slots.back().map(|s| s.at);
        if last.is_some_and(|t| t > self.predicted(now, 0).plus(SECOND)) {
            // Far later than was promised (a pause, a foreign queue): those that wait should know at once.
            self.reassess_at = LocalTime(Nanos::MIN);
        }
        self.last_slot = last;
        // A call is made when the one before has been answered: what is held then must last for that call, and at its end
        // for the way there and the lead, or the cursor would be pushed past slots that nobody uses. Half a round trip is
        // for ways that take longer than usual.
        let ahead = clock.round_trip().saturating_mul(2);
        let need = ahead.saturating_add(clock.lead()) / granted.interval.max(1) + 1;
        self.reach = usize::try_from(need).unwrap_or(usize::MAX).max(1);
        true
    }

    /// The store answered a reservation without slots, because the throttle had changed: it may be asked again.
    pub fn asks_again(&mut self) {
        self.reserving = false;
        self.store_away = false;
        self.retry_store_at = None;
    }

    /// The store did not answer a reservation; it may be asked again at `retry_at`.
    pub fn failed(&mut self, retry_at: LocalTime) {
        self.reserving = false;
        self.store_away = true;
        self.retry_store_at = Some(retry_at);
        self.busy_since = None;
    }

    /// A new configuration: what is queued stays queued, and slots already held stay held, unless they lie beyond the
    /// new horizon. (Else one slot of a daily pace would hold a faster one back for a day.)
    pub fn reconfigure(&mut self, settings: Settings) {
        // What part of the cursor others take was learnt at the old pace, and is as true at the new one.
        let before = i128::from(self.settings.interval.max(1));
        let scaled = i128::from(self.spacing) * i128::from(settings.interval) / before;
        self.settings = settings;
        self.spacing = Nanos::try_from(scaled)
            .unwrap_or(Nanos::MAX)
            .max(self.interval());
        self.busy_since = None;
        self.reassess_at = LocalTime(Nanos::MIN);
    }

    /// A new regime of the throttle, and the `episode` of the slots that are granted from now on. Slots held that lie
    /// before the end of a halt are void, and with a lockout or an operator's pause the queue is refused.
    pub fn regulate(&mut self, now: LocalTime, regime: Regime, episode: u64) {
        self.episode = episode;
        if regime == self.regime {
            return;
        }
        if regime.multiplier < self.regime.multiplier {
            // What was learnt of the pace was learnt of a slower one.
            self.spacing = Nanos::MIN;
            self.busy_since = None;
        }
        self.regime = regime;
        self.spacing = self.spacing.max(self.interval());
        self.reassess_at = LocalTime(Nanos::MIN);
        if let Some(halt) = regime.halt.filter(|h| h.until > now) {
            let before = self.slots.len();
            self.slots.retain(|s| s.at >= halt.until);
            self.void(before - self.slots.len());
            self.last_slot = self.slots.back().map(|s| s.at);
        }
    }

    /// What the interval is multiplied by.
    pub fn multiplier(&self) -> u32 {
        self.regime.multiplier.max(1)
    }

    fn stand(&mut self, id: Id, mut waiter: Waiter) {
        waiter.stage = self.dials.wait(waiter.place, waiter.target);
        self.by_place.insert(waiter.place, id);
        self.deadlines.insert((waiter.deadline, id));
        self.waiters.insert(id, waiter);
    }

    fn remove(&mut self, id: Id, served: bool) {
        let Some(w) = self.waiters.remove(&id) else {
            return;
        };
        self.by_place.remove(&w.place);
        self.dials.leave(w.place, w.target, w.stage);
        self.deadlines.remove(&(w.deadline, id));
        self.line.leave(w.place, w.client, served);
    }

    /// How many requests wait.
    pub fn waiting(&self) -> usize {
        self.line.len()
    }

    /// How many dispatched requests have not ended.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Slots that passed unused, so far.
    pub fn voided(&self) -> u64 {
        self.voided
    }

    /// Whether there is nothing to wait for: no request, no slot, no reservation under way.
    pub fn is_idle(&self) -> bool {
        self.line.is_empty() && !self.reserving && self.in_flight == 0
    }

    /// How many slots may be held at once: what the store's round trip needs.
    pub fn reach(&self) -> usize {
        self.reach
    }

    /// The highest slot end known.
    pub fn floor(&self) -> Option<StoreTime> {
        self.floor
    }

    /// What stays the same.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }
}

/// How long after its slot a request may still leave. Gaps between requests can be that much shorter than the interval.
pub fn grace(interval: Nanos) -> Nanos {
    (interval / 4).clamp(10 * MILLISECOND, 50 * MILLISECOND)
}

#[cfg(test)]
mod tests;

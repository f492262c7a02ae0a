//! When each waiting request goes out: the state machine of one cursor in one replica.
//!
//! It knows who waits, whose connection is ready, which slots are held and what the store last said; it answers with
//! [`Action`]s. Slots are reserved just in time, given at their instant to the first in line that is ready, and void
//! once their grace has passed. It reads no clock and does no I/O: `now` is an argument, and the shell
//! (`pacing/lane.rs`, or the simulation) carries the actions out.

use std::collections::{BTreeSet, HashMap, VecDeque};

use crate::pacing::{
    clock::ClockBounds,
    cursor::{Ask, Granted, held, horizon},
    queue::{Client, Line, Place, Urgency},
    throttle::{self, Halt, Regime},
    time::{LocalTime, MILLISECOND, Nanos, SECOND, StoreTime},
};

/// How many requests beyond the slots held may have a ready connection.
const READY_AHEAD: usize = 2;
/// A connection that is not ready after this long no longer counts as nearly ready: the next in line makes one too.
const SLOW_CONNECT: Nanos = 200 * MILLISECOND;
/// Requests that may be making a connection at once.
const CONNECTING_LIMIT: usize = 64;
/// How often at most the waits that were promised are looked at again.
const REASSESS_EVERY: Nanos = 250 * MILLISECOND;
/// A refused client is never told to come back later than this after the queue itself has room.
const PROMISE_CAP: Nanos = 60 * SECOND;

/// Names one waiting request.
pub type Id = u64;

/// What stays the same while requests come and go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Interval between slots, as configured.
    pub interval: Nanos,
    /// Requests that may be under way at once; `None` is no limit.
    pub max_in_flight: Option<usize>,
    /// Requests that may wait at once.
    pub queue_limit: usize,
    /// Replicas that may share the cursor, for its horizon.
    pub max_replicas: u32,
}

/// A request that arrives.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// Whom to be fair to.
    pub client: Client,
    /// RFC 9218 urgency.
    pub urgency: Urgency,
    /// When it must have been dispatched.
    pub deadline: LocalTime,
}

/// An instant at which exactly one request may be dispatched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// On the store's clock.
    pub start: StoreTime,
    /// The same on ours, never early.
    pub at: LocalTime,
    /// The last instant at which it may be used.
    pub until: LocalTime,
    /// The interval to the next slot that anybody may use.
    pub interval: Nanos,
    /// Whether it is one of this replica's own share, which was never on the cursor.
    pub alone: bool,
    /// The episode of the throttle in which it was granted.
    pub episode: u64,
}

impl Slot {
    /// Whether a request may still go out in it.
    pub fn is_fresh(&self, now: LocalTime) -> bool {
        self.at <= now && now <= self.until
    }
}

/// What the shell has to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// This request is near: make its upstream connection ready, then call [`Pacer::ready`].
    Connect(Id),
    /// Send this request now, in this slot; it has left the queue.
    Dispatch(Dispatched, Slot),
    /// Answer this request with a refusal; it has left the queue.
    Refuse(Id, Refusal),
    /// Ask the store for slots, then call [`Pacer::granted`] or [`Pacer::failed`].
    Reserve(Ask),
}

/// Why a request is not sent, and when to come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The cause.
    pub cause: Cause,
    /// After how long a new try will find a slot within its deadline, as far as can be told.
    pub retry_after: Nanos,
}

/// The cause of a [`Refusal`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Its slot would come after its deadline.
    WaitTooLong,
    /// Its deadline passed while the store could not be reached.
    StoreAway,
    /// As many requests wait as may.
    QueueFull,
    /// The destination has locked us out, with this status.
    LockedOut(u16),
    /// An operator has paused the destination.
    Paused,
}

/// The state machine. See the module's text.
#[derive(Debug)]
pub struct Pacer {
    settings: Settings,
    line: Line,
    waiters: HashMap<Id, Waiter>,
    by_place: HashMap<Place, Id>,
    /// Told to connect (ready or not), of those the ready ones, and those not yet told.
    near: BTreeSet<Place>,
    ready: BTreeSet<Place>,
    far: BTreeSet<Place>,
    /// Those told to connect less than [`SLOW_CONNECT`] ago and not ready, by when they were told.
    young: BTreeSet<(LocalTime, Place)>,
    deadlines: BTreeSet<(LocalTime, Id)>,
    slots: VecDeque<Slot>,
    /// Slots that may be held at once: what the store's round trip needs.
    reach: usize,
    reserving: bool,
    store_away: bool,
    retry_store_at: Option<LocalTime>,
    floor: Option<StoreTime>,
    clock_steps: u64,
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
    /// When it was told to connect; `None` before that and once it is ready.
    told_at: Option<LocalTime>,
}

/// A request that was given a slot, with what is needed to put it back if it does not use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dispatched {
    /// Which request.
    pub id: Id,
    place: Place,
    client: Client,
    deadline: LocalTime,
    patience: Nanos,
}

impl Pacer {
    /// A pacer that has seen nothing.
    pub fn new(settings: Settings) -> Self {
        Pacer {
            settings,
            line: Line::default(),
            waiters: HashMap::new(),
            by_place: HashMap::new(),
            near: BTreeSet::new(),
            ready: BTreeSet::new(),
            far: BTreeSet::new(),
            young: BTreeSet::new(),
            deadlines: BTreeSet::new(),
            slots: VecDeque::new(),
            reach: 1,
            reserving: false,
            store_away: false,
            retry_store_at: None,
            floor: None,
            clock_steps: 0,
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
                told_at: None,
            },
        );
        Ok(id)
    }

    /// The upstream connection of `id` is ready.
    pub fn ready(&mut self, id: Id) {
        if let Some(w) = self.waiters.get_mut(&id) {
            if let Some(told) = w.told_at.take() {
                self.young.remove(&(told, w.place));
            }
            self.far.remove(&w.place);
            self.near.insert(w.place);
            self.ready.insert(w.place);
        }
    }

    /// The upstream connection of `id` was lost; it keeps its place while it makes another.
    pub fn unready(&mut self, now: LocalTime, id: Id) {
        if let Some(w) = self.waiters.get_mut(&id)
            && self.ready.remove(&w.place)
        {
            w.told_at = Some(now);
            self.young.insert((now, w.place));
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
        } = who;
        self.line.rejoin(place, client);
        let told_at = (!ready).then_some(now);
        self.stand(
            id,
            Waiter {
                place,
                client,
                deadline,
                patience,
                told_at,
            },
        );
        self.far.remove(&place);
        self.near.insert(place);
        if ready {
            self.ready.insert(place);
        } else {
            self.young.insert((now, place));
        }
    }

    /// A dispatched request has ended, however.
    pub fn finished(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// The store answered a reservation; `clock` has already taken the call in.
    pub fn granted(&mut self, now: LocalTime, granted: Granted, clock: &ClockBounds) {
        self.take(now, granted, clock, false);
        self.raise_floor(granted.end());
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

    fn take(&mut self, now: LocalTime, granted: Granted, clock: &ClockBounds, alone: bool) {
        self.reserving = false;
        self.store_away = false;
        self.retry_store_at = None;
        if clock.steps() != self.clock_steps {
            // Slots of before lie on a time scale that is gone. What was sent on it still counts against the pace, and so
            // does what others still hold of it.
            self.clock_steps = clock.steps();
            self.void(self.slots.len());
            self.slots.clear();
            self.floor = None;
            let others = now.plus(held(self.interval(), self.others_hold()));
            self.not_before = self
                .last_dispatch
                .map_or(others, |t| others.max(t.plus(self.interval())));
        }
        let grace = (granted.interval / 4).clamp(10 * MILLISECOND, 50 * MILLISECOND);
        // What this call taught about the clock holds for the slots held before, too: one that was mapped late by a slow
        // reply would else stand in the way of those behind it.
        for slot in &mut self.slots {
            let sooner = clock
                .to_local(slot.start, now)
                .map_or(0, |at| slot.at.since(at).max(0));
            (slot.at, slot.until) = (slot.at.plus(-sooner), slot.until.plus(-sooner));
        }
        let mut start = granted.start;
        for _ in 0..granted.slots {
            let at = clock.to_local(start, now).unwrap_or(now);
            if at < self.not_before || self.regime.halt.is_some_and(|h| at < h.until) {
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
        // A call is made when the one before has been answered: what is held then must last for the way there and the
        // lead, or the cursor would be pushed past slots that nobody uses.
        let ahead = clock
            .round_trip()
            .saturating_mul(2)
            .saturating_add(clock.lead());
        let need = ahead / granted.interval.max(1) + 1;
        self.reach = usize::try_from(need).unwrap_or(usize::MAX).max(1);
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

    /// What a new request would be told, and each that waits, while the destination is locked or paused.
    fn closed(&self, now: LocalTime) -> Option<Refusal> {
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
    fn held_until(&self, now: LocalTime) -> Option<LocalTime> {
        let Halt { until, .. } = self.regime.halt?;
        (until > now).then_some(until)
    }

    /// The interval between slots that is in force.
    fn interval(&self) -> Nanos {
        self.settings
            .interval
            .saturating_mul(Nanos::from(self.regime.multiplier.max(1)))
    }

    /// What the interval is multiplied by.
    pub fn multiplier(&self) -> u32 {
        self.regime.multiplier.max(1)
    }

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
        let may_send = !self.ready.is_empty() && self.has_room(0);
        let slot = self.slots.front().filter(|_| may_send).map(|s| s.at);
        let deadline = self.deadlines.first().map(|(t, _)| *t);
        let wants = !self.reserving && self.slots_wanted() > 0;
        let store = self.retry_store_at.filter(|_| wants);
        let halt = self.regime.halt.filter(|_| wants).map(|h| h.until);
        let may_connect = !self.far.is_empty() && self.connecting() < CONNECTING_LIMIT;
        let slow = self.young.first().filter(|_| may_connect);
        let slow = slow.map(|(told, _)| told.plus(SLOW_CONNECT));
        let store = [store, halt].into_iter().flatten().max();
        [slot, deadline, store, slow].into_iter().flatten().min()
    }

    fn drop_useless_slots(&mut self, now: LocalTime) {
        while self.slots.front().is_some_and(|s| now > s.until) {
            self.slots.pop_front();
            self.void(1);
        }
        // Further ahead than any can honestly be: the cursor behind it will not be believed either.
        let honest = now.plus(self.horizon()).plus(SECOND);
        if self.slots.front().is_some_and(|s| s.at > honest) {
            self.void(self.slots.len());
            self.slots.clear();
            self.last_slot = None;
        }
    }

    /// Counts slots that pass unused. The gap they leave says nothing about the pace of the others.
    fn void(&mut self, slots: usize) {
        self.voided += slots as u64;
        self.busy_since = None;
    }

    fn dispatch(&mut self, now: LocalTime) -> Option<Action> {
        let slot = *self
            .slots
            .front()
            .filter(|s| s.at <= now && self.has_room(0))?;
        let place = *self.ready.first()?;
        let id = *self.by_place.get(&place)?;
        let Waiter {
            client,
            deadline,
            patience,
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
            },
            slot,
        ))
    }

    /// Refuses those whose deadline is at or before `late`.
    fn refuse_late(&mut self, late: LocalTime, now: LocalTime) {
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
    fn refuse_closed(&mut self, now: LocalTime) {
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
    fn refuse_hopeless(&mut self, now: LocalTime) {
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
    fn connect(&mut self, now: LocalTime) -> Option<Action> {
        while self
            .young
            .first()
            .is_some_and(|(told, _)| told.plus(SLOW_CONNECT) <= now)
        {
            self.young.pop_first();
        }
        let next = *self.far.first()?;
        if self.connecting() >= CONNECTING_LIMIT {
            return None;
        }
        let window = self.slots.len().max(self.reach) + READY_AHEAD;
        // All before it are near; mostly those are all that are near, and no count is needed.
        let rank = if self.near.last().is_none_or(|last| *last < next) {
            self.near.len()
        } else {
            self.near.range(..next).take(window).count()
        };
        if rank >= window && self.ready.len() + self.young.len() >= window {
            return None;
        }
        let id = *self.by_place.get(&next)?;
        self.waiters.get_mut(&id)?.told_at = Some(now);
        self.far.remove(&next);
        self.near.insert(next);
        self.young.insert((now, next));
        Some(Action::Connect(id))
    }

    /// How many requests are making a connection.
    fn connecting(&self) -> usize {
        self.near.len() - self.ready.len()
    }

    fn reserve(&mut self, now: LocalTime) -> Option<Action> {
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
            held: held(self.interval(), self.others_hold()),
        }))
    }

    /// How many more slots could be used now: never more than are ready, than the round trip needs, than may be under way.
    fn slots_wanted(&self) -> usize {
        let room = self
            .settings
            .max_in_flight
            .map_or(usize::MAX, |m| m.saturating_sub(self.in_flight));
        let usable = self.ready.len().min(self.reach).min(room);
        usable.saturating_sub(self.slots.len())
    }

    /// For how many slots from now on others may hold them: their round trips are much like ours, and the last of them
    /// lasts until its end.
    fn others_hold(&self) -> usize {
        match usize::try_from(self.settings.max_replicas).unwrap_or(usize::MAX) {
            0 | 1 => 0,
            n => (n - 1).saturating_mul(self.reach).saturating_add(1),
        }
    }

    fn horizon(&self) -> Nanos {
        horizon(self.interval(), self.settings.max_replicas)
    }

    fn has_room(&self, more: usize) -> bool {
        self.settings
            .max_in_flight
            .is_none_or(|m| self.in_flight + more < m)
    }

    fn stand(&mut self, id: Id, waiter: Waiter) {
        self.far.insert(waiter.place);
        self.by_place.insert(waiter.place, id);
        self.deadlines.insert((waiter.deadline, id));
        self.waiters.insert(id, waiter);
    }

    fn remove(&mut self, id: Id, served: bool) {
        let Some(w) = self.waiters.remove(&id) else {
            return;
        };
        self.by_place.remove(&w.place);
        self.far.remove(&w.place);
        self.near.remove(&w.place);
        self.ready.remove(&w.place);
        if let Some(told) = w.told_at {
            self.young.remove(&(told, w.place));
        }
        self.deadlines.remove(&(w.deadline, id));
        self.line.leave(w.place, w.client, served);
    }

    /// When the request that stands behind `rank` others will have its slot, as far as can be told.
    fn predicted(&self, now: LocalTime, rank: usize) -> LocalTime {
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
    fn margin(&self) -> Nanos {
        MILLISECOND + self.interval() / 1_000
    }

    /// A refusal whose `Retry-After` comes true. A request of this patience finds room once the queue has drained to
    /// what it can wait for; and each refused request is promised a later instant than the one before, one slot
    /// apart, so that all of them coming back as told do not meet the same full queue again.
    fn refusal(&mut self, now: LocalTime, cause: Cause, patience: Nanos) -> Refusal {
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

    /// The highest slot end known.
    pub fn floor(&self) -> Option<StoreTime> {
        self.floor
    }

    /// What stays the same.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }
}

#[cfg(test)]
mod tests;

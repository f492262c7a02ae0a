//! One replica: the pacer, its clock bounds and its clock, and what the shell around them keeps.
//!
//! The shell is the one of `pacing/lane.rs` without its tasks: calls with a time-out, timers that fire late, requests
//! that take a while to notice that it is their turn. What happens between replicas is the world's.

use std::collections::{BTreeMap, HashMap};

use paceline::pacing::{
    clock::ClockBounds,
    pacer::{Dispatched, Id, Pacer, Settings, Slot},
    throttle::{Moment, Rules, tracker::Tracker},
    time::{LocalTime, Nanos, SECOND, StoreTime},
};

use super::{
    clocks::{Clock, True},
    plan::Plan,
};

/// Few answers are enough for a recovery, so that histories need not be long.
pub const RULES: Rules = Rules {
    recovery_after: 6,
    lockout_after: 3,
    lockout_for: 900 * SECOND,
    retry_after_cap: 3 * SECOND,
};

/// The number of one request in one history.
pub type Request = usize;

#[derive(Debug)]
pub struct Replica {
    pub clock: Clock,
    pub bounds: ClockBounds,
    pub pacer: Pacer,
    pub tracker: Tracker,
    pub rules: Rules,
    /// The write of the throttle's row that is under way, and before when none is to be tried again.
    pub write: Option<u64>,
    pub write_from: LocalTime,
    /// Counts restarts: what was meant for an earlier life is dropped.
    pub life: u32,
    pub down: bool,
    pub suspended_until: True,
    pub outage_until: True,
    /// The timer that is set, and its number.
    pub armed: Option<LocalTime>,
    pub timer: u64,
    /// The call that is under way.
    pub call: Option<u64>,
    pub here: HashMap<Id, Request>,
    /// The slots of this life by their start, as indices into the store's account.
    pub slots: HashMap<StoreTime, usize>,
    /// Slots that the replies brought, and those that requests went out in.
    pub received: u64,
    pub used: u64,
    /// Having seen the clock step, the pacer may drop slots that open before this.
    pub drops_until: LocalTime,
    /// Slots that requests gave back.
    pub given_back: Nanos,
    /// The most slots the round trip ever called for.
    pub most_held: Nanos,
    /// The latest slot end known, and the number of the store's steps then.
    pub knows: Option<(StoreTime, u64)>,
    /// The shortest ways there and back of the calls so far, aged, and when that was; and what the last call took.
    pub ways: Option<(Nanos, Nanos, True)>,
    pub last_took: Nanos,
    pub waiting: BTreeMap<Request, bool>,
    pub ready: usize,
    /// The last instant at which nobody could have used a slot.
    pub idle_at: True,
    pub idle: bool,
    pub failed_until: LocalTime,
}

/// Where a request is.
#[derive(Clone, Copy, Debug)]
pub enum State {
    Waiting,
    /// It was given a slot and has not yet woken.
    Called(Dispatched, Slot),
    /// Dispatched, its exchange not ended.
    Out(Dispatched, Slot),
    Ended(End),
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Dispatched,
    Refused,
    Left,
    /// Its connection could not be made.
    Failed,
    /// Its replica was killed.
    Killed,
}

impl Replica {
    pub fn new(clock: Clock, settings: Settings, rules: Rules) -> Self {
        Replica {
            clock,
            bounds: ClockBounds::default(),
            pacer: Pacer::new(settings),
            tracker: Tracker::new(rules),
            rules,
            write: None,
            write_from: LocalTime(Nanos::MIN),
            life: 0,
            down: false,
            suspended_until: 0,
            outage_until: 0,
            armed: None,
            timer: 0,
            call: None,
            here: HashMap::new(),
            slots: HashMap::new(),
            received: 0,
            used: 0,
            drops_until: LocalTime(Nanos::MIN),
            given_back: 0,
            most_held: 1,
            knows: None,
            ways: None,
            last_took: 0,
            waiting: BTreeMap::new(),
            ready: 0,
            idle_at: 0,
            idle: true,
            failed_until: LocalTime(Nanos::MIN),
        }
    }

    /// The same machine with a new process: nothing is known but the time since boot.
    pub fn restarted(&self, t: True) -> Self {
        let settings = *self.pacer.settings();
        let fresh = Replica::new(self.clock, settings, self.rules);
        Replica {
            life: self.life + 1,
            timer: self.timer,
            outage_until: self.outage_until,
            idle_at: t,
            ..fresh
        }
    }

    pub fn now(&self, t: True) -> LocalTime {
        LocalTime(self.clock.read(t))
    }

    pub fn moment(&self, t: True) -> Moment {
        let now = self.now(t);
        let there = self.bounds.to_store(now, now);
        Moment {
            now,
            offset: there.map(|s| s.0 - now.0),
        }
    }

    /// Whether a slot could be used at once.
    pub fn can_send(&self) -> bool {
        let room = self
            .pacer
            .settings()
            .max_in_flight
            .is_none_or(|m| self.pacer.in_flight() < m);
        self.ready > 0 && room
    }

    /// Notes how long a call took, there and back.
    pub fn took(&mut self, t: True, there: Nanos, back: Nanos) {
        // A bound that was learnt is of less and less use: clocks drift apart.
        let age = |best: Nanos, at: True| best + (t - at) / 250;
        // Also on the way itself, and that counts as part of the way there.
        let (took, there) = (there + back, there + (there + back) / 600);
        self.ways = Some(match self.ways {
            Some((out, home, at)) => (age(out, at).min(there), age(home, at).min(back), t),
            None => (there, back, t),
        });
        self.last_took = took;
    }

    /// By how much slots may be mapped early and late now: half of the difference between the best ways, which are not
    /// shorter than the link.
    pub fn mapped_wrongly(&self, plan: &Plan, number: usize) -> (Nanos, Nanos) {
        let link = plan.one_way.start() + if number == 0 { plan.further } else { 0 };
        let (out, home, _) = self.ways.unwrap_or_default();
        let half = |way: Nanos| (way - link).max(0) / 2;
        // A step too small to be seen leaves bounds that are wrong by as much as the call took.
        let unseen = if plan.steps() { 2 * self.last_took } else { 0 };
        (half(out) + unseen, half(home) + unseen)
    }

    pub fn enqueue(&mut self, request: Request, ready: bool) {
        self.ready += usize::from(ready);
        self.waiting.insert(request, ready);
    }

    pub fn dequeue(&mut self, request: Request) {
        self.ready -= usize::from(self.waiting.remove(&request) == Some(true));
    }

    /// Sets whether the connection of a waiting request is ready; returns what it was.
    pub fn set_ready(&mut self, request: Request, ready: bool) {
        if let Some(old) = self.waiting.get_mut(&request) {
            self.ready = self.ready + usize::from(ready) - usize::from(*old);
            *old = ready;
        }
    }
}

//! The discrete-event loop: it lets a plan happen to a store and its replicas, and checks each step as it is made.
//!
//! Everything is drawn from the plan's seed and nothing reads a real clock, so the same seed gives the same history.

use std::{
    cmp::{Ordering, Reverse},
    collections::{BinaryHeap, VecDeque},
};

use paceline::pacing::{
    cursor::{Ask, Granted},
    pacer::{Refusal, Settings},
    throttle::{Rules, tracker::Write},
    time::{LocalTime, Nanos, SECOND, StoreTime},
};

use super::{
    clocks::{Clock, True},
    plan::{Fault, MICROSECOND, Plan},
    random::Random,
    replica::{End, RULES, Replica, Request, State},
    store::Store,
};

/// Timers fire at most this late.
const TIMER_LATENESS: Nanos = 100 * MICROSECOND;
/// How much of a failing history is shown.
const TRACE_KEPT: usize = 160;

/// A fault planted in the shell or the store, to see that the checks find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    Nothing,
    /// Each replica has a cursor of its own.
    CursorPerReplica,
    /// The floor is not told to the store.
    FloorUntold,
    /// A request that woke late goes out all the same.
    StaleSlotsUsed,
    /// The store's clock is taken to have been read when the reply arrived, or when the question left.
    ReadAtReceipt,
    ReadAtSending,
    /// A client that leaves when its turn has come takes the slot with it.
    LeaversKeepSlots,
    /// A refusal is not passed on.
    RefusalsForgotten,
    /// A reservation does not ask whether the pace has changed.
    PaceUnasked,
    /// Each protest widens, also one to a request of before.
    EachProtestWidens,
    /// Clean answers whose write had no reply are counted once more.
    CountsTwice,
}

#[derive(Clone, Debug)]
pub enum Event {
    NextArrival,
    Burst(usize),
    Arrive(Request),
    Leave(Request),
    Dialled(Request, u32, bool),
    LostReady(Request, u32),
    Woke(Request, u32),
    Recalled(Request, u32),
    Finished(Request, u32),
    /// A heartbeat leaves, reads the store's clock, is back.
    Beat(usize),
    BeatArrives(Call),
    Echo(Call, StoreTime, True),
    Timer(usize, u64),
    Asked {
        call: Call,
        ask: Ask,
        /// What the replica knows of the throttle's row.
        word: String,
        lost_reply: bool,
    },
    Replied {
        call: Call,
        granted: Option<Granted>,
        throttle: Option<String>,
        read: True,
        steps: u64,
        first: usize,
    },
    Written(Call, Write),
    Wrote(Call, Write, Option<String>),
    WriteTimedOut(Call),
    TimedOut(Call),
    Expired {
        replica: usize,
        life: u32,
        slot: usize,
        from: True,
        at: LocalTime,
        steps: u64,
    },
    Fault(Fault),
    Reconfigure(usize, Nanos),
    Restart(usize),
    ForeignTakes,
    ForeignSends(usize),
}

/// One call to the store.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    pub number: u64,
    pub replica: usize,
    pub life: u32,
    pub sent: LocalTime,
    pub sent_at: True,
}

#[derive(Clone, Debug)]
pub struct Journey {
    pub replica: usize,
    pub life: u32,
    pub client: u64,
    pub urgency: u8,
    pub target: u64,
    pub patience: Nanos,
    pub deadline: LocalTime,
    pub id: u64,
    pub state: State,
    /// Counts changes of state, so that what was scheduled for an earlier one is dropped.
    pub turn: u32,
    pub tries: u32,
    /// When it came to a replica.
    pub came_at: True,
    /// When it last came back to the queue.
    pub back_at: True,
    pub leaves: bool,
    pub refusal: Option<Refusal>,
}

pub struct World {
    pub plan: Plan,
    pub planted: Planted,
    pub random: Random,
    pub store: Store,
    pub replicas: Vec<Replica>,
    pub journeys: Vec<Journey>,
    /// Since when a replica that could send has not, and how long it may take; see `checks`.
    pub stalls: Vec<Option<(True, Nanos)>>,
    pub stalls_from: True,
    /// The latest episode of a request that met a protest.
    pub protested: Option<u64>,
    /// The multiplier and the episode in the row, and the clean answers that were heard since; and how many it took each time
    /// that the pace became less wide.
    pub pace: (u32, u64),
    pub heard: u32,
    pub recoveries: Vec<u32>,
    events: BinaryHeap<Reverse<Scheduled>>,
    scheduled: u64,
    pub calls: u64,
    trace: Option<VecDeque<String>>,
}

#[derive(Debug)]
struct Scheduled {
    at: True,
    number: u64,
    event: Event,
}

impl World {
    /// Runs a history to its end. With `traced`, the last events are kept for a person to read.
    pub fn run(plan: Plan, planted: Planted, traced: bool) -> (Self, Result<(), String>) {
        let mut world = World::new(plan, planted, traced);
        let outcome = world.unfold().and_then(|()| world.check_the_end());
        (world, outcome)
    }

    fn new(plan: Plan, planted: Planted, traced: bool) -> Self {
        let mut random = Random::new(plan.seed ^ 0x5eed);
        let clock = Clock {
            base: 1_700_000_000 * SECOND,
            ppm: random.within(-80..=80),
            slew: plan.slewed.0,
        };
        let apart = (planted == Planted::CursorPerReplica).then_some(plan.replicas);
        let settings = Settings {
            interval: plan.interval,
            max_in_flight: plan.max_in_flight,
            queue_limit: plan.queue_limit,
            shares: plan.shares,
        };
        let replicas = (0..plan.replicas)
            .map(|_| {
                let booted = random.within(SECOND..=1_000_000 * SECOND);
                Replica::new(
                    Clock {
                        base: booted,
                        ppm: random.within(-80..=80),
                        slew: plan.slewed.1,
                    },
                    settings,
                    Rules {
                        recovery_after: plan.recovery_after,
                        ..RULES
                    },
                )
            })
            .collect();
        let mut world = World {
            store: Store::new(clock, apart),
            replicas,
            journeys: Vec::new(),
            stalls: vec![None; plan.replicas],
            stalls_from: 0,
            protested: None,
            pace: (1, 0),
            heard: 0,
            recoveries: Vec::new(),
            events: BinaryHeap::new(),
            scheduled: 0,
            calls: 0,
            trace: traced.then(VecDeque::new),
            random,
            planted,
            plan,
        };
        if world.plan.load > 0 {
            world.schedule(0, Event::NextArrival);
        }
        for (at, count) in world.plan.bursts.clone() {
            world.schedule(at, Event::Burst(count));
        }
        for (at, fault) in world.plan.faults.clone() {
            world.schedule(at, Event::Fault(fault));
        }
        for replica in 0..world.plan.replicas {
            let at = world.random.within(0..=SECOND);
            world.schedule(at, Event::Beat(replica));
        }
        for _ in 0..world.plan.foreign {
            let at = world.random.within(0..=world.plan.interval);
            world.schedule(at, Event::ForeignTakes);
        }
        world
    }

    fn unfold(&mut self) -> Result<(), String> {
        let rounds = Nanos::from(self.plan.comebacks) + 1;
        let end = self.plan.span + rounds * (*self.plan.patience.end() + 120 * SECOND);
        while let Some(Reverse(Scheduled { at, event, .. })) = self.events.pop() {
            if at > end {
                return Err(format!("at {at} ns something still happens: {event:?}"));
            }
            if let Some(replica) = self.belongs_to(&event) {
                let until = self.replicas[replica].suspended_until;
                if until > at {
                    self.schedule(until, event);
                    continue;
                }
            }
            self.note(at, || format!("{event:?}"));
            self.happen(at, event)?;
        }
        Ok(())
    }

    /// Which replica's machine has to be awake for this to be noticed.
    fn belongs_to(&self, event: &Event) -> Option<usize> {
        match event {
            Event::Arrive(r)
            | Event::Leave(r)
            | Event::Dialled(r, ..)
            | Event::LostReady(r, _)
            | Event::Woke(r, _)
            | Event::Recalled(r, _)
            | Event::Finished(r, _) => Some(self.journeys[*r].replica),
            Event::Timer(replica, _)
            | Event::Beat(replica)
            | Event::Reconfigure(replica, _)
            | Event::Expired { replica, .. } => Some(*replica),
            Event::Replied { call, .. }
            | Event::Echo(call, ..)
            | Event::TimedOut(call)
            | Event::Wrote(call, ..)
            | Event::WriteTimedOut(call) => Some(call.replica),
            Event::NextArrival
            | Event::Burst(_)
            | Event::Asked { .. }
            | Event::BeatArrives(_)
            | Event::Written(..)
            | Event::Fault(_)
            | Event::Restart(_)
            | Event::ForeignTakes
            | Event::ForeignSends(_) => None,
        }
    }

    fn happen(&mut self, t: True, event: Event) -> Result<(), String> {
        match event {
            Event::NextArrival => {
                let mean = self.plan.interval * 1000 / Nanos::from(self.plan.load.max(1));
                let next = t + self.random.pause(mean);
                if next <= self.plan.span {
                    self.schedule(next, Event::NextArrival);
                }
                self.send_request(t);
                Ok(())
            }
            Event::Burst(count) => {
                (0..count).for_each(|_| self.send_request(t));
                Ok(())
            }
            Event::Arrive(r) => self.arrive(t, r),
            Event::Leave(r) => self.leave(t, r),
            Event::Dialled(r, turn, ok) => self.dialled(t, r, turn, ok),
            Event::LostReady(r, turn) => self.lost_ready(t, r, turn),
            Event::Woke(r, turn) => self.woke(t, r, turn),
            Event::Recalled(r, turn) => self.recalled(t, r, turn),
            Event::Finished(r, turn) => self.finished(t, r, turn),
            Event::Beat(replica) => {
                self.beat(t, replica);
                Ok(())
            }
            Event::BeatArrives(call) => {
                self.beat_arrives(t, call);
                Ok(())
            }
            Event::Echo(call, reading, read) => self.echo(t, call, reading, read),
            Event::Timer(replica, number) => {
                if self.replicas[replica].timer == number && !self.replicas[replica].down {
                    self.replicas[replica].armed = None;
                    return self.pump(t, replica);
                }
                Ok(())
            }
            Event::Asked {
                call,
                ask,
                word,
                lost_reply,
            } => self.asked(t, call, ask, &word, lost_reply),
            Event::Replied {
                call,
                granted,
                throttle,
                read,
                steps,
                first,
            } => {
                self.seen(t, call, throttle.as_deref());
                match granted {
                    Some(granted) => self.replied(t, call, granted, read, steps, first),
                    None => self.answered_without(t, call),
                }
            }
            Event::Written(call, write) => self.written(t, call, write),
            Event::Wrote(call, write, held) => self.wrote(t, call, &write, held),
            Event::WriteTimedOut(call) => self.write_timed_out(t, call),
            Event::TimedOut(call) => self.timed_out(t, call),
            Event::Expired { .. } => self.check_expired(t, event),
            Event::Fault(fault) => self.fault(t, fault),
            Event::Reconfigure(replica, interval) => {
                let pacer = &mut self.replicas[replica].pacer;
                pacer.reconfigure(Settings {
                    interval,
                    ..*pacer.settings()
                });
                self.pump(t, replica)
            }
            Event::Restart(replica) => {
                self.replicas[replica].down = false;
                Ok(())
            }
            Event::ForeignTakes => self.foreign_takes(t),
            Event::ForeignSends(slot) => {
                self.foreign_sends(t, slot);
                Ok(())
            }
        }
    }

    /// Lets a request set out, if there is a replica that takes it.
    pub fn send_request(&mut self, t: True) {
        let replica = self.random.next() as usize % self.plan.replicas;
        let urgency = if self.random.chance(self.plan.urgent) {
            self.random.within(0..=7) as u8
        } else {
            3
        };
        let journey = Journey {
            replica,
            life: 0,
            client: self.random.next() % self.plan.clients,
            urgency,
            target: self.random.next() % self.plan.hosts,
            patience: self.random.within(self.plan.patience.clone()),
            deadline: LocalTime(0),
            id: 0,
            state: State::Ended(End::Killed),
            turn: 0,
            tries: 0,
            came_at: t,
            back_at: t,
            leaves: self.random.chance(self.plan.leavers),
            refusal: None,
        };
        self.journeys.push(journey);
        self.schedule(t, Event::Arrive(self.journeys.len() - 1));
    }

    pub fn end(&mut self, r: Request, how: End) -> Result<(), String> {
        let journey = &mut self.journeys[r];
        if let State::Ended(before) = journey.state {
            return Err(format!("request {r} ended twice: {before:?}, then {how:?}"));
        }
        journey.state = State::Ended(how);
        journey.turn += 1;
        Ok(())
    }

    /// When a timer set for `at` fires.
    pub fn fires(&mut self, t: True, replica: usize, at: LocalTime) -> True {
        let exact = self.replicas[replica].clock.shows(at.0).max(t);
        exact + self.random.within(0..=TIMER_LATENESS)
    }

    pub fn schedule(&mut self, at: True, event: Event) {
        self.scheduled += 1;
        self.events.push(Reverse(Scheduled {
            at,
            number: self.scheduled,
            event,
        }));
    }

    /// The last events, oldest first.
    pub fn trace(&self) -> String {
        self.trace
            .iter()
            .flatten()
            .map(|line| format!("{line}\n"))
            .collect()
    }

    pub fn note(&mut self, t: True, what: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            if trace.len() == TRACE_KEPT {
                trace.pop_front();
            }
            trace.push_back(format!("{:>14.6} ms  {}", t as f64 / 1e6, what()));
        }
    }
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for Scheduled {}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

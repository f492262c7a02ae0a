//! The fleet while its store is away, for all, for some, for one cursor: who may send then, and who does.
//!
//! The program's own membership, course, pacer and clock bounds are driven here; the store (`store`), the links and the
//! keeper of the connections are models. Requests are plain: a busy replica always has some that are ready. What a
//! single cursor promises in every detail is checked by the other world; this one adds up what all send (`checks`).

pub mod checks;
pub mod keeper;
pub mod plan;
pub mod store;

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap},
    time::Duration,
};

use paceline::{
    config,
    membership::{Membership, Pulse},
    pacing::{
        clock::ClockBounds,
        course::{Course, LOOK_AGAIN, Step, View},
        cursor::{Ask, Granted},
        pacer::{Action, Arrival, Pacer, Settings},
        share::Terms,
        time::{LocalTime, MILLISECOND, Nanos, SECOND, StoreTime},
    },
};

use super::{
    clocks::{Clock, Slew, True},
    random::Random,
};
use plan::{Beats, OutagePlan, Trouble};
use store::StoreModel;

/// The one cursor.
pub const CURSOR: &str = "d";
const CALL_DEADLINE: Nanos = SECOND;
const RETRY_STORE: Nanos = 100 * MILLISECOND;
const RETRY_LOCKED: Nanos = 500 * MILLISECOND;
/// Timers fire at most this late.
const TIMER_LATENESS: Nanos = 100_000;
/// Requests that a busy replica has waiting.
const WAITING: usize = 6;

/// A fault planted in the model of the shell, to see that the checks find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    Nothing,
    /// A replica that lost the store sends on its share at once.
    NoWaiting,
    /// Nobody leaves room for the silent.
    NoRoom,
    /// The share is not divided: each sends at the whole ceiling.
    FailOpen,
    /// Nobody sends without the store.
    FailClosed,
    /// A heartbeat may be written however late it comes.
    LateHeartbeats,
    /// A row that is gone counts as given back.
    VanishedIsFreed,
    /// Each reads the leases only of the numbers that it may take itself.
    OwnNumbersOnly,
    /// Each keeps to its own ceiling.
    OwnCeilingOnly,
    /// Each divides by what it is itself configured with.
    OwnSharesOnly,
    /// A heartbeat of a replica that is off the cursor says that it is on it.
    AlwaysClaims,
    /// A cursor that could not be moved is told of for ever.
    FailingIsKept,
}

/// One replica.
pub struct Member {
    pub clock: Clock,
    pub bounds: ClockBounds,
    pub pacer: Pacer,
    pub course: Course,
    pub membership: Membership,
    pub life: u32,
    pub down: bool,
    pub busy: bool,
    pub session: Option<u64>,
    pub attempted: True,
    /// What becomes of heartbeats, and until when.
    pub beats: Option<Beats>,
    pub beats_until: True,
    /// A reservation has failed in this life.
    pub has_failed: bool,
    /// The requests in the queue.
    waiting: BTreeSet<u64>,
    /// Has requests only from then on.
    pub idle_until: True,
    /// A heartbeat under way.
    pub beat: Option<(u64, LocalTime)>,
    pub cut_until: True,
    /// What is sent while cut off is held back, and not refused.
    pub stalled: bool,
    pub call: Option<u64>,
    pub probing: bool,
    ask: Option<Ask>,
    probe: Option<Ask>,
    timer: u64,
    /// The last dispatch, or the beginning of this life.
    pub sent_at: True,
}

/// A request that went out.
#[derive(Clone, Copy, Debug)]
pub struct Sent {
    pub at: True,
    pub by: usize,
    /// In which era, and whether the whole fleet was of one mind in it.
    pub era: u32,
    pub of_one_mind: bool,
}

#[derive(Clone, Debug)]
pub enum Event {
    Trouble(Trouble),
    Timer(usize, u64),
    Attempt(usize, u32),
    Opened(usize, u32),
    AttemptFailed(usize, u32),
    Beat(usize, u64),
    BeatArrives(usize, u64, u64, Box<Pulse>),
    BeatReplied(usize, u64, u64, Box<Pulse>, store::Echo),
    BeatTimedOut(usize, u64),
    BeatRefused(usize, u64, u64),
    Come(usize),
    Asked(usize, u64, Ask, bool, LocalTime),
    Replied(usize, u64, Option<Granted>, bool, LocalTime),
    CallTimedOut(usize, u64, bool),
    Restart(usize),
}

pub struct Outages {
    pub plan: OutagePlan,
    pub flaw: Flaw,
    pub random: Random,
    pub store: StoreModel,
    pub members: Vec<Member>,
    pub sent: Vec<Sent>,
    era: u32,
    /// Whether all are on the cursor with nobody missed (`true`), or all off it with numbers of their own.
    mind: Option<bool>,
    pub rough_until: True,
    /// When the cursor's row was lost.
    pub row_lost: Vec<True>,
    events: BinaryHeap<Reverse<(True, u64)>>,
    queued: BTreeMap<u64, Event>,
    numbered: u64,
    pub longest_pause: Nanos,
}

impl Outages {
    /// Plays a history to its end.
    pub fn run(plan: OutagePlan, flaw: Flaw) -> (Self, Result<(), String>) {
        let mut random = Random::new(plan.seed ^ 0xface);
        let members = (0..plan.replicas)
            .map(|n| {
                let clock = Clock {
                    base: random.within(SECOND..=1_000_000 * SECOND),
                    ppm: random.within(-80..=80),
                    slew: Slew::default(),
                };
                Member::new(n, clock, &plan, 0, 0)
            })
            .collect();
        let clock = Clock {
            base: 1_700_000_000 * SECOND,
            ppm: random.within(-80..=80),
            slew: Slew::default(),
        };
        let mut world = Outages {
            store: StoreModel::new(clock),
            members,
            sent: Vec::new(),
            era: 0,
            mind: None,
            rough_until: 0,
            row_lost: Vec::new(),
            events: BinaryHeap::new(),
            queued: BTreeMap::new(),
            numbered: 0,
            longest_pause: 0,
            random,
            plan,
            flaw,
        };
        for replica in 0..world.plan.replicas {
            // Where their numbers differ, those with the smallest come first, or they would find none.
            let at = match world.plan.is_even() {
                true => world.random.within(0..=SECOND),
                false => replica as True * 600 * MILLISECOND,
            };
            world.schedule(at, Event::Attempt(replica, 0));
            world.arm(0, replica);
        }
        for (at, trouble) in world.plan.troubles.clone() {
            world.schedule(at, Event::Trouble(trouble));
        }
        let outcome = world
            .unfold()
            .and_then(|()| world.check_what_was_sent())
            .and_then(|()| world.check_healing());
        (world, outcome)
    }

    fn unfold(&mut self) -> Result<(), String> {
        while let Some(Reverse((t, number))) = self.events.pop() {
            if t > self.plan.span {
                return Ok(());
            }
            if let Some(event) = self.queued.remove(&number) {
                self.happen(t, event);
                self.look_at_minds(t);
                self.check_pauses(t)?;
            }
        }
        Ok(())
    }

    fn happen(&mut self, t: True, event: Event) {
        match event {
            Event::Trouble(trouble) => self.trouble(t, trouble),
            Event::Timer(replica, number) => {
                if self.members[replica].timer == number {
                    self.pump(t, replica);
                }
            }
            Event::Come(replica) => self.pump(t, replica),
            Event::Restart(replica) => {
                let m = &self.members[replica];
                let (life, clock, cut, stalled) = (m.life + 1, m.clock, m.cut_until, m.stalled);
                let (beats, idle) = ((m.beats, m.beats_until), m.idle_until);
                let mut fresh = Member::new(replica, clock, &self.plan, life, t);
                (fresh.cut_until, fresh.stalled) = (cut, stalled);
                ((fresh.beats, fresh.beats_until), fresh.idle_until) = (beats, idle);
                self.members[replica] = fresh;
                self.schedule(t, Event::Attempt(replica, life));
                self.arm(t, replica);
            }
            Event::Asked(replica, call, ask, probe, sent) => {
                self.asked(t, replica, call, ask, probe, sent);
            }
            Event::Replied(replica, call, granted, probe, sent) => {
                self.replied(t, replica, call, granted, probe, sent);
            }
            Event::CallTimedOut(replica, call, probe) => {
                if self.members[replica].call == Some(call) {
                    self.call_failed(t, replica, probe, RETRY_STORE);
                    self.lose(t, replica);
                    self.pump(t, replica);
                }
            }
            other => self.keep(t, other),
        }
    }

    fn trouble(&mut self, t: True, trouble: Trouble) {
        if let Trouble::RowVanishes | Trouble::AllRowsVanish | Trouble::Failover { .. } = trouble {
            self.row_lost.push(t);
        }
        match trouble {
            Trouble::Cut {
                replica,
                span,
                stalled,
            } => {
                let m = &mut self.members[replica];
                (m.cut_until, m.stalled) = (t + span, stalled);
                if !stalled {
                    self.lose(t, replica);
                }
            }
            Trouble::Down(span) => {
                self.store.down_until = t + span;
                (0..self.plan.replicas).for_each(|r| self.lose(t, r));
            }
            Trouble::Frozen(span) => self.store.frozen_until = t + span,
            Trouble::Locked(span) => self.store.locked_until = t + span,
            Trouble::RowVanishes => {
                self.store.row = None;
                self.rough_until = t + self.plan.settles();
            }
            Trouble::AllRowsVanish => {
                self.store.row = None;
                self.store.leases.clear();
                self.rough_until = t + self.plan.settles();
            }
            Trouble::Failover { gap, lag, step } => {
                self.store.down_until = t + gap;
                self.store.go_back(t - lag);
                self.store.stepped += step;
                self.rough_until = t + gap + self.plan.settles() + 8 * SECOND;
                (0..self.plan.replicas).for_each(|r| self.lose(t, r));
            }
            Trouble::Beats { replica, span, how } => {
                let m = &mut self.members[replica];
                (m.beats, m.beats_until) = (Some(how), t + span);
            }
            Trouble::End(replica) => {
                self.lose(t, replica);
                self.pump(t, replica);
            }
            Trouble::GivenUp { replica, span } => {
                let m = &mut self.members[replica];
                m.idle_until = t + span;
                for id in std::mem::take(&mut m.waiting) {
                    m.pacer.leave(id);
                }
                m.sent_at = m.sent_at.max(t + span);
                self.schedule(t + span, Event::Come(replica));
                self.pump(t, replica);
            }
            Trouble::Kill { replica, down } => {
                let m = &mut self.members[replica];
                if !m.down {
                    m.down = true;
                    m.life += 1;
                    (m.session, m.call, m.beat) = (None, None, None);
                    m.timer += 1;
                    self.schedule(t + down, Event::Restart(replica));
                }
            }
        }
    }

    /// When a message of `replica` arrives at the store, if it does.
    pub fn travels(&mut self, t: True, replica: usize) -> Option<True> {
        let way = self.random.within(self.plan.one_way.clone());
        let m = &self.members[replica];
        let leaves = match t < m.cut_until {
            true if m.stalled => m.cut_until,
            true => return None,
            false => t,
        };
        (t >= self.store.down_until).then(|| (leaves + way).max(self.store.frozen_until))
    }

    /// When the answer to `replica` arrives, if it does.
    pub fn returns(&mut self, t: True, replica: usize) -> Option<True> {
        let way = self.random.within(self.plan.one_way.clone());
        (t >= self.members[replica].cut_until && t >= self.store.down_until).then(|| t + way)
    }

    fn asked(
        &mut self,
        t: True,
        replica: usize,
        call: u64,
        ask: Ask,
        probe: bool,
        sent: LocalTime,
    ) {
        if t < self.store.down_until {
            return;
        }
        let (at, granted) = match self.store.locked_until - t {
            left if left <= 0 => (t, true),
            left if left < store::LOCK_TIMEOUT => (t + left, true),
            _ => (t + store::LOCK_TIMEOUT, false),
        };
        if at > t && granted {
            self.schedule(at, Event::Asked(replica, call, ask, probe, sent));
            return;
        }
        let granted = granted.then(|| self.store.reserve(t, &ask));
        if let Some(arrives) = self.returns(at, replica) {
            self.schedule(arrives, Event::Replied(replica, call, granted, probe, sent));
        }
    }

    fn replied(
        &mut self,
        t: True,
        replica: usize,
        call: u64,
        granted: Option<Granted>,
        probe: bool,
        sent: LocalTime,
    ) {
        let m = &mut self.members[replica];
        if m.call != Some(call) || t < m.cut_until {
            return;
        }
        let now = m.now(t);
        let Some(granted) = granted else {
            self.call_failed(t, replica, probe, RETRY_LOCKED);
            self.pump(t, replica);
            return;
        };
        m.call = None;
        m.bounds.observe(sent, now, granted.now);
        m.membership.reserved(CURSOR, true, now);
        if probe {
            m.pacer.raise_floor(granted.end());
        } else {
            m.pacer.granted(now, granted, &m.bounds);
        }
        self.pump(t, replica);
    }

    pub fn call_failed(&mut self, t: True, replica: usize, probe: bool, retry: Nanos) {
        let m = &mut self.members[replica];
        m.call = None;
        let now = m.now(t);
        m.membership.reserved(CURSOR, false, now);
        m.has_failed = true;
        if !probe {
            m.pacer.failed(now.plus(retry));
        }
    }

    /// What `pacing/lane.rs` does whenever something has happened.
    pub fn pump(&mut self, t: True, replica: usize) {
        if self.members[replica].down {
            return;
        }
        let terms = self.terms(t, replica);
        let m = &mut self.members[replica];
        let now = m.now(t);
        if m.course.is_alone() && m.pacer.waiting() > 0 {
            m.membership.wanted(CURSOR, now);
        }
        m.course.look(terms, &mut m.pacer);
        m.pacer.look(now, &m.bounds);
        if self.flaw != Flaw::OwnCeilingOnly {
            let own = rate(self.plan.interval_of(replica));
            let agreed = m.membership.agreement(CURSOR, own, now);
            m.pacer
                .agree(agreed.interval, m.membership.shares_agreed(now));
        }
        while m.busy && t >= m.idle_until && m.pacer.waiting() < WAITING {
            let arrival = Arrival {
                client: m.pacer.waiting() as u64,
                urgency: 3,
                deadline: now.plus(86_400 * SECOND),
                target: 1,
            };
            match m.pacer.arrive(now, arrival) {
                Ok(id) => {
                    m.pacer.ready(now, id, true);
                    m.waiting.insert(id);
                }
                Err(_) => break,
            }
        }
        while let Some(action) = m.pacer.next_action(now) {
            match action {
                Action::Connect(_) | Action::Refuse(..) => {}
                Action::Dispatch(who, slot) => {
                    m.waiting.remove(&who.id);
                    m.pacer.departed(&slot);
                    m.pacer.finished(1);
                    m.sent_at = t;
                    self.sent.push(Sent {
                        at: t,
                        by: replica,
                        era: self.era,
                        of_one_mind: self.mind.is_some() && t >= self.rough_until,
                    });
                }
                Action::Reserve(ask) => {
                    let view = View {
                        terms,
                        reachable: m.membership.has_read(),
                    };
                    match m.course.step(now, ask, &view, &mut m.pacer, &m.bounds) {
                        Step::Ask(ask) => m.ask = Some(ask),
                        Step::Own(probe) => m.probe = probe.or(m.probe),
                        Step::Wait => {}
                    }
                }
            }
        }
        if m.call.is_none() {
            let probe = m.ask.is_none();
            if let Some(ask) = m.ask.take().or_else(|| m.probe.take()) {
                self.call(t, replica, ask, probe);
            }
        }
        // What was served makes room for more at the next look.
        self.arm(t, replica);
    }

    fn terms(&self, t: True, replica: usize) -> Terms {
        let m = &self.members[replica];
        let terms = m.membership.terms(CURSOR, m.now(t));
        let of = self.plan.max_replicas;
        match (self.flaw, terms) {
            (Flaw::NoWaiting, Terms::Hold(_)) => {
                m.membership.terms(CURSOR, m.now(t).plus(60 * SECOND))
            }
            (Flaw::NoRoom, Terms::Shared { .. }) => Terms::Shared { silent: 0, of },
            (Flaw::FailOpen, Terms::Alone(share)) => {
                Terms::Alone(paceline::pacing::share::Share { of: 1, ..share })
            }
            (Flaw::FailClosed, Terms::Alone(_)) => Terms::Nothing,
            (Flaw::OwnSharesOnly, Terms::Alone(share)) => {
                Terms::Alone(paceline::pacing::share::Share {
                    of: self.plan.numbers[replica],
                    ..share
                })
            }
            (_, terms) => terms,
        }
    }

    fn call(&mut self, t: True, replica: usize, mut ask: Ask, probe: bool) {
        let m = &mut self.members[replica];
        if m.session.is_none() {
            self.call_failed(t, replica, probe, RETRY_STORE);
            return;
        }
        ask.lead = m.bounds.lead();
        let (number, sent) = (self.numbered, m.now(t));
        (m.call, m.probing) = (Some(number), probe);
        self.schedule(
            t + CALL_DEADLINE,
            Event::CallTimedOut(replica, number, probe),
        );
        if let Some(arrives) = self.travels(t, replica) {
            self.schedule(arrives, Event::Asked(replica, number, ask, probe, sent));
        }
    }

    fn arm(&mut self, t: True, replica: usize) {
        let m = &mut self.members[replica];
        let now = m.now(t);
        let look = (m.course.is_alone() || m.busy).then(|| now.plus(LOOK_AGAIN));
        let wake = [m.pacer.wake_at(), look].into_iter().flatten().min();
        m.timer += 1;
        if let Some(wake) = wake {
            let (timer, exact) = (m.timer, m.clock.shows(wake.0).max(t + 1));
            let at = exact + self.random.within(0..=TIMER_LATENESS);
            self.schedule(at, Event::Timer(replica, timer));
        }
    }

    pub fn schedule(&mut self, at: True, event: Event) {
        self.numbered += 1;
        self.queued.insert(self.numbered, event);
        self.events.push(Reverse((at, self.numbered)));
    }

    /// Whether all see the whole fleet on the cursor, or all are off it on numbers of their own.
    fn look_at_minds(&mut self, t: True) {
        let terms: Vec<(Terms, bool)> = (0..self.members.len())
            .filter(|r| !self.members[*r].down)
            .map(|r| (self.terms(t, r), self.members[r].membership.own().is_some()))
            .collect();
        let shared = |(t, _): &(Terms, bool)| matches!(t, Terms::Shared { silent: 0, .. });
        let off = |(t, numbered): &(Terms, bool)| {
            *numbered && matches!(t, Terms::Alone(_) | Terms::Hold(_))
        };
        let mind = if terms.len() == self.members.len() && terms.iter().all(shared) {
            Some(true)
        } else if terms.iter().all(off) && self.agree_on_the_time(t) {
            Some(false)
        } else {
            None
        };
        if self.mind != mind {
            self.mind = mind;
            self.era += 1;
            // Slots that were granted on the old footing are used up first.
            let rounds = 4 * Nanos::from(self.plan.max_replicas) * self.plan.interval;
            self.rough_until = self.rough_until.max(t + rounds);
        }
    }
}

/// The rate whose interval this is.
fn rate(interval: Nanos) -> f64 {
    SECOND as f64 / interval as f64
}

impl Outages {
    /// Whether all know the same clock: one that stepped may have been seen by some only.
    fn agree_on_the_time(&self, t: True) -> bool {
        let known = self.members.iter().filter(|m| !m.down);
        let known = known.filter_map(|m| m.bounds.to_store(m.now(t), m.now(t)));
        let known: Vec<StoreTime> = known.collect();
        let least = known.iter().min().copied();
        known.iter().all(|k| {
            least.is_none_or(|l| k.since(l) <= 2 * self.plan.one_way.end() + 20 * MILLISECOND)
        })
    }
}

impl Member {
    fn new(n: usize, clock: Clock, plan: &OutagePlan, life: u32, t: True) -> Self {
        let settings = config::Store {
            url: config::Secret::new("postgres://model"),
            table: "paceline".to_owned(),
            key_prefix: String::new(),
            max_replicas: plan.numbers[n],
            replica: format!("r{n}"),
            foreign_fetchers: 0,
            lease_ttl: Duration::from_secs(300),
        };
        let now = LocalTime(clock.read(t));
        Member {
            clock,
            bounds: ClockBounds::default(),
            pacer: Pacer::new(Settings {
                interval: plan.interval_of(n),
                max_in_flight: None,
                queue_limit: 100,
                shares: plan.max_replicas,
            }),
            course: Course::default(),
            membership: Membership::new(
                &settings,
                [(CURSOR.to_owned(), rate(plan.interval_of(n)))].into(),
                now,
            ),
            life,
            down: false,
            busy: plan.busy[n],
            session: None,
            attempted: t,
            beats: None,
            beats_until: 0,
            has_failed: false,
            waiting: BTreeSet::new(),
            idle_until: 0,
            beat: None,
            cut_until: 0,
            stalled: false,
            call: None,
            probing: false,
            ask: None,
            probe: None,
            timer: 0,
            sent_at: t,
        }
    }

    pub fn now(&self, t: True) -> LocalTime {
        LocalTime(self.clock.read(t))
    }

    pub fn until(&self, now: LocalTime) -> Option<StoreTime> {
        Some(self.bounds.at_least(now)?.plus(CALL_DEADLINE))
    }
}

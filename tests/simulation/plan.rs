//! What happens in one history, drawn from its seed: how many replicas, how slow the links, which clients, which faults.
//! The plan is made beforehand and printed with a failure; chances along the way come from the same seed.

use std::ops::RangeInclusive;

use paceline::pacing::time::{MILLISECOND, Nanos, SECOND};

use super::{
    clocks::{Slew, True},
    random::Random,
};

pub const MICROSECOND: Nanos = 1_000;

/// A range to draw spans from.
pub type Spans = RangeInclusive<Nanos>;

/// How many slots a saturated history has.
pub const SATURATED_SLOTS: i64 = 200;

/// So many times in a thousand.
pub type PerMille = u32;

#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub replicas: usize,
    /// For how many replicas and other programs the cursor is configured.
    pub shares: u32,
    /// Programs that move the same cursor with a statement of their own, one fetch after the other.
    pub foreign: usize,
    pub interval: Nanos,
    /// Arrivals stop here; then what waits is served or refused.
    pub span: True,
    pub max_in_flight: Option<usize>,
    pub queue_limit: usize,
    /// One way to the store, and jitter on top of it, each way.
    pub one_way: Spans,
    pub jitter: Nanos,
    /// How much further the first replica is away.
    pub further: Nanos,
    /// How the store's clock is slewed, and every replica's.
    pub slewed: (Slew, Slew),
    /// Hosts that requests are for, and how many of them never answer.
    pub hosts: u64,
    pub hung: u64,
    pub spikes: PerMille,
    pub lost_request: PerMille,
    pub lost_reply: PerMille,
    /// Arrivals in all, against the ceiling.
    pub load: PerMille,
    pub bursts: Vec<(True, usize)>,
    pub clients: u64,
    pub urgent: PerMille,
    pub patience: Spans,
    pub leavers: PerMille,
    pub leave_after: Spans,
    pub dial: Spans,
    pub slow_dials: PerMille,
    pub failed_dials: PerMille,
    /// Ready connections that are lost again.
    pub lost_ready: PerMille,
    /// Requests that wake late when it is their turn, and how late.
    pub late_wakes: PerMille,
    pub late: Spans,
    /// Connections that break when the turn has come, or on the way out with nothing written.
    pub broken: PerMille,
    pub service: Spans,
    /// Refused clients come back when they were told to, this often.
    pub comebacks: u32,
    pub faults: Vec<(True, Fault)>,
    /// Times in which the origin protests, to how many of the answers.
    pub storms: Vec<(std::ops::Range<True>, PerMille)>,
    /// Protests that ask for a pause, and for how long; and those whose request goes again.
    pub asks_to_wait: PerMille,
    pub wait: Spans,
    pub goes_again: PerMille,
    /// Clean answers that make the pace less wide.
    pub recovery_after: u32,
}

#[derive(Clone, Copy, Debug)]
pub enum Fault {
    Suspend {
        replica: usize,
        span: Nanos,
    },
    Kill {
        replica: usize,
        down: Nanos,
    },
    /// No call of this replica gets through.
    Outage {
        replica: usize,
        span: Nanos,
    },
    RowVanishes,
    /// The row says a time that no cursor can honestly have.
    RowFarAhead,
    Step(Nanos),
    Reconfigure(Nanos),
}

impl Plan {
    /// A history in which nothing goes wrong and little is asked.
    pub fn quiet(seed: u64, random: &mut Random) -> Self {
        let interval = random.magnitude(10 * MILLISECOND..=500 * MILLISECOND);
        let one_way = random.magnitude(20 * MICROSECOND..=20 * MILLISECOND);
        let replicas = random.within(1..=4) as u32;
        Plan {
            seed,
            replicas: replicas as usize,
            shares: replicas,
            foreign: 0,
            interval,
            span: (interval * 60).clamp(2 * SECOND, 20 * SECOND),
            max_in_flight: None,
            queue_limit: 10_000,
            one_way: one_way / 2..=one_way,
            jitter: one_way / 4,
            further: 0,
            slewed: Default::default(),
            hosts: 1,
            hung: 0,
            spikes: 0,
            lost_request: 0,
            lost_reply: 0,
            load: 500,
            bursts: Vec::new(),
            clients: 5,
            urgent: 0,
            patience: 10 * SECOND..=10 * SECOND,
            leavers: 0,
            leave_after: 0..=SECOND,
            dial: 100 * MICROSECOND..=MILLISECOND,
            slow_dials: 0,
            failed_dials: 0,
            lost_ready: 0,
            late_wakes: 0,
            late: 0..=100 * MILLISECOND,
            broken: 0,
            service: MILLISECOND..=50 * MILLISECOND,
            comebacks: 0,
            faults: Vec::new(),
            storms: Vec::new(),
            asks_to_wait: 0,
            wait: SECOND..=SECOND,
            goes_again: 0,
            // Few are enough, so that histories need not be long.
            recovery_after: 6,
        }
    }

    /// Anything may go wrong; each kind of trouble in some of the histories only, so that the others stay sharp.
    pub fn troubled(seed: u64, random: &mut Random) -> Self {
        let mut plan = Plan::quiet(seed, random);
        plan.interval = random.magnitude(10 * MILLISECOND..=SECOND);
        plan.span = (plan.interval * 40).clamp(2 * SECOND, 20 * SECOND);
        let some = |r: &mut Random, most: i64| {
            if r.chance(400) {
                r.within(1..=most) as u32
            } else {
                0
            }
        };
        plan.foreign = if random.chance(200) {
            random.within(1..=2) as usize
        } else {
            0
        };
        plan.max_in_flight = random.chance(250).then(|| random.within(1..=6) as usize);
        plan.queue_limit = random.pick(&[5, 40, 10_000]);
        plan.jitter = if random.chance(300) {
            random.magnitude(MILLISECOND..=80 * MILLISECOND)
        } else {
            plan.jitter
        };
        plan.spikes = some(random, 20);
        plan.lost_request = some(random, 50);
        plan.lost_reply = some(random, 50);
        plan.load = random.within(200..=2500) as u32;
        for _ in 0..random.within(0..=2) {
            plan.bursts
                .push((random.within(0..=plan.span), random.within(1..=40) as usize));
        }
        plan.clients = random.within(1..=12) as u64;
        plan.urgent = some(random, 300);
        let patience = random.magnitude(200 * MILLISECOND..=12 * SECOND);
        plan.patience = patience / 2..=patience;
        plan.leavers = some(random, 600);
        plan.leave_after = 0..=random.magnitude(10 * MILLISECOND..=3 * SECOND);
        let dial = random.magnitude(100 * MICROSECOND..=150 * MILLISECOND);
        plan.dial = dial / 4..=dial;
        plan.slow_dials = some(random, 200);
        plan.failed_dials = some(random, 100);
        plan.lost_ready = some(random, 100);
        plan.late_wakes = some(random, 100);
        plan.broken = some(random, 50);
        plan.service = MILLISECOND..=random.magnitude(10 * MILLISECOND..=2 * SECOND);
        plan.comebacks = some(random, 2);
        if random.chance(250) {
            plan.slewed = slews(random, plan.span);
        }
        if random.chance(200) {
            (plan.hosts, plan.hung) = (random.within(2..=12) as u64, random.within(1..=2) as u64);
        }
        if random.chance(500) {
            for _ in 0..random.within(1..=3) {
                let fault = plan.draw_fault(random);
                plan.faults.push((random.within(0..=plan.span), fault));
            }
        }
        if random.chance(300) {
            for _ in 0..random.within(1..=2) {
                let from = random.within(0..=plan.span);
                let until = from + random.within(0..=plan.span / 3);
                let often = random.within(100..=1_000) as u32;
                plan.storms.push((from..until, often));
            }
            plan.asks_to_wait = some(random, 500);
            let wait = random.magnitude(10 * MILLISECOND..=4 * SECOND);
            plan.wait = wait / 4..=wait;
            plan.goes_again = some(random, 500);
        }
        plan
    }

    /// More replicas and other programs on a slow cursor than it is configured for: it lies further ahead than the replicas
    /// expect, and honestly so.
    pub fn crowded(seed: u64, random: &mut Random) -> Self {
        let mut plan = Plan::quiet(seed, random);
        plan.replicas = random.within(2..=10) as usize;
        plan.shares = 1;
        plan.foreign = random.within(0..=20) as usize;
        plan.interval = random.magnitude(3 * SECOND..=120 * SECOND);
        plan.span = plan.interval * 20;
        plan.load = 0;
        plan.bursts = vec![(0, 60), (plan.span / 2, 30)];
        plan.patience = 3 * plan.span..=3 * plan.span;
        plan
    }

    /// The origin protests for a while, and then no more; the queue is never empty.
    pub fn with_a_storm(seed: u64, random: &mut Random) -> Self {
        let mut plan = Plan::saturated(seed, random);
        plan.bursts = vec![(0, SATURATED_SLOTS as usize * 4)];
        plan.patience = 40 * plan.span + SECOND..=40 * plan.span + SECOND;
        let until = plan.interval * random.within(5..=40);
        plan.storms = vec![(0..until, random.within(200..=1_000) as u32)];
        plan
    }

    /// The origin protests at first; then many replicas count together how many answers are clean.
    pub fn recovering(seed: u64, random: &mut Random) -> Self {
        let mut plan = Plan::with_a_storm(seed, random);
        plan.replicas = random.pick(&[1, 3, 8]);
        plan.recovery_after = 100;
        plan.storms = vec![(0..plan.interval * random.within(2..=6), 1_000)];
        plan
    }

    /// More patient requests than can be served within the history, all there from the start, and nothing goes wrong.
    pub fn saturated(seed: u64, random: &mut Random) -> Self {
        let mut plan = Plan::quiet(seed, random);
        plan.interval = plan.interval.min(100 * MILLISECOND);
        plan.span = SATURATED_SLOTS * plan.interval;
        plan.load = 0;
        plan.bursts = vec![(0, SATURATED_SLOTS as usize * 2)];
        plan.patience = 4 * plan.span + SECOND..=4 * plan.span + SECOND;
        plan.max_in_flight = None;
        plan
    }

    /// The same with many replicas.
    pub fn many(seed: u64, random: &mut Random) -> Self {
        let mut plan = Plan::saturated(seed, random);
        plan.replicas = 16;
        plan
    }

    /// The same with clocks that are slewed.
    pub fn slewed(seed: u64, random: &mut Random) -> Self {
        let mut plan = Plan::saturated(seed, random);
        plan.slewed = slews(random, plan.span);
        plan
    }

    /// The same, and one replica is far away; how many of the requests it gets is another matter.
    pub fn near_and_far(seed: u64, random: &mut Random) -> Self {
        let mut plan = Plan::saturated(seed, random);
        plan.interval = random.magnitude(10 * MILLISECOND..=100 * MILLISECOND);
        plan.span = SATURATED_SLOTS * plan.interval;
        plan.patience = 8 * plan.span + SECOND..=8 * plan.span + SECOND;
        plan.replicas = random.within(2..=3) as usize;
        plan.one_way = 100 * MICROSECOND..=100 * MICROSECOND;
        plan.jitter = 0;
        plan.further = random.within(10 * MILLISECOND..=120 * MILLISECOND);
        plan.bursts = vec![(0, SATURATED_SLOTS as usize * 4)];
        plan
    }

    /// The same, with an origin that closes each connection and takes long over each handshake.
    pub fn closing(seed: u64, random: &mut Random) -> Self {
        let mut plan = Plan::saturated(seed, random);
        plan.interval = random.within(20 * MILLISECOND..=50 * MILLISECOND);
        plan.span = SATURATED_SLOTS * plan.interval;
        plan.patience = 4 * plan.span + SECOND..=4 * plan.span + SECOND;
        plan.dial = 100 * MILLISECOND..=200 * MILLISECOND;
        plan
    }

    /// The same, with hosts among the others that never answer.
    pub fn with_hung_hosts(seed: u64, random: &mut Random) -> Self {
        let mut plan = Plan::saturated(seed, random);
        (plan.hosts, plan.hung) = (random.within(8..=40) as u64, random.within(1..=4) as u64);
        plan.bursts = vec![(0, SATURATED_SLOTS as usize * 4)];
        plan.patience = 8 * plan.span + SECOND..=8 * plan.span + SECOND;
        plan
    }

    /// The same, with three times the ceiling in clients beside them that give up before long.
    pub fn with_leavers(seed: u64, random: &mut Random) -> Self {
        let mut plan = Plan::saturated(seed, random);
        plan.load = 3_000;
        plan.leavers = 600;
        plan.leave_after = 0..=plan.interval * 4;
        plan
    }

    /// One burst that is more than can be waited for; the refused come back once, when they were told to. The store is
    /// nearer than an interval: how far away it is, a replica that has just started cannot know.
    pub fn comeback(seed: u64, random: &mut Random) -> Self {
        let mut plan = Plan::quiet(seed, random);
        let one_way = random.magnitude(20 * MICROSECOND..=4 * MILLISECOND);
        (plan.one_way, plan.jitter) = (one_way / 2..=one_way, one_way / 4);
        plan.replicas = 1;
        plan.clients = 1;
        plan.interval = random.magnitude(20 * MILLISECOND..=200 * MILLISECOND);
        plan.load = 0;
        plan.bursts = vec![(0, random.within(50..=200) as usize)];
        let patience = plan.interval * random.within(15..=40);
        plan.patience = patience..=patience;
        plan.comebacks = 1;
        plan
    }

    /// The same with several replicas and clients: none knows the others' queues, and turns are taken.
    pub fn comeback_to_many(seed: u64, random: &mut Random) -> Self {
        let mut plan = Plan::comeback(seed, random);
        plan.replicas = random.within(2..=4) as usize;
        plan.clients = 5;
        plan
    }

    /// How far away a replica may be, one way.
    pub fn farthest(&self) -> Nanos {
        self.one_way.end() + self.further
    }

    /// Twice the ceiling in new requests, as long as it lasts; the refused come back when they were told to, again and again.
    pub fn overloaded(seed: u64, random: &mut Random) -> Self {
        let mut plan = Plan::comeback(seed, random);
        plan.clients = 20;
        plan.interval = random.magnitude(20 * MILLISECOND..=200 * MILLISECOND);
        plan.bursts = Vec::new();
        plan.load = 2_000;
        plan.span = 600 * plan.interval;
        let patience = plan.interval * random.within(15..=150);
        plan.patience = patience..=patience;
        plan.comebacks = 8;
        plan
    }

    /// The same with several replicas.
    pub fn overloaded_fleet(seed: u64, random: &mut Random) -> Self {
        let mut plan = Plan::overloaded(seed, random);
        plan.replicas = random.within(2..=4) as usize;
        plan
    }

    fn draw_fault(&self, random: &mut Random) -> Fault {
        let replica = random.next() as usize % self.replicas;
        match random.within(0..=8) {
            0 => Fault::Suspend {
                replica,
                span: random.magnitude(20 * MILLISECOND..=6 * SECOND),
            },
            1 => Fault::Kill {
                replica,
                down: random.within(0..=SECOND),
            },
            2 => Fault::Outage {
                replica,
                span: random.within(MILLISECOND..=3 * SECOND),
            },
            3 | 4 => Fault::RowVanishes,
            // A foreign program believes whatever the row says; only the replicas know better.
            5 if self.foreign == 0 => Fault::RowFarAhead,
            6 => Fault::Step(random.pick(&[3600 * SECOND, -3600 * SECOND])),
            7 => Fault::Step(random.within(-200 * MILLISECOND..=200 * MILLISECOND)),
            _ => Fault::Reconfigure(
                (self.interval * random.within(25..=400) / 100).max(5 * MILLISECOND),
            ),
        }
    }

    /// Whether the throttle's row is lost.
    pub fn loses_rows(&self) -> bool {
        let lost = |f: &Fault| matches!(f, Fault::RowVanishes | Fault::RowFarAhead);
        self.faults.iter().any(|(_, f)| lost(f))
    }

    /// Whether the store's clock steps.
    pub fn steps(&self) -> bool {
        self.faults.iter().any(|(_, f)| matches!(f, Fault::Step(_)))
    }

    /// The shortest interval that is ever in force.
    pub fn shortest_interval(&self) -> Nanos {
        let changed = self.faults.iter().filter_map(|(_, f)| match f {
            Fault::Reconfigure(interval) => Some(*interval),
            _ => None,
        });
        changed.fold(self.interval, Nanos::min)
    }
}

/// NTP slews by 500 parts per million at most, from any time on.
fn slews(random: &mut Random, span: True) -> (Slew, Slew) {
    let mut slew = || {
        let from = random.pick(&[-SECOND, span / 4]);
        Slew {
            from,
            until: from + random.pick(&[span / 4, 4 * span]),
            ppm: random.pick(&[-500, 500, 300]),
        }
    };
    (slew(), slew())
}

//! The pacing core in random histories: many replicas, one cursor, and everything that can go wrong between them.
//!
//! The time without the store has a world of its own (`outages`). `PACELINE_SIM_HISTORIES` sets how many histories are played, `PACELINE_SIM_SEED` the first seed; a history that
//! breaks a promise prints its seed, its plan and its last events, and playing that one seed shows it again.

mod simulation {
    pub mod calls;
    pub mod checks;
    pub mod clocks;
    pub mod faults;
    pub mod outages;
    pub mod plan;
    pub mod random;
    pub mod replica;
    pub mod shell;
    pub mod store;
    pub mod storms;
    pub mod world;
}

use paceline::pacing::{
    throttle::Regime,
    time::{LocalTime, MILLISECOND, SECOND},
};
use simulation::{
    outages::{Flaw, Outages, plan::OutagePlan},
    plan::{Plan, SATURATED_SLOTS},
    random::Random,
    replica::{End, State},
    world::{Journey, Planted, World},
};

const HISTORIES: u64 = 20_000;
const FIRST_SEED: u64 = 1;

fn number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("{name} is {text:?}; set it to a whole number")),
        Err(_) => default,
    }
}

/// Plays a history; on failure, plays it again with its trace and shows it.
fn play(plan: &Plan) -> World {
    let (world, outcome) = World::run(plan.clone(), Planted::Nothing, false);
    if let Err(broken) = outcome {
        let (traced, _) = World::run(plan.clone(), Planted::Nothing, true);
        panic!(
            "PACELINE_SIM_SEED={} PACELINE_SIM_HISTORIES=1: {broken}\n{plan:#?}\n{}",
            plan.seed,
            traced.trace()
        );
    }
    world
}

/// Plays many histories on all processors, and adds up what `measure` makes of each.
fn play_many(
    draw: fn(u64, &mut Random) -> Plan,
    share: u64,
    measure: fn(&Plan, &World) -> [usize; 4],
) -> [usize; 4] {
    let (histories, first) = (
        number("PACELINE_SIM_HISTORIES", HISTORIES).div_ceil(share),
        number("PACELINE_SIM_SEED", FIRST_SEED),
    );
    let workers = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    std::thread::scope(|scope| {
        let start = |worker| {
            scope.spawn(move || {
                let mut sum = [0; 4];
                for seed in (first + worker..first + histories).step_by(workers as usize) {
                    let plan = draw(seed, &mut Random::new(seed));
                    let measured = measure(&plan, &play(&plan));
                    (0..4).for_each(|i| sum[i] += measured[i]);
                }
                sum
            })
        };
        let threads: Vec<_> = (0..workers).map(start).collect();
        let sums = threads
            .into_iter()
            .map(|t| t.join().unwrap_or_else(|e| std::panic::resume_unwind(e)));
        sums.fold([0; 4], |a, b| std::array::from_fn(|i| a[i] + b[i]))
    })
}

#[test]
fn whatever_goes_wrong_the_promises_hold() {
    let [dispatched, refused, left, upheavals] = play_many(Plan::troubled, 1, |_, world| {
        [
            world.ended(End::Dispatched),
            world.ended(End::Refused),
            world.ended(End::Left),
            world.store.upheavals.len(),
        ]
    });
    println!("{dispatched} dispatched, {refused} refused, {left} left, {upheavals} upheavals");
}

#[test]
fn more_programs_than_the_cursor_is_configured_for_keep_its_pace() {
    let [beyond, ..] = play_many(Plan::crowded, 40, |plan, world| {
        let horizon = paceline::pacing::cursor::horizon(plan.interval, plan.shares);
        [usize::from(world.store.furthest > horizon), 0, 0, 0]
    });
    assert!(beyond > 0, "no cursor was beyond its horizon");
}

/// The shortest time in which the slots of a saturated history pass, against the time they took. The first few are left
/// out: each replica has to learn how far away the store is, which takes two calls.
fn utilisation(plan: &Plan, world: &World) -> f64 {
    let departures = world.departures();
    let slots = SATURATED_SLOTS as usize;
    assert!(
        departures.len() > slots,
        "seed {}: only {} departed",
        plan.seed,
        departures.len()
    );
    let first = slots / 10;
    (plan.interval * (slots - first) as i64) as f64 / (departures[slots] - departures[first]) as f64
}

#[test]
fn a_full_queue_uses_all_of_the_ceiling() {
    play_many(Plan::saturated, 40, |plan, world| {
        let used = utilisation(plan, world);
        assert!(
            used >= 0.99,
            "seed {}: {used} of the ceiling; {plan:#?}",
            plan.seed
        );
        [0; 4]
    });
}

/// The part of the ceiling that is used from the third second on, while there is enough for all to do.
fn later_use(plan: &Plan, departures: &[i64]) -> f64 {
    let first = departures.partition_point(|t| *t < 2 * SECOND);
    let last = (departures.len() * 3 / 4).max(first + 20);
    let took = departures[last] - departures[first];
    (plan.interval * (last - first) as i64) as f64 / took as f64
}

fn assert_full_use(draw: fn(u64, &mut Random) -> Plan, share: u64) {
    play_many(draw, share, |plan, world| {
        let used = utilisation(plan, world);
        assert!(
            used >= 0.99,
            "seed {}: {used} of the ceiling; {plan:#?}",
            plan.seed
        );
        [0; 4]
    });
}

#[test]
fn sixteen_replicas_use_all_of_the_ceiling() {
    assert_full_use(Plan::many, 100);
}

#[test]
fn clocks_that_are_slewed_are_no_steps_and_cost_nothing() {
    play_many(Plan::slewed, 100, |plan, world| {
        for replica in &world.replicas {
            assert_eq!(replica.bounds.steps(), 0, "seed {}; {plan:#?}", plan.seed);
        }
        let used = utilisation(plan, world);
        assert!(used >= 0.99, "seed {}: {used}; {plan:#?}", plan.seed);
        [0; 4]
    });
}

#[test]
fn handshakes_that_take_long_cost_nothing() {
    assert_full_use(Plan::closing, 100);
}

#[test]
fn hosts_that_never_answer_cost_the_others_nothing() {
    play_many(Plan::with_hung_hosts, 100, |plan, world| {
        // Which hosts do not answer shows after a while, once for each.
        let used = later_use(plan, &world.departures());
        assert!(used >= 0.99, "seed {}: {used}; {plan:#?}", plan.seed);
        [0; 4]
    });
}

/// Where both ways to the store take alike, the origin sees one even pace, wherever the replicas are.
#[test]
fn near_and_far_replicas_keep_one_pace() {
    play_many(Plan::near_and_far, 100, |plan, world| {
        let departures = world.departures();
        // How far away the store is takes a far replica a few calls to learn, each of a quarter of a second.
        let used = later_use(plan, &departures);
        assert!(used >= 0.99, "seed {}: {used}; {plan:#?}", plan.seed);
        let most = departures
            .iter()
            .enumerate()
            .map(|(i, t)| departures[i..].partition_point(|u| u - t <= SECOND));
        // Both ends of the second, and requests that wake a little late.
        let allowed = (SECOND + MILLISECOND) / plan.interval + 1;
        let most = most.max().unwrap_or(0) as i64;
        assert!(
            most <= allowed,
            "seed {}: {most} in a second of {allowed}; {plan:#?}",
            plan.seed
        );
        [0; 4]
    });
}

#[test]
fn clients_that_give_up_cost_those_that_stay_nothing() {
    let [left, ..] = play_many(Plan::with_leavers, 80, |plan, world| {
        let used = utilisation(plan, world);
        assert!(
            used >= 0.98,
            "seed {}: {used} of the ceiling; {plan:#?}",
            plan.seed
        );
        [world.ended(End::Left), 0, 0, 0]
    });
    assert!(left > 0);
}

#[test]
fn a_refused_client_that_comes_back_when_told_is_served() {
    let [refused, ..] = play_many(Plan::comeback, 10, |plan, world| {
        let again: Vec<_> = world.journeys.iter().filter(|j| j.tries == 1).collect();
        for journey in &again {
            assert!(
                matches!(journey.state, State::Ended(End::Dispatched)),
                "seed {}: came back as told and was {:?}; {plan:#?}",
                plan.seed,
                journey.state
            );
        }
        [again.len(), 0, 0, 0]
    });
    assert!(refused > 0);
}

/// Several replicas know nothing of each other's queues, so that what they promise after a burst is too early for some.
#[test]
fn most_of_those_that_come_back_to_a_fleet_are_served() {
    let [back, served, ..] = play_many(Plan::comeback_to_many, 40, |_, world| {
        let again: Vec<_> = world.journeys.iter().filter(|j| j.tries == 1).collect();
        let served = again
            .iter()
            .filter(|j| matches!(j.state, State::Ended(End::Dispatched)))
            .count();
        [again.len(), served, 0, 0]
    });
    println!("{served} of {back} served at the second try");
    assert!(served * 2 > back, "{served} of {back}");
}

/// What `Retry-After` is worth while more comes than can be sent, for as long as that lasts: the same share of those that come
/// back is served as of those that are new, and none for certain. What the manual says of it is measured here.
#[test]
fn under_lasting_overload_who_comes_back_is_served_like_the_others() {
    type Draw = fn(u64, &mut Random) -> Plan;
    for (who, draw) in [
        ("one replica", Plan::overloaded as Draw),
        ("several replicas", Plan::overloaded_fleet),
    ] {
        let [new, new_served, back, back_served] = play_many(draw, 100, |plan, world| {
            // While it lasts: those that end it find an emptier queue.
            let lasting = |j: &&Journey| j.came_at <= plan.span;
            let share = |again: bool| {
                let of = world.journeys.iter().filter(lasting);
                let of: Vec<_> = of.filter(|j| (j.tries > 0) == again).collect();
                let served = |j: &&&Journey| matches!(j.state, State::Ended(End::Dispatched));
                [of.len(), of.iter().filter(served).count()]
            };
            let ([a, b], [c, d]) = (share(false), share(true));
            [a, b, c, d]
        });
        let percent = |part: usize, all: usize| 100 * part / all.max(1);
        let (first, again) = (percent(new_served, new), percent(back_served, back));
        println!(
            "{who}, twice the ceiling: {first} % of new requests served, {again} % of those that came back as told"
        );
        assert!(again >= 20 && first >= 20, "{who}: {first} % and {again} %");
    }
}

#[test]
fn a_storm_of_protests_passes_and_the_full_pace_comes_back() {
    let [widened, ..] = play_many(Plan::with_a_storm, 160, |plan, world| {
        for replica in &world.replicas {
            assert_eq!(
                replica.tracker.regime(LocalTime(i64::MAX)),
                Regime::default(),
                "seed {}: the pace did not come back; {plan:#?}",
                plan.seed
            );
        }
        let departures = world.departures();
        let last = &departures[departures.len() - SATURATED_SLOTS as usize / 2..];
        let took = last[last.len() - 1] - last[0];
        let share = (plan.interval * (last.len() as i64 - 1)) as f64 / took as f64;
        assert!(
            share > 0.98,
            "seed {}: {share} of the ceiling; {plan:#?}",
            plan.seed
        );
        [usize::from(world.protested.is_some()), 0, 0, 0]
    });
    assert!(widened > 0);
}

/// Each answer counts once: beyond those that are needed come those heard and not yet told, which are told four times a
/// second.
#[test]
fn many_replicas_recover_after_as_many_clean_answers_as_one() {
    let [recoveries, heard, needed, _] = play_many(Plan::recovering, 200, |plan, world| {
        let (needed, replicas) = (plan.recovery_after, plan.replicas as u32);
        for heard in &world.recoveries {
            let untold = 2 * replicas + (SECOND / 2 / plan.interval / 2) as u32;
            assert!(
                *heard <= needed + untold,
                "seed {}: {heard} clean answers for {needed} by {replicas} replicas; {plan:#?}",
                plan.seed
            );
        }
        let heard: u32 = world.recoveries.iter().sum();
        let count = world.recoveries.len();
        [count, heard as usize, count * needed as usize, 0]
    });
    println!("{recoveries} recoveries after {heard} clean answers, of {needed} needed");
    assert!(recoveries > 0);
}

#[test]
fn a_history_is_played_again_from_its_seed() {
    for seed in 1..50 {
        let plan = Plan::troubled(seed, &mut Random::new(seed));
        let [once, again] = [true, false].map(|traced| {
            World::run(plan.clone(), Planted::Nothing, traced)
                .0
                .departures()
        });
        assert_eq!(once, again);
    }
}

/// Plays troubled histories with a fault planted, until a check finds it; returns what the check said.
fn found(planted: Planted, tune: fn(&mut Plan)) -> String {
    for seed in 1..2_000 {
        let mut plan = Plan::troubled(seed, &mut Random::new(seed));
        tune(&mut plan);
        if let (_, Err(broken)) = World::run(plan, planted, false) {
            return broken;
        }
    }
    panic!("{planted:?} was not found");
}

#[test]
fn planted_faults_are_found() {
    let as_drawn: fn(&mut Plan) = |_| {};
    let far: fn(&mut Plan) = |plan| {
        (plan.one_way, plan.jitter) = (150 * MILLISECOND..=150 * MILLISECOND, 0);
        plan.faults.clear();
    };
    let stormy: fn(&mut Plan) = |plan| {
        plan.storms = vec![(0..plan.span, 300)];
        (plan.asks_to_wait, plan.wait) = (300, 2 * SECOND..=3 * SECOND);
    };
    for (planted, tune, by) in [
        (Planted::CursorPerReplica, as_drawn, "ceiling: "),
        (
            Planted::FloorUntold,
            as_drawn,
            "before the end of one it knows",
        ),
        (
            Planted::StaleSlotsUsed,
            |plan| plan.late_wakes = 100,
            "stale: ",
        ),
        (Planted::ReadAtReceipt, far, "late: "),
        (Planted::ReadAtSending, far, "early: "),
        (
            Planted::LeaversKeepSlots,
            |plan| plan.leavers = 600,
            "account: ",
        ),
        (Planted::RefusalsForgotten, as_drawn, "forgotten: "),
        (Planted::PaceUnasked, stormy, "halt: "),
        (Planted::EachProtestWidens, stormy, "episode: "),
        (
            Planted::CountsTwice,
            |plan| {
                plan.storms = vec![(0..plan.span / 8, 1_000)];
                (plan.load, plan.span) = (2_000, plan.span * 4);
                (plan.lost_reply, plan.faults) = (300, Vec::new());
            },
            "recovery: ",
        ),
    ] {
        let broken = found(planted, tune);
        assert!(
            broken.contains(by),
            "{planted:?} was found by another check: {broken}"
        );
    }
}

/// Plays a history of outages; on failure, says how to play it again.
fn play_outages(seed: u64) -> Outages {
    let plan = OutagePlan::drawn(seed, &mut Random::new(seed));
    let (world, outcome) = Outages::run(plan.clone(), Flaw::Nothing);
    if let Err(broken) = outcome {
        panic!("PACELINE_SIM_SEED={seed} PACELINE_SIM_HISTORIES=1: {broken}\n{plan:#?}");
    }
    world
}

#[test]
fn whoever_loses_the_store_the_ceiling_holds_and_everybody_sends() {
    let (histories, first) = (
        number("PACELINE_SIM_HISTORIES", HISTORIES).div_ceil(10),
        number("PACELINE_SIM_SEED", FIRST_SEED),
    );
    let workers = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    let sent: usize = std::thread::scope(|scope| {
        let start = |worker| {
            scope.spawn(move || {
                (first + worker..first + histories)
                    .step_by(workers as usize)
                    .map(|seed| play_outages(seed).sent.len())
                    .sum::<usize>()
            })
        };
        let threads: Vec<_> = (0..workers).map(start).collect();
        let sent = threads
            .into_iter()
            .map(|t| t.join().unwrap_or_else(|e| std::panic::resume_unwind(e)));
        sent.sum()
    });
    println!("{sent} sent");
    assert!(sent > 0);
}

/// A history with one trouble: the session of the last replica ends each quarter to three quarters of a second.
fn play_flapping(seed: u64, flaw: Flaw) -> (Outages, usize) {
    let mut random = Random::new(seed);
    let mut plan = OutagePlan::drawn(seed, &mut random);
    plan.troubles.clear();
    plan.busy = vec![true; plan.replicas];
    plan.numbers = vec![plan.max_replicas; plan.replicas];
    plan.faster = vec![1; plan.replicas];
    let who = plan.replicas - 1;
    plan.flap(who, FLAPS_FROM, plan.span, &mut random);
    let (world, outcome) = Outages::run(plan, flaw);
    if let Err(broken) = outcome {
        panic!("seed {seed}: {broken}");
    }
    (world, who)
}

/// When sessions begin to end, and when the first waiting is over.
const FLAPS_FROM: i64 = 20 * SECOND;
const SETTLED: i64 = FLAPS_FROM + 8 * SECOND;

#[test]
fn a_replica_whose_sessions_do_not_last_goes_on_at_its_share() {
    for seed in 1..=60 {
        let (world, who) = play_flapping(seed, Flaw::Nothing);
        let sent = |s: &&simulation::outages::Sent| s.by == who && s.at >= SETTLED;
        let sent: Vec<i64> = world.sent.iter().filter(sent).map(|s| s.at).collect();
        let span = world.plan.span - SETTLED;
        let round = i64::from(world.plan.max_replicas) * world.plan.interval;
        let least = 0.6 * span as f64 / round as f64;
        assert!(
            sent.len() as f64 >= least,
            "seed {seed}: {} of {least}",
            sent.len()
        );
        let longest = sent.windows(2).map(|w| w[1] - w[0]).max();
        assert!(
            longest.is_some_and(|l| l <= SECOND + 3 * round),
            "seed {seed}: nothing for {longest:?}"
        );
    }
}

#[test]
fn planted_flaws_of_the_time_without_the_store_are_found() {
    for (flaw, by) in [
        (Flaw::NoWaiting, "ceiling: "),
        (Flaw::NoRoom, "ceiling: "),
        (Flaw::FailOpen, "ceiling: "),
        (Flaw::FailClosed, "pause: "),
        (Flaw::LateHeartbeats, "ceiling: "),
        (Flaw::VanishedIsFreed, "ceiling: "),
        (Flaw::OwnNumbersOnly, "ceiling: "),
        (Flaw::OwnCeilingOnly, "ceiling: "),
        (Flaw::OwnSharesOnly, "ceiling: "),
        (Flaw::AlwaysClaims, "ceiling: "),
        (Flaw::FailingIsKept, "healing: "),
    ] {
        let found = (1..3_000).find_map(|seed| {
            let plan = OutagePlan::drawn(seed, &mut Random::new(seed));
            Outages::run(plan, flaw).1.err()
        });
        let broken = found.unwrap_or_else(|| panic!("{flaw:?} was not found"));
        assert!(
            broken.starts_with(by),
            "{flaw:?} was found by another check: {broken}"
        );
    }
}

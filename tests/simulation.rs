//! The pacing core in random histories: many replicas, one cursor, and everything that can go wrong between them.
//!
//! `PACELINE_SIM_HISTORIES` sets how many histories are played, `PACELINE_SIM_SEED` the first seed; a history that
//! breaks a promise prints its seed, its plan and its last events, and playing that one seed shows it again.

mod simulation {
    pub mod calls;
    pub mod checks;
    pub mod clocks;
    pub mod plan;
    pub mod random;
    pub mod replica;
    pub mod shell;
    pub mod store;
    pub mod world;
}

use simulation::{
    plan::Plan,
    random::Random,
    world::{Planted, World},
};

const HISTORIES: u64 = 12_000;
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
    use simulation::replica::End;
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

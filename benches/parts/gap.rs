//! The pace as the origin sees it.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use super::{
    bed::postgres::Postgres,
    contenders::{Bench, NAME, SMALL},
    load,
    options::Options,
    replica::Replica,
    table::{self, Rounds, percentiles},
};

/// Three replicas, 20 requests a second among them: the gaps between arrivals.
pub fn gap(bench: &Bench, options: &Options) {
    const RATE: f64 = 20.0;
    const FETCHES: usize = 210;
    table::head(
        &format!(
            "Gap at the origin in ms: {RATE}/s, three replicas on one Postgres, {FETCHES} fetches"
        ),
        &[
            "clients of each replica",
            "rate/s",
            "most in any 1 s",
            "least",
            "p01",
            "p50",
            "p99",
            "most",
        ],
    );
    for clients in [1, 4] {
        let mut figures: [Rounds; 7] = Default::default();
        for _ in 0..options.rounds {
            let postgres = Postgres::start();
            let mut keys = bench.keys(&format!("hosts = [\"{NAME}\"]\nrate = {RATE:.1}"));
            keys.store = Some(postgres.url());
            let start =
                |n: usize| Replica::start(bench.dir.path(), &format!("gap{n}"), &keys, "info");
            let replicas: Vec<_> = (0..3).map(start).collect();
            let runtime = load::single();
            let count = Arc::new(load::Count::default());
            bench.origin.watch();
            for replica in &replicas {
                for _ in 0..clients {
                    let route = bench.absolute(replica.proxy);
                    runtime.spawn(load::client(
                        route.clone(),
                        vec![route.request(SMALL)],
                        count.clone(),
                    ));
                }
            }
            while count.answers.load(Relaxed) < FETCHES as u64 {
                runtime.block_on(load::pause(20));
            }
            count.stop();
            let arrivals = bench.origin.arrivals();
            let mut gaps: Vec<_> = arrivals.windows(2).map(|pair| pair[1] - pair[0]).collect();
            let ends = (
                arrivals.first().expect("fetches"),
                arrivals.last().expect("fetches"),
            );
            figures[0].add((arrivals.len() - 1) as f64 / (*ends.1 - *ends.0).as_secs_f64());
            figures[1].add(busiest_second(&arrivals) as f64);
            for (at, us) in percentiles(&mut gaps, [0.0, 1.0, 50.0, 99.0, 100.0])
                .into_iter()
                .enumerate()
            {
                figures[at + 2].add(us / 1e3);
            }
            runtime.shutdown_background();
        }
        table::row(
            [clients.to_string()]
                .into_iter()
                .chain(figures.iter().map(|r| r.fixed(2))),
        );
    }
}

/// The most arrivals in any window of one second, half open.
fn busiest_second(arrivals: &[Instant]) -> usize {
    let within = |first: &Instant| {
        arrivals
            .iter()
            .filter(|at| **at >= *first && **at < *first + Duration::from_secs(1))
            .count()
    };
    arrivals.iter().map(within).max().unwrap_or_default()
}

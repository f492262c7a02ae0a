//! What a connection costs that is held open, and a request that waits.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    bed::certs::client_tls,
    contenders::{Bench, Kind, NAME, SMALL},
    load::{self, Route, Wire},
    proc::Family,
    replica::Replica,
    table::{self, short},
};

/// How many are held.
const HELD: usize = 1_000;

/// What a held connection costs.
pub fn memory(bench: &Bench) {
    table::head(
        &format!("Memory: growth with {HELD} of each held open, KiB apiece"),
        &[
            "",
            "bare CONNECT",
            "used intercepted or tunnelled connection",
            "waiting request, clear text",
            "waiting request, intercepted",
        ],
    );
    for which in 1..bench.contenders() {
        let mut cells = Vec::new();
        let mut name = "";
        for is_used in [false, true] {
            let Some(contender) = bench.contender(which) else {
                break;
            };
            name = contender.name;
            let tunnels = |kind: Kind| matches!(kind, Kind::Intercepted | Kind::Tunnelled);
            let route = contender
                .routes
                .iter()
                .find(|(kind, route)| tunnels(*kind) && route.tunnel.is_some());
            let (Some((_, route)), Some(family)) = (route, contender.family) else {
                break;
            };
            cells.push(short(held(route, family, is_used)));
        }
        if cells.len() < 2 {
            continue;
        }
        let is_paced = Bench::is_paced(which);
        for is_tls in [false, true] {
            cells.push(if is_paced {
                short(waiting(bench, is_tls))
            } else {
                String::new()
            });
        }
        table::row([name.to_owned()].into_iter().chain(cells));
    }
}

/// KiB for each request that waits for its turn.
fn waiting(bench: &Bench, is_tls: bool) -> f64 {
    // The last of them would wait for minutes.
    let keys = bench.keys(&format!("hosts = [\"{NAME}\"]\nrate = 2.0"));
    let replica = Replica::start(bench.dir.path(), "waiting", &keys, "access=off,info");
    let route = if is_tls {
        bench.tunnel(replica.proxy, client_tls(&replica.root()))
    } else {
        bench.absolute(replica.proxy)
    };
    let runtime = load::single();
    let before = replica.family().memory_kib();
    let count = Arc::new(load::Count::default());
    for _ in 0..HELD {
        let requests = vec![route.request(SMALL)];
        runtime.spawn(load::client(route.clone(), requests, count.clone()));
    }
    let depth = || {
        replica
            .scrape()
            .sum("paceline_queue_depth", &[])
            .unwrap_or_default()
    };
    let give_up = Instant::now() + Duration::from_secs(60);
    while depth() < HELD as f64 * 0.97 {
        assert!(Instant::now() < give_up, "{} wait and no more", depth());
        runtime.block_on(load::pause(100));
    }
    let grown = replica.family().memory_kib() - before;
    count.stop();
    runtime.shutdown_background();
    grown / HELD as f64
}

/// KiB for each of many connections held open, bare or after one request.
fn held(route: &Route, family: Family, is_used: bool) -> f64 {
    load::single().block_on(async {
        let request = route.request(SMALL);
        let (mut bare, mut used) = (Vec::new(), Vec::new());
        let mut buffer = vec![0; 16 * 1024];
        let before = family.memory_kib();
        for _ in 0..HELD {
            if is_used {
                let mut wire = Wire::open(route).await.expect("a proxy that opens tunnels");
                wire.exchange(&request, &mut buffer)
                    .await
                    .expect("an answer");
                used.push(wire);
            } else {
                bare.push(
                    load::open_bare(route)
                        .await
                        .expect("a proxy that opens tunnels"),
                );
            }
        }
        (family.memory_kib() - before) / HELD as f64
    })
}

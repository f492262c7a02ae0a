//! Whether the cost of a request stays as it is when there is more of everything: `cargo bench --bench scale -- [OPTIONS]`.
//!
//! Hosts with a cursor of their own, requests that wait, replicas on one Postgres. What is asked of the store is counted
//! by the replicas (`paceline_reservation_seconds_count`) and by Postgres (`xact_commit`, heartbeats and all). CPU is
//! the process's own, so that clients and origin on the same cores do not count.
//!
//! `--rounds N` (3), `--seconds S` (3), `--only destinations,waiting,replicas`
#![allow(
    clippy::disallowed_methods,
    reason = "a benchmark measures from outside"
)]

use std::{
    net::Ipv4Addr,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use tokio::runtime::Runtime;

#[path = "parts/bed.rs"]
mod bed;

#[path = "parts"]
#[allow(dead_code, reason = "other benches use more of it than this does")]
mod parts {
    pub mod load;
    pub mod options;
    pub mod origin;
    pub mod proc;
    pub mod replica;
    pub mod runtime;
    pub mod table;

    pub(crate) use super::bed;
}

use bed::{
    certs::{TestCa, server_tls},
    postgres::Postgres,
};
use parts::{
    load::{self, Count, Route},
    options::Options,
    origin::Origin,
    proc::{Family, postmaster},
    replica::{Keys, Replica},
    table::{self, Rounds, short},
};

const SMALL: &str = "/1024";
/// Clients where their number is not what is measured.
const CLIENTS: usize = 16;

struct Bench {
    origin: Origin,
    dir: tempfile::TempDir,
    options: Options,
}

fn main() {
    paceline::app::raise_file_limit();
    let ca = TestCa::new();
    let bench = Bench {
        origin: Origin::start(server_tls(&ca.issue(&["bench.test"]))),
        dir: tempfile::tempdir().expect("a temporary folder"),
        options: Options::read(3, 3.0, &[]),
    };
    if bench.options.wants("destinations") {
        bench.destinations();
    }
    if bench.options.wants("waiting") {
        bench.waiting();
    }
    if bench.options.wants("replicas") {
        bench.replicas();
    }
}

/// What a replica and its store have done so far.
#[derive(Clone, Copy)]
struct Reading {
    at: Instant,
    dispatches: f64,
    calls: f64,
    commits: f64,
    cpu: f64,
    store_cpu: f64,
}

impl Reading {
    fn of(replicas: &[Replica], postgres: Option<&Postgres>) -> Reading {
        let mut reading = Reading {
            at: Instant::now(),
            dispatches: 0.0,
            calls: 0.0,
            commits: f64::NAN,
            cpu: 0.0,
            store_cpu: f64::NAN,
        };
        for replica in replicas {
            let scrape = replica.scrape();
            let sum = |name: &str| scrape.sum(name, &[]).unwrap_or_default();
            reading.dispatches += sum("paceline_dispatches_total");
            reading.calls += sum("paceline_reservation_seconds_count");
            reading.cpu += replica.family().cpu_seconds();
        }
        if let Some(postgres) = postgres {
            let sql = postgres.sql();
            let commits = "SELECT sum(xact_commit)::int8 FROM pg_stat_database";
            reading.commits = sql.number(commits) as f64;
            reading.store_cpu = Family(postmaster(&sql)).cpu_seconds();
        }
        reading
    }

    /// What was done since `before`: seconds, and the differences.
    fn since(self, before: Reading) -> Reading {
        Reading {
            dispatches: self.dispatches - before.dispatches,
            calls: self.calls - before.calls,
            commits: self.commits - before.commits,
            cpu: self.cpu - before.cpu,
            store_cpu: self.store_cpu - before.store_cpu,
            ..self
        }
    }
}

/// Clients at work, until dropped.
struct Load {
    runtime: Option<Runtime>,
    count: Arc<Count>,
}

impl Load {
    /// Of these clients, each with what it sends in turn.
    fn start(clients: impl IntoIterator<Item = (Route, Vec<Vec<u8>>)>) -> Load {
        // A thread of its own: readings are taken beside it.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build();
        let runtime = runtime.expect("a runtime");
        let count = Arc::new(Count::default());
        for (route, requests) in clients {
            runtime.spawn(load::client(route, requests, count.clone()));
        }
        Load {
            runtime: Some(runtime),
            count,
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.count.stop();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
        let errors = self.count.errors.load(Relaxed);
        if errors > 0 {
            eprintln!("{errors} requests failed");
        }
    }
}

impl Bench {
    fn keys(&self, destination: &str, hosts: usize) -> Keys {
        let to = self.origin.http;
        let resolve: String = (0..hosts)
            .map(|n| format!("\"{}:80\" = \"{to}\"\n", host(n)))
            .collect();
        Keys {
            proxy: "max_connections = 20000\nmax_connections_per_client = 20000\nmax_wait = \"1h\""
                .to_owned(),
            rest: format!(
                "[upstream.resolve]\n{resolve}[[destination]]\nname = \"bench\"\nhosts = [\"*.bench.test\"]\n{destination}\n"
            ),
            ..Keys::default()
        }
    }

    fn start(&self, name: &str, keys: &Keys) -> Replica {
        Replica::start(self.dir.path(), name, keys, "access=off,info")
    }

    /// From one host with a cursor of its own to 10,000.
    fn destinations(&self) {
        table::head(
            &format!("Hosts with a cursor each (`scope = \"host\"`), {CLIENTS} clients"),
            &[
                "hosts known / in use",
                "store",
                "requests/s",
                "CPU us/request",
                "new upstream connections/request",
                "statements/request",
                "KiB/host",
            ],
        );
        let postgres = Postgres::start();
        // The second of the last rows tells what many hosts cost apart from connections: the pool keeps 1,024 of them.
        for (known, used) in [
            (1, 1),
            (100, 100),
            (1_000, 1_000),
            (10_000, 1_000),
            (10_000, 10_000),
        ] {
            for store in [None, Some(&postgres)] {
                let mut figures: [Rounds; 5] = Default::default();
                for _ in 0..self.options.rounds {
                    let mut keys = self.keys("rate = 1000000.0\nscope = \"host\"", known);
                    keys.store = store.map(Postgres::url);
                    let replicas = [self.start("hosts", &keys)];
                    let replica = &replicas[0];
                    let empty = replica.family().memory_kib();
                    visit(replica, known);
                    let grown = replica.family().memory_kib() - empty;
                    let load = Load::start((0..CLIENTS).map(|client| {
                        let own = (0..used)
                            .filter(|n| n % CLIENTS.min(used) == client % CLIENTS.min(used));
                        let requests = own.map(|n| absolute(replica, n).request(SMALL)).collect();
                        (absolute(replica, 0), requests)
                    }));
                    // All connections that will be kept are there.
                    self.pause(1.0);
                    let opened = self.origin.connections();
                    let before = Reading::of(&replicas, store);
                    std::thread::sleep(self.options.span);
                    let done = Reading::of(&replicas, store).since(before);
                    let opened = (self.origin.connections() - opened) as f64;
                    drop(load);
                    let span = done.at - before.at;
                    figures[0].add(done.dispatches / span.as_secs_f64());
                    figures[1].add(done.cpu / done.dispatches * 1e6);
                    figures[2].add(opened / done.dispatches);
                    figures[3].add(done.calls / done.dispatches);
                    figures[4].add(apiece(grown, known));
                }
                let store = if store.is_some() {
                    "Postgres"
                } else {
                    "embedded"
                };
                let name = format!("{} / {}", short(known as f64), short(used as f64));
                table::row(
                    [name, store.to_owned()]
                        .into_iter()
                        .chain(figures.iter().map(Rounds::to_string)),
                );
            }
        }
    }

    /// From one request that waits to 10,000.
    fn waiting(&self) {
        table::head(
            "Requests that wait (Postgres, one replica, clear text)",
            &[
                "waiting",
                "rate",
                "dispatches/s",
                "CPU us/dispatch",
                "statements/dispatch",
                "statements/s",
                "commits/s in all",
                "KiB/waiting request",
            ],
        );
        // Or as many as a replica has files for, two to a connection.
        let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
        let most = files.map_or(10_000, |files| 10_000.min(files as usize / 2 - 100));
        for (waiting, rate) in [
            (1, 1_000),
            (10, 1_000),
            (100, 1_000),
            (1_000, 1_000),
            (most, 1_000),
            (most, 5),
        ] {
            let mut figures: [Rounds; 6] = Default::default();
            for _ in 0..self.options.rounds {
                let postgres = Postgres::start();
                let mut keys = self.keys(&format!("rate = {rate}.0"), 1);
                keys.store = Some(postgres.url());
                let replicas = [self.start("waiting", &keys)];
                let replica = &replicas[0];
                let empty = replica.family().memory_kib();
                let route = absolute(replica, 0);
                // None of the clients may have half of the queue.
                let load = Load::start((0..waiting).map(|n| {
                    let mut route = route.clone();
                    route.from = Some(Ipv4Addr::new(127, 0, 0, 1 + (n % 4) as u8));
                    let request = route.request(SMALL);
                    (route, vec![request])
                }));
                await_depth(replica, waiting);
                let grown = replica.family().memory_kib() - empty;
                // Postgres tells its counts a second late.
                self.pause(1.5);
                let before = Reading::of(&replicas, Some(&postgres));
                std::thread::sleep(self.options.span);
                let done = Reading::of(&replicas, Some(&postgres)).since(before);
                drop(load);
                let span = (done.at - before.at).as_secs_f64();
                figures[0].add(done.dispatches / span);
                figures[1].add(done.cpu / done.dispatches * 1e6);
                figures[2].add(done.calls / done.dispatches);
                figures[3].add(done.calls / span);
                figures[4].add(done.commits / span);
                figures[5].add(apiece(grown, waiting));
            }
            let names = [short(waiting as f64), format!("{rate}/s")];
            table::row(
                names
                    .into_iter()
                    .chain(figures.iter().map(Rounds::to_string)),
            );
        }
    }

    /// From one replica to 16, on one Postgres.
    fn replicas(&self) {
        const CLIENTS: usize = 48;
        table::head(
            &format!("Replicas on one cursor, {CLIENTS} clients in all"),
            &[
                "replicas",
                "ceiling",
                "slots/s",
                "statements/s",
                "slots/statement",
                "store CPU us/slot",
                "store CPU, share of a core",
                "replica CPU us/slot",
            ],
        );
        for rate in [200, 1_000_000] {
            for count in [1, 3, 16] {
                let mut figures: [Rounds; 6] = Default::default();
                for _ in 0..self.options.rounds {
                    let postgres = Postgres::start();
                    let mut keys = self.keys(&format!("rate = {rate}.0"), 1);
                    keys.store = Some(postgres.url());
                    keys.store_keys = "max_replicas = 16".to_owned();
                    let replicas: Vec<_> = (0..count)
                        .map(|n| self.start(&format!("r{n}"), &keys))
                        .collect();
                    let load = Load::start((0..CLIENTS).map(|client| {
                        let route = absolute(&replicas[client % count], 0);
                        let requests = vec![route.request(SMALL)];
                        (route, requests)
                    }));
                    self.pause(1.5);
                    let before = Reading::of(&replicas, Some(&postgres));
                    std::thread::sleep(self.options.span);
                    let done = Reading::of(&replicas, Some(&postgres)).since(before);
                    drop(load);
                    let span = (done.at - before.at).as_secs_f64();
                    figures[0].add(done.dispatches / span);
                    figures[1].add(done.calls / span);
                    figures[2].add(done.dispatches / done.calls);
                    figures[3].add(done.store_cpu / done.dispatches * 1e6);
                    figures[4].add(done.store_cpu / span);
                    figures[5].add(done.cpu / done.dispatches * 1e6);
                }
                let names = [count.to_string(), format!("{}/s", short(f64::from(rate)))];
                table::row(
                    names
                        .into_iter()
                        .chain(figures.iter().map(Rounds::to_string)),
                );
            }
        }
    }

    fn pause(&self, seconds: f64) {
        std::thread::sleep(Duration::from_secs_f64(seconds));
    }
}

/// Too few of them, and other growth is taken for theirs.
fn apiece(kib: f64, of: usize) -> f64 {
    if of < 100 { f64::NAN } else { kib / of as f64 }
}

fn host(number: usize) -> String {
    format!("h{number}.bench.test")
}

fn absolute(replica: &Replica, number: usize) -> Route {
    let host = host(number);
    Route {
        prefix: format!("http://{host}"),
        host,
        ..Route::plain(replica.proxy)
    }
}

/// Sends one request to each host.
fn visit(replica: &Replica, hosts: usize) {
    let route = absolute(replica, 0);
    load::single().block_on(async {
        let mut wire = load::Wire::open(&route)
            .await
            .expect("a proxy that accepts");
        let mut buffer = vec![0; 16 * 1024];
        for number in 0..hosts {
            let request = absolute(replica, number).request(SMALL);
            wire.exchange(&request, &mut buffer)
                .await
                .expect("an answer");
        }
    });
}

/// Waits until as many wait as there are clients, but for those that are under way.
fn await_depth(replica: &Replica, clients: usize) {
    let least = (clients as f64 * 0.98 - 2.0).max(0.0);
    bed::await_until::await_until("all clients wait", Duration::from_secs(60), || {
        let depth = replica.scrape().sum("paceline_queue_depth", &[])?;
        (depth >= least).then_some(())
    });
}

//! paceline beside its peers and beside no proxy at all: `cargo bench --bench compare -- [OPTIONS]`.
//!
//! Each round visits every contender before the next begins, and a ratio is taken round by round, so that what disturbs
//! the machine disturbs all alike. Clients and origin have one thread each and share the cores with the proxy: figures are
//! good for comparison within one run, and for nothing else. Peers that are not installed are left out, by name.
//!
//! `--rounds N` (3), `--seconds S` (1), `--connections 1,16` , `--only absolute,intercepted,tunnelled,new-tunnel,body,memory,gap`
#![allow(
    clippy::disallowed_methods,
    reason = "a benchmark measures from outside"
)]

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use rustls::ClientConfig;
use tokio::runtime::Runtime;

/// Of the tests' bed, what a comparison needs.
#[path = "../tests/it/bed"]
#[allow(
    dead_code,
    unused_imports,
    reason = "the tests use more of it than this does"
)]
mod bed {
    pub mod await_until;
    pub mod certs;
    pub mod metrics;
    pub mod postgres;
    pub mod process;
    pub mod sql;

    pub(crate) use super::{free_address, runtime};
}

#[path = "parts"]
#[allow(dead_code, reason = "other benches use more of it than this does")]
mod parts {
    pub mod load;
    pub mod options;
    pub mod origin;
    pub mod peers;
    pub mod proc;
    pub mod replica;
    pub mod table;

    pub(crate) use super::bed;
}

use bed::{
    certs::{TestCa, client_tls, server_tls},
    postgres::Postgres,
};
use parts::{
    load::{self, Route, Wire},
    options::Options,
    origin::Origin,
    peers::{Ground, PEERS, Service},
    proc::Family,
    replica::{Keys, Replica},
    table::{self, Rounds, percentiles, short},
};

const SMALL: &str = "/1024";
/// The large body, and how often it is fetched on one connection.
const LARGE: usize = 100 << 20;
const LARGE_TIMES: usize = 2;
/// Connections held open to see what each costs.
const HELD: usize = 1_000;
const NAME: &str = "localhost";

fn runtime() -> &'static Runtime {
    static RUNTIME: std::sync::OnceLock<Runtime> = std::sync::OnceLock::new();
    RUNTIME.get_or_init(|| Runtime::new().expect("a runtime for the bed"))
}

fn free_address() -> std::net::SocketAddr {
    std::net::TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .expect("a free port on loopback")
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Absolute,
    Intercepted,
    Tunnelled,
    NewTunnel,
    NewTunnelResumed,
}

impl Kind {
    const ALL: [Kind; 5] = [
        Kind::Absolute,
        Kind::Intercepted,
        Kind::Tunnelled,
        Kind::NewTunnel,
        Kind::NewTunnelResumed,
    ];

    fn title(self) -> &'static str {
        match self {
            Kind::Absolute => "Absolute-form HTTP, kept alive",
            Kind::Intercepted => "Intercepted HTTPS, kept alive",
            Kind::Tunnelled => "Tunnelled HTTPS, kept alive",
            Kind::NewTunnel => "A new intercepted tunnel for each request, full handshakes",
            Kind::NewTunnelResumed => "A new intercepted tunnel for each request, sessions resumed",
        }
    }

    /// What `--only` calls it.
    fn word(self) -> &'static str {
        match self {
            Kind::Absolute => "absolute",
            Kind::Intercepted => "intercepted",
            Kind::Tunnelled => "tunnelled",
            Kind::NewTunnel | Kind::NewTunnelResumed => "new-tunnel",
        }
    }
}

/// One that is measured, while it runs.
struct Contender {
    name: &'static str,
    family: Option<Family>,
    routes: Vec<(Kind, Route)>,
    _keeps: Option<Keeps>,
}

#[allow(dead_code, reason = "held for its drop")]
enum Keeps {
    Peer(parts::peers::Running),
    Replica(Replica),
}

/// What all contenders share.
struct Bench {
    origin: Origin,
    origin_root: String,
    ground: Ground,
    dir: tempfile::TempDir,
}

fn main() {
    paceline::app::raise_file_limit();
    let options = Options::read(3, 1.0, &[1, 16]);
    let bench = Bench::new();
    let results = bench.rounds(&options);
    results.print(&options);
    if options.wants("memory") {
        bench.memory();
    }
    if options.wants("gap") {
        bench.gap(&options);
    }
}

impl Bench {
    fn new() -> Bench {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let ca = TestCa::new();
        let origin = Origin::start(server_tls(&ca.issue(&[NAME])));
        let peers = dir.path().join("peers");
        std::fs::create_dir(&peers).expect("our own folder");
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(dir.path(), open).expect("our own folder");
        Bench {
            ground: Ground::new(&peers, origin.clone(), ca.root()),
            origin,
            origin_root: ca.root().to_owned(),
            dir,
        }
    }

    fn rounds(&self, options: &Options) -> Results {
        let mut results = Results::default();
        let wanted = |kind: &Kind| options.wants(kind.word()) || options.wants("body");
        if !Kind::ALL.iter().any(wanted) {
            return results;
        }
        let names: Vec<usize> = (0..self.contenders()).collect();
        for round in 0..options.rounds {
            eprintln!("round {} of {}", round + 1, options.rounds);
            let mut order = names.clone();
            // Nobody is always the first after somebody else.
            order.rotate_left(round % names.len());
            for which in order {
                if let Some(contender) = self.contender(which) {
                    measure(&contender, options, &mut results);
                } else if round == 0 {
                    results.missing.push(PEERS[which - OWN.len()].name);
                }
            }
        }
        results
    }

    fn contenders(&self) -> usize {
        OWN.len() + PEERS.len()
    }

    /// Starts the contender of that number.
    fn contender(&self, which: usize) -> Option<Contender> {
        if let Some(own) = OWN.get(which) {
            return Some(self.own(own));
        }
        let peer = &PEERS[which - OWN.len()];
        let running = peer.start(&self.ground)?;
        let at = running.listens;
        let origin = client_tls(self.origin_root.as_bytes());
        let mut routes = Vec::new();
        for service in peer.services {
            match service {
                Service::Absolute => routes.push((Kind::Absolute, self.absolute(at))),
                Service::Tunnel => routes.push((Kind::Tunnelled, self.tunnel(at, origin.clone()))),
                Service::Relay => {
                    let direct = self.direct(true);
                    routes.push((
                        Kind::Tunnelled,
                        Route {
                            connect: at,
                            ..direct
                        },
                    ));
                }
                Service::Intercept => {
                    let route = self.tunnel(at, client_tls(&self.ground.root()));
                    routes.extend(intercepted(&route));
                }
            }
        }
        Some(Contender {
            name: peer.name,
            family: Some(running.family()),
            routes,
            _keeps: Some(Keeps::Peer(running)),
        })
    }

    fn own(&self, own: &Own) -> Contender {
        let Some(destination) = own.destination else {
            let tls = self.direct(true);
            let mut routes = vec![
                (Kind::Absolute, self.direct(false)),
                (Kind::Tunnelled, tls.clone()),
            ];
            routes.extend(intercepted(&tls));
            return Contender {
                name: own.name,
                family: None,
                routes,
                _keeps: None,
            };
        };
        let name = own.name.replace([' ', ','], "-");
        let replica = Replica::start(self.dir.path(), &name, &self.keys(destination), own.log);
        let at = replica.proxy;
        let routes = if own.is_governed {
            let mut routes = vec![(Kind::Absolute, self.absolute(at))];
            routes.extend(intercepted(&self.tunnel(at, client_tls(&replica.root()))));
            routes
        } else {
            let trusts = client_tls(self.origin_root.as_bytes());
            vec![(Kind::Tunnelled, self.tunnel(at, trusts))]
        };
        Contender {
            name: own.name,
            family: Some(replica.family()),
            routes,
            _keeps: Some(Keeps::Replica(replica)),
        }
    }

    fn keys(&self, destination: &str) -> Keys {
        let roots = self.dir.path().join("roots.pem");
        std::fs::write(&roots, &self.origin_root).expect("our own folder");
        let (http, https) = (self.origin.http, self.origin.https);
        Keys {
            proxy: format!(
                "max_connections = 20000\nmax_wait = \"1h\"\nconnect_ports = [{}]",
                https.port()
            ),
            rest: format!(
                "[upstream]\nextra_roots = {roots:?}\nresolve = {{ \"{NAME}:{}\" = \"{http}\", \"{NAME}:{}\" = \"{https}\" }}\n\
                 [[destination]]\nname = \"bench\"\n{destination}\n",
                http.port(),
                https.port()
            ),
            ..Keys::default()
        }
    }

    fn direct(&self, is_tls: bool) -> Route {
        let at = if is_tls {
            self.origin.https
        } else {
            self.origin.http
        };
        Route {
            host: format!("{NAME}:{}", at.port()),
            tls: is_tls.then(|| client_tls(self.origin_root.as_bytes())),
            ..Route::plain(at)
        }
    }

    fn absolute(&self, proxy: std::net::SocketAddr) -> Route {
        let host = format!("{NAME}:{}", self.origin.http.port());
        Route {
            prefix: format!("http://{host}"),
            host,
            ..Route::plain(proxy)
        }
    }

    fn tunnel(&self, proxy: std::net::SocketAddr, tls: Arc<ClientConfig>) -> Route {
        let host = format!("{NAME}:{}", self.origin.https.port());
        Route {
            tunnel: Some(host.clone()),
            tls: Some(tls),
            host,
            ..Route::plain(proxy)
        }
    }

    /// What a held connection costs.
    fn memory(&self) {
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
        for which in 1..self.contenders() {
            let mut cells = Vec::new();
            let mut name = "";
            for is_used in [false, true] {
                let Some(contender) = self.contender(which) else {
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
            let is_paced = OWN.get(which).is_some_and(|own| own.is_governed);
            for is_tls in [false, true] {
                cells.push(if is_paced {
                    short(self.waiting(is_tls))
                } else {
                    String::new()
                });
            }
            table::row([name.to_owned()].into_iter().chain(cells));
        }
    }

    /// KiB for each request that waits for its turn.
    fn waiting(&self, is_tls: bool) -> f64 {
        // The last of them would wait for minutes.
        let keys = self.keys(&format!("hosts = [\"{NAME}\"]\nrate = 2.0"));
        let replica = Replica::start(self.dir.path(), "waiting", &keys, "access=off,info");
        let route = if is_tls {
            self.tunnel(replica.proxy, client_tls(&replica.root()))
        } else {
            self.absolute(replica.proxy)
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
            runtime.block_on(pause(100));
        }
        let grown = replica.family().memory_kib() - before;
        count.stop();
        runtime.shutdown_background();
        grown / depth()
    }

    /// Three replicas, 20 requests a second among them: the gaps between arrivals.
    fn gap(&self, options: &Options) {
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
                let mut keys = self.keys(&format!("hosts = [\"{NAME}\"]\nrate = {RATE:.1}"));
                keys.store = Some(postgres.url());
                let start =
                    |n: usize| Replica::start(self.dir.path(), &format!("gap{n}"), &keys, "info");
                let replicas: Vec<_> = (0..3).map(start).collect();
                let runtime = load::single();
                let count = Arc::new(load::Count::default());
                self.origin.watch();
                for replica in &replicas {
                    for _ in 0..clients {
                        let route = self.absolute(replica.proxy);
                        runtime.spawn(load::client(
                            route.clone(),
                            vec![route.request(SMALL)],
                            count.clone(),
                        ));
                    }
                }
                while count.answers.load(std::sync::atomic::Ordering::Relaxed) < FETCHES as u64 {
                    runtime.block_on(pause(20));
                }
                count.stop();
                let arrivals = self.origin.arrivals();
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
}

/// One of those that need no installation.
struct Own {
    name: &'static str,
    /// Lines of its destination; `None` is no proxy at all.
    destination: Option<&'static str>,
    is_governed: bool,
    log: &'static str,
}

/// No proxy, and paceline in its modes. The pace is one that nobody reaches: what pacing costs is in it, waiting is not.
const OWN: [Own; 5] = [
    Own {
        name: "direct",
        destination: None,
        is_governed: false,
        log: "",
    },
    Own {
        name: "paceline",
        destination: Some("hosts = [\"localhost\"]\nrate = 1000000.0"),
        is_governed: true,
        log: "info",
    },
    Own {
        name: "paceline, access=off",
        destination: Some("hosts = [\"localhost\"]\nrate = 1000000.0"),
        is_governed: true,
        log: "access=off,info",
    },
    Own {
        name: "paceline, dry_run, access=off",
        destination: Some("hosts = [\"localhost\"]\nrate = 1000000.0\ndry_run = true"),
        is_governed: true,
        log: "access=off,info",
    },
    Own {
        name: "paceline, ungoverned",
        destination: Some("hosts = [\"elsewhere.test\"]\nrate = 1.0"),
        is_governed: false,
        log: "info",
    },
];

fn intercepted(route: &Route) -> [(Kind, Route); 3] {
    [
        (Kind::Intercepted, route.clone()),
        (Kind::NewTunnel, route.new_each(false)),
        (Kind::NewTunnelResumed, route.new_each(true)),
    ]
}

/// Figures of one contender in one table.
#[derive(Default)]
struct Figures {
    rate: Rounds,
    p50: Rounds,
    p99: Rounds,
    cpu: Rounds,
    errors: usize,
}

#[derive(Default)]
struct Results {
    /// By kind and connections, then in the order in which they came.
    small: BTreeMap<(Kind, usize), Vec<(&'static str, Figures)>>,
    large: BTreeMap<Kind, Vec<(&'static str, Figures)>>,
    missing: Vec<&'static str>,
}

fn measure(contender: &Contender, options: &Options, results: &mut Results) {
    for (kind, route) in &contender.routes {
        prime(route);
        for &connections in options
            .connections
            .iter()
            .filter(|_| options.wants(kind.word()))
        {
            let outcome = load::run(
                route,
                |_| vec![route.request(SMALL)],
                connections,
                options.span,
                contender.family,
            );
            let figures = entry(
                results.small.entry((*kind, connections)).or_default(),
                contender.name,
            );
            let mut spans = outcome.spans;
            let [p50, p99] = percentiles(&mut spans, [50.0, 99.0]);
            figures.rate.add(outcome.requests as f64 / outcome.seconds);
            figures.p50.add(p50);
            figures.p99.add(p99);
            figures.cpu.add(outcome.cpu / outcome.requests as f64 * 1e4);
            figures.errors += outcome.errors;
        }
        if options.wants("body") && !route.is_new_each {
            let figures = entry(results.large.entry(*kind).or_default(), contender.name);
            match load::transfer(route, LARGE, LARGE_TIMES, contender.family) {
                Ok((rate, cpu)) => {
                    figures.rate.add(rate);
                    figures.cpu.add(cpu);
                }
                Err(fault) => {
                    eprintln!("{}: {fault}", contender.name);
                    figures.errors += 1;
                }
            }
        }
    }
}

fn entry<'a>(rows: &'a mut Vec<(&'static str, Figures)>, name: &'static str) -> &'a mut Figures {
    let at = rows
        .iter()
        .position(|(n, _)| *n == name)
        .unwrap_or_else(|| {
            rows.push((name, Figures::default()));
            rows.len() - 1
        });
    &mut rows[at].1
}

/// First uses are not measured: leaves minted, names resolved, pools filled.
fn prime(route: &Route) {
    let runtime = load::single();
    let request = route.request(SMALL);
    for _ in 0..5 {
        let answered = runtime.block_on(async {
            let mut wire = Wire::open(route).await?;
            wire.exchange(&request, &mut vec![0; 16 * 1024]).await
        });
        if answered.is_ok() {
            return;
        }
        std::thread::sleep(Duration::from_millis(300));
    }
}

impl Results {
    fn print(mut self, options: &Options) {
        if !self.missing.is_empty() {
            println!("\nnot installed, so left out: {}", self.missing.join(", "));
        }
        for ((kind, connections), rows) in &mut self.small {
            table::head(
                &format!("{}, {connections} connections, 1 KiB", kind.title()),
                &[
                    "",
                    "requests/s",
                    "of direct",
                    "paceline is",
                    "p50 us",
                    "p99 us",
                    "proxy CPU s/10,000",
                    "errors",
                ],
            );
            let reference = |name: &str| {
                rows.iter()
                    .find(|(n, _)| *n == name)
                    .map(|(_, f)| f.rate.clone())
            };
            let direct = reference("direct").unwrap_or_default();
            let own = reference(if *kind == Kind::Tunnelled {
                "paceline, ungoverned"
            } else {
                "paceline"
            });
            let own = own.unwrap_or_default();
            rows.sort_by(|(_, a), (_, b)| b.rate.median().total_cmp(&a.rate.median()));
            for (name, f) in rows {
                table::row([
                    (*name).to_owned(),
                    f.rate.to_string(),
                    f.rate.over(&direct).to_string(),
                    format!("{} x", own.over(&f.rate)),
                    f.p50.to_string(),
                    f.p99.to_string(),
                    f.cpu.to_string(),
                    f.errors.to_string(),
                ]);
            }
        }
        for (kind, rows) in self.large.iter_mut().filter(|_| options.wants("body")) {
            table::head(
                &format!("One body of 100 MiB: {}", kind.title()),
                &["", "GB/s", "of direct", "proxy CPU s/GiB", "errors"],
            );
            let direct = rows
                .iter()
                .find(|(n, _)| *n == "direct")
                .map(|(_, f)| f.rate.clone());
            let direct = direct.unwrap_or_default();
            rows.sort_by(|(_, a), (_, b)| b.rate.median().total_cmp(&a.rate.median()));
            for (name, f) in rows {
                let cells = [
                    f.rate.to_string(),
                    f.rate.over(&direct).to_string(),
                    f.cpu.to_string(),
                    f.errors.to_string(),
                ];
                table::row([(*name).to_owned()].into_iter().chain(cells));
            }
        }
    }
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

/// Lets the clients of a runtime of one thread work for so long.
async fn pause(milliseconds: u64) {
    tokio::time::sleep(Duration::from_millis(milliseconds)).await;
}

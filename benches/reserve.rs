//! What a reservation costs: `cargo bench --bench reserve`, about a minute, with a Postgres cluster of its own.
//! `--versions N` (50000; 1000000 takes some minutes): how far the part with a transaction held open goes.
//!
//! Beside it on the same connection stands a prepared `SELECT 1`, which is the least that any statement costs. The two
//! take turns, so that a busy machine slows both alike. Figures are of one machine at one time: compare ratios.
#![allow(
    clippy::disallowed_methods,
    reason = "a benchmark measures from outside"
)]

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use paceline::{
    config::Config,
    metrics::{Among, Metrics},
    pacing::{
        alarm::Alarm,
        cursor::{Ask, horizon},
        lane::{Call, Lane, Name},
        pacer::{Arrival, Settings},
        throttle::{NO_ROW, Rules},
        time::{LocalTime, Nanos, SECOND, nanos, seconds},
    },
    store::{
        Store,
        postgres::{
            Postgres as SharedStore,
            address::Address,
            session::{self, Prepared, Session},
            sql::{self, Table},
        },
    },
};
use tokio::{runtime::Runtime, task::JoinHandle};

/// Of the tests' bed, what a cluster needs.
#[path = "../tests/it/bed"]
#[allow(
    dead_code,
    unused_imports,
    reason = "the tests use more of it than this does"
)]
mod bed {
    pub mod await_until;
    pub mod certs;
    pub mod postgres;
    pub mod process;
    pub mod sql;

    pub(crate) use super::{free_address, runtime};
}

use bed::{await_until::await_until, postgres::Postgres};

const TABLE: &str = "shared_cache";
/// A throttle's row that nobody writes, and the word of a row that is not there.
const THROTTLE: (&str, &str) = ("throttle:bench", NO_ROW);
/// 7 requests a second.
const INTERVAL: Nanos = 142_857_143;
/// Pairs of `SELECT 1` and a reservation; and those before them, which warm the caches.
const PAIRS: usize = 5_000;
const WARM_UP: usize = 200;
const HOT_UPDATES: i64 = 20_000;
/// Versions of the row, none of which can be removed, at which a reservation is measured; and how many by how many callers.
const VERSIONS: [u32; 5] = [0, 10_000, 50_000, 200_000, 1_000_000];
const MEASURED: u32 = 2_000;
const CALLERS: usize = 3;
const BY_KEY: u32 = 100;
const THROUGHPUT_TIME: Duration = Duration::from_secs(2);

/// The goals: the p50 of a reservation in `SELECT 1`s, as a share of the interval, and the share of HOT updates.
const MOST_SELECTS: f64 = 4.0;
const MOST_OF_INTERVAL: f64 = 0.002;
const LEAST_HOT: f64 = 0.99;

fn runtime() -> &'static Runtime {
    static RUNTIME: std::sync::OnceLock<Runtime> = std::sync::OnceLock::new();
    RUNTIME.get_or_init(|| Runtime::new().expect("a runtime, as the program has one"))
}

fn free_address() -> std::net::SocketAddr {
    std::net::TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .expect("a free port on loopback")
}

fn main() {
    let most = most_versions();
    let postgres = Postgres::start();
    // As Django makes it for its database cache.
    postgres.sql().run(
        "CREATE TABLE shared_cache (cache_key varchar(255) NOT NULL PRIMARY KEY, value text NOT NULL,
                                    expires timestamptz NOT NULL);
         CREATE INDEX shared_cache_expires ON shared_cache (expires)",
    );
    let links = [
        ("loopback TCP", postgres.url()),
        ("unix socket", postgres.socket_url()),
    ];
    let mut fine = true;
    println!(
        "{} on {} cores",
        postgres.sql().texts("SHOW server_version")[0],
        cores()
    );
    println!(
        "{:<14} {:<10} {:>9} {:>9} {:>9} {:>9} {:>8} {:>8}",
        "", "", "SELECT 1", "", "reserve", "", "x SELECT", "of 143"
    );
    println!(
        "{:<14} {:<10} {:>9} {:>9} {:>9} {:>9} {:>8} {:>8}",
        "link", "statement", "p50 us", "p99 us", "p50 us", "p99 us", "p50", "ms"
    );
    for (link, url) in &links {
        for pooled in [false, true] {
            let cost = runtime().block_on(cost(&open(url, pooled)));
            let direct = !pooled;
            fine &= pooled || (cost.ratio() <= MOST_SELECTS && cost.share() <= MOST_OF_INTERVAL);
            println!(
                "{link:<14} {:<10} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>8.2} {:>7.3}%",
                if direct { "named" } else { "pooled" },
                cost.select[0],
                cost.select[1],
                cost.reserve[0],
                cost.reserve[1],
                cost.ratio(),
                cost.share() * 100.0
            );
        }
    }
    println!();
    let (updates, hot) = hot_updates(&postgres);
    let share = hot as f64 / updates as f64;
    fine &= share >= LEAST_HOT;
    println!("HOT updates: {hot} of {updates}, {:.2}%", share * 100.0);
    println!();
    println!("slots a second from one row, one caller, k slots a statement:");
    for slots in [1, 8, 64] {
        println!(
            "  k = {slots:<3} {:>12.0}",
            by_one_caller(&links[0].1, slots)
        );
    }
    let (rate, calls) = runtime().block_on(by_joined_callers(&links[0].1, 32));
    println!(
        "  32 callers in one lane {rate:>12.0}, {:.1} slots a statement",
        rate / calls
    );
    println!();
    with_a_transaction_held_open(&postgres, most);
    println!();
    println!(
        "goals: named reservation at most {MOST_SELECTS} x SELECT 1 and {}% of the interval, {}% HOT: {}",
        MOST_OF_INTERVAL * 100.0,
        LEAST_HOT * 100.0,
        if fine { "met" } else { "MISSED" }
    );
    if !fine {
        std::process::exit(1);
    }
}

fn most_versions() -> u32 {
    let mut words = std::env::args().skip(1).filter(|word| word != "--bench");
    match (words.next().as_deref(), words.next()) {
        (None, _) => 50_000,
        (Some("--versions"), Some(n)) if n.parse::<u32>().is_ok() => n.parse().unwrap_or_default(),
        _ => {
            eprintln!("use --versions N, a whole number");
            std::process::exit(2);
        }
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(0, usize::from)
}

fn open(url: &str, pooled: bool) -> Session {
    let address = Address::parse(url).expect("the bed's URL");
    let table = Table::new(TABLE);
    let plan = Arc::new(session::Plan {
        address,
        table: table.clone(),
        key_prefix: String::new(),
        missing: session::Missing::IsLeft,
    });
    let opened = runtime().block_on(session::open(&plan));
    let mut session = opened.expect("the cluster runs").session;
    assert!(
        matches!(session.reserve, Prepared::Named(_)),
        "not known as direct"
    );
    if pooled {
        session.reserve = Prepared::Unnamed(sql::reserve(&table, true, true));
    }
    session
}

/// p50 and p99 in microseconds.
struct Cost {
    select: [f64; 2],
    reserve: [f64; 2],
}

impl Cost {
    fn ratio(&self) -> f64 {
        self.reserve[0] / self.select[0]
    }

    fn share(&self) -> f64 {
        self.reserve[0] * 1e3 / INTERVAL as f64
    }
}

async fn cost(session: &Session) -> Cost {
    // So short an interval that the cursor stays where it is in use: about now.
    let ask = ask(1, 1_000);
    let select = session
        .client
        .prepare("SELECT 1")
        .await
        .expect("a statement");
    let (mut selects, mut reserves) = (Vec::new(), Vec::new());
    for n in 0..WARM_UP + PAIRS {
        let began = Instant::now();
        session.client.query_one(&select, &[]).await.expect("a row");
        let between = Instant::now();
        session
            .reserve("bench:cost", THROTTLE, &ask)
            .await
            .expect("a slot");
        if n >= WARM_UP {
            selects.push(between - began);
            reserves.push(between.elapsed());
        }
    }
    Cost {
        select: percentiles(selects),
        reserve: percentiles(reserves),
    }
}

fn percentiles(mut spans: Vec<Duration>) -> [f64; 2] {
    spans.sort();
    [50, 99].map(|p| spans[spans.len() * p / 100].as_secs_f64() * 1e6)
}

fn ask(slots: u32, interval: Nanos) -> Ask {
    Ask {
        slots,
        interval,
        lead: 0,
        floor: None,
        held: 0,
        horizon: horizon(interval, 3),
        disbelieved: None,
    }
}

/// Updates of the cursor's row, and how many of them were heap-only.
fn hot_updates(postgres: &Postgres) -> (i64, i64) {
    let sql = postgres.sql();
    let session = open(&postgres.socket_url(), false);
    sql.run("SELECT pg_stat_reset()");
    runtime().block_on(async {
        for _ in 0..HOT_UPDATES {
            session
                .reserve("bench:cost", THROTTLE, &ask(1, 1_000))
                .await
                .expect("a slot");
        }
    });
    drop(session);
    await_until("the updates are counted", Duration::from_secs(10), || {
        let count = |what: &str| sql.number(&format!("SELECT {what} FROM pg_stat_user_tables"));
        let (updates, hot) = (count("n_tup_upd"), count("n_tup_hot_upd"));
        (updates >= HOT_UPDATES).then_some((updates, hot))
    })
}

/// The store as replicas use it, and beside it the same reservation by the row's key, which is what each would be without
/// knowing where the row lies.
fn with_a_transaction_held_open(postgres: &Postgres, most: u32) {
    const KEY: &str = "bench:held";
    let held = postgres.sql();
    held.run("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT txid_current()");
    let stores: Vec<_> = (0..CALLERS)
        .map(|n| store(&postgres.socket_url(), &format!("r{n}")).0)
        .collect();
    for store in &stores {
        let up = runtime().block_on(store.wait_until_up(Duration::from_secs(10)));
        assert!(up, "no store");
    }
    let session = open(&postgres.socket_url(), false);
    let take = |store: &Arc<SharedStore>, times: u32| {
        let store = store.clone();
        runtime().spawn(async move {
            let mut spans = Vec::new();
            for _ in 0..times {
                let began = Instant::now();
                let reply = store.reserve(KEY, THROTTLE, ask(1, 1_000), false).await;
                spans.push(began.elapsed());
                reply.expect("a slot");
            }
            spans
        })
    };
    let ended = |task: JoinHandle<Vec<Duration>>| {
        runtime()
            .block_on(task)
            .expect("a caller that does not fail")
    };
    println!("with a transaction held open, us:");
    println!(
        "{:>10} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "versions", "1 caller", "", "", "3 callers", "", "by key", "", "table"
    );
    println!(
        "{:>10} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "", "p50", "p99", "mean", "p50", "p99", "p50", "p99", "MiB"
    );
    let mut made = 0;
    for versions in VERSIONS.into_iter().filter(|n| *n <= most) {
        ended(take(&stores[0], versions.saturating_sub(made)));
        let one = ended(take(&stores[0], MEASURED));
        let mean = one.iter().sum::<Duration>().as_secs_f64() * 1e6 / f64::from(MEASURED);
        let one = percentiles(one);
        let tasks: Vec<_> = stores.iter().map(|store| take(store, MEASURED)).collect();
        let three = percentiles(tasks.into_iter().flat_map(ended).collect());
        let mut by_key = Vec::new();
        for _ in 0..BY_KEY {
            let began = Instant::now();
            let ask = ask(1, 1_000);
            // Not spawned as the others are, which is to their disadvantage by some microseconds.
            let outcome = runtime().block_on(session.reserve(KEY, THROTTLE, &ask));
            by_key.push(began.elapsed());
            outcome.expect("a slot");
        }
        let by_key = percentiles(by_key);
        made = versions.max(made) + MEASURED * (1 + CALLERS as u32) + BY_KEY;
        let size = postgres
            .sql()
            .number(&format!("SELECT pg_relation_size('{TABLE}')"));
        println!(
            "{versions:>10} {:>9.0} {:>9.0} {mean:>9.0} {:>9.0} {:>9.0} {:>9.0} {:>9.0} {:>9.1}",
            one[0],
            one[1],
            three[0],
            three[1],
            by_key[0],
            by_key[1],
            size as f64 / f64::from(1 << 20)
        );
    }
}

fn by_one_caller(url: &str, slots: u32) -> f64 {
    let session = open(url, false);
    let began = Instant::now();
    let mut taken = 0.0;
    runtime().block_on(async {
        while began.elapsed() < THROUGHPUT_TIME {
            let ask = ask(slots, 1_000);
            let reply = session.reserve("bench:rate", THROTTLE, &ask).await;
            let reply = reply.expect("a reply").expect("within the horizon");
            taken += f64::from(reply.granted.expect("slots").slots);
        }
    });
    taken / began.elapsed().as_secs_f64()
}

/// A replica's store, with its own connections.
fn store(url: &str, replica: &str) -> (Arc<SharedStore>, Arc<Metrics>) {
    let config = format!(
        "[store]\nurl = \"{url}\"\ntable = \"{TABLE}\"\nreplica = \"{replica}\"\n\
         [[destination]]\nname = \"bench\"\nhosts = [\"bench.test\"]\nrate = 1.0\n"
    );
    let config =
        Config::parse(&config, Path::new("bench.toml"), &|_| None).expect("a configuration");
    let metrics = Metrics::new();
    let _context = runtime().enter();
    let store = SharedStore::start(&config.store.expect("a store"), [].into(), metrics.clone());
    let store = store.expect("a URL");
    (store, metrics)
}

/// Slots that requests in one lane really used each second, and statements a second.
async fn by_joined_callers(url: &str, callers: u64) -> (f64, f64) {
    let (store, metrics) = store(url, "joined");
    assert!(
        store.wait_until_up(Duration::from_secs(10)).await,
        "no store"
    );
    let settings = Settings {
        interval: 1_000,
        max_in_flight: None,
        queue_limit: 1_000,
        shares: 3,
    };
    let alarm = Alarm::start().expect("a timer");
    let voided = Arc::new(AtomicU64::new(0));
    let lane = Lane::new(
        Name {
            destination: "bench".into(),
            cursor: "lane".into(),
            key: "bench:lane".into(),
            throttle_key: THROTTLE.0.into(),
            ceiling: 1e6,
        },
        (settings, Rules::default()),
        Store::Postgres(store),
        alarm,
        voided,
        None,
    );
    let used = Arc::new(AtomicU64::new(0));
    let began = LocalTime::now();
    let end = began.plus(nanos(THROUGHPUT_TIME));
    let tasks: Vec<_> = (0..callers)
        .map(|client| {
            let (lane, used) = (lane.clone(), used.clone());
            tokio::spawn(async move {
                while LocalTime::now() < end {
                    let arrival = Arrival {
                        client,
                        urgency: 3,
                        deadline: end.plus(SECOND),
                        target: 1,
                    };
                    let Ok(mut ticket) = lane.enter(arrival) else {
                        continue;
                    };
                    loop {
                        match ticket.next().await {
                            Ok(Call::Connect) => ticket.ready(false),
                            Ok(Call::Go(pass)) => match pass.depart() {
                                Ok(_) => {
                                    used.fetch_add(1, Relaxed);
                                    break;
                                }
                                Err(again) => ticket = *again,
                            },
                            Err(_) => break,
                        }
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("a caller that does not fail");
    }
    let span = seconds(LocalTime::now().since(began));
    (used.load(Relaxed) as f64 / span, calls(&metrics) / span)
}

fn calls(metrics: &Metrics) -> f64 {
    let scrape = metrics.scrape(&[], Among::default());
    let count = scrape
        .lines()
        .find_map(|line| line.strip_prefix("paceline_reservation_seconds_count "));
    count
        .and_then(|n| n.parse().ok())
        .expect("the count of calls")
}

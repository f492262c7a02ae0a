//! Hours of even load, and whether anything grows meanwhile: `benches/soak [OPTIONS]`.
//!
//! Two replicas on one Postgres, clients that always want more than the pace allows, half of them in intercepted tunnels.
//! Every ten seconds a line of CSV; at the end a line for each column that says whether it is flat: the last quarter
//! against the second one, since the first fills caches and pools. It ends with 1 if anything grows.
//!
//! `--minutes N` (60), `--rate N` (300), `--csv FILE` (standard output), `--held-transaction`: a transaction stays open
//! on the database from before the first request to after the last, so that no dead row version can be removed.
#![allow(
    clippy::disallowed_methods,
    reason = "a benchmark measures from outside"
)]

use std::{
    env,
    fmt::Write as _,
    fs::File,
    process::exit,
    sync::{Arc, atomic::Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use tokio::runtime::Builder;

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

    pub(crate) use super::bed;
}

use bed::{
    certs::{TestCa, client_tls, server_tls},
    metrics::Scrape,
    postgres::Postgres,
    sql::Sql,
};
use parts::{
    load::{self, Count, Route},
    options::{parsed, wrong},
    origin::Origin,
    proc::{Family, postmaster},
    replica::{Keys, Replica},
};

const EVERY: Duration = Duration::from_secs(10);
const REPLICAS: usize = 2;
/// Clients of each replica: enough that somebody always waits.
const CLIENTS: usize = 32;
const HOST: &str = "soak.test";

/// What a line tells, whether growth of it is a fault, and by how much it may differ without having grown: a share, and an
/// amount beyond that for small figures.
const COLUMNS: [(&str, bool, f64, f64); 13] = [
    ("seconds", false, 0.0, 0.0),
    ("rate_per_s", false, 0.0, 0.0),
    ("errors", true, 0.0, 0.0),
    ("rss_a_kib", true, 0.05, 1024.0),
    ("rss_b_kib", true, 0.05, 1024.0),
    ("files_a", true, 0.05, 8.0),
    ("files_b", true, 0.05, 8.0),
    ("table_kib", true, 0.1, 64.0),
    ("dead_tuples", true, 0.5, 1000.0),
    ("hot_share", false, 0.0, 0.0),
    ("reservation_p50_us", true, 0.25, 50.0),
    ("reservation_p99_us", true, 0.5, 1000.0),
    ("store_cpu_share", true, 0.25, 0.02),
];

struct Wishes {
    span: Duration,
    rate: f64,
    csv: Option<String>,
    holds_transaction: bool,
}

impl Wishes {
    fn read() -> Wishes {
        let mut wishes = Wishes {
            span: Duration::from_secs(3600),
            rate: 300.0,
            csv: None,
            holds_transaction: false,
        };
        let mut words = env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().unwrap_or_default();
            match word.as_str() {
                // By cargo.
                "--bench" => {}
                "--minutes" => {
                    wishes.span = Duration::from_secs_f64(parsed::<f64>(&word, &value()) * 60.0);
                }
                "--rate" => wishes.rate = parsed(&word, &value()),
                "--csv" => wishes.csv = Some(value()),
                "--held-transaction" => wishes.holds_transaction = true,
                _ => wrong(
                    &word,
                    "use --minutes N, --rate N, --csv FILE or --held-transaction",
                ),
            }
        }
        wishes
    }
}

fn main() {
    paceline::app::raise_file_limit();
    let wishes = Wishes::read();
    let mut csv: Box<dyn std::io::Write> = match &wishes.csv {
        Some(path) => match File::create(path) {
            Ok(file) => Box::new(file),
            Err(fault) => wrong("--csv", format!("cannot write {path}: {fault}")),
        },
        None => Box::new(std::io::stdout()),
    };
    let dir = tempfile::tempdir().expect("a temporary folder");
    let ca = TestCa::new();
    let origin = Origin::start(server_tls(&ca.issue(&[HOST])));
    let postgres = Postgres::start();
    let roots = dir.path().join("roots.pem");
    std::fs::write(&roots, ca.root()).expect("our own folder");
    let keys = Keys {
        store: Some(postgres.url()),
        rest: format!(
            "[upstream]\nextra_roots = {roots:?}\nresolve = {{ \"{HOST}:80\" = \"{}\", \"{HOST}:443\" = \"{}\" }}\n\
             [[destination]]\nname = \"soak\"\nhosts = [\"{HOST}\"]\nrate = {:.3}\n",
            origin.http, origin.https, wishes.rate
        ),
        ..Keys::default()
    };
    // Access lines would fill the folder: there is one for each request.
    let start = |n| Replica::start(dir.path(), &format!("replica{n}"), &keys, "access=off,info");
    let replicas: Vec<_> = (0..REPLICAS).map(start).collect();
    let sql = postgres.sql();
    let held = wishes.holds_transaction.then(|| {
        let held = postgres.sql();
        // The first statement takes the snapshot.
        held.run("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM paceline");
        held
    });
    let count = Arc::new(Count::default());
    // One thread for the clients, beside the one that samples.
    let clients = Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build();
    let clients = clients.expect("a runtime");
    for replica in &replicas {
        for number in 0..CLIENTS {
            let plain = Route {
                prefix: format!("http://{HOST}"),
                host: HOST.to_owned(),
                ..Route::plain(replica.proxy)
            };
            let tunnelled = Route {
                tunnel: Some(format!("{HOST}:443")),
                tls: Some(client_tls(&replica.root())),
                host: HOST.to_owned(),
                ..Route::plain(replica.proxy)
            };
            let route = if number % 2 == 0 { plain } else { tunnelled };
            let requests = vec![route.request("/1024")];
            clients.spawn(load::client(route, requests, count.clone()));
        }
    }
    let names: Vec<_> = COLUMNS.iter().map(|column| column.0).collect();
    say(&mut csv, &names.join(","));
    let began = Instant::now();
    let mut before = Sample::take(&replicas, &sql, &count);
    let mut lines: Vec<[f64; COLUMNS.len()]> = Vec::new();
    while began.elapsed() < wishes.span {
        let next = EVERY * (lines.len() as u32 + 1);
        thread::sleep(next.saturating_sub(began.elapsed()));
        let now = Sample::take(&replicas, &sql, &count);
        let line = now.since(&before, began);
        say(
            &mut csv,
            &line.map(|figure| format!("{figure:.3}")).join(","),
        );
        lines.push(line);
        before = now;
    }
    count.stop();
    drop(held);
    clients.shutdown_background();
    let (verdict, is_flat) = verdict(&lines);
    say(&mut csv, &verdict);
    if wishes.csv.is_some() {
        println!("{verdict}");
    }
    if !is_flat {
        drop((replicas, postgres));
        exit(1);
    }
}

fn say(csv: &mut dyn std::io::Write, line: &str) {
    if let Err(fault) = writeln!(csv, "{line}").and_then(|()| csv.flush()) {
        wrong("--csv", format!("cannot write: {fault}"));
    }
}

/// What stands at one moment.
struct Sample {
    at: Instant,
    answers: f64,
    errors: f64,
    memory: Vec<f64>,
    files: Vec<f64>,
    table_kib: f64,
    dead: f64,
    updates: f64,
    hot: f64,
    buckets: Vec<(f64, f64)>,
    store_cpu: f64,
}

impl Sample {
    fn take(replicas: &[Replica], sql: &Sql, count: &Count) -> Sample {
        let of_table = |what: &str| {
            let from = "FROM pg_stat_user_tables WHERE relname = 'paceline'";
            sql.number(&format!("SELECT {what}::int8 {from}")) as f64
        };
        let scrapes: Vec<_> = replicas.iter().map(Replica::scrape).collect();
        Sample {
            at: Instant::now(),
            answers: count.answers.load(Relaxed) as f64,
            errors: count.errors.load(Relaxed) as f64,
            memory: replicas.iter().map(|r| r.family().memory_kib()).collect(),
            files: replicas.iter().map(|r| r.family().files() as f64).collect(),
            table_kib: of_table("pg_table_size(relid) / 1024"),
            dead: of_table("n_dead_tup"),
            updates: of_table("n_tup_upd"),
            hot: of_table("n_tup_hot_upd"),
            buckets: buckets(&scrapes),
            store_cpu: Family(postmaster(sql)).cpu_seconds(),
        }
    }

    fn since(&self, before: &Sample, began: Instant) -> [f64; COLUMNS.len()] {
        let span = (self.at - before.at).as_secs_f64();
        let calls: Vec<_> = self
            .buckets
            .iter()
            .zip(&before.buckets)
            .map(|((limit, now), (_, then))| (*limit, now - then))
            .collect();
        [
            (self.at - began).as_secs_f64(),
            (self.answers - before.answers) / span,
            self.errors - before.errors,
            self.memory[0],
            self.memory[1],
            self.files[0],
            self.files[1],
            self.table_kib,
            self.dead,
            (self.hot - before.hot) / (self.updates - before.updates),
            within(&calls, 0.5) * 1e6,
            within(&calls, 0.99) * 1e6,
            (self.store_cpu - before.store_cpu) / span,
        ]
    }
}

/// The reservations of all replicas: up to how many seconds, how many.
fn buckets(scrapes: &[Scrape]) -> Vec<(f64, f64)> {
    let name = "paceline_reservation_seconds_bucket";
    let mut limits: Vec<f64> = scrapes
        .iter()
        .flat_map(|scrape| scrape.label_values("le"))
        .filter_map(|limit| limit.replace("+Inf", "inf").parse().ok())
        .collect();
    limits.sort_by(f64::total_cmp);
    limits.dedup();
    let up_to = |limit: f64| {
        let label = if limit.is_finite() {
            limit.to_string()
        } else {
            "+Inf".to_owned()
        };
        let counts = scrapes
            .iter()
            .map(|s| s.sum(name, &[&format!("le=\"{label}\"")]));
        counts.sum::<Option<f64>>().map(|count| (limit, count))
    };
    limits.into_iter().filter_map(up_to).collect()
}

/// The value that this share of a histogram does not exceed, in between its limits as if they were evenly filled.
fn within(buckets: &[(f64, f64)], share: f64) -> f64 {
    let wanted = buckets.last().map_or(0.0, |(_, all)| all * share);
    let (mut below, mut counted) = (0.0, 0.0);
    for &(limit, count) in buckets {
        if count >= wanted && count > counted {
            let part = (wanted - counted) / (count - counted);
            return if limit.is_finite() {
                below + (limit - below) * part
            } else {
                below
            };
        }
        (below, counted) = (limit, count);
    }
    f64::NAN
}

/// One line that says what grew from the second quarter to the last, and whether nothing did.
fn verdict(lines: &[[f64; COLUMNS.len()]]) -> (String, bool) {
    let quarter = lines.len() / 4;
    if quarter == 0 {
        return (
            "verdict: too short to tell; run for a minute or more".to_owned(),
            false,
        );
    }
    let mean = |lines: &[[f64; COLUMNS.len()]], column: usize| {
        lines.iter().map(|line| line[column]).sum::<f64>() / lines.len() as f64
    };
    let (mut grown, mut text) = (Vec::new(), String::new());
    for (column, (name, is_fault, share, amount)) in COLUMNS.iter().enumerate().skip(1) {
        let early = mean(&lines[quarter..2 * quarter], column);
        let late = mean(&lines[lines.len() - quarter..], column);
        let _ = write!(text, " {name} {early:.3} -> {late:.3};");
        if *is_fault && late > early * (1.0 + share) + amount {
            grown.push(*name);
        }
    }
    let word = match grown.as_slice() {
        [] => "flat".to_owned(),
        grown => format!("grows: {}", grown.join(", ")),
    };
    (format!("verdict: {word};{text}"), grown.is_empty())
}

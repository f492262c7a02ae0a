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

use std::{collections::BTreeMap, time::Duration};

#[path = "parts/bed.rs"]
mod bed;

#[path = "parts"]
#[allow(dead_code, reason = "other benches use more of it than this does")]
mod parts {
    pub mod contenders;
    pub mod gap;
    pub mod held;
    pub mod installed;
    pub mod load;
    pub mod options;
    pub mod origin;
    pub mod peers;
    pub mod proc;
    pub mod replica;
    pub mod runtime;
    pub mod table;

    pub(crate) use super::bed;
}

use parts::{
    contenders::{Bench, Contender, Kind, SMALL},
    load::{self, Route, Wire},
    options::Options,
    table::{self, Rounds, percentiles},
};

/// The large body, and how often it is fetched on one connection.
const LARGE: usize = 100 << 20;
const LARGE_TIMES: usize = 8;

fn main() {
    paceline::app::raise_file_limit();
    let options = Options::read(3, 1.0, &[1, 16]);
    let bench = Bench::new();
    let results = rounds(&bench, &options);
    results.print(&options);
    if options.wants("memory") {
        parts::held::memory(&bench);
    }
    if options.wants("gap") {
        parts::gap::gap(&bench, &options);
    }
}

fn rounds(bench: &Bench, options: &Options) -> Results {
    let mut results = Results::default();
    let wanted = |kind: &Kind| options.wants(kind.word()) || options.wants("body");
    if !Kind::ALL.iter().any(wanted) {
        return results;
    }
    let names: Vec<usize> = (0..bench.contenders()).collect();
    for round in 0..options.rounds {
        eprintln!("round {} of {}", round + 1, options.rounds);
        let mut order = names.clone();
        // Nobody is always the first after somebody else.
        order.rotate_left(round % names.len());
        let mut contenders = Vec::new();
        for which in order {
            match bench.contender(which) {
                Some(contender) => contenders.push(contender),
                None if round == 0 => results.missing.push(Bench::name_of(which)),
                None => {}
            }
        }
        results.measure(&contenders, options);
    }
    results
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

fn small(
    contender: &Contender,
    route: &Route,
    connections: usize,
    span: Duration,
    figures: &mut Figures,
) {
    let requests = |_| vec![route.request(SMALL)];
    let outcome = load::run(route, requests, connections, span, contender.family);
    let mut spans = outcome.spans;
    let [p50, p99] = percentiles(&mut spans, [50.0, 99.0]);
    figures.rate.add(outcome.requests as f64 / outcome.seconds);
    figures.p50.add(p50);
    figures.p99.add(p99);
    figures.cpu.add(outcome.cpu / outcome.requests as f64 * 1e4);
    figures.errors += outcome.errors;
}

fn large(contender: &Contender, route: &Route, figures: &mut Figures) {
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

/// The rates of a direct connection and of paceline.
fn references(kind: Kind, rows: &[(&'static str, Figures)]) -> (Rounds, Rounds) {
    let own = match kind {
        Kind::Tunnelled => "paceline, ungoverned",
        _ => "paceline",
    };
    let of = |name: &str| {
        let row = rows.iter().find(|(n, _)| *n == name);
        row.map(|(_, f)| f.rate.clone()).unwrap_or_default()
    };
    (of("direct"), of(own))
}

impl Results {
    /// One figure of each contender after the other: a machine's mood lasts for seconds, and is to be the same for all.
    fn measure<'c>(&mut self, contenders: &'c [Contender], options: &Options) {
        let of = |kind: Kind| {
            let routes = move |c: &'c Contender| c.routes.iter().filter(move |(k, _)| *k == kind);
            contenders
                .iter()
                .flat_map(move |c| routes(c).map(move |(_, route)| (c, route)))
        };
        for kind in Kind::ALL {
            for (_, route) in of(kind) {
                prime(route);
            }
            let connections = options.connections.iter();
            for &connections in connections.filter(|_| options.wants(kind.word())) {
                for (contender, route) in of(kind) {
                    let rows = self.small.entry((kind, connections)).or_default();
                    small(
                        contender,
                        route,
                        connections,
                        options.span,
                        entry(rows, contender.name),
                    );
                }
            }
            for (contender, route) in of(kind).filter(|_| options.wants("body")) {
                if !route.is_new_each {
                    let rows = self.large.entry(kind).or_default();
                    large(contender, route, entry(rows, contender.name));
                }
            }
        }
    }

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
            let (direct, own) = references(*kind, rows);
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
                &[
                    "",
                    "GB/s",
                    "of direct",
                    "paceline is",
                    "proxy CPU s/GiB",
                    "errors",
                ],
            );
            let (direct, own) = references(*kind, rows);
            rows.sort_by(|(_, a), (_, b)| b.rate.median().total_cmp(&a.rate.median()));
            for (name, f) in rows {
                let cells = [
                    f.rate.to_string(),
                    f.rate.over(&direct).to_string(),
                    format!("{} x", own.over(&f.rate)),
                    f.cpu.to_string(),
                    f.errors.to_string(),
                ];
                table::row([(*name).to_owned()].into_iter().chain(cells));
            }
        }
    }
}

//! Rows that a foreign transaction has locked: what it costs the lanes that want them, and the others.

use std::{
    ops::Range,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    thread,
    time::Duration,
};

use crate::{
    bed::{
        bouncer::Bouncer,
        client::Browser,
        origin::Origin,
        postgres::Postgres,
        recipe::{Recipe, Site},
        replica::Replica,
        timeline::Timeline,
    },
    outage::fleet::pass,
};

const FREE: &str = "free.test";
const RATE: f64 = 20.0;

/// A replica with one destination of a host that nobody locks, and one of many hosts, each with a cursor of its own.
struct Scene {
    origin: Origin,
    site: Site,
    replica: Replica,
    hosts: Vec<String>,
}

impl Scene {
    fn new(store: &str, hosts: usize, rate: f64) -> Scene {
        let hosts: Vec<String> = (0..hosts).map(|n| format!("h{n}.locked.test")).collect();
        let names: Vec<&str> = [FREE]
            .into_iter()
            .chain(hosts.iter().map(String::as_str))
            .collect();
        let (origin, site) = (Origin::tls(&names), Site::new());
        let recipe = Recipe::new()
            .proxy("max_wait = \"60s\"")
            .store(store)
            .store_key("max_replicas = 2")
            .destination("free", &[FREE], &format!("{RATE:?}"))
            .destination("locked", &["*.locked.test"], &format!("{rate:?}"))
            .key("scope = \"host\"")
            .origin(&origin);
        let replica = Replica::start(&site, "r0", &recipe);
        Scene {
            origin,
            site,
            replica,
            hosts,
        }
    }

    /// Keeps all hosts busy while `act` runs.
    fn under_load<T>(&self, act: impl FnOnce() -> T) -> T {
        let (done, ids) = (AtomicBool::new(false), AtomicUsize::new(0));
        let client = |browser: Browser, prefix: &str| {
            let mut tunnel = browser.tunnel().expect("a tunnel");
            while !done.load(Relaxed) {
                let id = ids.fetch_add(1, Relaxed);
                let answer = tunnel
                    .get(&format!("/b/1?id={prefix}{id}"))
                    .expect("an answer");
                assert_eq!(answer.status(), 200, "{}", answer.text());
            }
        };
        let browser = |host: &str| self.replica.browser(&self.site, host);
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| client(browser(FREE), "free"));
            }
            for host in &self.hosts {
                scope.spawn(|| client(browser(host), "locked"));
            }
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(act));
            done.store(true, Relaxed);
            outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    fn now(&self) -> f64 {
        self.origin.elapsed().as_secs_f64()
    }

    fn seen(&self, prefix: &str, span: &Range<f64>) -> Timeline {
        let second = Duration::from_secs_f64;
        self.origin
            .timeline(prefix)
            .between(second(span.start), second(span.end))
    }

    fn rate(&self, prefix: &str, span: &Range<f64>) -> f64 {
        self.seen(prefix, span).count() as f64 / (span.end - span.start)
    }

    fn check_no_session_was_lost(&self) {
        let said = self.replica.stderr();
        assert!(!said.contains("store lost"), "{said}");
    }

    /// All rows of the hosts are locked for so many seconds. The others must not notice; those must go on at their share, a
    /// half, once all can know: `told` of them at least.
    fn lock_all(&self, postgres: &Postgres, rate: f64, seconds: f64, told: usize) {
        let holder = postgres.sql();
        let lock = "BEGIN; SELECT count(*) FROM (SELECT 1 FROM paceline WHERE cache_key LIKE 'paceline:locked/%' FOR UPDATE) AS r";
        let (locked, freed) = self.under_load(|| {
            pass(3.0);
            holder.run(lock);
            let locked = self.now();
            pass(seconds);
            holder.run("ROLLBACK");
            let freed = self.now();
            pass(3.0);
            (locked, freed)
        });
        self.check_no_session_was_lost();
        let free = self.rate("free", &(locked..freed));
        assert!(free >= 0.9 * RATE, "{free:.2}/s by the row that is free");
        assert!(self.seen("free", &(locked..freed)).busiest_second() <= RATE as usize + 1);
        let share = rate / 2.0 * told as f64;
        let sent = self.rate("locked", &(locked + 8.0..freed));
        let all = rate / 2.0 * self.hosts.len() as f64;
        assert!(
            (0.75 * share..=1.1 * all).contains(&sent),
            "{sent:.2}/s by the locked rows, whose shares are {share:.2}/s"
        );
    }
}

#[test]
fn four_locked_rows_cost_the_others_nothing() {
    let postgres = Postgres::start();
    Scene::new(&postgres.url(), 4, 2.0).lock_all(&postgres, 2.0, 16.0, 4);
}

#[test]
fn locked_rows_cost_the_others_nothing_where_the_role_has_a_statement_timeout() {
    let postgres = Postgres::start();
    postgres
        .sql()
        .run("ALTER ROLE postgres SET statement_timeout = '300ms'");
    Scene::new(&postgres.url(), 4, 2.0).lock_all(&postgres, 2.0, 16.0, 4);
}

#[test]
fn seventy_locked_rows_cost_the_others_nothing() {
    let postgres = Postgres::start();
    // No more than 64 cursors are told of to the others.
    Scene::new(&postgres.url(), 70, 0.5).lock_all(&postgres, 0.5, 24.0, 64);
}

#[test]
fn an_isolation_level_that_forbids_to_wait_for_others_loses_no_session() {
    for pooled in [false, true] {
        let postgres = Postgres::start();
        let sql = postgres.sql();
        sql.run("ALTER ROLE postgres SET default_transaction_isolation = 'repeatable read'");
        let bouncer = pooled.then(|| Bouncer::before(&postgres));
        let store = bouncer.as_ref().map_or(postgres.url(), Bouncer::url);
        let scene = Scene::new(&store, 1, 5.0);
        let done = AtomicBool::new(false);
        let span = thread::scope(|scope| {
            scope.spawn(|| {
                let writer = postgres.sql();
                while !done.load(Relaxed) {
                    // Holds the row for longer than a statement of ours waits at first, and changes it.
                    writer.run(
                        "BEGIN ISOLATION LEVEL READ COMMITTED;
                         UPDATE paceline SET expires = expires + interval '1 microsecond' WHERE cache_key LIKE 'paceline:locked/%';
                         SELECT pg_sleep(0.04); COMMIT; SELECT pg_sleep(0.04)",
                    );
                }
            });
            let span = scene.under_load(|| {
                pass(2.0);
                let from = scene.now();
                pass(8.0);
                from..scene.now()
            });
            done.store(true, Relaxed);
            span
        });
        scene.check_no_session_was_lost();
        let (free, contended) = (scene.rate("free", &span), scene.rate("locked", &span));
        assert!(free >= 0.9 * RATE, "pooled {pooled}: {free:.2}/s beside it");
        let least = if pooled { 2.0 } else { 3.5 };
        assert!(contended >= least, "pooled {pooled}: {contended:.2}/s");
    }
}

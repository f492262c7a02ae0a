//! Replicas of one destination under constant load, and what their clients and the origin saw.

use std::{
    ops::Range,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    thread,
    time::Duration,
};

use crate::bed::{
    await_until::await_until,
    client::Browser,
    origin::Origin,
    recipe::{Recipe, Site},
    replica::Replica,
    timeline::Timeline,
};

pub const HOST: &str = "lh3.googleusercontent.com";
/// The ceiling of all tests here, per second.
pub const CEILING: f64 = 12.0;
/// The row of the cursor.
pub const CURSOR: &str = "paceline:google_image";
const CLIENTS_EACH: usize = 12;

/// An origin, a folder, and the destination that all replicas pace.
pub struct Fleet {
    pub origin: Origin,
    pub site: Site,
    done: AtomicBool,
    loads: AtomicUsize,
}

impl Fleet {
    pub fn new() -> Fleet {
        Fleet {
            origin: Origin::tls(&[HOST]),
            site: Site::new(),
            done: AtomicBool::new(false),
            loads: AtomicUsize::new(0),
        }
    }

    pub fn recipe(&self, store: &str) -> Recipe {
        self.recipe_at(store, CEILING)
    }

    pub fn recipe_at(&self, store: &str, rate: f64) -> Recipe {
        Recipe::new()
            .store(store)
            .destination(
                "google_image",
                &["*.googleusercontent.com"],
                &format!("{rate:?}"),
            )
            .origin(&self.origin)
    }

    /// A ready replica. The first one makes the CA that all share.
    pub fn start(&self, name: &str, store: &str) -> Replica {
        Replica::start(&self.site, name, &self.recipe(store))
    }

    /// Ready replicas `r0`, `r1`, ... with stores of their own.
    pub fn start_each(&self, stores: &[String]) -> Vec<Replica> {
        let start = |(n, store): (usize, &String)| self.start(&format!("r{n}"), store);
        stores.iter().enumerate().map(start).collect()
    }

    pub fn browser(&self, replica: &Replica) -> Browser {
        replica.browser(&self.site, HOST)
    }

    /// Keeps all of `replicas` busy while `act` runs; then lets what is under way end. Whatever a client was answered
    /// that was not 200 is returned.
    pub fn under_load<T>(
        &self,
        replicas: &[&Replica],
        act: impl FnOnce() -> T,
    ) -> (T, Vec<String>) {
        let browsers: Vec<Browser> = replicas.iter().map(|r| self.browser(r)).collect();
        self.done.store(false, Relaxed);
        thread::scope(|scope| {
            let clients: Vec<_> = browsers
                .iter()
                .enumerate()
                .flat_map(|(n, browser)| (0..CLIENTS_EACH).map(move |_| (n, browser)))
                .map(|(n, browser)| scope.spawn(move || self.fetch_on(n, browser)))
                .collect();
            // A failed claim must not leave the clients running, or the scope would wait for them for ever.
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(act));
            self.done.store(true, Relaxed);
            let failures = clients.into_iter().filter_map(|c| c.join().ok().flatten());
            let failures: Vec<String> = failures.collect();
            match outcome {
                Ok(value) => (value, failures),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// One client: fetches by one tunnel until it is told to end or something goes wrong.
    fn fetch_on(&self, replica: usize, browser: &Browser) -> Option<String> {
        let load = self.loads.fetch_add(1, Relaxed);
        let mut tunnel = match browser.tunnel() {
            Ok(tunnel) => tunnel,
            Err(fault) => return Some(format!("r{replica}: {fault}")),
        };
        for n in 0.. {
            if self.done.load(Relaxed) {
                break;
            }
            match tunnel.get(&format!("/b/1?id=r{replica}-{load}-{n}")) {
                Ok(answer) if answer.status() == 200 => {}
                Ok(answer) => {
                    return Some(format!("r{replica}: {} {}", answer.status(), answer.text()));
                }
                Err(fault) => return Some(format!("r{replica}: {fault}")),
            }
        }
        None
    }

    /// Now, on the origin's time.
    pub fn now(&self) -> f64 {
        self.origin.elapsed().as_secs_f64()
    }

    /// What arrived from the clients of all replicas in a span of the origin's time, in seconds.
    pub fn seen(&self, span: Range<f64>) -> Timeline {
        self.seen_of("r", span)
    }

    /// What arrived by one replica.
    pub fn seen_of(&self, replica: &str, span: Range<f64>) -> Timeline {
        let second = Duration::from_secs_f64;
        let all = self.origin.timeline(replica);
        all.between(second(span.start.max(0.0)), second(span.end))
    }

    /// Arrivals per second in a span.
    pub fn rate(&self, span: Range<f64>) -> f64 {
        self.rate_of("r", span)
    }

    /// Arrivals per second by one replica in a span.
    pub fn rate_of(&self, replica: &str, span: Range<f64>) -> f64 {
        self.seen_of(replica, span.clone()).count() as f64 / (span.end - span.start)
    }

    /// Whatever was promised over the whole run: each arrival once, and never more than a request over the ceiling in
    /// any second, two where the fleet's state changes; over longer spans as many as replicas may have changed theirs.
    pub fn check_the_ceiling(&self) {
        assert_eq!(self.origin.duplicates(), Vec::<String>::new());
        let all = self.origin.timeline("r");
        let (busiest, excess) = (all.busiest_second(), all.excess(CEILING));
        assert!(
            busiest <= 14 && excess <= 4.2,
            "{busiest} arrivals in one second; {excess:.2} over the ceiling"
        );
    }
}

/// Lets time pass while the fleet is under load: what is claimed is a rate over that time.
pub fn pass(seconds: f64) {
    thread::sleep(Duration::from_secs_f64(seconds));
}

/// Waits until `replica` says so on `/metrics`.
pub fn await_metric(replica: &Replica, name: &str, labels: &[&str], value: f64) {
    await_until(
        &format!("{name} {labels:?} is {value}"),
        Duration::from_secs(15),
        || (replica.scrape().sum(name, labels) == Some(value)).then_some(()),
    );
}

//! What is counted. All names stand here; only this file knows the metrics library.
//!
//! [`Metrics`] is built on a registry of its own, so that each program in one test process counts alone. Labels are
//! configured destination names, never hosts that a client asked for. Figures that change with each request are
//! resolved once per destination and then cost an atomic addition.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use prometheus::{
    Counter, CounterVec, Encoder as _, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec,
    IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder, core::Collector,
};

use crate::{
    log,
    pacing::throttle::{self, Regime},
    panics,
};

/// Waits: from what one slot of a fast destination takes to the longest patience.
const WAIT_BUCKETS: &[f64] = &[
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 25.0, 60.0,
];
/// Lateness: the goal is half a millisecond, the limit a grace of 10 to 50 ms.
const LATENESS_BUCKETS: &[f64] = &[
    0.000_05, 0.000_1, 0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05,
];
/// Calls to the store: from a local socket to the deadline of a call.
const STORE_BUCKETS: &[f64] = &[
    0.000_05, 0.000_1, 0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0,
];

/// All figures of one replica.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    dispatches: IntCounterVec,
    requests: IntCounterVec,
    responses: IntCounterVec,
    ceiling: GaugeVec,
    effective: GaugeVec,
    observed: GaugeVec,
    busiest: IntGaugeVec,
    smallest_gap: GaugeVec,
    queue_depth: IntGaugeVec,
    wait: HistogramVec,
    lateness: HistogramVec,
    voided: CounterVec,
    reservation: Histogram,
    store_errors: IntCounterVec,
    store_up: IntGauge,
    clock_steps: IntCounter,
    tunnels: IntGauge,
    connections: IntGauge,
    untrusting: IntCounter,
    ca_expiry: GaugeVec,
    limits: IntGaugeVec,
    panics: IntCounter,
    log_dropped: IntCounter,
    degraded: IntGauge,
    replicas: IntGaugeVec,
    multiplier: GaugeVec,
    locked_out: IntGaugeVec,
    paused: IntGaugeVec,
    disagreement: IntGaugeVec,
    cluster_dispatches: IntCounterVec,
    cluster_observed: GaugeVec,
    cluster_busiest: IntGaugeVec,
    reloaded: IntGauge,
    reloaded_at: Gauge,
    /// The destinations that the last scrape showed.
    shown: Mutex<BTreeSet<Arc<str>>>,
}

/// The figures of one destination, resolved.
#[derive(Clone, Debug)]
pub struct DestinationFigures {
    name: Arc<str>,
    all: Arc<Metrics>,
    dispatches: IntCounter,
    degraded: IntCounter,
    /// The most frequent of each, so that they need not be looked for.
    ok: IntCounter,
    answered_200: IntCounter,
    wait: Histogram,
    lateness: Histogram,
    voided: Counter,
}

/// How a dispatch came by its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// From the shared store.
    Shared,
    /// From the embedded store.
    Embedded,
}

/// The figures of a destination that are computed when they are looked at.
#[derive(Clone, Copy, Debug, Default)]
pub struct Standing {
    /// Requests per second allowed by the configuration.
    pub ceiling: f64,
    /// Requests per second allowed at the moment.
    pub effective: f64,
    /// Dispatches per second over the last ten.
    pub observed: f64,
    /// Most dispatches in any second of the last five minutes.
    pub busiest: usize,
    /// Smallest gap in the last five minutes, in seconds.
    pub smallest_gap: Option<f64>,
    /// Requests that wait.
    pub waiting: usize,
    /// Whether live replicas are configured with different ceilings.
    pub disagreement: bool,
    /// What its throttle has in force.
    pub regime: Regime,
    /// Requests sent by all replicas.
    pub cluster_dispatches: u64,
    /// Requests per second sent by all replicas.
    pub cluster_observed: f64,
    /// Most requests sent by all replicas in one second.
    pub cluster_busiest: u64,
}

/// How the replica stands among the others, computed when it is looked at.
#[derive(Clone, Copy, Debug, Default)]
pub struct Among {
    /// Whether the store is out of reach.
    pub degraded: bool,
    /// Replicas that are heard, this one included.
    pub live: usize,
    /// Replicas that hold a number and are not heard.
    pub silent: usize,
    /// Steps of the store's clock so far.
    pub clock_steps: u64,
}

impl Metrics {
    /// Registers everything.
    pub fn new() -> Arc<Self> {
        let registry = Registry::new();
        let d = &["destination"];
        let metrics = Metrics {
            dispatches: counters(
                &registry,
                "paceline_dispatches_total",
                "Requests sent upstream, by how they came by their slot.",
                &["destination", "mode"],
            ),
            requests: counters(
                &registry,
                "paceline_requests_total",
                "Requests answered, by outcome: ok, or the reason of a refusal or failure.",
                &["destination", "outcome"],
            ),
            responses: counters(
                &registry,
                "paceline_upstream_responses_total",
                "Responses received from upstream, by status.",
                &["destination", "code"],
            ),
            ceiling: gauges(
                &registry,
                "paceline_ceiling_rate",
                "Requests per second allowed in all, as configured.",
                d,
            ),
            effective: gauges(
                &registry,
                "paceline_effective_rate",
                "Requests per second allowed in all at the moment.",
                d,
            ),
            observed: gauges(
                &registry,
                "paceline_observed_rate",
                "Requests per second sent by this replica over the last 10 s.",
                d,
            ),
            busiest: int_gauges(
                &registry,
                "paceline_busiest_second",
                "Most requests that this replica sent in any one second of the last 5 min.",
                d,
            ),
            smallest_gap: gauges(
                &registry,
                "paceline_smallest_gap_seconds",
                "Smallest gap between two requests of this replica in the last 5 min.",
                d,
            ),
            queue_depth: int_gauges(
                &registry,
                "paceline_queue_depth",
                "Requests that wait for their turn in this replica.",
                d,
            ),
            wait: histograms(
                &registry,
                "paceline_wait_seconds",
                "Time from a request's arrival to its dispatch (with dry_run: what it would have been).",
                WAIT_BUCKETS,
            ),
            lateness: histograms(
                &registry,
                "paceline_slot_lateness_seconds",
                "Time from a slot to the dispatch in it.",
                LATENESS_BUCKETS,
            ),
            voided: register(
                &registry,
                CounterVec::new(
                    Opts::new("paceline_slots_void_total", "Slots that passed unused."),
                    d,
                ),
            ),
            reservation: register(
                &registry,
                Histogram::with_opts(
                    HistogramOpts::new(
                        "paceline_reservation_seconds",
                        "Round trip of a reservation to the store.",
                    )
                    .buckets(STORE_BUCKETS.to_vec()),
                ),
            ),
            store_errors: counters(
                &registry,
                "paceline_store_errors_total",
                "Failed calls and connections to the store, by reason.",
                &["reason"],
            ),
            store_up: register(
                &registry,
                IntGauge::new(
                    "paceline_store_up",
                    "1 while the store can be reached (always with the embedded store).",
                ),
            ),
            clock_steps: register(
                &registry,
                IntCounter::new(
                    "paceline_clock_steps_total",
                    "Steps of the store's clock that were noticed.",
                ),
            ),
            tunnels: register(
                &registry,
                IntGauge::new(
                    "paceline_tunnels",
                    "Tunnels open at the moment: bytes passed without pacing.",
                ),
            ),
            connections: register(
                &registry,
                IntGauge::new(
                    "paceline_connections",
                    "Connections from clients at the moment.",
                ),
            ),
            untrusting: register(
                &registry,
                IntCounter::new(
                    "paceline_untrusting_clients_total",
                    "TLS handshakes that a client broke off, most often because it does not trust the CA.",
                ),
            ),
            ca_expiry: gauges(
                &registry,
                "paceline_ca_expiry_timestamp_seconds",
                "When a certificate of the CA expires, as seconds since the epoch.",
                &["certificate"],
            ),
            limits: int_gauges(
                &registry,
                "paceline_limit",
                "What may be held at one time, by what it is.",
                &["of"],
            ),
            panics: register(
                &registry,
                IntCounter::new(
                    "paceline_panics_total",
                    "Panics of the program: faults of its own, of which there should be none.",
                ),
            ),
            log_dropped: register(
                &registry,
                IntCounter::new(
                    "paceline_log_lines_dropped_total",
                    "Lines of the log that were dropped because nobody read it.",
                ),
            ),
            degraded: register(
                &registry,
                IntGauge::new(
                    "paceline_degraded",
                    "1 while the store cannot be reached and this replica paces on its share.",
                ),
            ),
            replicas: int_gauges(
                &registry,
                "paceline_replicas",
                "Replicas that hold a number, by whether they are heard.",
                &["state"],
            ),
            multiplier: gauges(
                &registry,
                "paceline_throttle_multiplier",
                "By how much the interval is widened at the moment; 1 is not at all.",
                d,
            ),
            locked_out: int_gauges(
                &registry,
                "paceline_locked_out",
                "1 while requests are refused because the destination has locked us out.",
                d,
            ),
            paused: int_gauges(
                &registry,
                "paceline_paused",
                "1 while nothing is sent because of a Retry-After or an operator's pause.",
                d,
            ),
            disagreement: int_gauges(
                &registry,
                "paceline_config_disagreement",
                "1 while replicas are configured with different ceilings or numbers of shares.",
                d,
            ),
            cluster_dispatches: counters(
                &registry,
                "paceline_cluster_dispatches_total",
                "Requests sent by all replicas since this one started to listen.",
                d,
            ),
            cluster_observed: gauges(
                &registry,
                "paceline_cluster_observed_rate",
                "Requests per second sent by all replicas over the last 10 s that all have told of.",
                d,
            ),
            cluster_busiest: int_gauges(
                &registry,
                "paceline_cluster_busiest_second",
                "Most requests that all replicas together sent in one second of the store's clock, of the last 5 min.",
                d,
            ),
            reloaded: register(
                &registry,
                IntGauge::new(
                    "paceline_config_last_reload_successful",
                    "1 if the configuration was read without a fault when it was read last.",
                ),
            ),
            reloaded_at: register(
                &registry,
                Gauge::new(
                    "paceline_config_last_reload_success_timestamp_seconds",
                    "When the configuration in force was read, as seconds since the epoch.",
                ),
            ),
            shown: Mutex::default(),
            registry,
        };
        let build = gauges(
            &metrics.registry,
            "paceline_build_info",
            "1, with the version.",
            &["version"],
        );
        build
            .with_label_values(&[env!("CARGO_PKG_VERSION")])
            .set(1.0);
        #[cfg(target_os = "linux")]
        {
            let process = prometheus::process_collector::ProcessCollector::for_self();
            metrics
                .registry
                .register(Box::new(process))
                .expect("names do not clash");
        }
        Arc::new(metrics)
    }

    /// The figures of the destination called `name`, dispatched in `mode`.
    pub fn destination(self: &Arc<Self>, name: &str, mode: Mode) -> DestinationFigures {
        let mode = match mode {
            Mode::Shared => "shared",
            Mode::Embedded => "embedded",
        };
        DestinationFigures {
            name: name.into(),
            all: self.clone(),
            dispatches: self.dispatches.with_label_values(&[name, mode]),
            degraded: self.dispatches.with_label_values(&[name, "degraded"]),
            ok: self.requests.with_label_values(&[name, "ok"]),
            answered_200: self.responses.with_label_values(&[name, "200"]),
            wait: self.wait.with_label_values(&[name]),
            lateness: self.lateness.with_label_values(&[name]),
            voided: self.voided.with_label_values(&[name]),
        }
    }

    /// A request was answered. `destination` is empty for hosts that none governs.
    pub fn request(&self, destination: &str, outcome: &str) {
        self.requests
            .with_label_values(&[destination, outcome])
            .inc();
    }

    /// A call to the store took `span`, and failed if there is a reason.
    pub fn store_call(&self, span: Duration, failure: Option<&str>) {
        self.reservation.observe(span.as_secs_f64());
        if let Some(reason) = failure {
            self.store_error(reason);
        }
    }

    /// The store failed.
    pub fn store_error(&self, reason: &str) {
        self.store_errors.with_label_values(&[reason]).inc();
    }

    /// The store has come or gone.
    pub fn store_up(&self, up: bool) {
        self.store_up.set(i64::from(up));
    }

    /// A client broke off the TLS handshake.
    pub fn untrusting_client(&self) {
        self.untrusting.inc();
    }

    /// When a certificate of the CA (`issuer` or `root`) expires, in seconds since the epoch.
    pub fn ca_expiry(&self, certificate: &str, at: f64) {
        self.ca_expiry.with_label_values(&[certificate]).set(at);
    }

    /// How many of something may be held at one time.
    pub fn limit(&self, of: &str, limit: usize) {
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        self.limits.with_label_values(&[of]).set(limit);
    }

    /// The configuration was read: at `at`, in seconds since the epoch, or with faults, so that the one before stays.
    pub fn reloaded(&self, at: Option<f64>) {
        self.reloaded.set(i64::from(at.is_some()));
        at.into_iter().for_each(|at| self.reloaded_at.set(at));
    }

    /// Counts a tunnel while the guard lives.
    pub fn tunnel(&self) -> GaugeGuard {
        GaugeGuard::new(&self.tunnels)
    }

    /// How many connections from clients there are.
    pub fn open_connections(&self) -> i64 {
        self.connections.get()
    }

    /// Counts a connection while the guard lives.
    pub fn connection(&self) -> GaugeGuard {
        GaugeGuard::new(&self.connections)
    }

    /// The text for a scrape, after the figures that are computed on demand have been set: one [`Standing`] for each
    /// destination, and how the replica stands among the others.
    ///
    /// The format is Prometheus's text format 0.0.4.
    pub fn scrape(&self, standings: &[(Arc<str>, Standing)], among: Among) -> String {
        // Held to the end: of two scrapes at once, neither may take away what the other is about to show.
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        let now: BTreeSet<_> = standings.iter().map(|(name, _)| name.clone()).collect();
        for gone in shown.difference(&now) {
            self.forget(gone);
        }
        *shown = now;
        for (name, s) in standings {
            let label: &[&str] = &[name];
            self.ceiling.with_label_values(label).set(s.ceiling);
            self.effective.with_label_values(label).set(s.effective);
            self.observed.with_label_values(label).set(s.observed);
            self.busiest
                .with_label_values(label)
                .set(i64::try_from(s.busiest).unwrap_or(i64::MAX));
            self.smallest_gap
                .with_label_values(label)
                .set(s.smallest_gap.unwrap_or(f64::NAN));
            self.queue_depth
                .with_label_values(label)
                .set(i64::try_from(s.waiting).unwrap_or(i64::MAX));
            self.multiplier
                .with_label_values(label)
                .set(f64::from(s.regime.multiplier));
            let halt = s.regime.halt.map(|h| h.cause);
            let locked = matches!(halt, Some(throttle::Cause::Lockout(_)));
            let paused = matches!(halt, Some(throttle::Cause::Hold | throttle::Cause::Pause));
            self.locked_out
                .with_label_values(label)
                .set(i64::from(locked));
            self.paused.with_label_values(label).set(i64::from(paused));
            self.disagreement
                .with_label_values(label)
                .set(i64::from(s.disagreement));
            let cluster = self.cluster_dispatches.with_label_values(label);
            cluster.inc_by(s.cluster_dispatches.saturating_sub(cluster.get()));
            self.cluster_observed
                .with_label_values(label)
                .set(s.cluster_observed);
            self.cluster_busiest
                .with_label_values(label)
                .set(i64::try_from(s.cluster_busiest).unwrap_or(i64::MAX));
        }
        let clock_steps = among.clock_steps.saturating_sub(self.clock_steps.get());
        self.clock_steps.inc_by(clock_steps);
        self.panics
            .inc_by(panics::count().saturating_sub(self.panics.get()));
        self.log_dropped
            .inc_by(log::dropped().saturating_sub(self.log_dropped.get()));
        self.degraded.set(i64::from(among.degraded));
        for (state, count) in [("live", among.live), ("silent", among.silent)] {
            let count = i64::try_from(count).unwrap_or(i64::MAX);
            self.replicas.with_label_values(&[state]).set(count);
        }
        let mut text = Vec::new();
        // Writing to memory does not fail, and a metric without a value has been left out by `gather`.
        let _ = TextEncoder::new().encode(&self.registry.gather(), &mut text);
        String::from_utf8(text).unwrap_or_default()
    }
}

impl Metrics {
    /// Takes the gauges of a destination out that is no longer configured; what was counted stays.
    fn forget(&self, name: &str) {
        let all = [
            &self.ceiling,
            &self.effective,
            &self.observed,
            &self.smallest_gap,
            &self.multiplier,
            &self.cluster_observed,
        ];
        let whole = [
            &self.busiest,
            &self.queue_depth,
            &self.locked_out,
            &self.paused,
            &self.disagreement,
            &self.cluster_busiest,
        ];
        // One that was never set is not there to be removed.
        all.iter()
            .for_each(|gauge| drop(gauge.remove_label_values(&[name])));
        whole
            .iter()
            .for_each(|gauge| drop(gauge.remove_label_values(&[name])));
    }
}

impl DestinationFigures {
    /// The destination's name.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// A request went out `wait` after its arrival and `lateness` after its slot, both in seconds; `alone` in a slot of
    /// this replica's own share.
    pub fn dispatched(&self, wait: f64, lateness: f64, alone: bool) {
        if alone {
            &self.degraded
        } else {
            &self.dispatches
        }
        .inc();
        self.wait.observe(wait);
        self.lateness.observe(lateness);
    }

    /// A request went out without a slot; with one it would have waited `wait` seconds.
    pub fn dispatched_dry(&self, wait: f64) {
        let dry = [&*self.name, "dry_run"];
        self.all.dispatches.with_label_values(&dry).inc();
        self.wait.observe(wait);
    }

    /// A response came.
    pub fn responded(&self, status: http::StatusCode) {
        match status {
            http::StatusCode::OK => self.answered_200.inc(),
            _ => self
                .all
                .responses
                .with_label_values(&[&*self.name, status.as_str()])
                .inc(),
        }
    }

    /// A request was answered.
    pub fn answered(&self, outcome: &str) {
        match outcome {
            "ok" => self.ok.inc(),
            _ => self.all.request(&self.name, outcome),
        }
    }

    /// Slots passed unused.
    pub fn voided(&self, slots: u64) {
        if slots > 0 {
            self.voided.inc_by(slots as f64);
        }
    }
}

/// Adds one to a gauge until it is dropped.
#[derive(Debug)]
pub struct GaugeGuard(IntGauge);

impl GaugeGuard {
    fn new(gauge: &IntGauge) -> Self {
        gauge.inc();
        GaugeGuard(gauge.clone())
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Registers a collector. Names are constants of this file, so that neither they nor their labels can be wrong.
fn register<C: Collector + Clone + 'static>(registry: &Registry, made: prometheus::Result<C>) -> C {
    let collector = made.expect("a valid name and help text");
    registry
        .register(Box::new(collector.clone()))
        .expect("names do not clash");
    collector
}

fn counters(registry: &Registry, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
    register(registry, IntCounterVec::new(Opts::new(name, help), labels))
}

fn gauges(registry: &Registry, name: &str, help: &str, labels: &[&str]) -> GaugeVec {
    register(registry, GaugeVec::new(Opts::new(name, help), labels))
}

fn int_gauges(registry: &Registry, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
    register(registry, IntGaugeVec::new(Opts::new(name, help), labels))
}

fn histograms(registry: &Registry, name: &str, help: &str, buckets: &[f64]) -> HistogramVec {
    register(
        registry,
        HistogramVec::new(
            HistogramOpts::new(name, help).buckets(buckets.to_vec()),
            &["destination"],
        ),
    )
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    /// Type and labels of each metric by its name.
    type Table = BTreeMap<String, (String, BTreeSet<String>)>;

    /// All metrics, as a scrape shows them once each has a value.
    fn scraped() -> Table {
        let metrics = Metrics::new();
        let figures = metrics.destination("d", Mode::Shared);
        figures.dispatched(0.0, 0.0, false);
        figures.responded(http::StatusCode::OK);
        figures.answered("ok");
        metrics.store_error("timeout");
        metrics.ca_expiry("issuer", 0.0);
        metrics.limit("connections", 1);
        let text = metrics.scrape(&[("d".into(), Standing::default())], Among::default());
        let mut table = Table::new();
        for line in text.lines() {
            if let Some((name, kind)) = line
                .strip_prefix("# TYPE ")
                .and_then(|rest| rest.split_once(' '))
            {
                table.insert(name.to_owned(), (kind.to_owned(), BTreeSet::new()));
            } else if let Some((sample, labels)) = line.split_once('{') {
                // The samples of a family follow its TYPE; those of a histogram have the family's name with a suffix.
                let (_, (_, known)) = table
                    .iter_mut()
                    .filter(|(name, _)| sample.starts_with(name.as_str()))
                    .max_by_key(|(name, _)| name.len())
                    .expect("a TYPE before its samples");
                let names = labels.split(',').filter_map(|l| l.split_once('='));
                known.extend(names.map(|(n, _)| n.to_owned()).filter(|n| n != "le"));
            }
        }
        table
    }

    /// The rows of the manual that begin with a metric's name.
    fn documented() -> Table {
        let cells = |line: &str| {
            let mut cells = line.split('|').map(str::trim).skip(1);
            let name = cells.next()?.strip_prefix('`')?.strip_suffix('`')?;
            let is_metric = ["paceline_", "process_"]
                .iter()
                .any(|prefix| name.starts_with(prefix))
                && name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
            let (kind, labels) = (cells.next()?, cells.next()?);
            let labels = labels.split('`').skip(1).step_by(2).map(str::to_owned);
            is_metric.then(|| (name.to_owned(), (kind.to_owned(), labels.collect())))
        };
        include_str!("../docs/metrics.md")
            .lines()
            .filter_map(cells)
            .collect()
    }

    #[test]
    fn the_manual_has_every_metric_with_its_type_and_labels_and_no_other() {
        let (scraped, mut documented) = (scraped(), documented());
        if !cfg!(target_os = "linux") {
            documented.retain(|name, _| name.starts_with("paceline_"));
        }
        assert_eq!(documented, scraped);
    }

    /// A metric with labels is left out of a scrape until it has a value, so one that nothing above has set would escape
    /// the comparison with the manual.
    #[test]
    fn every_name_in_this_file_is_part_of_that_comparison() {
        let named: BTreeSet<_> = include_str!("metrics.rs")
            .split('"')
            .skip(1)
            .filter(|text| text.len() > "paceline_".len() && text.starts_with("paceline_"))
            .map(str::to_owned)
            .collect();
        let scraped: BTreeSet<_> = scraped()
            .into_keys()
            .filter(|name| name.starts_with("paceline_"))
            .collect();
        assert_eq!(named, scraped);
    }
}

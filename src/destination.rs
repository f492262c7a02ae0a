//! The destinations in force: which one governs a host, and each one's lanes and figures.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use crate::{
    authority::{Host, HostPattern},
    config::{self, Scope},
    error::Error,
    metrics::{DestinationFigures, Metrics, Mode, Standing},
    pacing::{
        alarm::Alarm,
        cursor::{Ask, horizon},
        lane::{Departure, Lane, Name},
        observed::Observed,
        pacer::{Cause, Refusal, Settings},
        time::{LocalTime, Nanos, SECOND, nanos, seconds},
    },
    store::{Store, memory},
};

/// Requests that may wait for one cursor in one replica.
const QUEUE_LIMIT: usize = 10_000;
/// Hosts that may have cursors of their own at once, for one destination in one replica.
const LANE_LIMIT: usize = 10_000;

/// All destinations, by the hosts that they govern.
#[derive(Debug)]
pub struct Destinations {
    ground: Ground,
    all: Vec<Arc<Destination>>,
    /// No longer configured, but with requests or a cursor that a return under the same name must not forget.
    retired: Vec<Arc<Destination>>,
    exact: HashMap<Host, usize>,
    /// By the part behind `*.`.
    below: HashMap<Arc<str>, usize>,
}

/// What destinations have in common.
#[derive(Clone, Debug)]
pub struct Ground {
    /// Where cursors are kept.
    pub store: Store,
    /// For sleeping until slots.
    pub alarm: Arc<Alarm>,
    /// For counting.
    pub metrics: Arc<Metrics>,
    /// Replicas that may share a cursor.
    pub max_replicas: u32,
}

impl Destinations {
    /// Puts the configured destinations on common ground.
    pub fn new(configured: &[config::Destination], ground: &Ground) -> Self {
        let none = Destinations {
            ground: ground.clone(),
            all: Vec::new(),
            retired: Vec::new(),
            exact: HashMap::new(),
            below: HashMap::new(),
        };
        none.renewed(configured)
    }

    /// The same after a change of the configuration. A destination that keeps its name keeps its queue, its cursor and
    /// its figures, and adopts the new settings at once; what waits for one that is gone is still paced by it.
    pub fn renewed(&self, configured: &[config::Destination]) -> Self {
        let mut found = Destinations {
            ground: self.ground.clone(),
            all: Vec::new(),
            retired: Vec::new(),
            exact: HashMap::new(),
            below: HashMap::new(),
        };
        let mut before: HashMap<&str, &Arc<Destination>> = HashMap::new();
        before.extend(self.retired.iter().chain(&self.all).map(|d| (d.name(), d)));
        for (at, destination) in configured.iter().enumerate() {
            for pattern in &destination.hosts {
                found.claim(pattern, at);
            }
            let same = before.remove(destination.name.as_str());
            found.all.push(match same {
                Some(same) => {
                    same.reconfigure(destination.clone());
                    same.clone()
                }
                None => Arc::new(Destination::new(destination.clone(), self.ground.clone())),
            });
        }
        found.retired = before
            .into_values()
            .filter(|d| !d.is_forgettable())
            .cloned()
            .collect();
        found
    }

    fn claim(&mut self, pattern: &HostPattern, at: usize) {
        // The first in the file governs; the configuration has refused two that claim the same host.
        match pattern.as_constraint_base() {
            Host::Name(base) if !pattern.matches(pattern.as_constraint_base()) => {
                self.below.entry(base.clone()).or_insert(at);
            }
            host => {
                self.exact.entry(host.clone()).or_insert(at);
            }
        }
    }

    /// The destination that governs `host`.
    pub fn governing(&self, host: &Host) -> Option<&Arc<Destination>> {
        let at = self.exact.get(host).copied().or_else(|| {
            let Host::Name(name) = host else { return None };
            let mut rest: &str = name;
            while let Some((_, parent)) = rest.split_once('.') {
                if let Some(at) = self.below.get(parent) {
                    return Some(*at);
                }
                rest = parent;
            }
            None
        });
        self.all.get(at?)
    }

    /// All of them, in the order of the configuration.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Destination>> {
        self.all.iter()
    }
}

/// One destination at work.
#[derive(Debug)]
pub struct Destination {
    config: RwLock<Arc<config::Destination>>,
    figures: DestinationFigures,
    ground: Ground,
    lanes: Mutex<HashMap<Option<Host>, Arc<Lane>>>,
    observed: Mutex<Observed>,
    voided: Arc<AtomicU64>,
    voided_seen: AtomicU64,
    /// What `dry_run` would have made requests wait for.
    imagined: Mutex<memory::Cursor>,
}

impl Destination {
    fn new(config: config::Destination, ground: Ground) -> Self {
        let mode = match &ground.store {
            Store::Memory => Mode::Embedded,
            Store::Postgres(_) => Mode::Shared,
        };
        Destination {
            figures: ground.metrics.destination(&config.name, mode),
            config: RwLock::new(Arc::new(config)),
            ground,
            lanes: Mutex::default(),
            observed: Mutex::default(),
            voided: Arc::default(),
            voided_seen: AtomicU64::new(0),
            imagined: Mutex::default(),
        }
    }

    /// As it is configured at the moment.
    pub fn config(&self) -> Arc<config::Destination> {
        self.config
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn name(&self) -> &str {
        self.figures.name()
    }

    /// Adopts other settings under the same name; what waits is paced by them from its next slot on.
    fn reconfigure(&self, config: config::Destination) {
        let ceiling = config.rate.per_second;
        *self.config.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(config);
        let settings = self.settings();
        let lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        for lane in lanes.values() {
            lane.reconfigure(settings, ceiling);
        }
    }

    /// Whether nothing would be lost by forgetting it.
    fn is_forgettable(&self) -> bool {
        let lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        lanes.values().all(|lane| lane.is_forgettable())
    }

    /// Its counters.
    pub fn figures(&self) -> &DestinationFigures {
        &self.figures
    }

    /// The lane of the cursor that `host` shares.
    ///
    /// # Errors
    /// Too many hosts have cursors of their own, and none of them can be forgotten.
    pub fn lane(&self, host: &Host) -> Result<Arc<Lane>, Error> {
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        // Read under the lock, so that a lane which is made now has the settings that a reload gives the others.
        let config = self.config();
        let key = (config.scope == Scope::Host).then(|| host.clone());
        if let Some(lane) = lanes.get(&key) {
            return Ok(lane.clone());
        }
        if lanes.len() >= LANE_LIMIT {
            lanes.retain(|_, lane| !lane.is_forgettable());
            if lanes.len() >= LANE_LIMIT {
                return Err(Error::Paced(Refusal {
                    cause: Cause::QueueFull,
                    retry_after: SECOND,
                }));
            }
        }
        let lane = Lane::new(
            self.cursor(key.as_ref())?,
            self.settings(),
            self.ground.store.clone(),
            self.ground.alarm.clone(),
            self.voided.clone(),
        );
        lanes.insert(key, lane.clone());
        Ok(lane)
    }

    /// The cursor's name, and the key of its row: the destination's name, and with `scope = "host"` the host behind a
    /// slash.
    fn cursor(&self, host: Option<&Host>) -> Result<Name, Error> {
        let cursor = match host {
            None => self.name().to_owned(),
            Some(host) => format!("{}/{host}", self.name()),
        };
        let key = match &self.ground.store {
            Store::Memory => cursor.clone(),
            Store::Postgres(store) => store.key(&cursor),
        };
        if key.len() > config::KEY_LIMIT {
            return Err(Error::Malformed(
                "the host name is too long for the store; shorten key_prefix or the destination's name",
            ));
        }
        Ok(Name {
            destination: self.figures.name().clone(),
            cursor,
            key,
            ceiling: self.config().rate.per_second,
        })
    }

    fn settings(&self) -> Settings {
        Settings {
            interval: self.interval(),
            max_in_flight: self.config().max_in_flight,
            queue_limit: QUEUE_LIMIT,
            max_replicas: self.ground.max_replicas,
        }
    }

    fn interval(&self) -> Nanos {
        Nanos::try_from(self.config().rate.interval_nanos()).unwrap_or(Nanos::MAX)
    }

    /// A request that arrived at `arrived` went out in a slot.
    pub fn dispatched(&self, departure: &Departure, arrived: LocalTime) {
        self.figures.dispatched(
            seconds(departure.at().since(arrived)),
            seconds(departure.lateness()),
            departure.is_alone(),
        );
        if let Store::Postgres(store) = &self.ground.store {
            let second = departure.slot().0.div_euclid(SECOND);
            store.membership().dispatched(self.figures.name(), second);
        }
        self.observed
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .dispatched(departure.at());
    }

    /// A request goes out without a slot; what it would have waited for is recorded, unless it would have been refused.
    pub fn dispatched_dry(&self, max_wait: std::time::Duration) {
        let now = LocalTime::now();
        let interval = self.interval();
        let ask = Ask {
            slots: 1,
            interval,
            lead: 0,
            floor: None,
            horizon: horizon(interval, 1),
            held: 0,
        };
        let mut imagined = self.imagined.lock().unwrap_or_else(PoisonError::into_inner);
        let wait = imagined.preview(now, &ask).min(nanos(max_wait));
        if wait < nanos(max_wait) {
            imagined.reserve(now, &ask);
        }
        drop(imagined);
        self.figures.dispatched_dry(seconds(wait));
        self.observed
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .dispatched(now);
    }

    /// How it stands now. Meant to be called at each scrape: slots void since the last are counted then.
    pub fn standing(&self, now: LocalTime) -> Standing {
        let voided = self.voided.load(Relaxed);
        let before = self.voided_seen.swap(voided, Relaxed);
        self.figures.voided(voided.saturating_sub(before));
        let lanes: Vec<_> = self
            .lanes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .values()
            .cloned()
            .collect();
        let ceiling = self.config().rate.per_second;
        let observed = self.observed.lock().unwrap_or_else(PoisonError::into_inner);
        let own = Standing {
            ceiling,
            effective: ceiling,
            observed: observed.rate(now),
            busiest: observed.busiest_second(now),
            smallest_gap: observed.smallest_gap(now),
            waiting: lanes.iter().map(|l| l.waiting()).sum(),
            disagreement: false,
            cluster_dispatches: observed.total(),
            cluster_observed: observed.rate(now),
            cluster_busiest: observed.busiest_second(now) as u64,
        };
        let Store::Postgres(store) = &self.ground.store else {
            return own;
        };
        let membership = store.membership();
        let (effective, disagreement) = membership.agreed(self.name(), own.ceiling, now);
        let cluster = membership.figures(self.name(), now);
        Standing {
            effective: effective * membership.part(self.name(), now),
            disagreement,
            cluster_dispatches: cluster.dispatches,
            cluster_observed: cluster.observed,
            cluster_busiest: cluster.busiest_second,
            ..own
        }
    }
}

//! One destination at work: its lanes, its figures, and what answers mean to it.
//!
//! Which destination governs a host is in `destination/governing.rs`, what an operator can do to one in
//! `destination/operate.rs`, its last minutes in `destination/recent.rs`.

mod governing;
mod operate;
mod recent;

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use http::{HeaderMap, Request, StatusCode};
use sha2::{Digest, Sha256};

pub use self::governing::Destinations;
use crate::{
    authority::Host,
    config::{self, Scope},
    error::Error,
    headers,
    metrics::{DestinationFigures, Metrics, Mode, Standing},
    pacing::{
        alarm::Alarm,
        cursor::{Ask, horizon},
        lane::{Departure, Lane, Name},
        observed::Observed,
        pacer::{Cause, Refusal, Settings},
        queue::Client,
        throttle::{Regime, Rules, tracker::Event},
        time::{LocalTime, Nanos, SECOND, nanos, seconds},
        waits::Waits,
    },
    shares::{Share, Shares},
    store::{Store, memory},
    upstream::Target,
};

/// Requests that may wait for one cursor in one replica.
pub const QUEUE_LIMIT: usize = 10_000;
/// Requests of one client that may wait at one destination: half of a queue, so that none can fill it.
pub const QUEUE_SHARE: usize = QUEUE_LIMIT / 2;
/// Hosts that may have cursors of their own at once, for one destination in one replica.
const LANE_LIMIT: usize = 10_000;
/// An answer that slows everybody down is passed on when the others can know of it, or after this long: whoever has
/// seen it finds every replica slowed down.
const TOLD_WITHIN: Duration = Duration::from_millis(500);

/// What destinations have in common.
#[derive(Clone, Debug)]
pub struct Ground {
    /// Where cursors are kept.
    pub store: Store,
    /// For sleeping until slots.
    pub alarm: Arc<Alarm>,
    /// For counting.
    pub metrics: Arc<Metrics>,
    /// Replicas and other programs that may share a cursor.
    pub shares: u32,
}

/// One destination at work.
#[derive(Debug)]
pub struct Destination {
    config: RwLock<Arc<config::Destination>>,
    figures: DestinationFigures,
    ground: Ground,
    /// The lane of the destination's own cursor; with a cursor per host it paces nobody, and its pauses are everybody's.
    whole: Option<Arc<Lane>>,
    lanes: Mutex<HashMap<Option<Host>, Arc<Lane>>>,
    /// Requests that wait, by client.
    queued: Arc<Shares>,
    sent: Mutex<Sent>,
    voided: Arc<AtomicU64>,
    voided_seen: AtomicU64,
    /// What `dry_run` would have made requests wait for.
    imagined: Mutex<memory::Cursor>,
}

/// The last minutes of a destination in this replica.
#[derive(Debug, Default)]
struct Sent {
    observed: Observed,
    waits: Waits,
}

impl Destination {
    fn new(config: config::Destination, ground: Ground) -> Self {
        let mode = match &ground.store {
            Store::Memory(_) => Mode::Embedded,
            Store::Postgres(_) => Mode::Shared,
        };
        let mut destination = Destination {
            figures: ground.metrics.destination(&config.name, mode),
            config: RwLock::new(Arc::new(config)),
            ground,
            whole: None,
            lanes: Mutex::default(),
            queued: Shares::new(QUEUE_SHARE),
            sent: Mutex::default(),
            voided: Arc::default(),
            voided_seen: AtomicU64::new(0),
            imagined: Mutex::default(),
        };
        // Made before the first request, so that a replica without any knows of a lockout too.
        if let Ok(whole) = destination.make_lane(None) {
            whole.watch_row();
            if destination.config().scope == Scope::Destination {
                destination.lanes().insert(None, whole.clone());
            }
            destination.whole = Some(whole);
        }
        destination
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
        let scope = config.scope;
        *self.config.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(config);
        let all = (self.settings(), self.rules());
        let mut lanes = self.lanes();
        if let (Scope::Destination, Some(whole)) = (scope, &self.whole) {
            lanes.insert(None, whole.clone());
        }
        for lane in lanes.values().chain(&self.whole) {
            lane.reconfigure(all, ceiling);
        }
    }

    /// Whether nothing would be lost by forgetting it.
    fn is_forgettable(&self) -> bool {
        let lanes = self.lanes();
        let mut all = lanes.values().chain(&self.whole);
        all.all(|lane| lane.is_forgettable())
    }

    /// Its counters.
    pub fn figures(&self) -> &DestinationFigures {
        &self.figures
    }

    /// A place among the requests of `client` that may wait here, held while one does.
    ///
    /// # Errors
    /// As many wait as may.
    pub fn queue_share(&self, client: Client) -> Result<Share, Error> {
        self.queued.take(client).ok_or(Error::Share)
    }

    /// The lane of the cursor that `host` shares, where cursors are for what `scope` says.
    ///
    /// # Errors
    /// Too many hosts have cursors of their own, and none of them can be forgotten.
    pub fn lane(&self, scope: Scope, host: &Host) -> Result<Arc<Lane>, Error> {
        if let (Scope::Destination, Some(whole)) = (scope, &self.whole) {
            return Ok(whole.clone());
        }
        let mut lanes = self.lanes();
        // Read under the lock, so that a lane which is made now has the settings that a reload gives the others.
        let key = (self.config().scope == Scope::Host).then(|| host.clone());
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
        // Where each host had a cursor until a reload, the destination's own lane has paced nobody yet.
        let lane = match &self.whole {
            Some(whole) if key.is_none() => whole.clone(),
            _ => self.make_lane(key.as_ref())?,
        };
        lanes.insert(key, lane.clone());
        Ok(lane)
    }

    fn lanes(&self) -> MutexGuard<'_, HashMap<Option<Host>, Arc<Lane>>> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn make_lane(&self, host: Option<&Host>) -> Result<Arc<Lane>, Error> {
        Ok(Lane::new(
            self.cursor(host)?,
            (self.settings(), self.rules()),
            self.ground.store.clone(),
            self.ground.alarm.clone(),
            self.voided.clone(),
            self.whole.clone().filter(|_| host.is_some()),
        ))
    }

    /// The cursor's name, and the key of its row: the destination's name, and with `scope = "host"` the host behind a
    /// slash.
    fn cursor(&self, host: Option<&Host>) -> Result<Name, Error> {
        let cursor = match host {
            None => self.name().to_owned(),
            Some(host) => format!("{}/{host}", self.name()),
        };
        let (key, throttle_key) = match &self.ground.store {
            Store::Memory(_) => (cursor.clone(), cursor.clone()),
            Store::Postgres(store) => (store.key(&cursor), store.throttle_key(&cursor)),
        };
        if throttle_key.chars().count() > config::KEY_LIMIT {
            return Err(Error::Malformed(
                "the host name is too long for the store; shorten key_prefix or the destination's name",
            ));
        }
        Ok(Name {
            destination: self.figures.name().clone(),
            cursor,
            key,
            throttle_key,
            ceiling: self.config().rate.per_second,
        })
    }

    fn settings(&self) -> Settings {
        Settings {
            interval: self.interval(),
            max_in_flight: self.config().max_in_flight,
            queue_limit: QUEUE_LIMIT,
            shares: self.ground.shares,
        }
    }

    fn rules(&self) -> Rules {
        let config = self.config();
        Rules {
            recovery_after: config.recovery_after,
            lockout_after: config.lockout_after,
            lockout_for: nanos(config.lockout_for),
            retry_after_cap: nanos(config.retry_after_cap),
        }
    }

    fn interval(&self) -> Nanos {
        Nanos::try_from(self.config().rate.interval_nanos()).unwrap_or(Nanos::MAX)
    }

    /// A request that arrived at `arrived` went out in a slot.
    pub fn dispatched(&self, departure: &Departure, arrived: LocalTime) {
        let wait = departure.at().since(arrived);
        self.sent(departure.at(), wait);
        self.figures.dispatched(
            seconds(wait),
            seconds(departure.lateness()),
            departure.is_alone(),
        );
        if let Store::Postgres(store) = &self.ground.store {
            // When it was really sent, and not the slot that it was given: the figures are to show what the origin saw.
            let at = departure.at();
            let sent = store.with_clock(|clock| clock.to_store(at, at));
            let second = sent.unwrap_or(departure.slot()).0.div_euclid(SECOND);
            store.membership().dispatched(self.figures.name(), second);
        }
    }

    /// Takes an answer to heart. Resolves when the others can know of it too.
    pub async fn heed(&self, departure: &Departure, verdict: Verdict, url: &str) {
        let (lane, episode) = (departure.lane(), departure.episode());
        let event = match verdict {
            Verdict::Clean if !lane.is_widened() => return,
            Verdict::Clean => {
                lane.apply(Event::Clean { episode });
                return;
            }
            Verdict::Throttled(retry_after) => Event::Throttled {
                episode,
                retry_after,
            },
            Verdict::Forbidden(status) => Event::Forbidden {
                url: hash(url),
                status: status.as_u16(),
            },
        };
        lane.apply(event);
        let _ = tokio::time::timeout(TOLD_WITHIN, lane.settled()).await;
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
            disbelieved: None,
            held: 0,
        };
        let mut imagined = self.imagined.lock().unwrap_or_else(PoisonError::into_inner);
        let wait = imagined.preview(now, &ask).min(nanos(max_wait));
        if wait < nanos(max_wait) {
            imagined.reserve(now, &ask);
        }
        drop(imagined);
        self.sent(now, wait);
        self.figures.dispatched_dry(seconds(wait));
    }

    /// How it stands now. Meant to be called at each scrape: slots void since the last are counted then.
    pub fn standing(&self, now: LocalTime) -> Standing {
        let voided = self.voided.load(Relaxed);
        let before = self.voided_seen.swap(voided, Relaxed);
        self.figures.voided(voided.saturating_sub(before));
        let lanes: Vec<_> = self.lanes().values().cloned().collect();
        let regime = self.regime(&lanes);
        let ceiling = self.config().rate.per_second;
        let sent = self.recent();
        let observed = &sent.observed;
        let own = Standing {
            ceiling,
            effective: ceiling,
            observed: observed.rate(now),
            busiest: observed.busiest_second(now),
            smallest_gap: observed.smallest_gap(now),
            waiting: lanes.iter().map(|l| l.waiting()).sum(),
            disagreement: false,
            regime,
            cluster_dispatches: observed.total(),
            cluster_observed: observed.rate(now),
            cluster_busiest: observed.busiest_second(now) as u64,
        };
        let part = match regime.halt {
            Some(_) => 0.0,
            None => 1.0 / f64::from(regime.multiplier),
        };
        let Store::Postgres(store) = &self.ground.store else {
            return Standing {
                effective: own.effective * part,
                ..own
            };
        };
        let membership = store.membership();
        let (effective, disagreement) = membership.agreed(self.name(), own.ceiling, now);
        let cluster = membership.figures(self.name(), now);
        Standing {
            effective: effective * part * membership.part(self.name(), now),
            disagreement,
            cluster_dispatches: cluster.dispatches,
            cluster_observed: cluster.observed,
            cluster_busiest: cluster.busiest_second,
            ..own
        }
    }

    /// The regime of its cursor; where each host has one, the widest, and any halt.
    fn regime(&self, lanes: &[Arc<Lane>]) -> Regime {
        let all = lanes.iter().chain(&self.whole).map(|lane| lane.regime());
        all.fold(Regime::default(), |a, b| Regime {
            multiplier: a.multiplier.max(b.multiplier),
            halt: a.halt.or(b.halt),
        })
    }
}

/// What an answer says about the pace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing against it.
    Clean,
    /// It is too fast, and how long to wait.
    Throttled(Option<Nanos>),
    /// It is not wanted, by this status.
    Forbidden(StatusCode),
}

impl Verdict {
    /// Whether the request was sent too soon.
    pub fn is_throttled(self) -> bool {
        matches!(self, Verdict::Throttled(_))
    }
}

/// The same for all replicas, and not to be turned back into a URL.
fn hash(url: &str) -> u64 {
    let digest: [u8; 32] = Sha256::digest(url).into();
    u64::from_be_bytes([
        digest[0], digest[1], digest[2], digest[3], digest[4], digest[5], digest[6], digest[7],
    ])
}
/// The URL of a request, where lockouts are told by it; else nothing is put together.
pub fn url_of<B>(config: &config::Destination, request: &Request<B>, target: &Target) -> String {
    if config.lockout_status.is_empty() {
        return String::new();
    }
    let path = request.uri().path_and_query().map_or("/", |p| p.as_str());
    format!("{}://{}{path}", target.scheme.as_str(), target.authority)
}

impl Verdict {
    /// What an answer says about the pace.
    pub fn of(config: &config::Destination, status: StatusCode, headers: &HeaderMap) -> Self {
        if config.throttle_status.contains(&status) {
            return Verdict::Throttled(headers::retry_after(headers).map(nanos));
        }
        if config.lockout_status.contains(&status) {
            return Verdict::Forbidden(status);
        }
        Verdict::Clean
    }
}

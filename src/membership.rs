//! Which of the replicas this one is, who else lives, and what that means for its pace.
//!
//! Each replica leases one of `max_replicas` numbers by a heartbeat in the cursors' table; the same statement reads all
//! leases. From them come the room to leave for those that have gone silent, the ceiling that all agree on, and the
//! figures over all replicas. The rules are in [`crate::pacing::share`] and [`lease`]; this file keeps the state and
//! beats once a second.

mod agreement;
pub mod cluster;
pub mod footing;
pub mod lease;
mod members;
pub mod sent;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    hash::{BuildHasher as _, RandomState},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

pub use self::{agreement::Agreement, members::Member};
use self::{
    cluster::{Cluster, Figures},
    footing::Footing,
    lease::{Seen, Word, choose},
    sent::Tally,
};
use crate::{
    config,
    log::Seldom,
    pacing::{
        share::HEARTBEAT,
        time::{LocalTime, Nanos, SECOND, StoreTime, duration, nanos, seconds},
    },
};

/// Reservations of one cursor that fail for this long, although heartbeats pass, are told to the others.
const FAILING_AFTER: Nanos = SECOND;
/// A cursor that was not tried for this long fails nobody; a lane with requests tries each second at least.
const FAILING_UNTIL: Nanos = 3 * SECOND;

/// The blocker of a replica that has reached the store and will have a number with its next heartbeat.
pub const NO_LEASE_YET: &str = "no_lease_yet";

/// This replica among the others.
#[derive(Debug)]
pub struct Membership {
    replica: String,
    incarnation: String,
    key_prefix: String,
    max_replicas: u32,
    of: u32,
    ttl: Nanos,
    /// Grows whenever what the replicas agree on may have changed.
    edition: AtomicU64,
    state: Mutex<State>,
    full: Seldom,
}

#[derive(Debug)]
struct State {
    footing: Footing,
    /// The configured ones, by destination.
    ceilings: BTreeMap<String, f64>,
    number: Option<u32>,
    all_held: bool,
    /// Heartbeats made so far, and how many have failed since one has passed.
    beats: u64,
    missed: u32,
    /// The store's clock when the rows were last read, and where the local clock was then.
    read: Option<(StoreTime, LocalTime)>,
    rows: BTreeMap<u32, Seen>,
    /// The numbers whose rows were read then.
    asked: BTreeSet<u32>,
    cluster: Cluster,
    /// Cursors that could not be moved. Each has a lane that tries it, so they are no more than those.
    failing: HashMap<String, Failing>,
    /// Destinations about whose ceiling the replicas disagree, and whose is in force in what state.
    disputed: BTreeMap<String, String>,
    sent: Tally,
}

/// A cursor that could not be moved.
#[derive(Clone, Copy, Debug)]
struct Failing {
    since: LocalTime,
    /// When it was tried last.
    tried: LocalTime,
    /// When the heartbeat that told of it had passed.
    told: Option<LocalTime>,
}

/// A heartbeat to be written.
#[derive(Clone, Debug)]
pub struct Pulse {
    /// The key of the row to write; `None` while no number can be taken.
    pub key: Option<String>,
    /// What may be overwritten, besides our own.
    pub seen: Option<String>,
    /// When the store's clock shows more than this, nothing is to be written: a heartbeat that waited in a frozen server
    /// or on a bad link would make a replica that has gone over to its share look alive. `None`: the clock is unknown.
    pub until: Option<StoreTime>,
    /// This run.
    pub incarnation: String,
    /// What to say.
    pub word: String,
    /// The keys of all leases.
    pub keys: Vec<String>,
    /// How many seconds the row must stay.
    pub lasts: f64,
    /// Whether it says that this replica is on the shared cursor.
    pub claims: bool,
    number: Option<u32>,
    numbers: BTreeSet<u32>,
    failing: BTreeSet<String>,
}

impl Membership {
    /// A replica that begins at `began` and has not been heard yet. `ceilings` are those it is configured with, by
    /// destination.
    pub fn new(
        settings: &config::Store,
        ceilings: BTreeMap<String, f64>,
        began: LocalTime,
    ) -> Self {
        let chance = RandomState::new();
        Membership {
            replica: settings.replica.clone(),
            incarnation: format!("{:016x}{:016x}", chance.hash_one(0u8), chance.hash_one(1u8)),
            key_prefix: settings.key_prefix.clone(),
            max_replicas: settings.max_replicas.max(1),
            of: settings.shares(),
            ttl: nanos(settings.lease_ttl),
            edition: AtomicU64::new(0),
            state: Mutex::new(State {
                footing: Footing::new(began),
                ceilings,
                number: None,
                all_held: false,
                beats: 0,
                missed: 0,
                read: None,
                rows: BTreeMap::new(),
                asked: BTreeSet::new(),
                cluster: Cluster::default(),
                failing: HashMap::new(),
                disputed: BTreeMap::new(),
                sent: Tally::default(),
            }),
            full: Seldom::default(),
        }
    }

    /// The configuration has changed: the others are told with the next heartbeat.
    pub fn set_ceilings(&self, ceilings: BTreeMap<String, f64>) {
        self.lock().ceilings = ceilings;
        self.edition.fetch_add(1, Relaxed);
    }

    /// Grows whenever what the replicas agree on may have changed: with each heartbeat, and when the configuration does.
    pub fn edition(&self) -> u64 {
        self.edition.load(Relaxed)
    }

    /// Into how many shares the ceiling is divided: the most that any replica is configured with.
    pub fn shares_agreed(&self, now: LocalTime) -> u32 {
        let state = self.lock();
        self.shares(&state, now)
    }

    /// The names of all configured destinations.
    pub fn destinations(&self) -> Vec<String> {
        self.lock().ceilings.keys().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A reservation of `cursor` was made (`true`) or failed. One that goes on failing is told to the others.
    pub fn reserved(&self, cursor: &str, made: bool, now: LocalTime) {
        let mut state = self.lock();
        if made {
            let failed = state.failing.remove(cursor);
            if failed.is_some_and(|f| f.told.is_some()) {
                tracing::info!(cursor, "the cursor's row can be moved again");
            }
        } else if state.footing.passes() {
            // Without heartbeats it is the store that fails, and not this cursor.
            let fresh = Failing {
                since: now,
                tried: now,
                told: None,
            };
            let failing = state.failing.entry(cursor.to_owned()).or_insert(fresh);
            failing.tried = failing.tried.max(now);
        }
    }

    /// Requests wait for `cursor`, of which a reservation failed: it is not given up, however seldom its turn comes.
    pub fn wanted(&self, cursor: &str, now: LocalTime) {
        if let Some(failing) = self.lock().failing.get_mut(cursor) {
            failing.tried = failing.tried.max(now);
        }
    }

    /// A request to `destination` went out in the store's second `second`.
    pub fn dispatched(&self, destination: &str, second: i64) {
        self.lock().sent.dispatched(destination, second);
    }

    /// The next heartbeat. Its reply counts until `by`; when it is not written by `until`, it is not to be written.
    pub fn pulse(&self, now: LocalTime, by: LocalTime, until: Option<StoreTime>) -> Pulse {
        let mut state = self.lock();
        let number = match state.number {
            // Before the rows have been read once, a heartbeat only reads.
            None if state.read.is_some() => {
                choose(&state.rows, &self.replica, self.max_replicas, now, self.ttl)
            }
            number => number,
        };
        let seen = match state.number {
            Some(_) => None,
            None => number.and_then(|n| Some(state.rows.get(&n)?.text.clone())),
        };
        state.all_held = number.is_none() && state.read.is_some();
        // Who asked for it has given up: the others need no longer leave room, and who asks next finds the shared cursor.
        state
            .failing
            .retain(|_, f| now.since(f.tried) < FAILING_UNTIL);
        let mut failing: BTreeSet<String> = state
            .failing
            .iter()
            .filter(|(_, f)| state.footing.passes() && f.is_told_of(now))
            .map(|(cursor, _)| cursor.clone())
            .collect();
        // So many are the store's failure and not theirs: the others leave room for all that we may send.
        let too_many = !lease::can_be_told(failing.iter());
        if too_many {
            failing.clear();
        }
        // A number is taken by a heartbeat that leaves the cursor to the others.
        let claims = state.number.is_some() && !too_many && state.footing.claims(now);
        if claims {
            state.footing.sends_claim(by);
        }
        let second = store_now(&state, now).map_or(0, |t| t.0.div_euclid(SECOND));
        let (dispatches, seconds_sent) = state.sent.tell(second);
        // The first of all reads all.
        let beat = match state.read {
            Some(_) => state.beats + 1,
            None => 0,
        };
        state.beats += 1;
        let word = Word {
            shares: self.of,
            of: self.shares(&state, now),
            replica: self.replica.clone(),
            ceilings: state.ceilings.clone(),
            dispatches,
            seconds: seconds_sent,
            failing: failing.clone(),
            alone: !claims,
            beat: state.beats,
        };
        let highest = state.rows.keys().next_back().copied();
        let numbers = lease::to_read(self.max_replicas, highest, beat);
        Pulse {
            key: number.map(|n| self.key(n)),
            seen,
            until,
            claims,
            number,
            incarnation: self.incarnation.clone(),
            word: word.to_text(),
            keys: numbers.iter().map(|n| self.key(*n)).collect(),
            lasts: seconds(self.ttl.saturating_mul(2).max(60 * SECOND)),
            numbers: numbers.into_iter().collect(),
            failing,
        }
    }

    /// A heartbeat came back: the store's `now`, whether our row was written, and all rows as they were before. Returns
    /// whether another is to follow at once.
    pub fn heard(
        &self,
        pulse: &Pulse,
        received: LocalTime,
        now: StoreTime,
        written: bool,
        rows: Vec<(String, String)>,
    ) -> bool {
        let mut state = self.lock();
        let was = state.number;
        let last = state.read.map(|(_, at)| at);
        state.read = Some((now, received));
        let prefix = self.lease_prefix();
        let mut present = BTreeSet::new();
        for (key, text) in rows {
            let Some(number) = key.strip_prefix(&prefix).and_then(|n| n.parse().ok()) else {
                continue;
            };
            present.insert(number);
            let before = state.rows.get(&number);
            if before.is_none_or(|r| r.text != text) {
                let last = last.filter(|_| state.asked.contains(&number));
                let seen = Seen::new(text, received, now, last, before);
                state.rows.insert(number, seen);
            }
        }
        // A row that is gone was not given back: its replica is remembered until it lapses.
        state.rows.retain(|n, row| {
            present.contains(n) || !pulse.numbers.contains(n) || !row.has_lapsed(received, self.ttl)
        });
        state.asked.clone_from(&pulse.numbers);
        state.number = pulse.number.filter(|_| written);
        if state.number.is_some() {
            state.all_held = false;
        }
        if !state.footing.passes() {
            // What failed before was the store; nobody has been told anything else.
            state.failing.clear();
        }
        state.missed = 0;
        state.footing.passed(received, pulse.claims && written);
        for (cursor, failing) in &mut state.failing {
            // One that leaves the cursor leaves all of them.
            let told = pulse.failing.contains(cursor)
                || (written && !pulse.claims && failing.is_told_of(received));
            if told && failing.told.is_none() {
                failing.told = Some(received);
                tracing::warn!(
                    cursor,
                    "the cursor's row cannot be moved; if that goes on, this replica uses its share: find who locks it, in pg_locks"
                );
            }
        }
        let State { rows, cluster, .. } = &mut *state;
        let second = now.0.div_euclid(SECOND);
        for lease in rows.values().filter_map(|r| r.lease.as_ref()) {
            let is_self = lease.incarnation == self.incarnation;
            cluster.hear(lease, second, last.is_none() && !is_self);
        }
        cluster.read(second);
        cluster.forget_others(|i| {
            rows.values()
                .filter_map(|r| r.lease.as_ref())
                .any(|l| l.incarnation == i)
        });
        let (number, all_held) = (state.number, state.all_held);
        let claim_is_due = number.is_some() && !pulse.claims && state.footing.claims(received);
        let too_many = claim_is_due && state.failing.values().any(|f| f.told.is_some());
        drop(state);
        self.edition.fetch_add(1, Relaxed);
        self.tell_disputes(received);
        if number != was {
            match number {
                Some(n) => tracing::info!(number = n, replica = self.replica, "lease taken"),
                None => tracing::warn!(
                    replica = self.replica,
                    "lease lost; another replica holds its number: give each replica a store.replica of its own"
                ),
            }
        }
        if all_held && self.full.is_due() {
            tracing::warn!(
                "all {} numbers are held: {}; raise max_replicas in every replica, or free one with `paceline forget REPLICA`",
                self.max_replicas,
                self.holders()
            );
        }
        last.is_none() || (claim_is_due && !too_many)
    }

    /// A heartbeat did not pass: surely, or it may yet be written until it was to. Returns how many have failed in a row.
    pub fn unheard(&self, now: LocalTime, surely: bool) -> u32 {
        let mut state = self.lock();
        state.footing.failed(now, surely);
        state.missed = state.missed.saturating_add(1);
        state.missed
    }

    /// Whether the rows have been read on the present session, and heartbeats go on passing.
    pub fn has_read(&self) -> bool {
        self.lock().footing.passes()
    }

    /// The sessions are gone.
    pub fn lost(&self, now: LocalTime) {
        let mut state = self.lock();
        state.footing.lost(now);
        state.missed = 0;
        // Only what the others were told of keeps its meaning: they go on leaving room for it.
        state.failing.retain(|_, f| f.told.is_some());
    }

    /// Whether this replica has a place: a number, or the lack of one for want of the store.
    pub fn blocker(&self) -> Option<&'static str> {
        let state = self.lock();
        match state.number {
            Some(_) => None,
            None if state.all_held => Some("all_numbers_held"),
            None if state.footing.passes() => Some(NO_LEASE_YET),
            None => None,
        }
    }

    /// Whether the store is out of reach for this replica.
    pub fn is_degraded(&self) -> bool {
        !self.lock().footing.passes()
    }

    /// The figures of `destination` over all replicas.
    pub fn figures(&self, destination: &str, now: LocalTime) -> Figures {
        let state = self.lock();
        let Some(store_now) = store_now(&state, now) else {
            return Figures::default();
        };
        state
            .cluster
            .figures(destination, store_now.0.div_euclid(SECOND))
    }

    /// What all replicas sent to `destination` in each of the last 300 seconds of the store's clock, oldest first; `None`
    /// where this one has not heard of it.
    pub fn per_second(&self, destination: &str, now: LocalTime) -> Vec<Option<u64>> {
        let state = self.lock();
        match store_now(&state, now) {
            None => Vec::new(),
            Some(at) => state
                .cluster
                .per_second(destination, at.0.div_euclid(SECOND)),
        }
    }

    fn lease_prefix(&self) -> String {
        format!("{}lease:", self.key_prefix)
    }

    fn key(&self, number: u32) -> String {
        format!("{}{number}", self.lease_prefix())
    }

    /// How often to beat.
    pub fn period() -> Duration {
        duration(HEARTBEAT)
    }
}

/// The store's clock by the last heartbeat; a second's drift does not matter to figures.
fn store_now(state: &State, now: LocalTime) -> Option<StoreTime> {
    state
        .read
        .map(|(store, local)| store.plus(now.since(local)))
}

impl Failing {
    /// Whether it has failed for long enough to be told to the others.
    fn is_told_of(&self, now: LocalTime) -> bool {
        now.since(self.since) >= FAILING_AFTER
    }
}

#[cfg(test)]
mod tests;

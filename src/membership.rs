//! Which of the replicas this one is, who else lives, and what that means for its pace.
//!
//! Each replica leases one of `max_replicas` numbers by a heartbeat in the cursors' table; the same statement reads all
//! leases. From them come the room to leave for those that have gone silent, the ceiling that all agree on, and the
//! figures over all replicas. The rules are in [`crate::pacing::share`] and [`lease`]; this file keeps the state and
//! beats once a second.

pub mod cluster;
pub mod lease;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    hash::{BuildHasher as _, RandomState},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use self::{
    cluster::{Cluster, Figures, TOLD_SECONDS},
    lease::{Seen, Word, choose},
};
use crate::{
    config,
    log::Seldom,
    pacing::{
        share::{self, Facts, HEARTBEAT, Terms},
        time::{LocalTime, Nanos, SECOND, StoreTime, duration, nanos, seconds},
    },
};

/// Reservations of one cursor that fail for this long, although heartbeats pass, are told to the others.
const FAILING_AFTER: Nanos = SECOND;
/// Cursors told of at most: more than this is the store's failure and not theirs.
const FAILING_LIMIT: usize = 64;

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
    began: LocalTime,
    /// Grows whenever what the replicas agree on may have changed.
    edition: AtomicU64,
    state: Mutex<State>,
    full: Seldom,
}

#[derive(Debug, Default)]
struct State {
    /// The configured ones, by destination.
    ceilings: BTreeMap<String, f64>,
    number: Option<u32>,
    all_held: bool,
    /// A heartbeat has passed on the present session.
    heard: bool,
    /// The latest heartbeat on it did not pass.
    missed: bool,
    last_heard: Option<LocalTime>,
    /// The store's clock when the rows were last read, and where the local clock was then.
    read: Option<(StoreTime, LocalTime)>,
    rows: BTreeMap<u32, Seen>,
    cluster: Cluster,
    failing: HashMap<String, Failing>,
    /// Destinations about whose ceiling the replicas disagree.
    disputed: BTreeSet<String>,
    sent: HashMap<String, Sent>,
}

/// A cursor that could not be moved.
#[derive(Clone, Copy, Debug)]
struct Failing {
    since: LocalTime,
    /// When the heartbeat that told of it had passed.
    told: Option<LocalTime>,
}

/// What this replica sent to one destination.
#[derive(Debug, Default)]
struct Sent {
    total: u64,
    seconds: BTreeMap<i64, u64>,
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
    number: Option<u32>,
    failing: BTreeSet<String>,
}

/// A replica, for those who look on.
#[derive(Clone, Debug, PartialEq)]
pub struct Member {
    /// Its number.
    pub number: u32,
    /// Its name.
    pub replica: String,
    /// Whether it is this one.
    pub is_self: bool,
    /// Whether it is heard, silent, or has lapsed.
    pub state: &'static str,
    /// How long it has not been heard, in seconds.
    pub silent_for: f64,
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
            began,
            edition: AtomicU64::new(0),
            state: Mutex::new(State {
                ceilings,
                ..State::default()
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

    /// How the cursor called `cursor` may be paced now.
    pub fn terms(&self, cursor: &str, now: LocalTime) -> Terms {
        let state = self.lock();
        share::terms(now, &self.facts(&state, cursor, now))
    }

    fn facts(&self, state: &State, cursor: &str, now: LocalTime) -> Facts {
        let last_heard = state.last_heard.unwrap_or(self.began);
        let failing = state.failing.get(cursor);
        // With the whole table locked no heartbeat can tell of it: the others notice our silence.
        let unheard = failing
            .filter(|f| state.missed && f.is_told_of(now))
            .map(|_| last_heard);
        Facts {
            heard: state.heard,
            last_heard,
            stuck: failing.and_then(|f| f.told).or(unheard),
            number: state.number,
            all_held: state.all_held,
            silent: self.silent(state, Some(cursor), now),
            of: self.shares(state, now),
        }
    }

    /// Shares of others who may be sending by themselves: silent ones, and those that cannot move `cursor`.
    fn silent(&self, state: &State, cursor: Option<&str>, now: LocalTime) -> u32 {
        let silent = self.others(state).filter(|row| {
            let failing = row
                .lease
                .as_ref()
                .zip(cursor)
                .is_some_and(|(l, c)| l.word.failing.contains(c));
            (failing && !row.has_lapsed(now, self.ttl)) || row.is_silent(now, self.ttl)
        });
        u32::try_from(silent.count()).unwrap_or(u32::MAX)
    }

    /// The leases of others.
    fn others<'s>(&'s self, state: &'s State) -> impl Iterator<Item = &'s Seen> {
        let is_other = |row: &&Seen| {
            row.lease
                .as_ref()
                .is_some_and(|l| l.incarnation != self.incarnation)
        };
        state.rows.values().filter(is_other)
    }

    /// A reservation of `cursor` was made (`true`) or failed. One that goes on failing is told to the others.
    pub fn reserved(&self, cursor: &str, made: bool, now: LocalTime) {
        let mut state = self.lock();
        if made {
            let failed = state.failing.remove(cursor);
            if failed.is_some_and(|f| f.told.is_some()) {
                tracing::info!(cursor, "the cursor's row can be moved again");
            }
        } else if state.heard && state.failing.len() < FAILING_LIMIT {
            // Without heartbeats it is the store that fails, and not this cursor.
            state.failing.entry(cursor.to_owned()).or_insert(Failing {
                since: now,
                told: None,
            });
        }
    }

    /// A request to `destination` went out in the store's second `second`.
    pub fn dispatched(&self, destination: &str, second: i64) {
        let mut state = self.lock();
        let sent = match state.sent.get_mut(destination) {
            Some(sent) => sent,
            None => state.sent.entry(destination.to_owned()).or_default(),
        };
        sent.total += 1;
        *sent.seconds.entry(second).or_insert(0) += 1;
        while sent.seconds.len() > TOLD_SECONDS as usize {
            sent.seconds.pop_first();
        }
    }

    /// The next heartbeat; when it is not written by `until`, it is not to be written.
    pub fn pulse(&self, now: LocalTime, until: Option<StoreTime>) -> Pulse {
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
        let failing: BTreeSet<String> = state
            .failing
            .iter()
            .filter(|(_, f)| state.heard && f.is_told_of(now))
            .map(|(cursor, _)| cursor.clone())
            .collect();
        let word = Word {
            shares: self.of,
            replica: self.replica.clone(),
            ceilings: state.ceilings.clone(),
            dispatches: state
                .sent
                .iter()
                .map(|(d, s)| (d.clone(), s.total))
                .collect(),
            seconds: state
                .sent
                .iter()
                .map(|(d, s)| (d.clone(), s.seconds.clone()))
                .collect(),
            failing: failing.clone(),
        };
        Pulse {
            key: number.map(|n| self.key(n)),
            seen,
            until,
            number,
            incarnation: self.incarnation.clone(),
            word: word.to_text(),
            keys: (0..self.max_replicas).map(|n| self.key(n)).collect(),
            lasts: seconds(self.ttl.saturating_mul(2).max(60 * SECOND)),
            failing,
        }
    }

    /// A heartbeat came back: the store's `now`, whether our row was written, and all rows as they were before.
    pub fn heard(
        &self,
        pulse: &Pulse,
        received: LocalTime,
        now: StoreTime,
        written: bool,
        rows: Vec<(String, String)>,
    ) {
        let mut state = self.lock();
        let was = (state.number, state.all_held);
        let last = state.read.map(|(_, at)| at);
        state.read = Some((now, received));
        let prefix = self.lease_prefix();
        let mut present = BTreeSet::new();
        for (key, text) in rows {
            let Some(number) = key.strip_prefix(&prefix).and_then(|n| n.parse().ok()) else {
                continue;
            };
            present.insert(number);
            if state.rows.get(&number).is_none_or(|r| r.text != text) {
                let seen = Seen::new(text, received, now, last);
                state.rows.insert(number, seen);
            }
        }
        // A row that is gone was not given back: its replica is remembered until it lapses.
        state
            .rows
            .retain(|n, row| present.contains(n) || !row.has_lapsed(received, self.ttl));
        state.number = pulse.number.filter(|_| written);
        if state.number.is_some() {
            state.all_held = false;
        }
        if !state.heard {
            // What failed before was the store; nobody has been told anything else.
            state.failing.clear();
        }
        state.heard = true;
        state.missed = false;
        state.last_heard = Some(received);
        for cursor in &pulse.failing {
            if let Some(failing) = state.failing.get_mut(cursor)
                && failing.told.is_none()
            {
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
        drop(state);
        self.edition.fetch_add(1, Relaxed);
        self.tell_disputes(received);
        if number != was.0 {
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
    }

    /// One line for each destination whose ceiling begins or ends to be in dispute.
    fn tell_disputes(&self, now: LocalTime) {
        let disputed = |(d, own): (&String, &f64)| {
            let (least, differ) = self.agreed(d, *own, now);
            differ.then(|| (d.clone(), least))
        };
        let ceilings = self.lock().ceilings.clone();
        let now: BTreeMap<String, f64> = ceilings.iter().filter_map(disputed).collect();
        let names = now.keys().cloned().collect();
        let before = std::mem::replace(&mut self.lock().disputed, names);
        for (destination, least) in now.iter().filter(|(d, _)| !before.contains(*d)) {
            tracing::warn!(
                destination,
                in_force = least,
                own = ceilings.get(destination),
                "replicas are configured with different rates; the smallest is in force: set the same in every one"
            );
        }
        for destination in before.iter().filter(|d| !now.contains_key(*d)) {
            tracing::info!(
                destination,
                "all replicas are configured with one rate again"
            );
        }
    }

    /// A heartbeat did not pass: surely, or, with `until`, it may yet have been written by then.
    pub fn unheard(&self, until: Option<LocalTime>) {
        let mut state = self.lock();
        state.missed = true;
        if state.number.is_some() {
            state.last_heard = state.last_heard.max(until);
        }
    }

    /// Whether the rows have been read on the present session.
    pub fn has_read(&self) -> bool {
        self.lock().heard
    }

    /// The sessions are gone.
    pub fn lost(&self) {
        let mut state = self.lock();
        state.heard = false;
        // Only what the others were told of keeps its meaning: they go on leaving room for it.
        state.failing.retain(|_, f| f.told.is_some());
    }

    /// Whether this replica has a place: a number, or the lack of one for want of the store.
    pub fn blocker(&self) -> Option<&'static str> {
        let state = self.lock();
        match state.number {
            Some(_) => None,
            None if state.all_held => Some("all_numbers_held"),
            None if state.heard => Some(NO_LEASE_YET),
            None => None,
        }
    }

    /// Whether the store is out of reach for this replica.
    pub fn is_degraded(&self) -> bool {
        !self.lock().heard
    }

    /// The smallest ceiling that a live replica is configured with, and whether they disagree.
    pub fn agreed(&self, destination: &str, own: f64, now: LocalTime) -> (f64, bool) {
        let state = self.lock();
        // While the store is away the last agreement holds, however long that is: the others hold to it too.
        let at = match state.read {
            Some((_, read)) if !state.heard => read,
            _ => now,
        };
        let shares_differ = self
            .words(&state, at)
            .any(|w| w.shares != 0 && w.shares != self.of);
        let theirs = self
            .words(&state, at)
            .filter_map(|word| word.ceilings.get(destination).copied());
        theirs.fold((own, shares_differ), |(least, differ), c| {
            (least.min(c), differ || c != own)
        })
    }

    /// What the others said whose leases had not lapsed at `at`.
    fn words<'s>(&'s self, state: &'s State, at: LocalTime) -> impl Iterator<Item = &'s Word> {
        self.others(state)
            .filter(move |row| !row.has_lapsed(at, self.ttl))
            .filter_map(|row| row.lease.as_ref().map(|lease| &lease.word))
    }

    /// Into how many shares the ceiling is divided. Replicas that are configured with different numbers would send more
    /// than all of it, each on its own; so the largest counts.
    fn shares(&self, state: &State, now: LocalTime) -> u32 {
        self.words(state, now)
            .map(|w| w.shares)
            .fold(self.of, u32::max)
    }

    /// Which part of the ceiling is sent at the moment by those on the same footing as this replica: all of it, what is
    /// left beside silent ones, or its own share.
    pub fn part(&self, cursor: &str, now: LocalTime) -> f64 {
        match self.terms(cursor, now) {
            Terms::Shared { silent, of } => f64::from(of - silent) / f64::from(of),
            Terms::Alone(share) => 1.0 / f64::from(share.of),
            Terms::Hold(_) | Terms::Nothing => 0.0,
        }
    }

    /// Live and silent replicas, this one included.
    pub fn count(&self, now: LocalTime) -> (usize, usize) {
        let members = self.members(now);
        let of = |state| members.iter().filter(|m| m.state == state).count();
        (of("live"), of("silent"))
    }

    /// All replicas that hold a number.
    pub fn members(&self, now: LocalTime) -> Vec<Member> {
        let state = self.lock();
        let member = |(number, row): (&u32, &Seen)| {
            let lease = row.lease.as_ref()?;
            let is_self = lease.incarnation == self.incarnation;
            Some(Member {
                number: *number,
                replica: lease.word.replica.clone(),
                is_self,
                state: match () {
                    () if is_self && state.heard && !state.missed => "live",
                    () if row.has_lapsed(now, self.ttl) => "lapsed",
                    () if row.is_silent(now, self.ttl) => "silent",
                    () => "live",
                },
                silent_for: seconds(row.age(now)),
            })
        };
        state.rows.iter().filter_map(member).collect()
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

    /// The row of the silent or lapsed replica called `name`, to be freed: its key, and what stands in it.
    ///
    /// # Errors
    /// There is none, or it lives; the text says which.
    pub fn to_forget(&self, name: &str, now: LocalTime) -> Result<(String, String), String> {
        let members = self.members(now);
        let Some(member) = members.iter().find(|m| m.replica == name) else {
            return Err(format!(
                "no replica is called {name}; those known: {}",
                self.holders()
            ));
        };
        if member.state == "live" {
            return Err(format!(
                "{name} lives; stop it first, which frees its number by itself"
            ));
        }
        let row = self
            .lock()
            .rows
            .get(&member.number)
            .map(|r| r.text.clone())
            .unwrap_or_default();
        Ok((self.key(member.number), row))
    }

    /// The key and the incarnation of our own lease, if we have one.
    pub fn own(&self) -> Option<(String, String)> {
        let number = self.lock().number?;
        Some((self.key(number), self.incarnation.clone()))
    }

    fn holders(&self) -> String {
        let members = self.members(LocalTime::now());
        let say = |m: &Member| match m.state {
            "live" => format!("{} holds {}", m.replica, m.number),
            other => format!(
                "{} holds {} ({other} for {:.0} s)",
                m.replica, m.number, m.silent_for
            ),
        };
        if members.is_empty() {
            return "none yet".to_owned();
        }
        members.iter().map(say).collect::<Vec<_>>().join(", ")
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

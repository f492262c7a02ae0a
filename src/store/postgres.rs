//! The shared store: one table in Postgres, one statement per reservation.
//!
//! A task of its own (`keeper`) keeps the connections and beats the heart of the membership. Calls use the sessions at
//! hand, with a deadline; a session that says nothing until then is ended with its fellows, for a connection that stalls is of no
//! more use than one that broke. A call whose reply was lost may have moved the cursor: its slots count as taken.

pub mod address;
pub mod error;
mod keeper;
pub mod leases;
mod look;
pub mod session;
mod sessions;
pub mod sql;
pub mod throttles;
pub mod trail;
mod watches;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::sync::{Semaphore, mpsc, watch};

use self::{
    address::Address,
    error::{Reason, StoreError},
    keeper::Keeper,
    session::{Missing, Plan, Prepared, Reply, Session},
    sessions::Sessions,
    sql::Table,
    trail::Trails,
    watches::{Heard, Watches},
};
use crate::{
    config,
    membership::Membership,
    metrics::Metrics,
    pacing::{
        clock::ClockBounds,
        cursor::Ask,
        time::{LocalTime, duration},
    },
};

/// A call that has no reply by then is given up, and its connection with it. Longer than the server waits for a lock.
const CALL_DEADLINE: Duration = Duration::from_millis(1_000);

/// How much longer it may be given up on a slow link: two round trips, and no more than this.
const FAR_AT_MOST: Duration = Duration::from_millis(1_000);
/// How long a reservation waits until those before it have had their turn to wait for a lock.
const TURN_PATIENCE: Duration = Duration::from_millis(1_500);
/// How long other statements do: after such a time all reservations that were before it have had it or have gone.
const LONG_PATIENCE: Duration = Duration::from_millis(3_000);

/// The store. Cheap to share; all clones use one connection.
#[derive(Debug)]
pub struct Postgres {
    key_prefix: String,
    table: Table,
    sessions: watch::Receiver<Option<Arc<Sessions>>>,
    lost: mpsc::Sender<(Arc<Sessions>, StoreError)>,
    clock: Arc<Mutex<ClockBounds>>,
    membership: Arc<Membership>,
    watches: Arc<Watches>,
    side_calls: Semaphore,
    trails: Trails,
    metrics: Arc<Metrics>,
}

impl Postgres {
    /// Starts the task that keeps the connections. Returns at once; whether the store is there shows later.
    /// `ceilings` are the configured ones, for the others to know.
    ///
    /// # Errors
    /// The URL cannot be understood.
    pub fn start(
        config: &config::Store,
        ceilings: BTreeMap<String, f64>,
        metrics: Arc<Metrics>,
    ) -> Result<Arc<Self>, StoreError> {
        let address = Address::parse(config.url.reveal())?;
        let (publish, sessions) = watch::channel(None);
        let (lost, losses) = mpsc::channel(16);
        let membership = Arc::new(Membership::new(config, ceilings, LocalTime::now()));
        let clock = Arc::new(Mutex::new(ClockBounds::default()));
        let watches = Arc::new(Watches::default());
        let store = Arc::new(Postgres {
            key_prefix: config.key_prefix.clone(),
            table: Table::new(&config.table),
            sessions,
            lost,
            clock: clock.clone(),
            membership: membership.clone(),
            watches: watches.clone(),
            side_calls: Semaphore::new(throttles::SIDE_CALLS),
            trails: Trails::default(),
            metrics: metrics.clone(),
        });
        let keeper = Keeper {
            plan: Arc::new(Plan {
                address,
                table: Table::new(&config.table),
                key_prefix: config.key_prefix.clone(),
                missing: match is_ours(config) {
                    true => Missing::IsMade,
                    false => Missing::IsLeft,
                },
            }),
            table: Table::new(&config.table),
            publish,
            losses,
            clock,
            membership,
            watches,
            metrics,
        };
        tokio::spawn(keeper.run());
        Ok(store)
    }

    /// The row that holds the cursor called `name`.
    pub fn key(&self, name: &str) -> String {
        format!("{}{name}", self.key_prefix)
    }

    /// This replica among the others.
    pub fn membership(&self) -> &Arc<Membership> {
        &self.membership
    }

    /// Waits until this replica has its place among the others, for at most `patience`; says whether it has.
    pub async fn wait_until_up(&self, patience: Duration) -> bool {
        let settled = async {
            let mut sessions = self.sessions.clone();
            while self.membership.is_degraded()
                || self.membership.blocker() == Some(crate::membership::NO_LEASE_YET)
            {
                // The keeper publishes the sessions anew when a heartbeat has brought a place.
                if sessions.changed().await.is_err() {
                    return false;
                }
            }
            true
        };
        tokio::time::timeout(patience, settled)
            .await
            .unwrap_or(false)
    }

    /// One line for each cursor of the `destinations`: whether its row is there, and when it was moved last.
    ///
    /// # Errors
    /// The rows could not be read.
    pub async fn cursors(
        &self,
        destinations: &[config::Destination],
    ) -> Result<Vec<String>, StoreError> {
        let Some(sessions) = self.sessions.borrow().clone() else {
            return Err(StoreError::new(Reason::Away, "no connection to Postgres"));
        };
        let look = look::cursors(&sessions.heart, &self.table, &self.key_prefix, destinations);
        tokio::time::timeout(CALL_DEADLINE, look)
            .await
            .unwrap_or_else(|_| Err(StoreError::new(Reason::Timeout, "no reply from Postgres")))
    }

    /// Gives the lease back, if the store can be reached.
    pub async fn release(&self) {
        let Some((key, incarnation)) = self.membership.own() else {
            return;
        };
        let Some(sessions) = self.sessions.borrow().clone() else {
            return;
        };
        let released = leases::release(&sessions.heart, &self.table, &key, &incarnation);
        if !matches!(
            tokio::time::timeout(CALL_DEADLINE, released).await,
            Ok(Ok(()))
        ) {
            tracing::warn!(
                "the lease was not released; it is silent for the others until it lapses"
            );
        }
    }

    /// Frees the number of a dead replica.
    ///
    /// # Errors
    /// Why it is not freed, and what to do.
    pub async fn forget(&self, replica: &str) -> Result<(), String> {
        let (key, seen) = self.membership.to_forget(replica, LocalTime::now())?;
        let Some(sessions) = self.sessions.borrow().clone() else {
            return Err("the store is away; try again when it is back".to_owned());
        };
        let forgotten = leases::forget(&sessions.heart, &self.table, &key, &seen);
        match tokio::time::timeout(CALL_DEADLINE, forgotten).await {
            Ok(Ok(true)) => Ok(()),
            Ok(Ok(false)) => Err(format!("{replica} has been heard just now; stop it first")),
            Ok(Err(e)) => Err(e.to_string()),
            Err(_) => Err("the store did not answer in time; try again".to_owned()),
        }
    }

    /// Whether there is a session.
    pub fn is_up(&self) -> bool {
        self.sessions.borrow().is_some()
    }

    /// The row that holds the state of the throttle of the cursor called `name`. (No destination's name has a colon.)
    pub fn throttle_key(&self, name: &str) -> String {
        format!("{}{}{name}", self.key_prefix, config::THROTTLE_PREFIX)
    }

    /// Has `heard` told, with each heartbeat, what the row `key` holds, until it returns `false`; those that are `first` before
    /// the others.
    pub fn watch(&self, key: String, first: bool, heard: Heard) {
        self.watches.add(key, first, heard);
    }

    /// Takes slots from the cursor in row `key`, if `throttle`, a row's key, begins with the word given. A row that is locked for
    /// longer than its other users hold it is asked for once more aside, where the wait is longer; with `aside` at once, for a row
    /// that was locked before.
    ///
    /// # Errors
    /// No slots are to be had from this call; it may yet have moved the cursor.
    pub async fn reserve(
        &self,
        key: &str,
        throttle: (&str, &str),
        mut ask: Ask,
        aside: bool,
    ) -> Result<Reply, StoreError> {
        let Some(sessions) = self.sessions.borrow().clone() else {
            return Err(StoreError::new(Reason::Away, "no connection to Postgres"));
        };
        ask.lead = self.with_clock(|c| c.lead());
        let began = LocalTime::now();
        let mut outcome = Err(StoreError::new(Reason::Locked, "it was locked before"));
        if !aside {
            let wait = sessions.short_wait();
            outcome = self
                .reserve_on(&sessions.main, wait, key, throttle, &ask)
                .await;
        }
        if matches!(&outcome, Err(e) if e.reason() == Reason::Locked) {
            if !aside {
                sessions.waited_in_vain();
            }
            outcome = match sessions.turn(TURN_PATIENCE).await {
                Ok(turn) => {
                    self.reserve_on(&sessions.side, turn.wait, key, throttle, &ask)
                        .await
                }
                Err(e) => Err(e),
            };
        }
        self.metrics.store_call(
            duration(LocalTime::now().since(began)),
            outcome.as_ref().err().map(|e| e.reason().label()),
        );
        if let Err(e) = &outcome
            && e.ends_session()
        {
            let _ = self.lost.try_send((sessions, e.again()));
        }
        outcome
    }

    async fn reserve_on(
        &self,
        session: &Session,
        wait: u32,
        key: &str,
        throttle: (&str, &str),
        ask: &Ask,
    ) -> Result<Reply, StoreError> {
        let sent = LocalTime::now();
        let call = self.reserve_by_trail(session, key, throttle, ask);
        // The setting goes before the statement, and both are sent together.
        let call = async { tokio::join!(session.be_patient(wait), call).1 };
        let reply = session.await_reply(self.deadline(), call).await?;
        let received = LocalTime::now();
        self.with_clock(|c| c.observe(sent, received, reply.now));
        Ok(reply)
    }

    /// How long a session may say nothing while it owes a reply.
    fn deadline(&self) -> Duration {
        let far = duration(self.with_clock(|c| c.round_trip()).saturating_mul(2));
        CALL_DEADLINE + far.min(FAR_AT_MOST)
    }

    /// One statement; two when the row has gone on from where it was looked for, or when its cursor is doubted. Only a
    /// statement that certainly did nothing is followed by another.
    async fn reserve_by_trail(
        &self,
        session: &Session,
        key: &str,
        throttle: (&str, &str),
        ask: &Ask,
    ) -> Result<Reply, StoreError> {
        if let Some(cursor) = ask.disbelieved {
            session.disbelieve(&self.table, key, cursor).await?;
        }
        if let Some(places) = self.trails.near(key) {
            let reply = session.reserve_near(&places, key, throttle, ask).await?;
            if let Some(reply) = reply {
                if let Some(place) = reply.place {
                    self.trails.seen(key, place, true);
                }
                return Ok(reply);
            }
            self.trails.missed(key);
        }
        for _ in 0..2 {
            if let Some(reply) = session.reserve(key, throttle, ask).await? {
                if let Some(place) = reply.place {
                    self.trails.seen(key, place, false);
                }
                return Ok(reply);
            }
            if let Some(doubted) = session.look(&self.table, key).await? {
                return Ok(doubted);
            }
            // It is gone, or no number any more: both heal with a reservation.
        }
        let detail = "the cursor's row changes all the time";
        Err(StoreError::new(Reason::Locked, detail))
    }

    /// Looks at the bounds of the store's clock.
    pub fn with_clock<T>(&self, look: impl FnOnce(&mut ClockBounds) -> T) -> T {
        look(&mut self.clock.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Tries the store once, for `paceline check`: connects, and looks at the table without making it. One line about the store, and
/// one about each cursor of the `destinations`.
///
/// # Errors
/// Why the store cannot be used.
pub async fn try_once(
    config: &config::Store,
    destinations: &[config::Destination],
) -> Result<Vec<String>, StoreError> {
    let address = Address::parse(config.url.reveal())?;
    let table = Table::new(&config.table);
    let (own, missing) = match is_ours(config) {
        true => (true, Missing::MayBeMade),
        false => (false, Missing::IsLeft),
    };
    let plan = Arc::new(Plan {
        address,
        table: table.clone(),
        key_prefix: config.key_prefix.clone(),
        missing,
    });
    let session = match session::open(&plan).await {
        Ok(opened) => opened.session,
        Err(e) if own && e.reason() == Reason::Table => {
            return Ok(vec![format!(
                "reachable; table {} will be made at the first start",
                table.quoted()
            )]);
        }
        Err(e) => return Err(e),
    };
    let how = match session.reserve {
        Prepared::Named(_) => "directly",
        Prepared::Unnamed(_) => "through a pooler or address translation",
    };
    let mut lines = vec![format!("reachable {how}; table {} fits", table.quoted())];
    lines.extend(look::cursors(&session, &table, &config.key_prefix, destinations).await?);
    Ok(lines)
}

/// Whether the URL can be understood, and the file of its `sslrootcert` read.
///
/// # Errors
/// What is wrong with it; no part of it is shown.
pub fn check_url(config: &config::Store) -> Result<(), config::Complaint> {
    Address::parse(config.url.reveal()).map(drop)
}

/// Whether the table is ours to make, and not one that is adopted.
fn is_ours(config: &config::Store) -> bool {
    config.table == config::default::TABLE
}

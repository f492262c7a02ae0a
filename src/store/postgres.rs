//! The shared store: one table in Postgres, one statement per reservation.
//!
//! A connection is kept by a task of its own, which makes another when it is lost: at once, then backing off to one
//! attempt a second, however many requests wait. Calls use the session at hand, with a deadline; one that misses it ends
//! the session, for a connection that stalls is of no more use than one that broke. A call whose reply was lost may
//! have moved the cursor: its slots count as taken.

pub mod address;
pub mod error;
pub mod session;
pub mod sql;

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::sync::{mpsc, watch};

use self::{
    address::Address,
    error::{Reason, StoreError},
    session::{Prepared, Session, Wire},
    sql::Table,
};
use crate::{
    config,
    metrics::Metrics,
    pacing::{
        clock::ClockBounds,
        cursor::{Ask, Granted},
        time::{LocalTime, duration},
    },
};

/// A call that has no reply by then is given up, and its connection with it. Longer than the server waits for a lock.
const CALL_DEADLINE: Duration = Duration::from_millis(1_000);
/// The first and the longest pause between two attempts to connect.
const RECONNECT_FIRST: Duration = Duration::from_millis(50);
const RECONNECT_LONGEST: Duration = Duration::from_secs(1);
/// How often expired rows of ours are removed.
const SWEEP_EVERY: Duration = Duration::from_secs(600);

/// The store. Cheap to share; all clones use one connection.
#[derive(Debug)]
pub struct Postgres {
    key_prefix: String,
    sessions: watch::Receiver<Option<Arc<Session>>>,
    lost: mpsc::Sender<(Arc<Session>, StoreError)>,
    clock: Arc<Mutex<ClockBounds>>,
    was_up: Arc<AtomicBool>,
    metrics: Arc<Metrics>,
}

impl Postgres {
    /// Starts the task that keeps the connection. Returns at once; whether the store is there shows later.
    ///
    /// # Errors
    /// The URL cannot be understood.
    pub fn start(config: &config::Store, metrics: Arc<Metrics>) -> Result<Arc<Self>, StoreError> {
        let address = Address::parse(config.url.reveal())?;
        let (publish, sessions) = watch::channel(None);
        let (lost, losses) = mpsc::channel(16);
        let was_up = Arc::new(AtomicBool::new(false));
        let clock = Arc::new(Mutex::new(ClockBounds::default()));
        let store = Arc::new(Postgres {
            key_prefix: config.key_prefix.clone(),
            sessions,
            lost,
            clock: clock.clone(),
            was_up: was_up.clone(),
            metrics: metrics.clone(),
        });
        let keeper = Keeper {
            address,
            table: Table::new(&config.table),
            own_table: config.table == config::default::TABLE,
            key_prefix: config.key_prefix.clone(),
            publish,
            losses,
            clock,
            was_up,
            metrics,
        };
        tokio::spawn(keeper.run());
        Ok(store)
    }

    /// The row that holds the cursor called `name`.
    pub fn key(&self, name: &str) -> String {
        format!("{}{name}", self.key_prefix)
    }

    /// Waits until the store is there, for at most `patience`; says whether it is.
    pub async fn wait_until_up(&self, patience: Duration) -> bool {
        let mut sessions = self.sessions.clone();
        tokio::time::timeout(patience, sessions.wait_for(Option::is_some))
            .await
            .is_ok_and(|r| r.is_ok())
    }

    /// Whether there has ever been a session.
    pub fn was_up(&self) -> bool {
        self.was_up.load(Relaxed)
    }

    /// Whether there is a session.
    pub fn is_up(&self) -> bool {
        self.sessions.borrow().is_some()
    }

    /// Takes slots from the cursor in row `key`.
    ///
    /// # Errors
    /// No slots are to be had from this call; it may yet have moved the cursor.
    pub async fn reserve(&self, key: &str, mut ask: Ask) -> Result<Granted, StoreError> {
        let session = self.sessions.borrow().clone();
        let Some(session) = session else {
            return Err(StoreError::new(Reason::Away, "no connection to Postgres"));
        };
        ask.lead = self.with_clock(|c| c.lead());
        let sent = LocalTime::now();
        let reply = tokio::time::timeout(CALL_DEADLINE, session.reserve(key, &ask)).await;
        let received = LocalTime::now();
        let outcome = reply
            .unwrap_or_else(|_| Err(StoreError::new(Reason::Timeout, "no reply from Postgres")));
        self.metrics.store_call(
            duration(received.since(sent)),
            outcome.as_ref().err().map(|e| e.reason().label()),
        );
        match outcome {
            Ok(granted) => {
                self.with_clock(|c| c.observe(sent, received, granted.now));
                Ok(granted)
            }
            Err(e) => {
                if e.ends_session() {
                    let _ = self.lost.try_send((session, e.again()));
                }
                Err(e)
            }
        }
    }

    /// Looks at the bounds of the store's clock.
    pub fn with_clock<T>(&self, look: impl FnOnce(&mut ClockBounds) -> T) -> T {
        look(&mut self.clock.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Keeps one session, and makes another when it is lost.
struct Keeper {
    address: Address,
    table: Table,
    own_table: bool,
    key_prefix: String,
    publish: watch::Sender<Option<Arc<Session>>>,
    losses: mpsc::Receiver<(Arc<Session>, StoreError)>,
    clock: Arc<Mutex<ClockBounds>>,
    was_up: Arc<AtomicBool>,
    metrics: Arc<Metrics>,
}

impl Keeper {
    async fn run(mut self) {
        let mut pause = RECONNECT_FIRST;
        let mut told: Option<Reason> = None;
        while !self.publish.is_closed() {
            match session::open(&self.address, &self.table, self.own_table).await {
                Ok((session, mut wire)) => {
                    for (sent, received, now) in &session.clock {
                        self.clock
                            .lock()
                            .unwrap_or_else(PoisonError::into_inner)
                            .observe(*sent, *received, *now);
                    }
                    let session = Arc::new(session);
                    tracing::info!(
                        pooled = matches!(session.reserve, Prepared::Unnamed(_)),
                        "store up"
                    );
                    pause = RECONNECT_FIRST;
                    self.metrics.store_up(true);
                    self.was_up.store(true, Relaxed);
                    let _ = self.publish.send(Some(session.clone()));
                    let why = self.hold(&session, &mut wire).await;
                    let _ = self.publish.send(None);
                    wire.abort();
                    self.metrics.store_up(false);
                    tracing::warn!(reason = why.reason().label(), "store lost: {why}");
                    told = Some(why.reason());
                }
                Err(e) => {
                    self.metrics.store_error(e.reason().label());
                    if told != Some(e.reason()) {
                        tracing::warn!(reason = e.reason().label(), "store away: {e}");
                        told = Some(e.reason());
                    }
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(RECONNECT_LONGEST);
                }
            }
        }
    }

    /// Until the session is lost; meanwhile expired rows are swept.
    async fn hold(&mut self, session: &Arc<Session>, wire: &mut Wire) -> StoreError {
        let mut sweep = tokio::time::interval(SWEEP_EVERY);
        let closed = || StoreError::new(Reason::Connection, "Postgres closed the connection");
        loop {
            tokio::select! {
                end = &mut *wire => return end.ok().flatten().unwrap_or_else(closed),
                loss = self.losses.recv() => match loss {
                    Some((which, why)) if Arc::ptr_eq(&which, session) => return why,
                    Some(_) => {}
                    None => return closed(),
                },
                _ = sweep.tick() => self.sweep(session),
            }
        }
    }

    fn sweep(&self, session: &Arc<Session>) {
        let (session, text, prefix) = (
            session.clone(),
            sql::sweep(&self.table),
            self.key_prefix.clone(),
        );
        tokio::spawn(async move {
            let params: [(&(dyn tokio_postgres::types::ToSql + Sync), _); 1] =
                [(&prefix, tokio_postgres::types::Type::TEXT)];
            if let Err(e) = session
                .client
                .query_typed(&text, &params)
                .await
                .map_err(StoreError::from)
            {
                tracing::debug!(
                    reason = e.reason().label(),
                    "expired rows were not removed: {e}"
                );
            }
        });
    }
}

/// Tries the store once, for `paceline check`: connects, and looks at the table without making it.
///
/// # Errors
/// Why the store cannot be used.
pub async fn try_once(config: &config::Store) -> Result<String, StoreError> {
    let address = Address::parse(config.url.reveal())?;
    let table = Table::new(&config.table);
    let own = config.table == config::default::TABLE;
    let session = match session::open(&address, &table, false).await {
        Ok((session, _)) => session,
        Err(e) if own && e.reason() == Reason::Table => {
            return Ok(format!(
                "reachable; table {} will be made at the first start",
                table.quoted()
            ));
        }
        Err(e) => return Err(e),
    };
    let how = match session.reserve {
        Prepared::Named(_) => "directly",
        Prepared::Unnamed(_) => "through a pooler or address translation",
    };
    Ok(format!("reachable {how}; table {} fits", table.quoted()))
}

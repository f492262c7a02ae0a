//! One connection to Postgres, and the statements on it. How one is made and examined is in `open` and `examine`.
//!
//! Behind a transaction pooler each statement may run in another server session, so that neither prepared statements
//! nor settings last, and a name that we prepared may be another client's there. A session is therefore used with
//! named statements only when it is proven to be direct: the server sees our own socket as its peer.

mod examine;
mod open;

use std::{
    borrow::Cow,
    error::Error,
    ops::Range,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::{Duration, SystemTime},
};

use tokio::{task::JoinHandle, time::Instant};
use tokio_postgres::{
    Client, Row, Statement,
    types::{FromSql, ToSql, Type},
};

use crate::pacing::{
    cursor::{Ask, Granted},
    time::{LocalTime, Nanos, StoreTime, nanos},
};

use super::{
    error::{Reason, StoreError},
    sql::{self, Table},
    trail::Place,
};

pub use self::open::{Opened, Plan, Server, open, open_at};

/// A usable connection.
#[derive(Debug)]
pub struct Session {
    /// For statements.
    pub client: Client,
    /// How the reservation is run.
    pub reserve: Prepared,
    /// How it is run near a place; `None` where rows have no places that could be told.
    pub reserve_near: Option<Prepared>,
    /// What the store's clock showed while the session was examined: sent, received, and its now.
    pub clock: Vec<(LocalTime, LocalTime, StoreTime)>,
    /// How long a statement waits for a lock, in milliseconds.
    lock_wait: AtomicU32,
    /// When a reply came last.
    replied: Mutex<Instant>,
}

/// The task that moves a session's bytes. It ends when the connection does, with the error if there was one.
pub type Wire = JoinHandle<Option<StoreError>>;

/// A statement, as this session can run it.
#[derive(Debug)]
pub enum Prepared {
    /// Prepared under a name; for sessions that are ours alone.
    Named(Box<Statement>),
    /// Sent whole each time, in one round trip.
    Unnamed(String),
}

/// How many parameters a reservation has, and with places how many.
const RESERVE: usize = 8;
const RESERVE_NEAR: usize = RESERVE + 2;

/// What the reservation's parameters are.
const RESERVE_TYPES: [Type; RESERVE] = [
    Type::TEXT,
    Type::INT8,
    Type::INT8,
    Type::INT8,
    Type::INT8,
    Type::INT8,
    Type::TEXT,
    Type::TEXT,
];

/// And those of one near a place.
const RESERVE_NEAR_TYPES: [Type; RESERVE_NEAR] = {
    let [a, b, c, d, e, f, g, h] = RESERVE_TYPES;
    [a, b, c, d, e, f, g, h, Type::TID, Type::TID]
};

/// What a reservation brought back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The store's clock.
    pub now: StoreTime,
    /// The slots; `None` when the throttle's row holds another word than was thought, or the cursor is doubted.
    pub granted: Option<Granted>,
    /// The cursor, when it lies beyond the horizon.
    pub doubted: Option<StoreTime>,
    /// The throttle's row.
    pub throttle: Option<String>,
    /// Where the cursor's row lies now, if that can be told.
    pub place: Option<Place>,
}

/// What is done about a table that is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// Nothing: it is somebody else's to make, and its absence an error.
    IsLeft,
    /// It is made.
    IsMade,
    /// It is an error too, but first that it may not be made, if that is so.
    MayBeMade,
}

impl Session {
    fn new(client: Client, reserve: Prepared, reserve_near: Option<Prepared>) -> Session {
        Session {
            client,
            reserve,
            reserve_near,
            clock: Vec::new(),
            lock_wait: AtomicU32::new(sql::LOCK_TIMEOUT_MS),
            replied: Mutex::new(Instant::now()),
        }
    }

    /// Has the statements that are sent from now on wait for a lock for `wait` milliseconds. The setting is sent when the future
    /// is polled first, so that a statement polled after it in the same task goes behind it, in the same round trip.
    pub async fn be_patient(&self, wait: u32) {
        let before = self.lock_wait.swap(wait, Relaxed);
        if before != wait && matches!(self.reserve, Prepared::Named(_)) {
            // Should it fail, so does the statement behind it, which says why.
            let _ = self.client.batch_execute(&sql::lock_timeout(wait)).await;
        }
    }

    /// Waits for the reply to a call. Replies come in the order of the calls, so as long as any come, this one is under way:
    /// only a session that says nothing at all for `deadline` is given up.
    ///
    /// # Errors
    /// The call's own; or that there was no reply.
    pub async fn await_reply<T>(
        &self,
        deadline: Duration,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let mut call = std::pin::pin!(call);
        let mut since = Instant::now();
        loop {
            if let Ok(reply) = tokio::time::timeout_at(since + deadline, &mut call).await {
                *self.last_reply() = Instant::now();
                return reply;
            }
            let last = *self.last_reply();
            if last <= since {
                return Err(StoreError::new(Reason::Timeout, "no reply from Postgres"));
            }
            since = last;
        }
    }

    fn last_reply(&self) -> std::sync::MutexGuard<'_, Instant> {
        self.replied.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes slots from the cursor `key`: one statement, one round trip. None are taken when the throttle's row begins with
    /// another word than the one given with its key. `None`, and nothing done, when the cursor lies beyond the horizon.
    ///
    /// # Errors
    /// Why there are none; the cursor may have moved all the same.
    pub async fn reserve(
        &self,
        key: &str,
        (throttle, word): (&str, &str),
        ask: &Ask,
    ) -> Result<Option<Reply>, StoreError> {
        let span = span(ask);
        let floor = ask.floor.map(|t| t.0);
        let params: [&(dyn ToSql + Sync); RESERVE] = [
            &key,
            &span,
            &ask.lead,
            &floor,
            &ask.horizon,
            &ask.held,
            &throttle,
            &word,
        ];
        let row = self.reserve.run(self, params, RESERVE_TYPES).await?;
        row.map(|row| reply(&row, ask)).transpose()
    }

    /// Where the cursor `key` stands, beyond the horizon of a reservation; `None` when it is gone, or no number.
    ///
    /// # Errors
    /// It could not be read.
    pub async fn look(&self, table: &Table, key: &str) -> Result<Option<Reply>, StoreError> {
        let text = sql::look(table);
        let rows = self
            .client
            .query_typed(&text, &[(&key, Type::TEXT)])
            .await?;
        let Some(row) = rows.first() else {
            return Ok(None);
        };
        let (cursor, now) = (row.try_get::<_, Option<i64>>(0)?, row.try_get(1)?);
        Ok(cursor.map(|cursor| Reply {
            now: store_time(now),
            granted: None,
            doubted: Some(StoreTime(cursor)),
            throttle: None,
            place: None,
        }))
    }

    /// Makes the cursor `key` count as absent, if it still stands at `cursor`.
    ///
    /// # Errors
    /// Nothing is known of what was done.
    pub async fn disbelieve(
        &self,
        table: &Table,
        key: &str,
        cursor: StoreTime,
    ) -> Result<(), StoreError> {
        let text = sql::disbelieve(table);
        let params: [(&(dyn ToSql + Sync), Type); 2] =
            [(&key, Type::TEXT), (&cursor.0, Type::INT8)];
        self.client.query_typed(&text, &params).await?;
        Ok(())
    }

    /// The same from a row that lies at one of `places`. `None`, and nothing done, when it does not.
    ///
    /// # Errors
    /// As above.
    pub async fn reserve_near(
        &self,
        places: &Range<Place>,
        key: &str,
        (throttle, word): (&str, &str),
        ask: &Ask,
    ) -> Result<Option<Reply>, StoreError> {
        let Some(statement) = &self.reserve_near else {
            return Ok(None);
        };
        let span = span(ask);
        let floor = ask.floor.map(|t| t.0);
        let params: [&(dyn ToSql + Sync); RESERVE_NEAR] = [
            &key,
            &span,
            &ask.lead,
            &floor,
            &ask.horizon,
            &ask.held,
            &throttle,
            &word,
            &places.start,
            &places.end,
        ];
        let row = statement.run(self, params, RESERVE_NEAR_TYPES).await?;
        row.map(|row| reply(&row, ask)).transpose()
    }
}

/// Text as it is found. A database of the encoding SQL_ASCII holds and sends any bytes: those that are no text count as
/// garbage in a value, and are no reason to give up the session.
#[derive(Debug)]
pub struct Lenient(pub String);

impl<'a> FromSql<'a> for Lenient {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Lenient, Box<dyn Error + Sync + Send>> {
        Ok(Lenient(String::from_utf8_lossy(raw).into_owned()))
    }

    fn accepts(ty: &Type) -> bool {
        <&str as FromSql>::accepts(ty)
    }
}

impl Prepared {
    /// Its row, if it answers with one.
    async fn run<const N: usize>(
        &self,
        session: &Session,
        params: [&(dyn ToSql + Sync); N],
        types: [Type; N],
    ) -> Result<Option<Row>, StoreError> {
        let client = &session.client;
        Ok(match self {
            Prepared::Named(statement) => client.query_opt(&**statement, &params).await?,
            Prepared::Unnamed(text) => {
                let typed: Vec<_> = params.into_iter().zip(types).collect();
                let text = match session.lock_wait.load(Relaxed) {
                    sql::LOCK_TIMEOUT_MS => Cow::Borrowed(text),
                    wait => Cow::Owned(sql::waiting(text, wait)),
                };
                client.query_typed(&text, &typed).await?.into_iter().next()
            }
        })
    }
}

fn span(ask: &Ask) -> Nanos {
    ask.interval.saturating_mul(Nanos::from(ask.slots))
}

fn reply(row: &Row, ask: &Ask) -> Result<Reply, StoreError> {
    let (end, now) = (
        row.try_get::<_, Option<i64>>(0)?,
        store_time(row.try_get(1)?),
    );
    Ok(Reply {
        now,
        granted: end.map(|end| Granted {
            now,
            start: StoreTime(end.saturating_sub(span(ask))),
            slots: ask.slots,
            interval: ask.interval,
        }),
        doubted: None,
        throttle: row.try_get::<_, Option<Lenient>>(2)?.map(|t| t.0),
        place: row.try_get(3)?,
    })
}

/// What Postgres's clock showed, which tokio-postgres gives as if it were this machine's.
fn store_time(shown: SystemTime) -> StoreTime {
    match shown.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(since) => StoreTime(nanos(since)),
        Err(before) => StoreTime(-nanos(before.duration())),
    }
}

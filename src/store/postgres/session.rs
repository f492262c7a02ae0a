//! One connection to Postgres, made and examined: which server, whether it is ours alone, and whether the table fits.
//!
//! Behind a transaction pooler each statement may run in another server session, so that neither prepared statements
//! nor settings last, and a name that we prepared may be another client's there. A session is therefore used with
//! named statements only when it is proven to be direct: the server sees our own socket as its peer.

use std::{
    io,
    ops::Range,
    time::{Duration, SystemTime},
};

use tokio::{
    net::{TcpStream, UnixStream},
    task::JoinHandle,
};
use tokio_postgres::{
    Client, NoTls, Row, Statement,
    config::Host,
    tls::MakeTlsConnect,
    types::{ToSql, Type},
};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::pacing::{
    cursor::{Ask, Granted},
    throttle::NO_ROW,
    time::{LocalTime, Nanos, SECOND, StoreTime, nanos},
};

use super::{
    address::Address,
    error::{Reason, StoreError},
    sql::{self, Table},
    trail::Place,
};

/// How long the whole of connecting to one address may take.
const CONNECT_DEADLINE: Duration = Duration::from_secs(3);
/// Unacknowledged data ends a connection after this long, and so does an idle peer that is gone.
const DEAD_PEER: Duration = Duration::from_secs(5);

/// How often the store's clock is looked at when a session begins, so that its first slots are mapped well.
const CLOCK_SAMPLES: usize = 3;

/// Postgres's own.
const DEFAULT_PORT: u16 = 5432;

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

/// Connects to the first server of the address that will do.
///
/// `missing` says what is done about a table that is not there.
///
/// # Errors
/// Why the last server tried would not do.
pub async fn open(
    address: &Address,
    table: &Table,
    missing: Missing,
) -> Result<(Session, Wire), StoreError> {
    let mut last = StoreError::new(Reason::Connection, "store.url names no host");
    for at in 0..address.config.get_hosts().len() {
        match tokio::time::timeout(CONNECT_DEADLINE, open_one(address, at, table, missing)).await {
            Ok(Ok(session)) => return Ok(session),
            Ok(Err(e)) => last = e.at(&server(address, at)),
            Err(_) => {
                last = StoreError::new(Reason::Timeout, "no reply while connecting")
                    .at(&server(address, at))
            }
        }
    }
    Err(last)
}

/// Host and port, as they may be shown.
fn server(address: &Address, at: usize) -> String {
    let ports = address.config.get_ports();
    let port = ports
        .get(at)
        .or(ports.first())
        .copied()
        .unwrap_or(DEFAULT_PORT);
    match &address.config.get_hosts()[at] {
        Host::Tcp(name) => format!("{name}:{port}"),
        Host::Unix(dir) => format!("{}:{port}", dir.display()),
    }
}

async fn open_one(
    address: &Address,
    at: usize,
    table: &Table,
    missing: Missing,
) -> Result<(Session, Wire), StoreError> {
    let config = &address.config;
    let ports = config.get_ports();
    let port = ports
        .get(at)
        .or(ports.first())
        .copied()
        .unwrap_or(DEFAULT_PORT);
    let (client, wire, direct) = match &config.get_hosts()[at] {
        Host::Unix(dir) => {
            let stream = UnixStream::connect(dir.join(format!(".s.PGSQL.{port}"))).await?;
            // The socket's other end belongs to whoever listened: the parent of our server process, unless a pooler
            // stands between. /proc tells, when it can be read; a doubt counts as a pooler.
            let listener = stream.peer_cred()?.pid();
            let (client, connection) = config.connect_raw(stream, NoTls).await?;
            let wire = tokio::spawn(async move { connection.await.err().map(StoreError::from) });
            let direct = match listener {
                Some(pid) => parent(backend_pid(&client).await?) == Some(pid),
                None => false,
            };
            (client, wire, direct)
        }
        Host::Tcp(name) => {
            let target = match config.get_hostaddrs().get(at) {
                Some(ip) => (ip.to_string(), port),
                None => (name.clone(), port),
            };
            let stream = TcpStream::connect((target.0.as_str(), target.1)).await?;
            tune(&stream)?;
            let ours = stream.local_addr()?.port();
            let (client, wire) = match &address.tls {
                Some(tls) => {
                    let mut make = MakeRustlsConnect::new((**tls).clone());
                    let tls = MakeTlsConnect::<TcpStream>::make_tls_connect(&mut make, name)
                        .map_err(|_| {
                            StoreError::new(
                                Reason::Tls,
                                "the host in store.url is no name that TLS can verify",
                            )
                        })?;
                    let (client, connection) = config.connect_raw(stream, tls).await?;
                    (
                        client,
                        tokio::spawn(async move { connection.await.err().map(StoreError::from) }),
                    )
                }
                None => {
                    let (client, connection) = config.connect_raw(stream, NoTls).await?;
                    (
                        client,
                        tokio::spawn(async move { connection.await.err().map(StoreError::from) }),
                    )
                }
            };
            let row = client.query_typed("SELECT inet_client_port()", &[]).await?;
            let seen: Option<i32> = row.first().and_then(|r| r.get(0));
            (client, wire, seen == Some(i32::from(ours)))
        }
    };
    match missing {
        Missing::IsMade => make_table(&client, table).await?,
        Missing::MayBeMade if !is_there(&client, table).await? => {
            may_be_made(&client, table).await?;
        }
        Missing::MayBeMade | Missing::IsLeft => {}
    }
    let has_places = has_places(&client, table).await?;
    let mut session = Session {
        client,
        reserve: Prepared::Unnamed(sql::reserve(table, !direct, has_places)),
        reserve_near: has_places.then(|| Prepared::Unnamed(sql::reserve_near(table, !direct))),
        clock: Vec::new(),
    };
    if direct {
        session.prepare().await?;
    }
    session.rehearse().await?;
    for _ in 0..CLOCK_SAMPLES {
        let sent = LocalTime::now();
        let rows = session.client.query_typed(sql::CLOCK, &[]).await?;
        let received = LocalTime::now();
        if let Some(row) = rows.first() {
            let now = store_time(row.try_get(0)?);
            session.clock.push((sent, received, now));
        }
    }
    Ok((session, wire))
}

impl Session {
    /// Makes the settings, and named statements of the unnamed ones; for a session that is ours alone.
    async fn prepare(&mut self) -> Result<(), StoreError> {
        self.client.batch_execute(&sql::session_settings()).await?;
        self.reserve.name(&self.client, &RESERVE_TYPES).await?;
        if let Some(near) = &mut self.reserve_near {
            near.name(&self.client, &RESERVE_NEAR_TYPES).await?;
        }
        Ok(())
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
        let row = self
            .reserve
            .run(&self.client, params, RESERVE_TYPES)
            .await?;
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
        let row = statement
            .run(&self.client, params, RESERVE_NEAR_TYPES)
            .await?;
        row.map(|row| reply(&row, ask)).transpose()
    }

    /// Runs a reservation and takes it back. A table that does not fit, a missing privilege and a server that only
    /// reads show here and not at the first request, which besides finds the server's caches warm.
    async fn rehearse(&self) -> Result<(), StoreError> {
        self.client.batch_execute("BEGIN").await?;
        let ask = Ask {
            slots: 1,
            interval: 1,
            lead: 0,
            floor: None,
            horizon: SECOND,
            disbelieved: None,
            held: 0,
        };
        let throttle = (sql::REHEARSAL_KEY, NO_ROW);
        let outcome = self.reserve(sql::REHEARSAL_KEY, throttle, &ask).await;
        self.client.batch_execute("ROLLBACK").await?;
        outcome.map(drop)
    }
}

impl Prepared {
    /// Prepares an unnamed statement under a name.
    async fn name(&mut self, client: &Client, types: &[Type]) -> Result<(), StoreError> {
        if let Prepared::Unnamed(text) = self {
            *self = Prepared::Named(Box::new(client.prepare_typed(text, types).await?));
        }
        Ok(())
    }

    /// Its row, if it answers with one.
    async fn run<const N: usize>(
        &self,
        client: &Client,
        params: [&(dyn ToSql + Sync); N],
        types: [Type; N],
    ) -> Result<Option<Row>, StoreError> {
        Ok(match self {
            Prepared::Named(statement) => client.query_opt(&**statement, &params).await?,
            Prepared::Unnamed(text) => {
                let typed: Vec<_> = params.into_iter().zip(types).collect();
                client.query_typed(text, &typed).await?.into_iter().next()
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
        throttle: row.try_get(2)?,
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

async fn backend_pid(client: &Client) -> Result<i32, StoreError> {
    let row = client.query_typed("SELECT pg_backend_pid()", &[]).await?;
    Ok(row.first().map_or(0, |r| r.get(0)))
}

fn parent(pid: i32) -> Option<i32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?
        .1
        .split_whitespace()
        .nth(1)?
        .parse()
        .ok()
}

fn tune(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = socket2::SockRef::from(stream);
    let keepalive = socket2::TcpKeepalive::new()
        .with_time(DEAD_PEER)
        .with_interval(Duration::from_secs(1))
        .with_retries(3);
    socket.set_tcp_keepalive(&keepalive)?;
    socket.set_tcp_user_timeout(Some(DEAD_PEER))
}

/// Makes our own table unless it is there. Looking first spares users that may not create tables the attempt, and two
/// replicas that start together may both find it missing: the loser's error is the winner's success.
async fn make_table(client: &Client, table: &Table) -> Result<(), StoreError> {
    for attempt in 0..3 {
        if is_there(client, table).await? {
            return Ok(());
        }
        match client.batch_execute(&sql::create_table(table)).await {
            Ok(()) => return Ok(()),
            Err(e) => {
                may_be_made(client, table).await?;
                if attempt == 2 {
                    return Err(e.into());
                }
            }
        }
    }
    Ok(())
}

async fn is_there(client: &Client, table: &Table) -> Result<bool, StoreError> {
    let name = table.quoted().to_owned();
    let row = client
        .query_typed("SELECT to_regclass($1) IS NOT NULL", &[(&name, Type::TEXT)])
        .await?;
    Ok(row.first().is_some_and(|r| r.get(0)))
}

async fn has_places(client: &Client, table: &Table) -> Result<bool, StoreError> {
    let name = table.quoted().to_owned();
    let row = client
        .query_typed(sql::HAS_PLACES, &[(&name, Type::TEXT)])
        .await?;
    Ok(row.first().is_some_and(|r| r.get(0)))
}

/// Whether this user may make a table where one without a schema is made. From PostgreSQL 15 on nobody but the
/// database's owner may do so by default.
async fn may_be_made(client: &Client, table: &Table) -> Result<(), StoreError> {
    let row = client.query_typed(sql::MAY_CREATE, &[]).await?;
    let Some(row) = row.first() else {
        return Ok(());
    };
    let (schema, may): (Option<String>, bool) = (row.try_get(0)?, row.try_get(1)?);
    if may {
        return Ok(());
    }
    let (table, user) = (table.quoted(), row.try_get::<_, String>(2)?);
    let detail = match schema {
        Some(schema) => format!(
            "table {table} is missing, and user {user:?} may not make it in schema {schema:?}"
        ),
        None => format!(
            "table {table} is missing, and user {user:?} may use no schema of its search_path to make it in"
        ),
    };
    Err(StoreError::new(Reason::Creation, detail))
}

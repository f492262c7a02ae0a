//! One server connected to and examined, in few round trips: what can be asked together is sent together, since the server
//! may be 300 ms away. No transaction stays open while a reply is waited for.

use std::{
    hash::{BuildHasher as _, RandomState},
    io,
    time::Duration,
};

use tokio::{
    net::{TcpStream, UnixStream},
    time::{Instant, timeout},
};
use tokio_postgres::{
    Client, NoTls,
    config::Host,
    tls::MakeTlsConnect,
    types::{FromSqlOwned, Type},
};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::{
    Opened, Plan, Prepared, RESERVE_NEAR_TYPES, RESERVE_TYPES, Server, Session, Wire, open::Place,
    store_time,
};
use crate::{
    pacing::{
        cursor::Ask,
        throttle::NO_ROW,
        time::{LocalTime, SECOND},
    },
    store::postgres::{
        error::{Reason, StoreError},
        session::Missing,
        sql::{self, Table},
    },
};

/// How long each step of connecting may take. A step is six round trips at the most (TLS and SCRAM), so that a server which is
/// half a second away can be used, and one that is frozen is found out as soon as ever.
const STEP: Duration = Duration::from_secs(3);
/// Unacknowledged data ends a connection after this long, and so does an idle peer that is gone.
const DEAD_PEER: Duration = Duration::from_secs(5);
/// How often the store's clock is looked at when a session begins, so that its first slots are mapped well; and no more once
/// so much time has gone into it.
const CLOCK_SAMPLES: usize = 3;
const CLOCK_SPAN: Duration = Duration::from_millis(100);

/// How the server's side of a direct connection can be told.
enum Peer {
    /// It sees this port of ours.
    Tcp(u16),
    /// It is a child of this process, which listened; unknown where /proc cannot be read.
    Unix(Option<i32>),
}

/// One step of connecting, with its own deadline.
async fn step<T>(
    what: &str,
    step: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    timeout(STEP, step).await.unwrap_or_else(|_| {
        Err(StoreError::new(
            Reason::Timeout,
            format!("no reply while connecting ({what})"),
        ))
    })
}

/// Connects to one server and examines it.
pub(super) async fn connect(plan: &Plan, server: &Server) -> Result<Opened, StoreError> {
    let (client, wire, peer) = log_in(plan, server).await?;
    let (direct, has_places) = step("a look at the table", look(&client, plan, &peer)).await?;
    let text = sql::reserve(&plan.table, !direct, has_places);
    let near = has_places.then(|| sql::reserve_near(&plan.table, !direct));
    let mut session = Session::new(
        client,
        Prepared::Unnamed(text.clone()),
        near.clone().map(Prepared::Unnamed),
    );
    step("a reservation on trial", async {
        if direct {
            let named = prepare(&session, &text, near.as_deref(), &plan.key_prefix).await?;
            (session.reserve, session.reserve_near) = named;
            Ok(())
        } else {
            session.rehearse(&plan.key_prefix).await
        }
    })
    .await?;
    step("its clock", session.look_at_the_clock()).await?;
    Ok(Opened {
        session,
        wire,
        server: server.clone(),
    })
}

async fn log_in(plan: &Plan, server: &Server) -> Result<(Client, Wire, Peer), StoreError> {
    let config = &plan.address.config;
    match &server.place {
        Place::Unix(path) => {
            let stream = step("the socket", async { Ok(UnixStream::connect(path).await?) }).await?;
            // The socket's other end belongs to whoever listened: the parent of our server process, unless a pooler
            // stands between. /proc tells, when it can be read; a doubt counts as a pooler.
            let listener = stream.peer_cred()?.pid();
            let logged_in = async { Ok(config.connect_raw(stream, NoTls).await?) };
            let (client, connection) = step("logging in", logged_in).await?;
            let wire = tokio::spawn(async move { connection.await.err().map(StoreError::from) });
            Ok((client, wire, Peer::Unix(listener)))
        }
        Place::Tcp(address) => {
            let connected = async { Ok(TcpStream::connect(address).await?) };
            let stream = step("TCP", connected).await?;
            tune(&stream)?;
            let peer = Peer::Tcp(stream.local_addr()?.port());
            let (client, wire) = match &plan.address.tls {
                Some(tls) => {
                    let name = match &config.get_hosts()[server.at] {
                        Host::Tcp(name) => name.as_str(),
                        Host::Unix(_) => "",
                    };
                    let mut make = MakeRustlsConnect::new((**tls).clone());
                    let tls = MakeTlsConnect::<TcpStream>::make_tls_connect(&mut make, name)
                        .map_err(|_| {
                            StoreError::new(
                                Reason::Tls,
                                "the host in store.url is no name that TLS can verify",
                            )
                        })?;
                    let logged_in = async { Ok(config.connect_raw(stream, tls).await?) };
                    let (client, connection) = step("TLS and logging in", logged_in).await?;
                    (
                        client,
                        tokio::spawn(async move { connection.await.err().map(StoreError::from) }),
                    )
                }
                None => {
                    let logged_in = async { Ok(config.connect_raw(stream, NoTls).await?) };
                    let (client, connection) = step("logging in", logged_in).await?;
                    (
                        client,
                        tokio::spawn(async move { connection.await.err().map(StoreError::from) }),
                    )
                }
            };
            Ok((client, wire, peer))
        }
    }
}

/// Whether the session is ours alone, and whether the table's rows have places. Makes the table where that is wanted.
async fn look(client: &Client, plan: &Plan, peer: &Peer) -> Result<(bool, bool), StoreError> {
    let table = &plan.table;
    let (process, port, is_there, has_places) = tokio::try_join!(
        one::<i32>(client, "SELECT pg_backend_pid()"),
        one::<i32>(client, "SELECT inet_client_port()"),
        is_there(client, table),
        has_places(client, table),
    )?;
    let direct = match peer {
        Peer::Tcp(ours) => port == Some(i32::from(*ours)),
        Peer::Unix(listener) => listener.is_some() && process.and_then(parent) == *listener,
    };
    if is_there {
        return Ok((direct, has_places));
    }
    match plan.missing {
        Missing::IsMade => make_table(client, table).await?,
        Missing::MayBeMade => may_be_made(client, table).await?,
        Missing::IsLeft => {}
    }
    Ok((direct, self::has_places(client, table).await?))
}

/// Makes the settings of a session that is ours alone, runs a reservation on trial and prepares the statements, in one round
/// trip.
async fn prepare(
    session: &Session,
    reserve: &str,
    near: Option<&str>,
    key_prefix: &str,
) -> Result<(Prepared, Option<Prepared>), StoreError> {
    let client = &session.client;
    let near = async {
        match near {
            Some(text) => {
                let statement = client.prepare_typed(text, &RESERVE_NEAR_TYPES).await?;
                Ok::<_, StoreError>(Some(Prepared::Named(Box::new(statement))))
            }
            None => Ok(None),
        }
    };
    let settings = sql::session_settings();
    let (settings, reserve, near, rehearsed) = tokio::join!(
        client.batch_execute(&settings),
        client.prepare_typed(reserve, &RESERVE_TYPES),
        near,
        session.rehearse(key_prefix),
    );
    settings?;
    rehearsed?;
    Ok((Prepared::Named(Box::new(reserve?)), near?))
}

impl Session {
    /// Runs a reservation and takes it back. A table that does not fit, a missing privilege and a server that only
    /// reads show here and not at the first request, which besides finds the server's caches warm.
    ///
    /// All of it is sent at once, and the server does not wait for us in between. Should the link die halfway, the row that
    /// the open transaction holds is one that nobody else asks for, and the server ends it soon.
    async fn rehearse(&self, key_prefix: &str) -> Result<(), StoreError> {
        let ask = Ask {
            slots: 1,
            interval: 1,
            lead: 0,
            floor: None,
            horizon: SECOND,
            disbelieved: None,
            held: 0,
        };
        let key = sql::rehearsal_key(key_prefix, RandomState::new().hash_one(0_u8));
        let throttle = (key.as_str(), NO_ROW);
        let (begun, tried, undone) = tokio::join!(
            self.client.batch_execute(sql::BEGIN_REHEARSAL),
            self.reserve(&key, throttle, &ask),
            self.client.batch_execute("ROLLBACK"),
        );
        begun?;
        tried?;
        Ok(undone?)
    }

    async fn look_at_the_clock(&mut self) -> Result<(), StoreError> {
        let began = Instant::now();
        for n in 0..CLOCK_SAMPLES {
            if n > 0 && began.elapsed() > CLOCK_SPAN {
                break;
            }
            let sent = LocalTime::now();
            let rows = self.client.query_typed(sql::CLOCK, &[]).await?;
            let received = LocalTime::now();
            if let Some(row) = rows.first() {
                let now = store_time(row.try_get(0)?);
                self.clock.push((sent, received, now));
            }
        }
        Ok(())
    }
}

/// What a statement without parameters answers in its only column.
async fn one<T: FromSqlOwned>(client: &Client, text: &str) -> Result<Option<T>, StoreError> {
    let rows = client.query_typed(text, &[]).await?;
    Ok(match rows.first() {
        Some(row) => row.try_get(0)?,
        None => None,
    })
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

/// Makes our own table. Looking first has spared users that may not create tables the attempt, and two replicas that start
/// together may both find it missing: the loser's error is the winner's success.
async fn make_table(client: &Client, table: &Table) -> Result<(), StoreError> {
    for attempt in 0..3 {
        match client.batch_execute(&sql::create_table(table)).await {
            Ok(()) => return Ok(()),
            Err(e) => {
                may_be_made(client, table).await?;
                if attempt == 2 {
                    return Err(e.into());
                }
            }
        }
        if is_there(client, table).await? {
            return Ok(());
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

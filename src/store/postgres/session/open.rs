//! Which server: all that the URL may mean are tried, one a little after the other, and the first that passes is used.
//!
//! A host that is frozen or unreachable says nothing for seconds. So the next one is begun with before the one before it has
//! failed, and each address that a name resolves to is a server of its own (as in RFC 8305, section 5).

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{BuildHasher as _, RandomState},
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use tokio::{
    task::JoinSet,
    time::{Instant, sleep_until, timeout},
};
use tokio_postgres::config::{Host, LoadBalanceHosts};

use super::{Missing, Session, Wire, examine::connect};
use crate::store::postgres::{
    address::Address,
    error::{Reason, StoreError},
    sql::Table,
};

/// The next server is begun with so long after the one before it, unless that has failed by then.
const STAGGER: Duration = Duration::from_millis(500);
/// How long the whole of connecting to one server may take; each step of it has a deadline of its own.
const CONNECT_DEADLINE: Duration = Duration::from_secs(10);
/// How long a name may take to resolve.
const RESOLVE_DEADLINE: Duration = Duration::from_secs(3);
/// Addresses of one name that are tried at most.
const ADDRESSES: usize = 8;
/// Postgres's own.
const DEFAULT_PORT: u16 = 5432;

/// What a session is made by.
#[derive(Clone)]
pub struct Plan {
    /// Where Postgres is.
    pub address: Address,
    /// The table.
    pub table: Table,
    /// What our keys begin with.
    pub key_prefix: String,
    /// What is done about a table that is not there.
    pub missing: Missing,
}

/// One server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Which host of the URL it is.
    pub(super) at: usize,
    pub(super) place: Place,
    /// Host, address and port, as they may be shown.
    name: String,
}

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

/// A session that has passed.
#[derive(Debug)]
pub struct Opened {
    /// The session.
    pub session: Session,
    /// The task that moves its bytes.
    pub wire: Wire,
    /// Where it leads.
    pub server: Server,
}

/// When a server's turn to be tried comes: by its host's place in the URL, then by its place among the host's addresses.
type Rank = (usize, usize);

/// Connects to the first server that will do.
///
/// # Errors
/// Why the last of them would not do.
pub async fn open(plan: &Arc<Plan>) -> Result<Opened, StoreError> {
    open_resolved(plan, resolve).await
}

/// The same, with the servers that `resolve` finds for each host.
async fn open_resolved<F>(
    plan: &Arc<Plan>,
    resolve: impl Fn(Address, usize) -> F,
) -> Result<Opened, StoreError>
where
    F: Future<Output = Result<Vec<Server>, StoreError>> + Send + 'static,
{
    let hosts = order(&plan.address);
    let mut failures: BTreeMap<Rank, StoreError> = BTreeMap::new();
    let mut servers: BTreeMap<Rank, Server> = BTreeMap::new();
    let mut unresolved: BTreeSet<usize> = (0..hosts.len()).collect();
    let (mut lookups, mut attempts) = (JoinSet::new(), JoinSet::new());
    for (rank, at) in hosts.into_iter().enumerate() {
        let found = resolve(plan.address.clone(), at);
        lookups.spawn(async move { (rank, at, found.await) });
    }
    let mut next = Instant::now();
    let names_until = next + STAGGER;
    loop {
        let now = Instant::now();
        // A host whose name is still being resolved has its turn before those behind it, but not for longer than that.
        let due = servers.first_key_value().map(|(rank, _)| {
            let waits = unresolved.first().is_some_and(|before| *before < rank.0);
            if waits { next.max(names_until) } else { next }
        });
        if due.is_some_and(|at| at <= now)
            && let Some((rank, server)) = servers.pop_first()
        {
            let plan = plan.clone();
            attempts.spawn(async move { (rank, open_at(&plan, &server).await) });
            next = now + STAGGER;
            continue;
        }
        tokio::select! {
            Some(Ok((rank, at, found))) = lookups.join_next() => {
                unresolved.remove(&rank);
                match found {
                    Ok(found) => servers.extend(found.into_iter().enumerate().map(|(n, s)| ((rank, n), s))),
                    Err(e) => drop(failures.insert((rank, 0), e.at(&shown(&plan.address, at)))),
                }
            }
            Some(Ok((rank, outcome))) = attempts.join_next() => match outcome {
                Ok(opened) => return Ok(opened),
                Err(e) => {
                    failures.insert(rank, e);
                    next = Instant::now();
                }
            },
            () = sleep_until(due.unwrap_or(now)), if due.is_some() => {}
            else => break,
        }
    }
    let last = failures.pop_last().map(|(_, e)| e);
    Err(last.unwrap_or_else(|| StoreError::new(Reason::Connection, "store.url names no host")))
}

/// Connects to this server.
///
/// # Errors
/// Why it would not do.
pub async fn open_at(plan: &Plan, server: &Server) -> Result<Opened, StoreError> {
    match timeout(CONNECT_DEADLINE, connect(plan, server)).await {
        Ok(outcome) => outcome.map_err(|e| e.at(&server.name)),
        Err(_) => {
            let slow = StoreError::new(Reason::Timeout, "no reply while connecting");
            Err(slow.at(&server.name))
        }
    }
}

/// The hosts of the URL, in the order in which they are to be tried.
fn order(address: &Address) -> Vec<usize> {
    let mut hosts: Vec<usize> = (0..address.config.get_hosts().len()).collect();
    if address.config.get_load_balance_hosts() == LoadBalanceHosts::Random {
        let chance = RandomState::new();
        hosts.sort_by_key(|at| chance.hash_one(at));
    }
    hosts
}

fn port(address: &Address, at: usize) -> u16 {
    let ports = address.config.get_ports();
    let port = ports.get(at).or(ports.first());
    port.copied().unwrap_or(DEFAULT_PORT)
}

/// Host and port, as they may be shown.
fn shown(address: &Address, at: usize) -> String {
    let port = port(address, at);
    match &address.config.get_hosts()[at] {
        Host::Tcp(name) => format!("{name}:{port}"),
        Host::Unix(dir) => format!("{}:{port}", dir.display()),
    }
}

/// The servers that a host of the URL may be.
async fn resolve(address: Address, at: usize) -> Result<Vec<Server>, StoreError> {
    let (port, shown) = (port(&address, at), shown(&address, at));
    let server = |place, name| Server { at, place, name };
    let name = match &address.config.get_hosts()[at] {
        Host::Unix(dir) => {
            let place = Place::Unix(dir.join(format!(".s.PGSQL.{port}")));
            return Ok(vec![server(place, shown)]);
        }
        Host::Tcp(name) => name,
    };
    let given = address.config.get_hostaddrs().get(at).copied();
    if let Some(ip) = given.or_else(|| name.parse::<IpAddr>().ok()) {
        return Ok(vec![server(Place::Tcp((ip, port).into()), shown)]);
    }
    let found = match timeout(
        RESOLVE_DEADLINE,
        tokio::net::lookup_host((name.as_str(), port)),
    )
    .await
    {
        Ok(found) => found?,
        Err(_) => {
            return Err(StoreError::new(
                Reason::Timeout,
                "the name was not resolved in time",
            ));
        }
    };
    let mut addresses: Vec<SocketAddr> = Vec::new();
    for address in found.take(ADDRESSES) {
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    if addresses.is_empty() {
        return Err(StoreError::new(
            Reason::Connection,
            "the name has no address",
        ));
    }
    let several = addresses.len() > 1;
    let named = |a: SocketAddr| match several {
        true => format!("{shown} ({})", a.ip()),
        false => shown.clone(),
    };
    Ok(addresses
        .into_iter()
        .map(|a| server(Place::Tcp(a), named(a)))
        .collect())
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    fn plan(url: &str) -> Arc<Plan> {
        Arc::new(Plan {
            address: Address::parse(url).expect("a valid URL"),
            table: Table::new("paceline"),
            key_prefix: String::new(),
            missing: Missing::IsLeft,
        })
    }

    #[tokio::test]
    async fn each_address_of_a_name_is_tried_and_none_that_is_silent_hides_the_next() {
        let silent = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let closed = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let last = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let places = [&silent, &closed, &last].map(|l| l.local_addr().expect("an address"));
        drop(closed);
        let resolve = move |_, at| async move {
            let server = |a| Server {
                at,
                place: Place::Tcp(a),
                name: a.to_string(),
            };
            Ok(places.map(server).to_vec())
        };
        let plan = plan("postgres://u@several.test/db?sslmode=disable");
        tokio::select! {
            _ = open_resolved(&plan, resolve) => panic!("nobody has answered"),
            reached = timeout(STAGGER * 4, last.accept()) => {
                assert!(reached.is_ok(), "the last address was not tried in time");
            }
        }
        assert!(timeout(STAGGER, silent.accept()).await.is_ok());
    }

    #[tokio::test]
    async fn a_name_that_does_not_resolve_holds_the_next_host_up_only_for_a_while() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let place = listener.local_addr().expect("an address");
        let resolve = move |_, at| async move {
            if at == 0 {
                std::future::pending::<()>().await;
            }
            Ok(vec![Server {
                at,
                place: Place::Tcp(place),
                name: String::new(),
            }])
        };
        let plan = plan("postgres://u@hangs.test,there.test/db?sslmode=disable");
        tokio::select! {
            _ = open_resolved(&plan, resolve) => panic!("nobody has answered"),
            reached = timeout(STAGGER * 4, listener.accept()) => assert!(reached.is_ok()),
        }
    }
}

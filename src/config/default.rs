//! The value of each key that may be left out, with its unit and the reason for it.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use super::{ClientRange, Rate};

/// `proxy.listen`: the usual port of forward proxies, on loopback until the operator opens it.
pub const PROXY_LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 3128);

/// `admin.listen`: a listener of its own, so that it can't be reached by way of the proxy's.
pub const ADMIN_LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9128);

/// `proxy.allow_clients`: this machine and private networks, never the internet.
pub const ALLOW_CLIENTS: [ClientRange; 2] = [ClientRange::Loopback, ClientRange::Private];

/// `proxy.max_wait`: 25 s, below the 30 s after which many clients give up, and then often send again.
pub const MAX_WAIT: Duration = Duration::from_secs(25);

/// `proxy.max_connections`: 10,000 connections of workers per replica.
pub const MAX_CONNECTIONS: usize = 10_000;

/// `proxy.max_connections_per_client`: half of `max_connections`, and at least 512. A dozen workers of a hundred threads
/// behind one address are an ordinary client; but one that leaks connections must leave room for another.
pub const LEAST_SHARE: usize = 512;

/// `proxy.drain`: 35 s, so that a request which waited for `max_wait` still gets its answer.
pub const DRAIN: Duration = Duration::from_secs(35);

/// `proxy.refusal_status`: 503, which more clients try again later than 429.
pub const REFUSAL_STATUS: http::StatusCode = http::StatusCode::SERVICE_UNAVAILABLE;

/// `proxy.connect_ports`: HTTP and HTTPS; some clients send CONNECT for clear text too.
pub const CONNECT_PORTS: [u16; 2] = [80, 443];

/// `store.table`: a table of our own.
pub const TABLE: &str = "paceline";

/// `store.key_prefix`: keeps our rows apart from others in a shared table.
pub const KEY_PREFIX: &str = "paceline:";

/// `store.max_replicas`: 3 replicas, so that in an outage each sends a third of the ceiling.
pub const MAX_REPLICAS: u32 = 3;

/// `store.foreign_fetchers`: 0 programs other than replicas move the cursor.
pub const FOREIGN_FETCHERS: u32 = 0;

/// `store.lease_ttl`: 5 min without a heartbeat, longer than a reboot, before a replica's number may be taken over.
pub const LEASE_TTL: Duration = Duration::from_secs(5 * 60);

/// `ca.dir`: beside the working directory's other files.
pub const CA_DIR: &str = "certs";

/// `destination.throttle_status`: the statuses by which servers ask for less.
pub const THROTTLE_STATUS: [http::StatusCode; 2] = [
    http::StatusCode::TOO_MANY_REQUESTS,
    http::StatusCode::SERVICE_UNAVAILABLE,
];

/// `destination.lockout_after`: 3 different URLs within a minute; a single forbidden one is no lockout.
pub const LOCKOUT_AFTER: u32 = 3;

/// `destination.lockout_for`: 15 min, long enough for the other side to forget.
pub const LOCKOUT_FOR: Duration = Duration::from_secs(15 * 60);

/// `destination.recovery_after`: 100 consecutive clean responses halve the multiplier.
pub const RECOVERY_AFTER: u32 = 100;

/// `destination.retry_after_cap`: 10 min is the longest `Retry-After` that is believed.
pub const RETRY_AFTER_CAP: Duration = Duration::from_secs(10 * 60);

/// `destination.retry_throttled`: 0; to send a request again is the client's to decide.
pub const RETRY_THROTTLED: u32 = 0;

/// The destination in force without a file: its name, ...
pub const DESTINATION: &str = "google_image";

/// ... its host patterns, ...
pub const HOSTS: [&str; 3] = [
    "*.googleusercontent.com",
    "drive.google.com",
    "drive.usercontent.google.com",
];

/// ... and its ceiling: 7 requests per second over everything that runs.
pub const RATE: Rate = Rate { per_second: 7.0 };

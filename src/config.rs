//! What the operator wrote, as it is meant.
//!
//! The types here are the *meaning* of a configuration: every name folded, every number checked, every default
//! filled in. `config/parse.rs` turns TOML into them and reports all mistakes at once, each with its line;
//! nothing after this module looks at TOML or at the environment.

use std::{collections::BTreeMap, fmt, net::SocketAddr, path::PathBuf, time::Duration};

use crate::authority::{Authority, HostPattern};

pub mod default;
mod destination;
mod faults;
pub mod keys;
mod listing;
mod parse;
mod places;
mod rate;
mod source;
mod store;
mod summary;
#[cfg(test)]
mod tests;
mod value;

pub use destination::{KEY_LIMIT, THROTTLE_PREFIX};
pub use faults::{Complaint, Fault, Faults, Place};
pub use listing::{Difference, Line, Value};
pub use parse::{CONFIG_VARIABLE, Environment, Purpose};
pub use rate::{Rate, RateError};
pub use store::{STORE_URL_VARIABLE, store_url};
pub use summary::Summary;

/// No stop of a destination lasts longer: no lockout that can be configured, and no pause that can be ordered.
pub const LONGEST_STOP: Duration = Duration::from_secs(30 * 86_400);

/// A whole configuration. See `docs/configuration.md` for every key.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The file it came from; `None` when the defaults are in force.
    pub file: Option<PathBuf>,
    /// `[proxy]`
    pub proxy: Proxy,
    /// `[admin]`
    pub admin: Admin,
    /// `[store]`; `None` is the embedded store, for one replica. (Or the URL is missing, to whoever reads it only for
    /// a [look](Purpose::Look).)
    pub store: Option<Store>,
    /// `[ca]`
    pub ca: Ca,
    /// `[upstream]`
    pub upstream: Upstream,
    /// `[[destination]]`, in the order of the file; no host matches two of them.
    pub destinations: Vec<Destination>,
}

/// `[proxy]`: the listener that workers reach, and who may use it for what.
#[derive(Clone, Debug, PartialEq)]
pub struct Proxy {
    /// Where workers connect; port 0 lets the system choose.
    pub listen: SocketAddr,
    /// Peers whose connections must begin with a PROXY v1 or v2 header.
    pub proxy_protocol_from: Vec<ipnet::IpNet>,
    /// Who may connect; never empty.
    pub allow_clients: Vec<ClientRange>,
    /// Whether we name ourselves in `Via`.
    pub via: bool,
    /// Says that an open proxy (any client, no credentials, not on loopback) is meant.
    pub open: bool,
    /// The longest that a request may wait, over queue, connect and re-sends; up to an hour.
    pub max_wait: Duration,
    /// Connections of clients at one time.
    pub max_connections: usize,
    /// Of these, how many one client may have; `None`: see [`Proxy::share`].
    pub max_connections_per_client: Option<usize>,
    /// How long a stop may take before open requests are cut; up to an hour.
    pub drain: Duration,
    /// What happens to hosts that no destination governs.
    pub ungoverned: Ungoverned,
    /// 503 or 429: the answer when a wait would pass its deadline.
    pub refusal_status: http::StatusCode,
    /// The ports that may be reached; never empty, never 0.
    pub connect_ports: Vec<u16>,
    /// Addresses that may be reached by literal and although they are private.
    pub allow_upstreams: Vec<ipnet::IpNet>,
    /// `[proxy.auth]`; `None`: no credentials are asked for.
    pub auth: Option<Auth>,
}

impl Proxy {
    /// How many connections one client may have, and how many tunnels one user, where there is `room` for so many in all.
    pub fn share(&self, room: usize) -> usize {
        let default = room.div_ceil(2).max(default::LEAST_SHARE);
        let share = self.max_connections_per_client.unwrap_or(default);
        share.min(room)
    }
}

/// An entry of `allow_clients`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientRange {
    /// `"loopback"`: 127.0.0.0/8 and ::1
    Loopback,
    /// `"private"`: RFC 1918, RFC 4193 and link-local addresses
    Private,
    /// `"any"`
    Any,
    /// An address or CIDR range, without bits behind its prefix
    Net(ipnet::IpNet),
}

/// What happens to hosts that no destination governs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ungoverned {
    /// Tunnelled or forwarded without pacing
    Tunnel,
    /// Refused with 403
    Deny,
}

/// `[proxy.auth]`
#[derive(Clone, Debug, PartialEq)]
pub struct Auth {
    /// User name to hash of the password; never empty.
    pub users: BTreeMap<String, PasswordHash>,
}

/// A stored credential: never the password itself.
#[derive(Clone, PartialEq, Eq)]
pub enum PasswordHash {
    /// An argon2 hash in PHC string form, `$argon2id$v=19$...`; its syntax and its cost have been checked.
    Argon2(String),
    /// `sha256:` and 64 hexadecimal digits (or the digits alone)
    Sha256([u8; 32]),
}

/// `[admin]`: the listener for metrics, health and the operator's commands.
#[derive(Clone, Debug, PartialEq)]
pub struct Admin {
    /// Where it listens; never the proxy's own port.
    pub listen: SocketAddr,
    /// Needed for changes that do not come from loopback.
    pub token: Option<Secret>,
}

/// `[store]`: the Postgres that keeps the shared cursor.
#[derive(Clone, Debug, PartialEq)]
pub struct Store {
    /// `postgres://...`, complete with its password.
    pub url: Secret,
    /// `table` or `schema.table`, unquoted.
    pub table: String,
    /// Before each key of ours; 1 to 128 characters.
    pub key_prefix: String,
    /// How many replicas may run: the numbers that are leased.
    pub max_replicas: u32,
    /// This replica's name, under which it takes its lease back.
    pub replica: String,
    /// Programs that move the same cursor without being replicas.
    pub foreign_fetchers: u32,
    /// How long a silent replica keeps its number.
    pub lease_ttl: Duration,
}

/// `[ca]`
#[derive(Clone, Debug, PartialEq)]
pub struct Ca {
    /// The directory of root and issuer; relative to the working directory.
    pub dir: PathBuf,
}

/// `[upstream]`
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Upstream {
    /// A PEM file of roots that origins may have besides the usual ones.
    pub extra_roots: Option<PathBuf>,
    /// Where to connect instead, as `curl --connect-to`: the address may be a socket address or a name with a port.
    pub resolve: BTreeMap<Authority, Authority>,
}

/// `[[destination]]`: a set of host patterns that shares one ceiling.
#[derive(Clone, Debug, PartialEq)]
pub struct Destination {
    /// Its name, unique: 1 to 64 of `A-Z a-z 0-9 _ . -`. Part of keys and the label of metrics.
    pub name: String,
    /// The hosts that it governs; never empty.
    pub hosts: Vec<HostPattern>,
    /// The ceiling.
    pub rate: Rate,
    /// One cursor, or one for each host.
    pub scope: Scope,
    /// How HTTPS to it is paced.
    pub tls: TlsMode,
    /// What an opaque tunnel does with a client that offers HTTP/2.
    pub opaque_h2: OpaqueH2,
    /// Requests under way at one time, in this replica; `None`: no limit.
    pub max_in_flight: Option<usize>,
    /// Statuses that ask for a slower pace.
    pub throttle_status: Vec<http::StatusCode>,
    /// Statuses that count towards a lockout; none of them is in `throttle_status`.
    pub lockout_status: Vec<http::StatusCode>,
    /// So many of them, on different URLs within a minute, start a lockout.
    pub lockout_after: u32,
    /// How long a lockout lasts.
    pub lockout_for: Duration,
    /// So many clean responses in a row halve the multiplier.
    pub recovery_after: u32,
    /// The longest `Retry-After` that is believed.
    pub retry_after_cap: Duration,
    /// How often a throttled GET or HEAD is sent again, each time on a new slot.
    pub retry_throttled: u32,
    /// Forward at once, and only record what the wait would have been.
    pub dry_run: bool,
}

/// Whether a destination has one cursor, or one for each host that it matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// One cursor.
    Destination,
    /// One for each host.
    Host,
}

/// How HTTPS to a destination is paced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsMode {
    /// TLS is ended with our CA; each request is paced.
    Intercept,
    /// TLS is not read; record headers are watched.
    Opaque,
}

/// What an opaque tunnel does with a client that offers HTTP/2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpaqueH2 {
    /// The tunnel is refused.
    Deny,
    /// Every client record takes a slot.
    PerRecord,
}

/// Text that must not be shown: its `Debug` and `Display` are masked.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps a secret.
    pub fn new(text: impl Into<String>) -> Self {
        Secret(text.into())
    }

    /// The text itself; the caller must not print it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl fmt::Debug for PasswordHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// The name of this machine, with anything but letters, digits, dots and hyphens replaced by a hyphen.
pub fn host_name() -> String {
    let name = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    let plain = |c: char| match c {
        c if c.is_ascii_alphanumeric() || matches!(c, '.' | '-') => c,
        _ => '-',
    };
    match name.as_str() {
        "" => "localhost".to_owned(),
        name => name.chars().take(64).map(plain).collect(),
    }
}

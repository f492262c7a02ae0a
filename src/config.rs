//! What the operator wrote, as it is meant.
//!
//! The types here are the *meaning* of a configuration: every name folded, every number checked, every default
//! filled in. `config/parse.rs` turns TOML into them and reports all mistakes at once, each with its line;
//! nothing after this module looks at TOML or at the environment.

use std::{
    collections::BTreeMap,
    fmt,
    net::SocketAddr,
    path::PathBuf,
    time::Duration,
};

use crate::authority::{Authority, HostPattern};

/// A whole configuration. See `docs/configuration.md` for every key.
#[derive(Clone, Debug)]
pub struct Config {
    /// The file it came from; `None` when the defaults are in force.
    pub file: Option<PathBuf>,
    /// `[proxy]`
    pub proxy: Proxy,
    /// `[admin]`
    pub admin: Admin,
    /// `[store]`; `None` is the embedded store, for one replica.
    pub store: Option<Store>,
    /// `[ca]`
    pub ca: Ca,
    /// `[upstream]`
    pub upstream: Upstream,
    /// `[[destination]]`, in the order of the file; the first whose pattern matches governs a host.
    pub destinations: Vec<Destination>,
}

/// `[proxy]`: the listener that workers reach, and who may use it for what.
#[derive(Clone, Debug)]
pub struct Proxy {
    pub listen: SocketAddr,
    pub proxy_protocol_from: Vec<ipnet::IpNet>,
    pub allow_clients: Vec<ClientRange>,
    pub max_wait: Duration,
    pub max_connections: usize,
    pub drain: Duration,
    pub ungoverned: Ungoverned,
    pub refusal_status: http::StatusCode,
    pub connect_ports: Vec<u16>,
    pub allow_upstreams: Vec<ipnet::IpNet>,
    pub auth: Option<Auth>,
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
    /// An address or CIDR range
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
#[derive(Clone, Debug)]
pub struct Auth {
    /// User name to hash of the password.
    pub users: BTreeMap<String, PasswordHash>,
}

/// A stored credential: never the password itself.
#[derive(Clone, PartialEq, Eq)]
pub enum PasswordHash {
    /// An argon2 hash in PHC string form, `$argon2id$v=19$...`
    Argon2(String),
    /// `sha256:` and 64 hexadecimal digits (or the digits alone)
    Sha256([u8; 32]),
}

/// `[admin]`: the listener for metrics, health and the operator's commands.
#[derive(Clone, Debug)]
pub struct Admin {
    pub listen: SocketAddr,
    /// Needed for changes that do not come from loopback.
    pub token: Option<Secret>,
}

/// `[store]`: the Postgres that keeps the shared cursor.
#[derive(Clone, Debug)]
pub struct Store {
    /// `postgres://...`, complete with its password.
    pub url: Secret,
    /// `table` or `schema.table`, unquoted.
    pub table: String,
    pub key_prefix: String,
    pub max_replicas: u32,
    pub replica: String,
    pub foreign_fetchers: u32,
    pub lease_ttl: Duration,
}

/// `[ca]`
#[derive(Clone, Debug)]
pub struct Ca {
    pub dir: PathBuf,
}

/// `[upstream]`
#[derive(Clone, Debug, Default)]
pub struct Upstream {
    pub extra_roots: Option<PathBuf>,
    /// Where to connect instead, as `curl --connect-to`: the address may be a socket address or a name with a port.
    pub resolve: BTreeMap<Authority, Authority>,
}

/// `[[destination]]`: a set of host patterns that shares one ceiling.
#[derive(Clone, Debug)]
pub struct Destination {
    pub name: String,
    pub hosts: Vec<HostPattern>,
    pub rate: Rate,
    pub scope: Scope,
    pub tls: TlsMode,
    pub opaque_h2: OpaqueH2,
    pub max_in_flight: Option<usize>,
    pub throttle_status: Vec<http::StatusCode>,
    pub lockout_status: Vec<http::StatusCode>,
    pub lockout_after: u32,
    pub lockout_for: Duration,
    pub recovery_after: u32,
    pub retry_after_cap: Duration,
    pub retry_throttled: u32,
    pub dry_run: bool,
}

/// A ceiling: requests in all per span of time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Requests per second.
    pub per_second: f64,
}

/// Whether a destination has one cursor, or one for each host that it matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    Destination,
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

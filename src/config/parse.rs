//! From the file and the environment to a `Config`, with every mistake reported at once.
//!
//! Each group is read by one function; what concerns several groups is checked last. The environment is a function
//! passed in, so that a test needs no process of its own.

use std::{
    collections::BTreeMap,
    fs,
    io::ErrorKind,
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    path::{Path, PathBuf},
    time::Duration,
};

use ipnet::IpNet;
use toml::de::{DeTable, DeValue};

use super::{
    Admin, Auth, Ca, ClientRange, Config, Proxy, Secret, Ungoverned, Upstream, default,
    destination,
    faults::{Complaint, Fault, Faults, Place, shown},
    source::{Section, Source},
    store, value,
};
use crate::authority::Authority;

/// Names the configuration file where `--config` doesn't.
pub const CONFIG_VARIABLE: &str = "PACELINE_CONFIG";

/// The environment: the value of a variable, if it is set.
pub type Environment<'e> = &'e dyn Fn(&str) -> Option<String>;

/// What a configuration is read for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To serve, or to check what would be served: all of it is needed.
    Serve,
    /// To look at the rest of it, as workers and operators do, who are seldom given the store's URL: `[store]` may
    /// be without, and is then read as no store.
    Look,
}

const MAX_WAIT: RangeInclusive<Duration> = Duration::ZERO..=Duration::from_secs(3600);
const DRAIN: RangeInclusive<Duration> = Duration::ZERO..=Duration::from_secs(3600);

const MAX_CONNECTIONS: RangeInclusive<usize> = 1..=1_000_000;

impl Config {
    /// Reads the configuration, to serve by it: [`Config::load_for`] with [`Purpose::Serve`].
    ///
    /// # Errors
    /// All mistakes, in the order of the file.
    pub fn load(file: Option<&Path>, env: Environment<'_>) -> Result<Config, Faults> {
        Config::load_for(Purpose::Serve, file, env)
    }

    /// The defaults, with nothing read.
    pub fn built_in() -> Config {
        let source = Source::new("", String::new());
        assemble(Purpose::Look, &source, &DeTable::new(), None, &|_| None)
    }

    /// Reads the configuration: from the given file, or from the one that `PACELINE_CONFIG` names, or else the
    /// defaults. No file of any name is picked up from the working directory.
    ///
    /// # Errors
    /// All mistakes, in the order of the file.
    pub fn load_for(
        purpose: Purpose,
        file: Option<&Path>,
        env: Environment<'_>,
    ) -> Result<Config, Faults> {
        let named = || variable(env, CONFIG_VARIABLE).map(PathBuf::from);
        let Some(file) = file.map(Path::to_owned).or_else(named) else {
            let source = Source::new("", String::new());
            let config = assemble(purpose, &source, &DeTable::new(), None, env);
            return finish(source, Some(config));
        };
        let unreadable = |wrong: String, fix: &str| {
            Faults::new(vec![Fault {
                place: Place::File(file.display().to_string()),
                key: String::new(),
                complaint: Complaint::new(wrong, fix),
            }])
        };
        let bytes = fs::read(&file).map_err(|error| {
            let (wrong, fix) = match error.kind() {
                ErrorKind::NotFound => (
                    "is not there".to_owned(),
                    "put it there, or name another file with --config",
                ),
                _ => (
                    format!("can't be read ({error})"),
                    "name another file with --config, or make this one readable",
                ),
            };
            unreadable(wrong, fix)
        })?;
        let text = String::from_utf8(bytes)
            .map_err(|_| unreadable("isn't UTF-8".to_owned(), "save the file as UTF-8"))?;
        Config::parse_for(purpose, &text, &file, env)
    }

    /// Reads a configuration from the text of a file, to serve by it.
    ///
    /// # Errors
    /// All mistakes, in the order of the file.
    pub fn parse(text: &str, file: &Path, env: Environment<'_>) -> Result<Config, Faults> {
        Config::parse_for(Purpose::Serve, text, file, env)
    }

    fn parse_for(
        purpose: Purpose,
        text: &str,
        file: &Path,
        env: Environment<'_>,
    ) -> Result<Config, Faults> {
        let source = Source::new(text, file.display().to_string());
        let config = source
            .parse(text)
            .map(|table| assemble(purpose, &source, &table, Some(file), env));
        finish(source, config)
    }
}

fn finish(source: Source, config: Option<Config>) -> Result<Config, Faults> {
    let faults = source.into_faults();
    match config {
        Some(config) if faults.is_empty() => Ok(config),
        _ => Err(Faults::new(faults)),
    }
}

/// Compose files and unit files pass `VARIABLE=` for "not set".
pub(super) fn variable(env: Environment<'_>, name: &str) -> Option<String> {
    env(name).filter(|value| !value.is_empty())
}

/// Reads every group, whatever is wrong with the others; what was read counts only if no fault was noted.
fn assemble(
    purpose: Purpose,
    source: &Source,
    table: &DeTable<'_>,
    file: Option<&Path>,
    env: Environment<'_>,
) -> Config {
    let top = Section::new(source, "", table, source.whole());
    let proxy = read_proxy(&top);
    let admin = read_admin(&top, &proxy);
    let store = store::read(&top, &proxy, purpose, env);
    let ca = read_ca(&top);
    let upstream = read_upstream(&top);
    let destinations = match file {
        Some(_) => destination::read_all(&top, store.as_ref()),
        None => vec![destination::built_in()],
    };
    Config {
        file: file.map(Path::to_owned),
        proxy,
        admin,
        store,
        ca,
        upstream,
        destinations,
    }
}

fn read_proxy(top: &Section<'_, '_>) -> Proxy {
    let (proxy, _) = top.section("proxy");
    let nets = |key| values(proxy.list(key, value::net)).unwrap_or_default();
    let allow = proxy.nonempty_list(
        "allow_clients",
        "list who may connect, or remove the key",
        value::clients,
    );
    let parsed = Proxy {
        listen: proxy
            .read("listen", listen)
            .unwrap_or(default::PROXY_LISTEN),
        proxy_protocol_from: nets("proxy_protocol_from"),
        allow_clients: allow
            .as_ref()
            .map(|list| list.iter().map(|(_, range)| *range).collect())
            .unwrap_or(default::ALLOW_CLIENTS.to_vec()),
        open: proxy.read("open", value::boolean).unwrap_or(false),
        via: proxy.read("via", value::boolean).unwrap_or(true),
        max_wait: proxy
            .read("max_wait", |v| value::duration(v, MAX_WAIT))
            .unwrap_or(default::MAX_WAIT),
        max_connections: proxy
            .read("max_connections", |v| value::whole(v, MAX_CONNECTIONS))
            .unwrap_or(default::MAX_CONNECTIONS),
        max_connections_per_client: proxy.read("max_connections_per_client", |v| {
            value::whole(v, MAX_CONNECTIONS)
        }),
        drain: proxy
            .read("drain", |v| value::duration(v, DRAIN))
            .unwrap_or(default::DRAIN),
        ungoverned: proxy
            .read("ungoverned", |v| {
                value::word(
                    v,
                    &[("tunnel", Ungoverned::Tunnel), ("deny", Ungoverned::Deny)],
                )
            })
            .unwrap_or(Ungoverned::Tunnel),
        refusal_status: proxy
            .read("refusal_status", refusal_status)
            .unwrap_or(default::REFUSAL_STATUS),
        connect_ports: values(proxy.nonempty_list(
            "connect_ports",
            "list the ports that may be reached, or remove the key",
            |v| value::whole(v, 1..=u16::MAX),
        ))
        .unwrap_or(default::CONNECT_PORTS.to_vec()),
        allow_upstreams: nets("allow_upstreams"),
        auth: read_auth(&proxy),
    };
    let anybody = allow.iter().flatten().find(|(_, range)| range.is_anybody());
    if let Some((place, _)) = anybody
        && parsed.is_left_open()
    {
        let complaint = Complaint::new(
            "lets anybody who can reach the listener use this proxy",
            "name the clients' networks, set [proxy.auth], or say that it is meant with open = true",
        );
        proxy.fault(place.clone(), "allow_clients", complaint);
    }
    parsed
}

impl Proxy {
    /// Whether anybody who can reach the listener may use this proxy, without the operator having said that it is meant.
    pub fn is_left_open(&self) -> bool {
        self.allow_clients.iter().any(ClientRange::is_anybody)
            && !self.listen.ip().to_canonical().is_loopback()
            && self.auth.is_none()
            && !self.open
    }
}

impl ClientRange {
    /// Whether a range is wider than any one network has on the internet: halves of it, listed together, are all of it.
    fn is_anybody(&self) -> bool {
        let ClientRange::Net(net) = self else {
            return *self == ClientRange::Any;
        };
        // The widest that were given out are /8, and /12 of IPv6. fc00::/7 and fe80::/10 are in no network but one's own.
        match net {
            IpNet::V4(net) => net.prefix_len() < 8,
            IpNet::V6(net) => {
                let own = net.addr().is_unique_local() && net.prefix_len() >= 7
                    || net.addr().is_unicast_link_local() && net.prefix_len() >= 10;
                net.prefix_len() < 12 && !own
            }
        }
    }
}

/// `None` where there is no `[proxy.auth]`.
fn read_auth(proxy: &Section<'_, '_>) -> Option<Auth> {
    const ADVICE: &str = "write users = { name = \"hash\" }, or remove [proxy.auth]";
    let (auth, present) = proxy.section("proxy.auth");
    if !present {
        return None;
    }
    let mut users = BTreeMap::new();
    let entries = auth.entries("users");
    let none = auth.find("users").is_none() || entries.as_ref().is_some_and(Vec::is_empty);
    if none {
        let complaint = Complaint::new("has no user, so that nobody could use the proxy", ADVICE);
        auth.fault(auth.place_of("users"), "users", complaint);
    }
    for (place, name, hash) in entries.into_iter().flatten() {
        // RFC 7617 section 2: the first colon ends the name.
        let bad_name = name.is_empty()
            || name.len() > 128
            || name.contains(':')
            || name.chars().any(char::is_control);
        if bad_name {
            let wrong = format!("{} can't be a user name", shown(name));
            let complaint = Complaint::new(
                wrong,
                "write 1 to 128 bytes without colon or control characters",
            );
            auth.fault(place.clone(), "users", complaint);
        }
        match value::password_hash(hash) {
            Ok(hash) => _ = users.insert(name.to_owned(), hash),
            Err(complaint) => {
                let wrong = format!("the value of {} {}", shown(name), complaint.wrong);
                auth.fault(place, "users", Complaint::new(wrong, complaint.fix));
            }
        }
    }
    Some(Auth { users })
}

fn read_admin(top: &Section<'_, '_>, proxy: &Proxy) -> Admin {
    let (admin, _) = top.section("admin");
    let parsed = Admin {
        listen: admin
            .read("listen", listen)
            .unwrap_or(default::ADMIN_LISTEN),
        token: admin.read("token", token),
    };
    if clash(&proxy.listen, &parsed.listen) {
        let complaint = Complaint::new(
            format!(
                "{} and proxy.listen {} can't both be bound",
                parsed.listen, proxy.listen
            ),
            "give one of them another port",
        );
        admin.fault(admin.place_of("listen"), "listen", complaint);
    }
    parsed
}

fn read_ca(top: &Section<'_, '_>) -> Ca {
    let (ca, _) = top.section("ca");
    Ca {
        dir: ca
            .read("dir", path)
            .unwrap_or_else(|| default::CA_DIR.into()),
    }
}

fn read_upstream(top: &Section<'_, '_>) -> Upstream {
    let (upstream, _) = top.section("upstream");
    let mut resolve = BTreeMap::new();
    for (place, from, to) in upstream.entries("resolve").into_iter().flatten() {
        let note = |part: &str, complaint: Complaint| {
            let wrong = format!("{part} of {}: {}", shown(from), complaint.wrong);
            upstream.fault(
                place.clone(),
                "resolve",
                Complaint::new(wrong, complaint.fix),
            );
        };
        let authority =
            |text| Authority::parse(text, None).map_err(|e| Complaint::from_message(&e));
        let key = authority(from).map_err(|c| note("the name", c)).ok();
        let target = value::text(to)
            .and_then(authority)
            .map_err(|c| note("the target", c))
            .ok();
        if let (Some(key), Some(target)) = (key, target)
            && resolve.insert(key, target).is_some()
        {
            note(
                "the name",
                Complaint::new("is there twice", "remove one of the two"),
            );
        }
    }
    Upstream {
        extra_roots: upstream.read("extra_roots", path),
        resolve,
    }
}

/// The values alone, where their places don't matter.
pub(super) fn values<T>(list: Option<Vec<(Place, T)>>) -> Option<Vec<T>> {
    list.map(|list| list.into_iter().map(|(_, value)| value).collect())
}

fn path(value: &DeValue<'_>) -> Result<PathBuf, Complaint> {
    value::printable(value).map(PathBuf::from)
}

fn listen(value: &DeValue<'_>) -> Result<SocketAddr, Complaint> {
    value::parsed(
        value,
        "address to listen on",
        "write an IP address and a port, such as \"127.0.0.1:3128\" or \"[::]:3128\"",
    )
}

fn refusal_status(value: &DeValue<'_>) -> Result<http::StatusCode, Complaint> {
    let status = value::status(value).ok();
    if let Some(status) = status.filter(|status| matches!(status.as_u16(), 429 | 503)) {
        return Ok(status);
    }
    Err(Complaint::new(
        "is no status that tells clients to come back later",
        "write 503 or 429",
    ))
}

fn token(value: &DeValue<'_>) -> Result<Secret, Complaint> {
    let text = value::printable(value)?;
    if text.bytes().all(|b| b.is_ascii_graphic()) {
        return Ok(Secret::new(text));
    }
    Err(Complaint::new(
        "has characters that no header field can carry",
        "use ASCII without spaces",
    ))
}

/// Whether two listeners need the same port of the same address.
fn clash(a: &SocketAddr, b: &SocketAddr) -> bool {
    let wild = |address: &IpAddr| address.is_unspecified();
    a.port() != 0 && a.port() == b.port() && (a.ip() == b.ip() || wild(&a.ip()) || wild(&b.ip()))
}

//! A configuration in a few lines for people: logged once at start, printed by `check`.
//!
//! Holds no secret: of the store only its kind and table, of credentials only whether there are any.

use std::fmt;

use super::{ClientRange, Config, Destination, OpaqueH2, Scope, TlsMode, Ungoverned};

/// The keys of a destination that are told by their names; those that matter only with `lockout_status` beside them.
const TOLD: [&str; 6] = [
    "max_in_flight",
    "throttle_status",
    "recovery_after",
    "retry_after_cap",
    "retry_throttled",
    "lockout_status",
];

/// Prints a configuration as it is in force. Made by [`Config::summary`].
pub struct Summary<'c>(&'c Config);

impl Config {
    /// The configuration in force, one line for each listener, store, CA and destination, without secrets.
    pub fn summary(&self) -> Summary<'_> {
        Summary(self)
    }
}

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Config {
            file,
            proxy,
            admin,
            store,
            ca,
            upstream,
            destinations,
        } = self.0;
        match file {
            Some(file) => writeln!(f, "configuration: {}", file.display())?,
            None => writeln!(f, "configuration: built-in defaults (no file)")?,
        }
        let clients: Vec<_> = proxy
            .allow_clients
            .iter()
            .map(ClientRange::to_string)
            .collect();
        let credentials = match &proxy.auth {
            Some(auth) => format!("credentials of {} user(s)", auth.users.len()),
            None => "no credentials".to_owned(),
        };
        let ungoverned = match proxy.ungoverned {
            Ungoverned::Tunnel => "tunnelled unpaced",
            Ungoverned::Deny => "refused",
        };
        writeln!(
            f,
            "proxy: {}, clients {}, {credentials}, waits up to {}, other hosts {ungoverned}",
            proxy.listen,
            clients.join(" "),
            humantime::format_duration(proxy.max_wait),
        )?;
        let changes = match admin.token {
            Some(_) => "changes with the token",
            None => "changes only from loopback",
        };
        writeln!(f, "admin: {}, {changes}", admin.listen)?;
        match store {
            None => writeln!(f, "store: embedded, for one replica")?,
            Some(store) => {
                write!(
                    f,
                    "store: Postgres, table {}, keys {}*, replica {} of at most {}",
                    store.table, store.key_prefix, store.replica, store.max_replicas
                )?;
                match store.foreign_fetchers {
                    0 => writeln!(f)?,
                    n => writeln!(f, " and {n} foreign fetcher(s)")?,
                }
            }
        }
        writeln!(f, "ca: {}", ca.dir.display())?;
        for (from, to) in &upstream.resolve {
            writeln!(f, "upstream: {from} is reached at {to}")?;
        }
        for (i, destination) in destinations.iter().enumerate() {
            if i > 0 {
                writeln!(f)?;
            }
            destination.fmt(f)?;
        }
        Ok(())
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hosts: Vec<_> = self.hosts.iter().map(ToString::to_string).collect();
        let scope = match self.scope {
            Scope::Destination => "in all",
            Scope::Host => "for each host",
        };
        let tls = match (self.tls, self.opaque_h2) {
            (TlsMode::Intercept, _) => "intercept",
            (TlsMode::Opaque, OpaqueH2::Deny) => "opaque",
            (TlsMode::Opaque, OpaqueH2::PerRecord) => "opaque with h2 per record",
        };
        write!(
            f,
            "destination {}: {} {scope}, tls {tls}, hosts {}",
            self.name,
            self.rate,
            hosts.join(" ")
        )?;
        let is_told = |key: &str| match key {
            "lockout_after" | "lockout_for" => !self.lockout_status.is_empty(),
            key => TOLD.contains(&key),
        };
        for (key, value) in self.listing() {
            if is_told(key) {
                write!(f, ", {key} {value}")?;
            }
        }
        match self.dry_run {
            true => f.write_str(", dry run: nothing is held back"),
            false => Ok(()),
        }
    }
}

impl fmt::Display for ClientRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ClientRange::Loopback => f.write_str("loopback"),
            ClientRange::Private => f.write_str("private"),
            ClientRange::Any => f.write_str("any"),
            ClientRange::Net(net) => net.fmt(f),
        }
    }
}

//! What is wrong with a configuration that can be read, as far as only the parts themselves find out; each with its line.
//!
//! `check` tells it, a start ends with it, a reload is refused for it. Nothing here is logged or printed.

use crate::{
    authority::HostPattern,
    ca::{self, Constraints, Issuer},
    config::{Complaint, Config, Environment, Fault, TlsMode},
    membership::lease,
    store::postgres,
    upstream,
};

/// What keeps a replica from serving by this configuration: all of it at once.
pub fn faults(config: &Config, env: Environment<'_>) -> Vec<Fault> {
    let mut faults = Vec::from_iter(opaque(config));
    if let Err(complaint) = upstream::check_roots(&config.upstream) {
        faults.push(config.fault("upstream", "extra_roots", complaint));
    }
    if let Some(Err(complaint)) = config.store.as_ref().map(postgres::check_url) {
        faults.push(config.fault_of_url(env, complaint));
    }
    faults.extend(unheard_of(config));
    faults
}

/// More destinations than one row of the store can tell the other replicas of.
fn unheard_of(config: &Config) -> Option<Fault> {
    config.store.as_ref()?;
    let bytes = lease::too_many(&super::ceilings(&config.destinations))?;
    let complaint = Complaint::new(
        format!(
            "the names and rates of {} take {bytes} bytes in the row that tells the other replicas of them, which has room for {}",
            config.destinations.len(),
            lease::CEILINGS_BYTES
        ),
        "name fewer destinations, or shorten their names; others can run as replicas of their own, with another store.key_prefix",
    );
    Some(config.fault("destination", "name", complaint))
}

/// A destination whose tunnels cannot be paced without reading them, which this version cannot do.
pub fn opaque(config: &Config) -> Option<Fault> {
    let mut all = config.destinations.iter();
    let found = all.find(|d| d.tls == TlsMode::Opaque)?;
    let complaint = Complaint::new(
        "\"opaque\" is not available in this version",
        "use \"intercept\"",
    );
    Some(config.fault_of(&found.name, "tls", complaint))
}

/// The destinations whose hosts the issuer may not sign for; and, where it may, why clients would refuse what it signs.
pub fn uncovered(config: &Config, issuer: &Issuer) -> Vec<Fault> {
    let mut faults = Vec::new();
    let intercepted = || {
        config
            .destinations
            .iter()
            .filter(|d| d.tls == TlsMode::Intercept)
    };
    let mut hosts = intercepted()
        .flat_map(|d| &d.hosts)
        .map(HostPattern::as_constraint_base);
    if let Some(host) = hosts.find(|host| issuer.covers(host))
        && let Err(e) = issuer.prove(host)
    {
        faults.push(config.fault("ca", "dir", Complaint::from_message(&e)));
    }
    for d in &config.destinations {
        if d.tls == TlsMode::Intercept && !issuer.covers_all(&Constraints::permitting(&d.hosts)) {
            let complaint = Complaint::new(
                format!(
                    "those of {} are not covered by the CA's name constraints",
                    d.name
                ),
                "run `paceline ca init`, which leaves the root as it is, and then send running replicas a SIGHUP or restart them",
            );
            faults.push(config.fault_of(&d.name, "hosts", complaint));
        }
    }
    faults
}

/// What is wrong with the CA's files, where there are any; a start makes those that are missing.
pub fn of_ca(config: &Config) -> Vec<Fault> {
    let files = ca::Files::new(&config.ca.dir);
    if !(files.has(ca::ISSUER_CERTIFICATE) || files.has(ca::ISSUER_KEY)) {
        return Vec::new();
    }
    match Issuer::load(&config.ca.dir) {
        Ok(issuer) => uncovered(config, &issuer),
        Err(e) => vec![config.fault("ca", "dir", Complaint::from_message(&e))],
    }
}

/// What may be meant, and should be known all the same.
pub fn warnings(config: &Config) -> Vec<Fault> {
    let open = open_to_many(config).map(|c| config.fault("admin", "listen", c));
    let hasty = hasty_drain(config).map(|c| config.fault("proxy", "drain", c));
    open.into_iter().chain(hasty).collect()
}

/// What is open to more than this machine.
fn open_to_many(config: &Config) -> Option<Complaint> {
    let listen = config.admin.listen;
    (!listen.ip().to_canonical().is_loopback() && config.admin.token.is_none()).then(|| {
        Complaint::new(
            format!("whoever reaches {listen} can read metrics and status (changes are taken from loopback only)"),
            "keep it inside a network that you trust",
        )
    })
}

/// Where a stop may cut off requests that wait as long as they may.
fn hasty_drain(config: &Config) -> Option<Complaint> {
    let (drain, max_wait) = (config.proxy.drain, config.proxy.max_wait);
    (drain < max_wait).then(|| {
        Complaint::new(
            format!(
                "{} is shorter than proxy.max_wait {}: at a stop, what waits longer is refused",
                humantime::format_duration(drain),
                humantime::format_duration(max_wait)
            ),
            "raise drain, or lower max_wait",
        )
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::config;

    #[test]
    fn a_drain_shorter_than_the_longest_wait_is_told() {
        let mut config = Config::built_in();
        assert_eq!(warnings(&config), []);
        config.proxy.drain = config.proxy.max_wait - Duration::from_secs(1);
        let [fault] = &warnings(&config)[..] else {
            panic!("one warning");
        };
        let line = fault.to_string();
        assert!(
            line.contains("proxy.drain: 24s") && line.contains("max_wait 25s"),
            "{line}"
        );
    }

    #[test]
    fn more_destinations_than_a_row_can_tell_of_are_refused_where_there_is_a_store() {
        let mut config = Config::built_in();
        let one = config.destinations[0].clone();
        let named = |n: usize| config::Destination {
            name: format!("{n:064}"),
            ..one.clone()
        };
        config.destinations = (0..3_000).map(named).collect();
        assert_eq!(faults(&config, &|_| None), []);
        let text = "[store]\nurl = \"postgres://h/d\"\n\
                    [[destination]]\nname = \"a\"\nhosts = [\"a.test\"]\nrate = 1\n";
        let other = Config::parse(text, std::path::Path::new("a.toml"), &|_| None);
        config.store = other.expect("a configuration").store;
        let found = faults(&config, &|_| None);
        let [fault] = &found[..] else {
            panic!("one fault, not {found:?}");
        };
        let line = fault.to_string();
        assert!(
            line.contains("3000 take") && line.contains("room for 131072"),
            "{line}"
        );
        // 750 of them fit, however long their names.
        config.destinations.truncate(750);
        assert_eq!(faults(&config, &|_| None), []);
    }

    #[test]
    fn every_fault_is_found_at_once_and_has_its_key() {
        let mut config = Config::built_in();
        assert_eq!(faults(&config, &|_| None), []);
        config.destinations[0].tls = TlsMode::Opaque;
        config.upstream.extra_roots = Some("/nowhere.pem".into());
        let url = "[store]\nurl = \"postgres://h/d?sslmode=bogus\"\n\
                   [[destination]]\nname = \"a\"\nhosts = [\"a.test\"]\nrate = 1\n";
        let other = Config::parse(url, std::path::Path::new("a.toml"), &|_| None);
        config.store = other.expect("read, but not understood").store;
        let found = faults(&config, &|_| None);
        let keys: Vec<_> = found.iter().map(|f| f.key.as_str()).collect();
        assert_eq!(
            keys,
            ["destination.tls", "upstream.extra_roots", "store.url"]
        );
    }
}

//! SIGHUP: the configuration is read again, and what can change in a running replica changes.
//!
//! All of it is read, checked and made first; only then are the rules replaced, which cannot fail. So a bad file changes
//! nothing. What listens, what the store is, and what others know this replica by stay as they were at the start.

use std::{sync::Arc, time::SystemTime};

use super::{ceilings, expiry, faults, since_epoch};
use crate::{
    ca::{Issuer, Leaves},
    config::{self, Config, Line},
    drain::Hangups,
    policy::Reach,
    proxy::{Proxy, auth::Credentials},
    rules::Rules,
    service,
    store::Store,
    upstream::dial::Dialer,
};

/// What a reload works on.
#[derive(Debug)]
pub struct Reload {
    /// The proxy at work.
    pub proxy: Arc<Proxy>,
    /// Where its cursors are.
    pub store: Store,
    /// Which addresses may be dialled.
    pub reach: Reach,
    /// The environment.
    pub env: fn(&str) -> Option<String>,
    /// What the service manager shows.
    pub serving_at: String,
}

/// Everything that may fail, done.
struct Ready {
    config: Config,
    /// Keys that differ from what is in force and cannot follow, with what they would become.
    at_start: Vec<String>,
    dialer: Dialer,
    /// `None` where the CA's files hold the issuer in use.
    leaves: Option<Arc<Leaves>>,
}

impl Reload {
    /// Reloads at each SIGHUP, for ever.
    pub async fn run(self, mut hangups: Hangups) {
        let reload = Arc::new(self);
        loop {
            hangups.next().await;
            service::reloading();
            let this = reload.clone();
            // Files are read, and certificates made: not for a thread that serves.
            let made = tokio::task::spawn_blocking(move || this.prepare()).await;
            match made.unwrap_or_else(|_| Err(vec!["reading it broke off".to_owned()])) {
                Ok(ready) => reload.apply(ready),
                Err(faults) => reload.refuse(&faults),
            }
            service::ready(&reload.serving_at);
        }
    }

    /// Reads and checks as at the start.
    fn prepare(&self) -> Result<Ready, Vec<String>> {
        let rules = self.proxy.in_force.now();
        let file = rules.config.file.as_deref();
        let read = Config::load(file, &self.env)
            .map_err(|faults| faults.iter().map(ToString::to_string).collect::<Vec<_>>())?;
        let differ = rules.config.differences(&read);
        let (config, kept) = adopt(&rules.config, read);
        let told = |key: &&'static str| {
            let what = differ.iter().find(|d| d.key == **key);
            format!("{key} {}", what.map_or("changed", |d| &d.what))
        };
        let at_start = kept.iter().map(told).collect();
        let faults = faults::faults(&config, &self.env);
        let mut faults: Vec<_> = faults.iter().map(ToString::to_string).collect();
        if config.proxy.is_left_open() {
            // The file's own check saw the listener of the file, not the one that is bound.
            faults.push(format!(
                "proxy.allow_clients lets anybody use the listener at {}, which changes only at the next start; set \
                 [proxy.auth] or name the clients' networks, or restart",
                config.proxy.listen
            ));
        }
        let reach = self.reach.listing(&config.proxy.allow_upstreams);
        let dialer = Dialer::new(&config.upstream, reach);
        let leaves = new_leaves(&config, &rules.leaves);
        match (dialer, leaves, faults.is_empty()) {
            (Ok(dialer), Ok(leaves), true) => Ok(Ready {
                config,
                at_start,
                dialer,
                leaves,
            }),
            (dialer, leaves, _) => {
                // Where that is the file of roots, it has been told with its line.
                if faults.is_empty() {
                    faults.extend(dialer.err());
                }
                faults.extend(leaves.err());
                Err(faults)
            }
        }
    }

    fn apply(&self, ready: Ready) {
        let Ready {
            config,
            at_start,
            dialer,
            leaves,
        } = ready;
        let before = self.proxy.in_force.now();
        for key in at_start {
            tracing::warn!("{key}: takes effect at the next start");
        }
        let new_issuer = leaves.is_some();
        let leaves = leaves.unwrap_or_else(|| before.leaves.clone());
        for fault in faults::uncovered(&config, leaves.issuer()) {
            tracing::warn!("{fault}");
        }
        let changes = changes(&before.config, &config, new_issuer);
        let credentials = match (&config.proxy.auth, &before.config.proxy.auth) {
            // What was verified once stays so.
            (new, old) if new == old => before.credentials.clone(),
            (Some(auth), _) => {
                let known = before.credentials.as_deref();
                Some(Arc::new(Credentials::new(auth, known)))
            }
            (None, _) => None,
        };
        self.proxy.upstream.redirect(dialer);
        if let Store::Postgres(store) = &self.store {
            let ceilings = ceilings(&config.destinations);
            store.membership().set_ceilings(ceilings);
        }
        let metrics = &self.proxy.metrics;
        expiry(metrics, &leaves, &config);
        let summary = config.summary().to_string().replace('\n', "; ");
        self.proxy.in_force.replace(Rules {
            destinations: before.destinations.renewed(&config.destinations),
            leaves,
            credentials,
            config,
        });
        metrics.reloaded(Some(since_epoch(SystemTime::now())));
        tracing::info!("{summary}");
        match changes.as_str() {
            "" => tracing::info!("configuration reloaded: nothing in it has changed"),
            _ => tracing::info!("configuration reloaded: {changes}"),
        }
    }

    fn refuse(&self, faults: &[String]) {
        for fault in faults {
            tracing::error!("{fault}");
        }
        self.proxy.metrics.reloaded(None);
        tracing::error!(
            faults = faults.len(),
            "configuration not reloaded, the one before stays in force; correct the file and send SIGHUP again"
        );
    }
}

/// Leaves of the issuer on disk, if it is another than that in use.
fn new_leaves(config: &Config, in_use: &Leaves) -> Result<Option<Arc<Leaves>>, String> {
    let issuer = Issuer::load(&config.ca.dir).map_err(|e| e.to_string())?;
    if issuer.certificate().fingerprint == in_use.issuer().certificate().fingerprint {
        return Ok(None);
    }
    let leaves = Leaves::new(Arc::new(issuer)).map_err(|e| e.to_string())?;
    Ok(Some(Arc::new(leaves)))
}

/// The configuration that was read, with what cannot change in a running replica as it is in force; and the keys of
/// that which differ. A key that is not here takes effect at once.
fn adopt(in_force: &Config, read: Config) -> (Config, Vec<&'static str>) {
    let (mut config, mut kept) = (read, Vec::new());
    let keep = &mut kept;
    let (now, new) = (&in_force.proxy, &mut config.proxy);
    pin("proxy.listen", &now.listen, &mut new.listen, keep);
    pin(
        "proxy.max_connections",
        &now.max_connections,
        &mut new.max_connections,
        keep,
    );
    pin(
        "proxy.max_connections_per_client",
        &now.max_connections_per_client,
        &mut new.max_connections_per_client,
        keep,
    );
    let (now, new) = (&in_force.admin, &mut config.admin);
    pin("admin.listen", &now.listen, &mut new.listen, keep);
    pin("ca.dir", &in_force.ca.dir, &mut config.ca.dir, keep);
    match (&in_force.store, &mut config.store) {
        (Some(now), Some(new)) => pin_store(now, new, keep),
        (now, new) => pin("store.url", now, new, keep),
    }
    (config, kept)
}

fn pin_store(now: &config::Store, new: &mut config::Store, keep: &mut Vec<&'static str>) {
    pin("store.url", &now.url, &mut new.url, keep);
    pin("store.table", &now.table, &mut new.table, keep);
    pin(
        "store.key_prefix",
        &now.key_prefix,
        &mut new.key_prefix,
        keep,
    );
    pin(
        "store.max_replicas",
        &now.max_replicas,
        &mut new.max_replicas,
        keep,
    );
    pin("store.replica", &now.replica, &mut new.replica, keep);
    pin(
        "store.foreign_fetchers",
        &now.foreign_fetchers,
        &mut new.foreign_fetchers,
        keep,
    );
    pin("store.lease_ttl", &now.lease_ttl, &mut new.lease_ttl, keep);
}

fn pin<T: Clone + PartialEq>(
    key: &'static str,
    now: &T,
    new: &mut T,
    keep: &mut Vec<&'static str>,
) {
    if now != new {
        *new = now.clone();
        keep.push(key);
    }
}

/// What changes, in one line and without a secret; empty where nothing does.
fn changes(before: &Config, after: &Config, new_issuer: bool) -> String {
    let keys = Line(&before.differences(after)).to_string();
    let issuer = new_issuer.then(|| "the issuer of the CA is another".to_owned());
    let all = issuer
        .into_iter()
        .chain(Some(keys).filter(|k| !k.is_empty()));
    all.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, path::Path};

    use super::*;
    use crate::config::keys;

    const CONTRACT: &str = include_str!("../../tests/config/valid/contract.toml");

    /// Another value for each key of [`CONTRACT`].
    const OTHERS: &[(&str, &str, &str)] = &[
        ("proxy", "listen", "\"127.0.0.1:3129\""),
        ("proxy", "proxy_protocol_from", "[]"),
        ("proxy", "allow_clients", "[\"loopback\"]"),
        ("proxy", "open", "true"),
        ("proxy", "via", "false"),
        ("proxy", "max_wait", "\"20s\""),
        ("proxy", "max_connections", "20000"),
        ("proxy", "max_connections_per_client", "9000"),
        ("proxy", "drain", "\"40s\""),
        ("proxy", "ungoverned", "\"deny\""),
        ("proxy", "refusal_status", "429"),
        ("proxy", "connect_ports", "[443]"),
        ("proxy", "allow_upstreams", "[]"),
        (
            "proxy.auth",
            "users",
            "{ eve = \"5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8\" }",
        ),
        ("admin", "listen", "\"127.0.0.1:9129\""),
        ("admin", "token", "\"another\""),
        ("store", "url", "\"postgres://other/x\""),
        ("store", "table", "\"other\""),
        ("store", "key_prefix", "\"other:\""),
        ("store", "max_replicas", "4"),
        ("store", "replica", "\"other\""),
        ("store", "foreign_fetchers", "2"),
        ("store", "lease_ttl", "\"6m\""),
        ("ca", "dir", "\"other\""),
        ("upstream", "extra_roots", "\"other.pem\""),
        ("upstream", "resolve", "{}"),
        ("destination", "name", "\"other\""),
        ("destination", "hosts", "[\"other.test\"]"),
        ("destination", "rate", "3.0"),
        ("destination", "scope", "\"host\""),
        ("destination", "tls", "\"opaque\""),
        ("destination", "opaque_h2", "\"per-record\""),
        ("destination", "max_in_flight", "7"),
        ("destination", "throttle_status", "[429]"),
        ("destination", "lockout_status", "[401]"),
        ("destination", "lockout_after", "4"),
        ("destination", "lockout_for", "\"16m\""),
        ("destination", "recovery_after", "101"),
        ("destination", "retry_after_cap", "\"11m\""),
        ("destination", "retry_throttled", "1"),
        ("destination", "dry_run", "true"),
    ];

    fn parse(text: &str) -> Config {
        Config::parse(text, Path::new("a.toml"), &|_| None)
            .unwrap_or_else(|faults| panic!("{faults}\n{text}"))
    }

    /// [`CONTRACT`] with another value for one key of one group.
    fn with(group: &str, key: &str, value: &str) -> Config {
        let mut within = "";
        let mut lines = Vec::new();
        for line in CONTRACT.lines() {
            if line.starts_with('[') {
                within = line.trim_matches(['[', ']']);
            }
            let here = within == group && line.split(" = ").next() == Some(key);
            lines.push(match here {
                true => format!("{key} = {value}"),
                false => line.to_owned(),
            });
        }
        parse(&lines.join("\n"))
    }

    /// The keys that the manual lists as those that wait for the next start.
    fn documented() -> BTreeSet<String> {
        let manual = include_str!("../../docs/configuration.md");
        let (_, list) = manual
            .split_once("only at the next start:")
            .expect("the manual has the list");
        let (list, _) = list.split_once(". ").expect("a sentence ends");
        list.split('`')
            .skip(1)
            .step_by(2)
            .map(str::to_owned)
            .collect()
    }

    #[test]
    fn each_key_takes_effect_at_once_or_is_named_and_in_the_manuals_list() {
        let in_force = parse(CONTRACT);
        let mut at_start = BTreeSet::new();
        for (group, key, value) in OTHERS {
            let read = with(group, key, value);
            assert_ne!(read, in_force, "{group}.{key} = {value} changes nothing");
            let (adopted, kept) = adopt(&in_force, read.clone());
            match kept.as_slice() {
                [] => assert_eq!(adopted, read, "{group}.{key} is lost in silence"),
                [named] => {
                    assert_eq!(*named, format!("{group}.{key}"));
                    assert_eq!(adopted, in_force, "{named} is named and yet adopted");
                    at_start.insert((*named).to_owned());
                }
                more => panic!("{group}.{key}: {more:?}"),
            }
        }
        assert_eq!(at_start, documented());
    }

    #[test]
    fn every_key_has_its_row_above() {
        // The group of credentials is no key of its own.
        let known: BTreeSet<_> = keys::GROUPS
            .iter()
            .flat_map(|group| group.keys.iter().map(|key| (group.name, *key)))
            .filter(|row| *row != ("proxy", "auth"))
            .collect();
        let rows: BTreeSet<_> = OTHERS
            .iter()
            .map(|(group, key, _)| (*group, *key))
            .collect();
        assert_eq!(rows, known);
    }

    #[test]
    fn a_store_that_comes_or_goes_is_named_and_stays_as_it_is() {
        let (with, mut without) = (parse(CONTRACT), parse(CONTRACT));
        without.store = None;
        let (adopted, kept) = adopt(&without, with.clone());
        assert_eq!((adopted.store, kept), (None, vec!["store.url"]));
        let (adopted, kept) = adopt(&with, without);
        assert_eq!((adopted.store, kept), (with.store, vec!["store.url"]));
    }

    #[test]
    fn a_listener_that_stays_open_to_the_world_is_seen_although_the_file_binds_loopback() {
        let text = |listen: &str, clients: &str| {
            parse(&format!(
                "[proxy]\nlisten = \"{listen}:3128\"\nallow_clients = [\"{clients}\"]\n\
                 [[destination]]\nname = \"a\"\nhosts = [\"a.test\"]\nrate = 1\n"
            ))
        };
        let (in_force, read) = (text("0.0.0.0", "private"), text("127.0.0.1", "any"));
        assert!(!in_force.proxy.is_left_open() && !read.proxy.is_left_open());
        assert!(adopt(&in_force, read).0.proxy.is_left_open());
    }

    #[test]
    fn every_key_that_changes_is_told_and_no_secret_is() {
        let in_force = parse(CONTRACT);
        for (group, key, value) in OTHERS {
            let told = changes(&in_force, &with(group, key, value), false);
            let full = match *group {
                "destination" if *key == "name" => "destination other: added".to_owned(),
                "destination" => format!("destination google_image: {key} "),
                group => format!("{group}.{key} "),
            };
            assert!(told.starts_with(&full), "{full}: {told}");
            for secret in ["another", "postgres://", "5e88"] {
                assert!(!told.contains(secret), "{told}");
            }
        }
    }

    #[test]
    fn a_reload_that_changes_nothing_has_nothing_to_tell_and_a_new_issuer_comes_first() {
        let in_force = parse(CONTRACT);
        assert_eq!(changes(&in_force, &in_force, false), "");
        let other = with("destination", "rate", "3.0");
        assert_eq!(
            changes(&in_force, &other, true),
            "the issuer of the CA is another; destination google_image: rate 7/s -> 3/s"
        );
    }
}

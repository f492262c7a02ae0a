//! Every key of a configuration with its value in few characters, and what differs between two configurations: for
//! whoever is told of a change.
//!
//! A secret is compared and never shown. It doesn't know which keys can change in a running replica.

use std::{fmt, time::Duration};

use super::{Config, Destination, OpaqueH2, Proxy, Scope, Store, TlsMode, Ungoverned, Upstream};

/// Lists are shown whole up to so many entries, those before and those after added up; of longer ones what came and went.
const SHOWN_WHOLE: usize = 8;

/// The value of a key, to be shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// A number, a word, a duration.
    One(String),
    /// A list, or the names of a table.
    Many(Vec<String>),
}

impl Value {
    fn one(text: impl ToString) -> Value {
        Value::One(text.to_string())
    }

    fn span(span: Duration) -> Value {
        Value::one(humantime::format_duration(span))
    }

    fn many<T: ToString>(entries: impl IntoIterator<Item = T>) -> Value {
        Value::Many(entries.into_iter().map(|entry| entry.to_string()).collect())
    }

    /// `***` for a secret that is set.
    fn masked<T>(secret: Option<&T>) -> Value {
        Value::one(secret.map_or("none", |_| "***"))
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::One(text) => f.write_str(text),
            Value::Many(entries) if entries.is_empty() => f.write_str("none"),
            Value::Many(entries) => write!(f, "[{}]", entries.join(", ")),
        }
    }
}

/// A key whose value is another: `proxy.max_wait 25s -> 10s`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The destination whose key it is, or that came or went.
    pub destination: Option<String>,
    /// The key, with its group unless that is a destination; empty for a destination that came or went.
    pub key: String,
    /// What became of it, as `25s -> 10s`.
    pub what: String,
}

/// Differences in one line, those of a destination together.
pub struct Line<'d>(pub &'d [Difference]);

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut before = None;
        for (
            i,
            Difference {
                destination,
                key,
                what,
            },
        ) in self.0.iter().enumerate()
        {
            match destination {
                Some(name) if before == Some(name) => f.write_str(", ")?,
                Some(name) => write!(f, "{}destination {name}: ", if i > 0 { "; " } else { "" })?,
                None if i > 0 => f.write_str("; ")?,
                None => {}
            }
            match key.as_str() {
                "" => f.write_str(what)?,
                key => write!(f, "{key} {what}")?,
            }
            before = destination.as_ref();
        }
        Ok(())
    }
}

impl Destination {
    /// Its keys and their values, in the order of the manual.
    pub fn listing(&self) -> Vec<(&'static str, Value)> {
        let statuses = |of: &[http::StatusCode]| Value::many(of.iter().map(|s| s.as_u16()));
        vec![
            ("name", Value::one(&self.name)),
            ("hosts", Value::many(&self.hosts)),
            ("rate", Value::one(self.rate)),
            (
                "scope",
                Value::one(match self.scope {
                    Scope::Destination => "destination",
                    Scope::Host => "host",
                }),
            ),
            (
                "tls",
                Value::one(match self.tls {
                    TlsMode::Intercept => "intercept",
                    TlsMode::Opaque => "opaque",
                }),
            ),
            (
                "opaque_h2",
                Value::one(match self.opaque_h2 {
                    OpaqueH2::Deny => "deny",
                    OpaqueH2::PerRecord => "per-record",
                }),
            ),
            (
                "max_in_flight",
                self.max_in_flight
                    .map_or(Value::one("no limit"), Value::one),
            ),
            ("throttle_status", statuses(&self.throttle_status)),
            ("lockout_status", statuses(&self.lockout_status)),
            ("lockout_after", Value::one(self.lockout_after)),
            ("lockout_for", Value::span(self.lockout_for)),
            ("recovery_after", Value::one(self.recovery_after)),
            ("retry_after_cap", Value::span(self.retry_after_cap)),
            ("retry_throttled", Value::one(self.retry_throttled)),
            ("dry_run", Value::one(self.dry_run)),
        ]
    }
}

impl Config {
    /// The keys of all groups but the destinations, as in `proxy.listen`, and their values. Without `[store]` it has
    /// none of its keys but the URL.
    pub fn listing(&self) -> Vec<(String, Value)> {
        let Config {
            file: _,
            proxy,
            admin,
            store,
            ca,
            upstream,
            destinations: _,
        } = self;
        let users = proxy.auth.iter().flat_map(|auth| auth.users.keys());
        let groups = [
            ("proxy", of_proxy(proxy)),
            ("proxy.auth", vec![("users", Value::many(users))]),
            (
                "admin",
                vec![
                    ("listen", Value::one(admin.listen)),
                    ("token", Value::masked(admin.token.as_ref())),
                ],
            ),
            ("store", of_store(store.as_ref())),
            ("ca", vec![("dir", Value::one(ca.dir.display()))]),
            ("upstream", of_upstream(upstream)),
        ];
        let full = |group: &str, key: &str| format!("{group}.{key}");
        groups
            .into_iter()
            .flat_map(|(group, keys)| keys.into_iter().map(move |(k, v)| (full(group, k), v)))
            .collect()
    }

    /// What is otherwise in `after`; nothing where it means the same.
    pub fn differences(&self, after: &Config) -> Vec<Difference> {
        let url = |config: &Config| config.store.as_ref().map(|store| store.url.clone());
        let hidden = [
            ("proxy.auth.users", self.proxy.auth != after.proxy.auth),
            ("admin.token", self.admin.token != after.admin.token),
            ("store.url", url(self) != url(after)),
        ];
        let mut all = Vec::new();
        let old = self.listing();
        for (key, new) in after.listing() {
            let Some((_, old)) = old.iter().find(|(other, _)| *other == key) else {
                continue;
            };
            let is_hidden = hidden.contains(&(key.as_str(), true));
            if let Some(what) = became(old, &new).or(is_hidden.then(|| "changed".to_owned())) {
                all.push(Difference {
                    destination: None,
                    key,
                    what,
                });
            }
        }
        let named = |config: &Config, name: &str| {
            let mut all = config.destinations.iter();
            all.find(|d| d.name == name).cloned()
        };
        let whole = |name: &str, what: String| Difference {
            destination: Some(name.to_owned()),
            key: String::new(),
            what,
        };
        for new in &after.destinations {
            let Some(old) = named(self, &new.name) else {
                all.push(whole(&new.name, format!("added, {}", new.rate)));
                continue;
            };
            for ((key, old), (_, new_value)) in old.listing().iter().zip(new.listing()) {
                if let Some(what) = became(old, &new_value) {
                    all.push(Difference {
                        destination: Some(new.name.clone()),
                        key: (*key).to_owned(),
                        what,
                    });
                }
            }
        }
        for old in &self.destinations {
            if named(after, &old.name).is_none() {
                all.push(whole(&old.name, "removed".to_owned()));
            }
        }
        all
    }
}

/// `None` where nothing became of it.
fn became(old: &Value, new: &Value) -> Option<String> {
    if old == new {
        return None;
    }
    let (old, new) = match (old, new) {
        (Value::Many(old), Value::Many(new)) if old.len() + new.len() > SHOWN_WHOLE => (old, new),
        _ => return Some(format!("{old} -> {new}")),
    };
    let but = |these: &[String], those: &[String], sign: &str| -> Vec<String> {
        let only = these.iter().filter(|entry| !those.contains(entry));
        only.map(|entry| format!("{sign}{entry}")).collect()
    };
    let mut moved = but(new, old, "+");
    moved.extend(but(old, new, "-"));
    let rest = moved.len().saturating_sub(SHOWN_WHOLE);
    moved.truncate(SHOWN_WHOLE);
    Some(match (moved.is_empty(), rest) {
        (true, _) => "in another order".to_owned(),
        (_, 0) => moved.join(" "),
        (_, rest) => format!("{} and {rest} more", moved.join(" ")),
    })
}

fn of_proxy(proxy: &Proxy) -> Vec<(&'static str, Value)> {
    vec![
        ("listen", Value::one(proxy.listen)),
        (
            "proxy_protocol_from",
            Value::many(&proxy.proxy_protocol_from),
        ),
        ("allow_clients", Value::many(&proxy.allow_clients)),
        ("open", Value::one(proxy.open)),
        ("via", Value::one(proxy.via)),
        ("max_wait", Value::span(proxy.max_wait)),
        ("max_connections", Value::one(proxy.max_connections)),
        (
            "max_connections_per_client",
            proxy
                .max_connections_per_client
                .map_or(Value::one("half"), Value::one),
        ),
        ("drain", Value::span(proxy.drain)),
        (
            "ungoverned",
            Value::one(match proxy.ungoverned {
                Ungoverned::Tunnel => "tunnel",
                Ungoverned::Deny => "deny",
            }),
        ),
        ("refusal_status", Value::one(proxy.refusal_status.as_u16())),
        ("connect_ports", Value::many(&proxy.connect_ports)),
        ("allow_upstreams", Value::many(&proxy.allow_upstreams)),
    ]
}

fn of_store(store: Option<&Store>) -> Vec<(&'static str, Value)> {
    let mut keys = vec![("url", Value::masked(store))];
    if let Some(store) = store {
        keys.extend([
            ("table", Value::one(&store.table)),
            ("key_prefix", Value::one(&store.key_prefix)),
            ("max_replicas", Value::one(store.max_replicas)),
            ("replica", Value::one(&store.replica)),
            ("foreign_fetchers", Value::one(store.foreign_fetchers)),
            ("lease_ttl", Value::span(store.lease_ttl)),
        ]);
    }
    keys
}

fn of_upstream(upstream: &Upstream) -> Vec<(&'static str, Value)> {
    let roots = upstream.extra_roots.as_ref().map(|file| file.display());
    let resolve = upstream.resolve.iter();
    vec![
        ("extra_roots", roots.map_or(Value::one("none"), Value::one)),
        (
            "resolve",
            Value::many(resolve.map(|(from, to)| format!("{from} at {to}"))),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, path::Path};

    use super::*;
    use crate::config::keys;

    const CONTRACT: &str = include_str!("../../tests/config/valid/contract.toml");

    fn parse(text: &str) -> Config {
        Config::parse(text, Path::new("a.toml"), &|_| None)
            .unwrap_or_else(|faults| panic!("{faults}\n{text}"))
    }

    fn line(before: &Config, after: &Config) -> String {
        Line(&before.differences(after)).to_string()
    }

    #[test]
    fn every_key_is_listed() {
        let config = parse(CONTRACT);
        let mut listed: BTreeSet<String> = config.listing().into_iter().map(|(k, _)| k).collect();
        let destination = config.destinations[0].listing();
        listed.extend(destination.iter().map(|(k, _)| format!("destination.{k}")));
        let known = keys::GROUPS.iter().flat_map(|group| {
            let full = |key: &&str| format!("{}.{key}", group.name);
            group.keys.iter().map(full).collect::<Vec<_>>()
        });
        // The group of credentials is no key of its own.
        let known: BTreeSet<String> = known.filter(|key| key != "proxy.auth").collect();
        assert_eq!(listed, known);
    }

    #[test]
    fn a_change_is_told_by_key_with_both_values_and_a_secret_without() {
        let before = parse(CONTRACT);
        assert_eq!(line(&before, &before), "");
        let mut after = before.clone();
        after.proxy.max_wait = Duration::from_secs(10);
        after.admin.token = Some(crate::config::Secret::new("hunter2"));
        let d = &mut after.destinations[0];
        d.rate = crate::config::Rate::per_second(5.0).expect("a rate");
        d.max_in_flight = None;
        d.throttle_status.truncate(1);
        let mut more = d.clone();
        more.name = "more".to_owned();
        after.destinations.push(more);
        assert_eq!(
            line(&before, &after),
            "proxy.max_wait 25s -> 10s; admin.token changed; destination google_image: rate 7/s -> 5/s, \
             max_in_flight 6 -> no limit, throttle_status [429, 503] -> [429]; destination more: added, 5/s"
        );
        after.admin.token = None;
        let back = line(&after, &before);
        assert!(back.contains("admin.token none -> ***"), "{back}");
        assert!(back.ends_with("; destination more: removed"), "{back}");
    }

    #[test]
    fn of_a_long_list_only_what_came_and_went_is_told() {
        let list = |entries: &[u16]| Value::many(entries);
        let old: Vec<u16> = (1..=9).collect();
        let mut new = old.clone();
        new.remove(0);
        new.push(10);
        assert_eq!(became(&list(&old), &list(&new)).as_deref(), Some("+10 -1"));
        new = old.clone();
        new.reverse();
        assert_eq!(
            became(&list(&old), &list(&new)).as_deref(),
            Some("in another order")
        );
        assert_eq!(
            became(&list(&old), &list(&[])).as_deref(),
            Some("-1 -2 -3 -4 -5 -6 -7 -8 and 1 more")
        );
    }
}

//! `[store]`: which Postgres keeps the cursor, in which table, under which keys.
//!
//! The URL may hold a password, so nothing here puts it into a message. Doesn't know Postgres itself: what a URL says
//! beyond its scheme is for the store to read.

use std::{ops::RangeInclusive, time::Duration};

use toml::de::DeValue;

use super::{
    Proxy, Secret, Store, default,
    faults::{Complaint, Place, shown},
    host_name,
    parse::{Environment, Purpose, variable},
    source::Section,
    value,
};

/// The store's URL; stronger than `store.url`, so that a secret need not be in a file.
pub const STORE_URL_VARIABLE: &str = "PACELINE_STORE_URL";

/// The others notice a lost replica after about 4 s; its number must not be free before that.
const LEASE_TTL: RangeInclusive<Duration> = Duration::from_secs(5)..=Duration::from_secs(86_400);

const REPLICAS: RangeInclusive<u32> = 1..=1_000;
const FOREIGN_FETCHERS: RangeInclusive<u32> = 0..=1_000;

/// The longest `store.key_prefix`, in characters; leaves room for a name and more within `destination::KEY_LIMIT`.
const LONGEST_PREFIX: usize = 128;

/// The longest identifier of Postgres, in bytes; a longer one would be cut off without an error.
const LONGEST_IDENTIFIER: usize = 63;

/// `None` is the embedded store; also after a fault of the URL, and where it is missing and not needed.
pub(super) fn read(
    top: &Section<'_, '_>,
    proxy: &Proxy,
    purpose: Purpose,
    env: Environment<'_>,
) -> Option<Store> {
    let (store, present) = top.section("store");
    let in_file = store.read("url", |v| store_url(value::text(v)?));
    let url = match variable(env, STORE_URL_VARIABLE) {
        Some(url) => store_url(&url)
            .map_err(|complaint| {
                let place = Place::Variable(STORE_URL_VARIABLE);
                top.source.push(place, "store.url".to_owned(), complaint);
            })
            .ok(),
        None if present && purpose == Purpose::Serve && store.find("url").is_none() => {
            let fix = "set store.url or the variable PACELINE_STORE_URL to postgres://..., or remove [store] for the \
                       embedded store";
            store.fault(
                store.place_of("url"),
                "url",
                Complaint::new("is missing", fix),
            );
            None
        }
        None => in_file,
    };
    let table = store.read("table", table_name);
    let key_prefix = store.read("key_prefix", key_prefix);
    let max_replicas = store.read("max_replicas", |v| value::whole(v, REPLICAS));
    let replica = store.read("replica", replica_name);
    let foreign_fetchers = store.read("foreign_fetchers", |v| value::whole(v, FOREIGN_FETCHERS));
    let lease_ttl = store.read("lease_ttl", |v| value::duration(v, LEASE_TTL));
    Some(Store {
        url: url?,
        table: table.unwrap_or(default::TABLE.to_owned()),
        key_prefix: key_prefix.unwrap_or(default::KEY_PREFIX.to_owned()),
        max_replicas: max_replicas.unwrap_or(default::MAX_REPLICAS),
        replica: replica.unwrap_or_else(|| default_replica(proxy.listen.port())),
        foreign_fetchers: foreign_fetchers.unwrap_or(default::FOREIGN_FETCHERS),
        lease_ttl: lease_ttl.unwrap_or(default::LEASE_TTL),
    })
}

/// Only the scheme is looked at here: the store's own parser says the rest, and the text must not be shown.
///
/// # Errors
/// It is no URL of Postgres.
pub fn store_url(text: &str) -> Result<Secret, Complaint> {
    let known = ["postgres://", "postgresql://"];
    if !known.iter().any(|scheme| text.starts_with(scheme)) {
        return Err(Complaint::new(
            "doesn't begin with postgres:// (the value isn't shown, it may hold a password)",
            "write postgres://USER:PASSWORD@HOST:PORT/DATABASE",
        ));
    }
    if text.chars().any(|c| c.is_control() || c == ' ') {
        return Err(Complaint::new(
            "has spaces or control characters",
            "percent-encode them",
        ));
    }
    Ok(Secret::new(text))
}

fn table_name(value: &DeValue<'_>) -> Result<String, Complaint> {
    let text = value::text(value)?;
    let part = |part: &str| {
        let first = part.bytes().next();
        first.is_some_and(|b| b.is_ascii_alphabetic() || b == b'_')
            && part.len() <= LONGEST_IDENTIFIER
            && part
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'$'))
    };
    if text.split('.').count() <= 2 && text.split('.').all(part) {
        return Ok(text.to_owned());
    }
    Err(Complaint::new(
        format!("{} is no table name", shown(text)),
        "write table or schema.table, each of up to 63 letters, digits, _ and $, not beginning with a digit",
    ))
}

fn key_prefix(value: &DeValue<'_>) -> Result<String, Complaint> {
    let text = value::printable(value)?;
    if text.chars().count() <= LONGEST_PREFIX {
        return Ok(text.to_owned());
    }
    let wrong = format!("is longer than {LONGEST_PREFIX} characters");
    Err(Complaint::new(
        wrong,
        "shorten it; the table's keys have room for 255",
    ))
}

fn replica_name(value: &DeValue<'_>) -> Result<String, Complaint> {
    let text = value::text(value)?;
    if (1..=128).contains(&text.len()) && text.chars().all(is_replica_character) {
        return Ok(text.to_owned());
    }
    Err(Complaint::new(
        format!("{} is no replica name", shown(text)),
        "write 1 to 128 letters, digits, dots, colons, hyphens and underscores",
    ))
}

fn is_replica_character(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | ':' | '-' | '_')
}

/// Host name and port; a port that is chosen at start can't tell two replicas apart, so the process does.
fn default_replica(port: u16) -> String {
    let host = host_name();
    match port {
        0 => format!("{host}:pid-{}", std::process::id()),
        port => format!("{host}:{port}"),
    }
}

impl Store {
    /// Into how many shares the ceiling is divided while the store is away, at least 1.
    pub fn shares(&self) -> u32 {
        self.max_replicas
            .saturating_add(self.foreign_fetchers)
            .max(1)
    }

    /// What may be sent while the store is away: by the replicas, and by each other program on the cursor, so that the sum
    /// stays at the ceiling.
    pub fn outage_in_words(&self, destinations: &[super::Destination]) -> String {
        let (replicas, others, of) = (self.max_replicas, self.foreign_fetchers, self.shares());
        let mut text = format!(
            "in an outage each of up to {replicas} replicas sends 1/{of} of each rate, {replicas}/{of} in all"
        );
        if others > 0 {
            text += &format!(
                "; that leaves {others}/{of} to {others} other programs, so each must fall back to 1/{of} or less"
            );
            let share = |d: &super::Destination| {
                let share = d.rate.per_second / f64::from(of);
                format!("{}: {:.3}/s", d.name, share)
            };
            let shares: Vec<String> = destinations.iter().take(3).map(share).collect();
            text += &format!(" ({})", shares.join(", "));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::config::Config;

    #[test]
    fn what_an_outage_may_reach_is_said_with_and_without_other_programs() {
        let words = |keys: &str| {
            let text = format!(
                "[store]\nurl = \"postgres://h/d\"\n{keys}\n[[destination]]\nname = \"a\"\nhosts = [\"a.test\"]\nrate = 10\n"
            );
            let config = Config::parse(&text, Path::new("a.toml"), &|_| None).expect("valid");
            let store = config.store.expect("a store");
            store.outage_in_words(&config.destinations)
        };
        assert_eq!(
            words(""),
            "in an outage each of up to 3 replicas sends 1/3 of each rate, 3/3 in all"
        );
        assert_eq!(
            words("foreign_fetchers = 2"),
            "in an outage each of up to 3 replicas sends 1/5 of each rate, 3/5 in all; that leaves 2/5 to 2 other programs, \
             so each must fall back to 1/5 or less (a: 2.000/s)"
        );
    }
}

//! A lease as it stands in the table: `<heard at> <incarnation> <what the replica says>`.
//!
//! The first word is the store's time in nanoseconds, written by the statement itself; the second names one run of one
//! replica and proves whose lease it is; the rest is JSON. Rows may hold anything: what cannot be read is no lease.
//! Which number to take is decided here, from the rows alone.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use crate::pacing::{
    share::SILENT_AFTER,
    time::{Nanos, StoreTime},
};

/// Rows longer than this are not read.
const LONGEST: usize = 256 * 1024;

/// What a replica says with each heartbeat.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Word {
    /// Its name.
    pub replica: String,
    /// The ceiling that it is configured with, by destination, in requests per second.
    pub ceilings: BTreeMap<String, f64>,
    /// Dispatches since it started, by destination.
    pub dispatches: BTreeMap<String, u64>,
    /// Dispatches in each of the last whole seconds of the store's clock, by destination.
    pub seconds: BTreeMap<String, BTreeMap<i64, u64>>,
    /// Cursors that it cannot move although it is heard.
    pub failing: BTreeSet<String>,
}

/// A lease that was read.
#[derive(Clone, Debug, PartialEq)]
pub struct Lease {
    /// When its replica was last heard.
    pub at: StoreTime,
    /// Which run of the replica holds it.
    pub incarnation: String,
    /// What it said.
    pub word: Word,
}

impl Word {
    /// As JSON text.
    pub fn to_text(&self) -> String {
        let seconds: Map<String, Value> = self
            .seconds
            .iter()
            .map(|(d, counts)| {
                let counts: Map<String, Value> = counts
                    .iter()
                    .map(|(s, n)| (s.to_string(), json!(n)))
                    .collect();
                (d.clone(), Value::Object(counts))
            })
            .collect();
        json!({
            "replica": self.replica,
            "ceilings": self.ceilings,
            "dispatches": self.dispatches,
            "seconds": seconds,
            "failing": self.failing,
        })
        .to_string()
    }

    fn parse(text: &str) -> Option<Word> {
        let value: Value = serde_json::from_str(text).ok()?;
        let entries = |key: &str| {
            value
                .get(key)
                .and_then(Value::as_object)
                .into_iter()
                .flatten()
        };
        let seconds = entries("seconds").map(|(d, counts)| {
            let counts = counts.as_object().into_iter().flatten();
            let counts = counts.filter_map(|(s, n)| Some((s.parse().ok()?, n.as_u64()?)));
            (d.clone(), counts.collect())
        });
        Some(Word {
            replica: value.get("replica")?.as_str()?.to_owned(),
            ceilings: entries("ceilings")
                .filter_map(|(d, c)| Some((d.clone(), c.as_f64().filter(|c| *c > 0.0)?)))
                .collect(),
            dispatches: entries("dispatches")
                .filter_map(|(d, n)| Some((d.clone(), n.as_u64()?)))
                .collect(),
            seconds: seconds.collect(),
            failing: value
                .get("failing")
                .and_then(Value::as_array)
                .into_iter()
                .flatten()
                .filter_map(|k| Some(k.as_str()?.to_owned()))
                .collect(),
        })
    }
}

impl Lease {
    /// Reads a row; `None` for anything that no replica wrote.
    pub fn parse(text: &str) -> Option<Lease> {
        if text.len() > LONGEST {
            return None;
        }
        let mut words = text.splitn(3, ' ');
        let at = StoreTime(words.next()?.parse().ok()?);
        let incarnation = words.next().filter(|w| !w.is_empty())?.to_owned();
        Some(Lease {
            at,
            incarnation,
            word: Word::parse(words.next()?)?,
        })
    }

    /// How long its replica has not been heard; an instant in the future is no proof of life.
    pub fn age(&self, now: StoreTime) -> Nanos {
        let age = now.since(self.at);
        if age < -SILENT_AFTER {
            Nanos::MAX
        } else {
            age.max(0)
        }
    }

    /// Whether its replica is not heard, and may be sending by itself.
    pub fn is_silent(&self, now: StoreTime, ttl: Nanos) -> bool {
        let age = self.age(now);
        age > SILENT_AFTER && age < ttl
    }

    /// Whether its number may be taken by another.
    pub fn has_lapsed(&self, now: StoreTime, ttl: Nanos) -> bool {
        self.age(now) >= ttl
    }
}

/// A number to take, and what must still stand in its row (`None`: nothing must) for the taking to be good.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The number.
    pub number: u32,
    /// The row as it was seen.
    pub seen: Option<String>,
}

/// Which number `replica` should take: the one that an earlier run of it held, else one that nobody holds, else one that
/// has lapsed. `None` when all are held.
pub fn choose(
    rows: &BTreeMap<u32, String>,
    replica: &str,
    max_replicas: u32,
    now: StoreTime,
    ttl: Nanos,
) -> Option<Claim> {
    enum Row {
        Free,
        Ours,
        Lapsed,
        Held,
    }
    let rate = |number: u32| match rows.get(&number).map(|text| Lease::parse(text)) {
        None | Some(None) => Row::Free,
        Some(Some(lease)) if lease.word.replica == replica => Row::Ours,
        Some(Some(lease)) if lease.has_lapsed(now, ttl) => Row::Lapsed,
        Some(Some(_)) => Row::Held,
    };
    let find = |wanted: fn(&Row) -> bool| (0..max_replicas).find(|n| wanted(&rate(*n)));
    let number = find(|r| matches!(r, Row::Ours))
        .or_else(|| find(|r| matches!(r, Row::Free)))
        .or_else(|| find(|r| matches!(r, Row::Lapsed)))?;
    Some(Claim {
        number,
        seen: rows.get(&number).cloned(),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pacing::time::SECOND;

    const TTL: Nanos = 300 * SECOND;

    fn row(at: i64, replica: &str) -> String {
        let word = Word {
            replica: replica.to_owned(),
            ..Word::default()
        };
        format!("{} run-{replica} {}", at * SECOND, word.to_text())
    }

    #[test]
    fn what_a_replica_says_comes_back_as_it_was() {
        let word = Word {
            replica: "a b \"c\"".into(),
            ceilings: [("d".to_owned(), 7.0)].into(),
            dispatches: [("d".to_owned(), 12)].into(),
            seconds: [(
                "d".to_owned(),
                [(1_795_995_528, 7), (1_795_995_529, 3)].into(),
            )]
            .into(),
            failing: ["d/h.test".to_owned()].into(),
        };
        let lease = Lease::parse(&format!("5 id {}", word.to_text())).expect("a lease");
        assert_eq!(
            (lease.at, lease.incarnation.as_str(), lease.word),
            (StoreTime(5), "id", word)
        );
    }

    #[test]
    fn a_restart_takes_its_own_number_back_at_once() {
        let rows = [(0, row(1_000, "a")), (2, row(1_000, "b"))].into();
        let now = StoreTime(1_001 * SECOND);
        assert_eq!(choose(&rows, "b", 3, now, TTL).map(|c| c.number), Some(2));
        assert_eq!(
            choose(&rows, "c", 3, now, TTL),
            Some(Claim {
                number: 1,
                seen: None
            })
        );
    }

    #[test]
    fn a_number_is_taken_over_only_when_it_has_lapsed() {
        let rows: BTreeMap<u32, String> = [(0, row(1_000, "a")), (1, row(700, "b"))].into();
        let at = |s: i64| choose(&rows, "c", 2, StoreTime(s * SECOND), TTL).map(|c| c.number);
        assert_eq!(at(999), None);
        assert_eq!(at(1_000), Some(1));
        let now = StoreTime(1_000 * SECOND);
        let b = Lease::parse(&rows[&1]).expect("a lease");
        assert!(b.has_lapsed(now, TTL) && !b.is_silent(now, TTL));
        assert!(
            b.is_silent(StoreTime(704 * SECOND), TTL) && !b.is_silent(StoreTime(702 * SECOND), TTL)
        );
    }

    #[test]
    fn a_row_that_nobody_wrote_is_free() {
        let rows = [(0, "garbage".to_owned())].into();
        assert_eq!(
            choose(&rows, "c", 1, StoreTime(0), TTL),
            Some(Claim {
                number: 0,
                seen: Some("garbage".into())
            })
        );
        let future = Lease::parse(&row(9_000, "z")).expect("a lease");
        assert!(future.has_lapsed(StoreTime(1_000 * SECOND), TTL));
    }

    proptest! {
        #[test]
        fn no_row_makes_the_reader_panic(text in ".{0,200}", json in "[0-9]{0,19} x \\{.{0,80}\\}") {
            let _ = (Lease::parse(&text), Lease::parse(&json));
        }
    }
}

//! A lease as it stands in the table: `<heard at> <incarnation> <what the replica says>`.
//!
//! The first word is the store's time in nanoseconds, written by the statement itself; the second names one run of one
//! replica and proves whose lease it is; the rest is JSON. Rows may hold anything: what cannot be read is no lease.
//! Which number to take is decided here too.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use crate::pacing::{
    share::SILENT_AFTER,
    time::{LocalTime, Nanos, StoreTime},
};

/// What stands in the row of a number that was given back or freed. A row that is merely gone proves nothing: caches are
/// cleared, and whoever held the number may live on.
pub const FREED: &str = "free";

/// Counts beyond this are nobody's, and their sums would not fit.
const GREATEST: u64 = 1 << 48;

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
    /// Into how many shares it divides the ceiling when the store is away; 0 if it does not say.
    pub shares: u32,
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
            "shares": self.shares,
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
        let count = |value: &Value| value.as_u64().filter(|n| *n <= GREATEST);
        let seconds = entries("seconds").map(|(d, counts)| {
            let counts = counts.as_object().into_iter().flatten();
            let counts = counts.filter_map(|(s, n)| Some((s.parse().ok()?, count(n)?)));
            (d.clone(), counts.collect())
        });
        Some(Word {
            replica: value.get("replica")?.as_str()?.to_owned(),
            ceilings: entries("ceilings")
                .filter_map(|(d, c)| Some((d.clone(), c.as_f64().filter(|c| *c > 0.0)?)))
                .collect(),
            shares: value
                .get("shares")
                .and_then(Value::as_u64)
                .and_then(|n| u32::try_from(n).ok())
                .unwrap_or(0),
            dispatches: entries("dispatches")
                .filter_map(|(d, n)| Some((d.clone(), count(n)?)))
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
}

/// A row as one replica has seen it.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    /// What stood in it.
    pub text: String,
    /// The lease in it, if it is one.
    pub lease: Option<Lease>,
    /// When it was written, on our clock.
    written: LocalTime,
}

impl Seen {
    /// A row read for the first time, or changed since the rows were `last` read: read at `received`, when the store's
    /// clock showed `now`.
    ///
    /// From here on its age is counted on our own clock, so that a step of the store's clock makes nobody silent and
    /// lets no lease lapse; nor does a standby that takes over with an older row and another clock. Where the instant in
    /// the row cannot be believed, the earliest one that can is taken: to leave room for one that lives costs little.
    pub fn new(text: String, received: LocalTime, now: StoreTime, last: Option<LocalTime>) -> Self {
        let lease = Lease::parse(&text);
        let age = lease.as_ref().map_or(0, |l| now.since(l.at));
        let earliest = last.unwrap_or(received.plus(-SILENT_AFTER - 1));
        let written = match received.plus(-age) {
            written if age < 0 || last.is_some_and(|l| written < l) => earliest,
            written => written,
        };
        Seen {
            text,
            lease,
            written,
        }
    }

    /// How long its replica has not been heard.
    pub fn age(&self, now: LocalTime) -> Nanos {
        now.since(self.written).max(0)
    }

    /// Whether its replica is not heard, and may be sending by itself.
    pub fn is_silent(&self, now: LocalTime, ttl: Nanos) -> bool {
        let age = self.age(now);
        self.lease.is_some() && age > SILENT_AFTER && age < ttl
    }

    /// Whether its number may be taken by another.
    pub fn has_lapsed(&self, now: LocalTime, ttl: Nanos) -> bool {
        self.age(now) >= ttl
    }
}

/// Which number `replica` should take: the one that an earlier run of it held, else one that nobody holds, else one that
/// has lapsed. `None` when all are held.
pub fn choose(
    rows: &BTreeMap<u32, Seen>,
    replica: &str,
    max_replicas: u32,
    now: LocalTime,
    ttl: Nanos,
) -> Option<u32> {
    enum Row {
        Free,
        Ours,
        Lapsed,
        Held,
    }
    let rate = |number: u32| match rows.get(&number).and_then(|r| Some((r, r.lease.as_ref()?))) {
        None => Row::Free,
        Some((_, lease)) if lease.word.replica == replica => Row::Ours,
        Some((row, _)) if row.has_lapsed(now, ttl) => Row::Lapsed,
        Some(_) => Row::Held,
    };
    let find = |wanted: fn(&Row) -> bool| (0..max_replicas).find(|n| wanted(&rate(*n)));
    find(|r| matches!(r, Row::Ours))
        .or_else(|| find(|r| matches!(r, Row::Free)))
        .or_else(|| find(|r| matches!(r, Row::Lapsed)))
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
            shares: 4,
        };
        let lease = Lease::parse(&format!("5 id {}", word.to_text())).expect("a lease");
        assert_eq!(
            (lease.at, lease.incarnation.as_str(), lease.word),
            (StoreTime(5), "id", word)
        );
    }

    /// Rows as they are seen at second `now`, which both clocks show.
    fn seen(now: i64, rows: &[(u32, String)]) -> BTreeMap<u32, Seen> {
        let at = (LocalTime(now * SECOND), StoreTime(now * SECOND));
        rows.iter()
            .map(|(n, text)| (*n, Seen::new(text.clone(), at.0, at.1, None)))
            .collect()
    }

    #[test]
    fn a_restart_takes_its_own_number_back_at_once() {
        let rows = seen(1_001, &[(0, row(1_000, "a")), (2, row(1_000, "b"))]);
        let now = LocalTime(1_001 * SECOND);
        assert_eq!(choose(&rows, "b", 3, now, TTL), Some(2));
        assert_eq!(choose(&rows, "c", 3, now, TTL), Some(1));
    }

    #[test]
    fn a_number_is_taken_over_only_when_it_has_lapsed() {
        let rows = seen(701, &[(0, row(701, "a")), (1, row(700, "b"))]);
        let at = |s: i64| choose(&rows, "c", 2, LocalTime(s * SECOND), TTL);
        assert_eq!(at(999), None);
        assert_eq!(at(1_000), Some(1));
        let (b, at) = (&rows[&1], |s: i64| LocalTime(s * SECOND));
        assert!(b.has_lapsed(at(1_000), TTL) && !b.is_silent(at(1_000), TTL));
        assert!(b.is_silent(at(704), TTL) && !b.is_silent(at(702), TTL));
    }

    #[test]
    fn a_row_that_holds_no_lease_is_free() {
        for text in ["garbage", FREED, ""] {
            let rows = seen(1, &[(0, text.to_owned())]);
            assert_eq!(choose(&rows, "c", 1, LocalTime(SECOND), TTL), Some(0));
            assert!(!rows[&0].is_silent(LocalTime(9 * SECOND), TTL));
        }
    }

    #[test]
    fn a_lease_from_the_future_is_silent_until_it_changes_and_lapses_like_any_other() {
        let ahead = &seen(1_000, &[(0, row(4_600, "a"))])[&0];
        let at = |s: i64| LocalTime(s * SECOND);
        assert!(ahead.is_silent(at(1_000), TTL) && !ahead.has_lapsed(at(1_290), TTL));
        assert!(ahead.has_lapsed(at(1_300), TTL));
    }

    #[test]
    fn a_row_that_changed_was_written_since_whatever_the_clock_says() {
        let at = |s: i64| LocalTime(s * SECOND);
        let store = StoreTime(4_600 * SECOND);
        for heard_at in [999, 9_999] {
            let row = Seen::new(row(heard_at, "a"), at(1_002), store, Some(at(1_000)));
            assert_eq!(row.age(at(1_002)), 2 * SECOND);
        }
    }

    proptest! {
        #[test]
        fn no_row_makes_the_reader_panic(text in ".{0,200}", json in "[0-9]{0,19} x \\{.{0,80}\\}") {
            let _ = (Lease::parse(&text), Lease::parse(&json));
        }
    }
}

//! A lease as it stands in the table: `<heard at> <incarnation> <what the replica says>`.
//!
//! The first word is the store's time in nanoseconds, written by the statement itself; the second names one run of one
//! replica and proves whose lease it is; the rest is JSON, whose length is bounded part by part, whatever is configured.
//! Rows may hold anything: what does not begin like a lease is none. One that does, and whose rest cannot be read, is a
//! lease that is held; somebody lives by it. Which number to take is decided here too, and which to read.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use crate::{
    config::Rate,
    pacing::{
        share::SILENT_AFTER,
        time::{LocalTime, Nanos, StoreTime},
    },
};

/// What stands in the row of a number that was given back or freed. A row that is merely gone proves nothing: caches are
/// cleared, and whoever held the number may live on.
pub const FREED: &str = "free";

/// More seconds in a row are nobody's.
const TOLD_AT_MOST: usize = 64;

/// Counts beyond this are nobody's, and their sums would not fit.
const GREATEST: u64 = 1 << 48;

/// Of rows longer than this, in bytes, only the beginning is read. No replica writes one.
pub const LONGEST: usize = 256 * 1024;
/// What the ceilings of all destinations may take of that.
pub const CEILINGS_BYTES: usize = 128 * 1024;
/// What may be told of what was sent.
pub const SENT_BYTES: usize = 64 * 1024;
/// What the names of cursors that cannot be moved may take.
pub const FAILING_BYTES: usize = 24 * 1024;

/// Numbers beyond this are nobody's: `store.max_replicas` goes no further.
const NUMBERS: u32 = 1_000;
/// Numbers read with each heartbeat, at least.
const NUMBERS_ALWAYS: u32 = 64;
/// Numbers beyond those, some of which are read with each heartbeat in turn.
const NUMBERS_IN_TURN: u32 = 100;

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
    /// Into how many shares it is configured to divide the ceiling when the store is away; 0 if it does not say.
    pub shares: u32,
    /// Into how many it does divide it, by what it knows of the others; 0 if it does not say.
    pub of: u32,
    /// It is heard, and yet not on the shared cursor: the others leave room for it.
    pub alone: bool,
    /// Which heartbeat of its run this is, from 1; 0 if it does not say.
    pub beat: u64,
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
        // The first second, and the counts from there on. (Version 0.1 wrote a map from seconds to counts, and takes this for an
        // empty one.)
        let seconds: Map<String, Value> = self
            .seconds
            .iter()
            .filter_map(|(d, counts)| {
                let (first, last) = (*counts.first_key_value()?.0, *counts.last_key_value()?.0);
                let counts = (first..=last).map(|s| json!(counts.get(&s).unwrap_or(&0)));
                let counts = std::iter::once(json!(first)).chain(counts);
                Some((d.clone(), counts.collect()))
            })
            .collect();
        json!({
            "replica": self.replica,
            "ceilings": self.ceilings,
            "dispatches": self.dispatches,
            "seconds": seconds,
            "failing": self.failing,
            "shares": self.shares,
            "of": self.of,
            "alone": self.alone,
            "beat": self.beat,
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
            let by_second = counts.as_object().into_iter().flatten();
            let by_second = by_second.filter_map(|(s, n)| Some((s.parse().ok()?, count(n)?)));
            let mut in_a_row = counts.as_array().into_iter().flatten();
            let first = in_a_row.next().and_then(Value::as_i64);
            let in_a_row = in_a_row
                .take(TOLD_AT_MOST)
                .zip(0i64..)
                .filter_map(|(n, s)| Some((first?.checked_add(s)?, count(n).filter(|n| *n > 0)?)));
            let mut counts: BTreeMap<i64, u64> = by_second.chain(in_a_row).collect();
            counts.retain(|_, n| *n > 0);
            // Whoever writes tells of seconds that follow one another.
            if let Some((first, _)) = counts.first_key_value() {
                let end = first.saturating_add(TOLD_AT_MOST as i64);
                counts.retain(|s, _| *s < end);
            }
            (d.clone(), counts)
        });
        let number = |key: &str| {
            let n = value.get(key).and_then(Value::as_u64);
            n.and_then(|n| u32::try_from(n).ok()).unwrap_or(0)
        };
        Some(Word {
            replica: value.get("replica")?.as_str()?.to_owned(),
            ceilings: entries("ceilings")
                .filter_map(|(d, c)| {
                    Some((d.clone(), Rate::per_second(c.as_f64()?).ok()?.per_second))
                })
                .collect(),
            shares: number("shares"),
            of: number("of"),
            alone: value.get("alone").and_then(Value::as_bool).unwrap_or(false),
            beat: value.get("beat").and_then(Value::as_u64).unwrap_or(0),
            dispatches: entries("dispatches")
                .filter_map(|(d, n)| Some((d.clone(), count(n)?)))
                .collect(),
            seconds: seconds.filter(|(_, counts)| !counts.is_empty()).collect(),
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
        let mut words = text.splitn(3, ' ');
        let at = StoreTime(words.next()?.parse().ok()?);
        let incarnation = words.next().filter(|w| !w.is_empty())?;
        let is_run = incarnation.len() == 32 && incarnation.bytes().all(|b| b.is_ascii_hexdigit());
        let rest = words.next().filter(|_| text.len() <= LONGEST);
        let word = match rest.and_then(Word::parse) {
            Some(word) => word,
            // Of another version, perhaps: whoever wrote it holds the number, and its name is not known.
            None if is_run => Word::default(),
            None => return None,
        };
        Some(Lease {
            at,
            incarnation: incarnation.to_owned(),
            word,
        })
    }
}

/// How many bytes the ceilings of all destinations take in a row, if those are more than there is room for.
pub fn too_many(ceilings: &BTreeMap<String, f64>) -> Option<usize> {
    let bytes = json!(ceilings).to_string().len();
    (bytes > CEILINGS_BYTES).then_some(bytes)
}

/// Whether the names of these cursors can be told in one row.
pub fn can_be_told<'c>(mut cursors: impl Iterator<Item = &'c String>) -> bool {
    // Quotes, a comma, and twice the length for what JSON may have to escape.
    let bytes = cursors.try_fold(0usize, |bytes, cursor| {
        let bytes = bytes + 2 * cursor.len() + 3;
        (bytes <= FAILING_BYTES).then_some(bytes)
    });
    bytes.is_some()
}

/// Which numbers' rows to read with the `beat`th heartbeat, `own` being those that this replica may take itself. The others
/// may be configured with more: all are read at first, then those that are likely, and the rest in turn.
pub fn to_read(own: u32, highest: Option<u32>, beat: u64) -> Vec<u32> {
    if beat == 0 {
        return (0..NUMBERS.max(own)).collect();
    }
    let likely = highest.map_or(0, |h| h.saturating_add(1).saturating_mul(2));
    let always = own.max(likely.min(NUMBERS)).max(NUMBERS_ALWAYS);
    let rest = NUMBERS.saturating_sub(always);
    let pages = u64::from(rest.div_ceil(NUMBERS_IN_TURN).max(1));
    let page = u32::try_from(beat % pages).unwrap_or(0);
    let from = always + page * NUMBERS_IN_TURN;
    let until = from.saturating_add(NUMBERS_IN_TURN).min(NUMBERS);
    (0..always).chain(from..until).collect()
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
    ///
    /// Where an older heartbeat of the same run stands there than was seen `before`, nobody wrote: a standby took over that
    /// had got no further. What the later one said, and its age, stay.
    pub fn new(
        text: String,
        received: LocalTime,
        now: StoreTime,
        last: Option<LocalTime>,
        before: Option<&Seen>,
    ) -> Self {
        let lease = Lease::parse(&text);
        if let Some(seen) = before
            && let (Some(then), Some(new)) = (&seen.lease, &lease)
            && then.incarnation == new.incarnation
            && new.word.beat != 0
            && new.word.beat <= then.word.beat
        {
            return Seen {
                text,
                ..seen.clone()
            };
        }
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
            of: 5,
            alone: true,
            beat: 6,
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
            .map(|(n, text)| (*n, Seen::new(text.clone(), at.0, at.1, None, None)))
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
            let row = Seen::new(row(heard_at, "a"), at(1_002), store, Some(at(1_000)), None);
            assert_eq!(row.age(at(1_002)), 2 * SECOND);
        }
    }

    #[test]
    fn a_row_of_version_0_1_is_read_and_one_of_ours_has_the_keys_that_it_reads() {
        let text = r#"5 id {"replica":"a","ceilings":{"d":7.0},"dispatches":{"d":3},"seconds":{"d":{"100":2,"102":1}},"failing":["d"],"shares":3}"#;
        let word = Lease::parse(text).expect("a lease").word;
        assert_eq!(word.seconds["d"], [(100, 2), (102, 1)].into());
        assert_eq!(
            (word.shares, word.of, word.alone, word.beat),
            (3, 0, false, 0)
        );
        let ours: Value = serde_json::from_str(&word.to_text()).expect("JSON");
        for (key, kind) in [
            ("replica", Value::is_string as fn(&Value) -> bool),
            ("ceilings", Value::is_object),
            ("dispatches", Value::is_object),
            ("seconds", Value::is_object),
            ("failing", Value::is_array),
            ("shares", Value::is_u64),
        ] {
            assert!(ours.get(key).is_some_and(kind), "{key}");
        }
        assert_eq!(ours["seconds"]["d"], json!([100, 2, 0, 1]));
    }

    #[test]
    fn a_lease_whose_rest_cannot_be_read_is_held_until_it_lapses() {
        let run = "0123456789abcdef0123456789abcdef";
        let long = format!(
            "{} {run} {{\"replica\":\"c\",\"x\":\"{}\"}}",
            1_000 * SECOND,
            "x".repeat(LONGEST)
        );
        for text in [
            format!("{} {run}", 1_000 * SECOND),
            format!("{} {run} v2:abc", 1_000 * SECOND),
            long,
        ] {
            let rows = seen(1_001, &[(0, text)]);
            let at = |s: i64| LocalTime(s * SECOND);
            assert_eq!(choose(&rows, "c", 1, at(1_001), TTL), None);
            assert!(!rows[&0].is_silent(at(1_002), TTL) && rows[&0].is_silent(at(1_004), TTL));
            assert_eq!(choose(&rows, "c", 1, at(1_300), TTL), Some(0));
        }
    }

    #[test]
    fn the_longest_word_fits_into_a_row() {
        let name = |n: usize| format!("{n:064}");
        let mut word = Word {
            replica: "r".repeat(128),
            shares: u32::MAX,
            of: u32::MAX,
            beat: u64::MAX,
            ..Word::default()
        };
        let mut tally = crate::membership::sent::Tally::default();
        for n in 0.. {
            word.ceilings.insert(name(n), 1.0 / (n as f64 + 3.0));
            if too_many(&word.ceilings).is_some() {
                word.ceilings.remove(&name(n));
                break;
            }
            for second in 100..120 {
                tally.dispatched(&name(n), second);
            }
        }
        assert!(word.ceilings.len() > 1_000);
        for n in 0.. {
            word.failing
                .insert(format!("{}/{}", name(n), "h".repeat(180)));
            if !can_be_told(word.failing.iter()) {
                break;
            }
        }
        (word.dispatches, word.seconds) = tally.tell(120);
        let text = format!("{} {} {}", i64::MAX, "f".repeat(32), word.to_text());
        assert!(text.len() < LONGEST, "{}", text.len());
        let mut read = Lease::parse(&text).expect("a lease").word;
        // Of a ceiling the last bit may be lost on its way; they are compared by their intervals.
        assert_eq!(read.ceilings.len(), word.ceilings.len());
        read.ceilings.clone_from(&word.ceilings);
        assert!(read == word);
    }

    #[test]
    fn an_older_heartbeat_of_the_same_run_makes_nobody_heard() {
        let at = |s: i64| (LocalTime(s * SECOND), StoreTime(s * SECOND));
        let text = |s: i64, beat: u64, alone: bool| {
            let word = Word {
                replica: "a".into(),
                beat,
                alone,
                ..Word::default()
            };
            format!("{} run {}", s * SECOND, word.to_text())
        };
        let new = |text: String, s: i64, before: Option<&Seen>| {
            Seen::new(text, at(s).0, at(s).1, Some(at(s - 1).0), before)
        };
        let later = new(text(100, 9, true), 101, None);
        let older = new(text(99, 8, false), 104, Some(&later));
        assert!(
            older.is_silent(at(104).0, TTL) && older.lease.as_ref().is_some_and(|l| l.word.alone)
        );
        let next = new(text(104, 10, false), 105, Some(&older));
        assert!(!next.is_silent(at(106).0, TTL));
    }

    #[test]
    fn every_number_is_read_within_some_heartbeats_and_the_likely_ones_with_each() {
        assert_eq!(to_read(3, None, 0).len(), 1_000);
        for (own, highest) in [
            (1, None),
            (1, Some(2)),
            (100, Some(90)),
            (3, Some(999)),
            (1_000, Some(0)),
        ] {
            let mut all = BTreeSet::new();
            for beat in 1..=10 {
                let read = to_read(own, highest, beat);
                let likely = own
                    .max(64)
                    .max(highest.map_or(0, |h| (2 * h + 2).min(1_000)));
                assert!((0..likely).all(|n| read.contains(&n)));
                assert!(read.len() <= likely as usize + 100);
                all.extend(read);
            }
            assert_eq!(all.len(), 1_000, "{own} {highest:?}");
        }
    }

    proptest! {
        #[test]
        fn no_row_makes_the_reader_panic(text in ".{0,200}", json in "[0-9]{0,19} x \\{.{0,80}\\}") {
            let _ = (Lease::parse(&text), Lease::parse(&json));
        }
    }
}

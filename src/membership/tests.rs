//! Replicas that hear of each other, over a table that keeps what they write.

use std::{collections::BTreeMap, time::Duration};

use super::*;
use crate::pacing::{
    share::{NOTICED_AFTER, Terms},
    time::MILLISECOND,
};

fn settings(replica: &str, max_replicas: u32) -> config::Store {
    config::Store {
        url: config::Secret::new("postgres://model"),
        table: "paceline".to_owned(),
        key_prefix: "p:".to_owned(),
        max_replicas,
        replica: replica.to_owned(),
        foreign_fetchers: 0,
        lease_ttl: Duration::from_secs(300),
    }
}

fn replica(name: &str, max_replicas: u32, rate: f64) -> Membership {
    let ceilings = [("d".to_owned(), rate)].into();
    Membership::new(&settings(name, max_replicas), ceilings, LocalTime(0))
}

#[derive(Default)]
struct Table(BTreeMap<String, String>);

impl Table {
    /// One round of heartbeats, as the keeper makes them; both clocks show `now`.
    fn beat(&mut self, of: &Membership, now: LocalTime) {
        for _ in 0..5 {
            let pulse = of.pulse(now, now.plus(SECOND), None);
            let rows = self.0.iter().filter(|(key, _)| pulse.keys.contains(key));
            let rows = rows.map(|(k, v)| (k.clone(), v.clone())).collect();
            let mut written = false;
            if let Some(key) = &pulse.key {
                written = self.0.get(key).is_none_or(|held| {
                    held.split(' ').nth(1) == Some(&pulse.incarnation)
                        || pulse.seen.as_ref() == Some(held)
                });
                if written {
                    let text = format!("{} {} {}", now.0, pulse.incarnation, pulse.word);
                    self.0.insert(key.clone(), text);
                }
            }
            if !of.heard(&pulse, now, StoreTime(now.0), written, rows) {
                break;
            }
        }
    }
}

fn at(milliseconds: i64) -> LocalTime {
    LocalTime(1_000 * SECOND + milliseconds * MILLISECOND)
}

fn shared(silent: u32, of: u32) -> Terms {
    Terms::Shared { silent, of }
}

#[test]
fn a_cursor_that_nobody_tries_any_more_is_not_told_of() {
    let (mut table, a, b) = (Table::default(), replica("a", 3, 7.0), replica("b", 3, 7.0));
    let mut round = |ms: i64, tried: bool| {
        if tried {
            a.reserved("d", false, at(ms));
        }
        table.beat(&a, at(ms));
        table.beat(&b, at(ms + 10));
        (a.terms("d", at(ms + 20)), b.terms("d", at(ms + 20)))
    };
    assert_eq!(round(0, false), (shared(0, 3), shared(0, 3)));
    for n in 1..=7 {
        round(n * 1_000, true);
    }
    let (of_a, of_b) = round(8_000, true);
    assert!(matches!(of_a, Terms::Alone(_)), "{of_a:?}");
    assert_eq!(of_b, shared(1, 3));
    assert_eq!(round(10_000, false).1, shared(1, 3));
    assert_eq!(round(11_000, false), (shared(0, 3), shared(0, 3)));
}

#[test]
fn more_cursors_than_can_be_named_are_told_of_as_one_and_none_waits_for_ever() {
    let (mut table, a, b) = (Table::default(), replica("a", 3, 7.0), replica("b", 3, 7.0));
    let host = |n: i64| format!("d/{n:0200}.test");
    for n in 0..9 {
        for host in (0..200).map(host).filter(|_| n > 0) {
            a.reserved(&host, false, at(n * 1_000));
        }
        table.beat(&a, at(n * 1_000));
        table.beat(&b, at(n * 1_000 + 10));
    }
    let longest = table.0.values().map(String::len).max();
    assert!(longest.is_some_and(|l| l < 1_000), "{longest:?}");
    for n in [0, 64, 65, 199] {
        let terms = a.terms(&host(n), at(8_020));
        assert!(matches!(terms, Terms::Alone(_)), "{n}: {terms:?}");
        assert_eq!(b.terms(&host(n), at(8_020)), shared(1, 3));
    }
    // They are given up: all is as before.
    for n in 12..16 {
        table.beat(&a, at(n * 1_000));
        table.beat(&b, at(n * 1_000 + 10));
    }
    assert_eq!(a.terms(&host(0), at(15_020)), shared(0, 3));
    assert_eq!(b.terms(&host(0), at(15_020)), shared(0, 3));
}

#[test]
fn the_largest_number_and_the_smallest_rate_are_seen_by_who_may_take_few_numbers_itself() {
    let (mut table, a) = (Table::default(), replica("a", 1, 700.0));
    let others: Vec<_> = ["b", "c"].map(|n| replica(n, 5, 0.7)).into();
    for n in 0..3 {
        table.beat(&a, at(n * 1_000));
        others
            .iter()
            .for_each(|o| table.beat(o, at(n * 1_000 + 10)));
    }
    assert_eq!(a.terms("d", at(2_020)), shared(0, 5));
    let agreement = a.agreement("d", 700.0, at(2_020));
    assert_eq!((agreement.ceiling, agreement.differ), (0.7, true));
    assert_eq!(agreement.by.map(|m| m.replica), Some("b".to_owned()));
    // Cut off, it takes a fifth; and so it does after as long as it takes for leases to lapse.
    a.lost(at(3_000));
    for later in [NOTICED_AFTER, 1_000 * SECOND] {
        let terms = a.terms("d", at(2_000).plus(later));
        assert!(matches!(terms, Terms::Alone(s) if s.of == 5), "{terms:?}");
        assert_eq!(a.agreed("d", 700.0, at(2_000).plus(later)).0, 0.7);
    }
}

#[test]
fn one_that_has_not_heard_of_a_larger_number_is_left_the_larger_share() {
    let (mut table, a, b) = (Table::default(), replica("a", 2, 7.0), replica("b", 4, 7.0));
    table.beat(&a, at(0));
    // It is cut off before the other begins.
    for n in 5..8 {
        table.beat(&b, at(n * 1_000));
    }
    assert_eq!(b.terms("d", at(7_010)), shared(2, 4));
    let (whole, b) = (replica("c", 1, 7.0), replica("b", 4, 7.0));
    let mut table = Table::default();
    table.beat(&whole, at(0));
    for n in 5..8 {
        table.beat(&b, at(n * 1_000));
    }
    assert_eq!(b.terms("d", at(7_010)), Terms::Nothing);
}

#[test]
fn rates_that_are_written_in_different_ways_are_one() {
    let (mut table, a) = (Table::default(), replica("a", 3, 7.0 / 60.0));
    let b = replica("b", 3, 7.0 / 60.0 * (1.0 + f64::EPSILON));
    let c = replica("c", 3, 6.99 / 60.0);
    for n in 0..2 {
        table.beat(&a, at(n * 1_000));
        table.beat(&b, at(n * 1_000 + 10));
    }
    assert_eq!(a.agreed("d", 7.0 / 60.0, at(1_020)), (7.0 / 60.0, false));
    table.beat(&c, at(2_000));
    table.beat(&a, at(2_010));
    assert!(a.agreed("d", 7.0 / 60.0, at(2_020)).1);
    assert_eq!(
        a.agreement("d", 7.0 / 60.0, at(2_020)).interval,
        8_583_690_988
    );
}

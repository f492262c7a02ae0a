use proptest::prelude::*;

use super::*;
use crate::pacing::{
    throttle::{CAP, Cause},
    time::SECOND,
};

const RULES: Rules = Rules {
    recovery_after: 20,
    lockout_after: 3,
    lockout_for: 900 * SECOND,
    retry_after_cap: 600 * SECOND,
};

fn at(now: Nanos) -> Moment {
    Moment {
        now: LocalTime(now),
        offset: Some(1_700_000_000 * SECOND),
    }
}

/// The row that all share.
#[derive(Default)]
struct Row(Option<String>);

impl Row {
    /// Lets a replica write what it has to, until the row says it or the store gives up.
    fn settle(&mut self, tracker: &mut Tracker, at: Moment) {
        for _ in 0..4 {
            let Some(write) = tracker.write(at) else {
                return;
            };
            if write.expected == self.0 || self.0.is_none() {
                self.0 = Some(write.text.clone());
                tracker.wrote(&write, true);
            } else {
                tracker.seen(at, self.0.as_deref());
            }
        }
        panic!("it never settles");
    }
}

const fn throttled(episode: u64) -> Event {
    Event::Throttled {
        episode,
        retry_after: None,
    }
}

#[test]
fn at_full_pace_a_clean_answer_leads_to_no_write() {
    let mut t = Tracker::new(RULES);
    for n in 0..1_000 {
        assert!(!t.apply(at(n * SECOND), Event::Clean { episode: 0 }));
        assert_eq!(t.write(at(n * SECOND)), None);
    }
    assert_eq!(t.writes_at(), None);
}

#[test]
fn protests_spread_over_two_replicas_widen_once() {
    let (mut a, mut b, mut row) = (Tracker::new(RULES), Tracker::new(RULES), Row::default());
    for _ in 0..4 {
        a.apply(at(0), throttled(0));
        b.apply(at(0), throttled(0));
    }
    row.settle(&mut a, at(1));
    row.settle(&mut b, at(2));
    a.seen(at(3), row.0.as_deref());
    for t in [&a, &b] {
        assert_eq!((t.regime(LocalTime(3)).multiplier, t.episode()), (2, 1));
        assert_eq!(
            (t.row_word(), t.row_episode(), t.is_settled()),
            ("2", 1, true)
        );
    }
}

#[test]
fn clean_answers_of_two_replicas_count_together_and_are_told_in_portions() {
    let (mut a, mut b, mut row) = (Tracker::new(RULES), Tracker::new(RULES), Row::default());
    a.apply(at(0), throttled(0));
    row.settle(&mut a, at(0));
    b.seen(at(0), row.0.as_deref());
    let mut writes = 0;
    for n in 1..=10 {
        let now = at(n * 100 * MILLISECOND);
        for t in [&mut a, &mut b] {
            t.seen(now, row.0.as_deref());
            t.apply(now, Event::Clean { episode: 1 });
            writes += usize::from(t.write(now).is_some());
            row.settle(t, now);
        }
    }
    a.seen(at(2 * SECOND), row.0.as_deref());
    b.seen(at(2 * SECOND), row.0.as_deref());
    assert_eq!(
        (
            a.regime(LocalTime(2 * SECOND)),
            b.regime(LocalTime(2 * SECOND))
        ),
        (Regime::default(), Regime::default())
    );
    assert!(writes <= 10, "{writes} writes for twenty answers");
}

#[test]
fn answers_to_requests_of_the_old_pace_do_not_count() {
    let mut t = Tracker::new(RULES);
    t.apply(at(0), throttled(0));
    for n in 0..100 {
        t.apply(at(n), Event::Clean { episode: 0 });
    }
    assert_eq!(t.regime(LocalTime(100)).multiplier, 2);
}

#[test]
fn a_row_that_vanished_is_put_back_while_it_says_anything() {
    let (mut t, mut row) = (Tracker::new(RULES), Row::default());
    for url in 0..3 {
        t.apply(at(0), Event::Forbidden { url, status: 403 });
    }
    row.settle(&mut t, at(0));
    for lost in [None, Some("garbage".to_owned()), Some("1 {}".to_owned())] {
        row.0 = lost;
        t.seen(at(SECOND), row.0.as_deref());
        row.settle(&mut t, at(SECOND));
        let put_back = row
            .0
            .clone()
            .and_then(|text| Throttle::parse(&text, at(SECOND)));
        let halt = put_back.and_then(|t| t.regime(LocalTime(SECOND)).halt);
        assert_eq!(halt.map(|h| h.cause), Some(Cause::Lockout(403)));
    }
    // At full pace there is nothing to put back.
    t.apply(at(2 * SECOND), Event::Unlock);
    row.settle(&mut t, at(2 * SECOND));
    t.seen(at(3 * SECOND), None);
    assert_eq!(t.write(at(3 * SECOND)), None);
}

#[test]
fn a_protest_counts_although_the_row_was_lost_in_calm_times() {
    let lost = |row: &mut Row, old: &Option<String>, how| match how {
        0 => row.0 = None,
        1 => row.0 = old.clone(),
        _ => row.0 = Some("1 junk".to_owned()),
    };
    for how in 0..3 {
        let (mut t, mut row) = (Tracker::new(RULES), Row::default());
        t.apply(at(0), Event::Pause(1));
        t.lapse(at(1));
        row.settle(&mut t, at(1));
        let old = row.0.clone();
        for (n, episode) in [0, 1].into_iter().enumerate() {
            t.apply(at(2 + n as Nanos), throttled(episode));
            row.settle(&mut t, at(2 + n as Nanos));
        }
        for n in 0..40 {
            t.apply(at(SECOND + n), Event::Clean { episode: 2 });
        }
        row.settle(&mut t, at(2 * SECOND));
        assert_eq!(t.regime(LocalTime(2 * SECOND)), Regime::default());
        lost(&mut row, &old, how);
        t.seen(at(3 * SECOND), row.0.as_deref());
        row.settle(&mut t, at(3 * SECOND));
        // The next slot is granted by what is in the row now.
        let granted_in = t.row_episode();
        assert!(t.apply(at(4 * SECOND), throttled(granted_in)), "case {how}");
        assert_eq!(t.regime(LocalTime(4 * SECOND)).multiplier, 2, "case {how}");
    }
}

#[test]
fn a_cursor_that_could_not_be_moved_is_moved_later() {
    let mut t = Tracker::new(RULES);
    t.apply(at(0), Event::Pause(60 * SECOND));
    let write = t.write(at(0)).expect("a write");
    t.wrote(&write, false);
    let again = t.write(at(1)).expect("the same once more");
    assert_eq!(
        (again.expected, again.moves_cursor),
        (Some(write.text), write.moves_cursor)
    );
}

#[test]
fn garbage_that_claims_a_pace_is_replaced() {
    let (mut t, mut row) = (Tracker::new(RULES), Row(Some("8 nonsense".to_owned())));
    t.seen(at(0), row.0.as_deref());
    assert_eq!(t.row_word(), "8");
    row.settle(&mut t, at(0));
    assert_eq!((t.row_word(), t.regime(LocalTime(0)).multiplier), ("1", 1));
}

#[test]
fn a_stop_that_is_over_is_taken_out_of_the_row() {
    let (mut a, mut row) = (Tracker::new(RULES), Row::default());
    a.apply(at(0), Event::Pause(SECOND));
    row.settle(&mut a, at(0));
    assert!(a.row_word().starts_with("0."));
    // By a replica, too, that knew nothing of it.
    let mut b = Tracker::new(RULES);
    b.seen(at(2 * SECOND), row.0.as_deref());
    assert_eq!(b.halt(LocalTime(2 * SECOND)), None);
    row.settle(&mut b, at(2 * SECOND));
    assert_eq!(b.row_word(), "1");
    a.lapse(at(3 * SECOND));
    a.seen(at(3 * SECOND), row.0.as_deref());
    row.settle(&mut a, at(3 * SECOND));
    assert!(a.is_settled() && a.regime(LocalTime(3 * SECOND)) == Regime::default());
}

#[test]
fn what_was_learnt_without_the_store_is_merged_on_return() {
    let (mut cut_off, mut other, mut row) =
        (Tracker::new(RULES), Tracker::new(RULES), Row::default());
    // Both widen, each for itself; one of them twice, the other is paused besides.
    cut_off.apply(at(0), throttled(0));
    cut_off.apply(at(1), throttled(1));
    other.apply(at(2), throttled(0));
    other.apply(at(3), Event::Pause(60 * SECOND));
    row.settle(&mut other, at(4));
    cut_off.seen(at(5), row.0.as_deref());
    row.settle(&mut cut_off, at(5));
    other.seen(at(6), row.0.as_deref());
    for t in [&cut_off, &other] {
        let regime = t.regime(LocalTime(6));
        assert_eq!(
            (regime.multiplier, regime.halt.map(|h| h.cause)),
            (4, Some(Cause::Pause))
        );
    }
}

#[test]
fn a_pause_that_is_over_here_does_not_end_one_that_was_made_longer_elsewhere() {
    let (mut a, mut b, mut row) = (Tracker::new(RULES), Tracker::new(RULES), Row::default());
    let wait = |span| Event::Throttled {
        episode: 0,
        retry_after: Some(span),
    };
    a.apply(at(0), wait(SECOND));
    row.settle(&mut a, at(0));
    b.seen(at(1), row.0.as_deref());
    b.apply(at(1), wait(9 * SECOND));
    row.settle(&mut b, at(1));
    // Over, by all that the first one knows.
    a.lapse(at(2 * SECOND));
    row.settle(&mut a, at(2 * SECOND));
    let halt = a.halt(LocalTime(2 * SECOND)).expect("the longer pause");
    assert_eq!(halt.until, LocalTime(9 * SECOND).plus(1));
}

#[test]
fn an_older_row_of_a_restored_store_does_not_undo_what_is_known() {
    let (mut t, mut row) = (Tracker::new(RULES), Row::default());
    t.apply(at(0), throttled(0));
    row.settle(&mut t, at(0));
    let backup = row.0.clone();
    t.apply(at(SECOND), throttled(1));
    row.settle(&mut t, at(SECOND));
    row.0 = backup;
    t.seen(at(2 * SECOND), row.0.as_deref());
    row.settle(&mut t, at(2 * SECOND));
    assert_eq!(
        (t.row_word(), t.regime(LocalTime(2 * SECOND)).multiplier),
        ("4", 4)
    );
}

#[test]
fn a_pause_moves_the_cursor_and_its_end_moves_it_back() {
    let mut t = Tracker::new(RULES);
    t.apply(at(0), Event::Pause(60 * SECOND));
    let write = t.write(at(0)).expect("a write");
    let stop = write.moves_cursor.expect("the cursor is moved");
    assert_eq!(stop.written, Some((1_700_000_000 + 60) * SECOND));
    t.wrote(&write, true);
    t.apply(at(SECOND), Event::Resume);
    let write = t.write(at(SECOND)).expect("a write");
    assert_eq!((write.moves_cursor, write.frees_cursor), (None, Some(stop)));
}

proptest! {
    /// Replicas that see the row now and then, lose it, or are cut off, and whose answers come in any order: once they
    /// have talked, all go by the same, and the row holds it.
    #[test]
    fn in_the_end_all_go_by_the_same(
        history in prop::collection::vec((0usize..4, 0u8..9, 0u64..4, 0..2 * SECOND), 1..120),
    ) {
        let mut all: Vec<Tracker> = (0..4).map(|_| Tracker::new(RULES)).collect();
        let mut row = Row::default();
        let mut now = 0;
        for (who, what, arg, pause) in history {
            now += pause;
            let t = &mut all[who];
            let episode = t.episode().saturating_sub(arg);
            match what {
                0 => { t.apply(at(now), throttled(episode)); }
                1 => { t.apply(at(now), Event::Throttled { episode, retry_after: Some(arg as Nanos * SECOND) }); }
                2 => { t.apply(at(now), Event::Forbidden { url: arg, status: 403 }); }
                3 => { (0..arg * 9).for_each(|_| { t.apply(at(now), Event::Clean { episode: t.episode() }); }); }
                4 => { t.apply(at(now), if arg == 0 { Event::Resume } else { Event::Unlock }); }
                5 => { t.apply(at(now), Event::Pause(arg as Nanos * SECOND)); }
                6 => row.0 = None,
                _ => { t.seen(at(now), row.0.as_deref()); row.settle(t, at(now)); }
            }
            prop_assert!((1..=CAP).contains(&all[who].regime(LocalTime(now)).multiplier));
        }
        for _ in 0..3 {
            for t in &mut all {
                t.lapse(at(now));
                t.seen(at(now), row.0.as_deref());
                row.settle(t, at(now));
            }
        }
        let regime = all[0].regime(LocalTime(now));
        for t in &all {
            prop_assert_eq!(t.regime(LocalTime(now)), regime);
            prop_assert!(t.is_settled());
        }
    }
}

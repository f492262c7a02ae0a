use proptest::prelude::*;

use super::*;
use crate::pacing::{
    throttle::{CAP, Cause, Regime},
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
    /// Makes a write on its condition, and says what came of it.
    fn write(&mut self, write: &Write) -> Result<(), Option<String>> {
        if self.0.is_none() || write.expected == self.0 {
            self.0 = Some(write.text.clone());
            return Ok(());
        }
        Err(self.0.clone())
    }

    /// Lets a replica write what it has to, until the row says it or the store gives up.
    fn settle(&mut self, tracker: &mut Tracker, mut at: Moment) {
        for _ in 0..4 {
            if !tracker.is_settled() {
                at.now = at.now.max(tracker.writes_at().expect("a write is due"));
            }
            let Some(write) = tracker.write(at) else {
                return;
            };
            match self.write(&write) {
                Ok(()) => tracker.wrote(at, &write, true),
                Err(text) => tracker.met(at, text.as_deref()),
            }
        }
        panic!("it never settles");
    }

    fn says(&self, now: Nanos) -> Throttle {
        let text = self.0.as_deref().expect("a row");
        Throttle::parse(text, at(now)).expect("a state")
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
            if let Some(write) = t.write(now) {
                writes += 1;
                assert_eq!(row.write(&write), Ok(()));
                t.wrote(now, &write, true);
            }
        }
    }
    row.settle(&mut a, at(2 * SECOND));
    row.settle(&mut b, at(2 * SECOND));
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
            row.settle(&mut t, at(SECOND + n));
        }
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
    t.wrote(at(1), &write, false);
    assert_eq!(t.write(at(2)), None, "at once");
    let again = t.write(at(SECOND)).expect("the same once more");
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
fn an_older_row_that_says_all_that_is_to_be_told_is_gone_by() {
    let (mut t, mut row) = (Tracker::new(RULES), Row::default());
    t.apply(at(0), throttled(0));
    row.settle(&mut t, at(0));
    // A newer row was read and met, and is gone; then comes the one of before, restored.
    (t.row, t.newest, t.dirty) = (None, t.newest + 1, true);
    t.seen(at(3 * SECOND), row.0.as_deref());
    row.settle(&mut t, at(3 * SECOND));
    assert!(t.is_settled());
}

/// Whoever tells at the same time as others tells again at once, and not with them again the next time.
#[test]
fn replicas_that_tell_at_the_same_time_do_not_go_on_meeting() {
    let mut row = Row::default();
    let mut all: Vec<_> = (0..3).map(|_| Tracker::new(RULES)).collect();
    all[0].apply(at(0), throttled(0));
    row.settle(&mut all[0], at(0));
    for t in &mut all {
        t.seen(at(0), row.0.as_deref());
        t.apply(at(0), Event::Clean { episode: 1 });
    }
    let round_trip = 20 * MILLISECOND;
    for round in 1..=3 {
        let now = SECOND + round * round_trip;
        let writes: Vec<_> = all.iter_mut().map(|t| t.write(at(now))).collect();
        let told: Vec<_> = writes.iter().flatten().map(|w| row.write(w)).collect();
        let mut told = told.into_iter();
        for (t, write) in all.iter_mut().zip(writes) {
            match write.map(|write| (told.next().expect("an outcome"), write)) {
                None => {}
                Some((Ok(()), write)) => t.wrote(at(now + round_trip / 2), &write, true),
                Some((Err(text), _)) => t.met(at(now + round_trip / 2), text.as_deref()),
            }
        }
    }
    assert_eq!(row.says(SECOND).clean, 3);
}

#[test]
fn a_pause_moves_the_cursor_and_its_end_moves_it_back() {
    let mut t = Tracker::new(RULES);
    t.apply(at(0), Event::Pause(60 * SECOND));
    let write = t.write(at(0)).expect("a write");
    let stop = write.moves_cursor.expect("the cursor is moved");
    assert_eq!(stop.written, Some((1_700_000_000 + 60) * SECOND));
    t.wrote(at(1), &write, true);
    t.apply(at(SECOND), Event::Resume);
    let write = t.write(at(SECOND)).expect("a write");
    assert_eq!((write.moves_cursor, write.frees_cursor), (None, Some(stop)));
}

/// Replicas that hear `answers` clean answers in turn, at multiplier 2, and whose writes and replies take a while, or are lost so
/// often in a thousand. Returns what the row says once all is told, and how many writes met another row.
fn tell(replicas: usize, answers: u32, lost: u64, seed: u64) -> (Throttle, u32) {
    let mut state = seed | 1;
    let mut random = move |n: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % n
    };
    let rules = Rules {
        recovery_after: 100,
        ..RULES
    };
    let mut row = Row::default();
    let mut all: Vec<_> = (0..replicas).map(|_| Tracker::new(rules)).collect();
    all[0].apply(at(0), throttled(0));
    row.settle(&mut all[0], at(0));
    for t in &mut all {
        t.seen(at(0), row.0.as_deref());
    }
    // A write under way: when it arrives, what came of it, and when that is known.
    type Outcome = Option<Result<(), Option<String>>>;
    let mut calls: Vec<Option<(Nanos, Write, Outcome)>> = vec![None; replicas];
    let (mut heard, mut conflicts) = (0, 0);
    for ms in 1..(answers as Nanos * 10 + 3_000) {
        let now = ms * MILLISECOND;
        if ms % 10 == 0 && heard < answers {
            heard += 1;
            let who = random(replicas as u64) as usize;
            all[who].apply(at(now), Event::Clean { episode: 1 });
        }
        for (t, call) in all.iter_mut().zip(&mut calls) {
            match call.take() {
                Some((due, write, None)) if due <= now => {
                    let outcome = row.write(&write);
                    let back = now + random(30) as Nanos * MILLISECOND;
                    if random(1_000) < lost {
                        t.unanswered(false);
                    } else {
                        *call = Some((back, write, Some(outcome)));
                    }
                }
                Some((due, write, Some(outcome))) if due <= now => match outcome {
                    Ok(()) => t.wrote(at(now), &write, true),
                    Err(text) => {
                        conflicts += 1;
                        t.met(at(now), text.as_deref());
                    }
                },
                Some(waits) => *call = Some(waits),
                None => {
                    // Reservations bring the row now and then.
                    if random(50) == 0 {
                        t.seen(at(now), row.0.as_deref());
                    }
                    let arrives = now + random(30) as Nanos * MILLISECOND;
                    *call = t.write(at(now)).map(|write| (arrives, write, None));
                }
            }
        }
    }
    (row.says(9 * SECOND), conflicts)
}

#[test]
fn a_recovery_takes_as_many_clean_answers_by_many_replicas_as_by_one() {
    for replicas in [1, 3, 8] {
        let mut met = 0;
        for seed in 1..20 {
            let (one_less, _) = tell(replicas, 99, 0, seed);
            assert_eq!(
                (one_less.multiplier(), one_less.clean),
                (2, 99),
                "{replicas} replicas"
            );
            let (row, conflicts) = tell(replicas, 100, 0, seed);
            assert_eq!(
                row.multiplier(),
                1,
                "{replicas} replicas, {} of 100 counted",
                row.clean
            );
            met += conflicts;
        }
        assert!(
            replicas == 1 || met > 50,
            "only {met} writes met another row"
        );
    }
}

#[test]
fn no_answer_counts_twice_however_many_replies_are_lost() {
    for seed in 1..40 {
        let (row, _) = tell(3, 99, 300, seed);
        assert_eq!(row.multiplier(), 2);
    }
}

#[test]
fn a_count_that_meets_a_change_of_pace_is_not_added_to_another_pace() {
    let (mut a, mut b, mut row) = (Tracker::new(RULES), Tracker::new(RULES), Row::default());
    a.apply(at(0), throttled(0));
    row.settle(&mut a, at(0));
    b.seen(at(0), row.0.as_deref());
    (0..19).for_each(|_| {
        b.apply(at(SECOND), Event::Clean { episode: 1 });
    });
    let write = b.write(at(SECOND)).expect("a count");
    a.apply(at(SECOND), throttled(1));
    row.settle(&mut a, at(SECOND));
    let met = row.write(&write).expect_err("another row");
    b.met(at(SECOND), met.as_deref());
    row.settle(&mut b, at(2 * SECOND));
    assert_eq!(
        (
            row.says(2 * SECOND).multiplier(),
            row.says(2 * SECOND).clean
        ),
        (4, 0)
    );
}

#[test]
fn a_stop_told_late_does_not_undo_a_recovery() {
    let (mut a, mut b, mut row) = (Tracker::new(RULES), Tracker::new(RULES), Row::default());
    a.apply(at(0), throttled(0));
    row.settle(&mut a, at(0));
    b.seen(at(0), row.0.as_deref());
    (0..20).for_each(|_| {
        a.apply(at(SECOND), Event::Clean { episode: 1 });
    });
    row.settle(&mut a, at(SECOND));
    assert_eq!(row.says(SECOND).multiplier(), 1);
    // It does not know of that yet.
    b.apply(
        at(SECOND),
        Event::Forbidden {
            url: 1,
            status: 403,
        },
    );
    row.settle(&mut b, at(SECOND));
    assert_eq!(
        (
            row.says(SECOND).multiplier(),
            row.says(SECOND).evidence.len()
        ),
        (1, 1)
    );
}

#[test]
fn a_second_shorter_pause_is_in_force_everywhere_and_moves_the_cursor_back() {
    for informed in [true, false] {
        let (mut a, mut b, mut row) = (Tracker::new(RULES), Tracker::new(RULES), Row::default());
        a.apply(at(0), Event::Pause(50 * SECOND));
        let long = a
            .write(at(0))
            .expect("a write")
            .moves_cursor
            .expect("a stop");
        row.settle(&mut a, at(SECOND));
        if informed {
            b.seen(at(SECOND), row.0.as_deref());
        }
        b.apply(at(2 * SECOND), Event::Pause(4 * SECOND));
        let mut write = b.write(at(2 * SECOND)).expect("a write");
        if let Err(text) = row.write(&write) {
            b.met(at(2 * SECOND), text.as_deref());
            write = b.write(at(2 * SECOND)).expect("a write");
            assert_eq!(row.write(&write), Ok(()));
        }
        assert_eq!(write.frees_cursor.and_then(|s| s.written), long.written);
        assert_eq!(
            write.moves_cursor.map(|s| s.until),
            Some(LocalTime(6 * SECOND))
        );
        b.wrote(at(2 * SECOND), &write, true);
        a.seen(at(3 * SECOND), row.0.as_deref());
        for t in [&a, &b] {
            assert_eq!(
                t.halt(LocalTime(3 * SECOND)).map(|h| h.until),
                Some(LocalTime(6 * SECOND))
            );
            assert!(t.is_settled());
        }
    }
}

#[test]
fn a_pause_during_a_hold_leaves_the_hold_as_it_is() {
    let (mut t, mut row) = (Tracker::new(RULES), Row::default());
    t.apply(
        at(0),
        Event::Throttled {
            episode: 0,
            retry_after: Some(50 * SECOND),
        },
    );
    row.settle(&mut t, at(0));
    t.apply(at(SECOND), Event::Pause(4 * SECOND));
    let write = t.write(at(SECOND)).expect("a write");
    assert_eq!(
        write.moves_cursor.map(|s| s.until),
        Some(LocalTime(50 * SECOND))
    );
    row.settle(&mut t, at(SECOND));
    let halt = |now: Nanos| {
        t.halt(LocalTime(now))
            .map(|h| (h.cause, h.until.0 / SECOND))
    };
    assert_eq!(halt(2 * SECOND), Some((Cause::Pause, 5)));
    assert_eq!(halt(6 * SECOND), Some((Cause::Hold, 50)));
}

#[test]
fn a_resume_counts_although_another_replica_has_written_meanwhile() {
    let (mut a, mut b, mut row) = (Tracker::new(RULES), Tracker::new(RULES), Row::default());
    for episode in 0..4 {
        a.apply(
            at(0),
            Event::Throttled {
                episode,
                retry_after: Some(9 * SECOND),
            },
        );
    }
    row.settle(&mut a, at(0));
    b.seen(at(0), row.0.as_deref());
    assert!(a.apply(at(SECOND), Event::Resume));
    let write = a.write(at(SECOND)).expect("a write");
    b.apply(at(SECOND), Event::Clean { episode: 4 });
    row.settle(&mut b, at(SECOND));
    let met = row.write(&write).expect_err("another row");
    a.met(at(SECOND), met.as_deref());
    row.settle(&mut a, at(SECOND));
    b.seen(at(SECOND), row.0.as_deref());
    for t in [&a, &b] {
        assert_eq!(t.regime(LocalTime(SECOND)), Regime::default());
    }
}

#[test]
fn an_order_given_before_the_store_was_ever_reached_is_the_later_one() {
    let (mut a, mut b, mut row) = (Tracker::new(RULES), Tracker::new(RULES), Row::default());
    a.apply(at(0), Event::Pause(500 * SECOND));
    row.settle(&mut a, at(0));
    let unknown = Moment {
        offset: None,
        ..at(2 * SECOND)
    };
    b.apply(unknown, Event::Pause(40 * SECOND));
    assert_eq!(
        b.halt(unknown.now).map(|h| h.until),
        Some(LocalTime(42 * SECOND))
    );
    b.seen(at(3 * SECOND), row.0.as_deref());
    let write = b.write(at(3 * SECOND)).expect("a write");
    let there = (1_700_000_000 + 42) * SECOND;
    assert_eq!(write.moves_cursor.and_then(|s| s.written), Some(there));
    row.settle(&mut b, at(4 * SECOND));
    a.seen(at(4 * SECOND), row.0.as_deref());
    assert_eq!(
        a.halt(LocalTime(4 * SECOND)).map(|h| h.until),
        Some(LocalTime(42 * SECOND))
    );
}

#[test]
fn the_cursor_follows_although_the_reply_to_the_write_was_lost() {
    let (mut t, mut row) = (Tracker::new(RULES), Row::default());
    t.apply(at(0), Event::Pause(60 * SECOND));
    let write = t.write(at(0)).expect("a write");
    assert_eq!(row.write(&write), Ok(()));
    t.unanswered(false);
    t.seen(at(SECOND), row.0.as_deref());
    let again = t.write(at(SECOND)).expect("the cursor was not moved");
    assert_eq!(
        (again.text, again.moves_cursor.and_then(|s| s.written)),
        (write.text, write.moves_cursor.and_then(|s| s.written))
    );
}

#[test]
fn whatever_the_row_does_it_is_not_written_all_the_time() {
    type Harm = fn(&str, i64) -> Option<String>;
    let harms: [Harm; 4] = [
        |_, _| None,
        |_, _| Some("garbage".to_owned()),
        |_, n| Some(format!("{n} garbage")),
        |text, _| Some(text.replace("\"clean\":", "\"clean\":7")),
    ];
    for (kind, harm) in harms.into_iter().enumerate() {
        // Written as it should be and changed then, or never written at all.
        for made in [true, false] {
            let mut t = Tracker::new(RULES);
            t.apply(at(0), throttled(0));
            let mut writes = 0;
            for n in 0..10_000 {
                let now = at(n * MILLISECOND);
                t.apply(
                    now,
                    Event::Clean {
                        episode: t.episode(),
                    },
                );
                if let Some(write) = t.write(now) {
                    writes += 1;
                    let held = harm(&write.text, n);
                    if made {
                        t.wrote(now, &write, true);
                        t.seen(now, held.as_deref());
                    } else {
                        t.met(now, held.as_deref());
                    }
                }
            }
            assert!(
                writes <= 120,
                "kind {kind}, made {made}: {writes} writes in ten seconds"
            );
        }
    }
}

/// An order, or what passes between orders.
#[derive(Clone, Debug)]
enum Order {
    Pause(Nanos),
    Resume,
    Talk,
}

fn order() -> impl Strategy<Value = Order> {
    prop_oneof![
        (100..900i64).prop_map(|s| Order::Pause(s * SECOND)),
        Just(Order::Resume),
        Just(Order::Talk),
    ]
}

proptest! {
    /// Whoever is told what, and whoever knows of it: in the end the last order is in force everywhere.
    #[test]
    fn the_last_of_an_operators_orders_is_in_force_everywhere(
        history in prop::collection::vec((0usize..3, order(), MILLISECOND..2 * SECOND), 1..40),
    ) {
        let mut all: Vec<Tracker> = (0..3).map(|_| Tracker::new(RULES)).collect();
        let (mut row, mut now, mut last) = (Row::default(), 0, None);
        let talk = |all: &mut [Tracker], row: &mut Row, now: Nanos| {
            for t in all {
                t.seen(at(now), row.0.as_deref());
                row.settle(t, at(now));
            }
        };
        for (who, what, pause) in history {
            now += pause;
            match what {
                Order::Pause(span) => {
                    all[who].apply(at(now), Event::Pause(span));
                    last = Some(LocalTime(now + span));
                }
                // An order ends when the others can know of it.
                Order::Resume => {
                    (0..2).for_each(|_| talk(&mut all, &mut row, now));
                    now += MILLISECOND;
                    all[who].apply(at(now), Event::Resume);
                    last = None;
                }
                Order::Talk => {
                    all[who].seen(at(now), row.0.as_deref());
                    row.settle(&mut all[who], at(now));
                }
            }
        }
        (0..3).for_each(|_| talk(&mut all, &mut row, now));
        for t in &all {
            prop_assert_eq!(t.halt(LocalTime(now)).map(|h| h.until), last.filter(|l| l.0 > now));
        }
    }

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

//! Calls as links and clocks of all kinds would make them.

use proptest::prelude::*;

use super::*;
use crate::pacing::time::MILLISECOND;

/// The store's clock: `per_million` faster than ours from the start.
fn store(t: LocalTime, offset: Nanos, per_million: i64) -> StoreTime {
    let gained = (i128::from(t.0) * i128::from(per_million)).div_euclid(1_000_000);
    StoreTime(100 * SECOND + t.0 + gained as i64 + offset)
}

fn at(s: i64) -> LocalTime {
    LocalTime(s * SECOND)
}

/// Calls of `there` and `back`, one each `pause`, from one second on for `span`; the bounds, and when the last was answered.
fn called(
    (there, back): (Nanos, Nanos),
    pause: Nanos,
    span: Nanos,
    clock: impl Fn(LocalTime) -> StoreTime,
) -> (ClockBounds, LocalTime) {
    let (mut c, mut t) = (ClockBounds::default(), at(1));
    let end = t.plus(span);
    loop {
        let received = t.plus(there + back);
        assert_eq!(
            c.observe(t, received, clock(t.plus(there))),
            Observed::Steady
        );
        t = t.plus(pause.max(there + back));
        if t > end {
            return (c, received);
        }
    }
}

#[test]
fn a_call_is_taken_to_have_been_read_half_way() {
    let mut c = ClockBounds::default();
    c.observe(LocalTime(1_000), LocalTime(3_000), StoreTime(1_000_000));
    let slot = StoreTime(1_000_500);
    // 1 ns for what the clocks may have drifted on the way.
    assert_eq!(
        c.to_local(slot, LocalTime(3_000)),
        Some(LocalTime(2_500 - 1))
    );
    assert_eq!(c.at_least(LocalTime(3_000)), Some(StoreTime(1_000_000)));
}

#[test]
fn ways_that_differ_are_told_wrongly_by_half_of_the_difference() {
    let clock = |t| store(t, 0, 0);
    for (there, back) in [(80, 10), (10, 80), (45, 45)] {
        let ways = (there * MILLISECOND, back * MILLISECOND);
        let (c, now) = called(ways, SECOND, 20 * SECOND, clock);
        let error = c.to_local(clock(now), now).expect("observed").since(now);
        let expected = (back - there) * MILLISECOND / 2;
        assert!((error - expected).abs() < 200_000, "{error} for {ways:?}");
    }
}

#[test]
fn a_step_of_the_stores_clock_starts_over() {
    let mut c = ClockBounds::default();
    assert_eq!(
        c.observe(at(1), at(1).plus(MILLISECOND), StoreTime(100 * SECOND)),
        Observed::Steady
    );
    assert_eq!(
        c.observe(at(2), at(2).plus(MILLISECOND), StoreTime(3_701 * SECOND)),
        Observed::Stepped
    );
    assert_eq!(c.steps(), 1);
    let back = c
        .to_local(StoreTime(3_701 * SECOND), at(2))
        .expect("observed");
    assert!((back.since(at(2))).abs() <= 2 * MILLISECOND);
    let step = c.last_step().expect("seen");
    assert_eq!(step.at, at(2).plus(MILLISECOND));
    assert!((step.by - 3_600 * SECOND).abs() <= 2 * MILLISECOND);
}

#[test]
fn a_reply_from_before_a_step_is_not_another_step() {
    let mut c = ClockBounds::default();
    let (old, new) = (100 * SECOND, 3_700 * SECOND);
    let read = |s: i64, of: Nanos| StoreTime(of + s * SECOND);
    c.observe(at(1), at(1).plus(MILLISECOND), read(1, old));
    // Under way together: the second overtakes the first.
    assert_eq!(
        c.observe(at(2).plus(MILLISECOND), at(3), read(2, new)),
        Observed::Stepped
    );
    let before = c.to_store(at(4), at(4));
    assert_eq!(c.observe(at(2), at(3), read(2, old)), Observed::Steady);
    assert_eq!((c.steps(), c.to_store(at(4), at(4))), (1, before));
    // A clock that really goes back is seen to.
    assert_eq!(
        c.observe(at(4), at(4).plus(MILLISECOND), read(4, old)),
        Observed::Stepped
    );
}

#[test]
fn how_far_the_clock_was_set_back_is_told_since_when_it_matters() {
    let mut c = ClockBounds::default();
    let mut offset = 10_000;
    for (second, by) in [(1, 0), (2, -60), (3, 20), (4, -5)] {
        offset += by;
        c.observe(
            at(second),
            at(second),
            StoreTime((offset + second) * SECOND),
        );
    }
    let back = |since, now| c.set_back_since(at(since), at(now)) / SECOND;
    assert_eq!([1, 2, 3, 4, 5].map(|s| back(s, 4)), [43, 43, 5, 5, 0]);
    // The instant at which it was set back has come again.
    assert_eq!([40, 46, 47, 1_000].map(|now| back(1, now)), [7, 1, 0, 0]);
    for second in 10..60 {
        c.observe(at(second), at(second), StoreTime(second % 2 * 900 * SECOND));
    }
    assert_eq!(c.stepped.len(), STEPS_KEPT);
}

/// Bounds after fifty calls of 1 ms and one of `last`.
fn after_one_slow_call(last: Nanos) -> ClockBounds {
    let mut c = ClockBounds::default();
    for i in 0..=50 {
        let sent = LocalTime(i * SECOND);
        let took = if i == 50 { last } else { MILLISECOND };
        c.observe(sent, sent.plus(took), StoreTime(i * SECOND + 500_000));
    }
    c
}

#[test]
fn a_call_that_slept_through_a_suspension_says_nothing_of_the_link() {
    let c = after_one_slow_call(5 * SECOND);
    assert!(c.lead() <= MILLISECOND, "{}", c.lead());
    assert_eq!(c.round_trip(), MILLISECOND);
}

#[test]
fn one_slow_reply_moves_the_lead_no_further_than_slots_are_held_ahead() {
    let c = after_one_slow_call(900 * MILLISECOND);
    assert!(
        c.lead() <= 2 * c.round_trip() && c.lead() < 250 * MILLISECOND,
        "{}",
        c.lead()
    );
}

/// Ten minutes without a call, after a minute of a slewed clock: what was learnt of the drift carries on.
#[test]
fn the_drift_is_known_while_nobody_calls() {
    for per_million in [-900, -500, 0, 20, 500, 900] {
        let clock = |t| store(t, 0, per_million);
        let (c, now) = called((50_000, 50_000), SECOND, 60 * SECOND, clock);
        let later = now.plus(600 * SECOND);
        for from in [now, later] {
            let error = c.to_local(clock(later), from).expect("observed");
            let error = error.since(later).abs();
            assert!(
                error < 10 * MILLISECOND,
                "{error} ns at {per_million} per million"
            );
        }
    }
}

/// The clock runs on, and then is slewed the other way: no step, and what is mapped stays near.
#[test]
fn a_drift_that_changes_is_no_step() {
    for (ways, slack) in [
        ((50_000, 50_000), MILLISECOND),
        ((150 * MILLISECOND, 150 * MILLISECOND), 30 * MILLISECOND),
    ] {
        let (mut c, mut t, mut shows) = (ClockBounds::default(), at(1), 100 * SECOND);
        for second in 0..400 {
            let per_million = [0, 900, -900, 300][second / 100];
            let run = |span: Nanos| span + span * per_million / 1_000_000;
            let (there, back) = ways;
            let read = StoreTime(shows + run(there));
            let received = t.plus(there + back);
            assert_eq!(c.observe(t, received, read), Observed::Steady);
            let here = StoreTime(shows + run(there + back));
            let error = c.to_local(here, received).expect("observed");
            let error = error.since(received).abs();
            assert!(error <= slack, "{error} ns in second {second} of {ways:?}");
            shows += run(SECOND);
            t = t.plus(SECOND);
        }
    }
}

proptest! {
    /// With any delays and any drift that clocks may have, nothing is a step, and an instant is mapped wrongly by no more
    /// than half of what a way took that the last call took.
    #[test]
    fn an_instant_is_mapped_within_half_of_a_way(
        offset in -10 * SECOND..10 * SECOND,
        drift in -1_400i64..=1_400,
        shortest in 100_000i64..300 * MILLISECOND,
        calls in prop::collection::vec((0i64..2 * SECOND, 0i64..50 * MILLISECOND, 0i64..50 * MILLISECOND), 1..40),
    ) {
        let clock = |t| store(t, offset, drift);
        let mut c = ClockBounds::default();
        let mut t = at(1);
        for (pause, out, back) in calls {
            t = t.plus(pause);
            let (out, back) = (out + shortest / 2, back + shortest / 2);
            let (sent, read, received) = (t, t.plus(out), t.plus(out + back));
            t = received;
            prop_assert_eq!(c.observe(sent, received, clock(read)), Observed::Steady);
            let late = c.to_local(clock(t), t).expect("observed").since(t);
            let slack = part(out + back, 2 * LIMIT) + 1_000;
            prop_assert!(-out / 2 - slack <= late && late <= back / 2 + slack, "{late} ns, {out} there, {back} back");
            prop_assert!(c.at_least(t).expect("observed") <= clock(t));
        }
    }

    /// Where both ways take alike, nothing is early or late, whatever the link and the drift.
    #[test]
    fn where_both_ways_take_alike_instants_are_mapped_to_themselves(
        drift in -900i64..=900, way in 50_000i64..150 * MILLISECOND, pause in 10 * MILLISECOND..2 * SECOND,
    ) {
        let clock = |t| store(t, 0, drift);
        let (c, now) = called((way, way), pause, 30 * SECOND, clock);
        let late = c.to_local(clock(now), now).expect("observed").since(now);
        // What the clocks may drift apart on the way itself.
        prop_assert!(late.abs() <= part(2 * way, 2 * LIMIT) + 1_000, "{} ns", late);
        let there = c.to_store(now, now).expect("observed");
        prop_assert!((there.since(clock(now)) + late).abs() <= 1_000);
    }

    /// What is mapped back is what was mapped.
    #[test]
    fn there_and_back_is_the_same_instant(drift in -900i64..=900, ahead in -60 * SECOND..3_600 * SECOND) {
        let (c, now) = called((MILLISECOND, MILLISECOND), SECOND, 40 * SECOND, |t| store(t, 0, drift));
        let there = now.plus(ahead);
        let back = c.to_store(there, now).and_then(|t| c.to_local(t, now)).expect("observed");
        prop_assert!(back.since(there).abs() <= 5 * MILLISECOND);
    }

    #[test]
    fn the_lead_on_an_even_link_is_what_the_reply_takes(rtt in 1i64..400 * MILLISECOND) {
        let mut c = ClockBounds::default();
        for i in 0..200 {
            let sent = LocalTime(i * SECOND / 10);
            c.observe(sent, sent.plus(rtt), StoreTime(i * SECOND / 10 + rtt / 2));
        }
        prop_assert!((c.lead() - rtt / 2).abs() < MILLISECOND);
        prop_assert!((c.round_trip() - rtt).abs() <= rtt / 8 + 8);
    }
}

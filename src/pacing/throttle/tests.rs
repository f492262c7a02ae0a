use proptest::prelude::*;

use super::*;
use crate::pacing::time::MILLISECOND;

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

#[test]
fn a_volley_of_protests_widens_once() {
    let mut t = Throttle::default();
    for n in 0..8 {
        t.throttled(at(n), 0, None, &RULES);
    }
    assert_eq!((t.multiplier, t.episode), (2, 1));
    // What was given its slot since then, and is too fast again, widens again.
    assert!(t.throttled(at(9), 1, None, &RULES));
    assert_eq!((t.multiplier, t.episode), (4, 2));
}

#[test]
fn the_multiplier_has_a_cap() {
    let mut t = Throttle::default();
    for n in 0..10 {
        t.throttled(at(n), t.episode, None, &RULES);
    }
    assert_eq!(t.multiplier, CAP);
}

#[test]
fn clean_answers_in_a_row_halve_it_and_a_protest_starts_the_count_anew() {
    let mut t = Throttle::default();
    t.throttled(at(0), 0, None, &RULES);
    t.clean(at(1), 19, &RULES);
    t.throttled(at(2), 1, None, &RULES);
    assert_eq!((t.multiplier, t.clean), (4, 0));
    t.clean(at(3), 19, &RULES);
    assert_eq!(t.multiplier, 4);
    t.clean(at(4), 1, &RULES);
    assert_eq!((t.multiplier, t.clean), (2, 0));
    t.clean(at(5), 20, &RULES);
    assert_eq!(t.multiplier, 1);
    // At full pace nothing is counted, so that nothing has to be written.
    assert!(!t.clean(at(6), 20, &RULES));
}

#[test]
fn a_pause_that_the_origin_asks_for_is_capped_and_never_shortened() {
    let mut t = Throttle::default();
    t.throttled(at(0), 0, Some(3_600 * SECOND), &RULES);
    let until = LocalTime(600 * SECOND);
    let halt = Some(Halt {
        cause: Cause::Hold,
        until,
    });
    assert_eq!(t.regime(LocalTime(0)).halt, halt);
    // Also one to an earlier request is a wish to be heeded; it does not widen again.
    assert!(!t.throttled(at(1), 0, Some(SECOND), &RULES));
    assert!(t.throttled(at(2), 0, Some(3_600 * SECOND), &RULES));
    assert_eq!(t.multiplier, 2);
    assert_eq!(
        t.regime(until.plus(1)).halt.map(|h| h.until),
        Some(until.plus(2))
    );
    assert_eq!(t.regime(until.plus(2)).halt, None);
}

#[test]
fn one_url_is_one_however_often_and_three_lock_out() {
    let mut t = Throttle::default();
    for n in 0..10 {
        t.forbidden(at(n), 7, 403, &RULES);
    }
    assert_eq!(t.regime(LocalTime(10)).halt, None);
    t.forbidden(at(11), 8, 403, &RULES);
    t.forbidden(at(12), 9, 403, &RULES);
    let halt = t.regime(LocalTime(13)).halt.expect("locked out");
    assert_eq!(halt.cause, Cause::Lockout(403));
    assert_eq!(halt.until, LocalTime(12).plus(RULES.lockout_for));
    // Those that were under way do not make it longer.
    assert!(!t.forbidden(at(SECOND), 10, 403, &RULES));
    // When it is over, it is over: it takes three more to be locked out again.
    let over = halt.until;
    assert_eq!(t.regime(over).halt, None);
    t.forbidden(at(over.0), 10, 403, &RULES);
    assert_eq!(t.regime(over).halt, None);
}

#[test]
fn what_is_forbidden_now_and_then_does_not_add_up() {
    let mut t = Throttle::default();
    for n in 0..10 {
        t.forbidden(at(n * 31 * SECOND), n as u64, 403, &RULES);
    }
    assert_eq!(t.regime(LocalTime(10 * 31 * SECOND)).halt, None);
}

#[test]
fn an_operator_ends_what_there_is_to_end() {
    let mut t = Throttle::default();
    assert!(!t.resume(at(0)) && !t.unlock(at(0)));
    t.pause(at(0), 60 * SECOND);
    assert_eq!(
        t.regime(LocalTime(1)).halt.map(|h| h.cause),
        Some(Cause::Pause)
    );
    t.throttled(at(1), 0, None, &RULES);
    let stop = t.holds_cursor(LocalTime(1)).expect("a pause");
    assert_eq!(stop.written, Some((1_700_000_000 + 60) * SECOND));
    assert!(t.resume(at(1)));
    assert_eq!(t.regime(LocalTime(1)), Regime::default());
    // A slow-down without a pause, too.
    t.throttled(at(1), 1, None, &RULES);
    assert_eq!((t.resume(at(1)), t.multiplier), (true, 1));
    for url in 0..3 {
        t.forbidden(at(2), url, 403, &RULES);
    }
    assert!(t.unlock(at(3)) && t.is_neutral());
}

#[test]
fn when_two_histories_meet_the_later_word_on_a_stop_counts_and_the_wider_pace() {
    let mut left = Throttle::default();
    for url in 0..3 {
        left.forbidden(at(SECOND), url, 403, &RULES);
    }
    let mut right = left.clone();
    left.unlock(at(2 * SECOND));
    right.throttled(at(3 * SECOND), 0, None, &RULES);
    for merged in [
        left.merged(&right, true, at(4 * SECOND), &RULES),
        right.merged(&left, true, at(4 * SECOND), &RULES),
    ] {
        assert_eq!(
            merged.regime(LocalTime(4 * SECOND)),
            Regime {
                multiplier: 2,
                halt: None,
            }
        );
        assert!(merged.version > left.version.max(right.version));
    }
}

#[test]
fn of_an_operators_orders_the_later_one_counts_and_of_an_origins_wishes_the_longest() {
    let both = |a: &Throttle, b: &Throttle| {
        [(a, b), (b, a)].map(|(a, b)| a.merged(b, true, at(9 * SECOND), &RULES))
    };
    let halt = |t: &Throttle| {
        t.regime(LocalTime(9 * SECOND))
            .halt
            .map(|h| (h.cause, h.until))
    };
    let paused = |from: Nanos, span: Nanos| {
        let mut t = Throttle::default();
        t.pause(at(from), span);
        t
    };
    let held = |from: Nanos, span: Nanos| {
        let mut t = Throttle::default();
        t.throttled(at(from), 0, Some(span), &RULES);
        t
    };
    let (long, short) = (
        paused(SECOND, 500 * SECOND),
        paused(2 * SECOND, 40 * SECOND),
    );
    let until = LocalTime(42 * SECOND);
    for merged in both(&long, &short) {
        assert_eq!(halt(&merged), Some((Cause::Pause, until)));
    }
    // A short one that is over is the later word too.
    let mut over = paused(2 * SECOND, SECOND);
    over.lapse(at(4 * SECOND));
    for merged in both(&long, &over) {
        assert_eq!(halt(&merged), None);
    }
    let (long, short) = (held(SECOND, 500 * SECOND), held(2 * SECOND, 40 * SECOND));
    for merged in both(&long, &short) {
        assert_eq!(halt(&merged), Some((Cause::Hold, LocalTime(501 * SECOND))));
    }
    // An operator's word ends what there was until then, and not what came later.
    let mut resumed = long.clone();
    resumed.resume(at(3 * SECOND));
    for (older, left) in [(&long, (None, 1)), (&short, (None, 1))] {
        for merged in both(older, &resumed) {
            assert_eq!((halt(&merged), merged.multiplier), left);
        }
    }
    let mut again = resumed.clone();
    again.throttled(at(4 * SECOND), 1, Some(50 * SECOND), &RULES);
    for merged in both(&long, &again) {
        let until = LocalTime(54 * SECOND);
        assert_eq!(halt(&merged), Some((Cause::Hold, until)));
    }
    for merged in both(&held(4 * SECOND, 50 * SECOND), &resumed) {
        let until = LocalTime(54 * SECOND);
        assert_eq!(
            (halt(&merged), merged.multiplier),
            (Some((Cause::Hold, until)), 2)
        );
    }
}

#[test]
fn what_an_unlock_has_forgotten_stays_forgotten() {
    let mut left = Throttle::default();
    left.forbidden(at(SECOND), 1, 403, &RULES);
    left.forbidden(at(SECOND), 2, 403, &RULES);
    let mut right = left.clone();
    left.unlock(at(2 * SECOND));
    right.forbidden(at(3 * SECOND), 4, 403, &RULES);
    right.lockout = Latch::default();
    right.evidence = [1, 2]
        .map(|url| Evidence {
            url,
            at: LocalTime(SECOND),
            status: 403,
        })
        .into();
    right.forbidden(
        at(3 * SECOND),
        3,
        403,
        &Rules {
            lockout_after: 9,
            ..RULES
        },
    );
    for merged in [
        left.merged(&right, true, at(4 * SECOND), &RULES),
        right.merged(&left, true, at(4 * SECOND), &RULES),
    ] {
        assert_eq!(
            (
                merged.regime(LocalTime(4 * SECOND)).halt,
                merged.evidence.len()
            ),
            (None, 1)
        );
    }
}

#[test]
fn evidence_of_two_replicas_adds_up_when_they_meet() {
    let (mut left, mut right) = (Throttle::default(), Throttle::default());
    left.forbidden(at(0), 1, 403, &RULES);
    left.forbidden(at(0), 2, 403, &RULES);
    right.forbidden(at(0), 2, 403, &RULES);
    let two = left.merged(&right, true, at(1), &RULES);
    assert_eq!(two.regime(LocalTime(1)).halt, None);
    right.forbidden(at(0), 3, 403, &RULES);
    let three = left.merged(&right, true, at(1), &RULES);
    assert_eq!(
        three.regime(LocalTime(1)).halt.map(|h| h.cause),
        Some(Cause::Lockout(403))
    );
}

#[test]
fn what_is_stale_proves_nothing_when_histories_meet() {
    let mut old = Throttle::default();
    old.forbidden(at(0), 1, 403, &RULES);
    old.forbidden(at(0), 2, 403, &RULES);
    let mut new = Throttle::default();
    new.forbidden(at(66 * SECOND), 3, 403, &RULES);
    for merged in [
        old.merged(&new, true, at(67 * SECOND), &RULES),
        new.merged(&old, true, at(67 * SECOND), &RULES),
    ] {
        assert_eq!(merged.regime(LocalTime(67 * SECOND)).halt, None);
        assert_eq!(merged.evidence.len(), 1);
    }
    // Nor does it keep a state from being forgotten.
    assert!(old.is_due(LocalTime(61 * SECOND)) && !old.lapse(at(61 * SECOND)) && old.is_neutral());
}

#[test]
fn a_stop_from_a_clock_that_was_an_hour_ahead_lasts_no_longer_than_it_was_meant_to() {
    let ahead = Moment {
        now: LocalTime(0),
        offset: Some(1_700_003_600 * SECOND),
    };
    let mut t = Throttle::default();
    t.pause(ahead, 60 * SECOND);
    let read = Throttle::parse(&t.to_text(ahead), at(0)).expect("a state");
    let until = read.regime(LocalTime(0)).halt.expect("a pause").until;
    assert_eq!(until, LocalTime(60 * SECOND));
}

#[test]
fn the_word_says_whether_anything_is_sent() {
    let mut t = Throttle::default();
    assert_eq!(t.word(LocalTime(0)), NO_ROW);
    t.throttled(at(0), 0, Some(SECOND), &RULES);
    assert_eq!(t.word(LocalTime(SECOND)), "2");
    let stopped = t.word(LocalTime(1));
    assert_eq!(stopped, format!("0.{}", t.version));
    // A longer pause is another.
    t.throttled(at(1), 0, Some(2 * SECOND), &RULES);
    assert_ne!(t.word(LocalTime(1)), stopped);
}

#[test]
fn a_row_that_nobody_wrote_is_none() {
    let good = Throttle::default().to_text(at(0));
    assert!(Throttle::parse(&good, at(0)).is_some());
    for text in [
        "",
        "1",
        "2 {}",
        "garbage",
        "1 null",
        &good.replace("1 {", "2 {"),
        &good.replace("\"multiplier\":1", "\"multiplier\":3"),
        &good.replace("\"multiplier\":1", "\"multiplier\":0"),
        &good.replace("\"multiplier\":1", "\"multiplier\":-1"),
        &format!("{good}{}", " ".repeat(20_000)),
    ] {
        assert_eq!(Throttle::parse(text, at(0)), None, "{text:.60}");
    }
}

/// Something that happens to a throttle.
#[derive(Clone, Debug)]
enum Happens {
    Throttled(u64, Option<Nanos>),
    Clean(u32),
    Forbidden(u64),
    Pause(Nanos),
    Resume,
    Unlock,
    Restored,
}

fn anything() -> impl Strategy<Value = Happens> {
    prop_oneof![
        (0u64..12, prop::option::of(-SECOND..2_000 * SECOND))
            .prop_map(|(e, r)| Happens::Throttled(e, r)),
        (0u32..60).prop_map(Happens::Clean),
        (0u64..9).prop_map(Happens::Forbidden),
        (0..100 * SECOND).prop_map(Happens::Pause),
        Just(Happens::Resume),
        Just(Happens::Unlock),
        Just(Happens::Restored),
    ]
}

proptest! {
    /// For any order of answers and any clock, also one that jumps, the multiplier stays within its bounds, a widening is
    /// one step, and the text says all there is.
    #[test]
    fn the_multiplier_stays_within_its_bounds(
        history in prop::collection::vec((anything(), 0..200 * SECOND, -7_200 * SECOND..7_200 * SECOND), 1..80),
    ) {
        let (mut t, mut older) = (Throttle::default(), Throttle::default());
        let mut now = 1_000_000 * SECOND;
        for (what, pause, jump) in history {
            now += pause;
            let moment = Moment { now: LocalTime(now), offset: Some(1_700_000_000 * SECOND + jump) };
            let before = t.clone();
            match what {
                Happens::Throttled(episode, wait) => {
                    t.throttled(moment, episode, wait, &RULES);
                    prop_assert!(t.multiplier <= before.multiplier * 2 && t.episode <= before.episode + 1);
                    prop_assert!(episode >= before.episode || t.multiplier == before.multiplier);
                }
                Happens::Clean(n) => { t.clean(moment, n, &RULES); }
                Happens::Forbidden(url) => { t.forbidden(moment, url, 403, &RULES); }
                Happens::Pause(span) => { t.pause(moment, span); }
                Happens::Resume => { t.resume(moment); }
                Happens::Unlock => { t.unlock(moment); }
                Happens::Restored => {
                    t = t.merged(&older, true, moment, &RULES);
                    older = before.clone();
                }
            }
            t.lapse(moment);
            prop_assert!((1..=CAP).contains(&t.multiplier) && t.multiplier.is_power_of_two());
            // That evidence is stale is no news for others: they find it so themselves.
            let kept = Throttle { evidence: t.evidence.clone(), ..before.clone() };
            prop_assert!(t == kept || t.version > before.version);
            prop_assert!(t.evidence.len() < RULES.lockout_after as usize);
            if let Some(halt) = t.regime(LocalTime(now)).halt {
                prop_assert!(halt.until.since(LocalTime(now)) <= RULES.lockout_for.max(RULES.retry_after_cap));
            }
            let read = Throttle::parse(&t.to_text(moment), moment).expect("our own text");
            prop_assert!(read.says_the_same(&t, moment));
            prop_assert_eq!(read.version, t.version);
        }
    }

    /// Clean answers alone, in however small portions, bring the full pace back.
    #[test]
    fn clean_answers_alone_bring_the_full_pace_back(
        widenings in 1u64..8, portions in prop::collection::vec(1u32..5, 80..81),
    ) {
        let mut t = Throttle::default();
        for episode in 0..widenings {
            t.throttled(at(0), episode, None, &RULES);
        }
        let mut steps = 0;
        for (n, portion) in portions.iter().cycle().take(200).enumerate() {
            let before = t.multiplier;
            t.clean(at(n as Nanos * MILLISECOND), *portion, &RULES);
            prop_assert!(t.multiplier == before || t.multiplier == before / 2);
            steps += u32::from(t.multiplier != before);
        }
        prop_assert_eq!((t.multiplier, steps), (1, widenings.min(4) as u32));
    }

    #[test]
    fn no_row_makes_the_reader_panic(text in ".{0,200}", json in "(0\\.1|1|2) \\{.{0,120}\\}", now in any::<Nanos>(), offset in any::<Nanos>()) {
        let moment = Moment { now: LocalTime(now), offset: Some(offset) };
        for text in [text, json] {
            if let Some(t) = Throttle::parse(&text, moment) {
                t.to_text(moment);
            }
        }
    }

    /// A multiplied interval, whatever the numbers in the row.
    #[test]
    fn numbers_at_the_edge_are_read_without_a_panic(
        version in any::<u64>(), until in any::<i64>(), span in any::<i64>(), now in any::<Nanos>(), offset in any::<Nanos>(),
    ) {
        let text = format!(
            "0.1 {{\"version\":{version},\"episode\":{version},\"multiplier\":16,\"clean\":0,\"hold\":{{\"at\":{version},\"until\":{until},\
             \"span\":{span},\"status\":0}},\"lockout\":{{\"at\":0}},\"pause\":{{\"at\":0}},\"evidence\":[[{version},{until},403]]}}"
        );
        let moment = Moment { now: LocalTime(now), offset: Some(offset) };
        let Some(mut t) = Throttle::parse(&text, moment) else {
            prop_assert!(version > NUMBER_LIMIT, "only what nothing could outdo is no state");
            return Ok(());
        };
        prop_assert!(t.regime(LocalTime(now)).halt.is_none_or(|h| h.until <= LocalTime(now).plus(span.max(0))));
        t.forbidden(moment, 1, 403, &RULES);
        t.throttled(moment, u64::MAX, Some(SECOND), &RULES);
        t.lapse(moment);
        t.to_text(moment);
    }
}

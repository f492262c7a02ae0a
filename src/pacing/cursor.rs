//! The rule of the cursor: `start = max(now + lead, cursor, floor)`, `cursor = start + k x interval`; and of a cursor that
//! was lost: `start` no sooner than the slots that others still hold have passed.
//!
//! This is the Generic Cell Rate Algorithm (ITU-T I.371) with a delay in place of a refusal: the cursor is its
//! theoretical arrival time and every caller waits for the slot it was given. The memory store, the simulation's model
//! and (in SQL) the Postgres store execute this one rule; a property test holds the SQL to it. No clock is read here.

use crate::pacing::time::{Nanos, SECOND, StoreTime};

/// What a replica asks of a cursor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Consecutive slots wanted, at least 1.
    pub slots: u32,
    /// Effective interval between slots, at least 1 ns.
    pub interval: Nanos,
    /// How long the reply usually takes beyond its best: no slot starts sooner than this from the store's now.
    pub lead: Nanos,
    /// The end of the latest slot this replica knows of; `None` when it knows none.
    pub floor: Option<StoreTime>,
    /// How far ahead of now a cursor or floor can honestly be; one further ahead counts as absent.
    pub horizon: Nanos,
    /// How far ahead slots may lie that others hold: none starts sooner than this from the store's now when the cursor
    /// was lost, that is when it shows less than the floor of a replica that used it this recently.
    pub held: Nanos,
}

/// What a cursor may lag behind a floor by rounding alone.
pub const ROUNDING: Nanos = 1_000;
/// A lost cursor stops nobody for longer than this, or one interval.
const LONGEST_HELD: Nanos = 2 * SECOND;

/// How far ahead the slots of `others`, so many of them, may lie.
pub fn held(interval: Nanos, others: usize) -> Nanos {
    let span = interval.saturating_mul(Nanos::try_from(others).unwrap_or(Nanos::MAX));
    span.min(LONGEST_HELD.max(interval))
}

/// What a cursor gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granted {
    /// The store's clock when the cursor was moved, or shortly after.
    pub now: StoreTime,
    /// Where the first slot starts; the others follow one interval apart.
    pub start: StoreTime,
    /// How many slots were taken.
    pub slots: u32,
    /// The interval they are apart.
    pub interval: Nanos,
}

impl Granted {
    /// The end of the last slot, where the cursor now stands.
    pub fn end(&self) -> StoreTime {
        self.start
            .plus(self.interval.saturating_mul(Nanos::from(self.slots)))
    }
}

/// Takes `ask.slots` slots: returns them, and with [`Granted::end`] where the cursor stands afterwards.
///
/// `cursor` is `None` when the store holds none or one that is not a sane number.
pub fn reserve(cursor: Option<StoreTime>, now: StoreTime, ask: &Ask) -> Granted {
    let believed = |t: &StoreTime| t.since(now) <= ask.horizon;
    let cursor = cursor.filter(believed);
    let lost = ask
        .floor
        .is_some_and(|f| f.since(now) > -ask.held && cursor.is_none_or(|c| f.since(c) > ROUNDING));
    let start = [cursor, ask.floor.filter(believed)]
        .into_iter()
        .flatten()
        .chain(lost.then(|| now.plus(ask.held)))
        .fold(now.plus(ask.lead.max(0)), StoreTime::max);
    Granted {
        now,
        start,
        slots: ask.slots,
        interval: ask.interval,
    }
}

/// The horizon of a cursor: `max(60 s, 4 x max_replicas x effective interval)`.
pub fn horizon(interval: Nanos, max_replicas: u32) -> Nanos {
    interval
        .saturating_mul(4)
        .saturating_mul(Nanos::from(max_replicas.max(1)))
        .max(60 * SECOND)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pacing::time::MILLISECOND;

    fn ask(slots: u32, interval: Nanos) -> Ask {
        Ask {
            slots,
            interval,
            lead: 0,
            floor: None,
            horizon: horizon(interval, 3),
            held: 0,
        }
    }

    #[test]
    fn an_absent_cursor_starts_now() {
        let g = reserve(None, StoreTime(1_000), &ask(2, 10));
        assert_eq!((g.start, g.end()), (StoreTime(1_000), StoreTime(1_020)));
    }

    #[test]
    fn a_cursor_beyond_the_horizon_counts_as_absent() {
        let (now, a) = (StoreTime(0), ask(1, MILLISECOND));
        assert_eq!(
            reserve(Some(StoreTime(a.horizon)), now, &a).start,
            StoreTime(a.horizon)
        );
        assert_eq!(reserve(Some(StoreTime(a.horizon + 1)), now, &a).start, now);
        let floored = Ask {
            floor: Some(StoreTime(3_600 * SECOND)),
            ..a
        };
        assert_eq!(reserve(None, now, &floored).start, now);
    }

    #[test]
    fn after_a_loss_the_slots_that_others_hold_pass_first() {
        let now = StoreTime(1_000 * SECOND);
        let used = Ask {
            floor: Some(now.plus(100)),
            held: 500,
            ..ask(1, 100)
        };
        for lost in [None, Some(StoreTime(0)), Some(now.plus(90 * SECOND))] {
            assert_eq!(reserve(lost, now, &used).start, now.plus(500));
        }
        // As it should be: nothing was lost.
        let kept = Some(now.plus(100));
        assert_eq!(reserve(kept, now, &used).start, now.plus(100));
        // Not used of late, or never: an absent cursor is nothing to wonder at.
        for floor in [None, Some(now.plus(-500))] {
            let idle = Ask { floor, ..used };
            assert_eq!(reserve(None, now, &idle).start, now);
        }
    }

    proptest! {
        #[test]
        fn slots_granted_one_after_the_other_never_overlap(
            steps in prop::collection::vec((0i64..200 * MILLISECOND, 1u32..9, 0i64..5 * MILLISECOND), 1..60),
            interval in 1i64..500 * MILLISECOND,
        ) {
            let (mut now, mut cursor) = (StoreTime(1_700_000_000 * SECOND), None);
            for (pause, slots, lead) in steps {
                now = now.plus(pause);
                let g = reserve(cursor, now, &Ask { lead, ..ask(slots, interval) });
                prop_assert!(g.start >= now.plus(lead));
                // A cursor may legitimately run ahead of the horizon only in this test, where nobody waits.
                if let Some(c) = cursor.filter(|c: &StoreTime| c.since(now) <= horizon(interval, 3)) {
                    prop_assert!(g.start >= c);
                }
                cursor = Some(g.end());
            }
        }

        #[test]
        fn the_promised_wait_is_exact(ahead in 0i64..59 * SECOND, lead in 0i64..SECOND, interval in 1i64..SECOND) {
            let now = StoreTime(5);
            let g = reserve(Some(now.plus(ahead)), now, &Ask { lead, ..ask(1, interval) });
            prop_assert_eq!(g.start, now.plus(ahead.max(lead)));
            // One nanosecond later in the cursor is one nanosecond later in the slot, once it is past the lead.
            let later = reserve(Some(now.plus(ahead + 1)), now, &Ask { lead, ..ask(1, interval) });
            prop_assert_eq!(later.start.since(g.start), i64::from(ahead >= lead));
        }

        #[test]
        fn a_lost_cursor_is_made_good_by_the_floor(start in 0i64..59 * SECOND, interval in 1i64..SECOND) {
            let now = StoreTime(0);
            let end = StoreTime(start).plus(interval);
            prop_assume!(end.0 <= 60 * SECOND);
            let g = reserve(None, now, &Ask { floor: Some(end), ..ask(1, interval) });
            prop_assert!(g.start >= end);
        }

        /// Replicas that each hold one slot at a time do not meet when the cursor vanishes.
        #[test]
        fn a_vanished_cursor_brings_no_burst(
            vanishes in 4usize..60, interval in 1i64..400 * MILLISECOND,
        ) {
            let n = 4;
            let (mut now, mut cursor) = (StoreTime(1_000 * SECOND), None);
            let mut holding: Vec<Option<Granted>> = vec![None; n];
            let mut all: Vec<Granted> = Vec::new();
            for step in 0..80 {
                // Whoever's slot comes first uses it and asks for the next: all are busy.
                let next = |r: &usize| holding[*r].map_or(StoreTime(0), |g| g.start);
                let who = (0..n).min_by_key(next).expect("replicas");
                now = holding[who].map_or(now, |g| g.start.max(now));
                if step == vanishes {
                    cursor = None;
                }
                let ask = Ask {
                    floor: holding[who].map(|g| g.end()),
                    held: super::held(interval, n),
                    ..ask(1, interval)
                };
                let granted = reserve(cursor, now, &ask);
                cursor = Some(granted.end());
                holding[who] = Some(granted);
                all.push(granted);
            }
            all.sort_by_key(|g| g.start);
            prop_assert!(all.windows(2).all(|w| w[1].start.since(w[0].start) >= interval));
        }
    }
}

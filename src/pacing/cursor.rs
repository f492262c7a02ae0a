//! The rule of the cursor: `start = max(now + lead, cursor, floor)`, `cursor = start + k x interval`; a cursor that is
//! absent is taken to stand as far beyond the floor as others may hold slots.
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
    /// How far beyond the floor others may hold slots: where there is no cursor, that is where slots begin.
    pub spread: Nanos,
    /// How far ahead of now a cursor or floor can honestly be; one further ahead counts as absent.
    pub horizon: Nanos,
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
    let floor = ask.floor.filter(believed);
    // A cursor that was lost stood beyond the slots that others still hold; ours are the only ones we know.
    let held = cursor
        .filter(believed)
        .or(floor.map(|f| f.plus(ask.spread)));
    let start = [held, floor]
        .into_iter()
        .flatten()
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
            spread: 0,
            horizon: horizon(interval, 3),
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
            vanishes in 4usize..60, interval in 1i64..SECOND,
        ) {
            let n = 4;
            let (mut now, mut cursor) = (StoreTime(1_000 * SECOND), None);
            let mut held: Vec<Option<Granted>> = vec![None; n];
            let mut all: Vec<Granted> = Vec::new();
            for step in 0..80 {
                // Whoever's slot comes first uses it and asks for the next: all are busy.
                let next = |r: &usize| held[*r].map_or(StoreTime(0), |g| g.start);
                let who = (0..n).min_by_key(next).expect("replicas");
                now = held[who].map_or(now, |g| g.start.max(now));
                if step == vanishes {
                    cursor = None;
                }
                let ask = Ask {
                    floor: held[who].map(|g| g.end()),
                    spread: interval * (n as i64 - 1),
                    ..ask(1, interval)
                };
                let granted = reserve(cursor, now, &ask);
                cursor = Some(granted.end());
                held[who] = Some(granted);
                all.push(granted);
            }
            all.sort_by_key(|g| g.start);
            prop_assert!(all.windows(2).all(|w| w[1].start.since(w[0].start) >= interval));
        }
    }
}

//! The rule of the cursor: `start = max(now + lead, cursor, floor)`, `cursor = start + k x interval`; of a cursor that
//! was lost: `start` no sooner than the slots that others still hold have passed; and of one that lies so far ahead that it
//! is doubted: no slot is taken until [`settle`] has decided whether to believe it.
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
    /// How far ahead of now a cursor is believed without question. Of one further ahead no slot is taken; a floor further
    /// ahead counts as absent.
    pub horizon: Nanos,
    /// A cursor that stands exactly here counts as absent: [`settle`] has decided so.
    pub disbelieved: Option<StoreTime>,
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

/// Takes `ask.slots` slots: returns them, and with [`Granted::end`] where the cursor stands afterwards. `None`, and no slot
/// taken, when the cursor lies beyond the horizon: see [`settle`].
///
/// `cursor` is `None` when the store holds none or one that is not a sane number.
pub fn reserve(cursor: Option<StoreTime>, now: StoreTime, ask: &Ask) -> Option<Granted> {
    let believed = |t: &StoreTime| t.since(now) <= ask.horizon;
    let cursor = cursor.filter(|c| ask.disbelieved != Some(*c));
    if cursor.is_some_and(|c| !believed(&c)) {
        return None;
    }
    let lost = ask
        .floor
        .is_some_and(|f| f.since(now) > -ask.held && cursor.is_none_or(|c| f.since(c) > ROUNDING));
    let start = [cursor, ask.floor.filter(believed)]
        .into_iter()
        .flatten()
        .chain(lost.then(|| now.plus(ask.held)))
        .fold(now.plus(ask.lead.max(0)), StoreTime::max);
    Some(Granted {
        now,
        start,
        slots: ask.slots,
        interval: ask.interval,
    })
}

/// The same of a cursor that is at hand: a doubt is settled at once.
pub fn take(cursor: Option<StoreTime>, now: StoreTime, ask: &Ask) -> Granted {
    let again = || {
        let doubt = Doubt {
            cursor: cursor?,
            now,
            set_back: 0,
        };
        reserve(cursor, now, &settle(doubt, ask).0)
    };
    // What was settled takes slots; without a cursor there is no doubt.
    reserve(cursor, now, ask).or_else(again).unwrap_or(Granted {
        now,
        start: now,
        slots: ask.slots,
        interval: ask.interval,
    })
}

/// How far ahead a cursor is believed without question: `max(60 s, 4 x shares x effective interval)`, where `shares` are
/// the replicas and other programs that may share it. Each holds one slot, or as many as its round trip needs.
pub fn horizon(interval: Nanos, shares: u32) -> Nanos {
    interval
        .saturating_mul(4)
        .saturating_mul(Nanos::from(shares.max(1)))
        .max(60 * SECOND)
}

/// More programs on one cursor than it is configured for, each with a slot of its own, are believed up to this number.
const CROWD: Nanos = 64;

/// The furthest ahead that a cursor can honestly be, beyond what is known of it.
pub fn furthest(interval: Nanos, horizon: Nanos) -> Nanos {
    horizon.saturating_add(interval.saturating_mul(CROWD))
}

/// A cursor that was found beyond the horizon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Doubt {
    /// Where it stood.
    pub cursor: StoreTime,
    /// The store's clock then.
    pub now: StoreTime,
    /// How far the store's clock was set back, if cursors of before may still be about; else 0.
    pub set_back: Nanos,
}

/// Why a cursor beyond the horizon is not believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Witness {
    /// The store's clock was set back, and the cursor is as far ahead as one of before would be.
    ClockSetBack,
    /// More programs than could be on this cursor would have to hold a slot each: how many.
    Crowd(i64),
}

impl Witness {
    /// The same in words, for the log.
    pub fn reason(self) -> String {
        match self {
            Witness::ClockSetBack => {
                "the store's clock was set back, and it is from before".to_owned()
            }
            Witness::Crowd(programs) => {
                format!("{programs} programs would have to hold a slot each")
            }
        }
    }
}

/// Decides about a cursor that `ask` found beyond its horizon, and returns what to ask next: that takes slots.
///
/// To disbelieve an honest cursor hands out slots twice, and to believe a false one holds everybody up. So the distance alone
/// is not enough: more programs than are configured may share the cursor. It is not believed with a second witness: a
/// clock that was seen to be set back, or, measured from the latest slot that this replica knows of, a step that no crowd of programs
/// could have made. Else it is believed, as far ahead as it is.
pub fn settle(doubt: Doubt, ask: &Ask) -> (Ask, Option<Witness>) {
    let ahead = doubt.cursor.since(doubt.now);
    let known = match ask.floor {
        // A floor of another pace or clock is no witness.
        Some(floor) if floor.since(doubt.now) <= furthest(ask.interval, ask.horizon) => {
            floor.max(doubt.now)
        }
        _ => doubt.now,
    };
    let jump = doubt.cursor.since(known);
    let witness = if doubt.set_back > 0 && ahead <= doubt.set_back.saturating_add(ask.horizon) {
        Some(Witness::ClockSetBack)
    } else if jump > furthest(ask.interval, ask.horizon) {
        Some(Witness::Crowd(jump / ask.interval.max(1)))
    } else {
        None
    };
    let next = match witness {
        Some(_) => Ask {
            disbelieved: Some(doubt.cursor),
            ..*ask
        },
        // Others may move it on before we ask again.
        None => Ask {
            horizon: ahead.max(0).saturating_add(ask.horizon),
            ..*ask
        },
    };
    (next, witness)
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
            disbelieved: None,
            held: 0,
        }
    }

    /// Slots of a cursor that is not doubted.
    fn reserve(cursor: Option<StoreTime>, now: StoreTime, ask: &Ask) -> Granted {
        super::reserve(cursor, now, ask).expect("within the horizon")
    }

    #[test]
    fn an_absent_cursor_starts_now() {
        let g = reserve(None, StoreTime(1_000), &ask(2, 10));
        assert_eq!((g.start, g.end()), (StoreTime(1_000), StoreTime(1_020)));
    }

    #[test]
    fn a_cursor_beyond_the_horizon_gives_no_slot_until_that_is_settled() {
        let (now, a) = (StoreTime(0), ask(1, MILLISECOND));
        assert_eq!(
            reserve(Some(StoreTime(a.horizon)), now, &a).start,
            StoreTime(a.horizon)
        );
        let beyond = StoreTime(a.horizon + 1);
        assert_eq!(super::reserve(Some(beyond), now, &a), None);
        let disbelieved = Ask {
            disbelieved: Some(beyond),
            ..a
        };
        assert_eq!(reserve(Some(beyond), now, &disbelieved).start, now);
        let moved_on = Some(beyond.plus(1));
        assert_eq!(super::reserve(moved_on, now, &disbelieved), None);
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
        let false_one = now.plus(90 * SECOND);
        let used_too = Ask {
            disbelieved: Some(false_one),
            ..used
        };
        for lost in [None, Some(StoreTime(0)), Some(false_one)] {
            assert_eq!(reserve(lost, now, &used_too).start, now.plus(500));
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

    fn doubt(ahead: Nanos) -> Doubt {
        Doubt {
            cursor: StoreTime(ahead),
            now: StoreTime(0),
            set_back: 0,
        }
    }

    #[test]
    fn a_false_cursor_is_not_believed_and_the_reason_is_named() {
        // An hour ahead at 7/s, at 3/min; a day at 3/min.
        for (interval, ahead) in [
            (SECOND / 7, 3_600),
            (20 * SECOND, 3_600),
            (20 * SECOND, 86_400),
        ] {
            let a = ask(1, interval);
            let (next, witness) = settle(doubt(ahead * SECOND), &a);
            assert_eq!(
                witness,
                Some(Witness::Crowd(ahead * SECOND / interval)),
                "{ahead} s"
            );
            assert_eq!(
                reserve(Some(StoreTime(ahead * SECOND)), StoreTime(0), &next).start,
                StoreTime(0)
            );
        }
    }

    #[test]
    fn a_cursor_of_before_the_clock_was_set_back_is_not_waited_for() {
        let a = ask(1, 20 * SECOND);
        let behind = |set_back, ahead| {
            let doubt = Doubt {
                set_back: set_back * SECOND,
                ..doubt(ahead * SECOND)
            };
            settle(doubt, &a).1
        };
        assert_eq!(behind(1_200, 1_230), Some(Witness::ClockSetBack));
        assert_eq!(behind(0, 1_230), None);
        assert_eq!(behind(120, 1_230), None, "the step does not explain it");
    }

    #[test]
    fn what_this_replica_knows_vouches_for_a_cursor_that_crept_ahead() {
        let known = Ask {
            floor: Some(StoreTime(1_000 * SECOND)),
            ..ask(1, 20 * SECOND)
        };
        assert_eq!(settle(doubt(2_400 * SECOND), &known).1, None);
        let unknown = ask(1, 20 * SECOND);
        assert!(settle(doubt(2_400 * SECOND), &unknown).1.is_some());
    }

    proptest! {
        /// However many programs beyond those configured, up to the crowd, hold a slot each: their cursor is believed, and
        /// asked again it gives the slot behind theirs.
        #[test]
        fn an_honest_crowd_is_believed(
            shares in 1u32..6, programs in 1i64..64, interval in MILLISECOND..86_400 * SECOND, floor in prop::option::of(0i64..64),
        ) {
            let a = Ask {
                horizon: horizon(interval, shares),
                floor: floor.map(|slots| StoreTime(slots.min(programs) * interval)),
                ..ask(1, interval)
            };
            let cursor = StoreTime(programs * interval);
            let granted = match super::reserve(Some(cursor), StoreTime(0), &a) {
                Some(granted) => granted,
                None => {
                    let (next, witness) = settle(doubt(cursor.0), &a);
                    prop_assert_eq!(witness, None);
                    reserve(Some(cursor), StoreTime(0), &next)
                }
            };
            prop_assert_eq!(granted.start, cursor);
        }

        /// Whatever is decided, what is asked next takes slots.
        #[test]
        fn a_doubt_is_settled_at_once(
            ahead in 0i64..i64::MAX, interval in 1i64..86_400 * SECOND, set_back in 0i64..86_400 * SECOND,
            floor in prop::option::of(any::<i64>()),
        ) {
            let a = Ask { floor: floor.map(StoreTime), ..ask(1, interval) };
            let (next, _) = settle(Doubt { set_back, ..doubt(ahead) }, &a);
            let granted = super::reserve(Some(StoreTime(ahead)), StoreTime(0), &next);
            prop_assert!(granted.is_some());
            if set_back == 0 {
                let at_hand = take(Some(StoreTime(ahead)), StoreTime(0), &a);
                prop_assert!(granted == Some(at_hand) || ahead <= a.horizon);
            }
        }

        #[test]
        fn slots_granted_one_after_the_other_never_overlap(
            steps in prop::collection::vec((0i64..200 * MILLISECOND, 1u32..9, 0i64..5 * MILLISECOND), 1..60),
            interval in 1i64..500 * MILLISECOND,
        ) {
            let (mut now, mut cursor) = (StoreTime(1_700_000_000 * SECOND), None);
            for (pause, slots, lead) in steps {
                now = now.plus(pause);
                let g = take(cursor, now, &Ask { lead, ..ask(slots, interval) });
                prop_assert!(g.start >= now.plus(lead));
                // A cursor may legitimately run ahead of the horizon only in this test, where nobody waits.
                let honest = furthest(interval, horizon(interval, 3));
                if let Some(c) = cursor.filter(|c: &StoreTime| c.since(now) <= honest) {
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

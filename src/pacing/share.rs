//! What a replica may do by itself, and how much room it leaves to others: the rules of the time without the store.
//!
//! A replica that has lost the store waits until the others must have noticed, then sends on the instants of the
//! store's clock that are its own: those where `floor(t / interval) mod n` is its number. The others, as long as they
//! reach the store, stretch their interval by `n / (n - silent)` for those they no longer hear. So the sum stays at the
//! ceiling, whoever is cut off. No clock is read here.

use crate::pacing::time::{LocalTime, MILLISECOND, Nanos, SECOND, StoreTime};

/// How often a replica says that it lives.
pub const HEARTBEAT: Nanos = SECOND;
/// A replica that was not heard for this long is silent.
pub const SILENT_AFTER: Nanos = 3 * SECOND;
/// After this long without a heartbeat of its own, a replica knows that all others have noticed: they need
/// [`SILENT_AFTER`], find out at their next heartbeat, and have that done within its deadline.
pub const NOTICED_AFTER: Nanos = SILENT_AFTER + HEARTBEAT + 200 * MILLISECOND;

/// How a replica may pace at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Terms {
    /// On the shared cursor, leaving room for `silent` of `of` shares.
    Shared {
        /// Shares that others may be sending on by themselves.
        silent: u32,
        /// Shares in all.
        of: u32,
    },
    /// Not yet: whether this replica is alone is not yet known to all.
    Hold(LocalTime),
    /// On its own instants.
    Alone(Share),
    /// Not at all while the store is away: all shares belong to others.
    Nothing,
}

/// A replica's part of the ceiling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Which of the `of` shares; `None` for a replica that has no number, whose instants are any.
    pub number: Option<u32>,
    /// Shares in all, at least 1.
    pub of: u32,
}

/// What a replica knows about itself and the store, for one cursor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Whether heartbeats pass, so that it is known who is silent.
    pub heard: bool,
    /// Whether the others know that this replica is on the shared cursor: while they do not, they leave room for it.
    pub claimed: bool,
    /// The last instant at which a heartbeat that says so may have been written; of a replica that never reached the store,
    /// the instant at which it began: an earlier run of it may have been heard until then.
    pub last_claim: LocalTime,
    /// Reservations of this cursor keep failing, and since then at the latest the others know or must have noticed.
    pub stuck: Option<LocalTime>,
    /// The number held, by the last that is known.
    pub number: Option<u32>,
    /// Whether all numbers were found to be held by others.
    pub all_held: bool,
    /// Shares that others may be sending on.
    pub silent: u32,
    /// Shares that others would be sending on if the store were away for all: more than their number while one of them
    /// divides by a smaller one than we do, because it has not heard of ours.
    pub taken: u32,
    /// Shares in all.
    pub of: u32,
}

/// How to pace now.
pub fn terms(now: LocalTime, facts: &Facts) -> Terms {
    let of = facts.of.max(1);
    let alone = Terms::Alone(Share {
        number: facts.number,
        of,
    });
    if facts.heard {
        // A replica with a number of its own may fall back on it for one cursor; one without must leave that cursor
        // alone. Until the others must have noticed, it goes on asking: what it is granted is granted to it only.
        let noticed = facts.stuck.is_some_and(|t| now >= t.plus(NOTICED_AFTER));
        if noticed && facts.number.is_some() {
            return alone;
        }
        // One without a number has no share to go over to, and nobody leaves room for it.
        if facts.claimed || facts.number.is_none() {
            return match facts.silent {
                silent if silent < of => Terms::Shared { silent, of },
                _ => Terms::Nothing,
            };
        }
        // The others leave room for this replica, and while it may not use that yet it leaves it too: so it may go over to
        // its share, and come back, as often as it must, and the sum of both stays under the ceiling.
        let silent = facts.silent.saturating_add(1);
        if silent < of && now < facts.last_claim.plus(NOTICED_AFTER) {
            return Terms::Shared { silent, of };
        }
    }
    if (facts.number.is_none() && facts.all_held) || facts.taken >= of {
        return Terms::Nothing;
    }
    // Those who were told that the cursor is stuck have left room ever since.
    match facts.stuck.unwrap_or(facts.last_claim).plus(NOTICED_AFTER) {
        noticed if now < noticed => Terms::Hold(noticed),
        _ => alone,
    }
}

/// The interval on the shared cursor with room left for `silent` of `of` shares.
pub fn stretched(interval: Nanos, silent: u32, of: u32) -> Nanos {
    let (of, left) = (
        i128::from(of.max(1)),
        i128::from(of.max(1) - silent.min(of.max(1) - 1)),
    );
    let stretched = (i128::from(interval) * of + left - 1) / left;
    Nanos::try_from(stretched).unwrap_or(Nanos::MAX)
}

impl Share {
    /// The first instant of this share that is not before `from`.
    pub fn next(&self, from: StoreTime, interval: Nanos) -> StoreTime {
        let Some(number) = self.number else {
            return from;
        };
        let interval = i128::from(interval.max(1));
        let (period, offset) = (
            interval * i128::from(self.of.max(1)),
            interval * i128::from(number),
        );
        let turns = (i128::from(from.0) - offset + period - 1).div_euclid(period);
        StoreTime(Nanos::try_from(turns * period + offset).unwrap_or(Nanos::MAX))
    }

    /// The span between two instants of this share.
    pub fn period(&self, interval: Nanos) -> Nanos {
        interval.saturating_mul(Nanos::from(self.of.max(1)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn facts() -> Facts {
        Facts {
            heard: true,
            claimed: true,
            last_claim: LocalTime(SECOND),
            stuck: None,
            number: Some(1),
            all_held: false,
            silent: 0,
            taken: 2,
            of: 3,
        }
    }

    const ALONE: Terms = Terms::Alone(Share {
        number: Some(1),
        of: 3,
    });

    #[test]
    fn a_replica_alone_waits_until_it_must_have_been_missed() {
        let lost = Facts {
            heard: false,
            ..facts()
        };
        let noticed = LocalTime(SECOND).plus(NOTICED_AFTER);
        assert_eq!(terms(noticed.plus(-1), &lost), Terms::Hold(noticed));
        assert_eq!(terms(noticed, &lost), ALONE);
    }

    #[test]
    fn a_replica_that_never_reached_the_store_waits_for_an_earlier_run_of_it_to_be_missed() {
        let new = Facts {
            heard: false,
            number: None,
            ..facts()
        };
        let noticed = LocalTime(SECOND).plus(NOTICED_AFTER);
        assert_eq!(terms(LocalTime(SECOND), &new), Terms::Hold(noticed));
        assert_eq!(
            terms(noticed, &new),
            Terms::Alone(Share {
                number: None,
                of: 3
            })
        );
    }

    #[test]
    fn one_replica_too_many_sends_on_the_shared_cursor_only() {
        let extra = Facts {
            number: None,
            all_held: true,
            stuck: Some(LocalTime(0)),
            ..facts()
        };
        let late = LocalTime(100 * SECOND);
        assert_eq!(terms(late, &extra), Terms::Shared { silent: 0, of: 3 });
        assert_eq!(
            terms(
                late,
                &Facts {
                    heard: false,
                    ..extra
                }
            ),
            Terms::Nothing
        );
    }

    #[test]
    fn a_cursor_that_cannot_be_moved_is_left_for_the_share_once_all_must_know() {
        let stuck = Facts {
            stuck: Some(LocalTime(0)),
            ..facts()
        };
        assert_eq!(
            terms(LocalTime(NOTICED_AFTER - 1), &stuck),
            Terms::Shared { silent: 0, of: 3 }
        );
        assert_eq!(terms(LocalTime(NOTICED_AFTER), &stuck), ALONE);
        // The store lost on top of it: the others leave room already.
        let lost = Facts {
            heard: false,
            last_claim: LocalTime(NOTICED_AFTER),
            ..stuck
        };
        assert_eq!(terms(LocalTime(NOTICED_AFTER), &lost), ALONE);
    }

    #[test]
    fn who_has_not_claimed_the_cursor_leaves_room_for_itself_until_it_may_use_its_share() {
        let back = Facts {
            claimed: false,
            ..facts()
        };
        let late = LocalTime(SECOND).plus(NOTICED_AFTER);
        assert_eq!(
            terms(late.plus(-1), &back),
            Terms::Shared { silent: 1, of: 3 }
        );
        assert_eq!(terms(late, &back), ALONE);
        // No room is left on the cursor but that for itself: its share has it, once it may be used.
        let last = Facts { silent: 2, ..back };
        assert_eq!(terms(late, &last), ALONE);
        assert_eq!(terms(late.plus(-1), &last), Terms::Hold(late));
        let lost = Facts {
            heard: false,
            ..back
        };
        assert_eq!(terms(late, &lost), ALONE);
    }

    #[test]
    fn where_others_take_all_of_the_ceiling_nothing_is_sent() {
        // One that is silent has not heard of our larger number, and sends all by itself.
        let late = LocalTime(100 * SECOND);
        let claimed = Facts {
            silent: 3,
            taken: 3,
            ..facts()
        };
        assert_eq!(terms(late, &claimed), Terms::Nothing);
        let lost = Facts {
            heard: false,
            silent: 0,
            ..claimed
        };
        assert_eq!(terms(late, &lost), Terms::Nothing);
    }

    proptest! {
        #[test]
        fn the_shares_of_all_never_meet_and_keep_the_even_spacing(
            interval in 1i64..10 * SECOND, of in 1u32..9, from in 0i64..100_000 * SECOND,
        ) {
            let mut all: Vec<i64> = (0..of)
                .flat_map(|number| {
                    let share = Share { number: Some(number), of };
                    let first = share.next(StoreTime(from), interval);
                    let second = share.next(first.plus(1), interval);
                    [first.0, second.0]
                })
                .collect();
            all.sort_unstable();
            prop_assert!(all[0] >= from && all[0] < from + interval);
            prop_assert!(all.windows(2).all(|w| w[1] - w[0] == interval));
        }

        #[test]
        fn the_sum_of_all_is_the_ceiling(interval in 1_000i64..SECOND, of in 1u32..9, silent in 0u32..8) {
            prop_assume!(silent < of);
            let shared = SECOND as f64 / stretched(interval, silent, of) as f64;
            let alone = SECOND as f64 / Share { number: Some(0), of }.period(interval) as f64;
            let ceiling = SECOND as f64 / interval as f64;
            prop_assert!(shared + f64::from(silent) * alone <= ceiling * (1.0 + 1e-9));
            prop_assert!(shared + f64::from(silent) * alone >= ceiling * 0.99);
        }
    }
}

//! Where the store's clock stands against ours, as bounds that calls to the store tighten.
//!
//! A call that left at `sent` and was answered by `received` (local clock) with the store's `now` shows that
//! `store - local` lies between `now - received` and `now - sent`. The bounds kept are the intersection of what the
//! calls showed, widened as time passes for what two clocks may drift apart. A slot is mapped with the bound that is
//! never early. Calls whose bounds do not meet mean that the store's clock stepped. (The same idea as Marzullo's
//! intersection in NTP, RFC 5905 section 11.2.1, with one source.) No clock is read here.

use crate::pacing::time::{LocalTime, Nanos, SECOND, StoreTime};

/// How fast two honest clocks may drift apart: 200 parts per million, twice what NTP allows for a bad crystal.
const DRIFT_PER_MILLION: Nanos = 200;

/// A call that took longer tells nothing of the link: it would have been given up, had this machine not slept meanwhile.
const LONGEST_CALL: Nanos = SECOND;

/// Bounds of the offset `store - local`, and how late replies usually are.
#[derive(Clone, Debug, Default)]
pub struct ClockBounds {
    bounds: Option<Bounds>,
    round_trip: Smoothed,
    excess: Smoothed,
    steps: u64,
}

#[derive(Clone, Copy, Debug)]
struct Bounds {
    low: Nanos,
    high: Nanos,
    at: LocalTime,
}

/// What an observation showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Observed {
    /// The bounds hold (or are the first).
    Steady,
    /// The store's clock stepped: bounds of before are void, and slots mapped with them too.
    Stepped,
}

impl ClockBounds {
    /// Takes in one call. `received` must not lie before `sent`.
    pub fn observe(&mut self, sent: LocalTime, received: LocalTime, now: StoreTime) -> Observed {
        let new = Bounds {
            low: now.0.saturating_sub(received.0),
            high: now.0.saturating_sub(sent.0),
            at: received,
        };
        let took = received.since(sent).max(0);
        let tells_of_the_link = took <= LONGEST_CALL;
        if tells_of_the_link {
            self.round_trip.add(took);
        }
        let Some(old) = self.bounds.map(|b| b.widened(received)) else {
            self.bounds = Some(new);
            return Observed::Steady;
        };
        if new.low > old.high || new.high < old.low {
            self.bounds = Some(new);
            self.excess = Smoothed::default();
            self.steps += 1;
            return Observed::Stepped;
        }
        // How much later than the best reply so far this one came: what a slot must lie ahead not to be stale.
        if tells_of_the_link {
            self.excess.add(old.low.saturating_sub(new.low).max(0));
        }
        self.bounds = Some(Bounds {
            low: old.low.max(new.low),
            high: old.high.min(new.high),
            at: received,
        });
        Observed::Steady
    }

    /// The local instant at which the store's clock has surely reached `t`; `None` before the first observation.
    pub fn to_local(&self, t: StoreTime, now: LocalTime) -> Option<LocalTime> {
        let low = self.bounds?.widened(now).low;
        let at = LocalTime(t.0.saturating_sub(low));
        // The clocks go on drifting apart until then: 29 us over a wait of an interval of 143 ms, 12 ms over a minute.
        Some(at.plus(drift(at.since(now))))
    }

    /// The store's clock at the local instant `t` at the earliest; `None` before the first observation.
    pub fn to_store(&self, t: LocalTime, now: LocalTime) -> Option<StoreTime> {
        let low = self.bounds?.widened(now).low;
        Some(StoreTime(t.0.saturating_add(low)))
    }

    /// How far ahead of the store's now a slot must start for its reply to arrive in time: the lateness of replies
    /// beyond the best, smoothed, plus four times its variation (RFC 6298 section 2).
    ///
    /// At most two round trips: a replica holds slots for that long ahead anyway, so that such a lead moves the cursor
    /// past nothing. A longer one, after a single slow reply, would leave gaps in everybody's pace until it is forgotten.
    pub fn lead(&self) -> Nanos {
        let usual = self
            .excess
            .mean
            .saturating_add(self.excess.variation.saturating_mul(4));
        usual.min(self.round_trip.mean.saturating_mul(2))
    }

    /// The smoothed round trip of a call; zero before the first.
    pub fn round_trip(&self) -> Nanos {
        self.round_trip.mean
    }

    /// How often the store's clock was seen to step.
    pub fn steps(&self) -> u64 {
        self.steps
    }
}

impl Bounds {
    fn widened(self, now: LocalTime) -> Self {
        let by = drift(now.since(self.at));
        Bounds {
            low: self.low.saturating_sub(by),
            high: self.high.saturating_add(by),
            at: now.max(self.at),
        }
    }
}

/// How far two honest clocks may drift apart over a span, rounded up; nothing for a negative one.
fn drift(span: Nanos) -> Nanos {
    let one_in = 1_000_000 / DRIFT_PER_MILLION;
    match span.max(0) {
        0 => 0,
        span => span / one_in + 1,
    }
}

/// A mean and its variation, smoothed as RFC 6298 smooths round trips (1/8 and 1/4).
#[derive(Clone, Copy, Debug, Default)]
struct Smoothed {
    mean: Nanos,
    variation: Nanos,
    seen: bool,
}

impl Smoothed {
    fn add(&mut self, sample: Nanos) {
        if self.seen {
            let off = (self.mean - sample).abs();
            self.variation += (off - self.variation) / 4;
            self.mean += (sample - self.mean) / 8;
        } else {
            *self = Smoothed {
                mean: sample,
                variation: sample / 2,
                seen: true,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pacing::time::MILLISECOND;

    #[test]
    fn the_first_call_bounds_the_offset_by_its_round_trip() {
        let mut c = ClockBounds::default();
        c.observe(LocalTime(1_000), LocalTime(3_000), StoreTime(1_000_000));
        // The store may have read its clock just before the reply arrived: a slot is mapped as if it had.
        assert_eq!(
            c.to_local(StoreTime(1_000_500), LocalTime(3_000)),
            // 1 ns for what the clocks drift apart until then.
            Some(LocalTime(3_501))
        );
    }

    #[test]
    fn a_step_of_the_stores_clock_starts_over() {
        let mut c = ClockBounds::default();
        let at = |s: i64| LocalTime(s * SECOND);
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

    proptest! {
        /// With any delays and any drift within the limit, no slot is ever mapped to an instant before it.
        #[test]
        fn a_slot_is_never_mapped_early(
            offset in -10 * SECOND..10 * SECOND,
            drift in -180i64..=180,
            calls in prop::collection::vec((0i64..2 * SECOND, 0i64..50 * MILLISECOND, 0i64..50 * MILLISECOND), 1..40),
            ahead in 0i64..5 * SECOND,
        ) {
            let drifted = |t: i64| (i128::from(t) * i128::from(drift)).div_euclid(1_000_000) as i64;
            let store = |t: LocalTime| StoreTime(100 * SECOND + t.0 + drifted(t.0) + offset);
            let mut c = ClockBounds::default();
            let mut t = LocalTime(SECOND);
            for (pause, out, back) in calls {
                t = t.plus(pause);
                let (sent, read, received) = (t, t.plus(out), t.plus(out + back));
                t = received;
                prop_assert_eq!(c.observe(sent, received, store(read)), Observed::Steady);
                let slot = store(t).plus(ahead);
                let local = c.to_local(slot, t).expect("observed");
                prop_assert!(store(local) >= slot, "{} early", -store(local).since(slot));
                prop_assert!(c.to_store(t, t).expect("observed") <= store(t));
            }
        }

        #[test]
        fn replies_of_equal_delay_need_almost_no_lead(rtt in 1i64..400 * MILLISECOND) {
            let mut c = ClockBounds::default();
            for i in 0..200 {
                let sent = LocalTime(i * SECOND / 10);
                c.observe(sent, sent.plus(rtt), StoreTime(i * SECOND / 10 + rtt / 2));
            }
            prop_assert!(c.lead() < MILLISECOND);
            prop_assert!((c.round_trip() - rtt).abs() <= rtt / 8 + 8);
        }
    }
}

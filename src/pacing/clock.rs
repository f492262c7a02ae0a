//! Where the store's clock stands against ours, as bounds that calls to the store tighten.
//!
//! A call that left at `sent` and was answered by `received` (local clock) with the store's `now` shows that
//! `store - local` lies between `now - received` and `now - sent`. The bounds kept are the intersection of what the
//! calls showed; as time passes they move with the drift that was seen (`drift`) and widen by what it may yet become.
//! So they stand at the best ways there and back of the recent calls.
//!
//! An instant is mapped with their middle, the estimate that NTP makes (RFC 5905 section 8): exact where the best ways
//! there and back take alike, and else wrong by half of their difference at most. Every replica maps the same way, so
//! that what they send together keeps the store's pace, near and far. Calls whose bounds do not meet mean that the
//! store's clock stepped. (The same idea as Marzullo's intersection, RFC 5905 section 11.2.1, with one source.) No clock
//! is read here.

mod drift;

use std::collections::VecDeque;

use self::drift::Drift;
use crate::pacing::time::{LocalTime, Nanos, SECOND, StoreTime};

/// How fast two clocks may drift apart, in parts per billion, before it counts as a step: each may be slewed by 500 parts
/// per million (adjtimex(2), NTP's limit), and has a crystal of its own.
const LIMIT: Nanos = 1_500_000;

/// A call that took longer tells nothing of the link: it would have been given up, had this machine not slept meanwhile.
const LONGEST_CALL: Nanos = SECOND;

/// Steps that are remembered.
const STEPS_KEPT: usize = 8;

/// Bounds of the offset `store - local`, and how late replies usually are.
#[derive(Clone, Debug, Default)]
pub struct ClockBounds {
    bounds: Option<Bounds>,
    drift: Drift,
    round_trip: Smoothed,
    behind: Smoothed,
    steps: u64,
    /// The latest steps, oldest first, and where the bounds stood before the last of them.
    stepped: VecDeque<Step>,
    before: Option<Bounds>,
}

/// The store's clock was set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// When that was seen here.
    pub at: LocalTime,
    /// How far forward it was set; back, if negative.
    pub by: Nanos,
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
        let took = received.since(sent).max(0);
        let new = Bounds {
            low: now.0.saturating_sub(received.0),
            // Between the reading and the receipt the clocks drifted, too.
            high: now
                .0
                .saturating_sub(sent.0)
                .saturating_add(part(took, LIMIT)),
            at: received,
        };
        let tells_of_the_link = took <= LONGEST_CALL;
        if tells_of_the_link {
            self.round_trip.add(took);
        }
        let old = self.bounds.map(|b| b.moved(received, &self.drift));
        let outcome = match old {
            Some(old) if !old.meets(&new) => {
                if self.is_of_before(sent, &new) {
                    return Observed::Steady;
                }
                self.step(received, &old, &new);
                Observed::Stepped
            }
            _ => Observed::Steady,
        };
        let kept = match (old, outcome) {
            (Some(old), Observed::Steady) => Bounds {
                low: old.low.max(new.low),
                high: old.high.min(new.high),
                at: old.at.max(received),
            },
            _ => new,
        };
        self.bounds = Some(kept);
        self.drift.observe(received, new.low, new.high);
        // How long after the instant to which its reading is mapped this reply came: what a slot must lie ahead not to be
        // stale.
        if tells_of_the_link {
            self.behind
                .add(kept.middle().saturating_sub(new.low).max(0));
        }
        outcome
    }

    /// Whether a call that does not fit was under way when the last step was seen, and fits the time before it.
    fn is_of_before(&self, sent: LocalTime, new: &Bounds) -> bool {
        let under_way = self.stepped.back().is_some_and(|s| sent <= s.at);
        let before = self.before.map(|b| b.moved(new.at, &self.drift));
        under_way && before.is_some_and(|b| b.meets(new))
    }

    fn step(&mut self, at: LocalTime, old: &Bounds, new: &Bounds) {
        self.before = Some(*old);
        self.drift.start_over();
        self.steps += 1;
        if self.stepped.len() == STEPS_KEPT {
            self.stepped.pop_front();
        }
        let by = new.middle().saturating_sub(old.middle());
        self.stepped.push_back(Step { at, by });
    }

    /// The local instant at which the store's clock shows `t`, as well as can be told; `None` before the first
    /// observation.
    pub fn to_local(&self, t: StoreTime, now: LocalTime) -> Option<LocalTime> {
        let at = LocalTime(t.0.saturating_sub(self.offset(now)?));
        // The clocks go on drifting apart until then: half a second a day for every 6 parts per million.
        Some(at.plus(-self.drift.over(at.since(now))))
    }

    /// The store's clock at the local instant `t`, as well as can be told; `None` before the first observation.
    pub fn to_store(&self, t: LocalTime, now: LocalTime) -> Option<StoreTime> {
        let there = StoreTime(t.0.saturating_add(self.offset(now)?));
        Some(there.plus(self.drift.over(t.since(now))))
    }

    /// The store's clock now, at the earliest, whatever the ways there and back; `None` before the first observation.
    pub fn at_least(&self, now: LocalTime) -> Option<StoreTime> {
        let low = self.bounds?.moved(now, &self.drift).low;
        Some(StoreTime(now.0.saturating_add(low)))
    }

    fn offset(&self, now: LocalTime) -> Option<Nanos> {
        Some(self.bounds?.moved(now, &self.drift).middle())
    }

    /// How far ahead of the store's now a slot must start for its reply to arrive in time: how long after its reading's
    /// instant a reply comes (half a round trip where both ways take alike), smoothed, plus four times its variation
    /// (RFC 6298 section 2).
    ///
    /// At most two round trips: a replica holds slots for that long ahead anyway, so that such a lead moves the cursor
    /// past nothing. A longer one, after a single slow reply, would leave gaps in everybody's pace until it is forgotten.
    pub fn lead(&self) -> Nanos {
        let longest = self.round_trip.mean.saturating_mul(2);
        self.behind.usual().min(longest)
    }

    /// The smoothed round trip of a call; zero before the first.
    pub fn round_trip(&self) -> Nanos {
        self.round_trip.mean
    }

    /// How often the store's clock was seen to step.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The last step that was seen.
    pub fn last_step(&self) -> Option<Step> {
        self.stepped.back().copied()
    }

    /// How far ahead of the store's clock `now` the instant lies at which it stood when it was set back, if that was after
    /// `since`: so much further ahead than it honestly can be, what was written before lies now. Zero where no step set it
    /// back, or that has passed.
    pub fn set_back_since(&self, since: LocalTime, now: LocalTime) -> Nanos {
        let late = self.stepped.iter().rev().take_while(|s| s.at >= since);
        // Whatever was written before any of them was moved by all that came after.
        late.scan(0, |sum: &mut Nanos, step| {
            *sum = sum.saturating_sub(step.by);
            Some(sum.saturating_sub(now.since(step.at)))
        })
        .fold(0, Nanos::max)
    }
}

impl Bounds {
    /// As they stand at `now`: moved with the drift that was seen, and wider by what it may have become.
    fn moved(self, now: LocalTime, drift: &Drift) -> Self {
        let span = now.since(self.at).max(0);
        if span == 0 {
            return self;
        }
        let by = drift.over(span);
        // Symmetric about what was seen, so that the middle stays where it is, and not narrower than the limit.
        let wider = part(span, LIMIT.saturating_add(drift.per_billion().abs())).saturating_add(1);
        Bounds {
            low: self.low.saturating_add(by).saturating_sub(wider),
            high: self.high.saturating_add(by).saturating_add(wider),
            at: now,
        }
    }

    fn meets(&self, other: &Bounds) -> bool {
        self.low <= other.high && other.low <= self.high
    }

    fn middle(&self) -> Nanos {
        self.low
            .saturating_add(self.high.saturating_sub(self.low) / 2)
    }
}

/// So many billionths of a span.
fn part(span: Nanos, per_billion: Nanos) -> Nanos {
    let part = i128::from(span) * i128::from(per_billion) / i128::from(SECOND);
    Nanos::try_from(part).unwrap_or(if part < 0 { Nanos::MIN } else { Nanos::MAX })
}

/// A mean and its variation, smoothed as RFC 6298 smooths round trips (1/8 and 1/4).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Smoothed {
    mean: Nanos,
    variation: Nanos,
    seen: bool,
}

impl Smoothed {
    /// What a sample seldom exceeds: the mean and four times its variation.
    pub(crate) fn usual(&self) -> Nanos {
        let spread = self.variation.saturating_mul(4);
        self.mean.saturating_add(spread)
    }

    /// Takes in a sample.
    pub(crate) fn add(&mut self, sample: Nanos) {
        if self.seen {
            let off = (self.mean - sample).abs();
            self.variation += (off - self.variation) / 4;
            self.mean += (sample - self.mean) / 8;
        } else {
            *self = Smoothed {
                mean: sample,
                // RFC 6298 begins with a half, for a time-out. Here a gap in the pace is the price, and the grace of a slot
                // and the next samples make good what is too little.
                variation: sample / 8,
                seen: true,
            };
        }
    }
}

#[cfg(test)]
mod tests;

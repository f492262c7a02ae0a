//! How fast the two clocks drift apart, from the best calls of the last half minute. No clock is read here.

use std::collections::VecDeque;

use super::{LIMIT, part};
use crate::pacing::time::{LocalTime, Nanos, SECOND};

/// Of the calls in so long a time the best counts.
const WINDOW: Nanos = 4 * SECOND;
/// How many such times are looked back on.
const WINDOWS: usize = 8;

/// What is known of the drift. Any two calls bound it, the tighter the further they lie apart and the faster they were;
/// of what they all allow, the least drift is taken. So a link on which nothing can be told means no drift.
#[derive(Clone, Debug, Default)]
pub(super) struct Drift {
    /// How much faster than ours the store's clock runs, in parts per billion.
    per_billion: Nanos,
    /// The best of each window, oldest first.
    kept: VecDeque<Sample>,
    best: Option<Sample>,
    since: Option<LocalTime>,
}

/// Bounds of the offset that one call showed.
#[derive(Clone, Copy, Debug)]
struct Sample {
    at: LocalTime,
    low: Nanos,
    high: Nanos,
}

impl Sample {
    fn width(&self) -> Nanos {
        self.high.saturating_sub(self.low)
    }
}

impl Drift {
    /// Takes in the bounds that a call showed.
    pub(super) fn observe(&mut self, at: LocalTime, low: Nanos, high: Nanos) {
        let sample = Sample { at, low, high };
        let since = *self.since.get_or_insert(at);
        if at.since(since) >= WINDOW
            && let Some(best) = self.best.take()
        {
            self.since = Some(at);
            self.close(best);
        }
        if self.best.is_none_or(|best| sample.width() <= best.width()) {
            self.best = Some(sample);
        }
    }

    /// What was learnt is of another time.
    pub(super) fn start_over(&mut self) {
        *self = Drift::default();
    }

    /// How much faster than ours the store's clock runs, in parts per billion.
    pub(super) fn per_billion(&self) -> Nanos {
        self.per_billion
    }

    /// How far the store's clock gains on ours over a span.
    pub(super) fn over(&self, span: Nanos) -> Nanos {
        part(span, self.per_billion)
    }

    fn close(&mut self, new: Sample) {
        let (mut least, mut most) = (-LIMIT, LIMIT);
        // From the latest to the oldest: what contradicts the later ones was before the drift changed.
        let mut agreeing = 0;
        for old in self.kept.iter().rev() {
            let span = new.at.since(old.at);
            let (low, high) = (
                rate(new.low.saturating_sub(old.high), span),
                rate(new.high.saturating_sub(old.low), span),
            );
            if low > most || high < least {
                break;
            }
            (least, most) = (least.max(low), most.min(high));
            agreeing += 1;
        }
        self.kept.drain(..self.kept.len() - agreeing);
        if self.kept.len() == WINDOWS {
            self.kept.pop_front();
        }
        self.kept.push_back(new);
        self.per_billion = 0.clamp(least, most);
    }
}

/// A gain over a span in parts per billion.
fn rate(gain: Nanos, span: Nanos) -> Nanos {
    let rate = i128::from(gain) * i128::from(SECOND) / i128::from(span.max(1));
    Nanos::try_from(rate).unwrap_or(if rate < 0 { Nanos::MIN } else { Nanos::MAX })
}

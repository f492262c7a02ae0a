//! What an origin sees: requests as they arrive, and the figures of them. Pure; instants are arguments.

use std::collections::VecDeque;

use crate::pacing::{
    observed::Observed,
    time::{LocalTime, Nanos, SECOND, seconds},
};

/// Over how long the rate of the moment is taken.
const MOMENT: Nanos = 2 * SECOND;

/// All that has arrived.
#[derive(Debug, Default)]
pub(super) struct Sight {
    observed: Observed,
    /// Arrivals within the last moment, oldest first.
    recent: VecDeque<LocalTime>,
    first: Option<LocalTime>,
    last: Option<LocalTime>,
}

/// The figures of it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Figures {
    /// Requests in all.
    pub(super) total: u64,
    /// Requests per second over the last two seconds.
    pub(super) now: f64,
    /// From the first arrival to the last.
    pub(super) span: Nanos,
    /// Most requests in any second, both ends included.
    pub(super) busiest: usize,
    /// Between two arrivals, in seconds.
    pub(super) smallest_gap: Option<f64>,
}

impl Sight {
    /// A request arrived.
    pub(super) fn arrived(&mut self, at: LocalTime) {
        // Two tasks may take their instants in one order and come here in the other.
        let at = self.last.map_or(at, |last| at.max(last));
        self.observed.dispatched(at);
        self.first.get_or_insert(at);
        self.last = Some(at);
        while self.recent.front().is_some_and(|t| at.since(*t) >= MOMENT) {
            self.recent.pop_front();
        }
        self.recent.push_back(at);
    }

    /// How it stands.
    pub(super) fn figures(&self, now: LocalTime) -> Figures {
        let recent = self.recent.iter().filter(|t| now.since(**t) < MOMENT);
        let moment = self
            .first
            .map_or(MOMENT, |first| now.since(first))
            .clamp(SECOND, MOMENT);
        Figures {
            total: self.observed.total(),
            now: recent.count() as f64 / seconds(moment),
            span: match (self.first, self.last) {
                (Some(first), Some(last)) => last.since(first),
                _ => 0,
            },
            busiest: self.observed.busiest_second(now),
            smallest_gap: self.observed.smallest_gap(now),
        }
    }
}

impl Figures {
    /// Requests per second over the whole span.
    pub(super) fn average(&self) -> f64 {
        match (self.total, self.span) {
            (2.., 1..) => (self.total - 1) as f64 / seconds(self.span),
            _ => self.total as f64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pacing::time::MILLISECOND;

    #[test]
    fn a_steady_pace_is_seen_as_it_is() {
        let mut sight = Sight::default();
        assert_eq!(sight.figures(LocalTime(5)), Figures::default());
        for i in 0..51 {
            sight.arrived(LocalTime(7 * SECOND + i * 100 * MILLISECOND));
        }
        let figures = sight.figures(LocalTime(12 * SECOND));
        assert_eq!((figures.total, figures.span), (51, 5 * SECOND));
        assert_eq!((figures.now, figures.average()), (10.0, 10.0));
        assert_eq!((figures.busiest, figures.smallest_gap), (11, Some(0.1)));
        assert_eq!(sight.figures(LocalTime(20 * SECOND)).now, 0.0);
    }

    #[test]
    fn arrivals_told_in_the_wrong_order_count_all_the_same() {
        let mut sight = Sight::default();
        for at in [3, 2, 4] {
            sight.arrived(LocalTime(at * SECOND));
        }
        let figures = sight.figures(LocalTime(4 * SECOND));
        assert_eq!((figures.total, figures.span), (3, SECOND));
        assert_eq!(figures.smallest_gap, Some(0.0));
    }
}

//! What this replica really sent: the rate, the busiest second and the smallest gap, from the instants of dispatch.
//!
//! These are measured, not derived from the ceiling: they are the proof that it holds. Instants are arguments.

use std::collections::VecDeque;

use crate::pacing::time::{LocalTime, Nanos, SECOND, seconds};

/// Over how many seconds the rate is taken.
const RATE_SECONDS: i64 = 10;
/// Over how many seconds the busiest one and the smallest gap are kept.
const KEPT_SECONDS: i64 = 300;

/// The dispatches of one destination by this replica.
#[derive(Debug, Default)]
pub struct Observed {
    /// Dispatches within the last second, oldest first.
    last_second: VecDeque<LocalTime>,
    last: Option<LocalTime>,
    /// One entry a second in which something was sent, oldest first.
    seconds: VecDeque<Second>,
    first: Option<LocalTime>,
    total: u64,
}

#[derive(Clone, Copy, Debug)]
struct Second {
    number: i64,
    count: usize,
    /// Most dispatches in any second that ended in this one.
    busiest: usize,
    smallest_gap: Option<Nanos>,
}

impl Observed {
    /// A request was dispatched at `at`. Instants that come out of order count as simultaneous.
    pub fn dispatched(&mut self, at: LocalTime) {
        let at = self.last.map_or(at, |last| at.max(last));
        self.first.get_or_insert(at);
        self.total += 1;
        while self
            .last_second
            .front()
            .is_some_and(|t| at.since(*t) > SECOND)
        {
            self.last_second.pop_front();
        }
        self.last_second.push_back(at);
        let gap = self.last.map(|last| at.since(last));
        self.last = Some(at);
        let number = at.0.div_euclid(SECOND);
        while self
            .seconds
            .front()
            .is_some_and(|s| s.number < number - KEPT_SECONDS)
        {
            self.seconds.pop_front();
        }
        if self.seconds.back().is_none_or(|s| s.number < number) {
            self.seconds.push_back(Second {
                number,
                count: 0,
                busiest: 0,
                smallest_gap: None,
            });
        }
        if let Some(second) = self.seconds.back_mut() {
            second.count += 1;
            second.busiest = second.busiest.max(self.last_second.len());
            second.smallest_gap = [second.smallest_gap, gap].into_iter().flatten().min();
        }
    }

    /// Dispatches per second over the last ten whole seconds, or since the first if that is less.
    pub fn rate(&self, now: LocalTime) -> f64 {
        let this = now.0.div_euclid(SECOND);
        let Some(first) = self.first else { return 0.0 };
        let span = (this - first.0.div_euclid(SECOND)).clamp(1, RATE_SECONDS);
        let whole = self
            .seconds
            .iter()
            .filter(|s| s.number >= this - span && s.number < this);
        whole.map(|s| s.count).sum::<usize>() as f64 / span as f64
    }

    /// Dispatches in each whole second of the last five minutes, oldest first.
    pub fn per_second(&self, now: LocalTime) -> Vec<u64> {
        let oldest = now.0.div_euclid(SECOND) - KEPT_SECONDS;
        let mut counts = vec![0; KEPT_SECONDS as usize];
        for second in self.kept(now) {
            let index = usize::try_from(second.number - oldest).ok();
            if let Some(count) = index.and_then(|i| counts.get_mut(i)) {
                *count = second.count as u64;
            }
        }
        counts
    }

    /// All dispatches so far.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Most dispatches in any second, both ends included, that ended in the last five minutes.
    pub fn busiest_second(&self, now: LocalTime) -> usize {
        self.kept(now).map(|s| s.busiest).max().unwrap_or(0)
    }

    /// Smallest gap between two dispatches in the last five minutes, in seconds.
    pub fn smallest_gap(&self, now: LocalTime) -> Option<f64> {
        self.kept(now)
            .filter_map(|s| s.smallest_gap)
            .min()
            .map(seconds)
    }

    fn kept(&self, now: LocalTime) -> impl Iterator<Item = &Second> {
        let oldest = now.0.div_euclid(SECOND) - KEPT_SECONDS;
        self.seconds.iter().filter(move |s| s.number >= oldest)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pacing::time::MILLISECOND;

    #[test]
    fn a_steady_pace_is_seen_as_it_is() {
        let mut o = Observed::default();
        for i in 0..400 {
            o.dispatched(LocalTime(i * 50 * MILLISECOND));
        }
        let now = LocalTime(20 * SECOND);
        assert_eq!(o.rate(now), 20.0);
        assert_eq!(o.busiest_second(now), 21);
        assert_eq!(o.smallest_gap(now), Some(0.05));
        assert_eq!(o.rate(LocalTime(60 * SECOND)), 0.0);
        assert_eq!(o.busiest_second(LocalTime(400 * SECOND)), 0);
    }

    #[test]
    fn whole_seconds_of_five_minutes_are_told_oldest_first() {
        let mut o = Observed::default();
        assert_eq!(o.per_second(LocalTime(0)), [0; 300]);
        for at in [0, 1, 1, 299, 300, 300] {
            o.dispatched(LocalTime(at * SECOND));
        }
        let at_300 = o.per_second(LocalTime(300 * SECOND));
        assert_eq!((at_300.len(), at_300[0], at_300[1]), (300, 1, 2));
        assert_eq!(at_300[299], 1, "the second that has begun is not whole");
        let at_301 = o.per_second(LocalTime(301 * SECOND));
        assert_eq!((at_301[0], at_301[298], at_301[299]), (2, 1, 2));
        assert_eq!(o.per_second(LocalTime(700 * SECOND)), [0; 300]);
    }

    proptest! {
        #[test]
        fn the_busiest_second_is_the_densest_window(gaps in prop::collection::vec(0i64..400 * MILLISECOND, 1..200)) {
            let (mut o, mut t, mut all) = (Observed::default(), LocalTime(7), Vec::new());
            for gap in &gaps {
                t = t.plus(*gap);
                o.dispatched(t);
                all.push(t);
            }
            let densest = all.iter().map(|end| all.iter().filter(|x| *x <= end && end.since(**x) <= SECOND).count()).max();
            prop_assert_eq!(Some(o.busiest_second(t)), densest);
            prop_assert_eq!(o.smallest_gap(t).map(|g| (g * 1e9).round() as i64), gaps[1..].iter().min().copied());
        }
    }
}

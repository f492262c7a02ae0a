//! What a row of arrivals says about a pace: rate, busiest second, gaps. Pure; knows no sockets and no clock.

use std::{collections::HashMap, time::Duration};

/// Instants, sorted, each as the time since one common start.
#[derive(Clone, Debug)]
pub struct Timeline {
    at: Vec<Duration>,
}

impl Timeline {
    /// Sorts the instants.
    pub fn new(mut at: Vec<Duration>) -> Self {
        at.sort();
        Timeline { at }
    }

    /// The instants.
    pub fn at(&self) -> &[Duration] {
        &self.at
    }

    /// How many arrivals.
    pub fn count(&self) -> usize {
        self.at.len()
    }

    /// From the first arrival to the last.
    pub fn span(&self) -> Duration {
        match (self.at.first(), self.at.last()) {
            (Some(first), Some(last)) => *last - *first,
            _ => Duration::ZERO,
        }
    }

    /// Arrivals per second, as gaps over span: n arrivals make n - 1 intervals.
    pub fn rate(&self) -> f64 {
        (self.count().saturating_sub(1)) as f64 / self.span().as_secs_f64()
    }

    /// The most arrivals in any *closed* second `[t, t + 1 s]`. An exact pace of r per second has r + 1 of them.
    pub fn busiest_second(&self) -> usize {
        let second = Duration::from_secs(1);
        let mut first = 0;
        let mut most = 0;
        for (last, at) in self.at.iter().enumerate() {
            while *at - self.at[first] > second {
                first += 1;
            }
            most = most.max(last - first + 1);
        }
        most
    }

    /// The gap that `share` (0 to 1) of the gaps do not exceed; 0 gives the smallest. `None` with fewer than two arrivals.
    pub fn gap(&self, share: f64) -> Option<Duration> {
        let mut gaps: Vec<Duration> = self.at.windows(2).map(|pair| pair[1] - pair[0]).collect();
        gaps.sort();
        let rank = (share * gaps.len() as f64).floor() as usize;
        gaps.get(rank.min(gaps.len().checked_sub(1)?)).copied()
    }

    /// By how many requests a pace of `rate` per second was exceeded at most, over any span: the largest of arrivals in
    /// `[t, u]` less `rate` times `u - t`. An exact pace gives 1.
    pub fn excess(&self, rate: f64) -> f64 {
        let (mut lowest, mut most) = (f64::MAX, 0.0f64);
        for (n, at) in self.at.iter().enumerate() {
            let ahead = n as f64 - rate * at.as_secs_f64();
            lowest = lowest.min(ahead);
            most = most.max(ahead - lowest + 1.0);
        }
        most
    }

    /// The arrivals from `from` until before `to`.
    pub fn between(&self, from: Duration, to: Duration) -> Timeline {
        Timeline {
            at: self
                .at
                .iter()
                .copied()
                .filter(|at| (from..to).contains(at))
                .collect(),
        }
    }

    /// The arrivals at or after `from`.
    pub fn since(&self, from: Duration) -> Timeline {
        Timeline {
            at: self.at.iter().copied().filter(|at| *at >= from).collect(),
        }
    }
}

/// The ids that occur more than once.
pub fn duplicates<'a>(ids: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let mut seen = HashMap::new();
    for id in ids {
        *seen.entry(id).or_insert(0) += 1;
    }
    let mut twice: Vec<&str> = seen
        .into_iter()
        .filter(|(_, times)| *times > 1)
        .map(|(id, _)| id)
        .collect();
    twice.sort();
    twice
}

/// A pace that a row of arrivals must keep, with room for the jitter of sockets and processes.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Arrivals per second, at least.
    pub slowest: f64,
    /// Arrivals per second, at most.
    pub fastest: f64,
    /// Most arrivals in a closed second.
    pub busiest_second: usize,
    /// The first percentile of the gaps, at least.
    pub first_percentile_gap: Duration,
}

impl Pace {
    /// Every way in which `timeline` departs from the pace, in words; empty when it keeps it.
    pub fn faults(&self, timeline: &Timeline) -> Vec<String> {
        let mut faults = Vec::new();
        let rate = timeline.rate();
        if !(self.slowest..=self.fastest).contains(&rate) {
            faults.push(format!(
                "rate {rate:.3}/s is outside {}..={}/s",
                self.slowest, self.fastest
            ));
        }
        let busiest = timeline.busiest_second();
        if busiest > self.busiest_second {
            faults.push(format!(
                "a second holds {busiest} arrivals, more than {}",
                self.busiest_second
            ));
        }
        let gap = timeline.gap(0.01).unwrap_or_default();
        if gap < self.first_percentile_gap {
            faults.push(format!(
                "the first percentile gap {gap:?} is under {:?}",
                self.first_percentile_gap
            ));
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn millis(at: &[u64]) -> Timeline {
        Timeline::new(at.iter().copied().map(Duration::from_millis).collect())
    }

    const TWENTY_PER_SECOND: Pace = Pace {
        slowest: 19.8,
        fastest: 20.02,
        busiest_second: 21,
        first_percentile_gap: Duration::from_millis(40),
    };

    fn even(count: u64, gap_ms: u64) -> Vec<u64> {
        (0..count).map(|n| n * gap_ms).collect()
    }

    #[test]
    fn an_exact_pace_has_no_faults() {
        let timeline = millis(&even(300, 50));
        assert_eq!(TWENTY_PER_SECOND.faults(&timeline), Vec::<String>::new());
        assert_eq!(timeline.busiest_second(), 21);
        assert!((timeline.rate() - 20.0).abs() < 1e-9);
    }

    #[test]
    fn eight_arrivals_at_seven_per_second_span_one_second() {
        let timeline = Timeline::new(
            (0..8)
                .map(|n| Duration::from_secs_f64(f64::from(n) / 7.0))
                .collect(),
        );
        assert!((timeline.span().as_secs_f64() - 1.0).abs() < 1e-6);
        assert!((timeline.rate() - 7.0).abs() < 1e-6);
    }

    #[test]
    fn one_arrival_too_many_in_a_second_is_found() {
        let mut at = even(300, 50);
        at.push(5_020);
        let faults = TWENTY_PER_SECOND.faults(&millis(&at));
        assert!(
            faults.iter().any(|fault| fault.contains("22 arrivals")),
            "{faults:?}"
        );
    }

    #[test]
    fn three_paces_added_up_are_found_in_rate_second_and_gaps() {
        let three_times = even(300, 50)
            .into_iter()
            .flat_map(|at| [at, at + 3, at + 7])
            .collect::<Vec<_>>();
        assert_eq!(TWENTY_PER_SECOND.faults(&millis(&three_times)).len(), 3);
    }

    #[test]
    fn a_pause_is_found_in_the_rate() {
        let at: Vec<u64> = even(300, 50)
            .into_iter()
            .map(|at| if at > 5_000 { at + 400 } else { at })
            .collect();
        let faults = TWENTY_PER_SECOND.faults(&millis(&at));
        assert!(
            faults.len() == 1 && faults[0].contains("rate"),
            "{faults:?}"
        );
    }

    #[test]
    fn pairs_that_keep_the_rate_are_found_in_the_gaps() {
        let pairs: Vec<u64> = (0..150).flat_map(|n| [n * 100, n * 100 + 5]).collect();
        let faults = TWENTY_PER_SECOND.faults(&millis(&pairs));
        assert!(
            faults.iter().any(|fault| fault.contains("gap 5ms")),
            "{faults:?}"
        );
    }

    #[test]
    fn the_second_is_closed_on_both_sides() {
        assert_eq!(millis(&[0, 1000]).busiest_second(), 2);
        assert_eq!(millis(&[0, 1001]).busiest_second(), 1);
    }

    #[test]
    fn gaps_are_ranked_from_the_smallest() {
        let timeline = millis(&[0, 10, 30, 60, 100]);
        assert_eq!(timeline.gap(0.0), Some(Duration::from_millis(10)));
        assert_eq!(timeline.gap(0.5), Some(Duration::from_millis(30)));
        assert_eq!(timeline.gap(1.0), Some(Duration::from_millis(40)));
        assert_eq!(millis(&[3]).gap(0.0), None);
    }

    #[test]
    fn an_id_seen_twice_is_named() {
        assert_eq!(duplicates(["a", "b", "a", "c", "c"]), vec!["a", "c"]);
        assert!(duplicates(["a", "b"]).is_empty());
    }

    #[test]
    fn an_exact_pace_exceeds_itself_by_one_and_a_burst_by_what_it_adds() {
        assert!((millis(&even(50, 50)).excess(20.0) - 1.0).abs() < 1e-9);
        let mut at = even(50, 50);
        at.extend([1_010, 1_020, 1_030]);
        assert!((millis(&at).excess(20.0) - 4.0).abs() < 1e-9);
        assert_eq!(millis(&[]).excess(20.0), 0.0);
    }

    #[test]
    fn only_arrivals_of_a_span_are_kept() {
        let part = millis(&[0, 5, 10]).between(Duration::from_millis(5), Duration::from_millis(10));
        assert_eq!(part.count(), 1);
    }

    #[test]
    fn only_later_arrivals_are_kept() {
        assert_eq!(
            millis(&[0, 5, 10]).since(Duration::from_millis(5)).count(),
            2
        );
    }

    proptest! {
        #[test]
        fn the_sliding_window_agrees_with_counting_from_every_arrival(at in prop::collection::vec(0u64..5_000, 1..80)) {
            let timeline = millis(&at);
            let counted = at.iter().map(|from| at.iter().filter(|t| (*from..=from + 1000).contains(t)).count()).max();
            prop_assert_eq!(Some(timeline.busiest_second()), counted);
        }
    }
}

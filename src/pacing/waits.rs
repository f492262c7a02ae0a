//! How long the requests that were sent last had waited: exact quantiles of a bounded number of them, for people.
//!
//! The histogram of the metrics counts from the start of the process; this forgets. Instants are arguments.

use std::collections::VecDeque;

use crate::pacing::time::{LocalTime, Nanos, SECOND, seconds};

/// Requests that are remembered. Enough for the 99th percentile to mean something, few enough to sort when looked at.
const KEPT: usize = 1000;
/// For how long they are remembered.
const KEPT_FOR: Nanos = 300 * SECOND;

/// The waits of the last requests to one destination.
#[derive(Debug, Default)]
pub struct Waits {
    /// When each was sent, and how long it had waited; oldest first.
    sent: VecDeque<(LocalTime, Nanos)>,
}

/// What they come to, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quantiles {
    /// How many requests these are of: the last thousand, of the last five minutes.
    pub requests: usize,
    /// Half of them waited no longer.
    pub median: f64,
    /// Of a hundred, 99 waited no longer.
    pub p99: f64,
}

impl Waits {
    /// A request was sent at `at` after it had waited for `wait`.
    pub fn dispatched(&mut self, at: LocalTime, wait: Nanos) {
        if self.sent.len() == KEPT {
            self.sent.pop_front();
        }
        self.sent.push_back((at, wait));
    }

    /// The quantiles at `now`; `None` if nothing was sent in the last five minutes.
    pub fn quantiles(&self, now: LocalTime) -> Option<Quantiles> {
        let recent = |(at, _): &&(LocalTime, Nanos)| now.since(*at) <= KEPT_FOR;
        let mut waits: Vec<Nanos> = self.sent.iter().filter(recent).map(|(_, w)| *w).collect();
        waits.sort_unstable();
        // The nearest rank: the smallest wait that so many of a hundred did not exceed.
        let rank = |percent: usize| (waits.len() * percent).div_ceil(100).saturating_sub(1);
        let at = |percent| waits.get(rank(percent)).copied().map(seconds);
        Some(Quantiles {
            requests: waits.len(),
            median: at(50)?,
            p99: at(99)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_of_the_last_thousand_requests_of_five_minutes() {
        let mut waits = Waits::default();
        assert_eq!(waits.quantiles(LocalTime(0)), None);
        waits.dispatched(LocalTime(0), 7 * SECOND);
        let one = waits.quantiles(LocalTime(SECOND)).expect("one was sent");
        assert_eq!((one.requests, one.median, one.p99), (1, 7.0, 7.0));
        for wait in 1..=1000 {
            waits.dispatched(LocalTime(10 * SECOND), wait * SECOND);
        }
        let all = waits.quantiles(LocalTime(10 * SECOND));
        let all = all.expect("a thousand were sent");
        assert_eq!((all.requests, all.median, all.p99), (1000, 500.0, 990.0));
        assert!(waits.quantiles(LocalTime(310 * SECOND)).is_some());
        assert_eq!(waits.quantiles(LocalTime(311 * SECOND)), None);
    }
}

//! What all replicas together have sent, from what each says with its heartbeats. Instants and words are arguments.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::membership::lease::Lease;

/// Whole seconds over which the rate is taken.
const RATE_SECONDS: i64 = 10;
/// Whole seconds that are kept, for the busiest one.
const KEPT_SECONDS: i64 = 300;
/// Runs that are remembered although they hold no number.
const KEPT_RUNS: usize = 256;
/// Seconds with dispatches that each replica tells of with a heartbeat, the latest ones.
pub const TOLD_SECONDS: i64 = 20;
/// Seconds that may still grow: a heartbeat is a second late at the least.
pub const UNSETTLED: i64 = 2;

/// The figures of one destination over all replicas.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Figures {
    /// Dispatches since this replica began to listen.
    pub dispatches: u64,
    /// Dispatches per second over the last ten settled seconds.
    pub observed: f64,
    /// Most dispatches in any whole second of the store's clock, of the last five minutes.
    pub busiest_second: u64,
}

/// What was heard, by destination.
#[derive(Debug, Default)]
pub struct Cluster {
    destinations: HashMap<String, Heard>,
    /// Settled seconds of which everybody who is heard has told: not those of an outage.
    known: BTreeSet<i64>,
    /// Runs that had begun before we began to listen.
    older: BTreeSet<String>,
}

#[derive(Debug, Default)]
struct Heard {
    total: u64,
    /// By incarnation: the count it gave last.
    last: HashMap<String, u64>,
    /// By second: the count of each incarnation.
    seconds: BTreeMap<i64, HashMap<String, u64>>,
}

impl Cluster {
    /// Takes in a lease as it was read at the store's second `now`. What a run had sent `before` we began to listen is not
    /// ours to add; a run that begins later counts from nothing, also what it sent before it could say so.
    pub fn hear(&mut self, lease: &Lease, now: i64, before: bool) {
        if before && self.older.len() < KEPT_RUNS {
            self.older.insert(lease.incarnation.clone());
        }
        let older = self.older.contains(&lease.incarnation);
        for (destination, count) in &lease.word.dispatches {
            let heard = self.destinations.entry(destination.clone()).or_default();
            let known = heard.last.insert(lease.incarnation.clone(), *count);
            // A total that is not told has not changed. Told for the first time, all but what was sent lately is from
            // before we listened.
            let lately = || {
                let of = lease.word.seconds.get(destination);
                of.map_or(0, |counts| counts.values().sum::<u64>())
            };
            let from = known.unwrap_or_else(|| match older {
                true if before => *count,
                true => count.saturating_sub(lately()),
                false => 0,
            });
            heard.total += count.saturating_sub(from);
        }
        for (destination, counts) in &lease.word.seconds {
            let heard = self.destinations.entry(destination.clone()).or_default();
            for (second, count) in counts
                .iter()
                .filter(|(s, _)| (now - KEPT_SECONDS..=now + 1).contains(*s))
            {
                let of = heard
                    .seconds
                    .entry(*second)
                    .or_default()
                    .entry(lease.incarnation.clone())
                    .or_default();
                *of = (*of).max(*count);
            }
            heard
                .seconds
                .retain(|second, _| (now - KEPT_SECONDS..=now + 1).contains(second));
        }
    }

    /// All leases were read at the store's second `now`.
    pub fn read(&mut self, now: i64) {
        self.known.extend(now - TOLD_SECONDS..now - UNSETTLED);
        // A clock that went back has left seconds of the future.
        self.known
            .retain(|second| (now - KEPT_SECONDS..now).contains(second));
        for heard in self.destinations.values_mut() {
            heard.seconds.retain(|second, _| *second <= now + 1);
        }
    }

    /// Dispatches of all replicas in each of the last 300 whole seconds before the store's second `now`, oldest first;
    /// `None` for seconds of which we have not heard: the last few, and those of an outage.
    pub fn per_second(&self, destination: &str, now: i64) -> Vec<Option<u64>> {
        let heard = self.destinations.get(destination);
        let count = |second| {
            let of = heard.and_then(|h| h.seconds.get(&second));
            of.map_or(0, |of| of.values().sum())
        };
        (now - KEPT_SECONDS..now)
            .map(|second| self.known.contains(&second).then(|| count(second)))
            .collect()
    }

    /// Forgets runs that nobody `knows` any more, once they are many. (One may come back: two replicas that were given
    /// the same name take the number from each other.)
    pub fn forget_others(&mut self, knows: impl Fn(&str) -> bool) {
        self.older.retain(|incarnation| knows(incarnation));
        for heard in self.destinations.values_mut() {
            if heard.last.len() > KEPT_RUNS {
                heard.last.retain(|incarnation, _| knows(incarnation));
            }
        }
    }

    /// The figures of a destination at the store's second `now`.
    pub fn figures(&self, destination: &str, now: i64) -> Figures {
        let Some(heard) = self.destinations.get(destination) else {
            return Figures::default();
        };
        let count = |of: &HashMap<String, u64>| of.values().sum::<u64>();
        let settled = heard
            .seconds
            .range(now - UNSETTLED - RATE_SECONDS..now - UNSETTLED);
        Figures {
            dispatches: heard.total,
            observed: settled.map(|(_, of)| count(of)).sum::<u64>() as f64 / RATE_SECONDS as f64,
            busiest_second: heard
                .seconds
                .range(now - KEPT_SECONDS..)
                .map(|(_, of)| count(of))
                .max()
                .unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{membership::lease::Word, pacing::time::StoreTime};

    fn lease(incarnation: &str, total: u64, seconds: &[(i64, u64)]) -> Lease {
        let word = Word {
            replica: incarnation.into(),
            dispatches: [("d".to_owned(), total)].into(),
            seconds: [("d".to_owned(), seconds.iter().copied().collect())].into(),
            ..Word::default()
        };
        Lease {
            at: StoreTime(0),
            incarnation: incarnation.into(),
            word,
        }
    }

    #[test]
    fn seconds_of_all_replicas_add_up_and_are_not_counted_twice() {
        let mut c = Cluster::default();
        for _ in 0..3 {
            c.hear(&lease("a", 10, &[(100, 4), (101, 3)]), 103, true);
            c.hear(&lease("b", 20, &[(100, 3), (101, 4)]), 103, true);
        }
        assert_eq!(
            c.figures("d", 103),
            Figures {
                dispatches: 0,
                observed: 0.7,
                busiest_second: 7
            }
        );
        c.hear(&lease("a", 14, &[(101, 4)]), 104, false);
        c.hear(&lease("b", 21, &[]), 104, false);
        let f = c.figures("d", 104);
        assert_eq!((f.dispatches, f.busiest_second), (5, 8));
        assert_eq!(c.figures("d", 500).busiest_second, 0);
        assert_eq!(c.figures("other", 104), Figures::default());
    }

    #[test]
    fn a_second_is_known_once_it_is_settled_and_never_if_it_passed_in_an_outage() {
        let mut c = Cluster::default();
        assert_eq!(c.per_second("d", 100), [None; 300]);
        c.hear(&lease("a", 9, &[(97, 4), (98, 5)]), 100, true);
        c.read(100);
        let at = |c: &Cluster, now: i64, second: i64| {
            c.per_second("d", now)[usize::try_from(second - now + 300).expect("one of the 300")]
        };
        assert_eq!(c.per_second("d", 100).len(), 300);
        let seen = [79, 80, 97, 98].map(|second| at(&c, 100, second));
        assert_eq!(seen, [None, Some(0), Some(4), None]);
        // Away until 160: nobody tells of all that was sent in between.
        assert_eq!(at(&c, 160, 120), None);
        c.hear(&lease("a", 99, &[(150, 3)]), 160, false);
        c.read(160);
        let seen = [97, 98, 139, 140, 150].map(|second| at(&c, 160, second));
        assert_eq!(seen, [Some(4), None, None, Some(0), Some(3)]);
        assert_eq!(c.per_second("other", 160)[290], Some(0));
        // The store's clock goes back.
        c.read(50);
        assert_eq!(c.known.last(), Some(&47));
    }

    #[test]
    fn what_the_store_showed_before_its_clock_went_back_is_no_longer_counted() {
        let mut c = Cluster::default();
        c.hear(&lease("a", 40, &[(3_698, 20), (3_699, 20)]), 3_700, true);
        c.read(3_700);
        assert_eq!(c.figures("d", 3_700).busiest_second, 20);
        c.read(100);
        assert_eq!(c.figures("d", 100).busiest_second, 0);
        c.hear(&lease("a", 47, &[(99, 7)]), 102, false);
        c.read(102);
        let f = c.figures("d", 102);
        assert_eq!((f.dispatches, f.busiest_second, f.observed), (7, 7, 0.7));
    }

    #[test]
    fn a_total_that_is_told_again_after_a_silence_counts_what_was_sent_since() {
        let mut c = Cluster::default();
        let quiet = Lease {
            word: Word::default(),
            ..lease("a", 0, &[])
        };
        c.hear(&quiet, 1, true);
        c.hear(&lease("a", 1_007, &[(90, 5), (91, 2)]), 92, false);
        assert_eq!(c.figures("d", 92).dispatches, 7);
        c.hear(&quiet, 200, false);
        c.hear(&lease("a", 1_010, &[(300, 3)]), 301, false);
        assert_eq!(c.figures("d", 301).dispatches, 10);
    }

    #[test]
    fn a_restart_does_not_take_anything_away() {
        let mut c = Cluster::default();
        c.hear(&lease("a1", 100, &[]), 1, true);
        c.hear(&lease("a1", 110, &[]), 2, false);
        // It began without the store.
        c.hear(&lease("a2", 3, &[]), 3, false);
        c.hear(&lease("a2", 5, &[]), 4, false);
        assert_eq!(c.figures("d", 4).dispatches, 15);
    }
}

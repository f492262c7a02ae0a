//! What this replica has sent, as it tells the others with its heartbeats: bounded, whatever is configured. Pure.

use std::collections::{BTreeMap, HashMap};

use super::{
    cluster::{TOLD_SECONDS, UNSETTLED},
    lease::SENT_BYTES,
};

/// What was sent, by destination.
#[derive(Debug, Default)]
pub struct Tally {
    destinations: HashMap<String, Sent>,
    /// The destination that was told of last; the next heartbeat goes on after it.
    turn: String,
}

/// What was sent to one destination.
#[derive(Debug, Default)]
struct Sent {
    total: u64,
    seconds: BTreeMap<i64, u64>,
}

/// What one heartbeat tells: totals, and counts of the last seconds, by destination.
pub type Told = (BTreeMap<String, u64>, BTreeMap<String, BTreeMap<i64, u64>>);

impl Tally {
    /// A request to `destination` went out in a slot of the store's second `second`.
    pub fn dispatched(&mut self, destination: &str, second: i64) {
        let sent = match self.destinations.get_mut(destination) {
            Some(sent) => sent,
            None => self.destinations.entry(destination.to_owned()).or_default(),
        };
        sent.total += 1;
        // The store's clock was set back: what was counted ahead of it would hide what is sent from now on.
        while sent
            .seconds
            .last_key_value()
            .is_some_and(|(s, _)| *s > second + UNSETTLED)
        {
            sent.seconds.pop_last();
        }
        *sent.seconds.entry(second).or_insert(0) += 1;
        while sent
            .seconds
            .first_key_value()
            .is_some_and(|(s, _)| *s <= second - TOLD_SECONDS)
        {
            sent.seconds.pop_first();
        }
    }

    /// What to tell at the store's second `now`: of destinations to which something was sent lately. Where those are too
    /// many for one row they take turns, so that all are told of before they are forgotten.
    pub fn tell(&mut self, now: i64) -> Told {
        let recent = now - TOLD_SECONDS..=now + UNSETTLED;
        let mut lately: Vec<(&String, &Sent)> = self
            .destinations
            .iter()
            .filter(|(_, sent)| sent.seconds.keys().any(|s| recent.contains(s)))
            .collect();
        lately.sort_unstable_by_key(|(name, _)| *name);
        let first = lately.partition_point(|(name, _)| **name <= self.turn);
        lately.rotate_left(first);
        let (mut told, mut bytes) = (Told::default(), 0);
        let mut turn: Option<String> = None;
        for (name, sent) in lately {
            bytes += sent.longest(name);
            if bytes > SENT_BYTES {
                self.turn = turn.unwrap_or_default();
                return told;
            }
            told.0.insert(name.clone(), sent.total);
            told.1.insert(name.clone(), sent.seconds.clone());
            turn = Some(name.clone());
        }
        self.turn.clear();
        told
    }
}

impl Sent {
    /// No more bytes than this tell of it: its name twice with what JSON puts around it, the total, the first second, and
    /// seven digits and a comma for each second since.
    fn longest(&self, name: &str) -> usize {
        let (first, last) = (
            self.seconds.first_key_value(),
            self.seconds.last_key_value(),
        );
        let span = first
            .zip(last)
            .map_or(0, |((first, _), (last, _))| last - first + 1);
        2 * (name.len() + 4) + 16 + 21 + 8 * usize::try_from(span).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_goes_back_leaves_no_second_of_the_future_behind() {
        let mut tally = Tally::default();
        for second in 5_000..5_040 {
            tally.dispatched("d", second);
        }
        // A slot of the second before may leave a moment late.
        tally.dispatched("d", 5_038);
        assert_eq!(tally.tell(5_040).1["d"].len(), 20);
        for _ in 0..7 {
            tally.dispatched("d", 1_400);
        }
        let (totals, seconds) = tally.tell(1_401);
        assert_eq!((totals["d"], &seconds["d"]), (48, &[(1_400, 7)].into()));
        // And forward.
        tally.dispatched("d", 9_000);
        assert_eq!(tally.tell(9_000).1["d"], [(9_000, 1)].into());
    }

    #[test]
    fn only_what_was_sent_to_lately_is_told_of() {
        let mut tally = Tally::default();
        tally.dispatched("old", 100);
        tally.dispatched("new", 121);
        let told: Vec<_> = tally.tell(121).0.into_keys().collect();
        assert_eq!(told, ["new"]);
    }

    #[test]
    fn too_many_destinations_take_turns() {
        let mut tally = Tally::default();
        let name = |n: usize| format!("{n:064}");
        for n in 0..2_000 {
            (100..120).for_each(|second| tally.dispatched(&name(n), second));
        }
        let mut told = std::collections::BTreeSet::new();
        for _ in 0..TOLD_SECONDS - 2 {
            told.extend(tally.tell(120).0.into_keys());
        }
        assert_eq!(told.len(), 2_000);
    }
}

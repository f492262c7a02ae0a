//! The order in which waiting requests are served: urgency, then one of each client in turn, then arrival.
//!
//! Each request gets its place when it arrives and keeps it: the key `(urgency, round, number)`, where `round` is one
//! more than that of the client's request before, or the round being served if that is later (start-time fair
//! queuing, Goyal et al. 1996, with equal weights). So a client with a thousand requests delays another's first by at
//! most one, and finding a place costs no walk over the clients. Nothing here knows slots, time or connections.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound,
};

use rustc_hash::FxHashMap;

/// Whose turn it is to be fair to: a client address or the user it logged in as, hashed by the caller.
pub type Client = u64;

/// RFC 9218 urgency, 0 (first) to 7.
pub type Urgency = u8;

/// A place in line. Smaller is served first; no two requests share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    urgency: Urgency,
    round: u64,
    number: u64,
}

impl Place {
    /// Not after any other place.
    pub const FIRST: Place = Place {
        urgency: 0,
        round: 0,
        number: 0,
    };
}

/// Waiting requests in the order in which they will be served.
#[derive(Debug, Default)]
pub struct Line {
    places: BTreeSet<Place>,
    /// Waiting requests in each round, so that a rank costs a walk over rounds and not over requests.
    rounds: BTreeMap<(Urgency, u64), usize>,
    /// The keys are hashes already, as random as nobody could choose them.
    clients: FxHashMap<(Urgency, Client), Turns>,
    /// Clients of which nobody waits, kept while their last turn was in the round being served: one that comes back
    /// at once, again and again, would else be served before everybody in the next round, for ever.
    resting: [Vec<Client>; 8],
    /// The round being served, for each urgency.
    serving: [u64; 8],
    next_number: u64,
}

#[derive(Debug, Default)]
struct Turns {
    /// Those that wait, so that a place given up at the end of the line can be given again.
    waiting: BTreeSet<Place>,
    /// The latest round in which one was served.
    served: Option<u64>,
}

/// Resting clients remembered for each urgency; beyond that all are forgotten, at the price of one turn each.
const RESTING_LIMIT: usize = 4096;

impl Line {
    /// Where a request of `client` that arrived now would stand; nothing changes.
    pub fn rank_of_next(&self, client: Client, urgency: Urgency) -> usize {
        let last = (urgency.min(7), self.round_for(client, urgency));
        // From both ends at once: one client's thousand rounds are counted from behind, a newcomer's place from before.
        let mut ahead = self.rounds.range(..=last);
        let mut behind = self.rounds.range((Bound::Excluded(last), Bound::Unbounded));
        let (mut before, mut after) = (0, 0);
        loop {
            match ahead.next() {
                Some((_, n)) => before += n,
                None => return before,
            }
            match behind.next_back() {
                Some((_, n)) => after += n,
                None => return self.len() - after,
            }
        }
    }

    /// Puts a request of `client` in line. An urgency above 7 counts as 7.
    pub fn join(&mut self, client: Client, urgency: Urgency) -> Place {
        let urgency = urgency.min(7);
        let place = Place {
            urgency,
            round: self.round_for(client, urgency),
            number: self.next_number,
        };
        self.next_number += 1;
        self.stand(place, client);
        place
    }

    /// Puts a request that had left, because it was thought served, back in its old place.
    pub fn rejoin(&mut self, place: Place, client: Client) {
        self.stand(place, client);
    }

    fn stand(&mut self, place: Place, client: Client) {
        let turns = self.clients.entry((place.urgency, client)).or_default();
        turns.waiting.insert(place);
        *self.rounds.entry((place.urgency, place.round)).or_insert(0) += 1;
        self.places.insert(place);
    }

    /// Takes a request out of line, served or not. `served` moves the round on.
    pub fn leave(&mut self, place: Place, client: Client, served: bool) {
        if !self.places.remove(&place) {
            return;
        }
        let round = (place.urgency, place.round);
        if let Some(n) = self.rounds.get_mut(&round) {
            *n -= 1;
            if *n == 0 {
                self.rounds.remove(&round);
            }
        }
        let at = usize::from(place.urgency);
        if served && place.round > self.serving[at] {
            self.serving[at] = place.round;
            self.forget_resting(place.urgency);
        }
        let key = (place.urgency, client);
        let Some(turns) = self.clients.get_mut(&key) else {
            return;
        };
        turns.waiting.remove(&place);
        if served {
            turns.served = turns.served.max(Some(place.round));
        }
        if turns.waiting.is_empty() {
            if turns.served < Some(self.serving[at]) {
                self.clients.remove(&key);
            } else {
                self.resting[at].push(client);
                if self.resting[at].len() > RESTING_LIMIT {
                    self.forget_resting(place.urgency);
                }
            }
        }
    }

    /// Forgets the clients of which nobody waits: the round in which they were served is over.
    fn forget_resting(&mut self, urgency: Urgency) {
        for client in std::mem::take(&mut self.resting[usize::from(urgency)]) {
            let key = (urgency, client);
            if self.clients.get(&key).is_some_and(|t| t.waiting.is_empty()) {
                self.clients.remove(&key);
            }
        }
    }

    /// How many are in line.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// The places in line, first to last.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = Place> + '_ {
        self.places.iter().copied()
    }

    /// The place served next.
    pub fn first(&self) -> Option<Place> {
        self.places.first().copied()
    }

    fn round_for(&self, client: Client, urgency: Urgency) -> u64 {
        let urgency = urgency.min(7);
        let serving = self.serving[usize::from(urgency)];
        let Some(turns) = self.clients.get(&(urgency, client)) else {
            return serving;
        };
        let last = turns.waiting.last().map(|p| p.round).max(turns.served);
        last.map_or(serving, |last| serving.max(last + 1))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn serve_all(line: &mut Line, owners: &HashMap<Place, Client>) -> Vec<Client> {
        let mut order = Vec::new();
        while let Some(place) = line.first() {
            line.leave(place, owners[&place], true);
            order.push(owners[&place]);
        }
        order
    }

    #[test]
    fn clients_take_turns_whatever_they_queued() {
        let (mut line, mut owners) = (Line::default(), HashMap::new());
        for client in [1, 1, 1, 1, 2, 3, 3] {
            owners.insert(line.join(client, 3), client);
        }
        assert_eq!(serve_all(&mut line, &owners), [1, 2, 3, 1, 3, 1, 1]);
    }

    #[test]
    fn a_newcomer_waits_one_round_not_the_whole_queue() {
        let (mut line, mut owners) = (Line::default(), HashMap::new());
        for _ in 0..1000 {
            owners.insert(line.join(1, 3), 1);
        }
        for _ in 0..5 {
            let first = line.first().expect("waiting");
            line.leave(first, 1, true);
        }
        assert_eq!(line.rank_of_next(2, 3), 0);
        owners.insert(line.join(2, 3), 2);
        assert_eq!(serve_all(&mut line, &owners)[..2], [2, 1]);
    }

    #[test]
    fn a_client_that_always_comes_straight_back_takes_every_other_turn_only() {
        let (mut line, mut owners) = (Line::default(), HashMap::new());
        for client in [1, 1, 1, 1, 1, 2] {
            owners.insert(line.join(client, 3), client);
        }
        let mut order = Vec::new();
        for _ in 0..8 {
            let place = line.first().expect("waiting");
            let client = owners[&place];
            line.leave(place, client, true);
            order.push(client);
            if client == 2 {
                owners.insert(line.join(2, 3), 2);
            }
        }
        assert_eq!(order, [1, 2, 1, 2, 1, 2, 1, 2]);
    }

    #[test]
    fn requests_that_give_up_do_not_push_their_client_back() {
        let mut line = Line::default();
        for _ in 0..3 {
            line.join(2, 3);
        }
        for _ in 0..100 {
            let place = line.join(1, 3);
            line.leave(place, 1, false);
        }
        assert_eq!(line.rank_of_next(1, 3), 1);
    }

    #[test]
    fn clients_that_come_once_are_not_remembered_for_ever() {
        let mut line = Line::default();
        for client in 0..20_000 {
            let place = line.join(client, 3);
            line.leave(place, client, true);
        }
        assert!(line.clients.len() <= RESTING_LIMIT);
        assert!(line.resting[3].len() <= RESTING_LIMIT);
    }

    #[test]
    fn urgency_goes_before_everything_else() {
        let (mut line, mut owners) = (Line::default(), HashMap::new());
        for (client, urgency) in [(1, 3), (2, 7), (3, 0), (1, 3)] {
            owners.insert(line.join(client, urgency), client);
        }
        assert_eq!(serve_all(&mut line, &owners), [3, 1, 1, 2]);
    }

    proptest! {
        #[test]
        fn a_rank_is_what_the_order_says_and_nothing_is_left_behind(
            arrivals in prop::collection::vec((0u64..5, 0u8..8, any::<bool>()), 0..80),
        ) {
            let (mut line, mut owners) = (Line::default(), HashMap::new());
            for (client, urgency, serve) in arrivals {
                let rank = line.rank_of_next(client, urgency);
                let place = line.join(client, urgency);
                owners.insert(place, client);
                prop_assert_eq!(line.iter().position(|p| p == place), Some(rank));
                if serve {
                    let first = line.first().expect("just joined");
                    line.leave(first, owners[&first], true);
                }
            }
            let n = line.len();
            prop_assert_eq!(serve_all(&mut line, &owners).len(), n);
            prop_assert!(line.is_empty() && line.rounds.is_empty());
            let resting: usize = line.resting.iter().map(Vec::len).sum();
            prop_assert!(line.clients.len() <= resting);
        }

        /// No client is served more than once more often than another that waits all the while.
        #[test]
        fn service_is_fair(counts in prop::collection::vec(1usize..20, 2..6)) {
            let (mut line, mut owners) = (Line::default(), HashMap::new());
            for (client, n) in counts.iter().enumerate() {
                for _ in 0..*n {
                    owners.insert(line.join(client as u64, 3), client as u64);
                }
            }
            let mut served = vec![0usize; counts.len()];
            for client in serve_all(&mut line, &owners) {
                served[client as usize] += 1;
                for (other, n) in counts.iter().enumerate() {
                    if served[other] < *n {
                        prop_assert!(served[client as usize] <= served[other] + 1);
                    }
                }
            }
        }
    }
}

//! The order in which waiting requests are served: urgency, then one of each client in turn, then arrival.
//!
//! Each request gets its place when it arrives and keeps it: the key `(urgency, round, number)`, where `round` is one
//! more than that of the client's request before, or the round being served if that is later (start-time fair
//! queuing, Goyal et al. 1996, with equal weights). So a client with a thousand requests delays another's first by at
//! most one, and finding a place costs no walk over the clients. Nothing here knows slots, time or connections.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::Bound,
};

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
    clients: HashMap<(Urgency, Client), Turns>,
    /// The round being served, for each urgency.
    serving: [u64; 8],
    next_number: u64,
}

#[derive(Debug)]
struct Turns {
    last_round: u64,
    waiting: usize,
}

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
        let round = self.round_for(client, urgency);
        let turns = self.clients.entry((urgency, client)).or_insert(Turns {
            last_round: round,
            waiting: 0,
        });
        turns.last_round = round;
        turns.waiting += 1;
        let place = Place {
            urgency,
            round,
            number: self.next_number,
        };
        self.next_number += 1;
        self.stand(place);
        place
    }

    /// Puts a request that had left, because it was thought served, back in its old place.
    pub fn rejoin(&mut self, place: Place, client: Client) {
        let turns = self
            .clients
            .entry((place.urgency, client))
            .or_insert(Turns {
                last_round: place.round,
                waiting: 0,
            });
        turns.waiting += 1;
        self.stand(place);
    }

    fn stand(&mut self, place: Place) {
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
        if served {
            let serving = &mut self.serving[usize::from(place.urgency)];
            *serving = (*serving).max(place.round);
        }
        let key = (place.urgency, client);
        if let Some(turns) = self.clients.get_mut(&key) {
            turns.waiting -= 1;
            if turns.waiting == 0 {
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

    /// How many requests `client` has in line at `urgency`.
    pub fn waiting_of(&self, client: Client, urgency: Urgency) -> usize {
        self.clients
            .get(&(urgency, client))
            .map_or(0, |t| t.waiting)
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
        match self.clients.get(&(urgency, client)) {
            Some(turns) => serving.max(turns.last_round + 1),
            None => serving,
        }
    }
}

#[cfg(test)]
mod tests {
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
            prop_assert!(line.is_empty() && line.rounds.is_empty() && line.clients.is_empty());
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

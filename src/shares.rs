//! How much each client holds of something that all need, so that none can take all of it.
//!
//! Doesn't know what is held, nor who the clients are: they are keys. A client that holds nothing is not remembered.

use std::{
    collections::hash_map::Entry,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rustc_hash::FxHashMap;

use crate::pacing::queue::Client;

/// What is held, by client.
#[derive(Debug)]
pub struct Shares {
    limit: usize,
    /// Keys are hashes already, of which nobody outside can choose one.
    held: Mutex<FxHashMap<Client, usize>>,
}

impl Shares {
    /// Each client may hold `limit` at one time.
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Shares {
            limit,
            held: Mutex::default(),
        })
    }

    /// One more for `client`, until what is returned is dropped; `None` where it holds its limit already.
    pub fn take(self: &Arc<Self>, client: Client) -> Option<Share> {
        let mut held = self.lock();
        let count = held.entry(client).or_insert(0);
        if *count >= self.limit {
            return None;
        }
        *count += 1;
        drop(held);
        Some(Share {
            of: self.clone(),
            client,
        })
    }

    fn lock(&self) -> MutexGuard<'_, FxHashMap<Client, usize>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One thing that a client holds; dropped, it is given back.
#[derive(Debug)]
pub struct Share {
    of: Arc<Shares>,
    client: Client,
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut held = self.of.lock();
        if let Entry::Occupied(mut count) = held.entry(self.client) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_client_at_its_limit_keeps_nobody_else_out() {
        let shares = Shares::new(2);
        let held: Vec<_> = (0..2).map(|_| shares.take(1)).collect();
        assert!(held.iter().all(Option::is_some));
        assert!(shares.take(1).is_none());
        assert!(shares.take(2).is_some());
        drop(held);
        assert!(shares.take(1).is_some());
    }

    proptest! {
        #[test]
        fn what_is_held_is_what_was_taken_and_not_given_back(
            limit in 1usize..4,
            steps in prop::collection::vec((0u64..4, any::<bool>()), 0..60),
        ) {
            let shares = Shares::new(limit);
            let mut held: HashMap<Client, Vec<Share>> = HashMap::new();
            for (client, takes) in steps {
                let mine = held.entry(client).or_default();
                if takes {
                    let share = shares.take(client);
                    prop_assert_eq!(share.is_some(), mine.len() < limit);
                    mine.extend(share);
                } else {
                    mine.pop();
                }
            }
            held.clear();
            prop_assert!(shares.lock().is_empty(), "nobody is remembered who holds nothing");
        }
    }
}

//! How often log-ins that may be wrong are tried for each address. Pure.
//!
//! Hashing a password is slow by design, so whoever guesses takes the time of all who log in for the first time. Each
//! address has a few tries at once and then so many a second, by the rule of the cursor; doesn't know what was tried.

use std::num::NonZeroUsize;

use lru::LruCache;

use crate::pacing::{
    queue::Client,
    time::{LocalTime, Nanos, SECOND},
};

/// Tries at once: a machine with a handful of users, and one who mistypes. Of argon2 they take a second or two.
const BURST: Nanos = 30;
/// And then one in this time.
const INTERVAL: Nanos = SECOND / 5;
/// Addresses remembered, the most recent ones.
const ADDRESSES: NonZeroUsize = NonZeroUsize::new(4_096).unwrap();

/// When each address may try again.
#[derive(Debug)]
pub(super) struct Guesses {
    /// When all tries so far are paid for.
    paid: LruCache<Client, LocalTime>,
}

impl Guesses {
    /// Nobody has tried anything.
    pub(super) fn new() -> Self {
        Guesses {
            paid: LruCache::new(ADDRESSES),
        }
    }

    /// One try of `from` at `now`.
    ///
    /// # Errors
    /// It has to wait for so long.
    pub(super) fn charge(&mut self, now: LocalTime, from: Client) -> Result<(), Nanos> {
        let paid = self.paid.get_or_insert_mut(from, || now);
        let begin = (*paid).max(now);
        let wait = begin.since(now) - (BURST - 1) * INTERVAL;
        if wait > 0 {
            return Err(wait);
        }
        *paid = begin.plus(INTERVAL);
        Ok(())
    }

    /// The try was right, and costs nothing.
    pub(super) fn refund(&mut self, from: Client) {
        if let Some(paid) = self.paid.get_mut(&from) {
            *paid = paid.plus(-INTERVAL);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_few_tries_are_free_and_then_so_many_a_second() {
        let mut guesses = Guesses::new();
        let start = LocalTime(0);
        for _ in 0..BURST {
            assert_eq!(guesses.charge(start, 1), Ok(()));
        }
        assert_eq!(guesses.charge(start, 1), Err(INTERVAL));
        assert_eq!(guesses.charge(start, 2), Ok(()), "others are not held back");
        assert_eq!(guesses.charge(start.plus(INTERVAL), 1), Ok(()));
        assert!(guesses.charge(start.plus(INTERVAL), 1).is_err());
        guesses.refund(1);
        assert_eq!(guesses.charge(start.plus(INTERVAL), 1), Ok(()));
    }

    proptest! {
        #[test]
        fn no_address_tries_more_than_its_due_and_a_promised_wait_is_exact(
            steps in prop::collection::vec(0i64..3 * INTERVAL, 1..200),
        ) {
            let (mut guesses, mut now, mut tried) = (Guesses::new(), LocalTime(0), 0);
            for step in steps {
                now = now.plus(step);
                match guesses.charge(now, 1) {
                    Ok(()) => tried += 1,
                    Err(wait) => {
                        prop_assert!(guesses.charge(now.plus(wait - 1), 1).is_err());
                        now = now.plus(wait);
                        prop_assert_eq!(guesses.charge(now, 1), Ok(()));
                        tried += 1;
                    }
                }
                prop_assert!(tried <= BURST + now.0 / INTERVAL);
            }
        }

        #[test]
        fn addresses_without_end_are_not_remembered(from in prop::collection::vec(any::<u64>(), 1..50)) {
            let mut guesses = Guesses::new();
            for n in 0..ADDRESSES.get() as u64 {
                let _ = guesses.charge(LocalTime(0), n);
            }
            for from in from {
                let _ = guesses.charge(LocalTime(0), from);
                prop_assert!(guesses.paid.len() <= ADDRESSES.get());
            }
        }
    }
}

//! On which footing a replica stands with the others: what its heartbeats say about the shared cursor, and what may be
//! relied on of what they have read.
//!
//! A heartbeat *claims* the shared cursor, or it says that its replica is *alone*: heard, and yet off the cursor, so that
//! the others leave room for it as for a silent one. Only a claim that may have been written makes a replica wait, once it
//! has lost the store, until the others must have missed it. One that is off the cursor therefore never claims before a
//! heartbeat has passed that did not: as long as none passes it goes on at its share, however often it tries to be heard.
//! No clock is read here.

use crate::pacing::{
    share::HEARTBEAT,
    time::{LocalTime, MILLISECOND, Nanos},
};

/// A stay on the shared cursor that is shorter was not worth the waiting after it; the next one has to be earned by
/// heartbeats that pass for as long: until the second, a period after the first.
pub const PROVES_ITSELF: Nanos = 900 * MILLISECOND;
/// For how long after a heartbeat has passed the shared cursor may be used by what it has read: until the next, and for its
/// deadline. Whoever has gone silent since is noticed by the clock; whoever is new is not.
pub const HEARD_FOR: Nanos = 2 * HEARTBEAT + 200 * MILLISECOND;

/// The footing of one replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footing {
    /// Heartbeats have passed since then, without a break, and the last one at.
    heard: Option<(LocalTime, LocalTime)>,
    /// Since when a claim has stood.
    claimed: Option<LocalTime>,
    /// The last instant at which a claim may have been written.
    last_claim: LocalTime,
    /// A claim is under way, which may be written until then.
    under_way: Option<LocalTime>,
    /// The last stay on the shared cursor was short.
    must_prove: bool,
}

impl Footing {
    /// That of a replica that begins at `began`: an earlier run of it may have been heard until then.
    pub fn new(began: LocalTime) -> Self {
        Footing {
            heard: None,
            claimed: None,
            last_claim: began,
            under_way: None,
            must_prove: false,
        }
    }

    /// Whether the next heartbeat is to claim the shared cursor.
    pub fn claims(&self, now: LocalTime) -> bool {
        match self.heard {
            None => false,
            Some(_) if self.claimed.is_some() => true,
            Some((since, _)) => !self.must_prove || now.since(since) >= PROVES_ITSELF,
        }
    }

    /// A heartbeat that claims is sent, and may be written until `by`.
    pub fn sends_claim(&mut self, by: LocalTime) {
        self.under_way = self.under_way.max(Some(by));
    }

    /// A heartbeat has passed, and did claim or not.
    pub fn passed(&mut self, now: LocalTime, claimed: bool) {
        self.heard = Some((self.heard.map_or(now, |(since, _)| since), now));
        self.under_way = None;
        if claimed {
            self.last_claim = self.last_claim.max(now);
            self.claimed.get_or_insert(now);
        } else {
            self.leaves(now);
        }
    }

    /// A heartbeat has failed: surely, or so that it may have been written all the same.
    pub fn failed(&mut self, now: LocalTime, surely: bool) {
        if surely {
            self.under_way = None;
            if self.is_heard(now) {
                return;
            }
        }
        self.lost(now);
    }

    /// The session is gone, or no heartbeat passes on it.
    pub fn lost(&mut self, now: LocalTime) {
        if let Some(by) = self.under_way.take() {
            self.last_claim = self.last_claim.max(by);
            // A claim of which nothing was heard is the shortest stay of all.
            self.claimed.get_or_insert(now);
        }
        self.leaves(now);
        self.heard = None;
    }

    fn leaves(&mut self, now: LocalTime) {
        if let Some(since) = self.claimed.take() {
            self.must_prove = now.since(since) < PROVES_ITSELF;
        }
    }

    /// Whether heartbeats pass, by the last word of whoever sends them.
    pub fn passes(&self) -> bool {
        self.heard.is_some()
    }

    /// Whether what was read may be relied on.
    pub fn is_heard(&self, now: LocalTime) -> bool {
        self.heard
            .is_some_and(|(_, last)| now.since(last) <= HEARD_FOR)
    }

    /// Whether the others were told that this replica is on the shared cursor.
    pub fn has_claimed(&self) -> bool {
        self.claimed.is_some()
    }

    /// The last instant at which the others may have been told so.
    pub fn last_claim(&self) -> LocalTime {
        self.under_way
            .map_or(self.last_claim, |by| self.last_claim.max(by))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pacing::{
        share::{Facts, NOTICED_AFTER, Terms, terms},
        time::SECOND,
    };

    fn at(milliseconds: i64) -> LocalTime {
        LocalTime(milliseconds * MILLISECOND)
    }

    fn beat(footing: &mut Footing, now: LocalTime) -> bool {
        let claims = footing.claims(now);
        if claims {
            footing.sends_claim(now.plus(SECOND));
        }
        footing.passed(now, claims);
        claims
    }

    #[test]
    fn who_comes_back_from_a_long_stay_claims_with_its_second_heartbeat() {
        let mut f = Footing::new(at(0));
        assert!(!beat(&mut f, at(1)) && beat(&mut f, at(2)));
        for second in 1..=3 {
            assert!(beat(&mut f, at(1_000 * second)));
        }
        f.lost(at(3_500));
        assert_eq!(f.last_claim(), at(3_000));
        assert!(!beat(&mut f, at(3_600)) && beat(&mut f, at(3_601)));
    }

    #[test]
    fn after_a_short_stay_heartbeats_have_to_pass_for_as_long_before_the_next_claim() {
        let mut f = Footing::new(at(0));
        beat(&mut f, at(1));
        assert!(beat(&mut f, at(2)));
        f.lost(at(700));
        assert!(!beat(&mut f, at(1_000)) && !beat(&mut f, at(1_500)));
        // Lost again: the proof begins anew, and nothing has moved the waiting.
        f.lost(at(1_800));
        assert!(!beat(&mut f, at(2_000)) && !beat(&mut f, at(2_800)));
        assert_eq!(f.last_claim(), at(2));
        assert!(beat(&mut f, at(3_000)));
    }

    #[test]
    fn one_heartbeat_that_surely_failed_ends_nothing_while_what_was_read_is_fresh() {
        let mut f = Footing::new(at(0));
        beat(&mut f, at(0));
        beat(&mut f, at(1));
        f.sends_claim(at(2_000));
        f.failed(at(1_000), true);
        assert!(f.is_heard(at(2_201)) && f.has_claimed() && f.claims(at(2_000)));
        assert_eq!(f.last_claim(), at(1));
        assert!(!f.is_heard(at(2_202)));
        f.failed(at(2_202), true);
        assert!(!f.passes() && !f.has_claimed());
    }

    #[derive(Clone, Copy, Debug)]
    enum Fate {
        Passes,
        FailsSurely,
        /// The reply is lost: the session ends with it.
        IsLost,
        SessionEnds,
    }

    proptest! {
        /// Whatever becomes of heartbeats, a replica that uses its share was not claimed for since the others must have
        /// noticed; and one that cannot hold a session, or whose heartbeats do not pass, sends on.
        #[test]
        fn nobody_is_alone_too_soon_and_nobody_waits_for_ever(
            fates in proptest::collection::vec((prop_oneof![
                Just(Fate::Passes), Just(Fate::FailsSurely), Just(Fate::IsLost), Just(Fate::SessionEnds)
            ], 50i64..=1_000), 1..60),
            last in prop_oneof![Just(Fate::FailsSurely), Just(Fate::IsLost)],
        ) {
            let (mut now, mut footing) = (at(0), Footing::new(at(0)));
            // When a claim may have been written, as an onlooker knows it.
            let mut claimed = at(0);
            let facts = |f: &Footing, now| Facts {
                heard: f.is_heard(now), claimed: f.has_claimed(), last_claim: f.last_claim(),
                stuck: None, number: Some(0), all_held: false, silent: 0, taken: 1, of: 2,
            };
            let end = std::iter::repeat_n((last, 1_000), 8);
            for (fate, span) in fates.into_iter().chain(end) {
                let claims = footing.claims(now);
                let by = now.plus(SECOND);
                if claims {
                    footing.sends_claim(by);
                }
                match fate {
                    Fate::Passes => footing.passed(now, claims),
                    Fate::FailsSurely => footing.failed(now, true),
                    Fate::IsLost | Fate::SessionEnds => {
                        footing.failed(now, false);
                        footing.lost(now);
                    }
                }
                claimed = match fate {
                    Fate::Passes if claims => claimed.max(now),
                    Fate::IsLost | Fate::SessionEnds if claims => claimed.max(by),
                    _ => claimed,
                };
                for look in [now, now.plus(span * MILLISECOND / 2), now.plus(span * MILLISECOND - 1)] {
                    if let Terms::Alone(_) = terms(look, &facts(&footing, look)) {
                        prop_assert!(look >= claimed.plus(NOTICED_AFTER), "alone at {look:?}, claimed {claimed:?}");
                    }
                }
                now = now.plus(span * MILLISECOND);
            }
            // No heartbeat has passed for eight seconds.
            prop_assert!(matches!(terms(now, &facts(&footing, now)), Terms::Alone(_)));
        }
    }
}

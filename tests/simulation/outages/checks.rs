//! What must hold of all replicas together.
//!
//! **Ceiling.** Over any window, all send at most what the ceiling allows, one more, and one for each replica that may have
//! changed its footing; a row that is lost adds the slots that were held then. While all are of one mind (on the cursor with nobody missed, or off it with their numbers) it is
//! one more only. To either comes what a dispatch may be late against its slot.
//!
//! **Liveness.** A replica with waiting requests sends within three rounds of shares and the time it takes to notice that
//! the store is away and to be sure that the others noticed.
//!
//! **Healing.** Some time after the last trouble all are on the cursor, with room left for nobody.
//!
//! Replicas that are configured differently have to hear of each other first: what they send before is not looked at.

use paceline::pacing::{
    share::{NOTICED_AFTER, Terms},
    time::{MILLISECOND, Nanos, SECOND},
};

use super::super::clocks::True;
use super::{Outages, Sent, plan::Trouble};

/// All have started, and heard of each other.
const AGREED: True = 6 * SECOND;
/// From the last trouble until all is well: sessions that are made again, a lock that was told of, a short stay made good,
/// the rows of the others read.
const HEALED: Nanos = 12 * SECOND;

impl Outages {
    pub fn check_healing(&self) -> Result<(), String> {
        if self.plan.over().max(self.rough_until) + HEALED > self.plan.span {
            return Ok(());
        }
        for replica in 0..self.members.len() {
            let terms = self.terms(self.plan.span, replica);
            if !matches!(terms, Terms::Shared { silent: 0, .. }) {
                return Err(format!(
                    "healing: in the end replica {replica} has {terms:?}"
                ));
            }
        }
        Ok(())
    }

    pub fn check_what_was_sent(&self) -> Result<(), String> {
        let loose = Nanos::from(self.plan.max_replicas) + 1;
        let begins = self.sent.partition_point(|s| s.at < AGREED);
        self.check_span(&self.sent[begins..], loose)?;
        let mut rest = &self.sent[begins..];
        while let Some(first) = rest.first() {
            let len = rest
                .iter()
                .take_while(|s| s.era == first.era && s.of_one_mind)
                .count();
            if len > 0 {
                self.check_span(&rest[..len], 1)?;
            }
            rest = &rest[len.max(1)..];
        }
        Ok(())
    }

    /// Over any window within `sent`, at most `more` beyond the ceiling.
    fn check_span(&self, sent: &[Sent], more: Nanos) -> Result<(), String> {
        let interval = self.plan.interval;
        // Mapped late by at most a round trip, and timers.
        let late = 2 * self.plan.one_way.end() + MILLISECOND + self.plan.span / 5_000;
        // Requests that come when none waited may take a slot until its grace is over.
        let come = |(_, t): &(True, Trouble)| matches!(t, Trouble::GivenUp { .. });
        let spread = match self.plan.troubles.iter().any(come) {
            true => late + (interval / 4).clamp(10 * MILLISECOND, 50 * MILLISECOND),
            false => late,
        };
        // A row that is lost leaves those slots in use that were granted and not yet used, one for each replica.
        let worth = Nanos::from(self.plan.max_replicas) * interval;
        let losses = |by: True| self.row_lost.iter().filter(|at| **at <= by).count() as Nanos;
        let mut lowest = (Nanos::MAX, 0);
        for (n, s) in sent.iter().enumerate() {
            let moved = n as Nanos * interval - s.at;
            let over = worth * losses(s.at - self.plan.settles());
            lowest = lowest.min((moved - over, s.at));
            let begun = worth * losses(s.at);
            let excess = moved - begun - lowest.0 + interval - more * interval - spread;
            if excess > 0 {
                return Err(format!(
                    "ceiling: from {} to {} ns, {excess} ns worth of requests more than {more} over it",
                    lowest.1, s.at
                ));
            }
        }
        Ok(())
    }

    pub fn check_pauses(&mut self, t: True) -> Result<(), String> {
        // Until a lost link is noticed, the lock told of, and the others sure to know.
        let waiting = NOTICED_AFTER + 2 * SECOND + 1_500 * MILLISECOND;
        let rounds = 3 * Nanos::from(self.plan.max_replicas) * self.plan.interval;
        for (replica, m) in self.members.iter().enumerate() {
            let pause = t - m.sent_at;
            if m.down || !m.busy || t < m.idle_until {
                continue;
            }
            self.longest_pause = self.longest_pause.max(pause - rounds);
            // A link that flaps, or several troubles in a row, may begin the wait anew once or twice.
            let waits = 1 + self.plan.troubles.len().min(2) as Nanos;
            if pause > waits * waiting + rounds {
                return Err(format!(
                    "pause: at {t} ns replica {replica} has sent nothing for {pause} ns"
                ));
            }
        }
        Ok(())
    }
}

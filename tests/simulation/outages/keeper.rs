//! The keeper of one replica's connection, as `store/postgres/keeper.rs` is: one attempt a second, a heartbeat a second,
//! a deadline on each, and the session given up with the first that misses it.

use paceline::{
    membership::Membership,
    pacing::time::{Nanos, SECOND, nanos},
};

use super::super::clocks::True;
use super::{CALL_DEADLINE, Event, Flaw, Outages, plan::Beats};

const ATTEMPT_EVERY: Nanos = SECOND;
const CONNECT_DEADLINE: Nanos = 3 * SECOND;

impl Outages {
    pub fn keep(&mut self, t: True, event: Event) {
        match event {
            Event::Attempt(replica, life) if self.lives(replica, life) => {
                self.members[replica].attempted = t;
                // Handshakes, a look at the table, a look at the clock.
                let ways = 8 * self.random.within(self.plan.one_way.clone());
                let outcome = match self.travels(t, replica) {
                    Some(arrives) if arrives - t < CONNECT_DEADLINE => {
                        (arrives + ways, Event::Opened(replica, life))
                    }
                    Some(_) => (t + CONNECT_DEADLINE, Event::AttemptFailed(replica, life)),
                    None => (t, Event::AttemptFailed(replica, life)),
                };
                self.schedule(outcome.0, outcome.1);
            }
            Event::AttemptFailed(replica, life) if self.lives(replica, life) => {
                self.attempt_again(t, replica);
            }
            Event::Opened(replica, life) if self.lives(replica, life) => {
                if t < self.store.down_until || t < self.members[replica].cut_until {
                    self.attempt_again(t, replica);
                    return;
                }
                let way = self.random.within(self.plan.one_way.clone());
                let store_now = self.store.now(t - way);
                let m = &mut self.members[replica];
                let (sent, now) = (m.now(t - 2 * way), m.now(t));
                m.bounds.observe(sent, now, store_now);
                let session = self.numbered();
                self.members[replica].session = Some(session);
                self.schedule(t, Event::Beat(replica, session));
            }
            Event::Beat(replica, session) if self.holds(replica, session) => {
                self.beat(t, replica, session);
            }
            Event::BeatArrives(replica, session, beat, pulse) => {
                if t < self.store.down_until {
                    return;
                }
                let m = &self.members[replica];
                let fate = m.beats.filter(|_| t < m.beats_until);
                if fate == Some(Beats::Refused) {
                    let way = self.random.within(self.plan.one_way.clone());
                    self.schedule(t + way, Event::BeatRefused(replica, session, beat));
                    return;
                }
                let guarded = self.flaw != Flaw::LateHeartbeats;
                let echo = self.store.beat(t, &pulse, guarded);
                if fate == Some(Beats::Unanswered) {
                    return;
                }
                if let Some(arrives) = self.returns(t, replica) {
                    self.schedule(
                        arrives,
                        Event::BeatReplied(replica, session, beat, pulse, echo),
                    );
                }
            }
            Event::BeatReplied(replica, session, beat, pulse, echo)
                if self.holds(replica, session) && t >= self.members[replica].cut_until =>
            {
                let m = &mut self.members[replica];
                let Some((_, sent)) = m.beat.take_if(|(n, _)| *n == beat) else {
                    return;
                };
                let now = m.now(t);
                m.bounds.observe(sent, now, echo.now);
                let late = !echo.written && pulse.until.is_some_and(|u| echo.now > u);
                let mut again = late;
                if late {
                    m.membership.unheard(now, true);
                } else {
                    let mut rows = echo.rows;
                    if self.flaw == Flaw::VanishedIsFreed {
                        let gone = |k: &&String| !rows.iter().any(|(key, _)| key == *k);
                        let gone: Vec<_> = pulse.keys.iter().filter(gone).cloned().collect();
                        rows.extend(gone.into_iter().map(|k| (k, "free".to_owned())));
                    }
                    again = m
                        .membership
                        .heard(&pulse, now, echo.now, echo.written, rows);
                }
                if again {
                    self.beat(t, replica, session);
                } else {
                    let next = t + nanos(Membership::period());
                    self.schedule(next, Event::Beat(replica, session));
                }
                self.pump(t, replica);
            }
            Event::BeatRefused(replica, session, beat)
                if self.holds(replica, session) && t >= self.members[replica].cut_until =>
            {
                let m = &mut self.members[replica];
                if m.beat.take_if(|(n, _)| *n == beat).is_some() {
                    m.membership.unheard(m.now(t), true);
                    let next = t + nanos(Membership::period());
                    self.schedule(next, Event::Beat(replica, session));
                    self.pump(t, replica);
                }
            }
            Event::BeatTimedOut(replica, beat)
                if self.members[replica].beat.is_some_and(|(n, _)| n == beat) =>
            {
                self.lose(t, replica);
                self.pump(t, replica);
            }
            _ => {}
        }
    }

    fn beat(&mut self, t: True, replica: usize, session: u64) {
        let number = self.numbered();
        let m = &mut self.members[replica];
        let now = m.now(t);
        if self.flaw == Flaw::FailingIsKept && m.has_failed {
            m.membership.reserved(super::CURSOR, false, now);
        }
        let by = now.plus(CALL_DEADLINE);
        let mut pulse = Box::new(m.membership.pulse(now, by, m.until(now)));
        match self.flaw {
            Flaw::OwnNumbersOnly => {
                let own = self.plan.numbers[replica];
                pulse.keys.retain(|k| {
                    let number = k.strip_prefix("lease:").and_then(|n| n.parse().ok());
                    number.is_none_or(|n: u32| n < own)
                });
            }
            Flaw::AlwaysClaims => {
                pulse.claims = true;
                pulse.word = pulse.word.replace("\"alone\":true", "\"alone\":false");
            }
            _ => {}
        }
        m.beat = Some((number, now));
        self.schedule(t + CALL_DEADLINE, Event::BeatTimedOut(replica, number));
        if let Some(arrives) = self.travels(t, replica) {
            self.schedule(arrives, Event::BeatArrives(replica, session, number, pulse));
        }
    }

    /// The session is gone, and what was under way on it with it.
    pub fn lose(&mut self, t: True, replica: usize) {
        let m = &mut self.members[replica];
        if m.session.take().is_none() {
            return;
        }
        let now = m.now(t);
        if m.beat.take().is_some() {
            m.membership.unheard(now, false);
        }
        m.membership.lost(now);
        if m.call.is_some() {
            let probing = m.probing;
            self.call_failed(t, replica, probing, super::RETRY_STORE);
        }
        self.attempt_again(t, replica);
    }

    fn attempt_again(&mut self, t: True, replica: usize) {
        let m = &self.members[replica];
        let (at, life) = ((m.attempted + ATTEMPT_EVERY).max(t), m.life);
        self.schedule(at, Event::Attempt(replica, life));
    }

    fn lives(&self, replica: usize, life: u32) -> bool {
        let m = &self.members[replica];
        !m.down && m.life == life && m.session.is_none()
    }

    fn holds(&self, replica: usize, session: u64) -> bool {
        self.members[replica].session == Some(session)
    }

    fn numbered(&mut self) -> u64 {
        self.numbered += 1;
        self.numbered
    }
}

//! What must hold: at each step, and over a whole history.
//!
//! **What the origin sees.** A slot is used at the earliest `earliness` before its beginning and at the latest `lateness`
//! after it: the store's clock is mapped early or late by at most half of the difference between the shortest ways there
//! and back so far (plus drift), and the grace comes on top. Slots are an interval `I` apart. So with `E` the sum of the
//! largest of both of any slot used, a closed
//! window `W` holds dispatches of slots that begin within `W + E`, and no more than `(W + E) / I + 1` of them. Each
//! upheaval (a lost row, a step of the clock) starts a new row of slots beside the outstanding ones: to a window that it
//! falls into, or in which slots of before are still to be used, it may add those, one for the new row, and `E / I`.
//!
//! **Nobody is idle for nothing.** A slot may pass unused only if no request was ready at some time while it was open, if its
//! reply came too late, if its holder slept, died or saw the clock step, or if a request was given it and gave it back.
//!
//! **Liveness.** While a replica could send, its store can be reached and nothing goes wrong, it gives out a slot no
//! later than: where the cursor stands, and then what every other replica may hold or ask for first (twice what the
//! round trip calls for), each foreign program's slot, one's own, the calls' ways, and a timer.

use paceline::pacing::{
    pacer::Slot,
    time::{MILLISECOND, Nanos, SECOND},
};

use super::{
    clocks::True,
    replica::{End, Request, State},
    store::Upheaval,
    world::{Event, World},
};

/// How late a deadline may be seen: timers and event order, nothing else.
const PUNCTUAL: Nanos = MILLISECOND;

impl World {
    /// A slot is given out: within its bounds, to a request whose deadline has not passed.
    pub fn check_dispatch(&mut self, t: True, r: Request, slot: Slot) -> Result<(), String> {
        let replica = self.journeys[r].replica;
        let core = &mut self.replicas[replica];
        let now = core.now(t);
        if !slot.is_fresh(now) {
            return Err(format!("stale: request {r} was given {slot:?} at {now:?}"));
        }
        if now > self.journeys[r].deadline {
            return Err(format!(
                "deadline: request {r} was given a slot {} ns late",
                now.since(self.journeys[r].deadline)
            ));
        }
        let Some(account) = core.slots.get(&slot.start).copied() else {
            return Err(format!(
                "request {r} was given a slot that nobody granted: {slot:?}"
            ));
        };
        if core.waiting.get(&r) != Some(&true) {
            return Err(format!(
                "unready: request {r} was given a slot without a ready connection"
            ));
        }
        if self
            .plan
            .max_in_flight
            .is_some_and(|most| core.pacer.in_flight() > most)
        {
            return Err(format!(
                "in flight: request {r} is one more than may be under way"
            ));
        }
        self.store.slots[account].given = true;
        self.check_stall(t, replica)?;
        self.stalls[replica] = None;
        Ok(())
    }

    /// A request goes out: in a slot of its own, not before the slot begins on the store's clock by more than the ways to
    /// the store may differ, not after its grace.
    pub fn check_departure(&mut self, t: True, r: Request, slot: Slot) -> Result<(), String> {
        let core = &mut self.replicas[self.journeys[r].replica];
        let now = core.now(t);
        if !slot.is_fresh(now) {
            return Err(format!("stale: request {r} departs in {slot:?} at {now:?}"));
        }
        let Some(account) = core.slots.get(&slot.start) else {
            return Err(format!(
                "request {r} departs in a slot that nobody granted: {slot:?}"
            ));
        };
        let account = &mut self.store.slots[*account];
        if account.used.is_some() {
            return Err(format!(
                "twice: request {r} departs in a slot that was used: {slot:?}"
            ));
        }
        if t < account.begins - account.earliness {
            return Err(format!(
                "early: request {r} departs {} ns before its slot",
                account.begins - t
            ));
        }
        if t > account.begins + account.lateness {
            return Err(format!(
                "late: request {r} departs {} ns after its slot",
                t - account.begins
            ));
        }
        account.used = Some(t);
        core.used += 1;
        Ok(())
    }

    pub fn check_refusal(&mut self, t: True, r: Request) -> Result<(), String> {
        let core = &self.replicas[self.journeys[r].replica];
        let late = core.now(t).since(self.journeys[r].deadline);
        if late > PUNCTUAL && core.suspended_until.max(self.journeys[r].back_at) < t - PUNCTUAL {
            return Err(format!(
                "deadline: request {r} was refused {late} ns after its deadline"
            ));
        }
        Ok(())
    }

    /// After everything the pacer wanted was done: both sides agree who waits, and the next waking lies ahead.
    pub fn check_quiescence(&mut self, t: True, replica: usize) -> Result<(), String> {
        let core = &mut self.replicas[replica];
        if core.pacer.waiting() != core.waiting.len() {
            return Err(format!(
                "replica {replica} has {} waiting, its pacer {}",
                core.waiting.len(),
                core.pacer.waiting()
            ));
        }
        let now = core.now(t);
        if let Some(wake_at) = core.pacer.wake_at().filter(|w| *w <= now) {
            return Err(format!(
                "replica {replica} would spin: it wants to be woken {} ns ago",
                now.since(wake_at)
            ));
        }
        if !core.can_send() {
            (core.idle, core.idle_at) = (true, t);
            self.check_stall(t, replica)?;
            self.stalls[replica] = None;
            return Ok(());
        }
        if std::mem::take(&mut core.idle) {
            core.idle_at = t;
        }
        if self.stalls[replica].is_none() && self.is_steady() && t >= self.stalls_from {
            self.stalls[replica] = Some((t, self.patience_with(t)));
        }
        Ok(())
    }

    /// Whether calls are answered in about the time they usually take, so that liveness can be promised.
    fn is_steady(&self) -> bool {
        self.plan.spikes == 0
            && self.plan.jitter <= 5 * MILLISECOND
            && self.plan.lost_request == 0
            && self.plan.lost_reply == 0
            && self.plan.storms.is_empty()
    }

    /// How long a replica that can send may take to give out a slot.
    fn patience_with(&self, t: True) -> Nanos {
        let way = self.plan.farthest() + self.plan.jitter;
        let interval = self
            .replicas
            .iter()
            .map(|r| r.pacer.settings().interval)
            .fold(self.plan.interval, Nanos::max);
        let held: Nanos = self
            .replicas
            .iter()
            .map(|r| 2 * r.most_held.max(2 * 2 * way / interval + 1))
            .sum();
        // A call that was under way when the calm began may yet have to be given up and made again.
        let outage = if self.plan.faults.is_empty() {
            0
        } else {
            SECOND + 200 * MILLISECOND
        };
        self.store.ahead(t)
            + interval * (held + self.plan.foreign as Nanos + 1)
            + 6 * way
            + 10 * MILLISECOND
            + outage
    }

    fn check_stall(&self, t: True, replica: usize) -> Result<(), String> {
        match self.stalls[replica] {
            Some((since, patience)) if t > since + patience => Err(format!(
                "stall: replica {replica} could send for {} ns and did not; {patience} ns was enough",
                t - since
            )),
            _ => Ok(()),
        }
    }

    /// A slot's grace is over.
    pub fn check_expired(&mut self, t: True, expired: Event) -> Result<(), String> {
        let Event::Expired {
            replica,
            life,
            slot,
            from,
            at,
            steps,
        } = expired
        else {
            return Ok(());
        };
        let core = &self.replicas[replica];
        let account = &self.store.slots[slot];
        // A later reply may have shown that the slot opened at another time than it seemed.
        let opened = core.bounds.to_local(account.start, core.now(t));
        let moved = opened.is_none_or(|opened| at.since(opened).abs() > MILLISECOND);
        let excused = account.given
            || at < core.drops_until
            || core.life != life
            || core.down
            || core.bounds.steps() != steps
            || moved;
        if !excused && core.can_send() && core.idle_at < from && core.suspended_until < from {
            return Err(format!(
                "wasted: at {t} ns a slot of replica {replica} passes unused while {} requests are ready",
                core.ready
            ));
        }
        Ok(())
    }

    /// When nothing happens any more: everyone was answered, every slot is accounted for, and the origin saw one pace.
    pub fn check_the_end(&self) -> Result<(), String> {
        for (r, journey) in self.journeys.iter().enumerate() {
            if !matches!(journey.state, State::Ended(_)) {
                return Err(format!(
                    "forgotten: request {r} is still {:?}",
                    journey.state
                ));
            }
        }
        for (i, core) in self.replicas.iter().enumerate() {
            if core.pacer.waiting() != 0 || core.pacer.in_flight() != 0 {
                return Err(format!(
                    "forgotten: replica {i} has {} waiting, {} in flight",
                    core.pacer.waiting(),
                    core.pacer.in_flight()
                ));
            }
            let unused = core.received as i64 - core.used as i64 - core.pacer.voided() as i64;
            if unused < 0 || unused > core.most_held + core.given_back {
                return Err(format!(
                    "account: replica {i} has {unused} slots neither used nor void, {} at most",
                    core.most_held
                ));
            }
        }
        self.check_origin()
    }

    fn check_origin(&self) -> Result<(), String> {
        let seen = self.departures();
        let used = || self.store.slots.iter().filter(|s| s.used.is_some());
        let latest = used().map(|s| s.lateness).max().unwrap_or(0);
        let earliest = used().map(|s| s.earliness).max().unwrap_or(0);
        let spread = latest + earliest;
        // Two clocks of which one is slower than true time, over the length of the history, and a clock that is slewed.
        let slewed = self.plan.slewed.0.ppm.abs() + self.plan.slewed.1.ppm.abs() + 200;
        let spread = spread + self.plan.span * slewed / 1_000_000;
        let interval = self.plan.shortest_interval();
        // For all i < j: (j - i + 1) <= (t_j - t_i + spread) / interval + 1 + what upheavals between them allow.
        let worth =
            |u: &Upheaval| i128::from(interval) * (u.outstanding as i128 + 1) + i128::from(spread);
        let begun = |t: True| -> i128 {
            self.store
                .upheavals
                .iter()
                .filter(|u| u.at <= t)
                .map(worth)
                .sum()
        };
        let over = |t: True| -> i128 {
            self.store
                .upheavals
                .iter()
                .filter(|u| u.until + spread < t)
                .map(worth)
                .sum()
        };
        let mut lowest = i128::MAX;
        for (n, t) in seen.iter().enumerate() {
            let moved = n as i128 * i128::from(interval) - i128::from(*t);
            lowest = lowest.min(moved - over(*t));
            let excess = moved - begun(*t) - lowest - i128::from(spread);
            if excess > 0 {
                return Err(format!(
                    "origin: at {t} ns the origin has seen {excess} ns worth of requests too many"
                ));
            }
        }
        Ok(())
    }

    /// How many requests ended in this way.
    pub fn ended(&self, how: End) -> usize {
        self.journeys
            .iter()
            .filter(|j| matches!(j.state, State::Ended(end) if end == how))
            .count()
    }

    /// When requests went out, in order.
    pub fn departures(&self) -> Vec<True> {
        let mut seen: Vec<True> = self.store.slots.iter().filter_map(|s| s.used).collect();
        seen.sort_unstable();
        seen
    }
}

//! Calls to the store: on their way, lost, answered, given up.

use paceline::pacing::{
    clock::Observed,
    cursor::{Ask, Granted},
    throttle,
    time::{MILLISECOND, Nanos, SECOND, StoreTime},
};

use super::{
    clocks::True,
    plan::MICROSECOND,
    world::{Call, Event, Planted, World},
};

/// A call to the store is given up after this long, and made again after that pause.
pub const CALL_DEADLINE: Nanos = SECOND;
const RETRY_STORE: Nanos = 100 * MILLISECOND;
/// Whoever reaches the store has seen a step by then.
const STEP_SEEN_WITHIN: Nanos = 2_200 * MILLISECOND;

impl World {
    /// Sends a question to the store, and sees to it that it is given up in time.
    pub fn call_store(&mut self, t: True, replica: usize, mut ask: Ask) {
        self.calls += 1;
        let r = &mut self.replicas[replica];
        ask.lead = r.bounds.lead();
        if self.planted == Planted::FloorUntold {
            ask.floor = None;
        }
        let call = Call {
            number: self.calls,
            replica,
            life: r.life,
            sent: r.now(t),
            sent_at: t,
        };
        r.call = Some(self.calls);
        let word = r.tracker.row_word().to_owned();
        let cut_off = t < r.outage_until;
        let lost = cut_off || self.random.chance(self.plan.lost_request);
        let lost_reply = self.random.chance(self.plan.lost_reply);
        if !lost {
            let arrives = t + self.travel(replica);
            self.schedule(
                arrives,
                Event::Asked {
                    call,
                    ask,
                    word,
                    lost_reply,
                },
            );
        }
        self.schedule(t + CALL_DEADLINE, Event::TimedOut(call));
    }

    pub fn asked(
        &mut self,
        t: True,
        call: Call,
        ask: Ask,
        word: &str,
        lost_reply: bool,
    ) -> Result<(), String> {
        let steps = self.store.steps();
        let r = &self.replicas[call.replica];
        let knows = r
            .knows
            .filter(|(_, then)| *then == steps && r.life == call.life)
            .map(|(end, _)| end);
        let throttle = self.store.throttle.clone();
        let knows_pace = throttle::word(throttle.as_deref()) == word;
        let granted = if knows_pace || self.planted == Planted::PaceUnasked {
            self.check_halt(t)?;
            Some(self.store.reserve(t, call.replica, &ask, knows)?)
        } else {
            None
        };
        let first = self.store.slots.len() - granted.map_or(0, |g| g.slots as usize);
        if !lost_reply && t >= self.replicas[call.replica].outage_until {
            let arrives = t + self.travel(call.replica);
            self.schedule(
                arrives,
                Event::Replied {
                    call,
                    granted,
                    throttle,
                    read: t,
                    steps,
                    first,
                },
            );
        }
        Ok(())
    }

    pub fn timed_out(&mut self, t: True, call: Call) -> Result<(), String> {
        let r = &mut self.replicas[call.replica];
        if r.life != call.life || r.call != Some(call.number) {
            return Ok(());
        }
        r.call = None;
        let retry_at = r.now(t).plus(RETRY_STORE);
        r.failed_until = retry_at;
        r.pacer.failed(retry_at);
        self.stalls[call.replica] = None;
        self.pump(t, call.replica)
    }

    pub fn travel(&mut self, replica: usize) -> Nanos {
        let further = if replica == 0 { self.plan.further } else { 0 };
        let base = further
            + self.random.within(self.plan.one_way.clone())
            + self.random.within(0..=self.plan.jitter);
        if self.random.chance(self.plan.spikes) {
            base + self.random.within(0..=300 * MILLISECOND)
        } else {
            base
        }
    }

    pub fn replied(
        &mut self,
        t: True,
        call: Call,
        granted: Granted,
        read: True,
        steps: u64,
        first: usize,
    ) -> Result<(), String> {
        let core = &mut self.replicas[call.replica];
        if core.life != call.life || core.call != Some(call.number) {
            return Ok(());
        }
        core.call = None;
        let now = core.now(t);
        self.observe(t, &call, granted.now, read);
        let core = &mut self.replicas[call.replica];
        core.pacer.granted(now, granted, &core.bounds);
        core.received += u64::from(granted.slots);
        if core
            .knows
            .is_none_or(|(end, then)| then != steps || end < granted.end())
        {
            core.knows = Some((granted.end(), steps));
        }
        core.most_held = core.most_held.max(core.pacer.reach() as Nanos);
        let (early, late) = core.mapped_wrongly(&self.plan, call.replica);
        let grace = (granted.interval / 4).clamp(10 * MILLISECOND, 50 * MILLISECOND);
        let mut expiries = Vec::new();
        for slot in first..first + granted.slots as usize {
            let account = &mut self.store.slots[slot];
            let ahead = (account.begins - t).max(0);
            // What the clocks may drift apart on the way and until then, as far as that is not known.
            let slack = (core.last_took + late + early + ahead) * 3 / 1_000 + MICROSECOND;
            account.lateness = late + grace + slack;
            account.earliness = early + slack;
            core.slots.insert(account.start, slot);
            if let Some(at) = core.bounds.to_local(account.start, now) {
                let from = core.clock.shows(at.0).max(t);
                let expires = core.clock.shows(at.plus(grace).0 + 1);
                // Slots of a time that is gone are void; of a clock that was set back they would lie far ahead.
                let here = core.bounds.to_store(now, now);
                let is_of_now = here.is_none_or(|here| granted.now.since(here) <= SECOND);
                if is_of_now && from + 2 * MILLISECOND < expires && at >= core.drops_until {
                    let (replica, life, steps) = (call.replica, core.life, core.bounds.steps());
                    expiries.push((
                        expires,
                        Event::Expired {
                            replica,
                            life,
                            slot,
                            from,
                            at,
                            steps,
                        },
                    ));
                }
            }
        }
        for (at, expired) in expiries {
            self.schedule(at, expired);
        }
        self.pump(t, call.replica)
    }
}

impl World {
    /// What a call showed of the store's clock, which was read at `read`.
    fn observe(&mut self, t: True, call: &Call, reading: StoreTime, read: True) {
        let core = &mut self.replicas[call.replica];
        let now = core.now(t);
        let (sent, received) = match self.planted {
            Planted::ReadAtReceipt => (now, now),
            Planted::ReadAtSending => (call.sent, call.sent),
            _ => (call.sent, now),
        };
        if core.bounds.observe(sent, received, reading) == Observed::Stepped {
            // What this replica sent last, and what others hold of the time before, is let pass.
            let settings = core.pacer.settings();
            let held = Nanos::from(settings.max_replicas) * core.most_held;
            let interval = settings.interval * Nanos::from(core.pacer.multiplier());
            let pause = (interval * held).min(STEP_SEEN_WITHIN).max(interval);
            core.drops_until = core.drops_until.max(now.plus(pause));
            core.ways = None;
        }
        core.took(t, read - call.sent_at, t - read);
    }

    /// A heartbeat: of interest here is only that it reads the clock.
    pub fn beat(&mut self, t: True, replica: usize) {
        let rounds = Nanos::from(self.plan.comebacks) + 1;
        if t > self.plan.span + rounds * self.plan.patience.end() {
            return;
        }
        self.schedule(t + SECOND, Event::Beat(replica));
        let r = &self.replicas[replica];
        if r.down || t < r.outage_until {
            return;
        }
        let call = Call {
            number: 0,
            replica,
            life: r.life,
            sent: r.now(t),
            sent_at: t,
        };
        let arrives = t + self.travel(replica);
        self.schedule(arrives, Event::BeatArrives(call));
    }

    pub fn beat_arrives(&mut self, t: True, call: Call) {
        let echo = Event::Echo(call, self.store.now(t), t);
        let arrives = t + self.travel(call.replica);
        self.schedule(arrives, echo);
    }

    pub fn echo(
        &mut self,
        t: True,
        call: Call,
        reading: StoreTime,
        read: True,
    ) -> Result<(), String> {
        let r = &self.replicas[call.replica];
        let given_up = t - call.sent_at > CALL_DEADLINE;
        if r.life != call.life || r.down || t < r.outage_until || given_up {
            return Ok(());
        }
        self.observe(t, &call, reading, read);
        self.pump(t, call.replica)
    }
}

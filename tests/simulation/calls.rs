//! Calls to the store: on their way, lost, answered, given up.

use paceline::pacing::{
    clock::Observed,
    cursor::{Ask, Granted},
    throttle,
    time::{MILLISECOND, Nanos, SECOND},
};

use super::{
    clocks::True,
    plan::MICROSECOND,
    world::{Call, Event, Planted, World},
};

/// A call to the store is given up after this long, and made again after that pause.
pub const CALL_DEADLINE: Nanos = SECOND;
const RETRY_STORE: Nanos = 100 * MILLISECOND;

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
            let arrives = t + self.travel();
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
            let arrives = t + self.travel();
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

    pub fn travel(&mut self) -> Nanos {
        let base = self.random.within(self.plan.one_way.clone())
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
        let half_way = if self.planted == Planted::MidpointOfCall {
            (t - call.sent_at) / 2
        } else {
            0
        };
        let observed = core
            .bounds
            .observe(call.sent, now, granted.now.plus(half_way));
        if observed == Observed::Stepped {
            // What others hold of the time before is let pass, too.
            let settings = core.pacer.settings();
            let held = Nanos::from(settings.shares) * core.most_held;
            let interval = settings.interval * Nanos::from(core.pacer.multiplier());
            core.drops_until = core.drops_until.max(now.plus(interval * held));
        }
        core.pacer.granted(now, granted, &core.bounds);
        core.received += u64::from(granted.slots);
        if core
            .knows
            .is_none_or(|(end, then)| then != steps || end < granted.end())
        {
            core.knows = Some((granted.end(), steps));
        }
        let ahead = 2 * core.bounds.round_trip() + core.bounds.lead();
        core.most_held = core.most_held.max(ahead / granted.interval + 1);
        let way_back = core.way_back(t, t - read, self.plan.steps());
        let grace = (granted.interval / 4).clamp(10 * MILLISECOND, 50 * MILLISECOND);
        let mut expiries = Vec::new();
        for slot in first..first + granted.slots as usize {
            let account = &mut self.store.slots[slot];
            let ahead = (account.begins - t).max(0);
            account.lateness = way_back + grace + (way_back + ahead) / 1_000 + MICROSECOND;
            account.earliness = MICROSECOND;
            if self.plan.steps() {
                // A step too small to be seen leaves bounds that are wrong by less than the way there took.
                account.earliness += read - call.sent_at;
            }
            core.slots.insert(account.start, slot);
            if let Some(at) = core.bounds.to_local(account.start, now) {
                let from = core.clock.shows(at.0).max(t);
                let expires = core.clock.shows(at.plus(grace).0 + 1);
                if from + 2 * MILLISECOND < expires && at >= core.drops_until {
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

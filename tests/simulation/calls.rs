//! Calls to the store: on their way, lost, answered, given up.

use paceline::pacing::{
    clock::Observed,
    cursor::{Ask, Granted},
    time::{MILLISECOND, Nanos, SECOND},
};

use super::{
    clocks::True,
    plan::MICROSECOND,
    world::{Call, Event, Planted, World},
};

/// A call to the store is given up after this long, and made again after that pause.
const CALL_DEADLINE: Nanos = SECOND;
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
                    lost_reply,
                },
            );
        }
        self.schedule(t + CALL_DEADLINE, Event::TimedOut(call));
    }

    pub fn asked(&mut self, t: True, call: Call, ask: Ask, lost_reply: bool) -> Result<(), String> {
        let steps = self.store.steps();
        let r = &self.replicas[call.replica];
        let knows = r
            .knows
            .filter(|(_, then)| *then == steps && r.life == call.life)
            .map(|(end, _)| end);
        let granted = self.store.reserve(t, call.replica, &ask, knows)?;
        let first = self.store.slots.len() - granted.slots as usize;
        if !lost_reply && t >= r.outage_until {
            let arrives = t + self.travel();
            self.schedule(
                arrives,
                Event::Replied {
                    call,
                    granted,
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

    fn travel(&mut self) -> Nanos {
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
            let held = Nanos::from(settings.max_replicas) * core.most_held;
            core.drops_until = now.plus(settings.interval * held);
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

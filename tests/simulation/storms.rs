//! Origins that protest: what the answers do to the throttle, and the throttle's row, as `pacing/lane.rs` treats it.

use paceline::pacing::{
    throttle::{
        CAP, Moment, Throttle,
        tracker::{Event as Answer, Write},
    },
    time::{LocalTime, MILLISECOND, Nanos, SECOND},
};

use super::{
    calls::CALL_DEADLINE,
    clocks::True,
    world::{Call, Event, Planted, World},
};

const RETRY_WRITE: Nanos = 500 * MILLISECOND;
/// How well a replica knows when a pause ends on the store's clock.
const UNCERTAIN: Nanos = SECOND;

impl World {
    /// An answer to a request of `episode`: whether it was a protest.
    pub fn heed(&mut self, t: True, replica: usize, episode: u64) -> Result<bool, String> {
        let storm = self.plan.storms.iter().find(|(when, _)| when.contains(&t));
        let often = storm.map_or(0, |(_, often)| *often);
        let protests = self.random.chance(often);
        let answer = if protests {
            let waits = self.random.chance(self.plan.asks_to_wait);
            let wait = self.random.within(self.plan.wait.clone());
            self.protested = self.protested.max(Some(episode));
            let each = self.planted == Planted::EachProtestWidens;
            Answer::Throttled {
                episode: if each { u64::MAX } else { episode },
                retry_after: waits.then_some(wait),
            }
        } else {
            self.heard += u32::from(episode >= self.pace.1);
            Answer::Clean { episode }
        };
        let at = self.replicas[replica].moment(t);
        let core = &mut self.replicas[replica];
        core.tracker.apply(at, answer);
        let most = self.protested.map_or(0, |e| e + 1);
        if core.tracker.episode() > most {
            return Err(format!(
                "episode: replica {replica} is at {}, and the last request that met a protest was of the one before {most}",
                core.tracker.episode()
            ));
        }
        Ok(protests)
    }

    /// Brings the pacer under what the throttle has in force.
    pub fn regulate(&mut self, t: True, replica: usize) -> Result<(), String> {
        let core = &mut self.replicas[replica];
        let at = core.moment(t);
        if core.tracker.is_due(at.now) {
            core.tracker.lapse(at);
        }
        let regime = core.tracker.regime(at.now);
        if !(1..=CAP).contains(&regime.multiplier) {
            return Err(format!("multiplier: {}", regime.multiplier));
        }
        if let Some(halt) = regime.halt {
            core.drops_until = core.drops_until.max(halt.until);
        }
        core.pacer
            .regulate(at.now, regime, core.tracker.row_episode());
        Ok(())
    }

    pub fn seen(&mut self, t: True, call: Call, text: Option<&str>) {
        let core = &mut self.replicas[call.replica];
        if core.life == call.life && core.call == Some(call.number) {
            let at = core.moment(t);
            core.tracker.seen(at, text);
        }
    }

    /// The pace had changed without the replica's knowledge.
    pub fn answered_without(&mut self, t: True, call: Call) -> Result<(), String> {
        let core = &mut self.replicas[call.replica];
        if core.life != call.life || core.call != Some(call.number) {
            return Ok(());
        }
        core.call = None;
        core.pacer.asks_again();
        self.pump(t, call.replica)
    }

    /// Nothing is granted while the row says that nothing is to be sent.
    pub fn check_halt(&mut self, t: True) -> Result<(), String> {
        let now = LocalTime(self.store.now(t).0);
        let at = Moment {
            now,
            offset: Some(0),
        };
        let row = self.store.throttle.as_deref();
        let halt = row
            .and_then(|text| Throttle::parse(text, at))
            .and_then(|row| row.regime(now).halt);
        match halt {
            Some(halt) if !self.plan.steps() && halt.until.since(now) > UNCERTAIN => Err(format!(
                "halt: slots were granted {} ns before the end of a pause",
                halt.until.since(now)
            )),
            _ => Ok(()),
        }
    }

    /// Sends what has to be written, if it is time.
    pub fn write_throttle(&mut self, t: True, replica: usize) {
        let core = &mut self.replicas[replica];
        let at = core.moment(t);
        let due = core.tracker.writes_at().is_some_and(|w| w <= at.now);
        if !due || core.write.is_some() || at.now < core.write_from || core.down {
            return;
        }
        let Some(write) = core.tracker.write(at) else {
            return;
        };
        self.calls += 1;
        let core = &mut self.replicas[replica];
        core.write = Some(self.calls);
        let call = Call {
            number: self.calls,
            replica,
            life: core.life,
            sent: at.now,
            sent_at: t,
        };
        if t >= core.outage_until && !self.random.chance(self.plan.lost_request) {
            let arrives = t + self.travel(replica);
            self.schedule(arrives, Event::Written(call, write));
        }
        self.schedule(t + CALL_DEADLINE, Event::WriteTimedOut(call));
    }

    /// The write arrives: it is made if the row holds what was read.
    pub fn written(&mut self, t: True, call: Call, write: Write) -> Result<(), String> {
        let held = self.store.throttle.clone();
        if held == write.expected || held.is_none() {
            self.store.throttle = Some(write.text.clone());
            self.check_recovery(t)?;
        }
        if t >= self.replicas[call.replica].outage_until
            && !self.random.chance(self.plan.lost_reply)
        {
            let arrives = t + self.travel(call.replica);
            self.schedule(arrives, Event::Wrote(call, write, held));
        }
        Ok(())
    }

    /// The pace becomes less wide after so many clean answers as are to be heard for it, whoever hears them.
    fn check_recovery(&mut self, t: True) -> Result<(), String> {
        let at = Moment {
            now: LocalTime(self.store.now(t).0),
            offset: Some(0),
        };
        let row = self.store.throttle.as_deref();
        let row = row.and_then(|text| Throttle::parse(text, at));
        let pace = row.map_or((1, 0), |row| (row.multiplier(), row.episode()));
        let before = std::mem::replace(&mut self.pace, pace);
        if pace == before {
            return Ok(());
        }
        if pace.1 == before.1 && pace.0 > before.0 {
            // A replica that had not heard of the recovery put its wider pace back: what others have counted stands.
            return Ok(());
        }
        let heard = std::mem::take(&mut self.heard);
        if pace.1 == before.1 && pace.0 < before.0 {
            self.recoveries.push(heard);
            let needed = self.plan.recovery_after;
            if !self.plan.loses_rows() && (heard < needed || pace.0 * 2 < before.0) {
                return Err(format!(
                    "recovery: from {} to {} after {heard} clean answers of {needed}",
                    before.0, pace.0
                ));
            }
        }
        Ok(())
    }

    pub fn wrote(
        &mut self,
        t: True,
        call: Call,
        write: &Write,
        held: Option<String>,
    ) -> Result<(), String> {
        let core = &mut self.replicas[call.replica];
        if core.life != call.life || core.write != Some(call.number) {
            return Ok(());
        }
        core.write = None;
        let at = core.moment(t);
        if held == write.expected || held.is_none() {
            core.tracker.wrote(at, write, true);
        } else {
            core.tracker.met(at, held.as_deref());
        }
        self.pump(t, call.replica)
    }

    pub fn write_timed_out(&mut self, t: True, call: Call) -> Result<(), String> {
        let core = &mut self.replicas[call.replica];
        if core.life != call.life || core.write != Some(call.number) {
            return Ok(());
        }
        core.write = None;
        core.tracker
            .unanswered(self.planted == Planted::CountsTwice);
        core.write_from = core.now(t).plus(RETRY_WRITE);
        self.pump(t, call.replica)
    }
}

//! What the shell of one replica does when something happens to it: the life of a request, and the pacer's wishes
//! carried out, as `pacing/lane.rs` does.

use paceline::pacing::{
    pacer::{Action, Arrival, Refusal},
    time::{MILLISECOND, Nanos, SECOND},
};

use super::{
    clocks::True,
    plan::MICROSECOND,
    replica::{End, Request, State},
    world::{Event, Planted, World},
};

/// More actions than this at one instant are a loop without end.
const ACTIONS_AT_ONCE: usize = 50_000;
/// A connection that is not made by then is given up.
const CONNECT_DEADLINE: Nanos = 10 * SECOND;

impl World {
    pub fn arrive(&mut self, t: True, r: Request) -> Result<(), String> {
        let journey = &mut self.journeys[r];
        if self.replicas[journey.replica].down {
            // Nobody listens: the request was never taken, and nothing is promised about it.
            return Ok(());
        }
        let replica = journey.replica;
        self.regulate(t, replica)?;
        let journey = &mut self.journeys[r];
        let replica = &mut self.replicas[journey.replica];
        let now = replica.now(t);
        journey.state = State::Waiting;
        journey.life = replica.life;
        journey.deadline = now.plus(journey.patience);
        let arrival = Arrival {
            client: journey.client,
            urgency: journey.urgency,
            deadline: journey.deadline,
            target: journey.target,
        };
        match replica.pacer.arrive(now, arrival) {
            Err(refusal) => self.refused(t, r, refusal)?,
            Ok(id) => {
                journey.id = id;
                replica.here.insert(id, r);
                replica.enqueue(r, false);
                if journey.leaves {
                    let leaves_at = t + self.random.within(self.plan.leave_after.clone());
                    self.schedule(leaves_at, Event::Leave(r));
                }
            }
        }
        let replica = self.journeys[r].replica;
        self.pump(t, replica)
    }

    pub fn leave(&mut self, t: True, r: Request) -> Result<(), String> {
        if !self.is_alive(r) {
            return Ok(());
        }
        let replica = self.journeys[r].replica;
        let core = &mut self.replicas[replica];
        match self.journeys[r].state {
            State::Waiting => {
                core.pacer.leave(self.journeys[r].id);
                core.dequeue(r);
                self.end(r, End::Left)?;
            }
            State::Called(who, slot) => {
                if self.planted == Planted::LeaversKeepSlots {
                    core.pacer.finished(1);
                } else {
                    core.pacer.undispatched(core.now(t), who, slot, None);
                    core.given_back += 1;
                }
                self.end(r, End::Left)?;
            }
            State::Out(..) => {
                core.pacer.finished(1);
                self.end(r, End::Dispatched)?;
            }
            State::Ended(_) => return Ok(()),
        }
        self.pump(t, replica)
    }

    pub fn dialled(&mut self, t: True, r: Request, turn: u32, ok: bool) -> Result<(), String> {
        if !self.is_alive(r) || self.journeys[r].turn != turn {
            return Ok(());
        }
        let replica = self.journeys[r].replica;
        let core = &mut self.replicas[replica];
        if ok {
            core.pacer.ready(core.now(t), self.journeys[r].id, true);
            core.set_ready(r, true);
            if self.random.chance(self.plan.lost_ready) {
                let lost_at = t + self.random.within(0..=500 * MILLISECOND);
                self.schedule(lost_at, Event::LostReady(r, turn));
            }
        } else {
            core.pacer.leave(self.journeys[r].id);
            core.dequeue(r);
            self.end(r, End::Failed)?;
        }
        self.pump(t, replica)
    }

    pub fn lost_ready(&mut self, t: True, r: Request, turn: u32) -> Result<(), String> {
        if !self.is_alive(r) || self.journeys[r].turn != turn {
            return Ok(());
        }
        let replica = self.journeys[r].replica;
        let core = &mut self.replicas[replica];
        core.pacer.unready(core.now(t), self.journeys[r].id);
        core.set_ready(r, false);
        self.dial(t, r);
        self.pump(t, replica)
    }

    /// A request notices that it is its turn, or that its connection broke meanwhile.
    pub fn woke(&mut self, t: True, r: Request, turn: u32) -> Result<(), String> {
        let State::Called(who, slot) = self.journeys[r].state else {
            return Ok(());
        };
        if !self.is_alive(r) || self.journeys[r].turn != turn {
            return Ok(());
        }
        let broken = self.random.chance(self.plan.broken);
        let replica = self.journeys[r].replica;
        let core = &mut self.replicas[replica];
        let now = core.now(t);
        if broken || (!slot.is_fresh(now) && self.planted != Planted::StaleSlotsUsed) {
            core.pacer.undispatched(now, who, slot, Some(!broken));
            core.given_back += 1;
            core.enqueue(r, !broken);
            self.journeys[r].state = State::Waiting;
            self.journeys[r].back_at = t;
            self.journeys[r].turn += 1;
            if broken {
                self.dial(t, r);
            }
        } else {
            self.check_departure(t, r, slot)?;
            let journey = &mut self.journeys[r];
            journey.state = State::Out(who, slot);
            journey.turn += 1;
            let turn = journey.turn;
            if self.random.chance(self.plan.broken) {
                let at = t + self.random.within(0..=20 * MILLISECOND);
                self.schedule(at, Event::Recalled(r, turn));
            } else {
                let at = t + self.random.within(self.plan.service.clone());
                self.schedule(at, Event::Finished(r, turn));
            }
        }
        self.pump(t, replica)
    }

    /// The connection broke on the way out, nothing written: the origin saw nothing.
    pub fn recalled(&mut self, t: True, r: Request, turn: u32) -> Result<(), String> {
        let State::Out(who, slot) = self.journeys[r].state else {
            return Ok(());
        };
        if !self.is_alive(r) || self.journeys[r].turn != turn {
            return Ok(());
        }
        let replica = self.journeys[r].replica;
        let core = &mut self.replicas[replica];
        core.pacer.undispatched(core.now(t), who, slot, Some(false));
        core.given_back += 1;
        core.enqueue(r, false);
        core.used -= 1;
        if let Some(account) = core.slots.get(&slot.start) {
            self.store.slots[*account].used = None;
        }
        self.journeys[r].state = State::Waiting;
        self.journeys[r].back_at = t;
        self.journeys[r].turn += 1;
        self.dial(t, r);
        self.pump(t, replica)
    }

    /// The answer has come: clean, or a protest after which the request may go again.
    pub fn finished(&mut self, t: True, r: Request, turn: u32) -> Result<(), String> {
        if !self.is_alive(r) || self.journeys[r].turn != turn {
            return Ok(());
        }
        let State::Out(who, slot) = self.journeys[r].state else {
            return Ok(());
        };
        let replica = self.journeys[r].replica;
        let protested = self.heed(t, replica, slot.episode)?;
        let core = &mut self.replicas[replica];
        let now = core.now(t);
        let again = protested && self.random.chance(self.plan.goes_again);
        if again && core.pacer.may_again(now, &who) {
            core.pacer.again(now, who);
            core.enqueue(r, false);
            self.journeys[r].state = State::Waiting;
            self.journeys[r].back_at = t;
            self.journeys[r].turn += 1;
            self.dial(t, r);
        } else {
            core.pacer.finished(1);
            self.end(r, End::Dispatched)?;
        }
        self.pump(t, replica)
    }

    fn refused(&mut self, t: True, r: Request, refusal: Refusal) -> Result<(), String> {
        self.journeys[r].refusal = Some(refusal);
        self.end(r, End::Refused)?;
        if self.journeys[r].tries < self.plan.comebacks {
            let mut again = self.journeys[r].clone();
            again.tries += 1;
            again.turn = 0;
            let at = t + refusal.retry_after + MILLISECOND;
            again.came_at = at;
            self.journeys.push(again);
            self.schedule(at, Event::Arrive(self.journeys.len() - 1));
        }
        Ok(())
    }

    fn dial(&mut self, t: True, r: Request) {
        let slow = self.random.chance(self.plan.slow_dials);
        let span = if slow {
            300 * MILLISECOND..=4_000 * MILLISECOND
        } else {
            self.plan.dial.clone()
        };
        let mut ok = !self.random.chance(self.plan.failed_dials);
        let mut at = t + self.random.within(span);
        if self.journeys[r].target < self.plan.hung {
            (ok, at) = (false, t + CONNECT_DEADLINE);
        }
        self.journeys[r].turn += 1;
        self.schedule(at, Event::Dialled(r, self.journeys[r].turn, ok));
    }

    /// Whether the process that took the request still runs.
    fn is_alive(&self, r: Request) -> bool {
        let journey = &self.journeys[r];
        let replica = &self.replicas[journey.replica];
        journey.life == replica.life && !replica.down
    }

    /// Carries out what the pacer of a replica wants, then sets its timer.
    pub fn pump(&mut self, t: True, replica: usize) -> Result<(), String> {
        if self.replicas[replica].down {
            return Ok(());
        }
        self.regulate(t, replica)?;
        let now = self.replicas[replica].now(t);
        let core = &mut self.replicas[replica];
        core.pacer.look(now, &core.bounds);
        let mut actions = 0;
        while let Some(action) = self.replicas[replica].pacer.next_action(now) {
            self.note(t, || format!("    replica {replica} {action:?}"));
            actions += 1;
            if actions > ACTIONS_AT_ONCE {
                return Err(format!("replica {replica} finds no end of actions"));
            }
            match action {
                Action::Reserve(ask) => self.call_store(t, replica, ask),
                Action::Connect(id) => {
                    let r = self.named(replica, id)?;
                    self.dial(t, r);
                }
                Action::Refuse(id, refusal) => {
                    let r = self.named(replica, id)?;
                    self.replicas[replica].dequeue(r);
                    self.check_refusal(t, r)?;
                    if self.planted != Planted::RefusalsForgotten {
                        self.refused(t, r, refusal)?;
                    }
                }
                Action::Dispatch(who, slot) => {
                    let r = self.named(replica, who.id)?;
                    self.check_dispatch(t, r, slot)?;
                    self.replicas[replica].dequeue(r);
                    self.journeys[r].state = State::Called(who, slot);
                    self.journeys[r].turn += 1;
                    let late = self.random.chance(self.plan.late_wakes);
                    let takes = if late {
                        self.plan.late.clone()
                    } else {
                        MICROSECOND..=200 * MICROSECOND
                    };
                    let at = t + self.random.within(takes);
                    self.schedule(at, Event::Woke(r, self.journeys[r].turn));
                }
            }
        }
        self.arm(t, replica);
        self.check_quiescence(t, replica)
    }

    fn arm(&mut self, t: True, replica: usize) {
        self.write_throttle(t, replica);
        let core = &mut self.replicas[replica];
        let write_at = core.tracker.writes_at().filter(|_| core.write.is_none());
        let write_at = write_at.map(|at| at.max(core.write_from));
        let wake_at = [write_at, core.pacer.wake_at()].into_iter().flatten().min();
        if wake_at == core.armed {
            return;
        }
        core.armed = wake_at;
        core.timer += 1;
        if let Some(wake_at) = wake_at {
            let at = self.fires(t, replica, wake_at);
            self.schedule(at, Event::Timer(replica, self.replicas[replica].timer));
        }
    }

    fn named(&self, replica: usize, id: u64) -> Result<Request, String> {
        let found = self.replicas[replica].here.get(&id).copied();
        let r = found.ok_or_else(|| {
            format!("replica {replica} speaks of request {id}, which it never had")
        })?;
        match self.journeys[r].state {
            State::Waiting => Ok(r),
            other => Err(format!(
                "request {r} is told something while it is {other:?}"
            )),
        }
    }
}

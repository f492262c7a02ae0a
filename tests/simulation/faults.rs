//! What goes wrong, and the programs beside the replicas that move the same cursor.

use paceline::pacing::time::MILLISECOND;

use super::{
    clocks::True,
    plan::Fault,
    replica::{End, State},
    world::{Event, World},
};

impl World {
    pub fn fault(&mut self, t: True, fault: Fault) -> Result<(), String> {
        let calm = match fault {
            Fault::Suspend { span, .. } | Fault::Outage { span, .. } => t + span,
            _ => t,
        };
        self.calm_from(calm);
        match fault {
            Fault::Suspend { replica, span } => {
                let r = &mut self.replicas[replica];
                r.suspended_until = r.suspended_until.max(t + span);
                r.idle_at = r.suspended_until;
            }
            Fault::Outage { replica, span } => {
                let r = &mut self.replicas[replica];
                r.outage_until = r.outage_until.max(t + span);
            }
            Fault::Kill { replica, down } => {
                if self.replicas[replica].down {
                    return Ok(());
                }
                for r in 0..self.journeys.len() {
                    let j = &self.journeys[r];
                    if j.replica == replica && j.life == self.replicas[replica].life {
                        match j.state {
                            State::Ended(_) => {}
                            State::Out(..) => self.end(r, End::Dispatched)?,
                            _ => self.end(r, End::Killed)?,
                        }
                    }
                }
                self.replicas[replica] = self.replicas[replica].restarted(t);
                self.replicas[replica].down = true;
                self.schedule(t + down, Event::Restart(replica));
            }
            Fault::RowVanishes => self.store.lose_row(),
            Fault::RowFarAhead => self.store.row_far_ahead(t),
            Fault::Step(by) => self.store.step(t, by),
            Fault::Reconfigure(interval) => {
                for replica in 0..self.plan.replicas {
                    let at = t + self.random.within(0..=100 * MILLISECOND);
                    self.schedule(at, Event::Reconfigure(replica, interval));
                }
            }
        }
        Ok(())
    }

    /// What a replica promises about liveness holds again from `t` on, counted anew.
    pub fn calm_from(&mut self, t: True) {
        self.stalls_from = self.stalls_from.max(t);
        self.stalls.fill(None);
    }

    /// A foreign program takes the next slot, for the one fetch that it has under way.
    pub fn foreign_takes(&mut self, t: True) -> Result<(), String> {
        let Some(slot) = self.store.take_foreign(t, self.plan.interval)? else {
            return Ok(());
        };
        let begins = self.store.slots[slot].begins.max(t);
        if begins <= self.plan.span {
            let way_back = self.random.within(self.plan.one_way.clone());
            self.schedule(begins + way_back, Event::ForeignSends(slot));
        }
        Ok(())
    }

    pub fn foreign_sends(&mut self, t: True, slot: usize) {
        let account = &mut self.store.slots[slot];
        (account.used, account.lateness) = (Some(t), *self.plan.one_way.end());
        let service = self.random.within(self.plan.service.clone());
        self.schedule(t + service, Event::ForeignTakes);
    }
}

//! What a request holds on its way: a place in the queue, then a slot, then its departure. Each is a guard: dropped, it
//! leaves the lane as if the request had never got so far, or had ended.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use super::{Call, Lane, Turn, Waiter};
use crate::pacing::{
    pacer::{Dispatched, Id, Refusal, Slot},
    time::{LocalTime, Nanos, StoreTime},
};

/// A place in the queue. Dropping it leaves the queue and spends nothing.
#[derive(Debug)]
pub struct Ticket {
    lane: Arc<Lane>,
    id: Id,
    queued: bool,
    /// What it was told on the spot, when it entered or was ready: most often all that it has to be told.
    told: Option<Turn>,
}

impl Ticket {
    pub(super) fn new(lane: Arc<Lane>, id: Id, told: Option<Turn>) -> Self {
        Ticket {
            lane,
            id,
            queued: true,
            told,
        }
    }

    /// The next thing this request is told.
    ///
    /// # Errors
    /// The request is refused and has left the queue.
    pub async fn next(&mut self) -> Result<Call, Refusal> {
        std::future::poll_fn(|cx| self.poll_next(cx)).await
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Call, Refusal>> {
        let turn = match self.told.take() {
            Some(turn) => turn,
            None => {
                let mut core = self.lane.lock();
                match core.turn_of(self.id) {
                    Some(turn) => turn,
                    None => {
                        core.wake_with(self.id, cx.waker());
                        self.lane.see_to(&mut core);
                        return Poll::Pending;
                    }
                }
            }
        };
        Poll::Ready(match turn {
            Turn::Connect => Ok(Call::Connect),
            Turn::Go(who, slot) => {
                self.queued = false;
                Ok(Call::Go(Pass {
                    lane: self.lane.clone(),
                    who,
                    slot,
                    used: false,
                }))
            }
            Turn::Refused(refusal) => {
                self.queued = false;
                Err(refusal)
            }
        })
    }

    /// The upstream connection is ready, `dialled` or kept from a request before: a slot may be taken for this request.
    /// [`Ticket::next`] must be asked next, for what there is to wait for is seen to there.
    pub fn ready(&mut self, dialled: bool) {
        let now = LocalTime::now();
        let mut core = self.lane.lock();
        core.pacer.ready(now, self.id, dialled);
        // The caller asks for its turn next.
        self.lane.advance(&mut core, now);
        if self.told.is_none() {
            self.told = core.turn_of(self.id);
        }
    }

    /// The upstream connection was lost; this request keeps its place while it makes another.
    pub fn unready(&self) {
        self.lane
            .with_pacer(|core, now| core.pacer.unready(now, self.id));
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.queued {
            return;
        }
        let told = self.told.take();
        self.lane.with_pacer(|core, now| {
            let waiter = core.waiters.remove(&self.id);
            match told.or(waiter.and_then(|w| w.turn)) {
                Some(Turn::Go(who, slot)) => core.pacer.undispatched(now, who, slot, None),
                _ => core.pacer.leave(self.id),
            }
        });
    }
}

/// A slot, given to a request and not yet used. Dropping it gives the slot to the next in line.
#[derive(Debug)]
pub struct Pass {
    lane: Arc<Lane>,
    who: Dispatched,
    slot: Slot,
    used: bool,
}

impl Pass {
    /// Uses the slot, to be called right before the request is written.
    ///
    /// # Errors
    /// The slot went stale on the way (the machine was busy or suspended): the request is back in its old place.
    pub fn depart(mut self) -> Result<Departure, Box<Ticket>> {
        let now = LocalTime::now();
        self.used = true;
        if !self.slot.is_fresh(now) {
            return Err(Box::new(rejoin(&self.lane, self.who, self.slot, true)));
        }
        if self.slot.alone {
            self.lane.lock().pacer.departed(&self.slot);
        }
        Ok(Departure {
            lane: self.lane.clone(),
            who: self.who,
            slot: self.slot,
            at: now,
            ended: false,
        })
    }

    /// The connection broke while the slot was on its way: back to the old place, to connect again.
    pub fn reconnect(mut self) -> Ticket {
        self.used = true;
        rejoin(&self.lane, self.who, self.slot, false)
    }
}

fn rejoin(lane: &Arc<Lane>, who: Dispatched, slot: Slot, ready: bool) -> Ticket {
    lane.with_pacer(|core, now| {
        core.waiters.insert(who.id, Waiter::default());
        core.pacer.undispatched(now, who, slot, Some(ready));
    });
    Ticket::new(lane.clone(), who.id, None)
}

impl Drop for Pass {
    fn drop(&mut self) {
        if !self.used {
            self.lane
                .with_pacer(|core, now| core.pacer.undispatched(now, self.who, self.slot, None));
        }
    }
}

/// A request under way. Dropping it says that it has ended.
#[derive(Debug)]
pub struct Departure {
    lane: Arc<Lane>,
    who: Dispatched,
    slot: Slot,
    at: LocalTime,
    ended: bool,
}

impl Departure {
    /// Whether the slot is one of this replica's own share, the store being away.
    pub fn is_alone(&self) -> bool {
        self.slot.alone
    }

    /// The slot, on the store's clock.
    pub fn slot(&self) -> StoreTime {
        self.slot.start
    }

    /// When the request was dispatched.
    pub fn at(&self) -> LocalTime {
        self.at
    }

    /// How long after its slot the request was dispatched.
    pub fn lateness(&self) -> Nanos {
        self.at.since(self.slot.at)
    }

    /// The lane it went out on.
    pub fn lane(&self) -> &Arc<Lane> {
        &self.lane
    }

    /// The episode of the throttle in which its slot was granted.
    pub fn episode(&self) -> u64 {
        self.slot.episode
    }

    /// Whether the request, sent again, would have a slot in time.
    pub fn may_go_again(&self) -> bool {
        let now = LocalTime::now();
        self.lane.lock().pacer.may_again(now, &self.who)
    }

    /// The request is to be sent again, on a slot of its own, within its old deadline: it goes back to its old place.
    pub fn go_again(mut self) -> Ticket {
        self.ended = true;
        self.lane.with_pacer(|core, now| {
            core.waiters.insert(self.who.id, Waiter::default());
            core.pacer.again(now, self.who);
        });
        Ticket::new(self.lane.clone(), self.who.id, None)
    }

    /// The connection broke and the message came back whole, nothing of it written: the request is back in its old
    /// place, to connect again, and its slot goes to the next in line if it is still fresh.
    pub fn recall(mut self) -> Ticket {
        self.ended = true;
        rejoin(&self.lane, self.who, self.slot, false)
    }
}

impl Drop for Departure {
    fn drop(&mut self) {
        if !self.ended {
            self.lane.finished();
        }
    }
}

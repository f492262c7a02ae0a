//! The shell around one pacer: it keeps the waiters, sleeps until slots, and talks to the store.
//!
//! Whoever changes something (a request arriving, leaving or becoming ready) runs the pacer on the spot, under the
//! lane's lock; with the embedded store a request that need not wait is thus admitted without any other task. Only
//! timers and calls to a remote store need the lane's driver, a task that exists while there is something to wait for.

use std::{
    collections::HashMap,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
};

use tokio::sync::Notify;

use crate::{
    pacing::{
        alarm::Alarm,
        cursor::{Ask, Granted},
        pacer::{Action, Arrival, Dispatched, Id, Pacer, Refusal, Settings, Slot},
        time::{LocalTime, MILLISECOND, Nanos},
    },
    store::{Store, memory},
};

/// How soon a store that could not be reached is asked again.
const RETRY_STORE: Nanos = 100 * MILLISECOND;

/// One cursor as this replica sees it, with those who wait for it.
#[derive(Debug)]
pub struct Lane {
    key: String,
    store: Store,
    alarm: Arc<Alarm>,
    voided: Arc<AtomicU64>,
    core: Mutex<Core>,
    wake: Notify,
}

#[derive(Debug)]
struct Core {
    pacer: Pacer,
    waiters: HashMap<Id, Waiter>,
    memory: memory::Cursor,
    ask: Option<Ask>,
    /// Whether the driver runs, and what it sleeps for.
    driving: bool,
    armed: Option<LocalTime>,
    voided: u64,
    last_used: LocalTime,
}

#[derive(Debug, Default)]
struct Waiter {
    turn: Option<Turn>,
    waker: Option<Waker>,
}

#[derive(Debug)]
enum Turn {
    Connect,
    Go(Dispatched, Slot),
    Refused(Refusal),
}

/// What a waiting request is told.
#[derive(Debug)]
pub enum Call {
    /// Make the upstream connection ready, then say so with [`Ticket::ready`].
    Connect,
    /// It is your turn.
    Go(Pass),
}

impl Lane {
    /// A lane on the cursor called `key` in `store`. Slots that pass unused are added to `voided`.
    pub fn new(
        key: String,
        settings: Settings,
        store: Store,
        alarm: Arc<Alarm>,
        voided: Arc<AtomicU64>,
    ) -> Arc<Self> {
        let core = Core {
            pacer: Pacer::new(settings),
            waiters: HashMap::new(),
            memory: memory::Cursor::default(),
            ask: None,
            driving: false,
            armed: None,
            voided: 0,
            last_used: LocalTime::now(),
        };
        Arc::new(Lane {
            key,
            store,
            alarm,
            voided,
            core: Mutex::new(core),
            wake: Notify::new(),
        })
    }

    /// Puts a request in the queue, or refuses it at once.
    ///
    /// # Errors
    /// The refusal, with its cause and when to come back.
    pub fn enter(self: &Arc<Self>, arrival: Arrival) -> Result<Ticket, Refusal> {
        let now = LocalTime::now();
        let mut core = self.lock();
        core.last_used = now;
        let id = core.pacer.arrive(now, arrival)?;
        core.waiters.insert(id, Waiter::default());
        self.pump(&mut core, now);
        Ok(Ticket {
            lane: self.clone(),
            id,
            queued: true,
        })
    }

    /// How many requests wait.
    pub fn waiting(&self) -> usize {
        self.lock().pacer.waiting()
    }

    /// Whether nothing would be lost by forgetting this lane: nobody waits, nothing is under way, and the cursor, if
    /// this lane keeps it, has passed.
    pub fn is_forgettable(&self) -> bool {
        let core = self.lock();
        core.pacer.is_idle() && !core.driving && core.memory.has_passed(LocalTime::now())
    }

    /// When a request last came.
    pub fn last_used(&self) -> LocalTime {
        self.lock().last_used
    }

    fn lock(&self) -> MutexGuard<'_, Core> {
        // A panic under this lock would be a bug in the pacer; the other requests still want answers.
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries out what the pacer wants, until it wants nothing more at `now`.
    fn pump(self: &Arc<Self>, core: &mut Core, now: LocalTime) {
        while let Some(action) = core.pacer.next_action(now) {
            match action {
                Action::Connect(id) => core.tell(id, Turn::Connect),
                Action::Dispatch(who, slot) => core.tell(who.id, Turn::Go(who, slot)),
                Action::Refuse(id, refusal) => core.tell(id, Turn::Refused(refusal)),
                Action::Reserve(ask) => match &self.store {
                    Store::Memory => {
                        let Core { pacer, memory, .. } = core;
                        let granted = memory.reserve(now, &ask);
                        pacer.granted(now, granted, memory.clock());
                    }
                    Store::Postgres(_) => core.ask = Some(ask),
                },
            }
        }
        let voided = core.pacer.voided();
        self.voided.fetch_add(voided - core.voided, Relaxed);
        core.voided = voided;
        let wake_at = core.pacer.wake_at();
        if !core.driving {
            if core.ask.is_some() || wake_at.is_some() {
                core.driving = true;
                tokio::spawn(drive(self.clone()));
            }
        } else if core.ask.is_some()
            || wake_at.is_some_and(|t| core.armed.is_none_or(|armed| t < armed))
        {
            self.wake.notify_one();
        }
    }

    fn with_pacer<T>(self: &Arc<Self>, act: impl FnOnce(&mut Core, LocalTime) -> T) -> T {
        let now = LocalTime::now();
        let mut core = self.lock();
        let out = act(&mut core, now);
        self.pump(&mut core, now);
        out
    }
}

impl Core {
    fn tell(&mut self, id: Id, turn: Turn) {
        // A request that is gone by now has left the pacer too; what it was to be told goes nowhere.
        if let Some(waiter) = self.waiters.get_mut(&id) {
            waiter.turn = Some(turn);
            if let Some(waker) = waiter.waker.take() {
                waker.wake();
            }
        }
    }
}

/// A reservation under way: what the store granted, or when to ask it again.
type StoreCall = Pin<Box<dyn Future<Output = Result<Granted, LocalTime>> + Send>>;

/// Waits for what the pacer cannot do by itself: instants, and the store's replies.
async fn drive(lane: Arc<Lane>) {
    let mut call: Option<StoreCall> = None;
    loop {
        let wake_at = {
            let mut core = lane.lock();
            let now = LocalTime::now();
            core.armed = Some(LocalTime(Nanos::MIN));
            lane.pump(&mut core, now);
            if let Some(ask) = core.ask.take() {
                call = Some(Box::pin(ask_store(lane.clone(), ask)));
            }
            core.armed = core.pacer.wake_at();
            if call.is_none() && core.armed.is_none() {
                core.driving = false;
                return;
            }
            core.armed
        };
        let far = LocalTime(Nanos::MAX);
        // Whatever the pacer says, a round of this loop lets the others run: it must never starve the call it waits for.
        tokio::task::yield_now().await;
        tokio::select! {
            biased;
            reply = async { match call.as_mut() { Some(c) => c.await, None => std::future::pending().await } } => {
                call = None;
                let mut core = lane.lock();
                let now = LocalTime::now();
                match (reply, &lane.store) {
                    (Ok(granted), Store::Postgres(store)) => {
                        store.with_clock(|clock| core.pacer.granted(now, granted, clock));
                    }
                    (Ok(_), Store::Memory) => {}
                    (Err(retry_at), _) => core.pacer.failed(retry_at),
                }
            }
            () = lane.alarm.sleep_until(wake_at.unwrap_or(far)) => {}
            () = lane.wake.notified() => {}
        }
    }
}

async fn ask_store(lane: Arc<Lane>, ask: Ask) -> Result<Granted, LocalTime> {
    let retry = || LocalTime::now().plus(RETRY_STORE);
    match &lane.store {
        Store::Postgres(store) => store.reserve(&lane.key, ask).await.map_err(|_| retry()),
        Store::Memory => Err(retry()),
    }
}

/// A place in the queue. Dropping it leaves the queue and spends nothing.
#[derive(Debug)]
pub struct Ticket {
    lane: Arc<Lane>,
    id: Id,
    queued: bool,
}

impl Ticket {
    /// The next thing this request is told.
    ///
    /// # Errors
    /// The request is refused and has left the queue.
    pub async fn next(&mut self) -> Result<Call, Refusal> {
        std::future::poll_fn(|cx| self.poll_next(cx)).await
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Call, Refusal>> {
        let mut core = self.lane.lock();
        let Some(waiter) = core.waiters.get_mut(&self.id) else {
            return Poll::Pending;
        };
        let turn = match waiter.turn.take() {
            None => {
                if !waiter
                    .waker
                    .as_ref()
                    .is_some_and(|w| w.will_wake(cx.waker()))
                {
                    waiter.waker = Some(cx.waker().clone());
                }
                return Poll::Pending;
            }
            Some(turn) => turn,
        };
        Poll::Ready(match turn {
            Turn::Connect => Ok(Call::Connect),
            Turn::Go(who, slot) => {
                core.waiters.remove(&self.id);
                self.queued = false;
                Ok(Call::Go(Pass {
                    lane: self.lane.clone(),
                    who,
                    slot,
                    used: false,
                }))
            }
            Turn::Refused(refusal) => {
                core.waiters.remove(&self.id);
                self.queued = false;
                Err(refusal)
            }
        })
    }

    /// The upstream connection is ready: a slot may be taken for this request.
    pub fn ready(&self) {
        self.lane.with_pacer(|core, _| core.pacer.ready(self.id));
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
        self.lane.with_pacer(|core, now| {
            match core.waiters.remove(&self.id).and_then(|w| w.turn) {
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
    pub fn depart(mut self) -> Result<Departure, Ticket> {
        let now = LocalTime::now();
        self.used = true;
        if !self.slot.is_fresh(now) {
            return Err(rejoin(&self.lane, self.who, self.slot, true));
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
    Ticket {
        lane: lane.clone(),
        id: who.id,
        queued: true,
    }
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
    /// When the request was dispatched.
    pub fn at(&self) -> LocalTime {
        self.at
    }

    /// How long after its slot the request was dispatched.
    pub fn lateness(&self) -> Nanos {
        self.at.since(self.slot.at)
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
            self.lane.with_pacer(|core, _| core.pacer.finished());
        }
    }
}

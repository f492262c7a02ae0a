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
    config,
    pacing::{
        alarm::Alarm,
        course::{Course, LOOK_AGAIN, Step, View},
        cursor::{Ask, Granted},
        pacer::{Action, Arrival, Dispatched, Id, Pacer, Refusal, Settings, Slot},
        time::{LocalTime, MILLISECOND, Nanos, StoreTime},
    },
    store::{
        Store, memory,
        postgres::{Postgres, error::Reason},
    },
};

/// How soon a store that could not be reached is asked again.
const RETRY_STORE: Nanos = 100 * MILLISECOND;
/// How soon a row that somebody had locked is asked for again.
const RETRY_LOCKED: Nanos = 500 * MILLISECOND;

/// Which cursor a lane is on.
#[derive(Clone, Debug)]
pub struct Name {
    /// The destination, as configured.
    pub destination: Arc<str>,
    /// The cursor, without the prefix: the destination's name, and with `scope = "host"` the host.
    pub cursor: String,
    /// The key of its row.
    pub key: String,
    /// The ceiling at first, in requests per second, as configured.
    pub ceiling: f64,
}

/// One cursor as this replica sees it, with those who wait for it.
#[derive(Debug)]
pub struct Lane {
    name: Name,
    store: Store,
    alarm: Arc<Alarm>,
    voided: Arc<AtomicU64>,
    core: Mutex<Core>,
    wake: Notify,
}

#[derive(Debug)]
struct Core {
    pacer: Pacer,
    /// The configured one, in requests per second.
    ceiling: f64,
    waiters: HashMap<Id, Waiter>,
    memory: memory::Cursor,
    course: Course,
    ask: Option<Ask>,
    /// The row was locked when it was last asked for.
    locked: bool,
    /// Ask once only to see whether the row can be moved again.
    probe: Option<Ask>,
    /// Whether the driver runs, and what it sleeps for.
    driving: bool,
    armed: Option<LocalTime>,
    voided: u64,
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
    /// A lane on a cursor in `store`. Slots that pass unused are added to `voided`.
    pub fn new(
        name: Name,
        settings: Settings,
        store: Store,
        alarm: Arc<Alarm>,
        voided: Arc<AtomicU64>,
    ) -> Arc<Self> {
        let core = Core {
            pacer: Pacer::new(settings),
            ceiling: name.ceiling,
            waiters: HashMap::new(),
            memory: memory::Cursor::default(),
            course: Course::default(),
            ask: None,
            locked: false,
            probe: None,
            driving: false,
            armed: None,
            voided: 0,
        };
        Arc::new(Lane {
            name,
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
        let id = core.pacer.arrive(now, arrival)?;
        core.waiters.insert(id, Waiter::default());
        self.pump(&mut core, now);
        Ok(Ticket {
            lane: self.clone(),
            id,
            queued: true,
        })
    }

    /// A new configuration, with its ceiling in requests per second. Who waits goes on waiting, at the new pace.
    pub fn reconfigure(self: &Arc<Self>, settings: Settings, ceiling: f64) {
        self.with_pacer(|core, _| {
            core.ceiling = ceiling;
            core.pacer.reconfigure(settings);
        });
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

    fn lock(&self) -> MutexGuard<'_, Core> {
        // A panic under this lock would be a bug in the pacer; the other requests still want answers.
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries out what the pacer wants, until it wants nothing more at `now`.
    fn pump(self: &Arc<Self>, core: &mut Core, now: LocalTime) {
        self.come_back(core, now);
        while let Some(action) = core.pacer.next_action(now) {
            match action {
                Action::Connect(id) => core.tell(id, Turn::Connect),
                Action::Dispatch(who, slot) => {
                    core.tell(who.id, Turn::Go(who, slot));
                }
                Action::Refuse(id, refusal) => core.tell(id, Turn::Refused(refusal)),
                Action::Reserve(ask) => match &self.store {
                    Store::Memory => {
                        let Core { pacer, memory, .. } = core;
                        let granted = memory.reserve(now, &ask);
                        pacer.granted(now, granted, memory.clock());
                    }
                    Store::Postgres(store) => self.reserve(core, now, ask, store),
                },
            }
        }
        let voided = core.pacer.voided();
        self.voided.fetch_add(voided - core.voided, Relaxed);
        core.voided = voided;
        let wake_at = core.pacer.wake_at();
        if !core.driving {
            if core.has_calls() || wake_at.is_some() {
                core.driving = true;
                tokio::spawn(drive(self.clone()));
            }
        } else if core.has_calls()
            || wake_at.is_some_and(|t| core.armed.is_none_or(|armed| t < armed))
        {
            self.wake.notify_one();
        }
    }

    /// Gets slots from a shared cursor, or from our own share, as the membership's terms have it.
    fn reserve(&self, core: &mut Core, now: LocalTime, ask: Ask, store: &Postgres) {
        let membership = store.membership();
        let (ceiling, _) = membership.agreed(&self.name.destination, core.ceiling, now);
        let view = View {
            terms: membership.terms(&self.name.cursor, now),
            interval: interval(ceiling),
            reachable: membership.has_read(),
        };
        let Core { pacer, course, .. } = core;
        match store.with_clock(|clock| course.step(now, ask, &view, pacer, clock)) {
            Step::Ask(ask) => core.ask = Some(ask),
            Step::Own(probe) => core.probe = probe.or(core.probe),
            Step::Wait => {}
        }
    }

    fn come_back(&self, core: &mut Core, now: LocalTime) {
        if let (true, Store::Postgres(store)) = (core.course.is_alone(), &self.store) {
            let terms = store.membership().terms(&self.name.cursor, now);
            core.course.look(terms, &mut core.pacer);
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
    fn has_calls(&self) -> bool {
        self.ask.is_some() || self.probe.is_some()
    }

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

/// A call to the store, and whether it only probes.
type Reply = (bool, Result<Granted, LocalTime>);

/// Waits for what the pacer cannot do by itself: instants, and the store's replies.
async fn drive(lane: Arc<Lane>) {
    let mut call: Option<Pin<Box<dyn Future<Output = Reply> + Send>>> = None;
    loop {
        let wake_at = {
            let mut core = lane.lock();
            let now = LocalTime::now();
            core.armed = Some(LocalTime(Nanos::MIN));
            lane.pump(&mut core, now);
            if call.is_none() {
                // One call at a time; a probe goes only when nothing else has to.
                let probe = core.ask.is_none();
                if let Some(ask) = core.ask.take().or_else(|| core.probe.take()) {
                    call = Some(Box::pin(ask_store(lane.clone(), ask, probe, core.locked)));
                }
            }
            // Nobody tells a lane that the store is back: it looks.
            let look = core.course.is_alone().then(|| now.plus(LOOK_AGAIN));
            core.armed = core.pacer.wake_at();
            if call.is_none() && core.armed.is_none() {
                core.driving = false;
                return;
            }
            core.armed = core.armed.map(|t| look.map_or(t, |l| t.min(l)));
            core.armed
        };
        let far = LocalTime(Nanos::MAX);
        // Whatever the pacer says, a round of this loop lets the others run: it must never starve the call it waits for.
        tokio::task::yield_now().await;
        tokio::select! {
            biased;
            reply = async { match call.as_mut() { Some(c) => c.await, None => std::future::pending().await } } => {
                call = None;
                lane.replied(reply);
            }
            () = lane.alarm.sleep_until(wake_at.unwrap_or(far)) => {}
            () = lane.wake.notified() => {}
        }
    }
}

async fn ask_store(lane: Arc<Lane>, ask: Ask, probe: bool, aside: bool) -> Reply {
    let Store::Postgres(store) = &lane.store else {
        return (probe, Err(LocalTime::now()));
    };
    let reply = store.reserve(&lane.name.key, ask, aside || probe).await;
    let now = LocalTime::now();
    store
        .membership()
        .reserved(&lane.name.cursor, reply.is_ok(), now);
    let locked = reply.as_ref().is_err_and(|e| e.reason() == Reason::Locked);
    lane.lock().locked = locked;
    (
        probe,
        reply.map_err(|_| now.plus(if locked { RETRY_LOCKED } else { RETRY_STORE })),
    )
}

impl Lane {
    fn replied(&self, (probe, reply): Reply) {
        let mut core = self.lock();
        let now = LocalTime::now();
        match (reply, &self.store) {
            // What a probe was granted is not used: a slot of our own share may be held for the same time.
            (Ok(granted), Store::Postgres(_)) if probe => core.pacer.raise_floor(granted.end()),
            (Ok(granted), Store::Postgres(store)) => {
                store.with_clock(|clock| core.pacer.granted(now, granted, clock));
            }
            (Err(retry_at), _) if !probe => core.pacer.failed(retry_at),
            _ => {}
        }
    }
}

fn interval(ceiling: f64) -> Nanos {
    config::Rate::per_second(ceiling).map_or(Nanos::MAX, |r| {
        Nanos::try_from(r.interval_nanos()).unwrap_or(Nanos::MAX)
    })
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

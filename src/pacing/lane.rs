//! The shell around one pacer: it keeps the waiters, sleeps until slots, and talks to the store.
//!
//! Whoever changes something (a request arriving, leaving or becoming ready) runs the pacer on the spot, under the
//! lane's lock; with the embedded store a request that need not wait is thus admitted without any other task. Only
//! timers and calls to a remote store need the lane's driver, a task that exists while there is something to wait for.

use std::{
    collections::HashMap,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
};

use tokio::sync::Notify;

use crate::{
    config,
    pacing::{
        alarm::Alarm,
        course::{Course, LOOK_AGAIN, Step, View},
        cursor::{Ask, held},
        pacer::{Action, Arrival, Dispatched, Id, Pacer, Refusal, Settings, Slot},
        throttle::{
            self, Moment, Regime, Rules,
            tracker::{Event, Tracker, Write},
        },
        time::{LocalTime, MILLISECOND, Nanos, StoreTime},
    },
    store::{
        Store, memory,
        postgres::{Postgres, error::Reason, session::Reply},
    },
};

/// How soon a store that could not be reached is asked again.
const RETRY_STORE: Nanos = 100 * MILLISECOND;
/// How soon a row that somebody had locked is asked for again.
const RETRY_LOCKED: Nanos = 500 * MILLISECOND;
/// How soon a throttle state that could not be written is written again.
const RETRY_WRITE: Nanos = 500 * MILLISECOND;

/// Which cursor a lane is on.
#[derive(Clone, Debug)]
pub struct Name {
    /// The destination, as configured.
    pub destination: Arc<str>,
    /// The cursor, without the prefix: the destination's name, and with `scope = "host"` the host.
    pub cursor: String,
    /// The key of its row.
    pub key: String,
    /// The key of the row with the state of its throttle.
    pub throttle_key: String,
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
    /// The throttle's state is written, or cannot be.
    settled: Notify,
    /// Whether a clean answer means anything: it does not while the multiplier is 1.
    widened: AtomicBool,
    /// The lane of the whole destination, where each host has a cursor of its own: its pauses are this lane's too.
    above: Option<Arc<Lane>>,
    /// The lanes of which this is the one above.
    below: Mutex<Vec<Weak<Lane>>>,
}

#[derive(Debug)]
struct Core {
    pacer: Pacer,
    /// The configured one, in requests per second.
    ceiling: f64,
    waiters: HashMap<Id, Waiter>,
    memory: memory::Held,
    course: Course,
    tracker: Tracker,
    /// A write of the throttle's state is under way; and one that failed is not tried again before this.
    writing: bool,
    write_from: LocalTime,
    /// The store tells of the throttle's row with each heartbeat.
    watched: bool,
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
    /// A lane on a cursor in `store`, throttled by `rules`. Slots that pass unused are added to `voided`; what is paused
    /// `above` is paused here.
    pub fn new(
        name: Name,
        (settings, rules): (Settings, Rules),
        store: Store,
        alarm: Arc<Alarm>,
        voided: Arc<AtomicU64>,
        above: Option<Arc<Lane>>,
    ) -> Arc<Self> {
        let memory = match &store {
            Store::Memory(cursors) => cursors.find(&name.key),
            Store::Postgres(_) => memory::Held::default(),
        };
        let core = Core {
            pacer: Pacer::new(settings),
            ceiling: name.ceiling,
            waiters: HashMap::new(),
            memory,
            course: Course::default(),
            tracker: Tracker::new(rules),
            writing: false,
            write_from: LocalTime(Nanos::MIN),
            watched: false,
            ask: None,
            locked: false,
            probe: None,
            driving: false,
            armed: None,
            voided: 0,
        };
        let lane = Arc::new(Lane {
            name,
            store,
            alarm,
            voided,
            core: Mutex::new(core),
            wake: Notify::new(),
            settled: Notify::new(),
            widened: AtomicBool::new(false),
            above,
            below: Mutex::default(),
        });
        if let Some(above) = &lane.above {
            let mut below = above.below();
            below.retain(|lane| lane.strong_count() > 0);
            below.push(Arc::downgrade(&lane));
        }
        lane
    }

    /// Puts a request in the queue, or refuses it at once.
    ///
    /// # Errors
    /// The refusal, with its cause and when to come back.
    pub fn enter(self: &Arc<Self>, arrival: Arrival) -> Result<Ticket, Refusal> {
        let now = LocalTime::now();
        let mut core = self.lock();
        self.regulate(&mut core, now);
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
    pub fn reconfigure(self: &Arc<Self>, (settings, rules): (Settings, Rules), ceiling: f64) {
        self.with_pacer(|core, _| {
            core.ceiling = ceiling;
            core.tracker.reconfigure(rules);
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
        let now = LocalTime::now();
        core.pacer.is_idle()
            && !core.driving
            && core.memory.lock().has_passed(now)
            && core.tracker.is_neutral()
    }

    fn lock(&self) -> MutexGuard<'_, Core> {
        // A panic under this lock would be a bug in the pacer; the other requests still want answers.
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries out what the pacer wants, until it wants nothing more at `now`.
    fn pump(self: &Arc<Self>, core: &mut Core, now: LocalTime) {
        self.come_back(core, now);
        self.regulate(core, now);
        while let Some(action) = core.pacer.next_action(now) {
            match action {
                Action::Connect(id) => core.tell(id, Turn::Connect),
                Action::Dispatch(who, slot) => {
                    core.tell(who.id, Turn::Go(who, slot));
                }
                Action::Refuse(id, refusal) => core.tell(id, Turn::Refused(refusal)),
                Action::Reserve(ask) => match &self.store {
                    Store::Memory(_) => {
                        let Core { pacer, memory, .. } = core;
                        let mut memory = memory.lock();
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
        let wake_at = self.wake_at(core);
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

    /// When the driver has something to do that is a matter of time.
    fn wake_at(&self, core: &Core) -> Option<LocalTime> {
        let write = match &self.store {
            // While the store is away there is nothing to write to; it tells us when it is back.
            Store::Postgres(store) if !core.writing && store.membership().has_read() => {
                core.tracker.writes_at().map(|at| at.max(core.write_from))
            }
            _ => None,
        };
        [write, core.pacer.wake_at()].into_iter().flatten().min()
    }

    fn moment(&self, now: LocalTime) -> Moment {
        let offset = match &self.store {
            Store::Memory(_) => Some(0),
            Store::Postgres(store) => store
                .with_clock(|clock| clock.to_store(now, now))
                .map(|there| there.0.saturating_sub(now.0)),
        };
        Moment { now, offset }
    }

    /// Brings the pacer under what the throttle has in force.
    fn regulate(&self, core: &mut Core, now: LocalTime) {
        if core.tracker.is_due(now) {
            core.tracker.lapse(self.moment(now));
        }
        let mut episode = core.tracker.episode();
        match &self.store {
            Store::Memory(_) => core.tracker.settle_alone(),
            Store::Postgres(_) if core.course.is_alone() => {}
            Store::Postgres(_) => episode = core.tracker.row_episode(),
        }
        let mut regime = core.tracker.regime(now);
        self.widened.store(regime.multiplier > 1, Relaxed);
        if regime.halt.is_none_or(|h| h.cause == throttle::Cause::Hold)
            && let Some(above) = &self.above
        {
            // Locked from below to above, never the other way round.
            let above = above.lock().tracker.halt(now);
            regime.halt = above
                .filter(|h| h.cause == throttle::Cause::Pause)
                .or(regime.halt);
        }
        core.pacer.regulate(now, regime, episode);
    }

    fn come_back(&self, core: &mut Core, now: LocalTime) {
        if let (true, Store::Postgres(store)) = (core.course.is_alone(), &self.store) {
            let terms = store.membership().terms(&self.name.cursor, now);
            core.course.look(terms, &mut core.pacer);
        }
    }

    /// Whether a clean answer bears on the pace.
    pub fn is_widened(&self) -> bool {
        self.widened.load(Relaxed)
    }

    /// The name of its cursor, without the prefix.
    pub fn cursor(&self) -> &str {
        &self.name.cursor
    }

    /// Whether all that is known here of the throttle is in the store, if there is one.
    pub fn is_told(&self) -> bool {
        matches!(self.store, Store::Memory(_)) || self.lock().tracker.is_settled()
    }

    /// What is in force.
    pub fn regime(&self) -> Regime {
        let now = LocalTime::now();
        self.lock().tracker.regime(now)
    }

    /// Takes in what bears on the pace; it is in force here at once, and is told to the others. Returns whether it changed
    /// anything; what it led to, [`Lane::settled`] waits for.
    pub fn apply(self: &Arc<Self>, event: Event) -> bool {
        let now = LocalTime::now();
        let at = self.moment(now);
        let mut core = self.lock();
        let changed = core.tracker.apply(at, event);
        self.pump(&mut core, now);
        self.watch(&mut core);
        drop(core);
        self.tell_below();
        changed
    }

    /// Waits until the others can know what this replica knows of the throttle, or the store is away.
    pub async fn settled(&self) {
        let Store::Postgres(store) = &self.store else {
            return;
        };
        loop {
            let told = self.settled.notified();
            if self.lock().tracker.is_settled() || !store.membership().has_read() {
                return;
            }
            told.await;
        }
    }

    /// What the throttle's row holds, as it was read by others than this lane.
    pub fn heard(self: &Arc<Self>, text: Option<&str>) {
        let now = LocalTime::now();
        let at = self.moment(now);
        let mut core = self.lock();
        let changed = core.tracker.seen(at, text);
        self.pump(&mut core, now);
        drop(core);
        if changed {
            self.tell_below();
        }
    }

    /// Has the store tell of the throttle's row from now on, with each heartbeat: always for the lane of a whole
    /// destination, and for others while there is something to tell.
    pub fn watch_row(self: &Arc<Self>) {
        self.watch(&mut self.lock());
    }

    fn watch(self: &Arc<Self>, core: &mut Core) {
        let Store::Postgres(store) = &self.store else {
            return;
        };
        if std::mem::replace(&mut core.watched, true) {
            return;
        }
        let lane = Arc::downgrade(self);
        store.watch(
            self.name.throttle_key.clone(),
            Box::new(move |text| {
                let Some(lane) = lane.upgrade() else {
                    return false;
                };
                lane.heard(text);
                let mut core = lane.lock();
                core.watched = lane.above.is_none() || !core.tracker.is_neutral();
                core.watched
            }),
        );
    }

    fn below(&self) -> MutexGuard<'_, Vec<Weak<Lane>>> {
        self.below.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the lanes below look at what is paused here.
    fn tell_below(&self) {
        let below: Vec<_> = self.below().iter().filter_map(Weak::upgrade).collect();
        for lane in below {
            lane.with_pacer(|_, _| {});
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
type Answer = (bool, Result<Reply, LocalTime>);
type Pending<T> = Option<Pin<Box<dyn Future<Output = T> + Send>>>;

/// Waits for what the pacer cannot do by itself: instants, and the store's replies.
async fn drive(lane: Arc<Lane>) {
    let mut call: Pending<Answer> = None;
    let mut write: Pending<()> = None;
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
            if write.is_none()
                && let Some(due) = lane.due_write(&mut core, now)
            {
                core.writing = true;
                write = Some(Box::pin(write_throttle(lane.clone(), due)));
            }
            // Nobody tells a lane that the store is back: it looks.
            let look = core.course.is_alone().then(|| now.plus(LOOK_AGAIN));
            core.armed = lane.wake_at(&core);
            if call.is_none() && write.is_none() && core.armed.is_none() {
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
            reply = answer(&mut call) => {
                call = None;
                lane.replied(reply);
            }
            () = answer(&mut write) => write = None,
            () = lane.alarm.sleep_until(wake_at.unwrap_or(far)) => {}
            () = lane.wake.notified() => {}
        }
    }
}

async fn answer<T>(call: &mut Pending<T>) -> T {
    match call {
        Some(call) => call.await,
        None => std::future::pending().await,
    }
}

async fn ask_store(lane: Arc<Lane>, ask: Ask, probe: bool, aside: bool) -> Answer {
    let Store::Postgres(store) = &lane.store else {
        return (probe, Err(LocalTime::now()));
    };
    let word = lane.lock().tracker.row_word().to_owned();
    let name = &lane.name;
    let reply = store
        .reserve(&name.key, (&name.throttle_key, &word), ask, aside || probe)
        .await;
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

/// Writes the throttle's state to its row, and moves the cursor where that has to follow.
async fn write_throttle(lane: Arc<Lane>, write: Write) {
    let Store::Postgres(store) = &lane.store else {
        return;
    };
    let outcome = store.write_throttle(&lane.name.throttle_key, &write).await;
    if let Ok(Ok(())) = &outcome {
        let spare = {
            let core = lane.lock();
            let settings = core.pacer.settings();
            held(settings.interval, settings.max_replicas as usize)
        };
        let followed = store.follow(&lane.name.key, &write, spare).await;
        if let Err(e) = followed {
            tracing::warn!(
                cursor = lane.name.cursor,
                "programs that move the cursor without being replicas were not told of the pause: {e}"
            );
        }
    }
    let now = LocalTime::now();
    let at = lane.moment(now);
    let mut core = lane.lock();
    core.writing = false;
    match outcome {
        Ok(Ok(())) => core.tracker.wrote(&write),
        Ok(Err(text)) => {
            core.tracker.seen(at, text.as_deref());
        }
        Err(_) => core.write_from = now.plus(RETRY_WRITE),
    }
    drop(core);
    lane.settled.notify_waiters();
}

impl Lane {
    fn due_write(&self, core: &mut Core, now: LocalTime) -> Option<Write> {
        let reachable = matches!(&self.store, Store::Postgres(s) if s.membership().has_read());
        let due = core.tracker.writes_at().is_some_and(|at| at <= now);
        (due && reachable && !core.writing && now >= core.write_from)
            .then(|| core.tracker.write(self.moment(now)))
            .flatten()
    }

    fn replied(&self, (probe, reply): Answer) {
        let now = LocalTime::now();
        let at = self.moment(now);
        let mut core = self.lock();
        match (reply, &self.store) {
            (Ok(reply), Store::Postgres(store)) => {
                core.tracker.seen(at, reply.throttle.as_deref());
                self.regulate(&mut core, now);
                match reply.granted {
                    // What a probe was granted is not used: a slot of our own share may be held for the same time.
                    Some(granted) if probe => core.pacer.raise_floor(granted.end()),
                    Some(granted) => {
                        store.with_clock(|clock| core.pacer.granted(now, granted, clock));
                    }
                    // The pace had changed without our knowledge. Now we know, and ask again.
                    None if probe => {}
                    None => core.pacer.asks_again(),
                }
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
        Ticket {
            lane: self.lane.clone(),
            id: self.who.id,
            queued: true,
        }
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

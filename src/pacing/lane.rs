//! The shell around one pacer: it keeps the waiters, sleeps until slots, and talks to the store.
//!
//! Whoever changes something (a request arriving, leaving or becoming ready) runs the pacer on the spot, under the
//! lane's lock; with the embedded store a request that need not wait is thus admitted without any other task. Only
//! timers and calls to a remote store need the lane's driver, a task that exists while there is something to wait for.

mod driver;
mod throttled;
mod ticket;

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{
            AtomicBool, AtomicU64, AtomicUsize,
            Ordering::{Relaxed, SeqCst},
        },
    },
    task::Waker,
};

use rustc_hash::FxHashMap;
use tokio::sync::Notify;

pub use self::ticket::{Departure, Pass, Ticket};
use crate::{
    pacing::{
        alarm::Alarm,
        course::{Course, Step, View},
        cursor::Ask,
        pacer::{Action, Arrival, Dispatched, Id, Pacer, Refusal, Settings, Slot},
        throttle::{Regime, Rules, tracker::Tracker},
        time::{LocalTime, Nanos},
    },
    store::{Store, memory, postgres::Postgres},
};

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
    /// Requests that have ended and of which the pacer has not been told.
    ended: AtomicUsize,
    /// Whether somebody may wait for the end of another request.
    is_bounded: AtomicBool,
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
    waiters: FxHashMap<Id, Waiter>,
    memory: memory::Held,
    course: Course,
    tracker: Tracker,
    /// What was in force when the log was told last.
    told: Regime,
    /// A write of the throttle's state is under way; and one that failed is not tried again before this.
    writing: bool,
    write_from: LocalTime,
    /// The store tells of the throttle's row with each heartbeat.
    watched: bool,
    /// Which edition of what the replicas agree on the pacer goes by.
    agreed: Option<u64>,
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
            waiters: FxHashMap::default(),
            memory,
            course: Course::default(),
            tracker: Tracker::new(rules),
            told: Regime::default(),
            writing: false,
            write_from: LocalTime(Nanos::MIN),
            watched: false,
            agreed: None,
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
            ended: AtomicUsize::new(0),
            is_bounded: AtomicBool::new(settings.max_in_flight.is_some()),
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
        self.agree(&mut core, now);
        self.regulate(&mut core, now);
        let id = core.pacer.arrive(now, arrival)?;
        core.waiters.insert(id, Waiter::default());
        self.advance(&mut core, now);
        let told = core.turn_of(id);
        Ok(Ticket::new(self.clone(), id, told))
    }

    /// A new configuration, with its ceiling in requests per second. Who waits goes on waiting, at the new pace.
    pub fn reconfigure(self: &Arc<Self>, (settings, rules): (Settings, Rules), ceiling: f64) {
        // Before the lock is taken: an end that saw no bound yet is told to the pacer with it.
        self.is_bounded
            .store(settings.max_in_flight.is_some(), SeqCst);
        self.with_pacer(|core, _| {
            core.ceiling = ceiling;
            core.agreed = None;
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
        // What is in the row another lane can read there. With a cursor in memory a multiplier is lost, which is better than
        // to refuse every new host once so many have protested.
        let shared = matches!(self.store, Store::Postgres(_));
        let told = core.tracker.is_settled() && (shared || core.tracker.halt(now).is_none());
        // A driver that only sleeps until a deadline of before ends by itself.
        core.pacer.is_idle()
            && !core.has_calls()
            && !core.writing
            && told
            && core.memory.lock().has_passed(now)
    }

    fn lock(&self) -> MutexGuard<'_, Core> {
        // A panic under this lock would be a bug in the pacer; the other requests still want answers.
        let mut core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        if self.ended.load(SeqCst) > 0 {
            core.pacer.finished(self.ended.swap(0, SeqCst));
        }
        core
    }

    /// A request that was dispatched has ended. Where nobody can wait for that, the pacer is told by whoever comes next: to
    /// run it costs more than all else at the end of a request.
    fn finished(self: &Arc<Self>) {
        self.ended.fetch_add(1, SeqCst);
        if self.is_bounded.load(SeqCst) {
            self.with_pacer(|_, _| {});
        }
    }

    /// Carries out what the pacer wants, and sees to it that what it waits for will be heard.
    fn pump(self: &Arc<Self>, core: &mut Core, now: LocalTime) {
        self.advance(core, now);
        self.see_to(core);
    }

    /// Carries out what the pacer wants, until it wants nothing more at `now`. Enough by itself where the caller asks for
    /// its turn next: only if that has not come, there is something to wait for, and most often it has.
    fn advance(&self, core: &mut Core, now: LocalTime) {
        self.come_back(core, now);
        self.agree(core, now);
        self.regulate(core, now);
        if let Store::Postgres(store) = &self.store {
            store.with_clock(|clock| core.pacer.look(now, clock));
        }
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
    }

    /// Starts the driver where there is something to wait for, or tells it of something sooner than it sleeps for.
    fn see_to(self: &Arc<Self>, core: &mut Core) {
        let wake_at = self.wake_at(core);
        if !core.driving {
            if core.has_calls() || wake_at.is_some() {
                core.driving = true;
                tokio::spawn(driver::drive(self.clone()));
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
        let view = View {
            terms: membership.terms(&self.name.cursor, now),
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

    /// Has the pacer go by what the replicas have agreed on, whenever that may have changed.
    fn agree(&self, core: &mut Core, now: LocalTime) {
        let Store::Postgres(store) = &self.store else {
            return;
        };
        let membership = store.membership();
        let edition = Some(membership.edition());
        if core.agreed != edition {
            core.agreed = edition;
            let agreed = membership.agreement(&self.name.destination, core.ceiling, now);
            core.pacer
                .agree(agreed.interval, membership.shares_agreed(now));
        }
    }

    fn come_back(&self, core: &mut Core, now: LocalTime) {
        if let (true, Store::Postgres(store)) = (core.course.is_alone(), &self.store) {
            if core.pacer.waiting() > 0 {
                store.membership().wanted(&self.name.cursor, now);
            }
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

    /// What a request is to be told. After its turn, or a refusal, there is nothing more to come.
    fn turn_of(&mut self, id: Id) -> Option<Turn> {
        let turn = self.waiters.get_mut(&id)?.turn.take()?;
        if !matches!(turn, Turn::Connect) {
            self.waiters.remove(&id);
        }
        Some(turn)
    }

    /// Whom to wake when there is something to tell it.
    fn wake_with(&mut self, id: Id, waker: &Waker) {
        if let Some(waiter) = self.waiters.get_mut(&id)
            && !waiter.waker.as_ref().is_some_and(|w| w.will_wake(waker))
        {
            waiter.waker = Some(waker.clone());
        }
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

#[cfg(test)]
mod tests;

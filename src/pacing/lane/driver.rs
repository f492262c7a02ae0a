//! The task of a lane, while there is something to wait for: instants, and the store's replies. It exists for timers and
//! for calls to a shared store alone.

use std::{pin::Pin, sync::Arc};

use super::{Core, Lane};
use crate::{
    pacing::{
        course::LOOK_AGAIN,
        cursor::{Ask, Doubt, held, settle},
        throttle::tracker::Write,
        time::{LocalTime, MILLISECOND, Nanos, seconds},
    },
    store::{
        Store,
        postgres::{error::Reason, session::Reply},
    },
};

/// How soon a store that could not be reached is asked again.
const RETRY_STORE: Nanos = 100 * MILLISECOND;
/// How soon a row that somebody had locked is asked for again.
const RETRY_LOCKED: Nanos = 500 * MILLISECOND;
/// How soon a throttle state that could not be written is written again.
const RETRY_WRITE: Nanos = 500 * MILLISECOND;

/// A call to the store: what was asked, whether it only probed, and the reply or when to ask again.
type Answer = (Ask, bool, Result<Reply, LocalTime>);
type Pending<T> = Option<Pin<Box<dyn Future<Output = T> + Send>>>;

/// Waits for what the pacer cannot do by itself: instants, and the store's replies.
pub(super) async fn drive(lane: Arc<Lane>) {
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
        return (ask, probe, Err(LocalTime::now()));
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
        ask,
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
    let mut follows = true;
    if let Ok(Ok(())) = &outcome {
        let spare = {
            let core = lane.lock();
            let shares = usize::try_from(core.pacer.shares()).unwrap_or(usize::MAX);
            let interval = core.pacer.settings().interval;
            held(interval.saturating_mul(write.multiplier.into()), shares)
        };
        let followed = store.follow(&lane.name.key, &write, spare).await;
        follows = followed.is_ok();
        if let Err(e) = followed {
            tracing::warn!(
                cursor = lane.name.cursor,
                "the cursor was not moved for a pause, or after it; that is tried again: {e}"
            );
        }
    }
    let now = LocalTime::now();
    let at = lane.moment(now);
    let mut core = lane.lock();
    core.writing = false;
    match outcome {
        Ok(Ok(())) => {
            core.tracker.wrote(at, &write, follows);
            if !follows {
                core.write_from = now.plus(RETRY_WRITE);
            }
        }
        Ok(Err(text)) => core.tracker.met(at, text.as_deref()),
        Err(e) => {
            let surely_not = matches!(e.reason(), Reason::Locked | Reason::Away);
            core.tracker.unanswered(surely_not);
            core.write_from = now.plus(RETRY_WRITE);
        }
    }
    drop(core);
    lane.settled.notify_waiters();
}

impl Lane {
    /// What to ask after a cursor was found beyond the horizon.
    fn settled_doubt(&self, ask: &Ask, doubt: Doubt) -> Ask {
        let (next, witness) = settle(doubt, ask);
        if let Some(witness) = witness {
            let (ahead_s, reason) = (seconds(doubt.cursor.since(doubt.now)), witness.reason());
            let cursor = self.cursor();
            tracing::warn!(
                cursor,
                ahead_s,
                "the cursor's row is not believed, and counts as absent: {reason}"
            );
        }
        next
    }

    fn due_write(&self, core: &mut Core, now: LocalTime) -> Option<Write> {
        let reachable = matches!(&self.store, Store::Postgres(s) if s.membership().has_read());
        let due = core.tracker.writes_at().is_some_and(|at| at <= now);
        (due && reachable && !core.writing && now >= core.write_from)
            .then(|| core.tracker.write(self.moment(now)))
            .flatten()
    }

    fn replied(&self, (ask, probe, reply): Answer) {
        let now = LocalTime::now();
        let at = self.moment(now);
        let mut core = self.lock();
        match (reply, &self.store) {
            (
                Ok(Reply {
                    doubted: Some(cursor),
                    now: there,
                    ..
                }),
                Store::Postgres(store),
            ) if !probe => {
                let since = core.pacer.granted_at();
                let set_back = store.with_clock(|clock| clock.set_back_since(since, now));
                let doubt = Doubt {
                    cursor,
                    now: there,
                    set_back,
                };
                core.ask = Some(self.settled_doubt(&ask, doubt));
            }
            // A probe has seen what it was to see: the row can be reached.
            (Ok(reply), _) if reply.doubted.is_some() => {}
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

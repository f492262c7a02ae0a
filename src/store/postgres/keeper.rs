//! The task that keeps the connections, makes others when they are lost, and beats the heart.
//!
//! At most one attempt a second is made to connect, whoever waits; the first one after a loss comes at once, or a quarter of a
//! second after the one before. Each attempt resolves the host names anew, so that it follows a failover. A change is told in one line; its repetition is counted and not told.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{mpsc, watch},
    time::{Instant, MissedTickBehavior},
};
use tokio_postgres::types::{ToSql, Type};

use super::{
    CALL_DEADLINE, LONG_PATIENCE,
    error::{Reason, StoreError},
    leases::{self, Beat, Failed},
    session::{self, Opened, Plan, Prepared, Session, Wire},
    sessions::Sessions,
    sql::{self, Table},
    watches::Watches,
};
use crate::{
    membership::Membership,
    metrics::Metrics,
    pacing::{
        clock::ClockBounds,
        time::{LocalTime, nanos},
    },
};

/// The time from one attempt to connect to the next. (A growing pause would try a server that starts more often in its
/// first second, and find it no sooner after that.)
const ATTEMPT_EVERY: Duration = Duration::from_secs(1);
/// The same where that attempt brought a session on which a heartbeat passed, and that was then lost.
const ATTEMPT_AFTER_LOSS: Duration = Duration::from_millis(250);
/// How often rows of ours that are dead are removed.
const SWEEP_EVERY: Duration = Duration::from_secs(600);

/// Heartbeats that follow one another at most: to read, to take a number, to claim the cursor, with one that comes too late.
const BEATS_AT_ONCE: u32 = 5;
/// After so many heartbeats in a row that the server has refused, a session is made anew.
const MISSED_BEATS: u32 = 10;

/// What the task works with.
pub(super) struct Keeper {
    pub(super) plan: Arc<Plan>,
    pub(super) table: Table,
    pub(super) publish: watch::Sender<Option<Arc<Sessions>>>,
    pub(super) losses: mpsc::Receiver<(Arc<Sessions>, StoreError)>,
    pub(super) clock: Arc<Mutex<ClockBounds>>,
    pub(super) membership: Arc<Membership>,
    pub(super) watches: Arc<Watches>,
    pub(super) metrics: Arc<Metrics>,
}

impl Keeper {
    pub(super) async fn run(mut self) {
        let mut told: Option<Reason> = None;
        while !self.publish.is_closed() {
            let attempt = Instant::now();
            let mut pause = ATTEMPT_EVERY;
            match self.open().await {
                Ok((sessions, wires)) => {
                    tracing::info!(
                        pooled = matches!(sessions.main.reserve, Prepared::Unnamed(_)),
                        "store up"
                    );
                    self.metrics.store_up(true);
                    let (why, was_heard) = self.hold(sessions, wires).await;
                    let _ = self.publish.send(None);
                    if was_heard {
                        pause = ATTEMPT_AFTER_LOSS;
                    }
                    self.membership.lost(LocalTime::now());
                    self.metrics.store_up(false);
                    tracing::warn!(
                        reason = why.reason().label(),
                        "store lost: {why}; until it is back this replica paces on its share of the ceiling"
                    );
                    told = Some(why.reason());
                }
                Err(e) => {
                    self.metrics.store_error(e.reason().label());
                    if told != Some(e.reason()) {
                        tracing::warn!(reason = e.reason().label(), "store away: {e}");
                        told = Some(e.reason());
                    }
                }
            }
            // A server that takes connections and at once gives them up is not to be asked all the time either.
            tokio::time::sleep_until(attempt + pause).await;
        }
    }

    /// The first connection finds the server, so that one which is away is asked once with each attempt; the others go to
    /// the same, at the same time.
    async fn open(&self) -> Result<(Arc<Sessions>, Wires), StoreError> {
        let main = session::open(&self.plan).await?;
        let (side, heart) = tokio::try_join!(
            session::open_at(&self.plan, &main.server),
            session::open_at(&self.plan, &main.server),
        )?;
        let opened = [main, side, heart];
        for (sent, received, now) in opened.iter().flat_map(|o| &o.session.clock) {
            self.clock
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .observe(*sent, *received, *now);
        }
        let [(main, a), (side, b), (heart, c)] =
            opened.map(|Opened { session, wire, .. }| (session, wire));
        Ok((Arc::new(Sessions::new(main, side, heart)), Wires([a, b, c])))
    }

    /// Until the sessions are lost: why, and whether a heartbeat had passed on them. Meanwhile the heart beats, and dead rows are
    /// swept.
    async fn hold(&mut self, sessions: Arc<Sessions>, mut wires: Wires) -> (StoreError, bool) {
        let closed = || StoreError::new(Reason::Connection, "Postgres closed the connection");
        let mut sweep = tokio::time::interval(SWEEP_EVERY);
        let mut beat = tokio::time::interval(Membership::period());
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut settled = None;
        let mut was_heard = false;
        let why = loop {
            tokio::select! {
                end = wires.ended() => break end.unwrap_or_else(closed),
                loss = self.losses.recv() => match loss {
                    Some((which, why)) if Arc::ptr_eq(&which, &sessions) => break why,
                    Some(_) => {}
                    None => break closed(),
                },
                _ = beat.tick() => {
                    match self.beat(&sessions.heart).await {
                        Ok(()) => was_heard = true,
                        Err(e) => {
                            self.metrics.store_error(e.reason().label());
                            if e.ends_session() {
                                break e;
                            }
                        }
                    }
                    self.watches.read_on(&sessions, &self.table);
                    // Reservations begin when the others can know of it; who waits for a place looks again when it is
                    // taken.
                    let now = self.membership.blocker();
                    if settled.replace(now) != Some(now) {
                        let _ = self.publish.send(Some(sessions.clone()));
                    }
                }
                _ = sweep.tick() => self.sweep(&sessions),
            }
        };
        (why, was_heard)
    }

    /// One heartbeat, and those that follow it at once: where the first only read the rows that the second needs to take
    /// a number, where it said that this replica is back, or came too late by a clock that has stepped.
    async fn beat(&self, session: &Session) -> Result<(), StoreError> {
        for _ in 0..BEATS_AT_ONCE {
            let sent = LocalTime::now();
            let clock = || self.clock.lock().unwrap_or_else(PoisonError::into_inner);
            let by = sent.plus(nanos(CALL_DEADLINE));
            let until = clock().at_least(sent);
            let until = until.map(|t| t.plus(nanos(CALL_DEADLINE)));
            let pulse = self.membership.pulse(sent, by, until);
            let beat = Beat {
                key: pulse.key.as_deref(),
                incarnation: &pulse.incarnation,
                word: &pulse.word,
                seen: pulse.seen.as_deref(),
                until,
                lasts: pulse.lasts,
            };
            let watched = self.watches.keys();
            let keys: Vec<String> = pulse.keys.iter().chain(&watched).cloned().collect();
            let call = leases::beat(session, &self.table, &beat, &keys);
            let reply = tokio::time::timeout(CALL_DEADLINE, call).await;
            let echo = reply.unwrap_or_else(|_| {
                Err(Failed {
                    error: StoreError::new(Reason::Timeout, "no reply to a heartbeat"),
                    surely: false,
                })
            });
            let received = LocalTime::now();
            let echo = match echo {
                Ok(echo) => echo,
                Err(Failed { error, surely }) => {
                    let missed = self.membership.unheard(received, surely);
                    // Reservations may pass on a session that does nothing worse than refuse heartbeats. (Should it be the
                    // session after all, another one is made in the end.)
                    let kept = matches!(
                        error.reason(),
                        Reason::Locked | Reason::Privilege | Reason::DiskFull | Reason::Other
                    );
                    if surely && kept && missed < MISSED_BEATS {
                        self.metrics.store_error(error.reason().label());
                        if missed == 1 {
                            tracing::warn!(
                                reason = error.reason().label(),
                                "heartbeat failed: {error}; if that goes on, this replica paces on its share of the ceiling"
                            );
                        }
                        return Ok(());
                    }
                    return Err(error);
                }
            };
            clock().observe(sent, received, echo.now);
            if !echo.written && until.is_some_and(|t| echo.now > t) {
                self.membership.unheard(received, true);
                continue;
            }
            let rows: HashMap<&str, &str> = echo
                .rows
                .iter()
                .map(|(key, text)| (key.as_str(), text.as_str()))
                .collect();
            let again =
                self.membership
                    .heard(&pulse, received, echo.now, echo.written, echo.rows.clone());
            self.watches.tell(&watched, &rows);
            if !again {
                break;
            }
        }
        Ok(())
    }

    fn sweep(&self, sessions: &Arc<Sessions>) {
        let (sessions, text) = (sessions.clone(), sql::sweep(&self.table));
        let prefix = self.plan.key_prefix.clone();
        let names = self.membership.destinations();
        tokio::spawn(async move {
            if let Err(e) = sweep(&sessions, &text, &prefix, &names).await {
                tracing::debug!(
                    reason = e.reason().label(),
                    "dead rows were not removed: {e}"
                );
            }
        });
    }
}

/// One pass, as one transaction that is sent at once.
async fn sweep(
    sessions: &Sessions,
    text: &str,
    prefix: &str,
    names: &[String],
) -> Result<(), StoreError> {
    let _turn = sessions.turn(LONG_PATIENCE).await?;
    let side = &sessions.side;
    let params: [(&(dyn ToSql + Sync), _); 2] = [(&prefix, Type::TEXT), (&names, Type::TEXT_ARRAY)];
    let pass = async {
        let (begun, swept, ended) = tokio::join!(
            side.client.batch_execute(sql::BEGIN_SWEEP),
            side.client.query_typed(text, &params),
            side.client.batch_execute("COMMIT"),
        );
        begun?;
        swept?;
        Ok(ended?)
    };
    side.await_reply(CALL_DEADLINE * 2, pass).await
}

/// What moves the bytes of the sessions. Dropped, they end.
struct Wires([Wire; 3]);

impl Wires {
    /// Waits until one of them has ended.
    async fn ended(&mut self) -> Option<StoreError> {
        let [main, side, heart] = &mut self.0;
        let end = tokio::select! {
            end = main => end,
            end = side => end,
            end = heart => end,
        };
        end.ok().flatten()
    }
}

impl Drop for Wires {
    fn drop(&mut self) {
        for wire in &self.0 {
            wire.abort();
        }
    }
}

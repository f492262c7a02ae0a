//! The task that keeps the connections, makes others when they are lost, and beats the heart.
//!
//! At most one attempt a second is made to connect, whoever waits; the first one after a loss comes at once. Each attempt
//! resolves the host names anew, so that it follows a failover. A change is told in one line; its repetition is counted and not told.

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
    CALL_DEADLINE, Sessions,
    address::Address,
    error::{Reason, StoreError},
    leases::{self, Beat, Failed},
    session::{self, Missing, Prepared, Session, Wire},
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
/// How often expired rows of ours are removed.
const SWEEP_EVERY: Duration = Duration::from_secs(600);

/// Heartbeats that follow one another at most: to read, to take a number, to claim the cursor, with one that comes too late.
const BEATS_AT_ONCE: u32 = 5;
/// After so many heartbeats in a row that the server has refused, a session is made anew.
const MISSED_BEATS: u32 = 10;

/// What the task works with.
pub(super) struct Keeper {
    pub(super) address: Address,
    pub(super) table: Table,
    pub(super) missing: Missing,
    pub(super) key_prefix: String,
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
            match self.open().await {
                Ok((sessions, wires)) => {
                    tracing::info!(
                        pooled = matches!(sessions.main.reserve, Prepared::Unnamed(_)),
                        "store up"
                    );
                    self.metrics.store_up(true);
                    let why = self.hold(sessions, wires).await;
                    let _ = self.publish.send(None);
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
            tokio::time::sleep_until(attempt + ATTEMPT_EVERY).await;
        }
    }

    async fn open(&self) -> Result<(Arc<Sessions>, (Wire, Wire)), StoreError> {
        let (main, main_wire) = session::open(&self.address, &self.table, self.missing).await?;
        let (side, side_wire) = session::open(&self.address, &self.table, Missing::IsLeft).await?;
        for (sent, received, now) in main.clock.iter().chain(&side.clock) {
            self.clock
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .observe(*sent, *received, *now);
        }
        Ok((Arc::new(Sessions { main, side }), (main_wire, side_wire)))
    }

    /// Until the sessions are lost. Meanwhile the heart beats, and expired rows are swept.
    async fn hold(
        &mut self,
        sessions: Arc<Sessions>,
        (mut main, mut side): (Wire, Wire),
    ) -> StoreError {
        let closed = || StoreError::new(Reason::Connection, "Postgres closed the connection");
        let mut sweep = tokio::time::interval(SWEEP_EVERY);
        let mut beat = tokio::time::interval(Membership::period());
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut settled = None;
        let why = loop {
            tokio::select! {
                end = &mut main => break end.ok().flatten().unwrap_or_else(closed),
                end = &mut side => break end.ok().flatten().unwrap_or_else(closed),
                loss = self.losses.recv() => match loss {
                    Some((which, why)) if Arc::ptr_eq(&which, &sessions) => break why,
                    Some(_) => {}
                    None => break closed(),
                },
                _ = beat.tick() => {
                    if let Err(e) = self.beat(&sessions.side).await
                        && e.ends_session()
                    {
                        self.metrics.store_error(e.reason().label());
                        break e;
                    }
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
        main.abort();
        side.abort();
        why
    }

    /// One heartbeat, and those that follow it at once: where the first only read the rows that the second needs to take
    /// a number, where it said that this replica is back, or came too late by a clock that has stepped.
    async fn beat(&self, session: &Session) -> Result<(), StoreError> {
        for _ in 0..BEATS_AT_ONCE {
            let sent = LocalTime::now();
            let clock = || self.clock.lock().unwrap_or_else(PoisonError::into_inner);
            let by = sent.plus(nanos(CALL_DEADLINE));
            let until = clock().to_store(sent, sent);
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
        let (sessions, text, prefix) = (
            sessions.clone(),
            sql::sweep(&self.table),
            self.key_prefix.clone(),
        );
        tokio::spawn(async move {
            let params: [(&(dyn ToSql + Sync), _); 1] = [(&prefix, Type::TEXT)];
            if let Err(e) = sessions
                .side
                .client
                .query_typed(&text, &params)
                .await
                .map_err(StoreError::from)
            {
                tracing::debug!(
                    reason = e.reason().label(),
                    "expired rows were not removed: {e}"
                );
            }
        });
    }
}

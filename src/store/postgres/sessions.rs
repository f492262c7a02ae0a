//! Three connections to one server, so that what waits for a lock holds up nothing that does not.
//!
//! Statements on one connection are executed one after the other. Heartbeats have a connection to themselves. Reservations
//! go by the main one, where a statement waits for a lock only as long as others at work on the row can hold it. One that waited in
//! vain goes aside: there it may wait long, and what may wait goes one at a time, in turn.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::{sync::MutexGuard, time::Instant};

use super::{
    error::{Reason, StoreError},
    session::Session,
    sql::LOCK_TIMEOUT_MS,
};

/// How long a statement on the main connection waits for a lock, in milliseconds: a hundred times as long as a move of a
/// row takes, and still so short that a row which is found locked costs the others nothing that shows.
const SHORT_WAIT_MS: u32 = 25;
/// The same for a while after a wait was in vain: where one row is locked, others are.
const WARY_WAIT_MS: u32 = 5;
/// For so long.
const WARY_FOR: Duration = Duration::from_secs(5);
/// The shortest wait aside, where many are to have their turn.
const LEAST_WAIT_MS: u32 = 20;

/// The connections.
#[derive(Debug)]
pub(super) struct Sessions {
    /// For reservations.
    pub(super) main: Session,
    /// For what may wait for a lock. Only who has the [`Turn`] sends anything.
    pub(super) side: Session,
    /// For heartbeats, and what concerns our own lease.
    pub(super) heart: Session,
    turn: tokio::sync::Mutex<()>,
    /// How many wait for their turn.
    waiting: AtomicU32,
    /// When a wait on the main connection was in vain last.
    vain: Mutex<Option<Instant>>,
}

/// The right to send a statement aside.
#[derive(Debug)]
pub(super) struct Turn<'s> {
    _turn: MutexGuard<'s, ()>,
    /// How long it may wait for a lock, in milliseconds.
    pub(super) wait: u32,
}

/// Counts one who waits, also when its call is dropped meanwhile.
struct Waits<'s>(&'s AtomicU32);

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

impl Sessions {
    pub(super) fn new(main: Session, side: Session, heart: Session) -> Sessions {
        Sessions {
            main,
            side,
            heart,
            turn: tokio::sync::Mutex::new(()),
            waiting: AtomicU32::new(0),
            vain: Mutex::new(None),
        }
    }

    /// Waits for the turn to send a statement aside, for at most `patience`. Turns come in the order of the calls.
    ///
    /// # Errors
    /// The others took too long. Nothing is wrong with the connection.
    pub(super) async fn turn(&self, patience: Duration) -> Result<Turn<'_>, StoreError> {
        self.waiting.fetch_add(1, Relaxed);
        let waits = Waits(&self.waiting);
        let turn = tokio::time::timeout(patience, self.turn.lock()).await;
        drop(waits);
        let turn = turn.map_err(|_| {
            StoreError::new(
                Reason::Locked,
                "other rows are locked too, and the wait for them took too long",
            )
        })?;
        // The more there are behind us, the less we may keep them waiting.
        let behind = self.waiting.load(Relaxed);
        Ok(Turn {
            _turn: turn,
            wait: (LOCK_TIMEOUT_MS / behind.saturating_add(1)).max(LEAST_WAIT_MS),
        })
    }

    /// How long a statement may wait for a lock on the main connection, in milliseconds.
    pub(super) fn short_wait(&self) -> u32 {
        let vain = *self.vain.lock().unwrap_or_else(PoisonError::into_inner);
        match vain {
            Some(at) if at.elapsed() < WARY_FOR => WARY_WAIT_MS,
            _ => SHORT_WAIT_MS,
        }
    }

    /// A wait on the main connection was in vain.
    pub(super) fn waited_in_vain(&self) {
        *self.vain.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }
}

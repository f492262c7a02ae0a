//! Connections that wait for their next request.
//!
//! A small pool of our own: a connection is checked out before a slot is taken and is driven by the request that holds
//! it, which the pools at hand (they dial inside the request, or keep a task for each connection) do not offer. The
//! last one returned is the first one taken, so that few connections stay warm and the rest age out.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use tokio::time::Instant;

use crate::upstream::{Target, exchange::Ready};

/// An idle connection older than this is closed: less than the minute or more that most servers keep theirs.
const IDLE_FOR: Duration = Duration::from_secs(50);
/// Idle connections kept for one target.
const IDLE_PER_TARGET: usize = 128;
/// Idle connections kept in all.
const IDLE_IN_ALL: usize = 1024;
/// How often those that were closed or have aged are looked for.
const SWEEP_EVERY: Duration = Duration::from_secs(5);

/// The pool.
#[derive(Debug, Default)]
pub struct Pool {
    idle: Mutex<Idle>,
}

#[derive(Debug, Default)]
struct Idle {
    by_target: HashMap<Target, Vec<(Instant, Ready)>>,
    len: usize,
}

impl Pool {
    /// An empty pool, with the task that sweeps it until the last handle is gone.
    pub fn start() -> Arc<Self> {
        let pool = Arc::new(Pool::default());
        tokio::spawn(sweep(Arc::downgrade(&pool)));
        pool
    }

    /// The connection to `target` that was idle for the shortest time, if one still lives.
    pub fn take(&self, target: &Target) -> Option<Ready> {
        loop {
            // Taken out one at a time: dead ones are dropped, and with them their sockets, outside the lock.
            let (since, mut ready) = {
                let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
                let of_target = idle.by_target.get_mut(target)?;
                // An empty list stays, for it is most likely wanted again at once, until the next sweep.
                let last = of_target.pop();
                idle.len -= usize::from(last.is_some());
                last?
            };
            if since.elapsed() < IDLE_FOR && ready.is_alive() {
                return Some(ready);
            }
        }
    }

    /// Keeps a connection for later, unless there are enough.
    pub fn put(&self, ready: Ready) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len >= IDLE_IN_ALL {
            return;
        }
        let Idle { by_target, len } = &mut *idle;
        let of_target = match by_target.get_mut(ready.target()) {
            Some(of_target) => of_target,
            None => by_target.entry(ready.target().clone()).or_default(),
        };
        if of_target.len() < IDLE_PER_TARGET {
            of_target.push((Instant::now(), ready));
            *len += 1;
        }
    }

    fn sweep(&self) {
        let mut dead = Vec::new();
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        for of_target in idle.by_target.values_mut() {
            for (since, mut ready) in std::mem::take(of_target) {
                if since.elapsed() < IDLE_FOR && ready.is_alive() {
                    ready.rest();
                    of_target.push((since, ready));
                } else {
                    dead.push(ready);
                }
            }
        }
        idle.by_target.retain(|_, v| !v.is_empty());
        idle.len -= dead.len();
        drop(idle);
    }
}

async fn sweep(pool: Weak<Pool>) {
    loop {
        tokio::time::sleep(SWEEP_EVERY).await;
        let Some(pool) = pool.upgrade() else { return };
        pool.sweep();
    }
}

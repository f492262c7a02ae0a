//! Going away in order: a signal that says so, and guards that show who is still at work.
//!
//! Whoever serves holds a [`Signal`]; the process waits until all are dropped, or until the time for it is up.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
};

/// How far the drain has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Serving,
    Draining,
    GivingUp,
}

/// The end that starts the drain.
#[derive(Debug)]
pub struct Drain {
    tell: watch::Sender<Stage>,
    flag: Arc<AtomicBool>,
}

/// The end that serves: tells when to finish, and counts as at work until it is dropped.
#[derive(Clone, Debug)]
pub struct Signal(watch::Receiver<Stage>);

impl Drain {
    /// A pair of ends.
    pub fn new() -> (Drain, Signal) {
        let (tx, rx) = watch::channel(Stage::Serving);
        (
            Drain {
                tell: tx,
                flag: Arc::default(),
            },
            Signal(rx),
        )
    }

    /// Tells all to finish.
    pub fn start(&self) {
        self.flag.store(true, Relaxed);
        self.tell.send_replace(Stage::Draining);
    }

    /// Tells those who still wait that they will not be served.
    pub fn give_up(&self) {
        self.tell.send_replace(Stage::GivingUp);
    }

    /// Whether the drain has started, for those who only look on and are not waited for.
    pub fn flag(&self) -> Arc<AtomicBool> {
        self.flag.clone()
    }

    /// Waits until all have finished, or `deadline` has passed; says whether they had.
    pub async fn finished(&self, deadline: Duration) -> bool {
        tokio::time::timeout(deadline, self.tell.closed())
            .await
            .is_ok()
    }
}

impl Signal {
    /// Resolves when it is time to finish.
    pub async fn started(&mut self) {
        // An error means that the drain itself is gone, which is an end too.
        let _ = self.0.wait_for(|stage| *stage >= Stage::Draining).await;
    }

    /// Resolves when nobody is to wait any longer.
    pub async fn given_up(&mut self) {
        let _ = self.0.wait_for(|stage| *stage >= Stage::GivingUp).await;
    }
}

/// Resolves at the first SIGTERM or SIGINT (Ctrl-C).
///
/// # Errors
/// The handlers cannot be installed.
pub fn asked_to_stop() -> std::io::Result<impl Future<Output = &'static str>> {
    let (mut term, mut int) = (
        signal(SignalKind::terminate())?,
        signal(SignalKind::interrupt())?,
    );
    Ok(async move {
        tokio::select! {
            _ = term.recv() => "SIGTERM",
            _ = int.recv() => "SIGINT",
        }
    })
}

/// The SIGHUPs that come from now on, of which none ends the process any more. Several in a short time may be one.
#[derive(Debug)]
pub struct Hangups(tokio::signal::unix::Signal);

impl Hangups {
    /// Begins to listen.
    ///
    /// # Errors
    /// The handler cannot be installed.
    pub fn listen() -> std::io::Result<Self> {
        signal(SignalKind::hangup()).map(Hangups)
    }

    /// Resolves at the next one.
    pub async fn next(&mut self) {
        if self.0.recv().await.is_none() {
            std::future::pending().await
        }
    }
}

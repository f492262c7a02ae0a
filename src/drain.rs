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

/// The end that starts the drain.
#[derive(Debug)]
pub struct Drain {
    tell: watch::Sender<bool>,
    flag: Arc<AtomicBool>,
}

/// The end that serves: tells when to finish, and counts as at work until it is dropped.
#[derive(Clone, Debug)]
pub struct Signal(watch::Receiver<bool>);

impl Drain {
    /// A pair of ends.
    pub fn new() -> (Drain, Signal) {
        let (tx, rx) = watch::channel(false);
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
        self.tell.send_replace(true);
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

    /// How many are still at work.
    pub fn at_work(&self) -> usize {
        self.tell.receiver_count()
    }
}

impl Signal {
    /// Resolves when it is time to finish.
    pub async fn started(&mut self) {
        // An error means that the drain itself is gone, which is an end too.
        let _ = self.0.wait_for(|draining| *draining).await;
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

/// Keeps a SIGHUP from ending the process: the contract gives it to reloading, which this version cannot do yet.
///
/// # Errors
/// The handler cannot be installed.
pub fn outlive_hangups() -> std::io::Result<()> {
    let mut hangups = signal(SignalKind::hangup())?;
    tokio::spawn(async move {
        while hangups.recv().await.is_some() {
            tracing::warn!(
                "SIGHUP does nothing in this version; restart to change the configuration"
            );
        }
    });
    Ok(())
}

//! What the service manager is told (`sd_notify(3)`): serving, reloading, stopping, and that the runtime still turns.
//!
//! Without a manager that listens each of these does nothing. A line that cannot be delivered is logged and else of no
//! matter: requests come first.

use std::time::Duration;

use sd_notify::NotifyState;

/// What the end of the process may take beyond the drain: the last refusals, and giving the lease back.
const BEYOND_DRAIN: Duration = Duration::from_secs(5);

/// A manager that wants signs of life all the time does not get more than this.
const SHORTEST_ROUND: Duration = Duration::from_millis(10);

/// Requests are being served. Not that `/readyz` says yes: a replica that waits for a lease or for the store serves what
/// comes to it, and one that the manager took for hung and restarted would only begin to wait anew.
pub fn ready(status: &str) {
    tell(&[NotifyState::Ready, NotifyState::Status(status)]);
}

/// The configuration is being read again; [`ready`] says when that is over, whatever came of it.
pub fn reloading() {
    match NotifyState::monotonic_usec_now() {
        // Managers since systemd 253 want the time in the same message.
        Ok(now) => tell(&[NotifyState::Reloading, now]),
        Err(_) => tell(&[NotifyState::Reloading]),
    }
}

/// The drain has begun, and may take as long as `drain`: the manager is to wait for it, whatever its own limit is.
pub fn stopping(drain: Duration) {
    let whole = u32::try_from((drain + BEYOND_DRAIN).as_micros()).unwrap_or(u32::MAX);
    tell(&[
        NotifyState::Stopping,
        NotifyState::ExtendTimeoutUsec(whole),
        NotifyState::Status("draining"),
    ]);
}

/// Shows signs of life as often as the manager wants them, if it does. Each is preceded by a task that is queued, run and
/// waited for, so that it says more than that one timer goes off.
pub fn keep_watch() {
    let Some(patience) = sd_notify::watchdog_enabled() else {
        return;
    };
    tokio::spawn(async move {
        loop {
            if tokio::spawn(std::future::ready(())).await.is_ok() {
                tell(&[NotifyState::Watchdog]);
            }
            tokio::time::sleep((patience / 3).max(SHORTEST_ROUND)).await;
        }
    });
}

fn tell(lines: &[NotifyState<'_>]) {
    if let Err(e) = sd_notify::notify(lines) {
        tracing::warn!("the service manager was not told: {e}; check NOTIFY_SOCKET");
    }
}

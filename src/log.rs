//! How the log is written, and how lines that could be many are kept few.

use std::{
    io::IsTerminal as _,
    sync::atomic::{AtomicI64, Ordering::Relaxed},
};

use tracing_subscriber::{EnvFilter, fmt, layer::SubscriberExt as _, util::SubscriberInitExt as _};

use crate::pacing::time::{LocalTime, Nanos, SECOND};

/// At most one line of a kind in this time.
const SELDOM: Nanos = 10 * SECOND;

/// Sends the log to stderr. `PACELINE_LOG` filters it (`info` when unset; `access=off` leaves out the access lines),
/// `PACELINE_LOG_FORMAT=json` makes each line a JSON object.
pub fn start(env: &dyn Fn(&str) -> Option<String>) {
    let filter = env("PACELINE_LOG")
        .filter(|f| !f.is_empty())
        .unwrap_or_else(|| "info".to_owned());
    let filter = EnvFilter::builder().parse_lossy(filter);
    let registry = tracing_subscriber::registry().with(filter);
    let started = if env("PACELINE_LOG_FORMAT").as_deref() == Some("json") {
        let lines = fmt::layer()
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_span_list(false);
        registry.with(lines.with_writer(std::io::stderr)).try_init()
    } else {
        let lines = fmt::layer().with_ansi(std::io::stderr().is_terminal());
        registry.with(lines.with_writer(std::io::stderr)).try_init()
    };
    // A log that was started before goes on.
    let _ = started;
}

/// Lets one of many equal lines through from time to time.
#[derive(Debug, Default)]
pub struct Seldom(AtomicI64);

impl Seldom {
    /// Whether the line is due.
    pub fn is_due(&self) -> bool {
        let (now, last) = (LocalTime::now().0, self.0.load(Relaxed));
        (last == 0 || now - last >= SELDOM)
            && self.0.compare_exchange(last, now, Relaxed, Relaxed).is_ok()
    }
}

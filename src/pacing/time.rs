//! The two clocks as types, so that an instant of one cannot be taken for an instant of the other.
//!
//! [`StoreTime`] is the store's wall clock, on which slots lie. [`LocalTime`] is this machine's boot-time clock, on
//! which the proxy sleeps; it goes on while the machine is suspended, so that slots which passed meanwhile are seen to
//! be old. Both count whole nanoseconds and saturate: no arithmetic on them can panic.

use std::time::Duration;

/// A span in nanoseconds; negative where a difference is.
pub type Nanos = i64;

/// One millisecond in [`Nanos`].
pub const MILLISECOND: Nanos = 1_000_000;
/// One second in [`Nanos`].
pub const SECOND: Nanos = 1_000_000_000;

/// An instant of the store's clock: nanoseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StoreTime(pub Nanos);

/// An instant of this machine's `CLOCK_BOOTTIME`: nanoseconds since the machine started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LocalTime(pub Nanos);

impl StoreTime {
    /// This instant moved by `span`.
    pub fn plus(self, span: Nanos) -> Self {
        StoreTime(self.0.saturating_add(span))
    }

    /// How far this instant lies after `earlier`; negative when it lies before.
    pub fn since(self, earlier: StoreTime) -> Nanos {
        self.0.saturating_sub(earlier.0)
    }
}

impl LocalTime {
    /// Now, by `CLOCK_BOOTTIME`.
    pub fn now() -> Self {
        let t = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        LocalTime(t.tv_sec.saturating_mul(SECOND).saturating_add(t.tv_nsec))
    }

    /// This instant moved by `span`.
    pub fn plus(self, span: Nanos) -> Self {
        LocalTime(self.0.saturating_add(span))
    }

    /// How far this instant lies after `earlier`; negative when it lies before.
    pub fn since(self, earlier: LocalTime) -> Nanos {
        self.0.saturating_sub(earlier.0)
    }
}

/// A [`Duration`] in whole nanoseconds, saturating after 292 years.
pub fn nanos(span: Duration) -> Nanos {
    Nanos::try_from(span.as_nanos()).unwrap_or(Nanos::MAX)
}

/// A span as a [`Duration`]; negative spans are zero.
pub fn duration(span: Nanos) -> Duration {
    Duration::from_nanos(u64::try_from(span).unwrap_or(0))
}

/// A span in seconds, for metrics and texts.
pub fn seconds(span: Nanos) -> f64 {
    span as f64 / SECOND as f64
}

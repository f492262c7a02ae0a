//! Waking up at an instant of [`LocalTime`], to within tens of microseconds.
//!
//! The runtime's own timers round up to the next millisecond, which would be the largest part of a dispatch's
//! lateness. One kernel timer on the boot-time clock (timerfd_create(2)) serves all sleepers, so that ten thousand
//! lanes need one file descriptor. What is slept for, this file does not know.

use std::{
    collections::BTreeMap,
    io,
    os::fd::OwnedFd,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError, Weak},
    task::{Context, Poll, Waker},
};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use tokio::io::{Interest, unix::AsyncFd};

use crate::pacing::time::{LocalTime, SECOND};

/// One kernel timer and those who sleep by it.
#[derive(Debug)]
pub struct Alarm {
    timer: AsyncFd<OwnedFd>,
    sleepers: Mutex<Sleepers>,
}

#[derive(Debug, Default)]
struct Sleepers {
    wakers: BTreeMap<(LocalTime, u64), Waker>,
    armed: Option<LocalTime>,
    next: u64,
}

impl Alarm {
    /// Makes the timer and spawns the task that serves it, which ends with the last handle.
    ///
    /// # Errors
    /// The kernel has no timer to give (file descriptors are used up).
    pub fn start() -> io::Result<Arc<Alarm>> {
        let fd = timerfd_create(
            TimerfdClockId::Boottime,
            TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC,
        )?;
        #[expect(
            deprecated,
            reason = "its replacement is unsafe, for types whose descriptor may change; an OwnedFd's cannot"
        )]
        let timer = AsyncFd::with_interest(fd, Interest::READABLE)?;
        let alarm = Arc::new(Alarm {
            timer,
            sleepers: Mutex::default(),
        });
        tokio::spawn(serve(Arc::downgrade(&alarm)));
        Ok(alarm)
    }

    /// Resolves at `at`, or at once when that has passed; never early.
    pub fn sleep_until(&self, at: LocalTime) -> Sleep<'_> {
        Sleep {
            alarm: self,
            at,
            key: None,
        }
    }

    fn fire(&self) {
        let mut s = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
        s.armed = None;
        let now = LocalTime::now();
        while let Some(due) = s.wakers.first_entry().filter(|e| e.key().0 <= now) {
            due.remove().wake();
        }
        self.arm(&mut s);
    }

    fn arm(&self, s: &mut Sleepers) {
        let Some(first) = s.wakers.first_key_value().map(|((at, _), _)| *at) else {
            return;
        };
        if s.armed.is_some_and(|at| at <= first) {
            return;
        }
        // Zero would disarm the timer; an instant that has passed fires at once.
        let t = first.0.max(1);
        let when = Timespec {
            tv_sec: t / SECOND,
            tv_nsec: t % SECOND,
        };
        let once = Itimerspec {
            it_interval: Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            },
            it_value: when,
        };
        if timerfd_settime(self.timer.get_ref(), TimerfdTimerFlags::ABSTIME, &once).is_ok() {
            s.armed = Some(first);
        }
    }
}

async fn serve(alarm: Weak<Alarm>) {
    while let Some(alarm) = alarm.upgrade() {
        // The handle is given back at least once a second, so that the task ends soon after the last other one.
        let _ = tokio::time::timeout(std::time::Duration::from_secs(1), async {
            if let Ok(mut guard) = alarm.timer.readable().await {
                let _ = guard
                    .try_io(|fd| rustix::io::read(fd.get_ref(), &mut [0u8; 8]).map_err(Into::into));
            }
        })
        .await;
        alarm.fire();
    }
}

/// A future that resolves at an instant. Dropping it forgets the instant.
#[derive(Debug)]
pub struct Sleep<'a> {
    alarm: &'a Alarm,
    at: LocalTime,
    key: Option<u64>,
}

impl Future for Sleep<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if LocalTime::now() >= self.at {
            return Poll::Ready(());
        }
        let mut s = self
            .alarm
            .sleepers
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let key = self.key.unwrap_or_else(|| {
            s.next += 1;
            s.next
        });
        s.wakers.insert((self.at, key), cx.waker().clone());
        self.alarm.arm(&mut s);
        drop(s);
        self.key = Some(key);
        Poll::Pending
    }
}

impl Drop for Sleep<'_> {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            let mut s = self
                .alarm
                .sleepers
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            s.wakers.remove(&(self.at, key));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pacing::time::MILLISECOND;

    #[tokio::test]
    async fn sleepers_wake_in_order_and_never_early() {
        let alarm = Alarm::start().expect("a timer");
        let now = LocalTime::now();
        let wake = |ms| {
            let alarm = alarm.clone();
            async move {
                let at = now.plus(ms * MILLISECOND);
                alarm.sleep_until(at).await;
                let woke = LocalTime::now();
                assert!(woke >= at);
                woke
            }
        };
        let (late, early, past) = tokio::join!(wake(30), wake(10), wake(-5));
        assert!(past < early && early < late);
    }

    #[tokio::test]
    async fn a_dropped_sleep_is_forgotten() {
        let alarm = Alarm::start().expect("a timer");
        let far = LocalTime::now().plus(3_600 * SECOND);
        let mut sleep = Box::pin(alarm.sleep_until(far));
        assert!(futures_poll(&mut sleep).await.is_pending());
        assert_eq!(alarm.sleepers.lock().expect("not poisoned").wakers.len(), 1);
        drop(sleep);
        assert!(
            alarm
                .sleepers
                .lock()
                .expect("not poisoned")
                .wakers
                .is_empty()
        );
    }

    async fn futures_poll<F: Future + Unpin>(f: &mut F) -> Poll<F::Output> {
        std::future::poll_fn(|cx| Poll::Ready(Pin::new(&mut *f).poll(cx))).await
    }
}

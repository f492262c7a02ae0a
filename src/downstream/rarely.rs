//! A future that stands beside another in one task and is polled only when it was woken itself.
//!
//! A task that is woken polls all that it waits for. For what happens once in the life of a connection, if at all, that is
//! a lock shared by all connections taken several times for each request; this makes it one look at a flag.

use std::{
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::AcqRel, Ordering::Release},
    },
    task::{Context, Poll, Wake, Waker},
};

/// The future, which must not move.
#[derive(Debug)]
pub struct Rarely<F> {
    future: F,
    bell: Arc<Bell>,
    waker: Waker,
}

/// Rung by whatever the future waits for.
#[derive(Debug)]
struct Bell {
    rung: AtomicBool,
    /// Of the task in which the future is.
    task: Mutex<Waker>,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.rung.store(true, Release);
        let task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        task.wake_by_ref();
    }
}

impl<F: Future + Unpin> Rarely<F> {
    /// Beside others from now on. It is polled at first without having been woken.
    pub fn new(future: F) -> Self {
        let bell = Arc::new(Bell {
            rung: AtomicBool::new(true),
            task: Mutex::new(Waker::noop().clone()),
        });
        Rarely {
            future,
            waker: bell.clone().into(),
            bell,
        }
    }
}

impl<F: Future + Unpin> Future for Rarely<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = &mut *self;
        {
            let mut task = this
                .bell
                .task
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            if !task.will_wake(cx.waker()) {
                task.clone_from(cx.waker());
            }
        }
        // Looked at after the waker is left: whoever rings in between finds it.
        if !this.bell.rung.swap(false, AcqRel) {
            return Poll::Pending;
        }
        Pin::new(&mut this.future).poll(&mut Context::from_waker(&this.waker))
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::atomic::AtomicUsize, sync::atomic::Ordering::Relaxed};

    use tokio::sync::watch;

    use super::*;

    #[tokio::test]
    async fn it_is_polled_when_it_was_woken_and_only_then() {
        let (tell, mut told) = watch::channel(0);
        told.mark_unchanged();
        let polls = AtomicUsize::new(0);
        let mut change = Box::pin(told.changed());
        let counted = std::future::poll_fn(|cx| {
            polls.fetch_add(1, Relaxed);
            change.as_mut().poll(cx)
        });
        let mut rarely = Rarely::new(counted);
        for _ in 0..10 {
            // Each of these wakes the task.
            tokio::select! {
                biased;
                _ = &mut rarely => panic!("nothing has changed"),
                () = tokio::task::yield_now() => {}
            }
        }
        assert_eq!(polls.load(Relaxed), 1);
        // From elsewhere, while the task sleeps.
        let telling = tokio::spawn(async move { tell.send(1) });
        assert!(rarely.await.is_ok());
        assert_eq!(polls.load(Relaxed), 2);
        telling.await.expect("no panic").expect("somebody hears it");
    }
}

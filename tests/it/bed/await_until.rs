//! Waiting for a state by asking for it, with a bound. The only place in the tests that sleeps between questions.

use std::{
    thread,
    time::{Duration, Instant},
};

/// Asks every few milliseconds until the answer is `Some`.
///
/// # Panics
/// After `patience`, with `what` in the message, so that a test says what never came.
pub fn await_until<T>(what: &str, patience: Duration, mut ask: impl FnMut() -> Option<T>) -> T {
    let give_up = Instant::now() + patience;
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(
            Instant::now() < give_up,
            "waited {patience:?} in vain: {what}"
        );
        thread::sleep(Duration::from_millis(5));
    }
}

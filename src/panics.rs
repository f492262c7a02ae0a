//! Counts panics. None is meant to happen; one that does ends its task alone, and must be seen.
//!
//! The log gets the place, and the message only where it is a text of the program's own: a formatted one may hold what
//! a client sent. The count is the process's, as the hook is.

use std::{
    panic::{self, PanicHookInfo},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

static PANICS: AtomicU64 = AtomicU64::new(0);

/// From now on panics are counted, and told in the log instead of on standard error.
pub fn watch() {
    panic::set_hook(Box::new(|panic| {
        PANICS.fetch_add(1, Relaxed);
        tracing::error!("{}", describe(panic));
    }));
}

/// How many there have been.
pub fn count() -> u64 {
    PANICS.load(Relaxed)
}

fn describe(panic: &PanicHookInfo<'_>) -> String {
    let place = panic
        .location()
        .map_or_else(|| "an unknown place".to_owned(), ToString::to_string);
    let message = panic.payload().downcast_ref::<&'static str>();
    let message = message.copied().unwrap_or("a message that is not shown");
    format!(
        "panic at {place}: {message}; the request is lost, the process goes on; please report it"
    )
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// One test, since the hook is the process's.
    #[test]
    fn a_panic_is_counted_and_told_without_what_a_client_sent() {
        let before = panic::take_hook();
        let told = Arc::new(Mutex::new(Vec::new()));
        let telling = told.clone();
        watch();
        let counting = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            telling.lock().expect("unpoisoned").push(describe(panic));
            counting(panic);
        }));
        let count_before = count();
        let ours = panic::catch_unwind(|| panic!("our own words"));
        let theirs = panic::catch_unwind(|| "\u{e9}hunter2".split_at(1).0.len());
        panic::set_hook(before);
        assert!(ours.is_err() && theirs.is_err());
        assert_eq!(count() - count_before, 2);
        let told = told.lock().expect("unpoisoned");
        assert!(
            told[0].contains("panics.rs") && told[0].contains("our own words"),
            "{told:?}"
        );
        assert!(!told[1].contains("hunter2"), "{told:?}");
    }
}

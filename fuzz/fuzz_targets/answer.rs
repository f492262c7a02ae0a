//! libFuzzer for the target `answer`.
#![no_main]

#[path = "../targets.rs"]
#[allow(dead_code, reason = "each target has a binary of its own")]
mod targets;

libfuzzer_sys::fuzz_target!(
    init: targets::write_seeds("answer"),
    |bytes: &[u8]| targets::answer(bytes)
);

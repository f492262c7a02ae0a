//! libFuzzer for the target `store_url`.
#![no_main]

#[path = "../targets.rs"]
#[allow(dead_code, reason = "each target has a binary of its own")]
mod targets;

libfuzzer_sys::fuzz_target!(
    init: targets::write_seeds("store_url"),
    |bytes: &[u8]| targets::store_url(bytes)
);

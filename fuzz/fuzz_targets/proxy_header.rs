//! libFuzzer for the target `proxy_header`.
#![no_main]

#[path = "../targets.rs"]
#[allow(dead_code, reason = "each target has a binary of its own")]
mod targets;

libfuzzer_sys::fuzz_target!(
    init: targets::write_seeds("proxy_header"),
    |bytes: &[u8]| targets::proxy_header(bytes)
);

//! Every fuzz target, for a moment in each test run: seeds are mutated without a look at coverage, which finds what is
//! near. `FUZZ_SECONDS=n` gives each target so long, `FUZZ_SEED` another beginning; `fuzz/run` looks further.

#![allow(
    clippy::disallowed_methods,
    reason = "a budget of real time, outside of any runtime"
)]

use std::{
    panic,
    time::{Duration, Instant},
};

#[path = "../fuzz/targets.rs"]
mod targets;

use targets::{ALL, Target};

/// What makes inputs interesting to one parser or another.
const WORDS: &[&str] = &[
    "\r\n",
    "\r",
    "\n",
    "\0",
    " ",
    "\t",
    ":",
    ",",
    ";",
    "=",
    "\"",
    "\\",
    "%",
    "@",
    "[",
    "]",
    ".",
    "-",
    "0",
    "1",
    "-1",
    "18446744073709551616",
    "9223372036854775807",
    "1e999",
    "nan",
    "inf",
    "\u{fc}",
    "\u{ad}",
    "\u{2028}",
    "\u{202e}",
    "xn--",
    "Host: a\r\n",
    "Content-Length: 5\r\n",
    "Transfer-Encoding: chunked\r\n",
    "chunked",
    "0\r\n\r\n",
    "HTTP/1.1",
    "CONNECT ",
    "u=",
    "::",
    "ffff:",
    "0x",
    "*.",
    "[[destination]]\n",
    "{",
    "}",
    "'''",
    "#",
    "null",
    "true",
    "hunter2",
];

/// SplitMix64: a small generator whose whole state is the seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % sides.max(1) as u64) as usize
    }

    fn mutate(&mut self, seeds: &[&str]) -> Vec<u8> {
        let mut bytes = seeds[self.roll(seeds.len())].as_bytes().to_vec();
        for _ in 0..=self.roll(6) {
            let at = self.roll(bytes.len() + 1);
            match self.roll(8) {
                0 => bytes.truncate(at),
                1 if at < bytes.len() => bytes[at] ^= 1 << self.roll(8),
                2 if at < bytes.len() => bytes[at] = self.roll(256) as u8,
                3 => {
                    let end = (at + self.roll(16)).min(bytes.len());
                    bytes.drain(at..end);
                }
                4 => {
                    let end = (at + self.roll(64)).min(bytes.len());
                    let piece = bytes[at..end].to_vec();
                    let to = self.roll(bytes.len() + 1);
                    bytes.splice(to..to, piece);
                }
                5 => {
                    let other = seeds[self.roll(seeds.len())].as_bytes();
                    let from = self.roll(other.len() + 1);
                    bytes.splice(at.., other[from..].iter().copied());
                }
                _ => {
                    let word = WORDS[self.roll(WORDS.len())];
                    bytes.splice(at..at, word.bytes());
                }
            }
        }
        bytes.truncate(4_096);
        bytes
    }
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    let number = text.parse();
    Some(number.unwrap_or_else(|_| panic!("{name} is {text:?}; set it to a whole number")))
}

fn play(target: &Target, budget: Duration, seed: u64) -> u64 {
    let (began, mut dice, mut count) = (Instant::now(), Dice(seed), 0);
    let mut one = |bytes: &[u8]| {
        count += 1;
        if panic::catch_unwind(|| (target.run)(bytes)).is_err() {
            panic!(
                "{} fails with FUZZ_SEED={seed} on {:?}",
                target.name,
                bytes.escape_ascii().to_string()
            );
        }
    };
    target.seeds.iter().for_each(|seed| one(seed.as_bytes()));
    while began.elapsed() < budget {
        (0..64).for_each(|_| one(&dice.mutate(target.seeds)));
    }
    count
}

#[test]
fn no_input_breaks_a_promise() {
    let budget = number("FUZZ_SECONDS").map_or(Duration::from_millis(700), Duration::from_secs);
    let seed = number("FUZZ_SEED").unwrap_or(1);
    for target in ALL {
        let count = play(target, budget, seed);
        eprintln!("{}: {count} inputs in {budget:?}", target.name);
        assert!(count > 500, "{} had {count} inputs only", target.name);
    }
}

/// The runner finds what it is there to find.
#[test]
fn a_planted_fault_is_found() {
    let planted = Target {
        name: "planted",
        run: |bytes| assert!(!bytes.windows(3).any(|w| w == b"\r\n\0")),
        seeds: &["GET / HTTP/1.1\r\nHost: a\r\n\r\n"],
    };
    let before = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let found = panic::catch_unwind(|| play(&planted, Duration::from_secs(20), 1));
    panic::set_hook(before);
    assert!(found.is_err());
}

#[test]
fn every_target_has_a_binary_for_libfuzzer() {
    let root = env!("CARGO_MANIFEST_DIR");
    let manifest = std::fs::read_to_string(format!("{root}/fuzz/Cargo.toml")).expect("a manifest");
    for Target { name, .. } in ALL {
        let path = format!("{root}/fuzz/fuzz_targets/{name}.rs");
        let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
        assert!(text.contains(&format!("targets::{name}(")), "{path}");
        assert!(
            manifest.contains(&format!("name = \"{name}\"")),
            "{name} in fuzz/Cargo.toml"
        );
    }
}

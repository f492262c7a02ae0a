//! Big bodies stream: they arrive whole, and the proxy holds a little of them at a time.

use std::{
    thread,
    time::{Duration, Instant},
};

use crate::bed::{
    origin::Origin,
    pattern::pattern_digest,
    recipe::{Recipe, Site},
    replica::Replica,
};

const HOST: &str = "lh3.googleusercontent.com";
const GIBIBYTE: u64 = 1 << 30;
const MEBIBYTE: u64 = 1 << 20;
/// What the proxy may have resident, whatever passes through it.
const RESIDENT: u64 = 64 * MEBIBYTE;

fn start(origin: &Origin, site: &Site) -> Replica {
    let recipe = Recipe::new()
        .destination("google_image", &["*.googleusercontent.com"], "50.0")
        .origin(origin);
    Replica::start(site, "r0", &recipe)
}

#[test]
fn a_gibibyte_down_and_up_passes_whole_in_little_memory() {
    let (origin, site) = (Origin::tls(&[HOST]), Site::new());
    let replica = start(&origin, &site);
    let browser = replica.browser(&site, HOST);

    // A client that asks for as much and does not read: back-pressure must reach the origin, not a buffer of ours.
    let mut idle = browser.tunnel().unwrap();
    idle.ask("GET", &format!("/b/{GIBIBYTE}?id=idle"), &[])
        .unwrap();

    // Hashed while the transfers run, on the machine's other processor.
    let digest = thread::spawn(|| pattern_digest(GIBIBYTE));
    let mut tunnel = browser.tunnel().unwrap();
    let (status, bytes, received) = tunnel.download(&format!("/b/{GIBIBYTE}?id=down")).unwrap();
    let digest = digest.join().unwrap();
    assert_eq!((status, bytes, &received), (200, GIBIBYTE, &digest));
    let answer = tunnel.upload("/up?id=up", GIBIBYTE).unwrap();
    assert_eq!(
        (answer.status(), answer.text()),
        (200, format!("{GIBIBYTE} {digest}"))
    );

    let peak = replica.peak_memory();
    assert!(
        peak < RESIDENT,
        "the proxy had {} MiB resident",
        peak / MEBIBYTE
    );
    assert_eq!(origin.timeline("").count(), 3);
}

/// What the origin has been able to send after a while is what the reader has read and what lies in the kernel's buffers
/// (megabytes, on loopback) and in the proxy's; without back-pressure it would be hundreds of megabytes.
#[test]
fn a_reader_of_a_megabyte_a_second_holds_the_origin_to_its_pace() {
    let (origin, site) = (Origin::tls(&[HOST]), Site::new());
    let replica = start(&origin, &site);
    let mut slow = replica.browser(&site, HOST).tunnel().unwrap();
    slow.ask("GET", &format!("/b/{GIBIBYTE}?id=slow"), &[])
        .unwrap();
    slow.head().unwrap();
    // Long enough for all buffers to fill.
    let (began, mut read, mut sent) = (Instant::now(), 0, Vec::new());
    while began.elapsed() < Duration::from_secs(6) {
        read += slow.hear(100_000, Duration::from_secs(5)).len() as u64;
        sent.push((began.elapsed(), origin.sent()));
        let due = Duration::from_micros(read);
        thread::sleep(due.saturating_sub(began.elapsed()));
    }
    assert!((5_000_000..7_000_000).contains(&read), "read {read}");
    let total = origin.sent();
    assert!(
        total < read + 24 * MEBIBYTE,
        "the origin sent {total} bytes to a reader of {read}"
    );
    // Once the buffers are full the origin sends what is read, and no more.
    let (_, at_half) = *sent
        .iter()
        .find(|(at, _)| *at > Duration::from_secs(3))
        .expect("six seconds of samples");
    assert!(
        total - at_half < 8 * MEBIBYTE,
        "the origin sent {} bytes more in 3 s to a reader of 1 MB/s",
        total - at_half
    );
    let peak = replica.peak_memory();
    assert!(
        peak < RESIDENT,
        "the proxy had {} MiB resident",
        peak / MEBIBYTE
    );
}

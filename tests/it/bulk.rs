//! Big bodies stream: they arrive whole, and the proxy holds a little of them at a time.

use crate::bed::{
    origin::Origin,
    pattern::pattern_digest,
    recipe::{Recipe, Site},
    replica::Replica,
};

const HOST: &str = "lh3.googleusercontent.com";
const BYTES: u64 = 200 << 20;

#[test]
fn two_hundred_mebibytes_down_and_up_pass_whole_in_little_memory() {
    let (origin, site) = (Origin::tls(&[HOST]), Site::new());
    let recipe = Recipe::new()
        .destination("google_image", &["*.googleusercontent.com"], "50.0")
        .origin(&origin);
    let replica = Replica::start(&site, "r0", &recipe);
    let browser = replica.browser(&site, HOST);

    // A client that asks for as much and does not read: back-pressure must reach the origin, not a buffer of ours.
    let mut idle = browser.tunnel().unwrap();
    idle.ask("GET", &format!("/b/{BYTES}?id=idle"), &[])
        .unwrap();

    let digest = pattern_digest(BYTES);
    let mut tunnel = browser.tunnel().unwrap();
    let (status, bytes, received) = tunnel.download(&format!("/b/{BYTES}?id=down")).unwrap();
    assert_eq!((status, bytes, &received), (200, BYTES, &digest));
    let answer = tunnel.upload("/up?id=up", BYTES).unwrap();
    assert_eq!(
        (answer.status(), answer.text()),
        (200, format!("{BYTES} {digest}"))
    );

    let peak = replica.peak_memory();
    assert!(peak < 64 << 20, "the proxy had {} MiB resident", peak >> 20);
    assert_eq!(origin.timeline("").count(), 3);
}

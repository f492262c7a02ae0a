//! Blind tunnels: bytes pass as they are, and each side may end its own direction first.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener},
    thread,
};

use super::SOON;
use crate::bed::{
    client::Session,
    recipe::{Recipe, Site},
    replica::Replica,
};

const BLIND: &str = "blind.test";

/// A replica that tunnels to `listener`, and an open tunnel.
fn tunnel(listener: &TcpListener) -> (Site, Replica, Session) {
    let site = Site::new();
    let recipe = Recipe::new()
        .destination("other", &["other.test"], "1.0")
        .resolve(&format!("{BLIND}:443"), listener.local_addr().unwrap());
    let replica = Replica::start(&site, "r0", &recipe);
    let mut session = replica.session(BLIND);
    let answer = session.connect(&format!("{BLIND}:443")).unwrap();
    assert_eq!(answer.status(), 200);
    (site, replica, session)
}

#[test]
fn a_client_that_has_said_all_still_hears_the_answer() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (_site, _replica, mut session) = tunnel(&listener);
    let origin = thread::spawn(move || {
        let (mut peer, _) = listener.accept().unwrap();
        let mut all = Vec::new();
        peer.read_to_end(&mut all).unwrap();
        peer.write_all(&all.repeat(1000)).unwrap();
        all
    });
    session.send(b"\0not http at all\xff").unwrap();
    session.socket().shutdown(Shutdown::Write).unwrap();
    let heard = session.rest().unwrap();
    assert_eq!(origin.join().unwrap(), b"\0not http at all\xff");
    assert_eq!(heard, b"\0not http at all\xff".repeat(1000));
}

#[test]
fn an_origin_that_has_said_all_still_hears_the_client() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (_site, _replica, mut session) = tunnel(&listener);
    let origin = thread::spawn(move || {
        let (mut peer, _) = listener.accept().unwrap();
        peer.write_all(b"server speaks first").unwrap();
        peer.shutdown(Shutdown::Write).unwrap();
        let mut all = Vec::new();
        peer.read_to_end(&mut all).unwrap();
        all
    });
    assert_eq!(session.rest().unwrap(), b"server speaks first");
    session.send(b"late words").unwrap();
    session.socket().shutdown(Shutdown::Both).unwrap();
    assert_eq!(origin.join().unwrap(), b"late words");
}

#[test]
fn bytes_sent_behind_the_connect_arrive() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (_site, replica, _first) = tunnel(&listener);
    let _ = listener.accept().unwrap();
    let mut eager = replica.session(BLIND);
    eager
        .send(
            format!("CONNECT {BLIND}:443 HTTP/1.1\r\nHost: {BLIND}:443\r\n\r\nearly bytes")
                .as_bytes(),
        )
        .unwrap();
    let (mut peer, _) = listener.accept().unwrap();
    assert_eq!(eager.head().unwrap().status().unwrap(), 200);
    let mut early = [0; 11];
    peer.set_read_timeout(Some(SOON)).unwrap();
    peer.read_exact(&mut early).unwrap();
    assert_eq!(&early, b"early bytes");
}

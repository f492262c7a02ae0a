//! The origin and the client against each other, with no proxy between: a bed that lies would make every claim vain.

use std::{io::ErrorKind, time::Duration};

use super::{
    await_until::await_until,
    certs::client_tls,
    client::Session,
    origin::{Manner, Origin},
    pattern::{pattern, pattern_digest},
};

fn secure(origin: &Origin) -> std::io::Result<Session> {
    let tls = client_tls(origin.root().expect("a TLS origin").as_bytes());
    Session::open(origin.address(), "a.test")?.start_tls(&tls, "a.test")
}

#[test]
fn arrivals_are_recorded_with_id_fields_and_connection() {
    let origin = Origin::tls(&["a.test"]);
    let mut first = secure(&origin).unwrap();
    first.get("/b/0?id=one").unwrap();
    first.get_with("/b/0", &["X-Id: two", "X-Odd: v"]).unwrap();
    secure(&origin).unwrap().get("/b/0?id=one").unwrap();
    let arrivals = origin.arrivals();
    assert_eq!(
        arrivals.iter().map(|a| a.connection).collect::<Vec<_>>(),
        [0, 0, 1]
    );
    assert_eq!(arrivals[1].id.as_deref(), Some("two"));
    assert_eq!(
        (arrivals[1].field("x-odd"), arrivals[1].field("HOST")),
        (Some("v"), Some("a.test"))
    );
    assert_eq!(
        (arrivals[0].method.as_str(), arrivals[0].target.as_str()),
        ("GET", "/b/0?id=one")
    );
    assert_eq!(origin.duplicates(), ["one"]);
    assert_eq!(
        (origin.timeline("t").count(), origin.timeline("").count()),
        (1, 3)
    );
    assert_eq!(origin.connections(), 2);
}

#[test]
fn answers_bend_as_the_query_asks() {
    let origin = Origin::plain(&["a.test"]);
    let mut session = Session::open(origin.address(), "a.test").unwrap();
    let before = origin.elapsed();
    let answer = session
        .get("/b/5?status=429&h=Retry-After:7&delay_ms=30&chunked=1")
        .unwrap();
    assert!(origin.elapsed() - before >= Duration::from_millis(30));
    assert_eq!(
        (answer.status(), answer.field("retry-after")),
        (429, Some("7"))
    );
    assert_eq!(answer.field("transfer-encoding"), Some("chunked"));
    assert_eq!(answer.body, [0, 1, 2, 3, 4]);
}

#[test]
fn big_bodies_pass_both_ways_whole() {
    let origin = Origin::tls(&["a.test"]);
    let length = 3_000_001;
    let mut session = secure(&origin).unwrap();
    assert_eq!(
        session.download(&format!("/b/{length}")).unwrap(),
        (200, length, pattern_digest(length))
    );
    let answer = session.upload("/up", length).unwrap();
    assert_eq!(
        answer.text(),
        format!("{length} {}", pattern_digest(length))
    );
    assert_eq!(origin.uploaded(), length);
}

#[test]
fn the_pattern_has_exactly_the_length_asked_for() {
    for length in [0, 1, 251 * 256 - 1, 251 * 256, 251 * 256 + 1, 200_000] {
        let bytes: Vec<u8> = pattern(length).flatten().collect();
        assert_eq!(bytes.len() as u64, length);
        assert!(
            bytes
                .iter()
                .enumerate()
                .all(|(n, byte)| *byte as usize == n % 251)
        );
    }
}

#[test]
fn each_bad_manner_shows_as_what_it_is() {
    let origin = Origin::plain(&["a.test"]);
    let get = |manner| {
        origin.behave(manner);
        Session::open(origin.address(), "a.test")
            .unwrap()
            .get("/b/0")
    };
    assert!(get(Manner::CloseOnAccept).is_err());
    assert_eq!(
        get(Manner::ResetMidHead).unwrap_err().kind(),
        ErrorKind::ConnectionReset
    );
    let half = get(Manner::HalfBody).unwrap_err();
    assert!(
        half.to_string().contains("5 bytes before the end"),
        "{half}"
    );
    assert_eq!(get(Manner::CloseUnannounced).unwrap().text(), "bye.");
    assert_eq!(
        origin.timeline("").count(),
        3,
        "all but the closed one were read"
    );
}

#[test]
fn a_dropped_origin_closes_its_connections() {
    let origin = Origin::plain(&["a.test"]);
    let mut session = Session::open(origin.address(), "a.test").unwrap();
    session.get("/b/0").unwrap();
    drop(origin);
    await_until("the connection ends", Duration::from_secs(5), || {
        session.get("/b/0").is_err().then_some(())
    });
}

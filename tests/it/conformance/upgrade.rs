//! `Upgrade` (RFC 9110 section 7.8), as WebSocket uses it: once the origin has said 101 bytes pass both ways as they
//! are, and none before.

use std::{net::Shutdown, thread, time::Duration};

use super::{FORMS, Form, SOON, Scene};
use crate::bed::{
    client::Session,
    scripted::{Step, say},
};

const ASK: &str = "GET {at}/ws HTTP/1.1\r\nHost: {host}\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\
    Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
const SWITCHED: &str = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
    Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";

fn ask(scene: &Scene, form: Form, steps: Vec<Step>) -> Session {
    scene.origin(form).script("/ws", steps);
    let mut session = scene.open(form);
    scene.send(form, &mut session, ASK);
    session
}

#[test]
fn a_websocket_passes_bytes_both_ways() {
    for form in FORMS {
        let scene = Scene::new();
        let steps = vec![
            say(SWITCHED),
            say(b"\x81\x02hi"),
            Step::Hear(b"\x81\x03you"),
            say(b"\x88\x00"),
            Step::Close,
        ];
        let mut session = ask(&scene, form, steps);
        let head = session.head().unwrap();
        assert_eq!(head.status().unwrap(), 101, "{form:?} {head:?}");
        assert_eq!(head.field("upgrade"), Some("websocket"), "{form:?}");
        let nominated = head.field("connection").unwrap_or_default();
        assert!(
            nominated.eq_ignore_ascii_case("upgrade"),
            "{form:?} {head:?}"
        );
        assert_eq!(session.hear(4, SOON), b"\x81\x02hi", "{form:?}");
        session.send(b"\x81\x03you").unwrap();
        assert_eq!(
            session.hear(3, SOON),
            b"\x88\x00",
            "the frame and then the end, {form:?}"
        );
        let arrived = &scene.origin(form).asked("/ws")[0].text;
        let lower = arrived.to_ascii_lowercase();
        assert!(
            lower.contains("\r\nupgrade: websocket\r\n"),
            "{form:?} {arrived}"
        );
        assert!(
            lower.contains("\r\nconnection: upgrade\r\n"),
            "{form:?} {arrived}"
        );
        assert!(
            arrived.contains("Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"),
            "{form:?} {arrived}"
        );
    }
}

#[test]
fn no_byte_of_the_new_protocol_is_forwarded_before_the_101() {
    for form in FORMS {
        let scene = Scene::new();
        let steps = vec![
            Step::Await("switch"),
            say(SWITCHED),
            Step::Hear(b"eager"),
            say("seen"),
        ];
        let mut session = ask(&scene, form, steps);
        let connection = scene.origin(form).await_asked("/ws").connection;
        session.send(b"eager").unwrap();
        // Time in which a byte that is let through would arrive; that none does is the claim.
        thread::sleep(Duration::from_millis(200));
        let heard = scene.origin(form).heard_text(connection);
        assert!(heard.ends_with("\r\n\r\n"), "{form:?} {heard:?}");
        scene.origin(form).open("switch");
        assert_eq!(session.head().unwrap().status().unwrap(), 101, "{form:?}");
        assert_eq!(session.hear(4, SOON), b"seen", "{form:?}");
    }
}

#[test]
fn an_upgrade_that_the_origin_declines_is_an_ordinary_answer() {
    for form in FORMS {
        let scene = Scene::new();
        let said = say("HTTP/1.1 426 Upgrade Required\r\nContent-Length: 2\r\n\r\nno");
        let mut session = ask(&scene, form, vec![said]);
        let answer = session.answer().unwrap();
        assert_eq!(
            (answer.status(), answer.text().as_str()),
            (426, "no"),
            "{form:?}"
        );
        assert_eq!(scene.out_of_step(form, &mut session), None, "{form:?}");
    }
}

#[test]
fn either_side_of_a_websocket_may_end_first() {
    for form in FORMS {
        let scene = Scene::new();
        let mut session = ask(&scene, form, vec![say(SWITCHED), Step::Hear(b"never")]);
        assert_eq!(session.head().unwrap().status().unwrap(), 101, "{form:?}");
        session.socket().shutdown(Shutdown::Both).unwrap();
        scene.origin(form).await_end(0);
        let mut session = ask(&scene, form, vec![say(SWITCHED), Step::Close]);
        assert_eq!(session.head().unwrap().status().unwrap(), 101, "{form:?}");
        assert_eq!(session.rest().unwrap_or_default(), b"", "{form:?}");
    }
}

#[test]
fn a_101_that_nobody_asked_for_is_502() {
    for form in FORMS {
        let scene = Scene::new();
        scene.origin(form).script(
            "/unasked",
            vec![
                say(SWITCHED),
                say("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad"),
            ],
        );
        let mut session = scene.open(form);
        scene.send(
            form,
            &mut session,
            "GET {at}/unasked HTTP/1.1\r\nHost: {host}\r\n\r\n",
        );
        assert_eq!(session.answer().unwrap().status(), 502, "{form:?}");
        assert_eq!(scene.out_of_step(form, &mut session), None, "{form:?}");
    }
}

/// RFC 9110 section 7.8.
#[test]
fn an_upgrade_that_http_1_0_asks_for_is_not_heard() {
    for form in FORMS {
        let scene = Scene::new();
        let said = say("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
        scene.origin(form).script("/old", vec![said]);
        let mut session = scene.open(form);
        scene.send(
            form,
            &mut session,
            "GET {at}/old HTTP/1.0\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        );
        assert_eq!(session.answer().unwrap().status(), 200, "{form:?}");
        let connection = scene.origin(form).await_asked("/old").connection;
        let arrived = scene.origin(form).heard_text(connection);
        assert!(!arrived.contains("pgrade"), "{form:?} {arrived}");
    }
}

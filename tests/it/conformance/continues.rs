//! `Expect: 100-continue` (RFC 9110 section 10.1.1): the body comes whole whether or not the client waits for the 100,
//! whether the request waits in the queue or is past it, and whatever the origin thinks of it.

use std::{thread, time::Duration};

use super::{FORMS, Form, SOON, Scene};
use crate::bed::{
    await_until::await_until,
    scripted::{Step, say},
};

const HEAD: &str =
    "PUT {at}/put HTTP/1.1\r\nHost: {host}\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n";
const CONTINUE: &str = "HTTP/1.1 100 Continue\r\n\r\n";
const FINAL: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nvia: 1.1 paceline\r\n\r\nok";

fn swallows(scene: &Scene, form: Form) {
    scene.origin(form).script(
        "/put",
        vec![
            Step::Hear(b"hello"),
            say("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"),
        ],
    );
}

fn expect_one_whole_request(scene: &Scene, form: Form) {
    let arrived = scene.origin(form).asked("/put");
    assert_eq!(arrived.len(), 1, "{form:?}");
    assert!(
        arrived[0].text.ends_with("\r\n\r\nhello"),
        "{form:?} {arrived:?}"
    );
}

#[test]
fn a_client_that_waits_for_the_100_gets_it_and_then_its_answer() {
    for form in FORMS {
        let scene = Scene::new();
        swallows(&scene, form);
        let mut session = scene.open(form);
        scene.send(form, &mut session, HEAD);
        let heard = session.hear(CONTINUE.len(), SOON);
        assert_eq!(String::from_utf8_lossy(&heard), CONTINUE, "{form:?}");
        session.send(b"hello").unwrap();
        let heard = session.hear(FINAL.len(), SOON);
        assert_eq!(String::from_utf8_lossy(&heard), FINAL, "{form:?}");
        expect_one_whole_request(&scene, form);
        assert_eq!(scene.out_of_step(form, &mut session), None, "{form:?}");
    }
}

#[test]
fn a_client_that_sends_its_body_at_once_gets_its_answer_after_at_most_one_100() {
    for form in FORMS {
        let scene = Scene::new();
        swallows(&scene, form);
        let mut session = scene.open(form);
        scene.send(form, &mut session, &format!("{HEAD}hello"));
        let mut head = session.head().unwrap();
        if head.status().unwrap() == 100 {
            head = session.head().unwrap();
        }
        assert_eq!(head.status().unwrap(), 200, "{form:?} {head:?}");
        assert_eq!(session.hear(2, SOON), b"ok", "{form:?}");
        expect_one_whole_request(&scene, form);
        assert_eq!(scene.out_of_step(form, &mut session), None, "{form:?}");
    }
}

#[test]
fn a_client_that_tires_of_waiting_in_the_queue_and_sends_its_body_gets_its_answer() {
    for form in FORMS {
        // One slot a second: the second request waits for its own.
        let scene = Scene::with("1.0", |recipe| recipe);
        swallows(&scene, form);
        let mut first = scene.open(form);
        assert_eq!(scene.out_of_step(form, &mut first), None, "{form:?}");
        let mut session = scene.open(form);
        scene.send(form, &mut session, HEAD);
        await_until("it queues", SOON, || {
            (scene.replica.scrape().sum("paceline_queue_depth", &[])? >= 1.0).then_some(())
        });
        // The client's patience, not a wait for a state: curl waits a second for the 100, this one less.
        thread::sleep(Duration::from_millis(200));
        session.send(b"hello").unwrap();
        let mut head = session.head().unwrap();
        if head.status().unwrap() == 100 {
            head = session.head().unwrap();
        }
        assert_eq!(head.status().unwrap(), 200, "{form:?} {head:?}");
        assert_eq!(session.hear(2, SOON), b"ok", "{form:?}");
        expect_one_whole_request(&scene, form);
    }
}

#[test]
fn an_origin_that_answers_without_a_100_is_heard() {
    for form in FORMS {
        for ending in [vec![], vec![Step::Close]] {
            let scene = Scene::new();
            let closes = !ending.is_empty();
            let mut steps = vec![say(
                "HTTP/1.1 417 Expectation Failed\r\nContent-Length: 2\r\n\r\nno",
            )];
            steps.extend(ending);
            scene.origin(form).script("/put", steps);
            let mut session = scene.open(form);
            scene.send(form, &mut session, HEAD);
            let mut head = session.head().unwrap();
            if head.status().unwrap() == 100 {
                head = session.head().unwrap();
            }
            let context = format!("{form:?}, origin closes: {closes}, {head:?}");
            assert_eq!(head.status().unwrap(), 417, "{context}");
            assert_eq!(session.hear(2, SOON), b"no", "{context}");
        }
    }
}

#[test]
fn an_origin_that_says_100_itself_is_not_heard_twice() {
    for form in FORMS {
        let scene = Scene::new();
        scene.origin(form).script(
            "/put",
            vec![
                say("HTTP/1.1 100 Continue\r\n\r\n"),
                Step::Hear(b"hello"),
                say("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"),
            ],
        );
        let mut session = scene.open(form);
        scene.send(form, &mut session, HEAD);
        let heard = session.hear(CONTINUE.len(), SOON);
        assert_eq!(String::from_utf8_lossy(&heard), CONTINUE, "{form:?}");
        session.send(b"hello").unwrap();
        let heard = session.hear(FINAL.len(), SOON);
        assert_eq!(String::from_utf8_lossy(&heard), FINAL, "{form:?}");
        assert_eq!(scene.out_of_step(form, &mut session), None, "{form:?}");
    }
}

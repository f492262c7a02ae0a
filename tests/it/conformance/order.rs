//! Order on one connection: pipelined requests, and answers that come before their request has been sent whole.

use std::time::Duration;

use super::{FORMS, Form, SOON, Scene};
use crate::bed::scripted::{Step, say};

fn answers(scene: &Scene, form: Form, path: &str) {
    let text = format!(
        "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{path}",
        path.len()
    );
    scene.origin(form).script(path, vec![say(text)]);
}

#[test]
fn pipelined_requests_are_paced_one_by_one_and_answered_in_order() {
    for form in FORMS {
        let scene = Scene::with("10.0", |recipe| recipe);
        let paths = ["/p0", "/p1", "/p2", "/p3"];
        let mut burst = String::new();
        for path in paths {
            answers(&scene, form, path);
            burst += &format!("GET {{at}}{path} HTTP/1.1\r\nHost: {{host}}\r\n\r\n");
        }
        let mut session = scene.open(form);
        scene.send(form, &mut session, &burst);
        for path in paths {
            assert_eq!(session.answer().unwrap().text(), path, "{form:?}");
        }
        let exchanges = scene.origin(form).exchanges();
        let order: Vec<&str> = exchanges.iter().map(|one| one.target()).collect();
        assert_eq!(order, paths, "{form:?}");
        for pair in exchanges.windows(2) {
            let gap = pair[1].at - pair[0].at;
            assert!(
                gap >= Duration::from_millis(60),
                "{form:?}: {gap:?} at 10/s"
            );
        }
    }
}

#[test]
fn a_connection_on_which_nothing_was_asked_for_a_while_goes_on_as_before() {
    // Longer than it takes to let go of the codec.
    let rest = Duration::from_millis(300);
    for form in FORMS {
        let scene = Scene::new();
        for path in ["/p0", "/p1", "/p2", "/p3"] {
            answers(&scene, form, path);
        }
        let mut session = scene.open(form);
        let asked = |path: &str| format!("GET {{at}}{path} HTTP/1.1\r\nHost: {{host}}\r\n\r\n");
        scene.send(form, &mut session, &asked("/p0"));
        assert_eq!(session.answer().unwrap().text(), "/p0", "{form:?}");

        assert_eq!(session.hear(1, rest), b"", "{form:?}");
        scene.send(form, &mut session, &(asked("/p1") + &asked("/p2")));
        assert_eq!(session.answer().unwrap().text(), "/p1", "{form:?}");
        assert_eq!(session.answer().unwrap().text(), "/p2", "{form:?}");

        assert_eq!(session.hear(1, rest), b"", "{form:?}");
        let whole = asked("/p3");
        let (begin, end) = whole.split_at(whole.len() - 3);
        scene.send(form, &mut session, begin);
        assert_eq!(session.hear(1, rest), b"", "{form:?}");
        scene.send(form, &mut session, end);
        assert_eq!(session.answer().unwrap().text(), "/p3", "{form:?}");
        assert_eq!(scene.out_of_step(form, &mut session), None, "{form:?}");
    }
}

#[test]
fn pipelined_requests_with_bodies_keep_them_apart() {
    for form in FORMS {
        let scene = Scene::new();
        let said = say("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nfirst");
        scene
            .origin(form)
            .script("/one", vec![Step::Hear(b"GET /x HTTP/1.1\r\n\r\n"), said]);
        let said = say("HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecond");
        scene
            .origin(form)
            .script("/two", vec![Step::Hear(b"0\r\n\r\n"), said]);
        let mut session = scene.open(form);
        // The first body looks like a request.
        scene.send(
            form,
            &mut session,
            "POST {at}/one HTTP/1.1\r\nHost: {host}\r\nContent-Length: 19\r\n\r\nGET /x HTTP/1.1\r\n\r\n\
             POST {at}/two HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
        );
        assert_eq!(session.answer().unwrap().text(), "first", "{form:?}");
        assert_eq!(session.answer().unwrap().text(), "second", "{form:?}");
        assert_eq!(scene.origin(form).exchanges().len(), 2, "{form:?}");
        assert_eq!(scene.out_of_step(form, &mut session), None, "{form:?}");
    }
}

#[test]
fn an_answer_that_comes_while_the_body_still_flows_is_passed_on_at_once() {
    for form in FORMS {
        let scene = Scene::new();
        scene.origin(form).script(
            "/early",
            vec![
                Step::Hear(b"half"),
                say("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nearly"),
                Step::Hear(b"rest"),
            ],
        );
        let mut session = scene.open(form);
        scene.send(
            form,
            &mut session,
            "POST {at}/early HTTP/1.1\r\nHost: {host}\r\nContent-Length: 8\r\n\r\nhalf",
        );
        let answer = session.answer().unwrap();
        assert_eq!(
            (answer.status(), answer.text().as_str()),
            (200, "early"),
            "{form:?}"
        );
        session.send(b"rest").unwrap();
        // Whether the connection goes on or ends is the proxy's choice (RFC 9112 section 9.5); it must not answer the
        // next request with anything but its own answer.
        if let Some(fault) = scene.out_of_step(form, &mut session) {
            assert!(
                fault.contains("gone")
                    || fault.contains("closed after \\\"\\\"")
                    || fault.contains("reset"),
                "{form:?}: {fault}"
            );
        }
    }
}

#[test]
fn an_answer_that_refuses_a_body_and_closes_reaches_a_client_that_still_sends() {
    for form in FORMS {
        let scene = Scene::new();
        let said =
            "HTTP/1.1 413 Content Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nbig";
        scene
            .origin(form)
            .script("/big", vec![say(said), Step::Close]);
        let mut session = scene.open(form);
        scene.send(
            form,
            &mut session,
            "POST {at}/big HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1000000\r\n\r\n",
        );
        session.send(&[b'x'; 10_000]).unwrap();
        let answer = session.answer().unwrap();
        assert_eq!(
            (answer.status(), answer.text().as_str()),
            (413, "big"),
            "{form:?}"
        );
    }
}

#[test]
fn the_first_bytes_of_a_body_do_not_wait_for_the_last() {
    for form in FORMS {
        let scene = Scene::new();
        scene.origin(form).script(
            "/drip",
            vec![
                say("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nfirst"),
                Step::Await("rest"),
                say("other"),
            ],
        );
        let mut session = scene.open(form);
        scene.send(
            form,
            &mut session,
            "GET {at}/drip HTTP/1.1\r\nHost: {host}\r\n\r\n",
        );
        assert_eq!(session.head().unwrap().status().unwrap(), 200);
        assert_eq!(session.hear(5, SOON), b"first", "{form:?}");
        scene.origin(form).open("rest");
        assert_eq!(session.hear(5, SOON), b"other", "{form:?}");
    }
}

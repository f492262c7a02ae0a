//! Clients that leave, and connections that go stale. What is queued for a client that has gone is never sent; what is
//! under way for it is ended, and its connection not used again; an idle connection that the origin has closed fails
//! and doubles nothing.

use std::{
    io,
    net::Shutdown,
    time::{Duration, Instant},
};

use rustix::process::Signal;

use crate::bed::{
    await_until::await_until,
    client::Session,
    origin::Origin,
    recipe::{Recipe, Site},
    replica::Replica,
    scripted::{Scripted, Step, say},
};

const PLAIN: &str = "plain.test";
const SECURE: &str = "lh3.googleusercontent.com";
/// How soon a client that has gone must be noticed.
const NOTICED: Duration = Duration::from_secs(1);

/// A replica at one request in two seconds, so that the second request of a test queues.
struct Scene {
    replica: Replica,
    plain: Scripted,
    secure: Scripted,
    site: Site,
}

/// In clear text in absolute form, or in an intercepted tunnel.
#[derive(Clone, Copy, Debug)]
enum Form {
    Plain,
    Intercepted,
}

const FORMS: [Form; 2] = [Form::Plain, Form::Intercepted];

/// How a client goes.
#[derive(Clone, Copy, Debug)]
enum Leaving {
    /// Closes both ways at once.
    Fin,
    /// Resets, as a process that is killed with unread bytes.
    Reset,
}

const LEAVINGS: [Leaving; 2] = [Leaving::Fin, Leaving::Reset];

impl Scene {
    fn new(rate: &str) -> Scene {
        let (plain, secure, site) = (Scripted::plain(PLAIN), Scripted::tls(SECURE), Site::new());
        for origin in [&plain, &secure] {
            let ok = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
            for target in ["/first", "/next", "/other"] {
                origin.script(target, vec![say(ok)]);
            }
        }
        let recipe = Recipe::new()
            .destination("plain", &[PLAIN], rate)
            .destination("secure", &[SECURE], rate)
            .scripted(&plain)
            .scripted(&secure);
        Scene {
            replica: Replica::start(&site, "r0", &recipe),
            plain,
            secure,
            site,
        }
    }

    fn origin(&self, form: Form) -> &Scripted {
        match form {
            Form::Plain => &self.plain,
            Form::Intercepted => &self.secure,
        }
    }

    fn open(&self, form: Form) -> Session {
        match form {
            Form::Plain => self.replica.session(PLAIN),
            Form::Intercepted => self.replica.browser(&self.site, SECURE).tunnel().unwrap(),
        }
    }

    fn target(&self, form: Form, path: &str) -> String {
        match form {
            Form::Plain => format!("http://{PLAIN}{path}"),
            Form::Intercepted => path.to_owned(),
        }
    }

    fn get(&self, form: Form, session: &mut Session, path: &str) -> io::Result<u16> {
        Ok(session.get(&self.target(form, path))?.status())
    }

    fn depth(&self) -> f64 {
        self.replica
            .scrape()
            .sum("paceline_queue_depth", &[])
            .unwrap_or(0.0)
    }

    fn await_depth(&self, what: &str, depth: f64, patience: Duration) {
        await_until(what, patience, || (self.depth() == depth).then_some(()));
    }
}

fn leave(session: Session, leaving: Leaving) {
    match leaving {
        Leaving::Fin => session.socket().shutdown(Shutdown::Both).unwrap(),
        Leaving::Reset => socket2::SockRef::from(session.socket())
            .set_linger(Some(Duration::ZERO))
            .unwrap(),
    }
}

/// A client asks, queues, leaves; the queue must be empty in a second and the origin must never hear of it, although
/// the slot it waited for comes and is used by another.
fn is_never_sent(what: &str, behind_the_head: &[u8], fields: &[&str]) {
    let mut faults = Vec::new();
    for form in FORMS {
        for leaving in LEAVINGS {
            let scene = Scene::new("0.5");
            let mut stayer = scene.open(form);
            assert_eq!(scene.get(form, &mut stayer, "/first").unwrap(), 200);
            let mut leaver = scene.open(form);
            leaver
                .ask("POST", &scene.target(form, "/gone"), fields)
                .unwrap();
            leaver.send(behind_the_head).unwrap();
            scene.await_depth("the leaver queues", 1.0, Duration::from_secs(2));
            leave(leaver, leaving);
            let left = Instant::now();
            while scene.depth() > 0.0 && left.elapsed() < NOTICED {
                std::thread::sleep(Duration::from_millis(10));
            }
            let noticed = scene.depth() == 0.0;
            // Served in the slot that the leaver waited for.
            assert_eq!(scene.get(form, &mut stayer, "/next").unwrap(), 200);
            let sent = scene.origin(form).asked("/gone").len();
            if !noticed || sent > 0 {
                faults.push(format!(
                    "{form:?}, {leaving:?}: noticed within a second: {noticed}, sent {sent} times"
                ));
            }
        }
    }
    assert!(faults.is_empty(), "{what}: {faults:#?}");
}

#[test]
fn a_queued_request_without_a_body_is_never_sent_for_a_client_that_has_gone() {
    is_never_sent("no body", b"", &["Content-Length: 0"]);
}

#[test]
fn a_queued_request_whose_body_lies_unread_is_never_sent_for_a_client_that_has_gone() {
    is_never_sent("body unread", &[b'x'; 5_000], &["Content-Length: 5000"]);
}

#[test]
fn a_queued_request_whose_body_has_only_begun_to_come_is_never_sent_for_a_client_that_has_gone() {
    // As much as the kernel takes from a client for a program that does not read: behind more than that a FIN does not
    // arrive, and nobody could notice it.
    is_never_sent(
        "large body unread",
        &[b'x'; 40_000],
        &["Content-Length: 10000000"],
    );
}

#[test]
fn a_queued_request_with_others_pipelined_behind_it_is_never_sent_for_a_client_that_has_gone() {
    is_never_sent(
        "pipelined",
        b"GET /other HTTP/1.1\r\nHost: lh3.googleusercontent.com\r\n\r\n",
        &["Content-Length: 0"],
    );
}

#[test]
fn an_exchange_under_way_ends_with_its_client_and_its_connection_is_not_used_again() {
    let mut faults = Vec::new();
    let stages: [(&str, Vec<Step>); 2] = [
        ("before the answer", vec![Step::Await("never")]),
        (
            "in the answer's body",
            vec![
                say("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"),
                Step::Await("never"),
            ],
        ),
    ];
    for form in FORMS {
        for leaving in LEAVINGS {
            for (stage, steps) in &stages {
                let scene = Scene::new("50.0");
                let origin = scene.origin(form);
                origin.script("/under-way", steps.clone());
                let mut leaver = scene.open(form);
                leaver
                    .ask("GET", &scene.target(form, "/under-way"), &[])
                    .unwrap();
                let connection = origin.await_asked("/under-way").connection;
                if *stage == "in the answer's body" {
                    assert_eq!(leaver.head().unwrap().status().unwrap(), 200);
                }
                let left = Instant::now();
                leave(leaver, leaving);
                while origin.heard()[connection].ended.is_none() && left.elapsed() < NOTICED * 2 {
                    std::thread::sleep(Duration::from_millis(10));
                }
                let took = origin.heard()[connection].ended.map(|at| at - left);
                if took.is_none_or(|took| took > NOTICED) {
                    faults.push(format!(
                        "{form:?}, {leaving:?}, {stage}: ended after {took:?}"
                    ));
                }
                let mut other = scene.open(form);
                assert_eq!(scene.get(form, &mut other, "/next").unwrap(), 200);
                if origin.asked("/next")[0].connection == connection {
                    faults.push(format!("{form:?}, {leaving:?}, {stage}: used again"));
                }
            }
        }
    }
    assert!(faults.is_empty(), "{faults:#?}");
}

#[test]
fn a_client_that_takes_nothing_for_a_minute_is_given_up_and_one_that_is_slow_is_not() {
    const LENGTH: usize = 64 * 1024 * 1024;
    let (secure, plain, site) = (Origin::tls(&[SECURE]), Origin::plain(&[PLAIN]), Site::new());
    let recipe = Recipe::new()
        .destination("secure", &[SECURE], "50.0")
        .origin(&secure)
        .origin(&plain);
    let replica = Replica::start(&site, "r0", &recipe);
    let browser = replica.browser(&site, SECURE);
    let began = Instant::now();
    let [mut standing, mut slow] = [0; 2].map(|_| browser.tunnel().unwrap());
    for session in [&mut standing, &mut slow] {
        session.ask("GET", &format!("/b/{LENGTH}"), &[]).unwrap();
    }
    // In a tunnel that nobody looks into, it is the two ends' own affair.
    let mut tunnelled = replica.session(PLAIN);
    tunnelled.connect(&format!("{PLAIN}:80")).unwrap();
    tunnelled.ask("GET", &format!("/b/{LENGTH}"), &[]).unwrap();

    let given_up = || {
        let scrape = replica.scrape();
        scrape.sum("paceline_requests_total", &["outcome=\"client_gone\""]) == Some(1.0)
    };
    // Too slow to make as much room in a minute as the kernel wants to have before it lets anybody write.
    while !given_up() && began.elapsed() < Duration::from_secs(90) {
        assert_eq!(
            slow.hear(16 * 1024, Duration::from_secs(5)).len(),
            16 * 1024
        );
        std::thread::sleep(Duration::from_secs(1));
    }
    let took = began.elapsed();
    assert!(
        (Duration::from_secs(59)..Duration::from_secs(80)).contains(&took),
        "given up after {took:?}"
    );
    let patience = Duration::from_secs(30);
    assert!(standing.hear(LENGTH, patience).len() < LENGTH);
    for (who, mut session) in [("slow", slow), ("tunnelled", tunnelled)] {
        let heard = session.hear(LENGTH / 2, patience).len();
        assert_eq!(heard, LENGTH / 2, "{who}");
    }
}

#[test]
fn an_upload_that_its_client_breaks_off_is_cut_and_not_completed() {
    for form in FORMS {
        for leaving in LEAVINGS {
            let scene = Scene::new("50.0");
            let origin = scene.origin(form);
            origin.script("/up", vec![Step::Hear(b"never")]);
            let mut leaver = scene.open(form);
            leaver
                .ask(
                    "POST",
                    &scene.target(form, "/up"),
                    &["Transfer-Encoding: chunked"],
                )
                .unwrap();
            leaver.send(b"4\r\nhalf\r\n").unwrap();
            let connection = origin.await_asked("/up").connection;
            await_until("half of it arrives", Duration::from_secs(5), || {
                origin
                    .heard_text(connection)
                    .ends_with("half\r\n")
                    .then_some(())
            });
            leave(leaver, leaving);
            origin.await_end(connection);
            let heard = origin.heard_text(connection);
            assert!(
                heard.ends_with("half\r\n"),
                "{form:?} {leaving:?} {heard:?}"
            );
        }
    }
}

#[test]
fn idle_connections_that_the_origin_has_closed_fail_and_double_nothing() {
    for form in FORMS {
        for ending in [Step::Close, Step::Reset] {
            let scene = Scene::new("1000.0");
            let origin = scene.origin(form);
            // Answered, and then closed without a word.
            let said = say("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
            origin.script("/stale", vec![said, ending]);
            let mut session = scene.open(form);
            for n in 0..30 {
                let status = session
                    .get(&scene.target(form, "/stale"))
                    .unwrap_or_else(|fault| panic!("{form:?}, fetch {n}: {fault}"))
                    .status();
                // The close may cross the next request on its way: written, it must not be sent again, and says so.
                assert!(status == 200 || status == 502, "{form:?}: {status}");
                // Long enough that the close has come before the next request, most times.
                std::thread::sleep(Duration::from_millis(5));
            }
            assert!(
                origin.asked("/stale").len() <= 30,
                "{form:?}: a request was doubled"
            );
        }
    }
}

#[test]
fn an_idle_connection_closed_well_before_the_next_request_is_never_noticed_by_a_client() {
    for form in FORMS {
        for ending in [Step::Close, Step::Reset] {
            let scene = Scene::new("1000.0");
            let origin = scene.origin(form);
            let said = say("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
            origin.script("/stale", vec![said, Step::Await("close"), ending]);
            let mut session = scene.open(form);
            assert_eq!(scene.get(form, &mut session, "/stale").unwrap(), 200);
            origin.open("close");
            // What the kernel needs to tell the proxy of the close, which nothing outside the proxy shows.
            std::thread::sleep(Duration::from_millis(100));
            assert_eq!(scene.get(form, &mut session, "/next").unwrap(), 200);
            assert_eq!(origin.asked("/next").len(), 1);
        }
    }
}

#[test]
fn a_drain_announces_the_close_with_the_last_answer() {
    for form in FORMS {
        let mut scene = Scene::new("50.0");
        let origin = scene.origin(form);
        origin.script(
            "/last",
            vec![
                Step::Await("drained"),
                say("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"),
            ],
        );
        let mut session = scene.open(form);
        assert_eq!(scene.get(form, &mut session, "/first").unwrap(), 200);
        session
            .ask("GET", &scene.target(form, "/last"), &[])
            .unwrap();
        origin.await_asked("/last");
        scene.replica.signal(Signal::TERM);
        await_until("/readyz says no", Duration::from_secs(5), || {
            (scene.replica.readiness().ok()? == 503).then_some(())
        });
        scene.origin(form).open("drained");
        let answer = session.answer().unwrap();
        assert_eq!(
            (answer.status(), answer.text().as_str()),
            (200, "ok"),
            "{form:?}"
        );
        assert_eq!(answer.field("connection"), Some("close"), "{form:?}");
        assert_eq!(session.rest().unwrap_or_default(), b"", "{form:?}");
        assert_eq!(
            scene.replica.await_end(Duration::from_secs(5)).code(),
            Some(0)
        );
    }
}

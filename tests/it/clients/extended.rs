//! Clients that `tests/run --all` installs and builds: Go, Java, Ruby, PHP, and Chromium, which can show a page only.

use std::time::Duration;

use super::scene::{HINTS, HOST, Program, Scene};
use crate::bed::{scripted::say, worker::extended_folder};

fn script(name: &str) -> String {
    format!("{}/tests/extended/{name}", env!("CARGO_MANIFEST_DIR"))
}

fn built() -> String {
    extended_folder().to_string_lossy().into_owned()
}

held_to_all_claims! {
    go: Program {
        command: || vec![format!("{}/client_go", built())],
        env: &[],
        keeps_its_tunnel: true,
        shows_fields: true,
    };
    java: Program {
        command: || vec![script("client_java"), built()],
        env: &[],
        keeps_its_tunnel: true,
        shows_fields: true,
    };
    ruby: Program {
        command: || vec!["ruby".to_owned(), script("client.rb")],
        env: &[],
        keeps_its_tunnel: true,
        shows_fields: true,
    };
    php: Program {
        command: || vec![script("client_php")],
        env: &[],
        keeps_its_tunnel: true,
        shows_fields: true,
    };
}

const CHROMIUM: Program = Program {
    command: || vec![script("client_chromium")],
    env: &[],
    keeps_its_tunnel: false,
    shows_fields: false,
};

#[test]
fn chromium_shows_a_page_and_what_it_loads_each_in_a_slot_of_its_own() {
    let scene = Scene::new();
    let page = "<title>start</title><script>Promise.all(['/a','/b','/c'].map(u => fetch(u).then(r => r.text())))\
        .then(t => { document.title = t.join('+') })</script>";
    let answer = |body: &str, kind: &str| {
        say(format!(
            "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        ))
    };
    scene.hints.script("/page", vec![answer(page, "text/html")]);
    for (path, body) in [("/a", "one"), ("/b", "two"), ("/c", "three")] {
        let hint = say("HTTP/1.1 103 Early Hints\r\nLink: </x>; rel=preload\r\n\r\n");
        scene
            .hints
            .script(path, vec![hint, answer(body, "text/plain")]);
    }
    let url = format!("https://{HINTS}/page");
    let mut chromium = scene.start(&CHROMIUM, &[&url]);
    let end = chromium.await_end(Duration::from_secs(40));
    let shown = chromium.stdout();
    assert!(end.success(), "{}", chromium.stderr());
    assert!(
        shown.contains("<title>one+two+three</title>"),
        "{shown}\n{}",
        chromium.stderr()
    );
    let exchanges = scene.hints.exchanges();
    for pair in exchanges.windows(2) {
        let gap = pair[1].at - pair[0].at;
        assert!(gap >= Duration::from_millis(25), "{gap:?} at 20/s");
    }
}

#[test]
fn chromium_shows_nothing_of_a_site_without_the_ca_and_makes_few_connections() {
    let scene = Scene::new();
    let url = format!("https://{HOST}/b/1?id=distrust");
    let mut chromium = scene.start_without_trust(&CHROMIUM, &[&url]);
    chromium.await_end(Duration::from_secs(40));
    assert_eq!(scene.origin.timeline("").count(), 0);
    assert!(scene.link.accepted() < 10, "{}", scene.link.accepted());
}

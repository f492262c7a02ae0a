//! Each refusal of the contract: its status, its `Proxy-Status` (RFC 9209), and a line that says what to do.

use std::time::{Duration, Instant};

use crate::bed::{
    client::{Answer, Browser, Session},
    free_address,
    origin::{Manner, Origin},
    recipe::{Recipe, Site},
    replica::Replica,
};

const HOST: &str = "lh3.googleusercontent.com";
const PLAIN: &str = "plain.test";

fn recipe() -> Recipe {
    Recipe::new().destination("google_image", &["*.googleusercontent.com", PLAIN], "50.0")
}

/// Checks what all refusals have in common, and the two things in which they differ.
fn expect(answer: &Answer, status: u16, error: &str) {
    let context = format!("{:?} {}", answer.head, answer.text());
    assert_eq!(answer.status(), status, "{context}");
    let proxy_status = answer
        .field("proxy-status")
        .unwrap_or_else(|| panic!("no Proxy-Status: {context}"));
    assert!(proxy_status.starts_with("paceline; "), "{context}");
    assert!(
        proxy_status.contains(&format!("error={error}")),
        "expected {error}: {context}"
    );
    let text = answer.text();
    assert!(
        text.trim_end().lines().count() == 1 && text.len() > 10,
        "one line that says what to do: {context}"
    );
}

/// A `CONNECT` that must be refused, with the cause in the reason phrase, all that most clients show.
fn expect_connect(replica: &Replica, authority: &str, status: u16, error: &str) {
    let answer = replica.session(authority).connect(authority).unwrap();
    expect(&answer, status, error);
    let phrase = answer
        .head
        .start_line
        .splitn(3, ' ')
        .nth(2)
        .unwrap_or_default()
        .to_owned();
    assert!(
        phrase.split(' ').count() > 2,
        "the phrase {phrase:?} does not say the cause"
    );
}

#[test]
fn a_port_outside_connect_ports_is_403() {
    let site = Site::new();
    let replica = Replica::start(&site, "r0", &recipe());
    expect_connect(&replica, &format!("{HOST}:25"), 403, "http_request_denied");
    expect_connect(&replica, "elsewhere.test:25", 403, "http_request_denied");
}

#[test]
fn an_ungoverned_host_is_403_when_denied() {
    let site = Site::new();
    let replica = Replica::start(&site, "r0", &recipe().proxy("ungoverned = \"deny\""));
    expect_connect(&replica, "elsewhere.test:443", 403, "http_request_denied");
    let absolute = replica
        .session("elsewhere.test")
        .get("http://elsewhere.test/")
        .unwrap();
    expect(&absolute, 403, "http_request_denied");
}

#[test]
fn private_loopback_and_metadata_addresses_are_403() {
    let (site, origin) = (Site::new(), Origin::plain(&[PLAIN]));
    let ports = format!("connect_ports = [80, 443, {}]", origin.address().port());
    let replica = Replica::start(&site, "r0", &recipe().proxy(&ports));
    let reachable = origin.address().to_string();
    for authority in [
        reachable.as_str(),
        "10.0.0.1:443",
        "169.254.169.254:80",
        "[::1]:443",
        "[::ffff:127.0.0.1]:443",
    ] {
        expect_connect(&replica, authority, 403, "destination_ip_prohibited");
    }
    let answer = replica
        .session(&reachable)
        .get(&format!("http://{reachable}/b/1"))
        .unwrap();
    expect(&answer, 403, "destination_ip_prohibited");
    assert_eq!(
        origin.connections(),
        0,
        "somebody connected to a prohibited address"
    );
}

#[test]
fn a_url_on_a_listed_address_may_name_any_port_and_a_tunnel_may_not() {
    let (site, origin) = (Site::new(), Origin::plain(&[PLAIN]));
    let listed = "allow_upstreams = [\"127.0.0.0/8\"]";
    let replica = Replica::start(&site, "r0", &recipe().proxy(listed));
    for host in ["127.0.0.1", "localhost"] {
        let there = format!("{host}:{}", origin.address().port());
        let url = format!("http://{there}/b/1");
        assert_eq!(replica.session(&there).get(&url).unwrap().status(), 200);
        expect_connect(&replica, &there, 403, "http_request_denied");
    }
}

#[test]
fn a_client_outside_allow_clients_is_403() {
    let site = Site::new();
    let replica = Replica::start(
        &site,
        "r0",
        &recipe().proxy("allow_clients = [\"10.0.0.0/8\"]"),
    );
    expect_connect(&replica, &format!("{HOST}:443"), 403, "http_request_denied");
}

#[test]
fn missing_or_wrong_credentials_are_407_with_a_challenge() {
    let (site, origin) = (Site::new(), Origin::plain(&[PLAIN]));
    // SHA-256 of "secret"; "d29ya2VyOnNlY3JldA==" is worker:secret.
    let user = "[proxy.auth.users]\n\
        worker = \"sha256:2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b\"";
    let replica = Replica::start(&site, "r0", &recipe().proxy(user).origin(&origin));
    let url = format!("http://{PLAIN}/b/3");
    let get = |fields: &[&str]| replica.session(PLAIN).get_with(&url, fields).unwrap();
    for fields in [
        &[][..],
        &["Proxy-Authorization: Basic d29ya2VyOndyb25n"],
        &["Proxy-Authorization: Basic ###"],
    ] {
        let answer = get(fields);
        assert_eq!(answer.status(), 407, "{fields:?}");
        assert!(
            answer
                .field("proxy-authenticate")
                .is_some_and(|scheme| scheme.starts_with("Basic"))
        );
    }
    assert_eq!(origin.timeline("").count(), 0);
    assert_eq!(
        get(&["Proxy-Authorization: Basic d29ya2VyOnNlY3JldA=="]).status(),
        200
    );
    assert_eq!(
        origin.arrivals()[0].field("proxy-authorization"),
        None,
        "credentials for us reached the origin"
    );
}

#[test]
fn a_wait_past_the_deadline_has_the_configured_refusal_status() {
    for (line, status) in [("", 503), ("refusal_status = 429", 429)] {
        let (site, origin) = (Site::new(), Origin::plain(&[PLAIN]));
        let recipe = Recipe::new()
            .destination("slow", &[PLAIN], "\"6/min\"")
            .proxy(line)
            .origin(&origin);
        let replica = Replica::start(&site, "r0", &recipe);
        let url = format!("http://{PLAIN}/b/3");
        assert_eq!(
            replica.session(PLAIN).get(&url).unwrap().status(),
            200,
            "the first slot is free"
        );
        let refused = replica
            .session(PLAIN)
            .get_with(&url, &["Paceline-Max-Wait: 2s"])
            .unwrap();
        expect(&refused, status, "connection_limit_reached");
        let seconds: u64 = refused
            .field("retry-after")
            .and_then(|value| value.parse().ok())
            .expect("Retry-After");
        assert!(
            (5..=10).contains(&seconds),
            "a slot every 10 s, 2 s of patience: come back in {seconds} s"
        );
    }
}

#[test]
fn upstream_failures_say_which_step_failed() {
    let (site, untrusted, silent) = (
        Site::new(),
        Origin::tls(&["a.googleusercontent.com"]),
        Origin::plain(&[PLAIN]),
    );
    silent.behave(Manner::Silent);
    let recipe = recipe()
        .resolve("a.googleusercontent.com:443", untrusted.address())
        .resolve("b.googleusercontent.com:443", free_address())
        .resolve("c.googleusercontent.com:443", silent.address())
        .destination("nowhere", &["*.invalid"], "50.0");
    let replica = Replica::start(&site, "r0", &recipe);
    let get = |host: &str| replica.browser(&site, host).get("/b/1").unwrap();
    expect(
        &get("a.googleusercontent.com"),
        502,
        "tls_certificate_error",
    );
    expect(&get("b.googleusercontent.com"), 502, "connection_refused");
    // RFC 6761 section 6.4: .invalid never resolves.
    let nowhere = replica
        .session("x.invalid")
        .get("http://x.invalid/")
        .unwrap();
    expect(&nowhere, 502, "dns_error");
    let asked = Instant::now();
    let mut tunnel = replica
        .browser(&site, "c.googleusercontent.com")
        .tunnel()
        .unwrap();
    let late = tunnel.get_with("/b/1", &["Paceline-Max-Wait: 1s"]).unwrap();
    assert_eq!(late.status(), 504, "{}", late.text());
    assert!(
        asked.elapsed() < Duration::from_secs(3),
        "took {:?}",
        asked.elapsed()
    );
}

#[test]
fn an_upstream_that_breaks_off_is_an_error_and_not_a_shorter_body() {
    let (site, origin) = (Site::new(), Origin::tls(&[HOST]));
    let replica = Replica::start(&site, "r0", &recipe().origin(&origin));
    let browser: Browser = replica.browser(&site, HOST);
    origin.behave(Manner::HalfBody);
    let mut tunnel = browser.tunnel().unwrap();
    let half = tunnel.get("/b/1?id=half");
    assert!(
        half.is_err(),
        "half a body was passed off as a whole one: {half:?}"
    );
    assert_eq!(origin.timeline("half").count(), 1);
    origin.behave(Manner::ResetMidHead);
    let answer = browser.get("/b/1?id=mid").unwrap();
    assert_eq!(answer.status(), 502, "{}", answer.text());
    assert_eq!(
        origin.duplicates(),
        Vec::<String>::new(),
        "a request that was written is not sent again"
    );
    origin.behave(Manner::CloseOnAccept);
    assert_eq!(browser.get("/b/1?id=closed").unwrap().status(), 502);
    origin.behave(Manner::CloseUnannounced);
    for n in 0..3 {
        assert_eq!(
            browser
                .get(&format!("/b/1?id=unannounced{n}"))
                .unwrap()
                .text(),
            "bye."
        );
    }
}

#[test]
fn an_authority_other_than_the_tunnels_is_421() {
    let (site, origin) = (Site::new(), Origin::tls(&[HOST]));
    let replica = Replica::start(&site, "r0", &recipe().origin(&origin));
    let mut tunnel = replica.browser(&site, HOST).tunnel().unwrap();
    tunnel
        .send(b"GET /b/1 HTTP/1.1\r\nHost: other.googleusercontent.com\r\n\r\n")
        .unwrap();
    expect(&tunnel.answer().unwrap(), 421, "http_request_error");
    let mut tunnel = replica.browser(&site, HOST).tunnel().unwrap();
    tunnel.send(b"GET https://other.googleusercontent.com/ HTTP/1.1\r\nHost: other.googleusercontent.com\r\n\r\n").unwrap();
    expect(&tunnel.answer().unwrap(), 421, "http_request_error");
    assert_eq!(origin.timeline("").count(), 0);
}

/// What is wrong with the answer to a request that must be answered with 400 and the end of the connection.
fn fault_in_refusal(replica: &Replica, request: &str) -> Option<String> {
    let mut session: Session = replica.session(PLAIN);
    session.send(request.as_bytes()).unwrap();
    match session.answer() {
        Err(fault) => return Some(format!("{request:?}: {fault}")),
        Ok(answer) if answer.status() != 400 => {
            return Some(format!("{request:?}: {:?}", answer.head));
        }
        Ok(_) => {}
    }
    match session.rest() {
        Ok(rest) if rest.is_empty() => None,
        rest => Some(format!(
            "the connection goes on after {request:?}: {rest:?}"
        )),
    }
}

#[test]
fn a_malformed_request_is_400_and_the_connection_ends() {
    let (site, origin) = (Site::new(), Origin::plain(&[PLAIN]));
    let replica = Replica::start(&site, "r0", &recipe().origin(&origin));
    let both = format!(
        "POST http://{PLAIN}/ HTTP/1.1\r\nHost: {PLAIN}\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    );
    let cases = [
        "no request at all\r\n\r\n".to_owned(),
        format!(
            "GET http://{PLAIN}/ HTTP/1.1\r\nHost: {PLAIN}\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"
        ),
        both,
        format!("CONNECT {PLAIN} HTTP/1.1\r\nHost: {PLAIN}\r\n\r\n"),
        "GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(),
    ];
    let faults: Vec<String> = cases
        .iter()
        .filter_map(|request| fault_in_refusal(&replica, request))
        .collect();
    assert!(faults.is_empty(), "{faults:#?}");
    assert_eq!(
        origin.timeline("").count(),
        0,
        "an ambiguous request reached the origin"
    );
}

#[test]
fn a_request_that_would_come_back_to_us_is_a_loop() {
    let (site, origin) = (Site::new(), Origin::plain(&[PLAIN]));
    let allow = "allow_upstreams = [\"127.0.0.0/8\"]";
    let replica = Replica::start(&site, "r0", &recipe().proxy(allow).origin(&origin));
    let own = replica.proxy().to_string();
    expect(
        &replica
            .session(&own)
            .get(&format!("http://{own}/"))
            .unwrap(),
        502,
        "proxy_loop_detected",
    );

    let url = format!("http://{PLAIN}/b/1");
    assert_eq!(replica.session(PLAIN).get(&url).unwrap().status(), 200);
    let via = origin.arrivals()[0]
        .field("via")
        .expect("a forward proxy adds Via (RFC 9110 section 7.6.3)")
        .to_owned();
    let looped = replica
        .session(PLAIN)
        .get_with(&url, &[&format!("Via: 1.1 other, {via}")])
        .unwrap();
    expect(&looped, 502, "proxy_loop_detected");
    assert_eq!(
        replica
            .session(PLAIN)
            .get_with(&url, &["Via: 1.1 other"])
            .unwrap()
            .status(),
        200
    );
    assert_eq!(origin.timeline("").count(), 2);
}

#[test]
fn our_own_listeners_are_a_loop_even_where_no_address_is_listed() {
    let (site, origin) = (Site::new(), Origin::plain(&[PLAIN]));
    let replica = Replica::start(&site, "r0", &recipe().origin(&origin));
    let own = replica.proxy().to_string();
    let answer = replica
        .session(&own)
        .get(&format!("http://{own}/"))
        .unwrap();
    expect(&answer, 502, "proxy_loop_detected");
}

#[test]
fn an_origin_cannot_speak_in_our_name() {
    let (site, origin) = (Site::new(), Origin::plain(&[PLAIN]));
    let replica = Replica::start(&site, "r0", &recipe().origin(&origin));
    let url = format!("http://{PLAIN}/b/1?h=Proxy-Status:paceline;%20error=dns_error");
    let url = url.replace("%20", "");
    let forged = replica.session(PLAIN).get(&url).unwrap();
    assert_eq!(forged.status(), 200);
    assert_eq!(forged.field("proxy-status"), None);
    let url = format!("http://{PLAIN}/b/1?h=Proxy-Status:other;error=dns_error");
    let honest = replica.session(PLAIN).get(&url).unwrap();
    assert_eq!(honest.field("proxy-status"), Some("other;error=dns_error"));
}

#[test]
fn a_url_without_a_path_is_asked_for_at_the_root() {
    let (site, origin) = (Site::new(), Origin::plain(&[PLAIN]));
    let replica = Replica::start(&site, "r0", &recipe().origin(&origin));
    let url = format!("http://{PLAIN}?id=rootless");
    assert_eq!(replica.session(PLAIN).get(&url).unwrap().status(), 200);
    assert_eq!(origin.timeline("rootless").count(), 1);
}

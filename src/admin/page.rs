//! The page at `/`: what the JSON of `/status` says, for people.
//!
//! The replica makes all of it, plots included, so that it can be read without a script, and nothing is loaded from
//! anywhere: style and script stand in the page, and the policy that goes with it allows these two by their hashes.
//! It knows the JSON and nothing else.

mod plot;

use std::{fmt::Write as _, sync::LazyLock, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use http::{
    HeaderValue, Response, StatusCode,
    header::{CONTENT_SECURITY_POLICY, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS},
};
use http_body_util::Full;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use self::plot::{Plot, Unit};
use super::{
    status::{headline, in_words},
    typed,
};
use crate::pacing::{
    pacer,
    time::{nanos, seconds},
};

const STYLE: &str = include_str!("page/style.css");
const SCRIPT: &str = include_str!("page/live.js");

/// Nothing but what stands in the page, and the page itself for the script; in nobody's frame.
static POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
    let hash = |text: &str| STANDARD.encode(Sha256::digest(text));
    let policy = format!(
        "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'; connect-src 'self'; img-src data:; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        hash(STYLE),
        hash(SCRIPT),
    );
    HeaderValue::try_from(policy).expect("ASCII")
});

/// The page of what `/status` says with its history.
pub(super) fn respond(status: &Value) -> Response<Full<Bytes>> {
    let mut response = typed(StatusCode::OK, "text/html; charset=utf-8", page(status));
    let headers = response.headers_mut();
    headers.insert(CONTENT_SECURITY_POLICY, POLICY.clone());
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

fn page(status: &Value) -> String {
    let mut cards = String::new();
    for (id, destination) in list(&status["destinations"]).enumerate() {
        card(
            &mut cards,
            id,
            destination,
            !list(&status["replicas"]).any(|_| true),
        );
    }
    if cards.is_empty() {
        cards += "<section><h2>No destination</h2><p>Nothing is paced: add a [[destination]] to the configuration.</p></section>";
    }
    replicas(&mut cards, status);
    let tone = match (&status["ready"], &status["store"]["degraded"]) {
        (Value::Bool(true), Value::Bool(false)) => "ok",
        (Value::Bool(true), _) => "warn",
        _ => "bad",
    };
    let this = list(&status["replicas"]).find(|r| r["self"] == true);
    let this = this.map_or(String::new(), |r| format!(" on {}", text(&r["replica"])));
    let file = match status["configuration"].as_str() {
        Some(file) => format!("Configuration: <code>{}</code>. ", escape(file)),
        None => String::new(),
    };
    format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta name=\"color-scheme\" content=\"light dark\"><title>paceline{this}</title>\
         <link rel=\"icon\" href=\"data:,\"><noscript><meta http-equiv=\"refresh\" content=\"5\"></noscript>\
         <style>{STYLE}</style></head><body><header><h1>paceline <small>{version}{this}</small></h1>\
         <p class=\"soft\" id=\"live\"></p></header><main><p class=\"note {tone}\">{headline} \
         <span>(as of {time})</span></p><div class=\"cards\">{cards}</div><footer>{file}\
         <a href=\"status?history=1\">status</a>, <a href=\"metrics\">metrics</a></footer></main>\
         <script>{SCRIPT}</script></body></html>\n",
        version = text(&status["version"]),
        headline = escape(&headline(status)),
        time = escape(&clock(&status["time"])),
    )
}

/// What one destination does.
fn card(page: &mut String, id: usize, d: &Value, is_only_replica: bool) {
    let number = |key: &str| d[key].as_f64().unwrap_or(0.0);
    let (ceiling, allowed) = (number("ceiling_rate"), number("effective_rate"));
    let counts = |key: &str| -> Vec<Option<u64>> {
        list(&d["per_second"][key]).map(Value::as_u64).collect()
    };
    let (all, own) = (counts("all_replicas"), counts("this_replica"));
    let plot = Plot {
        ceiling,
        allowed,
        all: &all,
        own: &own,
    };
    let (unit, name) = (Unit::of(ceiling), text(&d["name"]));
    let (tone, state) = state(d);
    let _ = write!(
        page,
        "<section><div class=\"title\"><h2>{name}</h2><span class=\"state {tone}\">{state}</span></div>"
    );
    let words = in_words(d);
    if words != "paced" {
        let _ = write!(
            page,
            "<p class=\"note {tone}\">{}{}</p>",
            escape(&words),
            remedy(d)
        );
    }

    let each = match d["scope"] == "host" {
        true => " for each host; here all hosts are added up",
        false => "",
    };
    let who = match is_only_replica {
        true => "this replica",
        false => "all replicas",
    };
    let (now, whose) = match (plot.window(), plot.now(), plot.own_now()) {
        (Some(window), Some(now), _) => (unit.steady(now), format!("{who}, mean of {window} s")),
        (Some(window), None, Some(own)) => (
            unit.steady(own),
            format!("this replica alone, mean of {window} s; the others are not known"),
        ),
        (Some(_), None, None) => ("-".to_owned(), "nothing is known yet".to_owned()),
        (None, ..) => {
            let is_known = all.iter().any(Option::is_some);
            let known = if is_known { &all } else { &own };
            let sent = known.iter().flatten().sum::<u64>();
            (format!("{sent} sent"), format!("{who}, last five minutes"))
        }
    };
    let every = match plot.window() {
        None if ceiling > 0.0 => format!(", one in {}", span(1.0 / ceiling)),
        _ => String::new(),
    };
    let of = format!("of {}{every}{each}", unit.rate(ceiling));
    let _ = write!(
        page,
        "<p class=\"rate\"><b>{now}</b> {of}</p><p class=\"whose soft\">{whose}</p>"
    );
    let description = format!("{now} {of} ({whose})");
    *page += &plot.svg(
        id,
        &format!("{name}: requests sent in the last five minutes"),
        &description,
    );
    if plot.window().is_some() && plot.has_own() {
        *page += "<p class=\"legend\"><span>all replicas</span><span class=\"by-own\">this replica</span></p>";
    }
    figures(page, d, unit);
    let hosts: Vec<_> = list(&d["hosts"]).map(text).collect();
    let _ = write!(
        page,
        "<p class=\"hosts soft\">{}</p></section>",
        hosts.join(", ")
    );
}

fn figures(page: &mut String, d: &Value, unit: Unit) {
    let number = |key: &str| d[key].as_f64().unwrap_or(0.0);
    let (mode, to_whom) = match d["mode"].as_str() {
        Some("shared") => ("the shared cursor", ""),
        Some("embedded") => ("a cursor in memory", ""),
        Some("degraded") => ("this replica's share", " to this replica"),
        Some("dry_run") => ("nothing: dry run", ""),
        _ => ("nothing is sent yet", " to this replica"),
    };
    let waits = match (
        d["wait_seconds"]["median"].as_f64(),
        d["wait_seconds"]["p99"].as_f64(),
    ) {
        (Some(median), Some(p99)) => format!("{}, {}", span(median), span(p99),),
        _ => "-".to_owned(),
    };
    let gap = d["smallest_gap_seconds"].as_f64();
    let gap = gap.map_or("-".to_owned(), span);
    let interval = span(1.0 / number("ceiling_rate").max(1e-9));
    let throttle = match number("multiplier") {
        m if m > 1.0 => format!("interval \u{d7} {m}"),
        _ => "none".to_owned(),
    };
    let allowed = match number("effective_rate") {
        0.0 => "nothing".to_owned(),
        rate => unit.rate(rate),
    };
    let rows = [
        ("Allowed now", format!("{allowed}{to_whom}")),
        ("Throttle", throttle),
        ("Waiting here", count(&d["queue_depth"], "request")),
        ("Waited: median, p99", waits),
        (
            "Busiest second, all",
            count(&d["cluster_busiest_second"], "request"),
        ),
        ("Smallest gap here", gap),
        ("Ceiling's interval", interval),
        ("Paced by", mode.to_owned()),
    ];
    *page += "<dl>";
    for (term, value) in rows {
        let _ = write!(page, "<div><dt>{term}</dt><dd>{value}</dd></div>");
    }
    *page += "</dl>";
    let ceiling = number("ceiling_rate");
    if ceiling > 0.0 && d["mode"] != "dry_run" {
        let interval = 1.0 / ceiling;
        let _ = write!(
            page,
            "<p class=\"why soft\">Slots are {} apart; a request may leave up to {} after its slot, so a gap can be that much \
             shorter. p99: 99 of 100 requests waited no longer.</p>",
            span(interval),
            span(grace(interval)),
        );
    }
}

/// How long after its slot a request may still leave, in seconds.
fn grace(interval: f64) -> f64 {
    let interval = nanos(Duration::try_from_secs_f64(interval).unwrap_or(Duration::MAX));
    seconds(pacer::grace(interval))
}

/// The most important thing about a destination, in a word, and how grave it is.
fn state(d: &Value) -> (&'static str, &'static str) {
    match d["mode"].as_str() {
        _ if d["locked_out"].is_object() => ("bad", "locked out"),
        _ if d["paused"].is_object() => ("warn", "paused"),
        Some("waiting") => ("warn", "waiting"),
        Some("degraded") => ("warn", "degraded"),
        _ if d["multiplier"].as_f64().is_some_and(|m| m > 1.0) => ("warn", "throttled"),
        _ if d["disagreement"] == true => ("warn", "disagreement"),
        Some("dry_run") => ("warn", "dry run"),
        _ => ("ok", "paced"),
    }
}

/// What to do about it, where that is one command.
fn remedy(d: &Value) -> String {
    let (what, verb) = match (&d["locked_out"], &d["paused"]) {
        (Value::Object(_), _) => ("lockout", "unlock"),
        (_, Value::Object(_)) => ("pause", "resume"),
        _ => return String::new(),
    };
    let name = text(&d["name"]);
    format!(". To end the {what}: <code>paceline {verb} {name}</code>")
}

fn replicas(page: &mut String, status: &Value) {
    let mut rows = String::new();
    for r in list(&status["replicas"]) {
        let this = if r["self"] == true {
            " <span class=\"soft\">(this one)</span>"
        } else {
            ""
        };
        let (tone, state) = match r["state"].as_str() {
            Some("live") => ("ok", "live".to_owned()),
            Some(other) => {
                let silent = r["silent_for_seconds"].as_f64().unwrap_or(0.0);
                let silent = Duration::from_secs(silent.clamp(0.0, 1e9) as u64);
                (
                    "warn",
                    format!(
                        "{} for {}",
                        escape(other),
                        humantime::format_duration(silent)
                    ),
                )
            }
            None => ("warn", "-".to_owned()),
        };
        let _ = write!(
            rows,
            "<tr><td>{}{this}</td><td>{}</td><td><span class=\"state {tone}\">{state}</span></td></tr>",
            text(&r["replica"]),
            text(&r["number"])
        );
    }
    let body = match (rows.is_empty(), status["store"]["kind"].as_str()) {
        (false, _) => {
            format!("<table><tr><th>Name</th><th>Number</th><th>State</th></tr>{rows}</table>")
        }
        (true, Some("embedded")) => {
            "<p>This one alone: with the embedded store no other shares its ceilings.</p>"
                .to_owned()
        }
        (true, _) => "<p>None is known: the store has not been reached yet.</p>".to_owned(),
    };
    let _ = write!(page, "<section><h2>Replicas</h2>{body}");
    let is_silent = |r: &Value| r["state"] == "silent";
    if status["store"]["degraded"] == false && list(&status["replicas"]).any(is_silent) {
        *page += "<p class=\"note warn\">Room is left for silent ones, which may be sending by themselves. If one is \
                  surely dead: <code>paceline forget NAME</code></p>";
    }
    *page += "</section>";
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// A word or number of the JSON, escaped.
fn text(value: &Value) -> String {
    match value {
        Value::String(text) => escape(text),
        Value::Number(number) => number.to_string(),
        _ => "-".to_owned(),
    }
}

/// `3 requests`
fn count(value: &Value, noun: &str) -> String {
    match value.as_u64() {
        Some(1) => format!("1 {noun}"),
        Some(n) => format!("{n} {noun}s"),
        None => "-".to_owned(),
    }
}

/// A span of `seconds`, to three digits or so.
fn span(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => format!("{:.1} ms", s * 1e3),
        s if s < 10.0 => format!("{s:.2} s"),
        s if s < 60.0 => format!("{s:.1} s"),
        s => humantime::format_duration(Duration::from_secs(s.min(1e9) as u64)).to_string(),
    }
}

/// `12:00:00 UTC`, of a date and time.
fn clock(time: &Value) -> String {
    let time = time.as_str().unwrap_or("-");
    let hours = time
        .split_once('T')
        .and_then(|(_, rest)| rest.strip_suffix('Z'));
    hours.map_or(time.to_owned(), |hours| format!("{hours} UTC"))
}

fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\'' => escaped += "&#39;",
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A destination that is paced at 7/s by two replicas, of which this one sends 3 in each second.
    fn destination() -> Value {
        json!({
            "name": "google_image", "hosts": ["*.googleusercontent.com", "drive.google.com"],
            "ceiling_rate": 7.0, "effective_rate": 7.0, "smallest_gap_seconds": 0.2858, "queue_depth": 12,
            "cluster_busiest_second": 7, "scope": "destination", "mode": "shared", "disagreement": false, "multiplier": 1,
            "locked_out": null, "paused": null,
            "wait_seconds": {"requests": 420, "median": 0.4219, "p99": 1.8},
            "per_second": {"all_replicas": vec![json!(7); 300], "this_replica": vec![3; 300]},
        })
    }

    fn status(destinations: Vec<Value>) -> Value {
        json!({
            "version": "0.1.0", "time": "2026-02-03T12:13:14Z", "ready": true, "blockers": [], "configuration": "/etc/p.toml",
            "store": {"kind": "postgres", "up": true, "degraded": false}, "destinations": destinations,
            "replicas": [
                {"number": 0, "replica": "proxy-a", "self": true, "state": "live", "silent_for_seconds": 0.4},
                {"number": 2, "replica": "proxy-c", "self": false, "state": "silent", "silent_for_seconds": 41.3},
            ],
        })
    }

    fn with(changes: Value) -> String {
        let mut d = destination();
        for (key, value) in changes.as_object().expect("changes") {
            d[key] = value.clone();
        }
        page(&status(vec![d]))
    }

    /// What a reader sees, without marks.
    fn shown(page: &str) -> String {
        let body = page.split_once("<main>").expect("a body").1;
        let body = body.split_once("<script>").expect("a script").0;
        let mut text = String::new();
        for piece in body.split('<').skip(1) {
            let (_, words) = piece.split_once('>').expect("a mark that ends");
            text += words;
            text.push(' ');
        }
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    fn says(page: &str, all: &[&str]) {
        let shown = shown(page);
        for words in all {
            assert!(shown.contains(words), "{words:?} is not in: {shown}");
        }
    }

    #[test]
    fn the_figures_of_a_destination_stand_in_the_page() {
        says(
            &with(json!({})),
            &[
                "ready; the store is there (as of 12:13:14 UTC)",
                "google_image paced",
                "7.00/s of 7/s all replicas, mean of 10 s",
                "Allowed now 7/s",
                "Waiting here 12 requests",
                "Waited: median, p99 421.9 ms, 1.80 s",
                "Busiest second, all 7 requests",
                "Smallest gap here 285.8 ms",
                "Ceiling's interval 142.9 ms",
                "Throttle none",
                "Paced by the shared cursor",
                "*.googleusercontent.com, drive.google.com",
                "proxy-a (this one) 0 live",
                "proxy-c 2 silent for 41s Room is left for silent ones",
                "/etc/p.toml",
            ],
        );
    }

    #[test]
    fn what_holds_a_destination_back_stands_above_its_figures_with_the_way_out() {
        let locked = json!({"reason": "several URLs answered 403", "rest_seconds": 842.2});
        says(
            &with(json!({"locked_out": locked, "effective_rate": 0.0})),
            &[
                "locked out locked out for 14m 3s (several URLs answered 403). To end the lockout: paceline unlock google_image",
                "Allowed now nothing",
            ],
        );
        let paused = |reason: &str| json!({"paused": {"reason": reason, "rest_seconds": 90}});
        says(
            &with(paused("operator")),
            &[
                "paused paused for 1m 30s (by an operator). To end the pause: paceline resume google_image",
            ],
        );
        says(
            &with(paused("retry_after")),
            &["(the destination&#39;s Retry-After)"],
        );
        says(
            &with(json!({"multiplier": 4, "effective_rate": 1.75})),
            &[
                "throttled slowed down 4 times",
                "interval \u{d7} 4",
                "Allowed now 1.75/s",
                "allowed now 1.75/s",
            ],
        );
        says(
            &with(json!({"disagreement": true})),
            &["disagreement replicas disagree on the rate"],
        );
        says(
            &with(json!({"mode": "dry_run"})),
            &["dry run dry run: nothing is held back", "nothing: dry run"],
        );
        says(
            &with(json!({"scope": "host"})),
            &["7.00/s of 7/s for each host; here all hosts are added up"],
        );
    }

    #[test]
    fn without_the_store_the_replica_shows_what_it_sends_itself() {
        let mut all = vec![json!(7); 300];
        all[200..].fill(Value::Null);
        let mut d = destination();
        d["mode"] = json!("degraded");
        d["effective_rate"] = json!(2.33);
        d["per_second"]["all_replicas"] = json!(all);
        let mut status = status(vec![d]);
        status["store"]["degraded"] = json!(true);
        says(
            &page(&status),
            &[
                "ready; degraded: the store is away",
                "3.00/s of 7/s this replica alone, mean of 10 s; the others are not known",
                "Allowed now 2.33/s to this replica",
                "Paced by this replica's share",
            ],
        );
        status["ready"] = json!(false);
        status["blockers"] = json!(["draining"]);
        assert!(page(&status).contains("note bad\">not ready (draining)"));
    }

    #[test]
    fn a_slow_destination_counts_its_requests() {
        let mut d = destination();
        d["ceiling_rate"] = json!(2000.0 / 86_400.0);
        let mut sent = vec![0; 300];
        sent[10] = 1;
        sent[60] = 1;
        d["per_second"] = json!({"all_replicas": sent, "this_replica": sent});
        says(
            &page(&status(vec![d])),
            &["2 sent of 1.39/min, one in 43.2 s all replicas, last five minutes"],
        );
    }

    #[test]
    fn a_replica_that_has_nothing_to_show_says_so() {
        let mut alone = status(vec![]);
        alone["replicas"] = json!([]);
        says(&page(&alone), &["No destination", "None is known"]);
        alone["store"] = json!({"kind": "embedded", "up": true, "degraded": false});
        alone["destinations"] = json!([{"name": "new", "ceiling_rate": 7.0, "mode": "embedded"}]);
        says(
            &page(&alone),
            &[
                "new paced - of 7/s nothing is known yet",
                "Waiting here -",
                "This one alone",
            ],
        );
        // Another version, or a bug: a page all the same.
        assert!(page(&json!(null)).contains("</html>"));
    }

    #[test]
    fn no_value_can_become_markup() {
        let evil = "</script><script>alert(1)</script>\"'&";
        let mut d = destination();
        d["name"] = json!(evil);
        d["hosts"] = json!([evil]);
        d["locked_out"] = json!({"reason": evil, "rest_seconds": 1});
        let mut status = status(vec![d]);
        for path in [
            "/version",
            "/time",
            "/configuration",
            "/replicas/0/replica",
            "/replicas/1/state",
            "/replicas/0/number",
        ] {
            *status.pointer_mut(path).expect("it is there") = json!(evil);
        }
        status["blockers"] = json!([evil]);
        let page = page(&status);
        assert_eq!(page.matches("<script>").count(), 1);
        assert_eq!(
            page.matches("alert(1)").count(),
            page.matches("&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#39;&amp;")
                .count()
        );
        assert!(page.matches("alert(1)").count() >= 9, "{page}");
    }

    #[test]
    fn nothing_is_loaded_from_elsewhere_and_the_policy_knows_style_and_script() {
        let page = with(json!({}));
        for outside in [
            "http:", "https:", "//cdn", "@import", "url(", " style=", " onload=", " src=",
        ] {
            let found = page.replace("http-equiv", "");
            assert!(!found.contains(outside), "{outside}");
        }
        let policy = POLICY.to_str().expect("ASCII");
        for (open, close) in [("<style>", "</style>"), ("<script>", "</script>")] {
            let inside = page
                .split_once(open)
                .and_then(|(_, rest)| rest.split_once(close));
            let hash = STANDARD.encode(Sha256::digest(inside.expect("it is there").0));
            assert!(
                policy.contains(&format!("'sha256-{hash}'")),
                "{open} {policy}"
            );
        }
        assert!(!policy.contains("unsafe"), "{policy}");
    }
}

//! `paceline status`: the JSON of `/status` as tables for people.
//!
//! Tolerant of what is missing: the replica that is asked may be of another version.

use std::time::Duration;

use serde_json::Value;

use crate::admin::status::{headline, in_words};

/// The whole text, with what was not told shown as `-`.
pub fn table(status: &Value) -> String {
    let version = word(&status["version"]);
    let mut text = format!("paceline {version}: {}\n\n", headline(status));
    let mut rows = vec![
        [
            "destination",
            "observed",
            "here",
            "allowed",
            "ceiling",
            "waiting",
            "state",
        ]
        .map(str::to_owned),
    ];
    for d in list(&status["destinations"]) {
        rows.push([
            word(&d["name"]),
            rate(&d["cluster_observed_rate"]),
            rate(&d["observed_rate"]),
            rate(&d["effective_rate"]),
            rate(&d["ceiling_rate"]),
            word(&d["queue_depth"]),
            in_words(d),
        ]);
    }
    text += &aligned(&rows);
    text += &settings(status);
    let mut rows = vec![["replica", "number", "state"].map(str::to_owned)];
    for r in list(&status["replicas"]) {
        let this = if r["self"] == true { " (asked)" } else { "" };
        let silent = r["silent_for_seconds"].as_f64().unwrap_or(0.0);
        let is_cut_off = status["store"]["degraded"] == true && r["self"] == true;
        let state = match r["state"].as_str() {
            // It answers: silent it is only to the others, who hear it by the store.
            Some("silent") if is_cut_off => "cut off from the store".to_owned(),
            Some("live") => "live".to_owned(),
            Some("alone") => "on its share".to_owned(),
            Some(other) => format!("{other} for {silent:.0} s"),
            None => "-".to_owned(),
        };
        rows.push([word(&r["replica"]) + this, word(&r["number"]), state]);
    }
    if rows.len() > 1 {
        text.push('\n');
        text += &aligned(&rows);
    }
    text
}

/// What each destination is configured with, where that is told.
fn settings(status: &Value) -> String {
    let mut rows = vec![
        [
            "destination",
            "in flight",
            "throttled by",
            "recovers after",
            "sent again",
            "locked out by",
        ]
        .map(str::to_owned),
    ];
    for d in list(&status["destinations"]) {
        let of = &d["settings"];
        let statuses = |key: &str| list(&of[key]).map(word).collect::<Vec<_>>().join(" ");
        let lockout = match statuses("lockout_status") {
            none if none.is_empty() => "nothing".to_owned(),
            some => {
                let seconds = of["lockout_for_seconds"].as_f64().unwrap_or(0.0);
                let span = Duration::from_secs(seconds.clamp(0.0, 1e9) as u64);
                format!(
                    "{} x {some}, for {}",
                    word(&of["lockout_after"]),
                    humantime::format_duration(span)
                )
            }
        };
        rows.push([
            word(&d["name"]),
            match &of["max_in_flight"] {
                Value::Null => "no limit".to_owned(),
                some => format!("up to {}", word(some)),
            },
            match statuses("throttle_status") {
                none if none.is_empty() => "nothing".to_owned(),
                some => some,
            },
            format!("{} clean", word(&of["recovery_after"])),
            match of["retry_throttled"].as_u64() {
                Some(0) => "never".to_owned(),
                _ => format!("up to {} x", word(&of["retry_throttled"])),
            },
            lockout,
        ]);
    }
    let is_told = list(&status["destinations"]).any(|d| d["settings"].is_object());
    match is_told {
        true => format!("\n{}", aligned(&rows)),
        false => String::new(),
    }
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn word(value: &Value) -> String {
    match value {
        // It is printed on a terminal, and comes from elsewhere.
        Value::String(text) => text.chars().filter(|c| !c.is_control()).collect(),
        Value::Number(number) => number.to_string(),
        _ => "-".to_owned(),
    }
}

/// Per second; or, where that would show as nothing, per hour.
fn rate(value: &Value) -> String {
    match value.as_f64() {
        None => "-".to_owned(),
        Some(per_second) if per_second > 0.0 && per_second < 0.05 => {
            format!("{:.1}/h", per_second * 3600.0)
        }
        Some(per_second) => format!("{per_second:.2}/s"),
    }
}

/// Columns as wide as their widest cell, two spaces apart; no line ends with a space.
fn aligned<const N: usize>(rows: &[[String; N]]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.max().unwrap_or(0)
    };
    let widths: [usize; N] = std::array::from_fn(width);
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(widths);
        let line: String = cells.map(|(cell, w)| format!("{cell:w$}  ")).collect();
        format!("{}\n", line.trim_end())
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_table_shows_pace_queue_throttle_and_replicas() {
        let status = json!({
            "version": "0.1.0",
            "blockers": [],
            "store": {"kind": "postgres", "up": true, "degraded": false},
            "destinations": [
                {"name": "google_image", "cluster_observed_rate": 6.96, "observed_rate": 2.3, "effective_rate": 7.0,
                 "ceiling_rate": 7.0, "queue_depth": 12, "mode": "shared", "multiplier": 1, "locked_out": null, "paused": null,
                 "settings": {"max_in_flight": 6, "throttle_status": [429, 503], "recovery_after": 100, "retry_throttled": 2,
                              "lockout_status": [403], "lockout_after": 3, "lockout_for_seconds": 900.0}},
                {"name": "slow", "cluster_observed_rate": 0.0, "observed_rate": 0.0, "effective_rate": 0.0001,
                 "ceiling_rate": 0.0002, "queue_depth": 0, "mode": "shared", "multiplier": 2,
                 "locked_out": {"reason": "3 x 403", "rest_seconds": 60}, "paused": null,
                 "settings": {"max_in_flight": null, "throttle_status": [], "recovery_after": 7, "retry_throttled": 0,
                              "lockout_status": []}},
            ],
            "replicas": [
                {"number": 0, "replica": "proxy-a", "self": true, "state": "live", "silent_for_seconds": 0.4},
                {"number": 2, "replica": "c", "self": false, "state": "silent", "silent_for_seconds": 41.3},
            ],
        });
        assert_eq!(
            table(&status),
            "paceline 0.1.0: ready; the store is there\n\
             \n\
             destination   observed  here    allowed  ceiling  waiting  state\n\
             google_image  6.96/s    2.30/s  7.00/s   7.00/s   12       paced\n\
             slow          0.00/s    0.00/s  0.4/h    0.7/h    0        locked out for 1m (3 x 403); slowed down 2 times\n\
             \n\
             destination   in flight  throttled by  recovers after  sent again  locked out by\n\
             google_image  up to 6    429 503       100 clean       up to 2 x   3 x 403, for 15m\n\
             slow          no limit   nothing       7 clean         never       nothing\n\
             \n\
             replica          number  state\n\
             proxy-a (asked)  0       live\n\
             c                2       silent for 41 s\n"
        );
    }

    #[test]
    fn the_replica_that_answers_is_not_silent_but_cut_off() {
        let replica = |is_self| json!({"number": 0, "replica": "a", "self": is_self, "state": "silent", "silent_for_seconds": 6.0});
        let shown = |degraded, is_self| {
            table(&json!({"store": {"degraded": degraded}, "replicas": [replica(is_self)]}))
        };
        assert!(shown(true, true).ends_with("cut off from the store\n"));
        assert!(shown(true, false).ends_with("silent for 6 s\n"));
        assert!(shown(false, true).ends_with("silent for 6 s\n"));
    }

    #[test]
    fn what_is_missing_is_a_dash_and_no_control_character_reaches_the_terminal() {
        let text = table(&json!({"destinations": [{"name": "a\u{1b}[2Jb"}, 7], "replicas": [{}]}));
        assert!(text.contains("a[2Jb"), "{text}");
        assert!(!text.contains('\u{1b}'));
        assert!(!table(&json!(null)).is_empty());
    }
}

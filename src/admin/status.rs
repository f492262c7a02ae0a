//! How a replica stands, as JSON for programs, for `paceline status` and for the page.
//!
//! The page and the command show what is in the JSON and know nothing else, so that all three say the same.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use serde_json::{Value, json};

use super::Admin;
use crate::{
    config::{self, Scope},
    destination::Destination,
    pacing::{
        share::Terms,
        throttle::{Cause, Halt},
        time::{LocalTime, seconds},
    },
    store::Store,
};

/// All that `/status` shows; with `history` what was sent in each second of the last minutes, too.
pub(super) fn status(admin: &Admin, history: bool) -> Value {
    let (now, rules) = (LocalTime::now(), admin.proxy.in_force.now());
    let (store, replicas) = match &admin.store {
        Store::Memory(_) => (
            json!({"kind": "embedded", "up": true, "degraded": false}),
            Vec::new(),
        ),
        Store::Postgres(store) => {
            let membership = store.membership();
            let member = |m: &crate::membership::Member| {
                json!({
                    "number": m.number,
                    "replica": m.replica,
                    "self": m.is_self,
                    "state": m.state,
                    "silent_for_seconds": m.silent_for,
                })
            };
            (
                json!({
                    "kind": "postgres",
                    "up": store.is_up(),
                    "degraded": membership.is_degraded(),
                }),
                membership.members(now).iter().map(member).collect(),
            )
        }
    };
    let destinations: Vec<_> = rules
        .destinations
        .iter()
        .map(|d| {
            let mut destination = destination(admin, d, now);
            if history {
                let sent = d.per_second(now);
                destination["per_second"] = json!({
                    "all_replicas": sent.all_replicas,
                    "this_replica": sent.this_replica,
                });
            }
            destination
        })
        .collect();
    let file = rules.config.file.as_ref().map(|f| f.display().to_string());
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "time": humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
        "ready": admin.blockers().is_empty(),
        "blockers": admin.blockers(),
        "configuration": file,
        "store": store,
        "replicas": replicas,
        "destinations": destinations,
    })
}

fn destination(admin: &Admin, destination: &Arc<Destination>, now: LocalTime) -> Value {
    let (s, config) = (destination.standing(now), destination.config());
    let mode = match &admin.store {
        _ if config.dry_run => "dry_run",
        Store::Memory(_) => "embedded",
        Store::Postgres(store) => match store.membership().terms(&config.name, now) {
            Terms::Shared { .. } => "shared",
            Terms::Alone(_) => "degraded",
            Terms::Hold(_) | Terms::Nothing => "waiting",
        },
    };
    let ceiling_of = match &admin.store {
        Store::Memory(_) => None,
        Store::Postgres(store) => {
            let agreement = store.membership().agreement(&config.name, s.ceiling, now);
            agreement.by.map(|m| {
                json!({
                    "replica": m.name(),
                    "state": m.state,
                    "silent_for_seconds": m.silent_for,
                    "rate": agreement.ceiling,
                })
            })
        }
    };
    let stop = |reason: &str, halt: Halt| json!({"reason": reason, "rest_seconds": seconds(halt.until.since(now))});
    json!({
        "name": config.name,
        "hosts": config.hosts.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "ceiling_rate": s.ceiling,
        "effective_rate": s.effective,
        "observed_rate": s.observed,
        "busiest_second": s.busiest,
        "smallest_gap_seconds": s.smallest_gap,
        "queue_depth": s.waiting,
        "wait_seconds": destination.waits(now).map(|w| json!({
            "requests": w.requests,
            "median": w.median,
            "p99": w.p99,
        })),
        "cluster_observed_rate": s.cluster_observed,
        "cluster_busiest_second": s.cluster_busiest,
        "scope": match config.scope {
            Scope::Destination => "destination",
            Scope::Host => "host",
        },
        "dry_run": config.dry_run,
        "settings": settings(&config),
        "mode": mode,
        "disagreement": s.disagreement,
        "ceiling_of": ceiling_of,
        "multiplier": s.regime.multiplier,
        "locked_out": s.regime.halt.and_then(|halt| match halt.cause {
            Cause::Lockout(status) => Some(stop(&format!("several URLs answered {status}"), halt)),
            Cause::Hold | Cause::Pause => None,
        }),
        "paused": s.regime.halt.and_then(|halt| match halt.cause {
            Cause::Lockout(_) => None,
            Cause::Hold => Some(stop("retry_after", halt)),
            Cause::Pause => Some(stop("operator", halt)),
        }),
    })
}

/// What it is configured with beside its rate and hosts.
fn settings(config: &config::Destination) -> Value {
    let statuses = |of: &[http::StatusCode]| of.iter().map(|s| s.as_u16()).collect::<Vec<_>>();
    json!({
        "max_in_flight": config.max_in_flight,
        "throttle_status": statuses(&config.throttle_status),
        "recovery_after": config.recovery_after,
        "retry_after_cap_seconds": config.retry_after_cap.as_secs_f64(),
        "retry_throttled": config.retry_throttled,
        "lockout_status": statuses(&config.lockout_status),
        "lockout_after": config.lockout_after,
        "lockout_for_seconds": config.lockout_for.as_secs_f64(),
    })
}

/// What there is to say of a destination in a few words, from its part of the JSON: the most important first.
pub fn in_words(destination: &Value) -> String {
    let rest = |of: &Value| {
        let seconds = of["rest_seconds"].as_f64().unwrap_or(0.0).ceil();
        humantime::format_duration(Duration::from_secs(seconds as u64)).to_string()
    };
    let mut words = Vec::new();
    let locked = &destination["locked_out"];
    if locked.is_object() {
        let reason = locked["reason"].as_str().unwrap_or("of unknown cause");
        words.push(format!("locked out for {} ({reason})", rest(locked)));
    }
    let paused = &destination["paused"];
    if paused.is_object() {
        let why = match paused["reason"].as_str() {
            Some("retry_after") => "the destination's Retry-After",
            _ => "by an operator",
        };
        words.push(format!("paused for {} ({why})", rest(paused)));
    }
    let multiplier = destination["multiplier"].as_f64().unwrap_or(1.0);
    if multiplier > 1.0 {
        words.push(format!("slowed down {multiplier} times"));
    }
    match destination["mode"].as_str() {
        Some("dry_run") => words.push("dry run: nothing is held back".to_owned()),
        Some("degraded") => words.push("degraded: on this replica's share".to_owned()),
        Some("waiting") => words.push("degraded: sends nothing until it may".to_owned()),
        _ => {}
    }
    if destination["disagreement"] == true {
        let of = &destination["ceiling_of"];
        words.push(match (of["replica"].as_str(), of["state"].as_str()) {
            (Some(name), Some(state)) => {
                let name: String = name.chars().filter(|c| !c.is_control()).collect();
                format!("replicas disagree: the rate of {name} ({state}) is in force")
            }
            _ => "replicas disagree on the rate".to_owned(),
        });
    }
    match words.is_empty() {
        true => "paced".to_owned(),
        false => words.join("; "),
    }
}

/// Whether this replica can serve as it should, in a few words.
pub fn headline(status: &Value) -> String {
    let blockers = status["blockers"].as_array().into_iter().flatten();
    let blockers: Vec<&str> = blockers.filter_map(Value::as_str).collect();
    let ready = match blockers.as_slice() {
        [] => "ready".to_owned(),
        some => format!("not ready ({})", some.join(", ")),
    };
    let store = match (
        status["store"]["kind"].as_str(),
        &status["store"]["degraded"],
    ) {
        (Some("embedded"), _) => "embedded store, for one replica",
        (_, Value::Bool(false)) => "the store is there",
        _ => "degraded: the store is away, each replica sends on its share",
    };
    format!("{ready}; {store}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quiet() -> Value {
        json!({"mode": "shared", "multiplier": 1, "locked_out": null, "paused": null, "disagreement": false})
    }

    #[test]
    fn a_destination_is_described_by_what_holds_it_back() {
        assert_eq!(in_words(&quiet()), "paced");
        for (key, value, words) in [
            (
                "locked_out",
                json!({"reason": "3 x 403", "rest_seconds": 842.2}),
                "locked out for 14m 3s (3 x 403)",
            ),
            (
                "paused",
                json!({"reason": "operator", "rest_seconds": 120.0}),
                "paused for 2m (by an operator)",
            ),
            (
                "paused",
                json!({"reason": "retry_after", "rest_seconds": 2.5}),
                "paused for 3s (the destination's Retry-After)",
            ),
            ("multiplier", json!(4), "slowed down 4 times"),
            ("mode", json!("dry_run"), "dry run: nothing is held back"),
            (
                "mode",
                json!("degraded"),
                "degraded: on this replica's share",
            ),
            ("disagreement", json!(true), "replicas disagree on the rate"),
        ] {
            let mut destination = quiet();
            destination[key] = value;
            assert_eq!(in_words(&destination), words);
        }
        let mut theirs = quiet();
        theirs["disagreement"] = json!(true);
        theirs["ceiling_of"] = json!({"replica": "r1", "state": "silent"});
        assert_eq!(
            in_words(&theirs),
            "replicas disagree: the rate of r1 (silent) is in force"
        );
        let mut both = quiet();
        both["multiplier"] = json!(2);
        both["mode"] = json!("degraded");
        assert_eq!(
            in_words(&both),
            "slowed down 2 times; degraded: on this replica's share"
        );
    }
}

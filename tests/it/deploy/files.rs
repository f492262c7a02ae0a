//! The shipped files of Prometheus, Grafana and systemd, by the tools that read them, and the manual by them.

use std::{collections::BTreeSet, process::Command};

use serde_json::Value;

use super::{replaced, shipped, shipped_text, tool, yaml};
use crate::bed::{
    origin::Origin,
    process::Outcome,
    recipe::{Recipe, Site},
    replica::Replica,
};

fn promtool(arguments: &[&str]) -> Outcome {
    let mut command = Command::new("/usr/bin/promtool");
    command.args(arguments).current_dir(shipped("prometheus"));
    tool(command)
}

fn alerts() -> Vec<Value> {
    let rules = yaml("prometheus/rules.yml");
    let groups = rules[0]["groups"].as_array().expect("groups");
    let rules = groups.iter().filter_map(|g| g["rules"].as_array());
    let alerts = rules.flatten().filter(|rule| rule["alert"].is_string());
    alerts.cloned().collect()
}

fn manual(name: &str) -> String {
    let path = format!("{}/docs/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(path).expect("a page of the manual")
}

#[test]
fn promtool_accepts_configuration_and_rules_and_each_rule_does_as_it_says() {
    for arguments in [
        &["check", "config", "prometheus.yml"][..],
        &["check", "rules", "rules.yml"],
        &["test", "rules", "rules_test.yml"],
    ] {
        let outcome = promtool(arguments);
        let said = format!("{}{}", outcome.text(), outcome.stderr);
        assert!(outcome.status.success(), "{arguments:?}: {said}");
    }
}

#[test]
fn promtool_finds_nothing_to_say_about_the_metrics_of_a_replica() {
    let (origin, site) = (Origin::plain(&["plain.test"]), Site::new());
    let recipe = Recipe::new()
        .destination("plain", &["plain.test"], "100.0")
        .origin(&origin);
    let replica = Replica::start(&site, "r0", &recipe);
    let fetched = replica.session("plain.test").get("http://plain.test/b/1");
    assert_eq!(fetched.expect("an answer").status(), 200);
    let metrics = replica.admin("/metrics").expect("an answer").text();
    assert!(metrics.contains("paceline_dispatches_total{"));
    let file = site.write("metrics.txt", &metrics);
    let mut command = Command::new("/usr/bin/promtool");
    command
        .args(["check", "metrics"])
        .stdin(std::fs::File::open(file).expect("our own file"));
    let output = command
        .output()
        .expect("promtool, as tests/run installs it");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{said}");
}

#[test]
fn every_alert_is_tested_and_leads_to_a_section_of_the_manual() {
    let tests = yaml("prometheus/rules_test.yml");
    let tests = tests[0]["tests"].as_array().expect("tests");
    let tested = tests.iter().filter_map(|t| t["alert_rule_test"].as_array());
    let fires = |test: &&Value| test["exp_alerts"].as_array().is_some_and(|a| !a.is_empty());
    let tested: BTreeSet<_> = tested
        .flatten()
        .filter(fires)
        .filter_map(|t| t["alertname"].as_str())
        .collect();
    let anchors: BTreeSet<_> = manual("operations.md")
        .lines()
        .filter_map(|line| {
            line.trim_start_matches('#')
                .strip_prefix(' ')
                .filter(|_| line.starts_with("##"))
        })
        .map(|heading| {
            let kept = |c: &char| c.is_ascii_alphanumeric() || " -".contains(*c);
            let kept: String = heading.chars().filter(kept).collect();
            format!(
                "docs/operations.md#{}",
                kept.to_lowercase().replace(' ', "-")
            )
        })
        .collect();
    let alerts = alerts();
    assert!(alerts.len() >= 10, "{}", alerts.len());
    for alert in alerts {
        let name = alert["alert"].as_str().expect("a name");
        assert!(
            tested.contains(name),
            "{name} is not seen to fire in rules_test.yml"
        );
        let runbook = alert["annotations"]["runbook"].as_str().unwrap_or_default();
        assert!(
            anchors.contains(runbook),
            "{name} leads to {runbook:?}, which is no heading"
        );
        assert!(
            alert["annotations"]["summary"].is_string() && alert["labels"]["severity"].is_string()
        );
    }
}

#[test]
fn rules_and_dashboard_ask_for_no_metric_that_the_manual_does_not_have() {
    let manual = manual("metrics.md");
    let documented = |name: &str| {
        let row = |suffix: &str| {
            let name = name.strip_suffix(suffix).unwrap_or(name);
            manual.contains(&format!("| `{name}` |"))
        };
        row("_bucket") || row("")
    };
    let mut seen = BTreeSet::new();
    for file in ["prometheus/rules.yml", "grafana/dashboards/paceline.json"] {
        let text = shipped_text(file);
        let word = |c: char| c.is_ascii_alphanumeric() || "_:".contains(c);
        for name in text.split(|c| !word(c)) {
            if name.starts_with("paceline_") || name.starts_with("process_") {
                assert!(documented(name), "{file} asks for {name}");
                seen.insert(name.to_owned());
            }
        }
    }
    assert!(seen.len() > 20, "{seen:?}");
}

#[test]
fn the_dashboard_begins_with_the_rate_against_the_ceiling_and_fits_its_grid() {
    let text = shipped_text("grafana/dashboards/paceline.json");
    let dashboard: Value = serde_json::from_str(&text).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    let number = |panel: &Value, key: &str| panel["gridPos"][key].as_u64().expect("a place");
    let (first, mut taken) = (&panels[0], BTreeSet::new());
    assert_eq!(first["title"], "Observed rate against the ceiling");
    assert_eq!((number(first, "x"), number(first, "y")), (0, 0));
    for panel in panels {
        for x in number(panel, "x")..number(panel, "x") + number(panel, "w") {
            for y in number(panel, "y")..number(panel, "y") + number(panel, "h") {
                assert!(
                    x < 24 && taken.insert((x, y)),
                    "{} overlaps",
                    panel["title"]
                );
            }
        }
    }
    let ids: BTreeSet<_> = panels.iter().filter_map(|p| p["id"].as_u64()).collect();
    assert_eq!(ids.len(), panels.len());
    let sources = yaml("grafana/provisioning/datasources/prometheus.yaml");
    let chosen = &dashboard["templating"]["list"][0]["current"]["value"];
    assert_eq!(chosen, &sources[0]["datasources"][0]["uid"]);
}

#[test]
fn systemd_accepts_the_unit_and_finds_it_closed() {
    let site = Site::new();
    let unit = shipped_text("systemd/paceline.service");
    // The one thing that is looked for on this machine is the program.
    let program = super::program();
    let unit = replaced(&unit, "=/usr/local/bin/paceline ", &format!("={program} "));
    let path = site.write("paceline.service", &unit);
    for arguments in [
        &["verify"][..],
        &["security", "--offline=yes", "--threshold=15", "--no-pager"],
    ] {
        let mut command = Command::new("/usr/bin/systemd-analyze");
        command.args(arguments).arg(&path);
        let outcome = tool(command);
        let said = format!("{}{}", outcome.text(), outcome.stderr);
        assert!(outcome.status.success(), "{arguments:?}: {said}");
        if arguments == ["verify"] {
            assert!(!said.contains("paceline.service:"), "{said}");
        }
    }
    for line in [
        "Type=notify",
        "WatchdogSec=",
        "ExecReload=",
        "RestartPreventExitStatus=2",
    ] {
        assert!(unit.contains(line), "{line}");
    }
}

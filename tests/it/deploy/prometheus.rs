//! Debian's Prometheus with the shipped configuration and rules, in which the addresses alone are the test's.

use std::{
    net::SocketAddr,
    process::Command,
    time::{Duration, SystemTime},
};

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;

use super::{replaced, shipped_text};
use crate::bed::{
    await_until::await_until, client::Session, free_address, process::Process, recipe::Site,
};

const PATIENCE: Duration = Duration::from_secs(20);

/// A running Prometheus; dropped, it is killed.
pub struct Prometheus {
    address: SocketAddr,
    _process: Process,
}

impl Prometheus {
    /// Prometheus that scrapes three replicas, and has done so once.
    pub fn watching(site: &Site, replicas: [SocketAddr; 3]) -> Prometheus {
        for _ in 0..5 {
            if let Some(prometheus) = Prometheus::try_start(site, replicas) {
                return prometheus;
            }
        }
        panic!("Prometheus found no free port in five attempts");
    }

    fn try_start(site: &Site, replicas: [SocketAddr; 3]) -> Option<Prometheus> {
        let address = free_address();
        let mut text = shipped_text("prometheus/prometheus.yml");
        for (n, replica) in (1..).zip(replicas) {
            text = replaced(&text, &format!("paceline-{n}:9128"), &replica.to_string());
        }
        let config = site.write("prometheus.yml", &text);
        site.write("rules.yml", &shipped_text("prometheus/rules.yml"));
        let mut command = Command::new("/usr/bin/prometheus");
        command
            .arg(format!("--config.file={}", config.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                site.path().join("tsdb").display()
            ))
            .arg(format!("--web.listen-address={address}"));
        let mut process = Process::start("prometheus", site.path(), command)
            .expect("prometheus, as tests/run installs it");
        let up = await_until("Prometheus has scraped all or ends", PATIENCE, || {
            if process.ended().is_some() {
                return Some(false);
            }
            let counted = ask(address, "/api/v1/query?query=sum(up)")?;
            (number(&counted)? == 3.0).then_some(true)
        });
        up.then_some(Prometheus {
            address,
            _process: process,
        })
    }

    /// The answer to one expression, as it was at `time`: every sample with its labels.
    pub fn query(&self, expression: &str, time: SystemTime) -> Result<Value, String> {
        let since = time.duration_since(SystemTime::UNIX_EPOCH);
        let seconds = since.expect("after 1970").as_secs_f64();
        let expression = utf8_percent_encode(expression, NON_ALPHANUMERIC);
        let target = format!("/api/v1/query?time={seconds:.3}&query={expression}");
        let answer = ask(self.address, &target).ok_or("no answer")?;
        match answer["status"].as_str() {
            Some("success") => Ok(answer["data"]["result"].clone()),
            _ => Err(answer.to_string()),
        }
    }

    /// The value of an expression that has one.
    pub fn number(&self, expression: &str, time: SystemTime) -> f64 {
        let result = self
            .query(expression, time)
            .unwrap_or_else(|e| panic!("{e}"));
        let value = result[0]["value"][1].as_str().and_then(|v| v.parse().ok());
        value.unwrap_or_else(|| panic!("{expression} is {result}"))
    }

    /// Every rule with its name, health and state.
    pub fn rules(&self) -> Vec<Value> {
        let answer = ask(self.address, "/api/v1/rules").expect("an answer");
        let groups = answer["data"]["groups"].as_array().expect("groups");
        let rules = groups.iter().filter_map(|g| g["rules"].as_array());
        rules.flatten().cloned().collect()
    }
}

fn ask(address: SocketAddr, target: &str) -> Option<Value> {
    let mut session = Session::open(address, &address.to_string()).ok()?;
    let answer = session.get_with(target, &["Connection: close"]).ok()?;
    serde_json::from_slice(&answer.body).ok()
}

fn number(answer: &Value) -> Option<f64> {
    answer["data"]["result"][0]["value"][1]
        .as_str()?
        .parse()
        .ok()
}

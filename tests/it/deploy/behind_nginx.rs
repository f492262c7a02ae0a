//! Three replicas on one Postgres behind nginx, watched by Prometheus: one ceiling, every client known, nobody's fetch
//! lost to a reload or a stop. These have the machine to themselves (`.config/nextest.toml`).

use std::{
    net::{IpAddr, SocketAddr},
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::{Duration, SystemTime},
};

use rustix::process::Signal;
use serde_json::Value;

use super::{nginx::Nginx, prometheus::Prometheus, shipped_text};
use crate::bed::{
    await_until::await_until,
    free_address,
    origin::Origin,
    postgres::Postgres,
    recipe::{Recipe, Site},
    replica::Replica,
    timeline::Pace,
    worker::Worker,
};

const HOST: &str = "lh3.googleusercontent.com";
const CLIENTS: u8 = 6;
const FETCHES: usize = 480;

/// 20/s: an interval of 50 ms.
const TWENTY_PER_SECOND: Pace = Pace {
    slowest: 19.8,
    fastest: 20.02,
    busiest_second: 21,
    first_percentile_gap: Duration::from_millis(40),
};

fn recipe(postgres: &Postgres, origin: &Origin, rate: &str) -> Recipe {
    Recipe::new()
        .store(&postgres.url())
        .proxy("proxy_protocol_from = [\"127.0.0.1\"]")
        .destination("google_image", &["*.googleusercontent.com"], rate)
        .origin(origin)
}

/// The address of one of the clients; nginx's own, towards the replicas, is 127.0.0.1.
fn address_of(client: u8) -> IpAddr {
    IpAddr::from([127, 0, 0, 10 + client])
}

#[test]
fn one_ceiling_every_client_known_and_prometheus_agrees_with_the_origin() {
    let (postgres, origin, site) = (Postgres::start(), Origin::tls(&[HOST]), Site::new());
    let recipe = recipe(&postgres, &origin, "20.0");
    let replicas = ["r0", "r1", "r2"].map(|name| Replica::start(&site, name, &recipe));
    let nginx = Nginx::before(&site, replicas.each_ref().map(Replica::proxy));
    let admins = replicas.each_ref().map(Replica::admin_address);
    let prometheus = Prometheus::watching(&site, admins);

    let browser = crate::bed::client::Browser::new(
        nginx.address(),
        HOST,
        crate::bed::certs::client_tls_from(&site.root()),
    );
    thread::scope(|scope| {
        for client in 0..CLIENTS {
            let browser = browser.at(address_of(client));
            scope.spawn(move || {
                let mut tunnel = browser.tunnel().expect("a tunnel");
                for n in 0..FETCHES / usize::from(CLIENTS) {
                    let answer = tunnel.get(&format!("/b/100?id=c{client}-{n}"));
                    assert_eq!(answer.expect("an answer").status(), 200);
                }
            });
        }
    });
    let timeline = origin.timeline("c");
    assert_eq!(timeline.count(), FETCHES);
    assert_eq!(TWENTY_PER_SECOND.faults(&timeline), Vec::<String>::new());
    assert_eq!(origin.duplicates(), Vec::<String>::new());

    let logs: String = replicas.iter().map(Replica::stderr).collect();
    let fetches = |client: IpAddr| {
        let named = format!("client={client} method=GET ");
        logs.lines().filter(|line| line.contains(&named)).count()
    };
    for client in 0..CLIENTS {
        assert_eq!(fetches(address_of(client)), FETCHES / usize::from(CLIENTS));
    }
    for replica in &replicas {
        let sent = replica.scrape().sum("paceline_dispatches_total", &[]);
        assert!(sent > Some(50.0), "nginx kept a replica idle: {sent:?}");
    }

    // Scrapes come every five seconds, so the window has four of them in it, and the load lasts four seconds longer.
    let now = SystemTime::now();
    let rate = prometheus.number(
        "sum(rate(paceline_dispatches_total{destination=\"google_image\"}[20s] offset 2s))",
        now,
    );
    let (seen, within) = (timeline.rate(), 0.02);
    assert!(
        (rate / seen - 1.0).abs() <= within,
        "Prometheus says {rate:.3}/s, the origin saw {seen:.3}/s"
    );
    for rule in prometheus.rules() {
        assert_eq!(rule["health"], "ok", "{rule}");
        assert!(
            rule["type"] == "recording" || rule["state"] == "inactive",
            "{rule}"
        );
    }
    let recorded = prometheus.number("paceline:ceiling_rate", now);
    assert!((recorded - 20.0).abs() < 1e-9, "{recorded}");
    let mut shown = 0;
    for (panel, expression) in dashboard_expressions() {
        let samples = prometheus
            .query(&expression, now)
            .unwrap_or_else(|fault| panic!("the dashboard's {panel:?} asks {expression}: {fault}"));
        shown += usize::from(samples.as_array().is_some_and(|s| !s.is_empty()));
        if panel == "Observed rate against the ceiling" {
            assert!(
                samples[0]["value"][1].is_string(),
                "{expression} is {samples}"
            );
        }
    }
    assert!(
        shown >= 25,
        "only {shown} expressions of the dashboard have values"
    );
    assert_eq!(nginx.complaints(), Vec::<String>::new());
}

/// Every expression of the dashboard with its panel's title, as Grafana would ask it.
fn dashboard_expressions() -> Vec<(String, String)> {
    let text = shipped_text("grafana/dashboards/paceline.json");
    let dashboard: Value = serde_json::from_str(&text).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels").iter();
    let expressions = |panel: &Value| {
        let title = panel["title"].as_str().unwrap_or_default().to_owned();
        let targets = panel["targets"].as_array().cloned().unwrap_or_default();
        targets.into_iter().map(move |target| {
            let expression = target["expr"].as_str().expect("an expression");
            let expression = expression
                .replace("$__rate_interval", "20s")
                .replace("$destination", ".+");
            (title.clone(), expression)
        })
    };
    panels.flat_map(expressions).collect()
}

#[test]
fn no_fetch_fails_while_nginx_reloads_and_replicas_come_and_go() {
    let (postgres, origin, site) = (Postgres::start(), Origin::tls(&[HOST]), Site::new());
    let recipe = recipe(&postgres, &origin, "100.0");
    let addresses: [SocketAddr; 3] = [(); 3].map(|()| free_address());
    let start = |n: usize| {
        Replica::start(
            &site,
            &format!("r{n}"),
            &recipe.clone().listen(addresses[n]),
        )
    };
    let mut replicas = [0, 1, 2].map(start);
    let nginx = Nginx::before(&site, addresses);
    let browser = crate::bed::client::Browser::new(
        nginx.address(),
        HOST,
        crate::bed::certs::client_tls_from(&site.root()),
    );
    // Real workers with connections that they keep, and clients with a new connection for each fetch.
    let url = format!("https://{HOST}/b/100");
    let mut workers =
        ["w0", "w1"].map(|name| Worker::start(&site, name, nginx.address(), &url, 250));
    let mut old = browser.tunnel().expect("a tunnel");
    assert_eq!(old.get("/b/1?id=old0").expect("an answer").status(), 200);

    let (stop, fetched) = (AtomicBool::new(false), AtomicUsize::new(0));
    let more = |count: usize| {
        let goal = origin.arrivals().len() + count;
        await_until("fetches go on", Duration::from_secs(20), || {
            (origin.arrivals().len() >= goal).then_some(())
        });
    };
    thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (browser, stop, fetched) = (browser.at(address_of(client)), &stop, &fetched);
            scope.spawn(move || {
                for n in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    match browser.get(&format!("/b/100?id=c{client}-{n}")) {
                        Ok(answer) => assert_eq!(answer.status(), 200, "{}", answer.text()),
                        Err(fault) => {
                            stop.store(true, Ordering::Relaxed);
                            panic!("c{client}-{n}: {fault}");
                        }
                    }
                    fetched.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        workers.iter_mut().for_each(Worker::go);
        more(100);
        nginx.reload();
        more(100);
        assert_eq!(
            old.get("/b/1?id=old1").expect("its tunnel lives").status(),
            200
        );
        replicas[0].signal(Signal::TERM);
        assert_eq!(
            replicas[0].await_end(Duration::from_secs(20)).code(),
            Some(0)
        );
        more(100);
        replicas[0] = start(0);
        await_until("nginx takes it back", Duration::from_secs(20), || {
            let sent = replicas[0].scrape().sum("paceline_dispatches_total", &[]);
            (sent? >= 20.0).then_some(())
        });
        nginx.reload();
        replicas[1].signal(Signal::TERM);
        assert_eq!(
            replicas[1].await_end(Duration::from_secs(20)).code(),
            Some(0)
        );
        more(100);
        stop.store(true, Ordering::Relaxed);
    });
    for worker in workers {
        assert_eq!(worker.statuses(), vec![200; 250]);
    }
    let fetched = fetched.into_inner();
    assert!(fetched >= 300, "{fetched}");
    assert_eq!(origin.timeline("c").count(), fetched);
    assert_eq!(origin.duplicates(), Vec::<String>::new());
    // The replicas that were down were passed over, and their clients did not notice.
    let passed_over = nginx.connections().matches(", 127.0.0.1:").count();
    assert!(passed_over > 0, "no connection met a replica that was down");
}

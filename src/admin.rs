//! The operator's listener: metrics, health, status, and a page to look at.
//!
//! It is a listener of its own so that it cannot be reached by way of the proxy, and so that a flood of workers does
//! not keep the operator out. Changes are POSTs, from loopback or with the token.

use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{
    HeaderValue, Method, Request, Response, StatusCode,
    header::{AUTHORIZATION, CACHE_CONTROL, CONTENT_TYPE, ORIGIN},
};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use percent_encoding::percent_decode_str;
use serde_json::json;
use subtle::ConstantTimeEq as _;
use tokio::net::TcpListener;

use crate::{config::Secret, metrics::Among, pacing::time::LocalTime, proxy::Proxy, store::Store};

/// A head must be there in this time; an idle connection is closed after it too.
const HEAD_DEADLINE: Duration = Duration::from_secs(30);
/// Connections at once: an operator, a Prometheus and a load balancer need few.
const CONNECTIONS: usize = 64;

/// What the listener shows.
#[derive(Debug)]
pub struct Admin {
    /// The proxy at work.
    pub proxy: Arc<Proxy>,
    /// Where its cursors are.
    pub store: Store,
    /// Whether it is going away.
    pub draining: Arc<AtomicBool>,
    /// Lets changes be made from elsewhere than loopback.
    pub token: Option<Secret>,
}

impl Admin {
    /// What keeps this replica from being ready; nothing when it is.
    pub fn blockers(&self) -> Vec<&'static str> {
        let mut blockers = Vec::new();
        if self.draining.load(Relaxed) {
            blockers.push("draining");
        }
        if let Store::Postgres(store) = &self.store {
            blockers.extend(store.membership().blocker());
        }
        blockers
    }

    async fn answer(&self, request: &Request<Incoming>, peer: SocketAddr) -> Response<Full<Bytes>> {
        if request.method() == Method::POST {
            if !self.may_change(request, peer) {
                return text(
                    StatusCode::FORBIDDEN,
                    "changes need a connection from loopback, or \"Authorization: Bearer\" with admin.token\n",
                );
            }
            return self.change(request).await;
        }
        self.show(request)
    }

    /// From loopback, but not on behalf of a web page: a browser on this machine would send what any page tells it to.
    fn may_change(&self, request: &Request<Incoming>, peer: SocketAddr) -> bool {
        let given = request.headers().get(AUTHORIZATION);
        let given = given.and_then(|v| v.as_bytes().strip_prefix(b"Bearer "));
        match (given, &self.token) {
            (Some(given), Some(token)) => given.ct_eq(token.reveal().as_bytes()).into(),
            (Some(_), None) => false,
            (None, _) => {
                peer.ip().to_canonical().is_loopback() && !request.headers().contains_key(ORIGIN)
            }
        }
    }

    async fn change(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        let query = request.uri().query().unwrap_or_default();
        match request.uri().path() {
            "/forget" => match argument(query, "replica") {
                Some(replica) => outcome(self.forget(&replica).await),
                None => text(
                    StatusCode::BAD_REQUEST,
                    "say which: POST /forget?replica=NAME\n",
                ),
            },
            _ => text(
                StatusCode::NOT_FOUND,
                "the only change that can be made is POST /forget?replica=NAME\n",
            ),
        }
    }

    async fn forget(&self, replica: &str) -> Result<String, String> {
        let Store::Postgres(store) = &self.store else {
            return Err("the embedded store has one replica only, this one".to_owned());
        };
        store.forget(replica).await?;
        tracing::info!(replica, "forgotten; its number is free");
        Ok(format!("{replica} is forgotten; its number is free"))
    }

    fn show(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        if request.method() != Method::GET && request.method() != Method::HEAD {
            return text(
                StatusCode::METHOD_NOT_ALLOWED,
                "only GET and POST are understood here\n",
            );
        }
        match request.uri().path() {
            "/metrics" => typed(
                StatusCode::OK,
                "text/plain; version=0.0.4; charset=utf-8",
                self.metrics(),
            ),
            "/healthz" => text(StatusCode::OK, "alive\n"),
            "/readyz" => {
                let blockers = self.blockers();
                if blockers.is_empty() {
                    text(StatusCode::OK, "ready\n")
                } else {
                    text(
                        StatusCode::SERVICE_UNAVAILABLE,
                        format!("not ready: {}\n", blockers.join(", ")),
                    )
                }
            }
            "/status" => typed(
                StatusCode::OK,
                "application/json",
                format!("{:#}\n", self.status()),
            ),
            "/" => typed(StatusCode::OK, "text/html; charset=utf-8", self.page()),
            _ => text(
                StatusCode::NOT_FOUND,
                "try /, /status, /metrics, /healthz or /readyz\n",
            ),
        }
    }

    fn metrics(&self) -> String {
        let now = LocalTime::now();
        let standings: Vec<_> = self
            .proxy
            .destinations
            .iter()
            .map(|d| (d.figures().name().clone(), d.standing(now)))
            .collect();
        let among = match &self.store {
            Store::Memory(_) => Among {
                live: 1,
                ..Among::default()
            },
            Store::Postgres(store) => {
                let (live, silent) = store.membership().count(now);
                Among {
                    degraded: store.membership().is_degraded(),
                    live,
                    silent,
                    clock_steps: store.with_clock(|c| c.steps()),
                }
            }
        };
        self.proxy.metrics.scrape(&standings, among)
    }

    fn status(&self) -> serde_json::Value {
        let now = LocalTime::now();
        let store = match &self.store {
            Store::Memory(_) => json!({"kind": "embedded", "up": true}),
            Store::Postgres(store) => {
                json!({"kind": "postgres", "up": store.is_up(), "degraded": store.membership().is_degraded()})
            }
        };
        let destinations: Vec<_> = self
            .proxy
            .destinations
            .iter()
            .map(|d| {
                let s = d.standing(now);
                json!({
                    "name": &**d.figures().name(),
                    "hosts": d.config().hosts.iter().map(ToString::to_string).collect::<Vec<_>>(),
                    "ceiling_rate": s.ceiling,
                    "effective_rate": s.effective,
                    "observed_rate": s.observed,
                    "busiest_second": s.busiest,
                    "smallest_gap_seconds": s.smallest_gap,
                    "queue_depth": s.waiting,
                    "cluster_observed_rate": s.cluster_observed,
                    "cluster_busiest_second": s.cluster_busiest,
                    "dry_run": d.config().dry_run,
                })
            })
            .collect();
        let replicas: Vec<_> = match &self.store {
            Store::Memory(_) => Vec::new(),
            Store::Postgres(store) => store
                .membership()
                .members(now)
                .iter()
                .map(|m| {
                    json!({"number": m.number, "replica": m.replica, "self": m.is_self, "state": m.state, "silent_for_seconds": m.silent_for})
                })
                .collect(),
        };
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "ready": self.blockers().is_empty(),
            "blockers": self.blockers(),
            "store": store,
            "replicas": replicas,
            "destinations": destinations,
        })
    }

    fn page(&self) -> String {
        let now = LocalTime::now();
        let rows: String = self
            .proxy
            .destinations
            .iter()
            .map(|d| {
                let s = d.standing(now);
                let gap = s
                    .smallest_gap
                    .map_or("-".to_owned(), |g| format!("{:.1} ms", g * 1e3));
                format!(
                    "<tr><td>{}<td>{:.2}/s<td>{:.2}/s<td>{}<td>{gap}<td>{}",
                    d.figures().name(),
                    s.observed,
                    s.effective,
                    s.busiest,
                    s.waiting
                )
            })
            .collect();
        format!(
            "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content=\"width=device-width\">\
             <meta http-equiv=refresh content=2><title>paceline</title><style>body{{font:16px system-ui;margin:2em}}\
             td,th{{text-align:left;padding:.3em 1em .3em 0}}</style><h1>paceline</h1><p>{}<table><tr><th>destination\
             <th>observed<th>ceiling<th>busiest second<th>smallest gap<th>waiting{rows}</table>\n",
            if self.blockers().is_empty() {
                "ready"
            } else {
                "not ready"
            },
        )
    }
}

/// Serves until the last proxy connection is gone: it must tell that the replica drains.
pub async fn run(listener: TcpListener, admin: Arc<Admin>) {
    let room = Arc::new(tokio::sync::Semaphore::new(CONNECTIONS));
    loop {
        let Ok(permit) = room.clone().acquire_owned().await else {
            return;
        };
        let Ok((stream, peer)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let admin = admin.clone();
        tokio::spawn(async move {
            let service = service_fn(move |request: Request<Incoming>| {
                let admin = admin.clone();
                async move { Ok::<_, Infallible>(admin.answer(&request, peer).await) }
            });
            let _ = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_DEADLINE)
                .serve_connection(TokioIo::new(stream), service)
                .await;
            drop(permit);
        });
    }
}

/// The value of `key` in a query, decoded; `None` when it is missing, empty, or no text.
fn argument(query: &str, key: &str) -> Option<String> {
    let value = query
        .split('&')
        .find_map(|pair| pair.strip_prefix(key)?.strip_prefix('='))?;
    let value = percent_decode_str(value).decode_utf8().ok()?;
    (!value.is_empty()).then(|| value.into_owned())
}

/// A change that was made, or why it was not.
fn outcome(outcome: Result<String, String>) -> Response<Full<Bytes>> {
    match outcome {
        Ok(done) => text(StatusCode::OK, done + "\n"),
        Err(why) => text(StatusCode::CONFLICT, why + "\n"),
    }
}

fn text(status: StatusCode, text: impl Into<Bytes>) -> Response<Full<Bytes>> {
    typed(status, "text/plain; charset=utf-8", text)
}

fn typed(status: StatusCode, kind: &'static str, text: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(text.into()));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
        .headers_mut()
        .insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

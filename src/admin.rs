//! The operator's listener: metrics, health, status, and a page to look at.
//!
//! It is a listener of its own so that it cannot be reached by way of the proxy, and so that a flood of workers does
//! not keep the operator out. Changes are POSTs, from loopback or with the token.

mod page;
pub mod status;

use std::{
    convert::Infallible,
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{
    HeaderMap, HeaderValue, Method, Request, Response, StatusCode,
    header::{ALLOW, AUTHORIZATION, CACHE_CONTROL, CONTENT_TYPE, ORIGIN},
};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use percent_encoding::percent_decode_str;
use subtle::ConstantTimeEq as _;
use tokio::net::TcpListener;

use crate::{
    config::{LONGEST_STOP, Secret},
    destination::Destination,
    metrics::Among,
    pacing::{throttle::Cause, time::LocalTime},
    proxy::Proxy,
    store::Store,
};

/// A head must be there in this time.
const HEAD_DEADLINE: Duration = Duration::from_secs(10);
/// The whole of a connection, answer included.
const CONNECTION_DEADLINE: Duration = Duration::from_secs(30);
/// Connections at once: an operator, a Prometheus and a load balancer need few.
const CONNECTIONS: usize = 64;

/// How long an operator's pause may be: anything longer is a destination that should be configured otherwise.
pub const PAUSES: RangeInclusive<Duration> = Duration::from_secs(1)..=LONGEST_STOP;

/// What the listener shows.
#[derive(Debug)]
pub struct Admin {
    /// The proxy at work.
    pub proxy: Arc<Proxy>,
    /// Where its cursors are.
    pub store: Store,
    /// Whether it is going away.
    pub draining: Arc<AtomicBool>,
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
        let path = request.uri().path();
        let (allow, known) = match path {
            "/" | "/status" | "/metrics" | "/healthz" | "/readyz" => ("GET, HEAD", true),
            "/unlock" | "/pause" | "/resume" | "/forget" => ("POST", true),
            _ => ("", false),
        };
        if !known {
            return text(
                StatusCode::NOT_FOUND,
                "try /, /status, /metrics, /healthz or /readyz; changes are POSTs to /unlock, /pause, /resume and /forget\n",
            );
        }
        if !allow.split(", ").any(|m| m == request.method().as_str()) {
            let what = format!("{path} takes {allow}\n");
            let mut response = text(StatusCode::METHOD_NOT_ALLOWED, what);
            let allow = HeaderValue::from_static(allow);
            response.headers_mut().insert(ALLOW, allow);
            return response;
        }
        if request.method() != Method::POST {
            return self.show(path, request.uri().query().unwrap_or_default());
        }
        let rules = self.proxy.in_force.now();
        let token = rules.config.admin.token.as_ref();
        if let Err(why) = may_change(request.headers(), peer.ip(), token) {
            return text(StatusCode::FORBIDDEN, format!("{why}\n"));
        }
        self.change(path, request.uri().query().unwrap_or_default())
            .await
    }

    async fn change(&self, path: &str, query: &str) -> Response<Full<Bytes>> {
        let needed = |key| argument(query, key).ok_or_else(|| Refused::Usage(path.to_owned()));
        let done = async {
            match path {
                "/forget" => self.forget(&needed("replica")?).await,
                "/unlock" => self.unlock(&needed("destination")?).await,
                "/resume" => self.resume(&needed("destination")?).await,
                "/pause" => {
                    let (destination, span) = (needed("destination")?, needed("for")?);
                    let span = humantime::parse_duration(&span).ok();
                    match span.filter(|span| PAUSES.contains(span)) {
                        Some(span) => self.pause(&destination, span).await,
                        None => Err(Refused::Span),
                    }
                }
                _ => Err(Refused::Usage(path.to_owned())),
            }
        };
        match done.await {
            Ok(done) => text(StatusCode::OK, done + "\n"),
            Err(refused) => refused.answer(),
        }
    }

    /// The destination of that name.
    fn destination(&self, name: &str) -> Result<Arc<Destination>, Refused> {
        let rules = self.proxy.in_force.now();
        let mut all = rules.destinations.iter();
        all.find(|d| d.config().name == name)
            .cloned()
            .ok_or_else(|| {
                let all = rules.destinations.iter();
                let names: Vec<_> = all.map(|d| d.config().name.clone()).collect();
                Refused::Unknown(format!(
                    "no destination is called {}; those configured: {}",
                    name.escape_debug(),
                    names.join(", ")
                ))
            })
    }

    async fn unlock(&self, name: &str) -> Result<String, Refused> {
        let destination = self.destination(name)?;
        if !destination.unlock().await.map_err(Refused::Now)? {
            return Err(Refused::Now(not_so(&destination, "not locked")));
        }
        tracing::info!(destination = name, "unlocked by an operator");
        Ok(format!("{name} is unlocked, in all replicas"))
    }

    async fn pause(&self, name: &str, span: Duration) -> Result<String, Refused> {
        let destination = self.destination(name)?;
        destination.pause(span).await.map_err(Refused::Now)?;
        let span = humantime::format_duration(span);
        tracing::info!(destination = name, %span, "paused by an operator");
        Ok(format!(
            "{name} is paused for {span}, in all replicas; `paceline resume {name}` ends it before"
        ))
    }

    async fn resume(&self, name: &str) -> Result<String, Refused> {
        let destination = self.destination(name)?;
        if !destination.resume().await.map_err(Refused::Now)? {
            return Err(Refused::Now(not_so(&destination, "not paused")));
        }
        tracing::info!(destination = name, "resumed by an operator");
        Ok(format!("{name} goes on, in all replicas"))
    }

    async fn forget(&self, replica: &str) -> Result<String, Refused> {
        let Store::Postgres(store) = &self.store else {
            return Err(Refused::Now(
                "the embedded store has one replica only, this one".to_owned(),
            ));
        };
        store.forget(replica).await.map_err(Refused::Now)?;
        tracing::info!(replica, "forgotten; its number is free");
        Ok(format!("{replica} is forgotten; its number is free"))
    }

    fn show(&self, path: &str, query: &str) -> Response<Full<Bytes>> {
        match path {
            "/metrics" => typed(
                StatusCode::OK,
                "text/plain; version=0.0.4; charset=utf-8",
                self.metrics(),
            ),
            "/readyz" => match self.blockers().as_slice() {
                [] => text(StatusCode::OK, "ready\n"),
                some => text(
                    StatusCode::SERVICE_UNAVAILABLE,
                    format!("not ready: {}\n", some.join(", ")),
                ),
            },
            "/status" => typed(
                StatusCode::OK,
                "application/json",
                match argument(query, "history") {
                    // Its lists would have a line for each second.
                    Some(_) => format!("{}\n", status::status(self, true)),
                    None => format!("{:#}\n", status::status(self, false)),
                },
            ),
            "/" => page::respond(&status::status(self, true)),
            _ => text(StatusCode::OK, "alive\n"),
        }
    }

    fn metrics(&self) -> String {
        let (now, rules) = (LocalTime::now(), self.proxy.in_force.now());
        let standings: Vec<_> = rules
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
            // One answer for each connection, and an end to each: some who do not read what they asked for must not take all
            // the places there are.
            let served = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_DEADLINE)
                .keep_alive(false)
                .serve_connection(TokioIo::new(stream), service);
            let _ = tokio::time::timeout(CONNECTION_DEADLINE, served).await;
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

/// Whether this request may change something: from loopback, but not on behalf of a web page, for a browser on this
/// machine sends what any page tells it to; or from anywhere with the token. A token that is wrong is wrong from
/// loopback too.
///
/// # Errors
/// Why not, and what to change.
fn may_change(
    headers: &HeaderMap,
    peer: IpAddr,
    token: Option<&Secret>,
) -> Result<(), &'static str> {
    let is_near = peer.to_canonical().is_loopback();
    match (headers.get(AUTHORIZATION), token) {
        (Some(given), Some(token)) => {
            let given = given
                .as_bytes()
                .strip_prefix(b"Bearer ")
                .ok_or("the token is not sent as \"Authorization: Bearer TOKEN\"; send it so")?;
            match given.ct_eq(token.reveal().as_bytes()).into() {
                true => Ok(()),
                false => Err(
                    "the token is wrong; give admin.token of this replica, in PACELINE_ADMIN_TOKEN or by --config",
                ),
            }
        }
        (Some(_), None) => Err(
            "a token was sent, but this replica has no admin.token; set one, or send the change from loopback without",
        ),
        (None, _) if is_near && !headers.contains_key(ORIGIN) => Ok(()),
        (None, Some(_)) => Err(
            "the token is missing; give admin.token of this replica, in PACELINE_ADMIN_TOKEN or by --config (or as \"Authorization: Bearer TOKEN\")",
        ),
        (None, None) if is_near => Err(
            "a change that a web page asks for needs a token, and this replica has no admin.token; use `paceline`",
        ),
        (None, None) => Err(
            "changes from elsewhere than loopback need a token, and this replica has no admin.token; set one, or send the change from loopback",
        ),
    }
}

/// That a destination is not what the command would end; and which other command ends what it is, if it is anything.
fn not_so(destination: &Destination, what: &str) -> String {
    let name = &destination.config().name;
    let halt = destination.standing(LocalTime::now()).regime.halt;
    match halt.map(|halt| halt.cause) {
        Some(Cause::Lockout(_)) => {
            format!("{name} is {what} but locked out; `paceline unlock {name}` ends that")
        }
        Some(Cause::Pause | Cause::Hold) => {
            format!("{name} is {what} but paused; `paceline resume {name}` ends that")
        }
        None => format!("{name} is {what}"),
    }
}

/// Why a change was not made.
enum Refused {
    /// This path was asked without what it needs.
    Usage(String),
    /// A pause must not last so long, or so short, or what was said is no time.
    Span,
    /// There is nothing of that name; the text says what there is.
    Unknown(String),
    /// It cannot be made as things are; the text says why.
    Now(String),
}

impl Refused {
    fn answer(self) -> Response<Full<Bytes>> {
        match self {
            Refused::Usage(path) => {
                let needs = match path.as_str() {
                    "/forget" => "?replica=NAME",
                    "/pause" => {
                        "?destination=NAME&for=DURATION, such as 90s or 15m, from 1s to 30days"
                    }
                    _ => "?destination=NAME",
                };
                text(
                    StatusCode::BAD_REQUEST,
                    format!("say which: POST {path}{needs}\n"),
                )
            }
            Refused::Span => text(
                StatusCode::BAD_REQUEST,
                "a pause lasts from 1 s to 30 days; say how long, such as 90s, 15m or \"1h 30m\"\n",
            ),
            Refused::Unknown(what) => text(StatusCode::NOT_FOUND, what + "\n"),
            Refused::Now(why) => text(StatusCode::CONFLICT, why + "\n"),
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_come_from_loopback_or_with_the_token_and_never_from_a_web_page_alone() {
        let token = Secret::new("right");
        let headers = |fields: &[(http::HeaderName, &'static str)]| {
            let field = |(name, value): &(http::HeaderName, &'static str)| {
                (name.clone(), HeaderValue::from_static(value))
            };
            fields.iter().map(field).collect::<HeaderMap>()
        };
        let (none, page) = (headers(&[]), headers(&[(ORIGIN, "http://page.test")]));
        let (right, wrong) = (
            headers(&[(AUTHORIZATION, "Bearer right")]),
            headers(&[(AUTHORIZATION, "Bearer wrong")]),
        );
        let basic = headers(&[(AUTHORIZATION, "Basic cmlnaHQ=")]);
        let both = headers(&[
            (AUTHORIZATION, "Bearer right"),
            (ORIGIN, "http://page.test"),
        ]);
        let (near, mapped, far) = ("127.0.0.1", "::ffff:127.0.0.1", "192.0.2.7");
        for (fields, peer, with_token, without) in [
            (&none, near, true, true),
            (&none, mapped, true, true),
            (&none, "::1", true, true),
            (&none, far, false, false),
            (&none, "10.0.0.1", false, false),
            (&page, near, false, false),
            (&right, near, true, false),
            (&right, far, true, false),
            (&wrong, near, false, false),
            (&wrong, far, false, false),
            (&basic, near, false, false),
            (&basic, far, false, false),
            (&both, far, true, false),
        ] {
            let peer = peer.parse().expect("an address");
            assert_eq!(
                may_change(fields, peer, Some(&token)).is_ok(),
                with_token,
                "{fields:?} {peer}"
            );
            assert_eq!(
                may_change(fields, peer, None).is_ok(),
                without,
                "{fields:?} {peer}, no token"
            );
        }
    }

    #[test]
    fn a_refused_change_says_whether_the_token_is_missing_or_wrong() {
        let (far, token) = (
            "192.0.2.7".parse().expect("an address"),
            Secret::new("right"),
        );
        let why = |authorization: Option<&'static str>, token: Option<&Secret>| {
            let field = authorization.map(|text| (AUTHORIZATION, HeaderValue::from_static(text)));
            let headers: HeaderMap = field.into_iter().collect();
            may_change(&headers, far, token).expect_err("refused")
        };
        for (authorization, token, word) in [
            (None, Some(&token), "is missing"),
            (Some("Bearer left"), Some(&token), "is wrong"),
            (Some("Basic cmlnaHQ="), Some(&token), "Bearer"),
            (Some("Bearer left"), None, "has no admin.token"),
            (None, None, "has no admin.token"),
        ] {
            let why = why(authorization, token);
            assert!(why.contains(word), "{authorization:?}: {why}");
            assert!(!why.contains("right") && !why.contains("left"), "{why}");
        }
    }

    #[test]
    fn arguments_are_decoded_and_none_is_empty() {
        let query = "destination=a%20b&for=1h&empty=&bad=%ff";
        assert_eq!(argument(query, "destination").as_deref(), Some("a b"));
        assert_eq!(argument(query, "for").as_deref(), Some("1h"));
        for missing in ["empty", "bad", "dest", "replica"] {
            assert_eq!(argument(query, missing), None, "{missing}");
        }
    }
}

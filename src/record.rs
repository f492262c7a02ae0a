//! One record for each request and each tunnel: the access line and the counters come from the same value.
//!
//! A record is made when the request head has been read and is dropped when the last byte of the answer is gone or
//! the client is, whichever comes first; the drop writes the line. Queries are left out: they hold keys and tokens.

use std::{
    fmt,
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use http::{Method, StatusCode};
use tokio::time::Instant;

use crate::{
    authority::Authority,
    destination::Destination,
    error::Error,
    log::{self, Line},
    metrics::Metrics,
    upstream::Scheme,
};

/// The longest path that a line shows, in bytes.
const PATH_SHOWN: usize = 512;
/// The longest method: any word may be one.
const METHOD_SHOWN: usize = 24;

/// What is known of a request so far.
#[derive(Debug)]
pub struct Record {
    metrics: Arc<Metrics>,
    client: IpAddr,
    user: Option<Arc<str>>,
    method: Method,
    scheme: Option<Scheme>,
    authority: Option<Authority>,
    path: Box<str>,
    destination: Option<Arc<Destination>>,
    started: Instant,
    queued: Option<Duration>,
    connected: Option<Duration>,
    first_byte: Option<Duration>,
    status: Option<StatusCode>,
    outcome: &'static str,
    /// How often it was sent again after a throttle status.
    again: u32,
    sent: Arc<AtomicU64>,
    received: u64,
}

impl Record {
    /// A request of `client` has been read.
    pub fn new(
        metrics: Arc<Metrics>,
        client: IpAddr,
        user: Option<Arc<str>>,
        method: Method,
    ) -> Self {
        Record {
            metrics,
            client,
            user,
            method,
            scheme: None,
            authority: None,
            path: "".into(),
            destination: None,
            started: Instant::now(),
            queued: None,
            connected: None,
            first_byte: None,
            status: None,
            outcome: "client_gone",
            again: 0,
            sent: Arc::default(),
            received: 0,
        }
    }

    /// Whom it is for.
    pub fn target(&mut self, scheme: Option<Scheme>, authority: &Authority, path: &str) {
        self.scheme = scheme;
        self.authority = Some(authority.clone());
        self.path = shown(path, PATH_SHOWN).into();
    }

    /// Host and port that it is for.
    pub fn authority(&self) -> Option<&Authority> {
        self.authority.as_ref()
    }

    /// Which destination governs it.
    pub fn governed_by(&mut self, destination: Arc<Destination>) {
        self.destination = Some(destination);
    }

    /// The name of the destination that governs it.
    pub fn destination(&self) -> Option<&str> {
        self.destination.as_ref().map(|d| &**d.figures().name())
    }

    /// Its turn came.
    pub fn queued(&mut self) {
        self.queued = Some(self.started.elapsed());
    }

    /// Its connection took so long to make ready.
    pub fn connected(&mut self, took: Duration) {
        *self.connected.get_or_insert_default() += took;
    }

    /// The answer's head is there.
    pub fn answered(&mut self, status: StatusCode) {
        self.first_byte = Some(self.started.elapsed());
        self.status = Some(status);
        if let Some(destination) = &self.destination {
            destination.figures().responded(status);
        }
    }

    /// The origin answered with `status`, and the request is to be sent again.
    pub fn goes_again(&mut self, status: StatusCode) {
        self.again += 1;
        if let Some(destination) = &self.destination {
            destination.figures().responded(status);
        }
    }

    /// So many bytes of the answer's body, or of a tunnel towards the client, went by.
    pub fn received(&mut self, bytes: u64) {
        self.received += bytes;
    }

    /// Where bytes of the request's body, or of a tunnel towards the origin, are counted.
    pub fn sent(&self) -> Arc<AtomicU64> {
        self.sent.clone()
    }

    /// It was answered whole.
    pub fn complete(&mut self) {
        self.outcome = "ok";
    }

    /// It ended otherwise, for this reason.
    pub fn broke_off(&mut self, reason: &'static str) {
        self.outcome = reason;
    }

    /// It was answered by us, or its answer broke off.
    pub fn failed(&mut self, error: &Error, status: Option<StatusCode>) {
        self.outcome = error.reason();
        self.status = status.or(self.status);
    }
}

/// The beginning of a text, up to so many bytes.
fn shown(text: &str, limit: usize) -> &str {
    let mut end = text.len().min(limit);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

impl Record {
    /// The access line: what it holds is told in docs/operations.md.
    fn write_line(&self, destination: &str, total: Duration) {
        let mut line = Line::begin("access");
        line.plain("client", self.client);
        if let Some(user) = &self.user {
            line.quoted("user", user);
        }
        line.word("method", shown(self.method.as_str(), METHOD_SHOWN));
        line.plain("url", Url(self));
        line.quoted("destination", destination);
        if let Some(status) = self.status {
            line.number("status", status.as_u16().into());
        }
        line.quoted("outcome", self.outcome);
        if self.again > 0 {
            line.number("again", self.again.into());
        }
        let spans = [
            ("queue_s", self.queued),
            ("connect_s", self.connected),
            ("first_byte_s", self.first_byte),
            ("total_s", Some(total)),
        ];
        for (name, span) in spans {
            if let Some(span) = span {
                line.seconds(name, span);
            }
        }
        line.number("sent", self.sent.load(Relaxed));
        line.number("received", self.received);
        line.end();
    }
}

/// The URL as a line shows it.
struct Url<'r>(&'r Record);

impl fmt::Display for Url<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(scheme) = self.0.scheme {
            write!(f, "{}://", scheme.as_str())?;
        }
        if let Some(authority) = &self.0.authority {
            write!(f, "{authority}")?;
        }
        log::Escaped(&self.0.path).fmt(f)
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let total = self.started.elapsed();
        let destination = self
            .destination
            .as_ref()
            .map_or("", |d| &**d.figures().name());
        // What goes on inside a tunnel is counted by itself; the tunnel counts only where it was refused.
        let opened = self.method == Method::CONNECT && self.status.is_none();
        match &self.destination {
            _ if opened => {}
            Some(d) => d.figures().answered(self.outcome),
            None => self.metrics.request("", self.outcome),
        }
        if tracing::enabled!(target: "access", tracing::Level::INFO) {
            self.write_line(destination, total);
        }
    }
}

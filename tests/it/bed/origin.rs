//! A real origin, plain or TLS, that time-stamps each request when its head is parsed, and can misbehave in one named
//! way. It knows nothing of proxies: what it records is what reached it.
//!
//! `/b/N` answers N bytes of a known pattern. `?status=S`, `?protest_every=N` (429 to each Nth request of all), `?delay_ms=D`, `?h=Name:Value` and `?chunked=1` bend the
//! answer, `?fault=none` closes without one and `?fault=body` after its head, `?id=X` (or a field `X-Id`) names the
//! request. An uploaded body is counted and hashed, never kept.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::{
    Request, Response,
    body::{Body, Frame, Incoming, SizeHint},
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::ServerConfig;
use sha2::{Digest, Sha256};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};
use tokio_rustls::TlsAcceptor;

use super::{
    certs::{TestCa, server_tls},
    http_text::field,
    origin_misbehaves,
    pattern::{hex, pattern},
    runtime,
    timeline::{Timeline, duplicates},
};

/// How the origin behaves towards connections accepted from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// As HTTP says.
    Serve,
    /// Closes each connection as soon as it is accepted.
    CloseOnAccept,
    /// Reads a request, then resets the connection in the middle of the answer's head.
    ResetMidHead,
    /// Answers with half of the promised body, then closes.
    HalfBody,
    /// Answers one request in full and closes, without having said so.
    CloseUnannounced,
    /// Accepts, and never says a word.
    Silent,
}

/// One request, as it arrived.
#[derive(Clone, Debug)]
pub struct Arrival {
    /// When its head was parsed.
    pub at: Instant,
    /// `GET`
    pub method: String,
    /// The request target, as sent.
    pub target: String,
    /// All fields.
    pub fields: Vec<(String, String)>,
    /// Which accepted connection, counted from 0.
    pub connection: usize,
    /// What the client calls the request.
    pub id: Option<String>,
}

impl Arrival {
    /// The first field of that name, whatever its case.
    pub fn field(&self, name: &str) -> Option<&str> {
        field(&self.fields, name)
    }
}

/// What an origin has seen, and how it behaves; shared with its connections.
pub struct Book {
    start: Instant,
    arrivals: Mutex<Vec<Arrival>>,
    manner: Mutex<Manner>,
    connections: AtomicUsize,
    uploaded: AtomicU64,
    sent: AtomicU64,
}

/// A running origin; dropped, it is closed with all its connections.
pub struct Origin {
    address: SocketAddr,
    names: Vec<String>,
    root: Option<String>,
    book: Arc<Book>,
    accepting: JoinHandle<()>,
}

impl Origin {
    /// An origin that speaks clear text.
    pub fn plain(names: &[&str]) -> Origin {
        Origin::start(names, None, None)
    }

    /// An origin with a certificate for all of `names`, from a CA of its own.
    pub fn tls(names: &[&str]) -> Origin {
        let ca = TestCa::new();
        let tls = server_tls(&ca.issue(names));
        Origin::start(names, Some(ca.root().to_owned()), Some(tls))
    }

    fn start(names: &[&str], root: Option<String>, tls: Option<Arc<ServerConfig>>) -> Origin {
        let listener = runtime()
            .block_on(TcpListener::bind("127.0.0.1:0"))
            .expect("a port for the origin");
        let address = listener.local_addr().expect("the bound address");
        let book = Arc::new(Book {
            start: Instant::now(),
            arrivals: Mutex::default(),
            manner: Mutex::new(Manner::Serve),
            connections: AtomicUsize::new(0),
            uploaded: AtomicU64::new(0),
            sent: AtomicU64::new(0),
        });
        let accepting = runtime().spawn(accept(listener, tls.map(TlsAcceptor::from), book.clone()));
        Origin {
            address,
            names: names.iter().map(|name| name.to_string()).collect(),
            root,
            book,
            accepting,
        }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The names it stands for.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The root that its certificate hangs from; `None` for a plain origin.
    pub fn root(&self) -> Option<&str> {
        self.root.as_deref()
    }

    /// Behaves differently from the next connection on.
    pub fn behave(&self, manner: Manner) {
        *self.book.manner.lock().expect("no panic under the lock") = manner;
    }

    /// All requests so far.
    pub fn arrivals(&self) -> Vec<Arrival> {
        self.book
            .arrivals
            .lock()
            .expect("no panic under the lock")
            .clone()
    }

    /// Connections accepted so far.
    pub fn connections(&self) -> usize {
        self.book.connections.load(Ordering::Relaxed)
    }

    /// Body bytes received so far, of all uploads.
    pub fn uploaded(&self) -> u64 {
        self.book.uploaded.load(Ordering::Relaxed)
    }

    /// Body bytes of answers that the sockets have taken so far, but for what one write may hold.
    pub fn sent(&self) -> u64 {
        self.book.sent.load(Ordering::Relaxed)
    }

    /// The requests whose id begins with `prefix`, on the time since the origin's start.
    pub fn timeline(&self, prefix: &str) -> Timeline {
        let named = |arrival: &&Arrival| {
            arrival
                .id
                .as_deref()
                .unwrap_or_default()
                .starts_with(prefix)
        };
        Timeline::new(
            self.arrivals()
                .iter()
                .filter(named)
                .map(|arrival| arrival.at - self.book.start)
                .collect(),
        )
    }

    /// Now, on the axis of [`Origin::timeline`].
    pub fn elapsed(&self) -> Duration {
        self.book.start.elapsed()
    }

    /// Ids that arrived more than once.
    pub fn duplicates(&self) -> Vec<String> {
        let arrivals = self.arrivals();
        duplicates(arrivals.iter().filter_map(|arrival| arrival.id.as_deref()))
            .into_iter()
            .map(str::to_owned)
            .collect()
    }
}

impl Drop for Origin {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Book {
    fn received(&self) -> usize {
        self.arrivals.lock().expect("no panic under the lock").len()
    }

    /// Notes a request. To be called the moment its head is known.
    pub fn note(
        &self,
        connection: usize,
        method: String,
        target: String,
        fields: Vec<(String, String)>,
    ) {
        let at = Instant::now();
        let id = field(&fields, "x-id")
            .map(str::to_owned)
            .or_else(|| query(&target, "id"));
        let arrival = Arrival {
            at,
            method,
            target,
            fields,
            connection,
            id,
        };
        self.arrivals
            .lock()
            .expect("no panic under the lock")
            .push(arrival);
    }
}

async fn accept(listener: TcpListener, tls: Option<TlsAcceptor>, book: Arc<Book>) {
    // Tasks in the set end with it, so an origin that is dropped also closes its connections.
    let mut connections = tokio::task::JoinSet::new();
    while let Ok((tcp, _)) = listener.accept().await {
        let number = book.connections.fetch_add(1, Ordering::Relaxed);
        let manner = *book.manner.lock().expect("no panic under the lock");
        let _ = tcp.set_nodelay(true);
        let (tls, book) = (tls.clone(), book.clone());
        connections.spawn(async move {
            // A failed handshake or a reset is the test's doing; the tests look at what clients and the book saw.
            let _ = converse(tcp, tls, manner, number, book).await;
        });
        while connections.try_join_next().is_some() {}
    }
}

async fn converse(
    tcp: TcpStream,
    tls: Option<TlsAcceptor>,
    manner: Manner,
    number: usize,
    book: Arc<Book>,
) -> io::Result<()> {
    match manner {
        Manner::CloseOnAccept => return Ok(()),
        Manner::Silent => std::future::pending::<()>().await,
        Manner::ResetMidHead => origin_misbehaves::reset_when_closed(&tcp)?,
        Manner::Serve | Manner::HalfBody | Manner::CloseUnannounced => {}
    }
    match tls {
        Some(tls) => speak(tls.accept(tcp).await?, manner, number, book).await,
        None => speak(tcp, manner, number, book).await,
    }
}

async fn speak<S>(stream: S, manner: Manner, number: usize, book: Arc<Book>) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    if manner != Manner::Serve {
        return origin_misbehaves::answer(stream, manner, number, &book).await;
    }
    let service = service_fn(move |request| answer(request, number, book.clone()));
    hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(None)
        .serve_connection(TokioIo::new(stream), service)
        .await
        .map_err(io::Error::other)
}

async fn answer(
    request: Request<Incoming>,
    connection: usize,
    book: Arc<Book>,
) -> io::Result<Response<Pieces>> {
    let target = request.uri().to_string();
    let fields = request
        .headers()
        .iter()
        .map(|(name, value)| {
            (
                name.to_string(),
                String::from_utf8_lossy(value.as_bytes()).into_owned(),
            )
        })
        .collect();
    book.note(
        connection,
        request.method().to_string(),
        target.clone(),
        fields,
    );
    if let Some(delay) = query(&target, "delay_ms").and_then(|delay| delay.parse().ok()) {
        tokio::time::sleep(Duration::from_millis(delay)).await;
    }
    let fault = query(&target, "fault");
    if fault.as_deref() == Some("none") {
        return Err(io::Error::other("closed, as asked"));
    }
    let mut response = Response::builder();
    let protests = query(&target, "protest_every").and_then(|every| every.parse().ok());
    if protests.is_some_and(|every: usize| book.received().is_multiple_of(every)) {
        response = response.status(429);
    } else if let Some(status) = query(&target, "status") {
        response = response.status(status.as_str());
    }
    if let Some((name, value)) = query(&target, "h")
        .as_deref()
        .and_then(|field| field.split_once(':'))
    {
        response = response.header(name, value.replace("%20", " "));
    }
    if let Some(date) = query(&target, "date") {
        response = response.header("Date", date.replace("%20", " "));
    }
    let mut body = if request.body().is_end_stream() {
        let path = target.split('?').next().unwrap_or_default();
        let length = path
            .rsplit_once("/b/")
            .and_then(|(_, length)| length.parse().ok())
            .unwrap_or(0);
        let announced = query(&target, "chunked").is_none().then_some(length);
        Pieces {
            left: Box::new(pattern(length)),
            announced,
            breaks: false,
            book: book.clone(),
        }
    } else {
        let (bytes, digest) = swallow(request.into_body(), &book).await?;
        let summary = Bytes::from(format!("{bytes} {digest}"));
        Pieces {
            announced: Some(summary.len() as u64),
            left: Box::new(std::iter::once(summary)),
            breaks: false,
            book: book.clone(),
        }
    };
    body.breaks = fault.as_deref() == Some("body");
    Ok(response
        .body(body)
        .unwrap_or_else(|fault| panic!("{target} asks for an impossible answer: {fault}")))
}

/// A body made while it is sent; hyper asks for the next piece when the socket has room.
struct Pieces {
    left: Box<dyn Iterator<Item = Bytes> + Send>,
    /// The whole length, when it is to be announced; else the body goes out chunked.
    announced: Option<u64>,
    /// Whether it ends before its first byte, and with it the connection.
    breaks: bool,
    book: Arc<Book>,
}

impl Body for Pieces {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if self.breaks {
            return Poll::Ready(Some(Err(io::Error::other("broken off, as asked"))));
        }
        let piece = self.left.next();
        let length = piece.as_ref().map_or(0, Bytes::len) as u64;
        self.book.sent.fetch_add(length, Ordering::Relaxed);
        Poll::Ready(piece.map(|piece| Ok(Frame::data(piece))))
    }

    fn size_hint(&self) -> SizeHint {
        self.announced.map(SizeHint::with_exact).unwrap_or_default()
    }
}

/// Reads a body to its end: how many bytes, and their SHA-256.
async fn swallow(mut body: Incoming, book: &Book) -> io::Result<(u64, String)> {
    let (mut bytes, mut hash) = (0, Sha256::new());
    while let Some(frame) = body.frame().await {
        if let Some(piece) = frame.map_err(io::Error::other)?.data_ref() {
            bytes += piece.len() as u64;
            book.uploaded
                .fetch_add(piece.len() as u64, Ordering::Relaxed);
            hash.update(piece);
        }
    }
    Ok((bytes, hex(&hash.finalize())))
}

fn query(target: &str, name: &str) -> Option<String> {
    let (_, query) = target.split_once('?')?;
    let value = query
        .split('&')
        .find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))?;
    Some(
        percent_encoding::percent_decode_str(value)
            .decode_utf8_lossy()
            .into_owned(),
    )
}

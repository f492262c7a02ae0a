//! Clients in a closed loop on one thread: each sends its next request when it has the last answer. All samples are kept,
//! so percentiles are exact.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use rustls::{ClientConfig, client::Resumption, pki_types::ServerName};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream},
    runtime::Builder,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::proc::Family;

/// Left out before what is measured.
const WARM_UP: Duration = Duration::from_millis(300);
/// No answer takes this long, unless it waits for its turn.
const PATIENCE: Duration = Duration::from_secs(20);

/// The way from a client to what answers it.
#[derive(Clone)]
pub struct Route {
    /// Where it connects: a proxy, a relay, or the origin itself.
    pub connect: SocketAddr,
    /// And from where, if that matters: a proxy may tell its clients by it.
    pub from: Option<Ipv4Addr>,
    /// What it asks a proxy to connect to: `host:port`.
    pub tunnel: Option<String>,
    /// TLS, towards whoever answers there, and the roots to trust.
    pub tls: Option<Arc<ClientConfig>>,
    /// What comes before the path of each request: `http://host:port` towards a proxy, nothing else.
    pub prefix: String,
    /// The `Host` field, and the name that the certificate must have.
    pub host: String,
    /// Whether each request has a connection of its own.
    pub is_new_each: bool,
}

impl Route {
    /// Clear-text HTTP to a server.
    pub fn plain(connect: SocketAddr) -> Route {
        Route {
            connect,
            from: None,
            tunnel: None,
            tls: None,
            prefix: String::new(),
            host: connect.to_string(),
            is_new_each: false,
        }
    }

    /// The same with a connection for each request, with the last session resumed or not.
    pub fn new_each(&self, resumes: bool) -> Route {
        let mut route = self.clone();
        route.is_new_each = true;
        if let (Some(tls), false) = (&mut route.tls, resumes) {
            Arc::make_mut(tls).resumption = Resumption::disabled();
        }
        route
    }

    fn name(&self) -> &str {
        self.host
            .rsplit_once(':')
            .map_or(&self.host, |(name, _)| name)
    }

    /// A `GET` of `path`.
    pub fn request(&self, path: &str) -> Vec<u8> {
        let (prefix, host) = (&self.prefix, &self.host);
        format!("GET {prefix}{path} HTTP/1.1\r\nhost: {host}\r\nuser-agent: bench/1\r\naccept: */*\r\n\r\n")
            .into_bytes()
    }
}

/// What a run came to.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Answers within the measured time.
    pub requests: usize,
    /// How long that was.
    pub seconds: f64,
    /// How long each took.
    pub spans: Vec<Duration>,
    /// Requests that failed, warm-up included.
    pub errors: usize,
    /// CPU seconds of the proxy in that time.
    pub cpu: f64,
}

/// Runs `connections` clients for `span`, after a short warm-up, and reads what `proxy` uses meanwhile. `requests` says what
/// each client sends, in turn.
pub fn run(
    route: &Route,
    requests: impl Fn(usize) -> Vec<Vec<u8>>,
    connections: usize,
    span: Duration,
    proxy: Option<Family>,
) -> Outcome {
    let count = Arc::new(Count::default());
    let runtime = single();
    for number in 0..connections {
        runtime.spawn(client(route.clone(), requests(number), count.clone()));
    }
    let mut outcome = Outcome::default();
    let measured = runtime.block_on(async {
        tokio::time::sleep(WARM_UP).await;
        let cpu = || proxy.map_or(f64::NAN, Family::cpu_seconds);
        let (before, began) = (cpu(), Instant::now());
        count.is_measuring.store(true, Relaxed);
        tokio::time::sleep(span).await;
        count.is_measuring.store(false, Relaxed);
        (began.elapsed().as_secs_f64(), cpu() - before)
    });
    (outcome.seconds, outcome.cpu) = measured;
    count.is_over.store(true, Relaxed);
    outcome.spans = std::mem::take(&mut *count.spans());
    outcome.requests = outcome.spans.len();
    outcome.errors = count.errors.load(Relaxed);
    runtime.shutdown_background();
    outcome
}

/// Reads one body of so many bytes `times` times, and returns GB/s and the CPU seconds of `proxy` for each GiB.
///
/// # Errors
/// As the sockets have them.
pub fn transfer(
    route: &Route,
    bytes: usize,
    times: usize,
    proxy: Option<Family>,
) -> io::Result<(f64, f64)> {
    let cpu = || proxy.map_or(f64::NAN, Family::cpu_seconds);
    single().block_on(async {
        let mut wire = Wire::open(route).await?;
        let mut buffer = vec![0; 256 * 1024];
        wire.exchange(&route.request("/1024"), &mut buffer).await?;
        let request = route.request(&format!("/{bytes}"));
        let (before, began) = (cpu(), Instant::now());
        for _ in 0..times {
            let taken = tokio::time::timeout(PATIENCE, wire.exchange(&request, &mut buffer)).await;
            taken.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        }
        let all = (bytes * times) as f64;
        let rate = all / began.elapsed().as_secs_f64() / 1e9;
        Ok((rate, (cpu() - before) / all * f64::from(1 << 30)))
    })
}

/// A runtime of one thread: this one.
pub fn single() -> tokio::runtime::Runtime {
    Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime")
}

/// What clients count together.
#[derive(Default)]
pub struct Count {
    /// Answers, warm-up included.
    pub answers: AtomicU64,
    /// Requests that failed.
    pub errors: AtomicUsize,
    is_measuring: AtomicBool,
    is_over: AtomicBool,
    spans: std::sync::Mutex<Vec<Duration>>,
}

impl Count {
    fn spans(&self) -> std::sync::MutexGuard<'_, Vec<Duration>> {
        self.spans
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Whether clients should stop.
    pub fn stop(&self) {
        self.is_over.store(true, Relaxed);
    }
}

/// One client: sends these requests in turn, again and again, until it is over.
pub async fn client(route: Route, requests: Vec<Vec<u8>>, count: Arc<Count>) {
    let mut kept = None;
    let mut buffer = vec![0; 16 * 1024];
    for request in requests.iter().cycle() {
        if count.is_over.load(Relaxed) {
            return;
        }
        let began = Instant::now();
        let fetched = fetch(&route, kept.take(), request, &mut buffer).await;
        match fetched {
            Ok(wire) => {
                count.answers.fetch_add(1, Relaxed);
                if count.is_measuring.load(Relaxed) {
                    count.spans().push(began.elapsed());
                }
                kept = (!route.is_new_each).then_some(wire);
            }
            Err(fault) => {
                if count.errors.fetch_add(1, Relaxed) == 0 {
                    eprintln!("first error, by {}: {fault}", route.connect);
                }
                // Neither an endless loop of refusals, nor a measured one.
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

async fn fetch(
    route: &Route,
    kept: Option<Wire>,
    request: &[u8],
    buffer: &mut [u8],
) -> io::Result<Wire> {
    let is_reused = kept.is_some();
    let mut wire = match kept {
        Some(wire) => wire,
        None => Wire::open(route).await?,
    };
    match wire.exchange(request, buffer).await {
        Ok(()) => Ok(wire),
        // Some proxies close a connection that may be kept, as they may: any client then makes another.
        Err(fault) if is_reused && fault.kind() != io::ErrorKind::InvalidData => {
            let mut wire = Wire::open(route).await?;
            wire.exchange(request, buffer).await?;
            Ok(wire)
        }
        Err(fault) => Err(fault),
    }
}

/// A connection that is ready for requests.
pub enum Wire {
    /// Clear text.
    Plain(TcpStream),
    /// TLS.
    Tls(Box<TlsStream<TcpStream>>),
}

impl Wire {
    /// Connects, through a tunnel and with TLS where the route says so.
    ///
    /// # Errors
    /// As the sockets have them, or a refusal of the CONNECT.
    pub async fn open(route: &Route) -> io::Result<Wire> {
        let stream = open_bare(route).await?;
        let Some(tls) = &route.tls else {
            return Ok(Wire::Plain(stream));
        };
        let name = ServerName::try_from(route.name().to_owned()).map_err(io::Error::other)?;
        let connector = TlsConnector::from(tls.clone());
        Ok(Wire::Tls(Box::new(connector.connect(name, stream).await?)))
    }

    /// Sends a request and reads its answer to the end.
    ///
    /// # Errors
    /// As the sockets have them, or `InvalidData` for an answer other than 200.
    pub async fn exchange(&mut self, request: &[u8], buffer: &mut [u8]) -> io::Result<()> {
        match self {
            Wire::Plain(stream) => exchange(stream, request, buffer).await,
            Wire::Tls(stream) => exchange(stream, request, buffer).await,
        }
    }
}

/// A connection with its tunnel open and nothing said in it.
///
/// # Errors
/// As [`Wire::open`].
pub async fn open_bare(route: &Route) -> io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    if let Some(from) = route.from {
        socket.bind((from, 0).into())?;
    }
    let mut stream = socket.connect(route.connect).await?;
    stream.set_nodelay(true)?;
    if let Some(to) = &route.tunnel {
        let connect = format!("CONNECT {to} HTTP/1.1\r\nhost: {to}\r\n\r\n");
        exchange_head(&mut stream, connect.as_bytes(), &mut [0; 1024]).await?;
    }
    Ok(stream)
}

impl Wire {
    /// Sends a request, and returns the body of its answer.
    ///
    /// # Errors
    /// As [`Wire::exchange`].
    pub async fn read(&mut self, request: &[u8]) -> io::Result<Vec<u8>> {
        // The bodies that are looked at are the operator's pages, and none is this large.
        let mut buffer = vec![0; 4 << 20];
        let Wire::Plain(stream) = self else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let (mut filled, head) = exchange_head(stream, request, &mut buffer).await?;
        let length = content_length(&buffer[..head]).ok_or(io::ErrorKind::InvalidData)?;
        while filled < head + length {
            match stream.read(&mut buffer[filled..]).await? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => filled += n,
            }
        }
        Ok(buffer[head..filled].to_vec())
    }
}

async fn exchange(
    wire: &mut (impl AsyncRead + AsyncWrite + Unpin),
    request: &[u8],
    buffer: &mut [u8],
) -> io::Result<()> {
    let (filled, head) = exchange_head(wire, request, buffer).await?;
    let length = content_length(&buffer[..head]).ok_or(io::ErrorKind::InvalidData)?;
    let mut left = length.saturating_sub(filled - head);
    while left > 0 {
        match wire.read(buffer).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => left -= n.min(left),
        }
    }
    Ok(())
}

/// Sends a head and reads one: how much was read, and how much of it is the head.
async fn exchange_head(
    wire: &mut (impl AsyncRead + AsyncWrite + Unpin),
    request: &[u8],
    buffer: &mut [u8],
) -> io::Result<(usize, usize)> {
    wire.write_all(request).await?;
    wire.flush().await?;
    let mut filled = 0;
    loop {
        match wire.read(&mut buffer[filled..]).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => filled += n,
        }
        if let Some(at) = buffer[..filled].windows(4).position(|w| w == b"\r\n\r\n") {
            let line = buffer.split(|b| *b == b'\r').next().unwrap_or_default();
            if line.get(8..12) != Some(b" 200") {
                let line = String::from_utf8_lossy(line).into_owned();
                return Err(io::Error::new(io::ErrorKind::InvalidData, line));
            }
            return Ok((filled, at + 4));
        }
    }
}

fn content_length(head: &[u8]) -> Option<usize> {
    const NAME: &[u8] = b"content-length:";
    let mut lines = head.split(|b| *b == b'\n');
    let line = lines.find(|line| {
        line.get(..NAME.len())
            .is_some_and(|name| name.eq_ignore_ascii_case(NAME))
    })?;
    std::str::from_utf8(&line[NAME.len()..])
        .ok()?
        .trim()
        .parse()
        .ok()
}

/// Lets the clients of a runtime of one thread work for so long.
pub async fn pause(milliseconds: u64) {
    tokio::time::sleep(Duration::from_millis(milliseconds)).await;
}

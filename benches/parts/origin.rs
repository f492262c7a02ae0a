//! An origin on one thread, plain and TLS: `GET /N` is answered with N bytes, and each arrival is noted.
//!
//! It knows just enough of HTTP/1.1 for well-behaved proxies, and so costs little of the CPU that it shares with them.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::Instant,
};

use rustls::ServerConfig;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::TcpListener,
    runtime::Builder,
    sync::oneshot,
};
use tokio_rustls::TlsAcceptor;

/// The origin; it serves as long as the process lives.
#[derive(Clone)]
pub struct Origin {
    /// Where it speaks HTTP.
    pub http: SocketAddr,
    /// Where it speaks HTTPS.
    pub https: SocketAddr,
    seen: Arc<Seen>,
}

#[derive(Default)]
struct Seen {
    connections: AtomicU64,
    arrivals: Mutex<Option<Vec<Instant>>>,
}

impl Origin {
    /// Starts it with this certificate.
    pub fn start(tls: Arc<ServerConfig>) -> Origin {
        let seen = Arc::new(Seen::default());
        let (tell, bound) = oneshot::channel();
        let state = seen.clone();
        thread::spawn(move || {
            let runtime = Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async move {
                let listen = || TcpListener::bind("127.0.0.1:0");
                let (http, https) = (listen().await, listen().await);
                let (http, https) = (http.expect("a free port"), https.expect("a free port"));
                let address = |l: &TcpListener| l.local_addr().expect("a bound socket");
                let _ = tell.send((address(&http), address(&https)));
                tokio::join!(
                    accept(http, None, state.clone()),
                    accept(https, Some(TlsAcceptor::from(tls)), state)
                );
            });
        });
        let (http, https) = bound.blocking_recv().expect("an origin that listens");
        Origin { http, https, seen }
    }

    /// Connections accepted so far.
    pub fn connections(&self) -> u64 {
        self.seen.connections.load(Relaxed)
    }

    /// Notes the arrival of each request from now on, until [`Origin::arrivals`].
    pub fn watch(&self) {
        *self.noted() = Some(Vec::new());
    }

    /// When requests arrived, and no more notes.
    pub fn arrivals(&self) -> Vec<Instant> {
        self.noted().take().unwrap_or_default()
    }

    fn noted(&self) -> std::sync::MutexGuard<'_, Option<Vec<Instant>>> {
        self.seen
            .arrivals
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

async fn accept(listener: TcpListener, tls: Option<TlsAcceptor>, seen: Arc<Seen>) {
    while let Ok((stream, _)) = listener.accept().await {
        let _ = stream.set_nodelay(true);
        seen.connections.fetch_add(1, Relaxed);
        let (tls, seen) = (tls.clone(), seen.clone());
        tokio::spawn(async move {
            match tls {
                None => answer_all(stream, &seen).await,
                Some(tls) => {
                    if let Ok(stream) = tls.accept(stream).await {
                        answer_all(stream, &seen).await;
                    }
                }
            }
        });
    }
}

/// The pieces in which a large body is written.
const PIECE: usize = 128 * 1024;

/// Answers requests without bodies until the peer goes.
async fn answer_all(mut wire: impl AsyncRead + AsyncWrite + Unpin, seen: &Seen) {
    static BYTES: [u8; PIECE] = [b'x'; PIECE];
    let (mut buffer, mut filled) = (vec![0; 8 * 1024], 0);
    let mut answer = Vec::new();
    while let Ok(n @ 1..) = wire.read(&mut buffer[filled..]).await {
        filled += n;
        let Some(length) = length_asked_for(&buffer[..filled]) else {
            continue;
        };
        filled = 0;
        if let Some(arrivals) = &mut *seen.arrivals.lock().unwrap_or_else(PoisonError::into_inner) {
            arrivals.push(Instant::now());
        }
        answer.clear();
        answer.extend_from_slice(
            format!("HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-length: {length}\r\n\r\n")
                .as_bytes(),
        );
        let first = length.min(PIECE - answer.len());
        answer.extend_from_slice(&BYTES[..first]);
        let mut left = length - first;
        let mut written = wire.write_all(&answer).await;
        while left > 0 && written.is_ok() {
            let next = left.min(PIECE);
            written = wire.write_all(&BYTES[..next]).await;
            left -= next;
        }
        if written.is_err() || wire.flush().await.is_err() {
            return;
        }
    }
}

/// N, when all of the head of `GET .../N` is there.
fn length_asked_for(head: &[u8]) -> Option<usize> {
    head.ends_with(b"\r\n\r\n").then_some(())?;
    let target = head.split(|b| *b == b' ').nth(1)?;
    let digits = target.rsplit(|b| *b == b'/').next()?;
    std::str::from_utf8(digits).ok()?.parse().ok()
}

//! An origin that answers byte for byte as a script says and keeps every byte that reached it. It parses no more of
//! HTTP than the request line, which names the script: what a library would repair or refuse, it says and hears.

use std::{
    collections::{HashMap, HashSet},
    io,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::{JoinHandle, JoinSet},
};
use tokio_rustls::TlsAcceptor;

use super::{
    await_until::await_until,
    certs::{TestCa, server_tls},
    runtime,
};

/// One thing to do about a request, after its head has come.
#[derive(Clone, Debug)]
pub enum Step {
    /// Write these bytes.
    Say(Vec<u8>),
    /// Write these bytes so many times.
    Repeat(Vec<u8>, usize),
    /// Wait until the body, as framed on the wire, ends so; it is then part of this request.
    Hear(&'static [u8]),
    /// Wait until the test opens this gate.
    Await(&'static str),
    /// Close in order, and end.
    Close,
    /// Reset, and end.
    Reset,
}

/// Writes `text`.
pub fn say(text: impl AsRef<[u8]>) -> Step {
    Step::Say(text.as_ref().to_vec())
}

/// What came on one connection.
#[derive(Clone, Debug, Default)]
pub struct Heard {
    /// Every byte since the connection (or its TLS) stood.
    pub bytes: Vec<u8>,
    /// When the peer closed or reset it.
    pub ended: Option<Instant>,
}

/// A request that was answered by its script, as it came.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// When its head was whole.
    pub at: Instant,
    /// Which accepted connection, from 0.
    pub connection: usize,
    /// The head, with its empty line, and as much of the body as the script heard.
    pub text: String,
    /// Bytes in it, before they were made into text.
    pub length: usize,
}

impl Exchange {
    /// The request target.
    pub fn target(&self) -> &str {
        self.text.split(' ').nth(1).unwrap_or_default()
    }
}

#[derive(Default)]
struct Book {
    scripts: Mutex<HashMap<String, Vec<Step>>>,
    exchanges: Mutex<Vec<Exchange>>,
    connections: Mutex<Vec<watch::Receiver<Heard>>>,
}

/// A running origin; dropped, it is closed with all its connections.
pub struct Scripted {
    address: SocketAddr,
    name: String,
    root: Option<String>,
    book: Arc<Book>,
    gates: watch::Sender<HashSet<&'static str>>,
    accepting: JoinHandle<()>,
}

impl Scripted {
    /// An origin for `name` that speaks clear text.
    pub fn plain(name: &str) -> Scripted {
        Scripted::start(name, None, None)
    }

    /// An origin with a certificate for `name`, from a CA of its own.
    pub fn tls(name: &str) -> Scripted {
        let ca = TestCa::new();
        let tls = TlsAcceptor::from(server_tls(&ca.issue(&[name])));
        Scripted::start(name, Some(ca.root().to_owned()), Some(tls))
    }

    /// An origin for `name` that does TLS as `tls` says, with the roots that its clients are to trust.
    pub fn tls_as(name: &str, roots: &str, tls: Arc<rustls::ServerConfig>) -> Scripted {
        Scripted::start(name, Some(roots.to_owned()), Some(TlsAcceptor::from(tls)))
    }

    fn start(name: &str, root: Option<String>, tls: Option<TlsAcceptor>) -> Scripted {
        let listener = runtime()
            .block_on(TcpListener::bind("127.0.0.1:0"))
            .expect("a port for the origin");
        let address = listener.local_addr().expect("the bound address");
        let book = Arc::<Book>::default();
        let gates = watch::Sender::default();
        let accepting = runtime().spawn(accept(listener, tls, book.clone(), gates.subscribe()));
        Scripted {
            address,
            name: name.to_owned(),
            root,
            book,
            gates,
            accepting,
        }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The name it stands for.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The root that its certificate hangs from; `None` for a plain origin.
    pub fn root(&self) -> Option<&str> {
        self.root.as_deref()
    }

    /// What it does about requests for `target`.
    pub fn script(&self, target: &str, steps: Vec<Step>) {
        self.book
            .scripts
            .lock()
            .expect("no panic under the lock")
            .insert(target.to_owned(), steps);
    }

    /// Lets go what waits at this gate, now and later.
    pub fn open(&self, gate: &'static str) {
        self.gates.send_modify(|gates| {
            gates.insert(gate);
        });
    }

    /// All requests so far.
    pub fn exchanges(&self) -> Vec<Exchange> {
        self.book
            .exchanges
            .lock()
            .expect("no panic under the lock")
            .clone()
    }

    /// The requests for `target` so far.
    pub fn asked(&self, target: &str) -> Vec<Exchange> {
        let mut exchanges = self.exchanges();
        exchanges.retain(|exchange| exchange.target() == target);
        exchanges
    }

    /// Waits for the first request for `target`.
    ///
    /// # Panics
    /// When it does not come.
    pub fn await_asked(&self, target: &str) -> Exchange {
        await_until(
            &format!("the origin is asked for {target}"),
            Duration::from_secs(10),
            || self.asked(target).into_iter().next(),
        )
    }

    /// What came on each connection so far, in the order of their acceptance.
    pub fn heard(&self) -> Vec<Heard> {
        self.book
            .connections
            .lock()
            .expect("no panic under the lock")
            .iter()
            .map(|connection| connection.borrow().clone())
            .collect()
    }

    /// What came on one connection so far, as text.
    pub fn heard_text(&self, connection: usize) -> String {
        String::from_utf8_lossy(&self.heard()[connection].bytes).into_owned()
    }

    /// Waits until the peer has ended a connection, and says when it did.
    ///
    /// # Panics
    /// When it stays open.
    pub fn await_end(&self, connection: usize) -> Instant {
        await_until(
            &format!("connection {connection} to the origin ends"),
            Duration::from_secs(10),
            || self.heard()[connection].ended,
        )
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    book: Arc<Book>,
    gates: watch::Receiver<HashSet<&'static str>>,
) {
    let mut connections = JoinSet::new();
    while let Ok((tcp, _)) = listener.accept().await {
        let (tls, book, gates) = (tls.clone(), book.clone(), gates.clone());
        let _ = tcp.set_nodelay(true);
        connections.spawn(async move {
            // How a connection ends is the test's doing, and is in the book.
            let _ = match tls {
                None => {
                    let (reset, stream) = (socket2_of(&tcp), tcp);
                    converse(stream, reset, book, gates).await
                }
                Some(tls) => {
                    let reset = socket2_of(&tcp);
                    match tls.accept(tcp).await {
                        Ok(stream) => converse(stream, reset, book, gates).await,
                        Err(fault) => Err(fault),
                    }
                }
            };
        });
        while connections.try_join_next().is_some() {}
    }
}

/// Another handle on the same socket, by which it can be told to reset although TLS owns it.
fn socket2_of(tcp: &TcpStream) -> Option<socket2::Socket> {
    socket2::SockRef::from(tcp).try_clone().ok()
}

async fn converse<S>(
    stream: S,
    socket: Option<socket2::Socket>,
    book: Arc<Book>,
    mut gates: watch::Receiver<HashSet<&'static str>>,
) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (from, mut to) = tokio::io::split(stream);
    let (tell, mut heard) = watch::channel(Heard::default());
    let number = {
        let mut connections = book.connections.lock().expect("no panic under the lock");
        connections.push(heard.clone());
        connections.len() - 1
    };
    let mut listening = JoinSet::new();
    listening.spawn(listen(from, tell));
    let mut done = 0;
    loop {
        let Some(end) = await_bytes(&mut heard, done, b"\r\n\r\n").await else {
            return Ok(());
        };
        let head = String::from_utf8_lossy(&heard.borrow().bytes[done..end]).into_owned();
        let begun = std::mem::replace(&mut done, end);
        let exchange = Exchange {
            at: Instant::now(),
            connection: number,
            text: head,
            length: end - begun,
        };
        let steps = {
            let scripts = book.scripts.lock().expect("no panic under the lock");
            scripts.get(exchange.target()).cloned()
        };
        let index = {
            let mut exchanges = book.exchanges.lock().expect("no panic under the lock");
            exchanges.push(exchange);
            exchanges.len() - 1
        };
        let missing = || {
            vec![say(
                "HTTP/1.1 404 No Script\r\nContent-Length: 9\r\n\r\nno script",
            )]
        };
        for step in steps.unwrap_or_else(missing) {
            match step {
                Step::Say(bytes) => to.write_all(&bytes).await?,
                Step::Repeat(bytes, times) => {
                    for _ in 0..times {
                        to.write_all(&bytes).await?;
                    }
                }
                Step::Hear(ending) => match await_bytes(&mut heard, done, ending).await {
                    Some(end) => {
                        let more =
                            String::from_utf8_lossy(&heard.borrow().bytes[done..end]).into_owned();
                        let mut exchanges = book.exchanges.lock().expect("no panic under the lock");
                        exchanges[index].text.push_str(&more);
                        exchanges[index].length += end - done;
                        done = end;
                    }
                    None => return Ok(()),
                },
                Step::Await(gate) => {
                    // The origin itself is gone: so is the test.
                    let opened = gates.wait_for(|open| open.contains(gate)).await;
                    opened.map_err(io::Error::other)?;
                }
                Step::Close => {
                    to.shutdown().await?;
                    listening.join_all().await;
                    return Ok(());
                }
                Step::Reset => {
                    if let Some(socket) = socket {
                        socket.set_linger(Some(Duration::ZERO))?;
                    }
                    return Ok(());
                }
            }
            to.flush().await?;
        }
    }
}

/// Waits until `ending` has come at or after `from`; where it ends. `None` when the peer ends first.
async fn await_bytes(
    heard: &mut watch::Receiver<Heard>,
    from: usize,
    ending: &[u8],
) -> Option<usize> {
    let found = |heard: &Heard| {
        heard.bytes[from..]
            .windows(ending.len())
            .position(|window| window == ending)
            .map(|at| from + at + ending.len())
    };
    let heard = heard
        .wait_for(|heard| found(heard).is_some() || heard.ended.is_some())
        .await
        .ok()?;
    found(&heard)
}

async fn listen<S: AsyncRead>(mut from: ReadHalf<S>, tell: watch::Sender<Heard>) {
    let mut piece = [0; 16 * 1024];
    while let Ok(n @ 1..) = from.read(&mut piece).await {
        tell.send_modify(|heard| heard.bytes.extend_from_slice(&piece[..n]));
    }

    tell.send_modify(|heard| heard.ended = Some(Instant::now()));
}

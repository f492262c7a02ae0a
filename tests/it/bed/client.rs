//! Clients as threads: one connection that says exactly what it is told, in clear text or inside a tunnel.
//! Real programs (curl, Python, Node) are in `worker.rs`.

use std::{
    io::{self, BufReader, Read, Write},
    net::{IpAddr, SocketAddr, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

use rustls::{ClientConfig, ClientConnection, StreamOwned, pki_types::ServerName};
use sha2::{Digest, Sha256};
use socket2::{Domain, Socket, Type};

use super::{
    http_text::{Head, read_body},
    pattern::{hex, pattern},
};

/// Longer than any wait that a test asks the proxy for, short enough that a hang becomes a failure.
const PATIENCE: Duration = Duration::from_secs(40);

/// A complete answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Its head.
    pub head: Head,
    /// Its body, unframed.
    pub body: Vec<u8>,
}

impl Answer {
    /// Its status; 0 when there is none, which no test expects.
    pub fn status(&self) -> u16 {
        self.head.status().unwrap_or(0)
    }

    /// The first field of that name.
    pub fn field(&self, name: &str) -> Option<&str> {
        self.head.field(name)
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// Bytes in clear text or in TLS.
pub enum Wire {
    /// Clear text
    Plain(TcpStream),
    /// TLS, handshake done or due
    Tls(Box<StreamOwned<ClientConnection, TcpStream>>),
}

impl Read for Wire {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Wire::Plain(tcp) => tcp.read(into),
            Wire::Tls(tls) => tls.read(into),
        }
    }
}

impl Write for Wire {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match self {
            Wire::Plain(tcp) => tcp.write(from),
            Wire::Tls(tls) => tls.write(from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Wire::Plain(tcp) => tcp.flush(),
            Wire::Tls(tls) => tls.flush(),
        }
    }
}

/// One connection. Dropped, it is closed, whatever was under way.
pub struct Session {
    wire: BufReader<Wire>,
    host: String,
}

impl Session {
    /// A clear-text connection to `address`, with `host` for the `Host` field.
    ///
    /// # Errors
    /// When nobody listens.
    pub fn open(address: SocketAddr, host: &str) -> io::Result<Session> {
        Session::over(TcpStream::connect(address)?, host)
    }

    /// The same from an address of our own choice, such as another one of loopback.
    ///
    /// # Errors
    /// When nobody listens, or the address is not ours.
    pub fn open_from(source: IpAddr, address: SocketAddr, host: &str) -> io::Result<Session> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
        socket.bind(&SocketAddr::new(source, 0).into())?;
        socket.connect(&address.into())?;
        Session::over(socket.into(), host)
    }

    fn over(tcp: TcpStream, host: &str) -> io::Result<Session> {
        tcp.set_nodelay(true)?;
        tcp.set_read_timeout(Some(PATIENCE))?;
        tcp.set_write_timeout(Some(PATIENCE))?;
        Ok(Session {
            wire: BufReader::new(Wire::Plain(tcp)),
            host: host.to_owned(),
        })
    }

    /// Sends bytes as they are.
    ///
    /// # Errors
    /// When the peer has closed.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.wire.get_mut().write_all(bytes)?;
        self.wire.get_mut().flush()
    }

    /// Sends a `CONNECT` and returns the answer, the body only of a refusal.
    ///
    /// # Errors
    /// When the peer closes without an answer.
    pub fn connect(&mut self, authority: &str) -> io::Result<Answer> {
        self.send(format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n").as_bytes())?;
        let head = Head::read(&mut self.wire)?;
        let mut body = Vec::new();
        if head.status()? != 200 {
            read_body(&head, &mut self.wire, |piece| body.extend_from_slice(piece))?;
        }
        Ok(Answer { head, body })
    }

    /// Does the TLS handshake, with `name` for SNI and for the certificate.
    ///
    /// # Errors
    /// When the peer's certificate does not hold, or the peer closes.
    pub fn start_tls(self, tls: &Arc<ClientConfig>, name: &str) -> io::Result<Session> {
        let Wire::Plain(mut tcp) = self.wire.into_inner() else {
            return Err(io::Error::other("TLS in TLS is not for this client"));
        };
        let server = ServerName::try_from(name.to_owned()).map_err(io::Error::other)?;
        let mut connection =
            ClientConnection::new(tls.clone(), server).map_err(io::Error::other)?;
        while connection.is_handshaking() {
            connection.complete_io(&mut tcp)?;
        }
        let wire = Wire::Tls(Box::new(StreamOwned::new(connection, tcp)));
        Ok(Session {
            wire: BufReader::new(wire),
            host: self.host,
        })
    }

    /// Reads one answer.
    ///
    /// # Errors
    /// When the peer closes before its end.
    pub fn answer(&mut self) -> io::Result<Answer> {
        let head = Head::read(&mut self.wire)?;
        let mut body = Vec::new();
        read_body(&head, &mut self.wire, |piece| body.extend_from_slice(piece))?;
        Ok(Answer { head, body })
    }

    /// Reads one head and leaves its body unread.
    ///
    /// # Errors
    /// When the peer closes before its end.
    pub fn head(&mut self) -> io::Result<Head> {
        Head::read(&mut self.wire)
    }

    /// Reads so many bytes, or as many as come until the peer closes or `patience` is over.
    pub fn hear(&mut self, count: usize, patience: Duration) -> Vec<u8> {
        let (mut heard, give_up) = (Vec::new(), Instant::now() + patience);
        while heard.len() < count {
            let left = give_up.saturating_duration_since(Instant::now());
            self.socket()
                .set_read_timeout(Some(left.max(Duration::from_millis(1))))
                .expect("a time-out that is not zero");
            let mut piece = vec![0; count - heard.len()];
            match self.wire.read(&mut piece) {
                Ok(n @ 1..) => heard.extend_from_slice(&piece[..n]),
                _ => break,
            }
        }
        self.socket()
            .set_read_timeout(Some(PATIENCE))
            .expect("a time-out that is not zero");
        heard
    }

    /// The socket, for what only a socket can do: half-close, reset, a slow reader's small buffer.
    pub fn socket(&self) -> &TcpStream {
        match self.wire.get_ref() {
            Wire::Plain(tcp) => tcp,
            Wire::Tls(tls) => &tls.sock,
        }
    }

    /// One GET with extra fields, each written as `Name: value`.
    ///
    /// # Errors
    /// When the peer closes without a complete answer.
    pub fn get_with(&mut self, target: &str, fields: &[&str]) -> io::Result<Answer> {
        self.ask("GET", target, fields)?;
        self.answer()
    }

    /// One GET.
    ///
    /// # Errors
    /// As [`Session::get_with`].
    pub fn get(&mut self, target: &str) -> io::Result<Answer> {
        self.get_with(target, &[])
    }

    /// Sends a head, and waits for nothing.
    ///
    /// # Errors
    /// When the peer has closed.
    pub fn ask(&mut self, method: &str, target: &str, fields: &[&str]) -> io::Result<()> {
        let fields: String = fields.iter().map(|field| format!("{field}\r\n")).collect();
        let head = format!(
            "{method} {target} HTTP/1.1\r\nHost: {}\r\n{fields}\r\n",
            self.host
        );
        self.send(head.as_bytes())
    }

    /// One GET whose body is counted and hashed, not kept: status, bytes, SHA-256.
    ///
    /// # Errors
    /// As [`Session::get_with`].
    pub fn download(&mut self, target: &str) -> io::Result<(u16, u64, String)> {
        self.ask("GET", target, &[])?;
        let head = Head::read(&mut self.wire)?;
        let (mut bytes, mut hash) = (0, Sha256::new());
        read_body(&head, &mut self.wire, |piece| {
            bytes += piece.len() as u64;
            hash.update(piece);
        })?;
        Ok((head.status()?, bytes, hex(&hash.finalize())))
    }

    /// One POST of `length` bytes of the origin's pattern.
    ///
    /// # Errors
    /// As [`Session::get_with`].
    pub fn upload(&mut self, target: &str, length: u64) -> io::Result<Answer> {
        self.ask("POST", target, &[&format!("Content-Length: {length}")])?;
        for piece in pattern(length) {
            self.send(&piece)?;
        }
        self.answer()
    }

    /// What comes until the peer closes. A reset is an end too: who closes on unread bytes resets (RFC 9112 section 9.6).
    ///
    /// # Errors
    /// When the peer does not close in time.
    pub fn rest(&mut self) -> io::Result<Vec<u8>> {
        let mut rest = Vec::new();
        match self.wire.read_to_end(&mut rest) {
            Err(fault) if fault.kind() != io::ErrorKind::ConnectionReset => Err(fault),
            _ => Ok(rest),
        }
    }
}

/// What a thread needs to fetch over HTTPS through a proxy.
#[derive(Clone)]
pub struct Browser {
    source: Option<IpAddr>,
    proxy: SocketAddr,
    host: String,
    tls: Arc<ClientConfig>,
}

impl Browser {
    /// A client of `https://HOST/` that trusts what `tls` trusts.
    pub fn new(proxy: SocketAddr, host: &str, tls: Arc<ClientConfig>) -> Browser {
        Browser {
            source: None,
            proxy,
            host: host.to_owned(),
            tls,
        }
    }

    /// The same client at another address of this machine.
    pub fn at(&self, source: IpAddr) -> Browser {
        Browser {
            source: Some(source),
            ..self.clone()
        }
    }

    /// A fresh tunnel, with TLS inside.
    ///
    /// # Errors
    /// When the `CONNECT` is refused, with its status line, or the handshake fails.
    pub fn tunnel(&self) -> io::Result<Session> {
        let mut session = match self.source {
            Some(source) => Session::open_from(source, self.proxy, &self.host)?,
            None => Session::open(self.proxy, &self.host)?,
        };
        let answer = session.connect(&format!("{}:443", self.host))?;
        if answer.status() != 200 {
            return Err(io::Error::other(answer.head.start_line));
        }
        session.start_tls(&self.tls, &self.host)
    }

    /// One GET on a tunnel of its own.
    ///
    /// # Errors
    /// As [`Browser::tunnel`] and [`Session::get_with`].
    pub fn get(&self, target: &str) -> io::Result<Answer> {
        self.tunnel()?.get(target)
    }
}

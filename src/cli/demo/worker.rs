//! A worker of the demonstration: an ordinary HTTPS client that fetches, over and over, as fast as it is let.

use std::{
    net::SocketAddr,
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicI64, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail};
use bytes::Bytes;
use http::{Request, header::HOST as HOST_FIELD};
use http_body_util::{BodyExt as _, Empty};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::{
    ClientConfig, RootCertStore,
    crypto::aws_lc_rs::default_provider,
    pki_types::{CertificateDer, ServerName, pem::PemObject as _},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tokio_rustls::TlsConnector;

use super::origin::HOST;
use crate::pacing::time::{LocalTime, Nanos};

/// After a fetch that failed or was refused, so that a worker that cannot work does not spin.
const PAUSE: Duration = Duration::from_millis(250);
/// The longest head of an answer to CONNECT that is read, in bytes.
const LONGEST_HEAD: usize = 8 * 1024;

/// How the origin is reached.
#[derive(Clone)]
pub(super) struct Way {
    at: SocketAddr,
    tunnel: bool,
    tls: TlsConnector,
}

impl Way {
    /// To `at`, which is a proxy if a tunnel is to be asked for, trusting nothing but the root in the file.
    pub(super) fn new(at: SocketAddr, tunnel: bool, root: &Path) -> Result<Self> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_file_iter(root)? {
            roots.add(certificate?)?;
        }
        let tls = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Way {
            at,
            tunnel,
            tls: TlsConnector::from(Arc::new(tls)),
        })
    }
}

/// What one worker has done, written by it and read by whoever shows it.
#[derive(Debug, Default)]
pub(super) struct Row {
    served: AtomicU64,
    /// When the present fetch began; 0 between two.
    since: AtomicI64,
    complaint: Mutex<Option<String>>,
}

/// How a worker stands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Stand {
    /// Fetches that were answered.
    pub(super) served: u64,
    /// How long it has waited for the present answer.
    pub(super) waiting: Option<Nanos>,
}

impl Row {
    pub(super) fn new() -> Arc<Self> {
        Arc::default()
    }

    pub(super) fn stand(&self, now: LocalTime) -> Stand {
        let since = self.since.load(Relaxed);
        Stand {
            served: self.served.load(Relaxed),
            waiting: (since != 0).then(|| now.since(LocalTime(since)).max(0)),
        }
    }

    /// What went wrong last.
    pub(super) fn complaint(&self) -> Option<String> {
        let complaint = self.complaint.lock();
        complaint.unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn complain(&self, text: String) {
        let complaint = self.complaint.lock();
        *complaint.unwrap_or_else(PoisonError::into_inner) = Some(text);
    }
}

/// Fetches until it is stopped.
pub(super) async fn work(way: Way, row: Arc<Row>) {
    loop {
        if let Err(e) = fetch_on_one_connection(&way, &row).await {
            row.complain(format!("{e:#}"));
            row.since.store(0, Relaxed);
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// Fetches until the connection ends.
async fn fetch_on_one_connection(way: &Way, row: &Row) -> Result<()> {
    let mut stream = TcpStream::connect(way.at).await.context("connecting")?;
    stream.set_nodelay(true)?;
    if way.tunnel {
        open_tunnel(&mut stream).await?;
    }
    let stream = way.tls.connect(ServerName::try_from(HOST)?, stream).await;
    let (mut send, connection) = http1::handshake(TokioIo::new(stream.context("TLS")?)).await?;
    // In the worker's own task, so that all of it ends with the worker.
    let fetching = async {
        loop {
            row.since.store(LocalTime::now().0, Relaxed);
            let request = Request::get("/")
                .header(HOST_FIELD, HOST)
                .body(Empty::<Bytes>::new())?;
            let answer = send.send_request(request).await?;
            let status = answer.status();
            let body = answer.into_body().collect().await?.to_bytes();
            row.since.store(0, Relaxed);
            if !status.is_success() {
                bail!("{}", String::from_utf8_lossy(&body).trim_end());
            }
            row.served.fetch_add(1, Relaxed);
            send.ready().await?;
        }
    };
    tokio::select! {
        // The answer's last bytes may have ended the connection too: what the fetch says comes first.
        biased;
        ended = fetching => ended,
        ended = connection => ended.map_err(Into::into),
    }
}

async fn open_tunnel(stream: &mut TcpStream) -> Result<()> {
    let ask = format!("CONNECT {HOST}:443 HTTP/1.1\r\nHost: {HOST}:443\r\n\r\n");
    stream.write_all(ask.as_bytes()).await?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() >= LONGEST_HEAD {
            bail!("CONNECT was answered without end");
        }
        // By the byte: what comes after the head is TLS.
        head.push(stream.read_u8().await.context("CONNECT was not answered")?);
    }
    let first = String::from_utf8_lossy(&head);
    let first = first.lines().next().unwrap_or_default();
    match first.split(' ').nth(1) {
        Some("200") => Ok(()),
        _ => Err(anyhow!("CONNECT was answered {first}")),
    }
}

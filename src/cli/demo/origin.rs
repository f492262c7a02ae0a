//! The demonstration's origin: HTTPS on loopback with a certificate of its own. It notes when requests arrive, and knows
//! nothing of proxies.

use std::{
    convert::Infallible,
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use http::Response;
use http_body_util::Full;
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use rustls::{ServerConfig, crypto::aws_lc_rs::default_provider, pki_types::PrivateKeyDer};
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};
use tokio_rustls::TlsAcceptor;

use super::{
    folder::Folder,
    sight::{Figures, Sight},
    worker::Way,
};
use crate::pacing::time::LocalTime;

/// Its name. Nothing resolves it; the replicas are told where it is.
pub(super) const HOST: &str = "origin.demo.test";
/// How far away it seems: without this a worker alone would fetch thousands of times a second.
pub(super) const ANSWERS_AFTER: Duration = Duration::from_millis(25);

const BODY: &[u8] = &[b'.'; 2048];

/// A running origin; dropped, it accepts nobody any more.
#[derive(Debug)]
pub(super) struct Origin {
    address: SocketAddr,
    root: PathBuf,
    sight: Arc<Mutex<Sight>>,
    accepting: JoinHandle<()>,
}

impl Origin {
    /// Makes the certificate, which is its own root, and listens.
    pub(super) async fn start(folder: &Folder) -> Result<Self> {
        let made = rcgen::generate_simple_self_signed([HOST.to_owned()])?;
        let root = folder.path().join("origin.pem");
        fs::write(&root, made.cert.pem()).context("the temporary folder cannot be written")?;
        let key = PrivateKeyDer::Pkcs8(made.signing_key.serialize_der().into());
        let mut tls = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key)?;
        tls.alpn_protocols = vec![b"http/1.1".to_vec()];
        let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0)))
            .await
            .context("no port to be had on 127.0.0.1")?;
        let address = listener.local_addr()?;
        let sight = Arc::<Mutex<Sight>>::default();
        let accepting = tokio::spawn(accept(
            listener,
            TlsAcceptor::from(Arc::new(tls)),
            sight.clone(),
        ));
        Ok(Origin {
            address,
            root,
            sight,
            accepting,
        })
    }

    /// Where it listens.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// The file with its root.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// The way to it with nothing in between.
    pub(super) fn direct(&self) -> Result<Way> {
        Way::new(self.address, false, &self.root)
    }

    /// How what has arrived stands at `now`.
    pub(super) fn figures(&self, now: LocalTime) -> Figures {
        lock(&self.sight).figures(now)
    }

    /// Begins anew.
    pub(super) fn forget(&self) {
        *lock(&self.sight) = Sight::default();
    }
}

impl Drop for Origin {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, tls: TlsAcceptor, sight: Arc<Mutex<Sight>>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let (tls, sight) = (tls.clone(), sight.clone());
                // A worker that is stopped breaks its connection off; there is nobody to tell.
                tokio::spawn(async move { drop(serve(stream, tls, sight).await) });
            }
            // Without file descriptors, accepting again at once would only burn the processor.
            Err(_) => tokio::time::sleep(ANSWERS_AFTER).await,
        }
    }
}

async fn serve(stream: TcpStream, tls: TlsAcceptor, sight: Arc<Mutex<Sight>>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let stream = tls.accept(stream).await?;
    let answer = service_fn(move |_| {
        lock(&sight).arrived(LocalTime::now());
        async {
            tokio::time::sleep(ANSWERS_AFTER).await;
            Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(BODY))))
        }
    });
    http1::Builder::new()
        .serve_connection(TokioIo::new(stream), answer)
        .await
        .map_err(io::Error::other)
}

fn lock(sight: &Mutex<Sight>) -> MutexGuard<'_, Sight> {
    sight.lock().unwrap_or_else(PoisonError::into_inner)
}

//! What the network says, each question with a time of its own: whether paceline answers, what it presents for a host,
//! and whether there is a way round it. No request is made to the host itself.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use rustls::{
    ClientConfig, DigitallySignedStruct, Error as TlsError, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{
        CryptoProvider, aws_lc_rs::default_provider, verify_tls12_signature, verify_tls13_signature,
    },
    pki_types::{CertificateDer, ServerName, UnixTime},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::TlsConnector;

use super::{proxy_url::ProxyUrl, server_name};
use crate::{
    authority::{Authority, Host},
    config::Secret,
};

/// To resolve a name and to connect, each.
const REACH: Duration = Duration::from_secs(3);
/// For an answer to CONNECT: the proxy dials a host that it does not govern first.
const ANSWER: Duration = Duration::from_secs(12);
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Addresses of a name that are tried.
const ADDRESSES_TRIED: usize = 4;
/// The longest head that is read, in bytes.
const LONGEST_HEAD: usize = 16 * 1024;

/// Whether what listens is paceline: it says so in its answer to `OPTIONS *`, which is for the proxy itself and needs no
/// credentials; so would any refusal of it.
///
/// # Errors
/// Why not, and what to change.
pub(super) async fn answers(proxy: &ProxyUrl) -> Result<(), String> {
    let mut stream = connect(&proxy.authority)
        .await
        .map_err(|e| format!("{e}; start paceline, or correct the proxy's address"))?;
    let ask = format!(
        "OPTIONS * HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n",
        proxy.authority
    );
    let head = exchange(&mut stream, &ask).await?;
    let is_ours = |line: &str| {
        let (name, value) = line.split_once(':').unwrap_or_default();
        name.eq_ignore_ascii_case("proxy-status") && value.trim().starts_with("paceline")
    };
    match head.lines().any(is_ours) {
        true => Ok(()),
        false => {
            Err("something else than paceline answers; correct the proxy's address".to_owned())
        }
    }
}

/// The certificates that a client is shown for the target through the proxy.
///
/// # Errors
/// Why there are none, and what to change.
pub(super) async fn presented(
    proxy: &ProxyUrl,
    target: &Authority,
) -> Result<Vec<CertificateDer<'static>>, String> {
    let mut stream = connect(&proxy.authority).await?;
    let ask = format!(
        "CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{}\r\n",
        authorization(proxy)
    );
    let head = exchange(&mut stream, &ask).await?;
    let first = printable(head.lines().next().unwrap_or_default());
    match first.split(' ').nth(1) {
        Some("200") => {}
        Some("407") => {
            return Err(
                "the proxy asks for credentials; put a user and its password into the proxy's URL"
                    .to_owned(),
            );
        }
        _ => {
            return Err(format!(
                "CONNECT was answered {first} (for a host that it governs that would be 200 at once: name one with --url)"
            ));
        }
    }
    let Some(name) = server_name(&target.host) else {
        return Err("TLS has no name for this host; name another with --url".to_owned());
    };
    let seen = Arc::new(Onlooker::new());
    let tls = ClientConfig::builder_with_provider(seen.provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|e| e.to_string())?
        .dangerous()
        .with_custom_certificate_verifier(seen.clone())
        .with_no_client_auth();
    match timeout(
        HANDSHAKE,
        TlsConnector::from(Arc::new(tls)).connect(name, stream),
    )
    .await
    {
        Ok(Ok(_)) => Ok(seen.take()),
        Ok(Err(e)) => Err(format!(
            "TLS inside the tunnel failed ({e}); see paceline's log, and run `paceline check`"
        )),
        Err(_) => Err("TLS inside the tunnel took too long; see paceline's log".to_owned()),
    }
}

/// Where the target can be reached without the proxy.
///
/// # Errors
/// Why it cannot, which is as it should be.
pub(super) async fn direct(target: &Authority) -> Result<SocketAddr, String> {
    let stream = connect(target).await?;
    stream.peer_addr().map_err(|e| e.to_string())
}

async fn connect(to: &Authority) -> Result<TcpStream, String> {
    let addresses: Vec<SocketAddr> = match &to.host {
        Host::Ip(ip) => vec![SocketAddr::new(*ip, to.port)],
        Host::Name(name) => match timeout(REACH, tokio::net::lookup_host((&**name, to.port))).await
        {
            Ok(Ok(found)) => found.take(ADDRESSES_TRIED).collect(),
            Ok(Err(_)) => return Err(format!("the name {name} is not resolved")),
            Err(_) => return Err(format!("the name {name} is not resolved in time")),
        },
    };
    match timeout(REACH, TcpStream::connect(&addresses[..])).await {
        Ok(Ok(stream)) => Ok(stream),
        Ok(Err(e)) => Err(format!("no connection ({e})")),
        Err(_) => Err("no connection in time".to_owned()),
    }
}

/// Sends a request and reads the head of the answer.
async fn exchange(stream: &mut TcpStream, ask: &str) -> Result<String, String> {
    let exchanged = async {
        stream.write_all(ask.as_bytes()).await?;
        let mut head = Vec::new();
        // By the byte: what comes after the head of an answer to CONNECT is TLS.
        while !head.ends_with(b"\r\n\r\n") && head.len() < LONGEST_HEAD {
            head.push(stream.read_u8().await?);
        }
        Ok::<_, std::io::Error>(String::from_utf8_lossy(&head).into_owned())
    };
    match timeout(ANSWER, exchanged).await {
        Ok(Ok(head)) => Ok(head),
        Ok(Err(e)) => Err(format!("no answer ({e}); is it a proxy?")),
        Err(_) => Err("no answer in time; is it a proxy?".to_owned()),
    }
}

fn authorization(proxy: &ProxyUrl) -> String {
    let basic = |secret: &Secret| STANDARD.encode(secret.reveal());
    let credentials = proxy.credentials.as_ref().map(basic);
    credentials.map_or(String::new(), |c| {
        format!("Proxy-Authorization: Basic {c}\r\n")
    })
}

fn printable(line: &str) -> String {
    let plain = |c: char| {
        if c.is_ascii_graphic() || c == ' ' {
            c
        } else {
            '?'
        }
    };
    line.chars().take(200).map(plain).collect()
}

/// Looks at certificates and lets all pass: nothing is said on the connection that it looks at, and whether clients would
/// trust them is asked afterwards, for each store.
#[derive(Debug)]
struct Onlooker {
    provider: Arc<CryptoProvider>,
    chain: Mutex<Vec<CertificateDer<'static>>>,
}

impl Onlooker {
    fn new() -> Self {
        Onlooker {
            provider: Arc::new(default_provider()),
            chain: Mutex::default(),
        }
    }

    fn take(&self) -> Vec<CertificateDer<'static>> {
        std::mem::take(&mut *self.chain.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl ServerCertVerifier for Onlooker {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        rest: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        let chain = [leaf]
            .into_iter()
            .chain(rest)
            .map(|c| c.clone().into_owned());
        *self.chain.lock().unwrap_or_else(PoisonError::into_inner) = chain.collect();
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}

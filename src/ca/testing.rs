//! What the CA's tests share: a CA in a temporary folder, handshakes in memory, and other programs as judges.
//!
//! A judge that is not installed fails its test: a claim about OpenSSL or Python is not to pass unproved.

use std::{
    io::{Read, Write},
    net::TcpListener,
    path::Path,
    process::{Command, Stdio},
    sync::Arc,
    time::SystemTime,
};

use rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection,
    crypto::aws_lc_rs::default_provider,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
    sign::SingleCertAndKey,
    version::{TLS12, TLS13},
};
use tempfile::TempDir;

use super::{
    Constraints, ISSUER_CERTIFICATE, Issuer, Leaves, ROOT_CERTIFICATE, init,
    leaf::{LeafKey, mint},
};
use crate::authority::Host;

/// A CA in a folder of its own.
pub(super) struct TestCa {
    pub dir: TempDir,
    pub issuer: Arc<Issuer>,
}

impl TestCa {
    /// Makes a CA that may sign for these hosts.
    pub fn new(hosts: &[&str]) -> TestCa {
        TestCa::with(&constraints(hosts))
    }

    /// Makes a CA with these constraints.
    pub fn with(constraints: &Constraints) -> TestCa {
        let dir = TempDir::new().unwrap();
        init(dir.path(), constraints, SystemTime::now()).unwrap();
        let issuer = Arc::new(Issuer::load(dir.path()).unwrap());
        TestCa { dir, issuer }
    }

    /// Leaves of this CA's issuer.
    pub fn leaves(&self) -> Leaves {
        Leaves::new(self.issuer.clone()).unwrap()
    }

    /// TLS settings for a host that the issuer may not sign for, as a thief of its key would make them.
    pub fn forged(&self, name: &str) -> Arc<ServerConfig> {
        let key = LeafKey::generate().unwrap();
        let leaf = mint(&host(name), &self.issuer, &key, SystemTime::now()).unwrap();
        let config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(SingleCertAndKey::from(leaf.certified)));
        Arc::new(config)
    }

    /// A client that trusts nothing but this CA's root.
    pub fn client(&self) -> ClientConfig {
        client(
            &[&self.dir.path().join(ROOT_CERTIFICATE)],
            &[&TLS13, &TLS12],
        )
    }
}

pub(super) fn host(text: &str) -> Host {
    Host::parse(text).unwrap()
}

pub(super) fn constraints(hosts: &[&str]) -> Constraints {
    Constraints::Hosts(hosts.iter().map(|text| host(text)).collect())
}

/// A client that trusts the certificates in these files alone.
pub(super) fn client(
    roots: &[&Path],
    versions: &[&'static rustls::SupportedProtocolVersion],
) -> ClientConfig {
    let mut store = RootCertStore::empty();
    for file in roots {
        for certificate in CertificateDer::pem_file_iter(file).unwrap() {
            store.add(certificate.unwrap()).unwrap();
        }
    }
    ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_protocol_versions(versions)
        .unwrap()
        .with_root_certificates(store)
        .with_no_client_auth()
}

/// Both ends of a finished handshake, and how many bytes the server sent.
pub(super) struct Handshake {
    pub client: ClientConnection,
    pub server: ServerConnection,
    pub server_bytes: usize,
}

/// Shakes hands in memory, up to and including the server's tickets.
pub(super) fn handshake(
    client: &Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    name: &str,
) -> Result<Handshake, rustls::Error> {
    let mut client = ClientConnection::new(
        client.clone(),
        ServerName::try_from(name.to_owned()).unwrap(),
    )?;
    let mut server = ServerConnection::new(server)?;
    let mut server_bytes = 0;
    loop {
        let mut wire = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut wire).unwrap();
        }
        let sent = wire.len();
        feed(&wire, |bytes| {
            server
                .read_tls(bytes)
                .map(|_| server.process_new_packets().map(drop))
        })?;

        let mut wire = Vec::new();
        while server.wants_write() {
            server.write_tls(&mut wire).unwrap();
        }
        server_bytes += wire.len();
        feed(&wire, |bytes| {
            client
                .read_tls(bytes)
                .map(|_| client.process_new_packets().map(drop))
        })?;
        if sent == 0 && wire.is_empty() {
            return Ok(Handshake {
                client,
                server,
                server_bytes,
            });
        }
    }
}

fn feed(
    mut wire: &[u8],
    mut read: impl FnMut(&mut dyn Read) -> std::io::Result<Result<(), rustls::Error>>,
) -> Result<(), rustls::Error> {
    while !wire.is_empty() {
        read(&mut wire).unwrap()?;
    }
    Ok(())
}

/// The chain that a client is sent for a host.
pub(super) fn chain(
    config: &Arc<ServerConfig>,
    client: ClientConfig,
    name: &str,
) -> Vec<CertificateDer<'static>> {
    let done = handshake(&Arc::new(client), config.clone(), name).unwrap();
    done.client.peer_certificates().unwrap().to_vec()
}

/// `openssl verify` in its strict mode, with the root alone as trusted. An error is what it says.
pub(super) fn openssl_verify(
    ca: &TestCa,
    leaf: &CertificateDer<'_>,
    name: &str,
) -> Result<(), String> {
    let file = ca.dir.path().join("leaf.pem");
    std::fs::write(&file, super::bundle::to_pem(leaf)).unwrap();
    let flag = if name.parse::<std::net::IpAddr>().is_ok() {
        "-verify_ip"
    } else {
        "-verify_hostname"
    };
    let output = Command::new("openssl")
        .args([
            "verify",
            "-x509_strict",
            "-purpose",
            "sslserver",
            flag,
            name,
            "-no-CApath",
            "-no-CAstore",
            "-CAfile",
        ])
        .arg(ca.dir.path().join(ROOT_CERTIFICATE))
        .arg("-untrusted")
        .arg(ca.dir.path().join(ISSUER_CERTIFICATE))
        .arg(&file)
        .output()
        .expect("openssl must be installed for this test");
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

/// A handshake by Python's `ssl` with the strict flag that is its default since 3.13. The answer is `ok` or its error.
pub(super) fn python_handshake(ca: &TestCa, server: Arc<ServerConfig>, name: &str) -> String {
    const CLIENT: &str = "
import socket, ssl, sys
port, root, name = sys.argv[1:]
context = ssl.create_default_context(cafile=root)
context.verify_flags |= ssl.VERIFY_X509_STRICT
try:
    with context.wrap_socket(socket.create_connection(('127.0.0.1', int(port))), server_hostname=name) as tls:
        tls.sendall(b'x')
        tls.recv(1)
        print('ok')
except ssl.SSLError as error:
    print(error)
";
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let mut python = Command::new("python3");
    python
        .args(["-c", CLIENT, &port])
        .arg(ca.dir.path().join(ROOT_CERTIFICATE))
        .arg(name);
    let child = python
        .stdout(Stdio::piped())
        .spawn()
        .expect("python3 must be installed for this test");

    let (mut tcp, _) = listener.accept().unwrap();
    let mut connection = ServerConnection::new(server).unwrap();
    let mut stream = rustls::Stream::new(&mut connection, &mut tcp);
    let mut byte = [0];
    // Fails where the client refuses the certificate; what the client says is what counts.
    let _ = stream
        .read_exact(&mut byte)
        .and_then(|()| stream.write_all(&byte));
    drop(tcp);
    let output = child.wait_with_output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

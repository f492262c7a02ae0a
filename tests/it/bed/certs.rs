//! A certificate authority of the test's own, for origins and for Postgres. It is not the proxy's CA.

use std::{path::Path, sync::Arc};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};

/// An issuer with a root that nobody trusts unless told to.
pub struct TestCa {
    issuer: Issuer<'static, KeyPair>,
    root: String,
}

/// A certificate and its key, both PEM.
pub struct Identity {
    /// The certificate.
    pub certificate: String,
    /// The private key, PKCS#8.
    pub key: String,
}

impl TestCa {
    /// A fresh root.
    pub fn new() -> Self {
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::CommonName, "paceline test bed root");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().expect("a key");
        let root = params.self_signed(&key).expect("a self-signed root").pem();
        TestCa {
            issuer: Issuer::new(params, key),
            root,
        }
    }

    /// The root as PEM, for `extra_roots` and `sslrootcert`.
    pub fn root(&self) -> &str {
        &self.root
    }

    /// A server certificate for names or addresses.
    pub fn issue(&self, names: &[&str]) -> Identity {
        let names: Vec<String> = names.iter().map(|name| name.to_string()).collect();
        let mut params = CertificateParams::new(names).expect("names that a certificate can hold");
        params
            .distinguished_name
            .push(DnType::CommonName, "paceline test bed server");
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate().expect("a key");
        let certificate = params
            .signed_by(&key, &self.issuer)
            .expect("a signed certificate")
            .pem();
        Identity {
            certificate,
            key: key.serialize_pem(),
        }
    }
}

/// TLS for a server that presents `identity` and speaks HTTP/1.1.
pub fn server_tls(identity: &Identity) -> Arc<ServerConfig> {
    let chain =
        vec![CertificateDer::from_pem_slice(identity.certificate.as_bytes()).expect("our own PEM")];
    let key = PrivateKeyDer::from_pem_slice(identity.key.as_bytes()).expect("our own PEM");
    let mut config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("the provider's own versions")
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .expect("a certificate with its key");
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Arc::new(config)
}

/// TLS for a client that trusts the roots in `pem` and nothing else, with SNI and no ALPN.
pub fn client_tls(pem: &[u8]) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem) {
        roots
            .add(certificate.expect("a PEM certificate"))
            .expect("a usable root");
    }
    let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("the provider's own versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    Arc::new(config)
}

/// As [`client_tls`], with the roots read from a file.
pub fn client_tls_from(path: &Path) -> Arc<ClientConfig> {
    let pem = std::fs::read(path).unwrap_or_else(|fault| panic!("{}: {fault}", path.display()));
    client_tls(&pem)
}

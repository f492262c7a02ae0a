//! The store's URL: what the driver understands of it, and the TLS settings that it does not.
//!
//! `sslmode` means what it means to libpq (PostgreSQL manual, "SSL Support"): `require` encrypts and verifies nothing,
//! unless `sslrootcert` is given, which makes it `verify-ca`; `verify-full` checks the host name too.

use std::{path::PathBuf, str::FromStr as _, sync::Arc};

use rustls::{
    DigitallySignedStruct, Error as TlsError, RootCertStore, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::CryptoProvider,
    pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject as _},
};

use super::error::{Reason, StoreError};

/// Where Postgres is and how its identity is checked.
#[derive(Clone)]
pub struct Address {
    /// For the driver; its `sslmode` says only whether TLS is used.
    pub config: tokio_postgres::Config,
    /// How TLS is spoken; `None` when it is not.
    pub tls: Option<Arc<rustls::ClientConfig>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Verify {
    Nothing,
    Chain,
    Full,
}

impl Address {
    /// Reads a `postgres://` URL. The text of an error never holds a part of it.
    ///
    /// # Errors
    /// The URL is malformed, names an unknown `sslmode`, or its `sslrootcert` cannot be read.
    pub fn parse(url: &str) -> Result<Address, StoreError> {
        // A character that ends a password too early would make the rest of it a host name, and host names are shown.
        let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
        let authority = rest.split(['/', '?', '#']).next().unwrap_or("");
        if rest.matches('@').count() != authority.matches('@').count().min(1) {
            return Err(bad(
                "store.url: in user and password write @ as %40, / as %2F, ? as %3F and # as %23",
            ));
        }
        let (base, query) = url.split_once('?').unwrap_or((url, ""));
        let (mut mode, mut root, mut rest) = (None, None, Vec::new());
        for pair in query.split('&').filter(|p| !p.is_empty()) {
            match pair.split_once('=') {
                Some(("sslmode", v)) => mode = Some(v.to_owned()),
                Some(("sslrootcert", v)) => root = Some(decoded(v)?),
                Some(("channel_binding" | "sslcert" | "sslkey" | "gssencmode", _)) => {
                    return Err(bad(
                        "store.url: sslcert, sslkey, channel_binding and gssencmode are not supported; remove them",
                    ));
                }
                _ => rest.push(pair),
            }
        }
        let cleaned = if rest.is_empty() {
            base.to_owned()
        } else {
            format!("{base}?{}", rest.join("&"))
        };
        let mut config = tokio_postgres::Config::from_str(&cleaned)
            .map_err(|_| bad("store.url is not a valid postgres:// URL; write postgres://user:password@host:5432/database"))?;
        let (ssl, verify) = match (mode.as_deref(), &root) {
            (Some("disable"), _) => (tokio_postgres::config::SslMode::Disable, Verify::Nothing),
            (None | Some("prefer" | "allow"), _) => {
                (tokio_postgres::config::SslMode::Prefer, Verify::Nothing)
            }
            (Some("require"), None) => (tokio_postgres::config::SslMode::Require, Verify::Nothing),
            (Some("require" | "verify-ca"), _) => {
                (tokio_postgres::config::SslMode::Require, Verify::Chain)
            }
            (Some("verify-full"), _) => (tokio_postgres::config::SslMode::Require, Verify::Full),
            (Some(_), _) => {
                return Err(bad(
                    "store.url: sslmode must be disable, prefer, require, verify-ca or verify-full",
                ));
            }
        };
        config.ssl_mode(ssl).application_name("paceline");
        let tls = match ssl {
            tokio_postgres::config::SslMode::Disable => None,
            _ => Some(Arc::new(tls_config(verify, root.map(PathBuf::from))?)),
        };
        Ok(Address { config, tls })
    }
}

fn bad(text: &str) -> StoreError {
    StoreError::new(Reason::Url, text)
}

fn decoded(text: &str) -> Result<String, StoreError> {
    let utf8 = percent_encoding::percent_decode_str(text).decode_utf8();
    utf8.map(|t| t.into_owned())
        .map_err(|_| bad("store.url: sslrootcert is not UTF-8"))
}

fn tls_config(verify: Verify, root: Option<PathBuf>) -> Result<rustls::ClientConfig, StoreError> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|e| StoreError::new(Reason::Tls, e.to_string()))?;
    if verify == Verify::Nothing {
        let lenient = Arc::new(Lenient {
            chain: None,
            provider,
        });
        return Ok(builder
            .dangerous()
            .with_custom_certificate_verifier(lenient)
            .with_no_client_auth());
    }
    let mut roots = RootCertStore::empty();
    match root {
        Some(file) if file.as_os_str() != "system" => {
            let wrong = |_| {
                bad("store.url: the file named by sslrootcert cannot be read as PEM certificates")
            };
            for cert in CertificateDer::pem_file_iter(&file).map_err(wrong)? {
                roots
                    .add(cert.map_err(wrong)?)
                    .map_err(|e| StoreError::new(Reason::Tls, e.to_string()))?;
            }
        }
        _ => {
            let system = rustls_native_certs::load_native_certs();
            roots.add_parsable_certificates(system.certs);
        }
    }
    if roots.is_empty() {
        return Err(bad(
            "store.url: no root certificates to verify the server with; name a file with sslrootcert",
        ));
    }
    let roots = Arc::new(roots);
    if verify == Verify::Full {
        return Ok(builder.with_root_certificates(roots).with_no_client_auth());
    }
    let chain = WebPkiServerVerifier::builder_with_provider(roots, provider.clone())
        .build()
        .map_err(|e| StoreError::new(Reason::Tls, e.to_string()))?;
    let lenient = Arc::new(Lenient {
        chain: Some(chain),
        provider,
    });
    Ok(builder
        .dangerous()
        .with_custom_certificate_verifier(lenient)
        .with_no_client_auth())
}

/// Verifies the chain but not the name (`verify-ca`), or nothing (`require`, `prefer`).
#[derive(Debug)]
struct Lenient {
    chain: Option<Arc<WebPkiServerVerifier>>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Lenient {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        use rustls::CertificateError::{NotValidForName, NotValidForNameContext};
        let Some(chain) = &self.chain else {
            return Ok(ServerCertVerified::assertion());
        };
        match chain.verify_server_cert(end_entity, intermediates, name, ocsp, now) {
            // The name is checked last, after the chain has been found good.
            Err(TlsError::InvalidCertificate(NotValidForName | NotValidForNameContext { .. })) => {
                Ok(ServerCertVerified::assertion())
            }
            other => other,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, cert, dss, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ssl_parameters_are_taken_out_of_the_url() {
        let a = Address::parse(
            "postgres://u:p@h1,h2:5433/db?sslmode=require&target_session_attrs=read-write",
        )
        .map_err(|e| e.to_string());
        let a = a.expect("a valid URL");
        assert_eq!(a.config.get_hosts().len(), 2);
        assert_eq!(
            a.config.get_target_session_attrs(),
            tokio_postgres::config::TargetSessionAttrs::ReadWrite
        );
        assert!(a.tls.is_some());
        let off = Address::parse("postgres://u@h/db?sslmode=disable").expect("a valid URL");
        assert!(off.tls.is_none());
    }

    #[test]
    fn no_part_of_a_bad_url_is_shown() {
        for url in [
            "postgres://u:top@hunter2@h/db",
            "postgres://u:1/hunter2@h/db",
            "postgres://u:1?hunter2@h/db",
            "postgres://u:1#hunter2@h/db",
            "postgres://u:hunter2@h:x/db",
            "postgres://u:hunter2@h/db?sslmode=hunter2",
            "postgres://u:hunter2@h/db?sslrootcert=/hunter2",
        ] {
            let url = if url.contains("sslrootcert") {
                format!("{url}&sslmode=verify-full")
            } else {
                url.to_owned()
            };
            let Err(e) = Address::parse(&url) else {
                panic!("{url} was accepted")
            };
            assert!(!e.to_string().contains("hunter2"), "{e}");
        }
    }
}

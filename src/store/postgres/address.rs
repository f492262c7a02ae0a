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
use tokio_postgres::config::SslMode;

use crate::config::{Complaint, keys};

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

/// The parameters that are understood, and what each may be.
const PARAMETERS: [(&str, &str); 19] = [
    (
        "sslmode",
        "disable, allow, prefer, require, verify-ca or verify-full",
    ),
    ("sslrootcert", "a file of PEM certificates, or system"),
    ("sslnegotiation", "postgres or direct"),
    ("target_session_attrs", "any, read-write or read-only"),
    ("load_balance_hosts", "disable or random"),
    ("connect_timeout", "whole seconds"),
    ("tcp_user_timeout", "whole seconds"),
    ("keepalives", "0 or 1"),
    ("keepalives_idle", "whole seconds"),
    ("keepalives_interval", "whole seconds"),
    ("keepalives_retries", "a whole number"),
    ("host", "names or addresses, with commas between them"),
    ("hostaddr", "addresses, with commas between them"),
    ("port", "ports, with commas between them"),
    ("user", "text, percent-encoded"),
    ("password", "text, percent-encoded"),
    ("dbname", "text, percent-encoded"),
    ("options", "text, percent-encoded"),
    ("application_name", "anything; it is set to paceline"),
];
const SSL_MODES: [&str; 6] = [
    "disable",
    "allow",
    "prefer",
    "require",
    "verify-ca",
    "verify-full",
];
/// Parameters of libpq that would mean something, and are not understood.
const UNSUPPORTED: [&str; 4] = ["sslcert", "sslkey", "channel_binding", "gssencmode"];

impl Address {
    /// Reads a `postgres://` URL. A complaint never holds a part of it but the name of a parameter that is known.
    ///
    /// # Errors
    /// The URL is malformed, has a parameter that is not known or a value that it may not have, or its `sslrootcert`
    /// cannot be read.
    pub fn parse(url: &str) -> Result<Address, Complaint> {
        // A character that ends a password too early would make the rest of it a host name, and host names are shown.
        let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
        let authority = rest.split(['/', '?', '#']).next().unwrap_or("");
        if rest.matches('@').count() != authority.matches('@').count().min(1) {
            return Err(Complaint::new(
                "@, /, ? or # stands within user or password",
                "write @ as %40, / as %2F, ? as %3F and # as %23",
            ));
        }
        let (base, query) = url.split_once('?').unwrap_or((url, ""));
        let (mut mode, mut root, mut rest) = (None, None, Vec::new());
        for (i, pair) in query.split('&').filter(|p| !p.is_empty()).enumerate() {
            match check_parameter(i, pair)? {
                ("sslmode", value) => mode = Some(value),
                ("sslrootcert", value) => root = Some(value),
                _ => rest.push(pair),
            }
        }
        let cleaned = if rest.is_empty() {
            base.to_owned()
        } else {
            format!("{base}?{}", rest.join("&"))
        };
        let mut config = tokio_postgres::Config::from_str(&cleaned).map_err(|_| {
            Complaint::new(
                "is not a valid postgres:// URL (it isn't shown, it may hold a password)",
                "write postgres://USER:PASSWORD@HOST:PORT/DATABASE",
            )
        })?;
        let (ssl, verify) = match (mode.as_deref(), &root) {
            (Some("disable"), _) => (SslMode::Disable, Verify::Nothing),
            (Some("require"), None) => (SslMode::Require, Verify::Nothing),
            (Some("require" | "verify-ca"), _) => (SslMode::Require, Verify::Chain),
            (Some("verify-full"), _) => (SslMode::Require, Verify::Full),
            // "prefer" and "allow"
            (None | Some(_), _) => (SslMode::Prefer, Verify::Nothing),
        };
        config.ssl_mode(ssl).application_name("paceline");
        let tls = match ssl {
            SslMode::Disable => None,
            _ => Some(Arc::new(tls_config(verify, root.map(PathBuf::from))?)),
        };
        Ok(Address { config, tls })
    }
}

/// Name and value of a parameter, the `i`th of the URL, if it is known and may be what it is.
fn check_parameter(i: usize, pair: &str) -> Result<(&'static str, String), Complaint> {
    let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
    if let Some(name) = UNSUPPORTED.iter().find(|known| **known == name) {
        return Err(Complaint::new(
            format!("{name} is not supported"),
            "remove it",
        ));
    }
    let found = PARAMETERS.iter().find(|(known, _)| *known == name);
    let Some((name, may_be)) = found else {
        let known = PARAMETERS.map(|(name, _)| name);
        let fix = match keys::nearest(name, &known) {
            Some(nearest) => format!("did you mean {nearest}?"),
            None => format!("remove it, or use one of {}", known.join(", ")),
        };
        // What is unknown may be a part of a password.
        let wrong = format!("parameter {} behind the ? is unknown", i + 1);
        return Err(Complaint::new(wrong, fix));
    };
    let wrong = || {
        Complaint::new(
            format!("{name} has a value that it may not have"),
            format!("it may be {may_be}"),
        )
    };
    let value = percent_encoding::percent_decode_str(value).decode_utf8();
    let value = value.map_err(|_| wrong())?.into_owned();
    let is_right = match *name {
        "sslmode" => SSL_MODES.contains(&value.as_str()),
        "sslrootcert" => !value.is_empty(),
        // What the driver understands by itself, it is asked; by itself alone, so that the complaint has the name.
        _ => tokio_postgres::Config::from_str(&format!("postgres:///?{pair}")).is_ok(),
    };
    is_right.then_some((*name, value)).ok_or_else(wrong)
}

fn tls_config(verify: Verify, root: Option<PathBuf>) -> Result<rustls::ClientConfig, Complaint> {
    let broken = |e: &dyn std::fmt::Display| {
        Complaint::new(
            format!("its TLS settings do not fit ({e})"),
            "correct sslrootcert",
        )
    };
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|e| broken(&e))?;
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
                Complaint::new(
                    "the file named by sslrootcert cannot be read as PEM certificates",
                    "name one that can, or system",
                )
            };
            for cert in CertificateDer::pem_file_iter(&file).map_err(wrong)? {
                roots.add(cert.map_err(wrong)?).map_err(|e| broken(&e))?;
            }
        }
        _ => {
            let system = rustls_native_certs::load_native_certs();
            roots.add_parsable_certificates(system.certs);
        }
    }
    if roots.is_empty() {
        return Err(Complaint::new(
            "there are no root certificates to verify the server with",
            "name a file of them with sslrootcert",
        ));
    }
    let roots = Arc::new(roots);
    if verify == Verify::Full {
        return Ok(builder.with_root_certificates(roots).with_no_client_auth());
    }
    let chain = WebPkiServerVerifier::builder_with_provider(roots, provider.clone())
        .build()
        .map_err(|e| broken(&e))?;
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
        );
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
            assert!(!format!("{e:?}").contains("hunter2"), "{e:?}");
        }
    }

    #[test]
    fn a_wrong_parameter_is_named_with_what_it_may_be() {
        for (query, wrong, fix) in [
            ("sslmode=bogus", "sslmode has", "prefer, require, verify-ca"),
            (
                "a=1&target_session_attrs=primary",
                "parameter 1 behind the ? is unknown",
                "remove it, or use one of sslmode,",
            ),
            (
                "target_session_attrs=primary",
                "target_session_attrs has",
                "read-write",
            ),
            ("connect_timeout=1s", "connect_timeout has", "whole seconds"),
            ("load_balance_hosts=yes", "load_balance_hosts has", "random"),
            ("sslmode=require&port=x", "port has", "ports"),
            ("sslmode", "sslmode has", "verify-full"),
            ("sslmod=require", "parameter 1 ", "did you mean sslmode?"),
            ("sslcert=a.pem", "sslcert is not supported", "remove it"),
        ] {
            let Err(complaint) = Address::parse(&format!("postgres://u:p@h/db?{query}")) else {
                panic!("{query} was accepted")
            };
            assert!(
                complaint.wrong.contains(wrong) && complaint.fix.contains(fix),
                "{query}: {complaint:?}"
            );
        }
        for query in PARAMETERS.map(|(name, _)| match name {
            "sslmode" => "sslmode=verify-ca".to_owned(),
            "sslrootcert" => "sslrootcert=system".to_owned(),
            "sslnegotiation" => "sslnegotiation=postgres".to_owned(),
            "target_session_attrs" => "target_session_attrs=read-only".to_owned(),
            "load_balance_hosts" => "load_balance_hosts=random".to_owned(),
            "host" | "hostaddr" => format!("{name}=127.0.0.1"),
            name => format!("{name}=1"),
        }) {
            let parsed = Address::parse(&format!("postgres://u:p@/db?{query}"));
            assert!(parsed.is_ok(), "{query}: {:?}", parsed.err());
        }
    }
}

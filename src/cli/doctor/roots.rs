//! Whether a store of roots vouches for what the proxy presented: the same question that a client's TLS library asks,
//! answered by one.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{
    CertificateError, Error as TlsError, RootCertStore,
    client::{WebPkiServerVerifier, danger::ServerCertVerifier as _},
    crypto::aws_lc_rs::default_provider,
    pki_types::{CertificateDer, UnixTime, pem::PemObject as _},
};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::{
    server_name,
    trust::{Store, Trusted},
};
use crate::{authority::Authority, ca};

/// A file longer than this is no bundle of roots, in bytes.
const LONGEST_FILE: u64 = 16 * 1024 * 1024;
/// Files of a folder that are looked at.
const MOST_FILES: usize = 2_000;

/// What is known of paceline's CA.
#[derive(Debug)]
pub(super) struct Judge {
    target: Authority,
    /// What the proxy presented, if it was a chain of paceline's: the leaf, then the issuer.
    chain: Option<Vec<CertificateDer<'static>>>,
    /// The root as it was given.
    root: Option<Vec<CertificateDer<'static>>>,
}

impl Judge {
    pub(super) fn new(target: &Authority, root: Option<Vec<CertificateDer<'static>>>) -> Self {
        Judge {
            target: target.clone(),
            chain: None,
            root,
        }
    }

    /// Takes what the proxy presented. Returns who signed it.
    ///
    /// # Errors
    /// It is not paceline's, or not of the CA that was given.
    pub(super) fn hear(&mut self, chain: Vec<CertificateDer<'static>>) -> Result<String, String> {
        let Some(issuer) = chain
            .get(1)
            .and_then(subject)
            .filter(|s| s.starts_with("CN=paceline issuer"))
        else {
            let by = chain
                .first()
                .and_then(signed_by)
                .unwrap_or_else(|| "nobody known".to_owned());
            return Err(format!(
                "comes back with a certificate by {by}, not by paceline: the proxy does not govern the host; name one that it does with --url"
            ));
        };
        if let Some(root) = &self.root {
            match verdict(&chain, root, &self.target) {
                Trusted::Yes | Trusted::Alone => {}
                Trusted::Broken(why) => {
                    return Err(format!(
                        "is signed by {issuer}, which clients refuse: {why}"
                    ));
                }
                Trusted::No | Trusted::Untold => {
                    return Err(format!(
                        "is signed by {issuer}, which is not of the CA in --ca; give clients the root of the proxy that they use"
                    ));
                }
            }
        }
        self.chain = Some(chain);
        Ok(issuer)
    }

    /// What a store makes of paceline's certificates.
    pub(super) fn trusts(&self, store: Store<'_>) -> Trusted {
        let found = match store {
            // Where a file is expected, some clients take a folder too.
            Store::File(path) if path.is_dir() => in_folder(path),
            Store::File(path) => in_file(path),
            Store::Folder(path) => in_folder(path),
            Store::System => Ok(in_system()),
        };
        let roots = match found {
            Ok(roots) if roots.is_empty() && store != Store::System => {
                return Trusted::Broken("no certificate in it".to_owned());
            }
            Ok(roots) => roots,
            Err(e) => return Trusted::Broken(e.to_string()),
        };
        match (&self.chain, &self.root) {
            (Some(chain), _) => verdict(chain, &roots, &self.target),
            (None, Some(root)) if root.iter().any(|r| roots.contains(r)) => match roots.len() {
                1 => Trusted::Alone,
                _ => Trusted::Yes,
            },
            (None, Some(_)) => Trusted::No,
            (None, None) => Trusted::Untold,
        }
    }
}

/// The certificates in a text, without what is none.
pub(super) fn certificates(pem: &[u8]) -> Vec<CertificateDer<'static>> {
    CertificateDer::pem_slice_iter(pem).flatten().collect()
}

fn verdict(
    chain: &[CertificateDer<'static>],
    roots: &[CertificateDer<'static>],
    target: &Authority,
) -> Trusted {
    let mut store = RootCertStore::empty();
    store.add_parsable_certificates(roots.iter().cloned());
    let alone = store.len() == 1;
    let verifier =
        WebPkiServerVerifier::builder_with_provider(Arc::new(store), Arc::new(default_provider()))
            .build();
    let (Ok(verifier), Some(name), [leaf, rest @ ..]) =
        (verifier, server_name(&target.host), chain)
    else {
        // No root that can be used, or a host that no certificate can name.
        return Trusted::No;
    };
    match verifier.verify_server_cert(leaf, rest, &name, &[], UnixTime::now()) {
        Ok(_) if alone => Trusted::Alone,
        Ok(_) => Trusted::Yes,
        Err(TlsError::InvalidCertificate(CertificateError::UnknownIssuer)) => Trusted::No,
        Err(e) => Trusted::Broken(e.to_string()),
    }
}

fn in_file(path: &Path) -> io::Result<Vec<CertificateDer<'static>>> {
    let length = fs::metadata(path)?.len();
    if length > LONGEST_FILE {
        return Err(io::Error::other("too long for a bundle of roots"));
    }
    Ok(certificates(&fs::read(path)?))
}

fn in_folder(path: &Path) -> io::Result<Vec<CertificateDer<'static>>> {
    let files: Vec<PathBuf> = fs::read_dir(path)?
        .take(MOST_FILES)
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect();
    // What is no certificate is no client's concern.
    Ok(files
        .iter()
        .filter_map(|f| in_file(f).ok())
        .flatten()
        .collect())
}

fn in_system() -> Vec<CertificateDer<'static>> {
    let files = ca::WELL_KNOWN_ROOTS
        .iter()
        .map(|path| in_file(Path::new(path)));
    files
        .flatten()
        .find(|found| !found.is_empty())
        .unwrap_or_default()
}

fn subject(certificate: &CertificateDer<'_>) -> Option<String> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    Some(shown(&parsed.subject().to_string()))
}

fn signed_by(certificate: &CertificateDer<'_>) -> Option<String> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    Some(shown(&parsed.issuer().to_string()))
}

/// A name from the network, fit for a line.
fn shown(name: &str) -> String {
    let plain = |c: char| {
        if c.is_ascii_graphic() || c == ' ' {
            c
        } else {
            '?'
        }
    };
    name.chars().take(120).map(plain).collect()
}

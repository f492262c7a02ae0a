//! What can go wrong with the CA's files and with minting, each in one line that says what to change.
//!
//! No variant carries key material or the content of a file.

use std::{io, path::PathBuf};

use thiserror::Error;

use crate::authority::Host;

/// A failure of the CA: of its files, or of signing.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CaError {
    /// A file or the folder could not be read or written.
    #[error(
        "cannot {action} {path}: {source}; check that `ca.dir` exists and that its files belong to the user that runs paceline"
    )]
    Io {
        /// What was tried, as a verb
        action: &'static str,
        /// The file or folder
        path: PathBuf,
        /// The system's answer
        source: io::Error,
    },
    /// A private key that others could read or replace.
    #[error("{path} {fault}; {remedy}")]
    Exposed {
        /// The key's file, or the folder
        path: PathBuf,
        /// What exposes it
        fault: String,
        /// What to do about it
        remedy: &'static str,
    },
    /// Files that only make sense together are not all there.
    #[error("{present} is there but {missing} is not; {remedy}")]
    HalfASet {
        /// A file that is there
        present: PathBuf,
        /// The file, or files, that should be with it
        missing: String,
        /// What to do about it
        remedy: &'static str,
    },
    /// There are no files at all.
    #[error(
        "there is no CA in {dir}: make one with `paceline ca init`, or copy issuer.pem and issuer.key there"
    )]
    Absent {
        /// The CA's folder
        dir: PathBuf,
    },
    /// A file that does not hold what its name says.
    #[error(
        "{path} {fault}; put back the file that paceline made, or move it away and run `paceline ca init`"
    )]
    Malformed {
        /// The file
        path: PathBuf,
        /// What is wrong with it
        fault: &'static str,
    },
    /// A key beside a certificate made for another key.
    #[error(
        "{key} is not the key of {certificate}; put back the pair that belongs together, or move both away and run `paceline ca init`"
    )]
    KeyMismatch {
        /// The key's file
        key: PathBuf,
        /// The certificate's file
        certificate: PathBuf,
    },
    /// An issuer that the root did not sign.
    #[error(
        "{issuer} was not signed by {root}, so clients that trust this root would refuse it; put back the pair that belongs together, or move issuer.pem and issuer.key away and run `paceline ca init` where ca.key is"
    )]
    ForeignIssuer {
        /// The issuer's certificate
        issuer: PathBuf,
        /// The root's certificate
        root: PathBuf,
    },
    /// An issuer that cannot do what it is there for.
    #[error(
        "{path} {fault}; have your CA issue another with CA:TRUE, keyCertSign and name constraints that permit the hosts, or move issuer.pem and issuer.key away and run `paceline ca init`"
    )]
    Unusable {
        /// The issuer's certificate
        path: PathBuf,
        /// What is wrong with it
        fault: String,
    },
    /// A certificate that is used before or after its time.
    #[error("{path} {fault}; check this machine's clock, or {remedy}")]
    OutOfTime {
        /// The certificate's file
        path: PathBuf,
        /// When it ended, or when it begins
        fault: String,
        /// What to do if the clock is right
        remedy: &'static str,
    },
    /// A host that the issuer's name constraints do not permit.
    #[error(
        "the issuer may not sign for {host}: run `paceline ca init` where ca.key is, with the host among a destination's `hosts`"
    )]
    NotCovered {
        /// The host that was asked for
        host: Host,
    },
    /// Making a key or a certificate failed.
    #[error("cannot make a certificate: {0}; check that the system's random source works")]
    Certificate(#[from] rcgen::Error),
    /// The TLS library refused what was made.
    #[error("cannot set up TLS: {0}; check that the system's random source works")]
    Tls(#[from] rustls::Error),
}

impl CaError {
    /// Turns the system's answer to an attempt on a path into an error that names both.
    pub(super) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> CaError {
        let path = path.into();
        move |source| CaError::Io {
            action,
            path,
            source,
        }
    }

    /// Whether the cause is a host outside the name constraints, rather than the state of the CA.
    pub fn is_not_covered(&self) -> bool {
        matches!(self, CaError::NotCovered { .. })
    }

    /// Whether the cause is a certificate before or after its time.
    pub fn is_out_of_time(&self) -> bool {
        matches!(self, CaError::OutOfTime { .. })
    }
}

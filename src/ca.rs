//! The certificate authority: a root to distribute, a name-constrained issuer that signs, and minted leaves.
//!
//! Files live in one folder (`[ca] dir`). The issuer, not the root, carries the name constraints, because JVMs do
//! not look at constraints on a trust anchor; it is sent in every handshake, so that clients need only the root.
//! Nothing here knows about connections, policy or pacing; whether a host is governed is decided elsewhere.

mod bundle;
mod certificate;
mod constraints;
mod error;
mod files;
mod init;
mod issuer;
mod leaf;
mod leaves;
mod resumption;
mod signer;

#[cfg(test)]
mod company;
#[cfg(test)]
mod testing;

pub use bundle::{WELL_KNOWN_ROOTS, bundle_pem, write_bundle};
pub use constraints::{Constraints, NameRules};
pub use error::CaError;
pub use files::{Files, ISSUER_CERTIFICATE, ISSUER_KEY, ROOT_CERTIFICATE, ROOT_KEY};
pub use init::{Outcome, Step, init};
pub use issuer::{Certificate, Issuer};
pub use leaves::Leaves;

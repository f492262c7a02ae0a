//! The root's and the issuer's certificates: how they are made, and how a file of certificates is read.
//!
//! Knows neither where files live nor when a certificate is due to be replaced.

use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, KeyPair, KeyUsagePurpose,
    PKCS_RSA_SHA256, PublicKeyData, RsaKeySize, SerialNumber,
};
use rustls::{
    crypto::aws_lc_rs::default_provider,
    pki_types::{CertificateDer, pem::PemObject},
};
use sha2::{Digest, Sha256};
use x509_parser::{certificate::X509Certificate, prelude::FromDer, time::ASN1Time};

use super::{CaError, Constraints, signer::Signer};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// Long, because clients must be told of a new root one by one.
const ROOT_LIFE: Duration = Duration::from_secs(3652 * DAY.as_secs());
/// Short enough that its renewal is practised; it reaches clients by itself, in the handshake.
const ISSUER_LIFE: Duration = Duration::from_secs(730 * DAY.as_secs());
/// For clients whose clock is behind ours.
const BACKDATED: Duration = DAY;

/// Makes a key for a root: ECDSA P-256.
pub(super) fn root_key() -> Result<KeyPair, CaError> {
    Ok(KeyPair::generate()?)
}

/// Makes a key for an issuer: RSA of 2048 bits, because each client verifies the issuer's signature in each full
/// handshake, and such a one takes it a third of the time of ECDSA P-256. Its signing is slower, but a leaf is signed
/// once. NIST SP 800-57 (part 1, table 4) has this length for use until 2030, hence not for the root, which lives for longer.
pub(super) fn issuer_key() -> Result<KeyPair, CaError> {
    Ok(KeyPair::generate_rsa_for(
        &PKCS_RSA_SHA256,
        RsaKeySize::_2048,
    )?)
}

/// Makes the root for a key; it has no constraints, because JVMs would ignore them there.
pub(super) fn make_root(
    key: &KeyPair,
    now: SystemTime,
) -> Result<CertificateDer<'static>, CaError> {
    let params = authority_params("paceline root", key, now, now + ROOT_LIFE)?;
    Ok(params.self_signed(key)?.der().clone())
}

/// Makes the intermediate that signs leaves, under a root that ends at `root_end`.
pub(super) fn make_issuer(
    key: &KeyPair,
    constraints: &Constraints,
    root: &Signer,
    root_end: SystemTime,
    now: SystemTime,
) -> Result<CertificateDer<'static>, CaError> {
    let mut params = authority_params(
        "paceline issuer",
        key,
        now,
        (now + ISSUER_LIFE).min(root_end),
    )?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.name_constraints = constraints.to_extension();
    root.sign(&params, key)
}

fn authority_params(
    title: &str,
    key: &KeyPair,
    now: SystemTime,
    end: SystemTime,
) -> Result<CertificateParams, CaError> {
    let mut params = CertificateParams::default();
    // The key's hash keeps two authorities apart in a trust store: verifiers look roots up by subject.
    let hash = Sha256::digest(key.subject_public_key_info());
    let mut name = DistinguishedName::new();
    name.push(
        DnType::CommonName,
        format!(
            "{title} {:02x}{:02x}{:02x}{:02x}",
            hash[0], hash[1], hash[2], hash[3]
        ),
    );
    params.distinguished_name = name;
    params.serial_number = Some(random_serial()?);
    params.not_before = (now - BACKDATED).into();
    params.not_after = end.into();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

/// A positive serial of 128 bits, 126 of them random (RFC 5280 section 4.1.2.2 wants at most 20 octets, positive).
pub(super) fn random_serial() -> Result<SerialNumber, CaError> {
    let mut serial = [0; 16];
    default_provider()
        .secure_random
        .fill(&mut serial)
        .map_err(|_| rustls::Error::FailedToGetRandomBytes)?;
    // Not negative, and never shorter for a leading zero.
    serial[0] = serial[0] & 0x3f | 0x40;
    Ok(SerialNumber::from_slice(&serial))
}

/// The certificates in a PEM file, at least one.
pub(super) fn read_pem(pem: &[u8]) -> Option<Vec<CertificateDer<'static>>> {
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(pem)
        .collect::<Result<_, _>>()
        .ok()?;
    let parsed = certificates
        .iter()
        .all(|certificate| parse(certificate).is_some());
    (parsed && !certificates.is_empty()).then_some(certificates)
}

/// Parses DER; `None` if it is not one certificate.
pub(super) fn parse<'a>(der: &'a CertificateDer<'_>) -> Option<X509Certificate<'a>> {
    match X509Certificate::from_der(der.as_ref()) {
        Ok(([], certificate)) => Some(certificate),
        _ => None,
    }
}

/// Whether `authority` signed `certificate`: the names chain and the signature stands.
pub(super) fn is_signed_by(
    certificate: &X509Certificate<'_>,
    authority: &X509Certificate<'_>,
) -> bool {
    let signature_algorithm = algorithm_content(certificate.signature_algorithm.oid().as_bytes());
    let key = &authority.public_key().subject_public_key;
    certificate.issuer().as_raw() == authority.subject().as_raw()
        && default_provider()
            .signature_verification_algorithms
            .all
            .iter()
            .any(|algorithm| {
                // An algorithm that does not fit the key fails to verify, so the key's type need not be compared.
                algorithm
                    .signature_alg_id()
                    .as_ref()
                    .starts_with(&signature_algorithm)
                    && algorithm
                        .verify_signature(
                            &key.data,
                            certificate.tbs_certificate.as_ref(),
                            &certificate.signature_value.data,
                        )
                        .is_ok()
            })
}

/// An object identifier in DER, as an AlgorithmIdentifier's content begins.
fn algorithm_content(oid: &[u8]) -> Vec<u8> {
    const OBJECT_IDENTIFIER: u8 = 6;
    let mut der = vec![OBJECT_IDENTIFIER, oid.len() as u8];
    der.extend_from_slice(oid);
    der
}

/// A certificate's time as the system's; before 1970 counts as 1970.
pub(super) fn system_time(time: ASN1Time) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(time.timestamp()).unwrap_or(0))
}

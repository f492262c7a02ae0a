//! Signs certificates in an authority's name, as it stands in the authority's own certificate, to the byte.
//!
//! The library that makes certificates keeps a name as a map of attributes: one that repeats an attribute (`DC=corp,
//! DC=example`), holds several in one step, or is spelt in another string type comes out otherwise, and then no client finds the
//! authority (RFC 5280 section 6.1.3 (a)(4)). So it makes a draft here, unsigned and in another name; the name is put in its place,
//! and the whole is signed. Doesn't decide what is signed, or whether the authority may.

use rcgen::{
    CertificateParams, DistinguishedName, DnType, KeyIdMethod, KeyPair, PublicKeyData,
    SignatureAlgorithm, SigningKey,
};
use rustls::pki_types::CertificateDer;
use x509_parser::extensions::ParsedExtension;

use super::{CaError, certificate::parse};

/// The name in drafts.
const DRAFT: &str = "paceline draft";

const SEQUENCE: u8 = 0x30;
const BIT_STRING: u8 = 0x03;

/// An authority that signs.
pub(super) struct Signer {
    draft: rcgen::Issuer<'static, Blank>,
    /// The name of drafts, and the authority's own, in DER.
    draft_name: Vec<u8>,
    name: Vec<u8>,
    key: KeyPair,
}

/// The authority's key, where nothing is signed yet.
struct Blank {
    public: Vec<u8>,
    algorithm: &'static SignatureAlgorithm,
}

impl PublicKeyData for Blank {
    fn der_bytes(&self) -> &[u8] {
        &self.public
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        self.algorithm
    }
}

impl SigningKey for Blank {
    fn sign(&self, _: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        Ok(Vec::new())
    }
}

impl Signer {
    /// An authority by its certificate and key, which must belong together. `None` if the certificate cannot be read.
    pub(super) fn new(authority: &CertificateDer<'_>, key: KeyPair) -> Option<Signer> {
        let parsed = parse(authority)?;
        let mut params = CertificateParams::default();
        let mut name = DistinguishedName::new();
        name.push(DnType::CommonName, DRAFT);
        params.distinguished_name = name;
        let known =
            parsed
                .iter_extensions()
                .find_map(|extension| match extension.parsed_extension() {
                    ParsedExtension::SubjectKeyIdentifier(id) => Some(id.0.to_vec()),
                    _ => None,
                });
        if let Some(id) = known {
            params.key_identifier_method = KeyIdMethod::PreSpecified(id);
        }
        let blank = Blank {
            public: key.der_bytes().to_vec(),
            algorithm: key.algorithm(),
        };
        // CN, a UTF8String.
        let attribute = element(
            SEQUENCE,
            &[
                &[0x06, 0x03, 0x55, 0x04, 0x03][..],
                &element(0x0c, &[DRAFT.as_bytes()]),
            ],
        );
        Some(Signer {
            draft: rcgen::Issuer::new(params, blank),
            draft_name: element(SEQUENCE, &[&element(0x31, &[&attribute])]),
            name: parsed.subject().as_raw().to_vec(),
            key,
        })
    }

    /// Signs a certificate for `key`.
    ///
    /// # Errors
    /// What the library or the key refuses.
    pub(super) fn sign(
        &self,
        params: &CertificateParams,
        key: &impl PublicKeyData,
    ) -> Result<CertificateDer<'static>, CaError> {
        let draft = params.signed_by(key, &self.draft)?;
        let unreadable = || CaError::Certificate(rcgen::Error::CouldNotParseCertificate);
        let (whole, _) = split(draft.der()).ok_or_else(unreadable)?;
        let (body, rest) = split(whole).ok_or_else(unreadable)?;
        let (_, after_algorithm) = split(rest).ok_or_else(unreadable)?;
        let algorithm = &rest[..rest.len() - after_algorithm.len()];
        // The first name of a certificate is its issuer's.
        let at = body
            .windows(self.draft_name.len())
            .position(|bytes| bytes == self.draft_name)
            .ok_or_else(unreadable)?;
        let after = &body[at + self.draft_name.len()..];
        let body = element(SEQUENCE, &[&body[..at], &self.name, after]);
        let signature = self.key.sign(&body)?;
        let signature = element(BIT_STRING, &[&[0], &signature]);
        Ok(element(SEQUENCE, &[&body, algorithm, &signature]).into())
    }
}

/// One element of DER: tag, length, contents (X.690 section 8.1).
fn element(tag: u8, contents: &[&[u8]]) -> Vec<u8> {
    let length: usize = contents.iter().map(|c| c.len()).sum();
    let mut der = vec![tag];
    if length < 0x80 {
        der.push(length as u8);
    } else {
        let bytes = length.to_be_bytes();
        let bytes = &bytes[bytes.iter().take_while(|b| **b == 0).count()..];
        der.push(0x80 | bytes.len() as u8);
        der.extend_from_slice(bytes);
    }
    contents.iter().for_each(|c| der.extend_from_slice(c));
    der
}

/// The contents of the first element, and what comes after it.
fn split(der: &[u8]) -> Option<(&[u8], &[u8])> {
    let (&first, mut rest) = der.get(1..)?.split_first()?;
    let mut length = usize::from(first);
    if first & 0x80 != 0 {
        let (bytes, after) = rest.split_at_checked(usize::from(first & 0x7f))?;
        length = bytes.iter().try_fold(0usize, |n, b| {
            n.checked_mul(256)?.checked_add(usize::from(*b))
        })?;
        rest = after;
    }
    rest.split_at_checked(length)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_element_is_read_as_it_was_written(contents in prop::collection::vec(any::<u8>(), 0..70_000), rest in prop::collection::vec(any::<u8>(), 0..9)) {
            let der = [element(SEQUENCE, &[&contents]), rest.clone()].concat();
            prop_assert_eq!(split(&der), Some((&contents[..], &rest[..])));
        }

        #[test]
        fn garbage_is_split_without_panic(der in prop::collection::vec(any::<u8>(), 0..40)) {
            let _ = split(&der);
        }
    }
}

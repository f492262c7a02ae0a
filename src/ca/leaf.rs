//! One leaf: a certificate for exactly one name or address, short-lived, signed by the issuer.
//!
//! Doesn't keep anything; `leaves.rs` does.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose, SanType,
};
use rustls::{
    crypto::aws_lc_rs::sign::any_ecdsa_type,
    pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
    sign::{CertifiedKey, SigningKey},
};

use super::{CaError, Issuer, certificate::random_serial};
use crate::authority::Host;

/// A leaf's life. Nobody revokes a leaf, so it is short; and 398 days is the most that clients accept.
pub(super) const LEAF_LIFE: Duration = Duration::from_secs(24 * 60 * 60);
/// For clients whose clock is behind ours.
const BACKDATED: Duration = Duration::from_secs(60 * 60);

/// The key of all leaves of this process.
///
/// One for all, so that minting costs a single signature; not the issuer's, so that the issuer's key signs
/// certificates only; never written to disk.
pub(super) struct LeafKey {
    public: KeyPair,
    signing: Arc<dyn SigningKey>,
}

/// A minted leaf and the time in which it may be served.
pub(super) struct Leaf {
    /// The chain as sent, leaf and issuer, with the key
    pub certified: Arc<CertifiedKey>,
    /// From when on
    pub not_before: SystemTime,
    /// When to mint another
    pub renew_at: SystemTime,
}

impl LeafKey {
    /// Makes a key.
    pub(super) fn generate() -> Result<LeafKey, CaError> {
        let public = KeyPair::generate()?;
        let der = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(public.serialized_der()));
        let signing = any_ecdsa_type(&der)?;
        Ok(LeafKey { public, signing })
    }
}

/// Mints a leaf for a host that the issuer covers, while the issuer lives.
pub(super) fn mint(
    host: &Host,
    issuer: &Issuer,
    key: &LeafKey,
    now: SystemTime,
) -> Result<Leaf, CaError> {
    let not_before = (now - BACKDATED).max(issuer.certificate.not_before);
    let not_after = (now + LEAF_LIFE).min(issuer.not_after());

    let mut params = CertificateParams::default();
    params.serial_number = Some(random_serial()?);
    params.not_before = not_before.into();
    params.not_after = not_after.into();
    // No common name: it ends at 64 characters, and no current client looks at it. But not an empty subject either:
    // RFC 5280 would then have the alternative name critical, which is the rarer shape.
    let mut subject = DistinguishedName::new();
    subject.push(DnType::OrganizationName, "paceline");
    params.distinguished_name = subject;
    params.subject_alt_names = vec![match host {
        Host::Name(name) => SanType::DnsName(name.as_ref().try_into()?),
        Host::Ip(address) => SanType::IpAddress(*address),
    }];
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.use_authority_key_identifier_extension = true;
    let leaf = issuer.signer.sign(&params, &key.public)?;

    let chain = vec![leaf, issuer.der.clone()];
    Ok(Leaf {
        certified: Arc::new(CertifiedKey::new(chain, key.signing.clone())),
        not_before,
        renew_at: now + not_after.duration_since(now).unwrap_or_default() * 2 / 3,
    })
}

#[cfg(test)]
mod tests {
    use x509_parser::extensions::GeneralName;

    use super::*;
    use crate::ca::{
        Constraints,
        certificate::{parse, system_time},
        testing::{TestCa, chain, constraints, handshake, host, openssl_verify, python_handshake},
    };

    /// A name of 253 bytes under `example.com`.
    fn longest_name() -> String {
        let label = "a".repeat(63);
        let name = format!("{label}.{label}.{label}.{}.example.com", "a".repeat(49));
        assert_eq!(name.len(), 253);
        name
    }

    #[test]
    fn strict_verifiers_accept_names_and_addresses_of_every_shape() {
        let ca = TestCa::new(&[
            "example.com",
            "bücher.example",
            "192.0.2.7",
            "2001:db8::7",
            "127.0.0.1",
        ]);
        let leaves = ca.leaves();
        let longest = longest_name();
        let names = [
            "example.com",
            "a.b.example.com",
            "xn--bcher-kva.example",
            &longest,
            "192.0.2.7",
            "2001:db8::7",
        ];
        for name in names {
            let config = leaves.server_config(&host(name)).unwrap();
            let chain = chain(&config, ca.client(), name);
            assert_eq!(chain.len(), 2, "the issuer goes with the leaf");
            assert_eq!(openssl_verify(&ca, &chain[0], name), Ok(()), "{name}");
            assert_eq!(python_handshake(&ca, config, name), "ok", "{name}");
        }
    }

    #[test]
    fn a_leaf_outside_the_constraints_is_refused_by_every_verifier() {
        let asked = constraints(&["example.com", "192.0.2.7"]);
        let only_v6 = constraints(&["2001:db8::7"]);
        let only_names = constraints(&["example.com"]);
        let cases: [(&Constraints, &[&str]); 3] = [
            (
                &asked,
                &[
                    "example.org",
                    "notexample.com",
                    "com",
                    "192.0.2.8",
                    "2001:db8::7",
                ],
            ),
            (
                &only_v6,
                &["example.com", "localhost", "192.0.2.7", "2001:db8::8"],
            ),
            (&only_names, &["example.org", "192.0.2.7", "2001:db8::7"]),
        ];
        for (constraints, names) in cases {
            let ca = TestCa::with(constraints);
            for name in names {
                let config = ca.forged(name);
                let refused = handshake(&Arc::new(ca.client()), config.clone(), name).err();
                let refused = refused.map(|error| error.to_string()).unwrap_or_default();
                assert!(
                    refused.contains("NameConstraintViolation"),
                    "{name}: {refused:?}"
                );

                let key = LeafKey::generate().unwrap();
                let leaf = mint(&host(name), &ca.issuer, &key, SystemTime::now()).unwrap();
                let refused = openssl_verify(&ca, &leaf.certified.cert[0], name).unwrap_err();
                assert!(refused.contains("subtree violation"), "{name}: {refused}");

                let refused = python_handshake(&ca, config, name);
                assert!(refused.contains("subtree violation"), "{name}: {refused}");
            }
        }
    }

    #[test]
    fn an_unconstrained_issuer_signs_for_everything() {
        let ca = TestCa::with(&Constraints::Unconstrained);
        let leaves = ca.leaves();
        for name in ["example.com", "192.0.2.7", "2001:db8::7"] {
            let config = leaves.server_config(&host(name)).unwrap();
            let chain = chain(&config, ca.client(), name);
            assert_eq!(openssl_verify(&ca, &chain[0], name), Ok(()), "{name}");
        }
    }

    #[test]
    fn a_leaf_says_what_a_server_certificate_must_and_no_more() {
        let ca = TestCa::new(&["example.com"]);
        let key = LeafKey::generate().unwrap();
        let now = SystemTime::now();
        let leaf = mint(&host("a.example.com"), &ca.issuer, &key, now).unwrap();
        let parsed = parse(&leaf.certified.cert[0]).unwrap();

        assert_eq!(parsed.subject().iter_common_name().count(), 0);
        let names = &parsed
            .subject_alternative_name()
            .unwrap()
            .unwrap()
            .value
            .general_names;
        assert_eq!(names, &[GeneralName::DNSName("a.example.com")]);
        let basic = parsed.basic_constraints().unwrap().unwrap();
        assert!(basic.critical && !basic.value.ca);
        let usage = parsed.key_usage().unwrap().unwrap();
        assert!(usage.critical && usage.value.digital_signature());
        assert_eq!(usage.value.flags, 1, "no other usage");
        let extended = parsed.extended_key_usage().unwrap().unwrap().value;
        assert!(extended.server_auth && !extended.client_auth && !extended.any);
        for oid in [
            x509_parser::oid_registry::OID_X509_EXT_AUTHORITY_KEY_IDENTIFIER,
            x509_parser::oid_registry::OID_X509_EXT_SUBJECT_KEY_IDENTIFIER,
        ] {
            assert!(parsed.get_extension_unique(&oid).unwrap().is_some());
        }
        let begins = system_time(parsed.validity().not_before);
        let ends = system_time(parsed.validity().not_after);
        assert!(begins <= now - BACKDATED && ends <= now + LEAF_LIFE);
        assert!(ends > now + LEAF_LIFE - Duration::from_secs(2));
    }

    #[test]
    fn a_leaf_lives_within_its_issuer() {
        let ca = TestCa::new(&["example.com"]);
        let key = LeafKey::generate().unwrap();
        let end = ca.issuer.not_after();
        let now = end - Duration::from_secs(600);
        let leaf = mint(&host("example.com"), &ca.issuer, &key, now).unwrap();
        let parsed = parse(&leaf.certified.cert[0]).unwrap();
        assert_eq!(system_time(parsed.validity().not_after), end);
        assert_eq!(leaf.renew_at, now + Duration::from_secs(400));

        let begin = ca.issuer.certificate().not_before;
        let leaf = mint(&host("example.com"), &ca.issuer, &key, begin).unwrap();
        let parsed = parse(&leaf.certified.cert[0]).unwrap();
        assert_eq!(system_time(parsed.validity().not_before), begin);
    }

    #[test]
    fn serials_are_positive_long_and_never_repeat() {
        let serials: std::collections::HashSet<Vec<u8>> = (0..1000)
            .map(|_| random_serial().unwrap().to_bytes())
            .collect();
        assert_eq!(serials.len(), 1000);
        assert!(
            serials
                .iter()
                .all(|serial| serial.len() == 16 && serial[0] & 0xc0 == 0x40)
        );
    }
}

//! The issuer in use: its files read and doubted, and the answers to "may it sign for this host" and "until when".
//!
//! Doesn't make or renew anything; `init.rs` does.

use std::{
    fmt,
    path::{Path, PathBuf},
    time::SystemTime,
};

use rcgen::{KeyPair, PublicKeyData};
use rustls::{
    RootCertStore,
    client::{WebPkiServerVerifier, danger::ServerCertVerifier as _},
    crypto::aws_lc_rs::default_provider,
    pki_types::{CertificateDer, ServerName, UnixTime},
};
use sha2::{Digest, Sha256};

use super::{
    CaError, Constraints, Files, ISSUER_CERTIFICATE, ISSUER_KEY, NameRules, ROOT_CERTIFICATE,
    ROOT_KEY,
    certificate::{is_signed_by, parse, read_pem, system_time},
    leaf::{LeafKey, mint},
    signer::Signer,
};
use crate::authority::Host;

/// The intermediate that signs leaves, with its key.
///
/// Its `Debug` shows no key.
pub struct Issuer {
    /// What the certificate says.
    pub(super) certificate: Certificate,
    pub(super) der: CertificateDer<'static>,
    pub(super) signer: Signer,
    /// The roots that are distributed, where they are kept here.
    roots: Vec<CertificateDer<'static>>,
    /// Where the certificate was read from, for errors
    path: PathBuf,
}

/// What a certificate of an authority says, for decisions and for people.
#[derive(Clone, Debug)]
pub struct Certificate {
    /// The subject, as `CN=...`
    pub subject: String,
    /// SHA-256 of the whole certificate, as browsers and `openssl x509 -fingerprint` show it
    pub fingerprint: String,
    /// The first second of its life
    pub not_before: SystemTime,
    /// The last second of its life
    pub not_after: SystemTime,
    /// Which names it may sign for
    pub rules: NameRules,
}

impl Issuer {
    /// Reads the issuer in `dir`, as of the system's time.
    ///
    /// # Errors
    /// A key that is open to others (or to a group, unless root gave it to one of ours) or belongs to somebody else; a key that is not the
    /// certificate's; a certificate before or after its time, or not signed by `ca.pem` (where that is present); files that are
    /// missing or malformed.
    pub fn load(dir: &Path) -> Result<Issuer, CaError> {
        Issuer::load_at(dir, SystemTime::now())
    }

    /// As [`Issuer::load`], at a given time.
    ///
    /// # Errors
    /// As [`Issuer::load`].
    pub fn load_at(dir: &Path, now: SystemTime) -> Result<Issuer, CaError> {
        let files = Files::new(dir);
        let _lock = files.lock_for_reading();
        match (files.has(ISSUER_CERTIFICATE), files.has(ISSUER_KEY)) {
            (true, true) => {}
            (false, false) if !files.has(ROOT_CERTIFICATE) && !files.has(ROOT_KEY) => {
                return Err(CaError::Absent {
                    dir: dir.to_owned(),
                });
            }
            _ => return Err(half_an_issuer(&files)),
        }
        let issuer = read_issuer(&files)?;
        issuer.check_time(now)?;
        Ok(issuer)
    }

    /// Whether clients will accept a leaf for this host: whether the name constraints permit it.
    pub fn covers(&self, host: &Host) -> bool {
        self.certificate.rules.permit(host)
    }

    /// When the issuer ends; no leaf outlives it.
    pub fn not_after(&self) -> SystemTime {
        self.certificate.not_after
    }

    /// What its certificate says.
    pub fn certificate(&self) -> &Certificate {
        &self.certificate
    }

    /// Whether clients that trust our root accept what this issuer signs: a leaf for `host`, one that it covers, is made and
    /// verified as a client would. Without `ca.pem` nobody here can tell.
    ///
    /// # Errors
    /// What a client would say.
    pub fn prove(&self, host: &Host) -> Result<(), CaError> {
        if self.roots.is_empty() {
            return Ok(());
        }
        let refused = |fault: String| CaError::Unusable {
            path: self.path.clone(),
            fault: format!("signs certificates that clients refuse ({fault})"),
        };
        let now = SystemTime::now();
        let leaf = mint(host, self, &LeafKey::generate()?, now)?;
        let mut store = RootCertStore::empty();
        for root in &self.roots {
            store.add(root.clone())?;
        }
        let provider = default_provider().into();
        let verifier =
            WebPkiServerVerifier::builder_with_provider(std::sync::Arc::new(store), provider)
                .build()
                .map_err(|e| refused(e.to_string()))?;
        let name = match host {
            Host::Name(name) => {
                ServerName::try_from(name.to_string()).map_err(|e| refused(e.to_string()))?
            }
            Host::Ip(address) => ServerName::from(*address),
        };
        let since = now
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        let chain = &leaf.certified.cert;
        verifier
            .verify_server_cert(
                &chain[0],
                &chain[1..],
                &name,
                &[],
                UnixTime::since_unix_epoch(since),
            )
            .map(drop)
            .map_err(|e| refused(e.to_string()))
    }

    /// Whether all that is asked for is covered.
    pub fn covers_all(&self, constraints: &Constraints) -> bool {
        self.certificate.rules.cover(constraints)
    }

    /// Refuses to serve before or after the certificate's time.
    pub(super) fn check_time(&self, now: SystemTime) -> Result<(), CaError> {
        let Certificate {
            not_before,
            not_after,
            ..
        } = self.certificate;
        let fault = if now >= not_after {
            format!("ended on {}", humantime::format_rfc3339_seconds(not_after))
        } else if now < not_before {
            format!(
                "begins on {}",
                humantime::format_rfc3339_seconds(not_before)
            )
        } else {
            return Ok(());
        };
        Err(CaError::OutOfTime {
            path: self.path.clone(),
            fault,
            remedy: "run `paceline ca init` where ca.key is, which makes a new issuer",
        })
    }
}

impl fmt::Debug for Issuer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Issuer")
            .field("certificate", &self.certificate)
            .field("key", &"***")
            .finish()
    }
}

impl Certificate {
    /// Reads the root in `dir`, the first in `ca.pem`.
    ///
    /// # Errors
    /// When the file is missing or malformed.
    pub fn load_root(dir: &Path) -> Result<Certificate, CaError> {
        let files = Files::new(dir);
        let malformed = || CaError::Malformed {
            path: files.path(ROOT_CERTIFICATE),
            fault: "has name constraints that cannot be understood",
        };
        let roots = read_roots(&files)?;
        roots
            .first()
            .and_then(|root| Certificate::read(root))
            .ok_or_else(malformed)
    }

    /// Reads what a certificate says; `None` if it cannot be understood.
    pub(super) fn read(der: &CertificateDer<'_>) -> Option<Certificate> {
        let parsed = parse(der)?;
        let fingerprint: Vec<String> = Sha256::digest(der)
            .iter()
            .map(|byte| format!("{byte:02X}"))
            .collect();
        Some(Certificate {
            subject: parsed.subject().to_string(),
            fingerprint: fingerprint.join(":"),
            not_before: system_time(parsed.validity().not_before),
            not_after: system_time(parsed.validity().not_after),
            rules: NameRules::read(&parsed)?,
        })
    }
}

/// Reads both files of the issuer, whatever the time, and checks that they belong together and to the root.
pub(super) fn read_issuer(files: &Files) -> Result<Issuer, CaError> {
    files.refuse_exposed_keys()?;
    let (der, key) = read_pair(files, ISSUER_CERTIFICATE, ISSUER_KEY)?;
    let path = files.path(ISSUER_CERTIFICATE);
    let malformed = |fault| CaError::Malformed {
        path: path.clone(),
        fault,
    };
    let certificate = Certificate::read(&der)
        .ok_or_else(|| malformed("has name constraints that cannot be understood"))?;
    let parsed = parse(&der).ok_or_else(|| malformed("is not a certificate"))?;
    let unusable = |fault: &str| CaError::Unusable {
        path: path.clone(),
        fault: fault.to_owned(),
    };
    if !parsed.is_ca() {
        return Err(unusable(
            "is not a certificate of an authority (its CA flag is FALSE)",
        ));
    }
    // RFC 5280 section 4.2.1.3: where the extension is there, the bit must be.
    let usage = parsed.key_usage().ok().flatten();
    if usage.is_some_and(|usage| !usage.value.key_cert_sign()) {
        return Err(unusable(
            "may not sign certificates (its key usage lacks keyCertSign)",
        ));
    }
    let purposes = parsed.extended_key_usage().ok().flatten();
    if purposes.is_some_and(|of| !(of.value.server_auth || of.value.any)) {
        return Err(unusable(
            "may not sign for servers (its extended key usage lacks serverAuth)",
        ));
    }
    let mut roots = Vec::new();
    if files.has(ROOT_CERTIFICATE) {
        roots = read_roots(files)?;
        let signers = roots.iter().filter_map(parse);
        let signer = signers.into_iter().find(|root| is_signed_by(&parsed, root));
        let Some(root) = signer else {
            return Err(CaError::ForeignIssuer {
                issuer: path.clone(),
                root: files.path(ROOT_CERTIFICATE),
            });
        };
        // A trust anchor's constraints are not every client's concern, but OpenSSL's (RFC 5280 section 4.2.1.9).
        let below = root.basic_constraints().ok().flatten();
        let below = below.and_then(|b| b.value.path_len_constraint);
        let is_below = root.subject().as_raw() != parsed.subject().as_raw();
        if is_below && below == Some(0) {
            return Err(unusable(
                "stands under a root that permits no authority below it (pathlen:0)",
            ));
        }
    }
    let signer = Signer::new(&der, key).ok_or_else(|| malformed("is not a certificate"))?;
    Ok(Issuer {
        roots,
        certificate,
        der: der.clone(),
        signer,
        path: path.clone(),
    })
}

/// The roots in `ca.pem`: ours first, and after a change of roots possibly the one before.
pub(super) fn read_roots(files: &Files) -> Result<Vec<CertificateDer<'static>>, CaError> {
    let path = files.path(ROOT_CERTIFICATE);
    read_pem(&files.read_certificate(ROOT_CERTIFICATE)?).ok_or(CaError::Malformed {
        path,
        fault: "holds no certificate in PEM",
    })
}

/// Reads a certificate and its key.
pub(super) fn read_pair(
    files: &Files,
    certificate: &str,
    key: &str,
) -> Result<(CertificateDer<'static>, KeyPair), CaError> {
    let pair = read_key(files, key)?;
    let certificates = read_pem(&files.read_certificate(certificate)?);
    let der = certificates.into_iter().flatten().next();
    let der = der.ok_or_else(|| CaError::Malformed {
        path: files.path(certificate),
        fault: "holds no certificate in PEM",
    })?;
    let same =
        parse(&der).is_some_and(|parsed| parsed.public_key().raw == pair.subject_public_key_info());
    match same {
        true => Ok((der, pair)),
        false => Err(CaError::KeyMismatch {
            key: files.path(key),
            certificate: files.path(certificate),
        }),
    }
}

/// Reads a private key.
pub(super) fn read_key(files: &Files, key: &str) -> Result<KeyPair, CaError> {
    let pem = files.read_key(key)?;
    // The cause is dropped: what the parser says about a key belongs in no log.
    let pair = std::str::from_utf8(&pem)
        .ok()
        .and_then(|pem| KeyPair::from_pem(pem).ok());
    pair.ok_or_else(|| CaError::Malformed {
        path: files.path(key),
        fault: "holds no private key in PKCS#8 PEM",
    })
}

/// The error for an issuer of which a file is missing.
pub(super) fn half_an_issuer(files: &Files) -> CaError {
    let half = |present, missing: &str, remedy| CaError::HalfASet {
        present: files.path(present),
        missing: missing.into(),
        remedy,
    };
    match (files.has(ISSUER_CERTIFICATE), files.has(ISSUER_KEY)) {
        (true, _) => half(
            ISSUER_CERTIFICATE,
            ISSUER_KEY,
            "put issuer.key back, or move issuer.pem away and run `paceline ca init` where ca.key is",
        ),
        (false, true) => half(
            ISSUER_KEY,
            ISSUER_CERTIFICATE,
            "put issuer.pem back, or run `paceline ca init` where ca.key is, which makes a certificate for the key",
        ),
        (false, false) => half(
            if files.has(ROOT_CERTIFICATE) {
                ROOT_CERTIFICATE
            } else {
                ROOT_KEY
            },
            "issuer.pem with issuer.key",
            "run `paceline ca init` where ca.key is, or copy issuer.pem and issuer.key from there",
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{PermissionsExt, symlink},
        time::Duration,
    };

    use super::*;
    use crate::ca::testing::{TestCa, host};

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    fn refusal(ca: &TestCa) -> String {
        let error = Issuer::load(ca.dir.path()).unwrap_err().to_string();
        assert_eq!(error.lines().count(), 1, "{error}");
        error
    }

    #[test]
    fn a_key_that_others_can_reach_is_refused() {
        let ca = TestCa::new(&["example.com"]);
        let key = ca.dir.path().join(ISSUER_KEY);
        for mode in [0o640, 0o604, 0o620, 0o602, 0o644, 0o660] {
            set_mode(&key, mode);
            let said = refusal(&ca);
            assert!(
                said.contains(&format!("{mode:04o}")) && said.contains("chmod 600"),
                "{said}"
            );
        }
        for mode in [0o600, 0o400] {
            set_mode(&key, mode);
            Issuer::load(ca.dir.path()).unwrap();
        }
    }

    #[test]
    fn an_exposed_root_key_or_old_key_is_refused_too() {
        for name in [ROOT_KEY, "issuer-1700000000.key"] {
            let ca = TestCa::new(&["example.com"]);
            let path = ca.dir.path().join(name);
            fs::copy(ca.dir.path().join(ISSUER_KEY), ca.dir.path().join("copy")).unwrap();
            fs::rename(ca.dir.path().join("copy"), &path).unwrap();
            set_mode(&path, 0o644);
            assert!(refusal(&ca).contains(name));
        }
    }

    #[test]
    fn a_link_is_as_good_as_the_key_and_the_folder_that_it_leads_to() {
        let ca = TestCa::new(&["example.com"]);
        let dir = ca.dir.path();
        // As Kubernetes mounts a secret, so that all its files change at once.
        let volume = dir.join("..2026_01_01");
        fs::create_dir(&volume).unwrap();
        symlink("..2026_01_01", dir.join("..data")).unwrap();
        for name in [ISSUER_KEY, ISSUER_CERTIFICATE, ROOT_CERTIFICATE, ROOT_KEY] {
            fs::rename(dir.join(name), volume.join(name)).unwrap();
            symlink(format!("..data/{name}"), dir.join(name)).unwrap();
        }
        Issuer::load(dir).unwrap();
        set_mode(&volume.join(ISSUER_KEY), 0o644);
        assert!(refusal(&ca).contains("0644"));
        set_mode(&volume.join(ISSUER_KEY), 0o400);
        set_mode(&volume, 0o777);
        assert!(refusal(&ca).contains("chmod o-w"));
        set_mode(&volume, 0o700);
        fs::remove_file(volume.join(ISSUER_KEY)).unwrap();
        assert!(refusal(&ca).contains("issuer.key"), "it leads nowhere");
    }

    #[test]
    fn a_key_that_is_no_file_is_refused_without_waiting_for_it() {
        let ca = TestCa::new(&["example.com"]);
        let key = ca.dir.path().join(ISSUER_KEY);
        fs::remove_file(&key).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &key,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .unwrap();
        assert!(refusal(&ca).contains("not a regular file"));
        fs::remove_file(&key).unwrap();
        fs::create_dir(&key).unwrap();
        set_mode(&key, 0o700);
        assert!(refusal(&ca).contains("not a regular file"));
    }

    #[test]
    fn a_folder_that_everyone_may_write_in_is_refused() {
        let ca = TestCa::new(&["example.com"]);
        set_mode(ca.dir.path(), 0o777);
        assert!(refusal(&ca).contains("chmod o-w"));
        set_mode(ca.dir.path(), 0o1777);
        Issuer::load(ca.dir.path()).unwrap();
    }

    #[test]
    fn a_key_of_another_certificate_is_refused() {
        let (ca, other) = (TestCa::new(&["example.com"]), TestCa::new(&["example.com"]));
        fs::copy(
            other.dir.path().join(ISSUER_KEY),
            ca.dir.path().join(ISSUER_KEY),
        )
        .unwrap();
        assert!(refusal(&ca).contains("is not the key of"));
    }

    #[test]
    fn an_issuer_of_another_root_is_refused_unless_the_root_is_kept_elsewhere() {
        let (ca, other) = (TestCa::new(&["example.com"]), TestCa::new(&["example.com"]));
        let root = ca.dir.path().join(ROOT_CERTIFICATE);
        fs::copy(other.dir.path().join(ROOT_CERTIFICATE), &root).unwrap();
        assert!(refusal(&ca).contains("was not signed by"));
        fs::remove_file(&root).unwrap();
        Issuer::load(ca.dir.path()).unwrap();
    }

    #[test]
    fn a_signature_that_was_changed_does_not_stand() {
        let ca = TestCa::new(&["example.com"]);
        let root = fs::read_to_string(ca.dir.path().join(ROOT_CERTIFICATE)).unwrap();
        // The last byte is the signature's; the names still chain.
        let mut certificates = read_pem(root.as_bytes()).unwrap();
        let issuer = ca.issuer.der.clone();
        let mut forged = issuer.to_vec();
        let last = forged.len() - 1;
        forged[last] ^= 1;
        let forged = CertificateDer::from(forged);
        let root = certificates.remove(0);
        assert!(is_signed_by(
            &parse(&issuer).unwrap(),
            &parse(&root).unwrap()
        ));
        assert!(!is_signed_by(
            &parse(&forged).unwrap(),
            &parse(&root).unwrap()
        ));
    }

    #[test]
    fn an_issuer_under_the_older_of_two_roots_serves_while_both_are_distributed() {
        let (ca, newer) = (TestCa::new(&["example.com"]), TestCa::new(&["example.com"]));
        let both = [&newer, &ca]
            .map(|ca| fs::read_to_string(ca.dir.path().join(ROOT_CERTIFICATE)).unwrap())
            .concat();
        fs::write(ca.dir.path().join(ROOT_CERTIFICATE), both).unwrap();
        Issuer::load(ca.dir.path()).unwrap();
    }

    #[test]
    fn an_issuer_out_of_its_time_is_refused_and_the_date_is_told() {
        let ca = TestCa::new(&["example.com"]);
        let Certificate {
            not_before,
            not_after,
            ..
        } = *ca.issuer.certificate();
        let second = Duration::from_secs(1);
        for (now, date) in [(not_after, not_after), (not_before - second, not_before)] {
            let error = Issuer::load_at(ca.dir.path(), now).unwrap_err();
            assert!(error.is_out_of_time());
            assert!(
                error
                    .to_string()
                    .contains(&humantime::format_rfc3339_seconds(date).to_string()),
                "{error}"
            );
        }
        Issuer::load_at(ca.dir.path(), not_after - second).unwrap();
        Issuer::load_at(ca.dir.path(), not_before).unwrap();
    }

    #[test]
    fn what_is_missing_is_named_with_its_remedy() {
        let ca = TestCa::new(&["example.com"]);
        let hide = |name: &str| {
            fs::rename(
                ca.dir.path().join(name),
                ca.dir.path().join(format!("{name}.hidden")),
            )
            .unwrap()
        };
        hide(ISSUER_CERTIFICATE);
        assert!(refusal(&ca).contains("issuer.pem is not"));
        hide(ISSUER_KEY);
        assert!(refusal(&ca).contains("issuer.pem with issuer.key is not"));
        hide(ROOT_CERTIFICATE);
        assert!(refusal(&ca).contains("issuer.pem with issuer.key is not"));
        hide(ROOT_KEY);
        assert!(refusal(&ca).contains("there is no CA"));
    }

    #[test]
    fn garbage_is_refused_without_showing_it() {
        for name in [ISSUER_KEY, ISSUER_CERTIFICATE, ROOT_CERTIFICATE] {
            for content in [
                &b""[..],
                b"c2VjcmV0",
                b"-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n",
                b"\xff\xfe",
            ] {
                let ca = TestCa::new(&["example.com"]);
                fs::write(ca.dir.path().join(name), content).unwrap();
                let said = refusal(&ca);
                assert!(said.contains(name) && !said.contains("c2VjcmV0"), "{said}");
            }
        }
    }

    #[test]
    fn coverage_is_that_of_the_certificate() {
        let ca = TestCa::new(&["example.com"]);
        assert!(ca.issuer.covers(&host("a.example.com")));
        assert!(!ca.issuer.covers(&host("example.org")));
    }
}

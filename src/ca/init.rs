//! Making the CA: what is missing is made, an issuer that no longer serves is replaced, and nothing is lost.
//!
//! Knows neither the command line nor the configuration. Keys are precious and never overwritten; a certificate can be made again for its key.

use std::{
    path::{Path, PathBuf},
    time::SystemTime,
};

use rcgen::KeyPair;
use rustls::pki_types::CertificateDer;

use super::{
    CaError, Constraints, Files, ISSUER_CERTIFICATE, ISSUER_KEY, Issuer, ROOT_CERTIFICATE,
    ROOT_KEY,
    bundle::to_pem,
    certificate::{issuer_key, make_issuer, make_root, parse, root_key, system_time},
    issuer::{half_an_issuer, read_issuer, read_key, read_pair},
    signer::Signer,
};

const KEY_MODE: u32 = 0o600;
const CERTIFICATE_MODE: u32 = 0o644;

/// What [`init`] did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The folder
    pub dir: PathBuf,
    /// To the root
    pub root: Step,
    /// To the issuer
    pub issuer: Step,
}

/// What [`init`] did to one certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// It was missing and has been made.
    Made,
    /// It was there and serves.
    Kept,
    /// The issuer was replaced; the old files now have this name, without the ending.
    Renewed {
        /// `issuer-<unix time>`
        old: String,
    },
    /// The issuer should be replaced, but `ca.key` is not here. Says why it should be.
    Due {
        /// Why, in words that complete "the issuer ..."
        reason: &'static str,
    },
    /// `ca.pem` is kept elsewhere; the issuer serves without it.
    Elsewhere,
}

/// Makes the CA in `dir` as far as it is missing, and a new issuer under the same root when the present one does
/// not cover `constraints` or is past two thirds of its life and `ca.key` is there.
///
/// Safe to run from several processes at once on one folder: one makes the files, the others find them.
///
/// # Errors
/// Half a set of files that cannot be completed safely, keys that others could read, files that cannot be written.
pub fn init(dir: &Path, constraints: &Constraints, now: SystemTime) -> Result<Outcome, CaError> {
    let files = Files::new(dir);
    files.make_dir()?;
    let _lock = match files.lock_for_writing() {
        Ok(lock) => Some(lock),
        // A read-only folder in which all is there is as good as any.
        Err(_)
            if files.has(ISSUER_CERTIFICATE) && files.has(ISSUER_KEY) && !files.has(ROOT_KEY) =>
        {
            None
        }
        Err(error) => return Err(error),
    };
    files.refuse_exposed_keys()?;

    let root = init_root(&files, now)?;
    let issuer = init_issuer(&files, constraints, now)?;
    Ok(Outcome {
        dir: dir.to_owned(),
        root,
        issuer,
    })
}

fn init_root(files: &Files, now: SystemTime) -> Result<Step, CaError> {
    match (files.has(ROOT_CERTIFICATE), files.has(ROOT_KEY)) {
        (true, _) => Ok(Step::Kept),
        // A first run that was killed, or a lost certificate: the key is what counts, and what clients trust is its
        // subject, which is made from the key.
        (false, true) => {
            let key = read_key(files, ROOT_KEY)?;
            place_certificate(files, ROOT_CERTIFICATE, &make_root(&key, now)?)?;
            Ok(Step::Made)
        }
        // Another root than the one which signed this issuer would be of no use.
        (false, false) if files.has(ISSUER_CERTIFICATE) || files.has(ISSUER_KEY) => {
            Ok(Step::Elsewhere)
        }
        (false, false) => {
            let key = root_key()?;
            let certificate = make_root(&key, now)?;
            files.place_new(ROOT_KEY, key.serialize_pem().as_bytes(), KEY_MODE)?;
            place_certificate(files, ROOT_CERTIFICATE, &certificate)?;
            Ok(Step::Made)
        }
    }
}

fn init_issuer(files: &Files, constraints: &Constraints, now: SystemTime) -> Result<Step, CaError> {
    let can_sign = files.has(ROOT_KEY);
    match (files.has(ISSUER_CERTIFICATE), files.has(ISSUER_KEY)) {
        (true, true) => {
            let issuer = read_issuer(files)?;
            let Some(reason) = why_due(&issuer, constraints, now) else {
                return Ok(Step::Kept);
            };
            if !can_sign {
                return Ok(Step::Due { reason });
            }
            // All that can fail is done before anything is moved.
            let key = issuer_key()?;
            let certificate = sign_issuer(files, &key, constraints, now)?;
            let old = files.set_issuer_aside(now)?;
            files.place_new(ISSUER_KEY, key.serialize_pem().as_bytes(), KEY_MODE)?;
            place_certificate(files, ISSUER_CERTIFICATE, &certificate)?;
            Ok(Step::Renewed { old })
        }
        (false, true) if can_sign => {
            let key = read_key(files, ISSUER_KEY)?;
            place_certificate(
                files,
                ISSUER_CERTIFICATE,
                &sign_issuer(files, &key, constraints, now)?,
            )?;
            Ok(Step::Made)
        }
        (false, false) if can_sign => {
            let key = issuer_key()?;
            let certificate = sign_issuer(files, &key, constraints, now)?;
            files.place_new(ISSUER_KEY, key.serialize_pem().as_bytes(), KEY_MODE)?;
            place_certificate(files, ISSUER_CERTIFICATE, &certificate)?;
            Ok(Step::Made)
        }
        _ => Err(half_an_issuer(files)),
    }
}

/// Why a new issuer should be made; `None` if this one serves.
fn why_due(issuer: &Issuer, constraints: &Constraints, now: SystemTime) -> Option<&'static str> {
    let certificate = issuer.certificate();
    if !issuer.covers_all(constraints) {
        return Some("may not sign for all of the configured hosts");
    }
    let life = certificate
        .not_after
        .duration_since(certificate.not_before)
        .unwrap_or_default();
    (now >= certificate.not_before + life * 2 / 3).then_some("is past two thirds of its life")
}

fn sign_issuer(
    files: &Files,
    key: &KeyPair,
    constraints: &Constraints,
    now: SystemTime,
) -> Result<CertificateDer<'static>, CaError> {
    let (der, root_key) = read_pair(files, ROOT_CERTIFICATE, ROOT_KEY)?;
    let root_end = root_end(files, &der, now)?;
    let malformed = || CaError::Malformed {
        path: files.path(ROOT_CERTIFICATE),
        fault: "is not a certificate",
    };
    let root = Signer::new(&der, root_key).ok_or_else(malformed)?;
    make_issuer(key, constraints, &root, root_end, now)
}

fn root_end(
    files: &Files,
    der: &CertificateDer<'_>,
    now: SystemTime,
) -> Result<SystemTime, CaError> {
    let path = files.path(ROOT_CERTIFICATE);
    let Some(root) = parse(der) else {
        return Err(CaError::Malformed {
            path,
            fault: "is not a certificate",
        });
    };
    let end = system_time(root.validity().not_after);
    if now < end {
        return Ok(end);
    }
    Err(CaError::OutOfTime {
        path,
        fault: format!("ended on {}", humantime::format_rfc3339_seconds(end)),
        remedy: "move ca.pem, ca.key, issuer.pem and issuer.key away, run `paceline ca init` and give the new ca.pem to every client",
    })
}

fn place_certificate(
    files: &Files,
    name: &str,
    certificate: &CertificateDer<'_>,
) -> Result<(), CaError> {
    files.place_new(name, to_pem(certificate).as_bytes(), CERTIFICATE_MODE)
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeMap,
        fs,
        os::unix::fs::PermissionsExt,
        sync::{Arc, Barrier},
        thread,
        time::Duration,
    };

    use rustls::version::{TLS12, TLS13};
    use tempfile::TempDir;
    use x509_parser::public_key::PublicKey;

    use super::*;
    use crate::ca::{
        Certificate, Leaves,
        certificate::read_pem,
        testing::{TestCa, client, constraints, handshake, host},
    };

    const DAY: Duration = Duration::from_secs(24 * 60 * 60);

    fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
        let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
        files
            .map(|file| {
                (
                    file.file_name().into_string().unwrap(),
                    fs::read(file.path()).unwrap(),
                )
            })
            .collect()
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn a_first_run_makes_both_pairs_with_tight_modes_and_leaves_nothing_else() {
        let parent = TempDir::new().unwrap();
        let dir = parent.path().join("deep/certs");
        let outcome = init(&dir, &constraints(&["example.com"]), SystemTime::now()).unwrap();
        assert_eq!((outcome.root, outcome.issuer), (Step::Made, Step::Made));
        assert_eq!(mode(&dir), 0o700);
        let names: Vec<String> = contents(&dir).into_keys().collect();
        assert_eq!(
            names,
            [
                ".lock",
                ROOT_KEY,
                ROOT_CERTIFICATE,
                ISSUER_KEY,
                ISSUER_CERTIFICATE
            ]
        );
        for key in [ROOT_KEY, ISSUER_KEY] {
            assert_eq!(mode(&dir.join(key)), 0o600);
        }
        for certificate in [ROOT_CERTIFICATE, ISSUER_CERTIFICATE] {
            assert_eq!(
                mode(&dir.join(certificate)) & 0o133,
                0,
                "0644, less what the umask takes"
            );
        }
    }

    #[test]
    fn a_second_run_changes_no_byte() {
        let ca = TestCa::new(&["example.com"]);
        let before = contents(ca.dir.path());
        let outcome = init(
            ca.dir.path(),
            &constraints(&["a.example.com"]),
            SystemTime::now(),
        )
        .unwrap();
        assert_eq!((outcome.root, outcome.issuer), (Step::Kept, Step::Kept));
        assert_eq!(contents(ca.dir.path()), before);
    }

    #[test]
    fn the_certificates_live_as_long_as_they_should() {
        let now = SystemTime::now();
        let ca = TestCa::new(&["example.com"]);
        let root = Certificate::load_root(ca.dir.path()).unwrap();
        let issuer = ca.issuer.certificate();
        for certificate in [&root, issuer] {
            assert!(
                certificate.not_before <= now - DAY + Duration::from_secs(60)
                    && certificate.not_before >= now - DAY - Duration::from_secs(60)
            );
        }
        assert!(root.not_after > now + 3650 * DAY && root.not_after < now + 3654 * DAY);
        assert!(issuer.not_after > now + 729 * DAY && issuer.not_after < now + 731 * DAY);
        assert!(
            root.subject.starts_with("CN=paceline root ")
                && root.subject.len() == "CN=paceline root 01234567".len()
        );
        assert!(root.rules.is_empty(), "JVMs would ignore constraints here");
    }

    #[test]
    fn the_roots_key_is_p256_and_the_issuers_is_rsa() {
        let ca = TestCa::new(&["example.com"]);
        let pem = fs::read(ca.dir.path().join(ROOT_CERTIFICATE)).unwrap();
        let root = read_pem(&pem).unwrap().remove(0);
        let bits = |der| {
            let parsed = parse(der).unwrap();
            let key = parsed.public_key().parsed().unwrap();
            let rsa = matches!(key, PublicKey::RSA(_));
            (rsa, key.key_size())
        };
        assert_eq!(bits(&root), (false, 256));
        assert_eq!(bits(&ca.issuer.der), (true, 2048));
    }

    #[test]
    fn an_issuer_whose_key_is_p256_serves_on() {
        let ca = TestCa::new(&["example.com"]);
        let (dir, name) = (ca.dir.path(), "www.example.com");
        for file in [ISSUER_KEY, ISSUER_CERTIFICATE] {
            fs::remove_file(dir.join(file)).unwrap();
        }
        let key = KeyPair::generate().unwrap();
        let files = Files::new(dir);
        files
            .place_new(ISSUER_KEY, key.serialize_pem().as_bytes(), KEY_MODE)
            .unwrap();
        let asked = constraints(&["example.com"]);
        for step in [Step::Made, Step::Kept] {
            let outcome = init(dir, &asked, SystemTime::now()).unwrap();
            assert_eq!(outcome.issuer, step);
        }
        let leaves = Leaves::new(Arc::new(Issuer::load(dir).unwrap())).unwrap();
        for version in [&TLS12, &TLS13] {
            let client = Arc::new(client(&[&dir.join(ROOT_CERTIFICATE)], &[version]));
            let server = leaves.server_config(&host(name)).unwrap();
            handshake(&client, server, name).unwrap();
        }
    }

    #[test]
    fn hosts_that_are_not_covered_bring_a_new_issuer_and_the_old_files_stay() {
        let ca = TestCa::new(&["example.com"]);
        let before = contents(ca.dir.path());
        let now = SystemTime::now();
        let wider = constraints(&["example.com", "example.org"]);
        let Step::Renewed { old } = init(ca.dir.path(), &wider, now).unwrap().issuer else {
            panic!("not renewed")
        };
        let after = contents(ca.dir.path());
        assert_eq!(after[&format!("{old}.key")], before[ISSUER_KEY]);
        assert_eq!(after[&format!("{old}.pem")], before[ISSUER_CERTIFICATE]);
        assert_eq!(mode(&ca.dir.path().join(format!("{old}.key"))), 0o600);
        assert_eq!(after[ROOT_KEY], before[ROOT_KEY]);
        assert_eq!(after[ROOT_CERTIFICATE], before[ROOT_CERTIFICATE]);

        // Twice in one second: the names do not collide.
        let Step::Renewed { old: second } = init(ca.dir.path(), &Constraints::Unconstrained, now)
            .unwrap()
            .issuer
        else {
            panic!("not renewed")
        };
        assert_ne!(old, second);
        assert_eq!(
            contents(ca.dir.path())[&format!("{second}.key")],
            after[ISSUER_KEY]
        );
        assert!(
            Issuer::load(ca.dir.path())
                .unwrap()
                .covers_all(&Constraints::Unconstrained)
        );
    }

    #[test]
    fn an_issuer_past_two_thirds_of_its_life_is_replaced_and_not_before() {
        let ca = TestCa::new(&["example.com"]);
        let Certificate {
            not_before,
            not_after,
            ..
        } = *ca.issuer.certificate();
        let due = not_before + not_after.duration_since(not_before).unwrap() * 2 / 3;
        let asked = constraints(&["example.com"]);
        let at = |now| init(ca.dir.path(), &asked, now).unwrap().issuer;
        assert_eq!(at(due - Duration::from_nanos(1)), Step::Kept);
        assert!(matches!(at(due), Step::Renewed { .. }));
        let renewed = Issuer::load_at(ca.dir.path(), due).unwrap();
        assert!(renewed.not_after() > not_after);
    }

    #[test]
    fn an_issuer_ends_with_its_root_at_the_latest_and_none_is_made_under_an_ended_root() {
        let ca = TestCa::new(&["example.com"]);
        let root_end = Certificate::load_root(ca.dir.path()).unwrap().not_after;
        let asked = constraints(&["example.com"]);
        init(ca.dir.path(), &asked, root_end - DAY).unwrap();
        assert_eq!(
            Issuer::load_at(ca.dir.path(), root_end - DAY)
                .unwrap()
                .not_after(),
            root_end
        );
        let before = contents(ca.dir.path());
        let error = init(ca.dir.path(), &asked, root_end).unwrap_err();
        assert!(error.is_out_of_time());
        assert_eq!(contents(ca.dir.path()), before);
    }

    #[test]
    fn without_the_root_key_a_due_issuer_is_reported_and_kept() {
        let ca = TestCa::new(&["example.com"]);
        fs::remove_file(ca.dir.path().join(ROOT_KEY)).unwrap();
        let before = contents(ca.dir.path());
        let issuer = init(
            ca.dir.path(),
            &constraints(&["example.org"]),
            SystemTime::now(),
        )
        .unwrap()
        .issuer;
        assert!(matches!(issuer, Step::Due { .. }));
        assert_eq!(contents(ca.dir.path()), before);
    }

    #[test]
    fn an_issuer_without_any_root_serves_and_no_unrelated_root_is_made() {
        let ca = TestCa::new(&["example.com"]);
        for name in [ROOT_KEY, ROOT_CERTIFICATE] {
            fs::remove_file(ca.dir.path().join(name)).unwrap();
        }
        let outcome = init(
            ca.dir.path(),
            &constraints(&["example.com"]),
            SystemTime::now(),
        )
        .unwrap();
        assert_eq!(
            (outcome.root, outcome.issuer),
            (Step::Elsewhere, Step::Kept)
        );
        assert!(!ca.dir.path().join(ROOT_CERTIFICATE).exists());
    }

    #[test]
    fn half_a_set_is_an_error_that_names_the_remedy_and_changes_nothing() {
        let cases: [(&[&str], &str); 4] = [
            (&[ISSUER_KEY], "put issuer.key back"),
            (
                &[ISSUER_KEY, ISSUER_CERTIFICATE, ROOT_KEY],
                "run `paceline ca init` where ca.key is",
            ),
            (&[ISSUER_CERTIFICATE, ROOT_KEY], "put issuer.pem back"),
            (&[ISSUER_KEY, ROOT_KEY], "put issuer.key back"),
        ];
        for (missing, remedy) in cases {
            let ca = TestCa::new(&["example.com"]);
            for name in missing {
                fs::remove_file(ca.dir.path().join(name)).unwrap();
            }
            let before = contents(ca.dir.path());
            let error = init(
                ca.dir.path(),
                &constraints(&["example.com"]),
                SystemTime::now(),
            )
            .unwrap_err();
            assert!(error.to_string().contains(remedy), "{error}");
            assert_eq!(contents(ca.dir.path()), before);
        }
    }

    #[test]
    fn a_certificate_that_was_lost_or_never_written_is_made_again_for_its_key() {
        let ca = TestCa::new(&["example.com"]);
        let before = contents(ca.dir.path());
        // What clients hold is the root from before.
        let client = Arc::new(ca.client());
        for name in [ROOT_CERTIFICATE, ISSUER_CERTIFICATE] {
            fs::remove_file(ca.dir.path().join(name)).unwrap();
        }
        let outcome = init(
            ca.dir.path(),
            &constraints(&["example.com"]),
            SystemTime::now(),
        )
        .unwrap();
        assert_eq!((outcome.root, outcome.issuer), (Step::Made, Step::Made));
        let after = contents(ca.dir.path());
        assert_eq!(
            (&after[ROOT_KEY], &after[ISSUER_KEY]),
            (&before[ROOT_KEY], &before[ISSUER_KEY])
        );
        let leaves = Leaves::new(Arc::new(Issuer::load(ca.dir.path()).unwrap())).unwrap();
        handshake(
            &client,
            leaves.server_config(&host("example.com")).unwrap(),
            "example.com",
        )
        .unwrap();
    }

    #[test]
    fn an_exposed_root_key_signs_nothing() {
        let ca = TestCa::new(&["example.com"]);
        fs::set_permissions(
            ca.dir.path().join(ROOT_KEY),
            fs::Permissions::from_mode(0o644),
        )
        .unwrap();
        let error = init(
            ca.dir.path(),
            &constraints(&["example.org"]),
            SystemTime::now(),
        )
        .unwrap_err();
        assert!(
            error.to_string().contains("ca.key has mode 0644"),
            "{error}"
        );
    }

    #[test]
    fn first_runs_at_the_same_time_agree_on_one_ca() {
        const THREADS: usize = 8;
        for _ in 0..5 {
            let parent = TempDir::new().unwrap();
            let dir = parent.path().join("certs");
            let barrier = Barrier::new(THREADS);
            let results: Vec<(Outcome, Issuer)> = thread::scope(|scope| {
                let run = || {
                    barrier.wait();
                    let outcome =
                        init(&dir, &constraints(&["example.com"]), SystemTime::now()).unwrap();
                    (outcome, Issuer::load(&dir).unwrap())
                };
                let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(run)).collect();
                threads
                    .into_iter()
                    .map(|thread| thread.join().unwrap())
                    .collect()
            });
            let makers = results
                .iter()
                .filter(|(outcome, _)| outcome.root == Step::Made)
                .count();
            assert_eq!(makers, 1);
            let first = &results[0].1.certificate().fingerprint;
            assert!(
                results
                    .iter()
                    .all(|(_, issuer)| issuer.certificate().fingerprint == *first)
            );
            assert_eq!(contents(&dir).len(), 5, "no temporary file is left");
        }
    }

    #[test]
    fn whoever_loads_while_issuers_are_replaced_finds_a_whole_pair() {
        let ca = TestCa::new(&["example.com"]);
        let dir = ca.dir.path();
        thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for round in 0..20 {
                    init(
                        dir,
                        &constraints(&[&format!("{round}.test")]),
                        SystemTime::now(),
                    )
                    .unwrap();
                }
            });
            while !writer.is_finished() {
                Issuer::load(dir).unwrap();
            }
            writer.join().unwrap();
        });
        assert_eq!(
            contents(dir).len(),
            5 + 2 * 20,
            "each replaced pair is kept"
        );
    }

    #[test]
    fn a_client_that_trusts_one_ca_refuses_another() {
        let (ours, theirs) = (TestCa::new(&["example.com"]), TestCa::new(&["example.com"]));
        let client = client(
            &[&theirs.dir.path().join(ROOT_CERTIFICATE)],
            &[&rustls::version::TLS13],
        );
        let config = ours.leaves().server_config(&host("example.com")).unwrap();
        assert!(handshake(&Arc::new(client), config, "example.com").is_err());
    }
}

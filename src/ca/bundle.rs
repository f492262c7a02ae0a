//! The bundle: the system's roots and ours in one PEM file, for clients whose setting replaces their roots.
//!
//! Most trust settings (`SSL_CERT_FILE`, `REQUESTS_CA_BUNDLE`, ...) replace what a client trusts, so ours alone
//! would cut its user off from every host that is not intercepted.

use std::{
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use rustls::pki_types::CertificateDer;
use rustls_native_certs::{load_certs_from_paths, load_native_certs};

use super::{
    Files, ROOT_CERTIFICATE,
    certificate::{parse, read_pem},
};

const BUNDLE: &str = "bundle.pem";
/// The first line of what we write: by it we know a bundle of our own again, whatever its name.
const MARK: &str = "# Made by paceline: the system's roots, then paceline's own.";
/// Where systems keep their roots: Debian and Alpine, Fedora, SUSE, FreeBSD, OpenBSD and macOS.
pub const WELL_KNOWN_ROOTS: [&str; 5] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
    "/usr/local/share/certs/ca-root-nss.crt",
    "/etc/ssl/cert.pem",
];

/// The system's roots followed by ours, as PEM; ours are left out of the first part if the system has them already.
///
/// `SSL_CERT_FILE` and `SSL_CERT_DIR` are honoured, unless the file is a bundle that we made: that one may hold a
/// root of ours that is no longer in use.
pub fn bundle_pem(root_pem: &str) -> String {
    compose(system_roots(&|name| std::env::var_os(name)), root_pem)
}

/// Writes [`bundle_pem`] for the root in `dir` to `bundle.pem` there, in one step, and returns its absolute path.
///
/// # Errors
/// When the root cannot be read or the folder not written. A bundle that is already right is left alone, so that the
/// folder may be read-only.
pub fn write_bundle(dir: &Path) -> io::Result<PathBuf> {
    let path = std::path::absolute(dir.join(BUNDLE))?;
    let bundle = bundle_pem(&fs::read_to_string(dir.join(ROOT_CERTIFICATE))?);
    if fs::read(&path).is_ok_and(|present| present == bundle.as_bytes()) {
        return Ok(path);
    }
    Files::new(dir)
        .replace(BUNDLE, bundle.as_bytes(), 0o644)
        .map_err(io::Error::other)?;
    Ok(path)
}

fn compose(system: Vec<CertificateDer<'static>>, root_pem: &str) -> String {
    let ours = read_pem(root_pem.as_bytes()).unwrap_or_default();
    let mut bundle = format!("{MARK}\n");
    let mut seen: Vec<CertificateDer<'static>> = Vec::with_capacity(system.len());
    for certificate in system {
        if !ours.contains(&certificate) && !seen.contains(&certificate) {
            bundle.push_str(&to_pem(&certificate));
            seen.push(certificate);
        }
    }
    if seen.is_empty() {
        bundle.push_str("# No roots of the system were found: clients that use this file trust paceline's root alone.\n");
    }
    for certificate in &ours {
        let subject = parse(certificate)
            .map(|parsed| parsed.subject().to_string())
            .unwrap_or_default();
        bundle.push_str(&format!(
            "# paceline's own: {}\n{}",
            subject.escape_default(),
            to_pem(certificate)
        ));
    }
    bundle
}

fn system_roots(env: &dyn Fn(&str) -> Option<OsString>) -> Vec<CertificateDer<'static>> {
    let (file, dir) = (env("SSL_CERT_FILE"), env("SSL_CERT_DIR"));
    if file.is_none() && dir.is_none() {
        return load_native_certs().certs;
    }
    let file = file.map(PathBuf::from).filter(|file| !is_ours(file));
    let dir = dir.map(PathBuf::from);
    if file.is_some() || dir.is_some() {
        return load_certs_from_paths(file.as_deref(), dir.as_deref()).certs;
    }
    let well_known = WELL_KNOWN_ROOTS
        .iter()
        .map(|path| load_certs_from_paths(Some(Path::new(path)), None).certs);
    well_known
        .into_iter()
        .find(|certificates| !certificates.is_empty())
        .unwrap_or_default()
}

fn is_ours(file: &Path) -> bool {
    fs::read(file).is_ok_and(|content| content.starts_with(MARK.as_bytes()))
}

pub(super) fn to_pem(certificate: &CertificateDer<'_>) -> String {
    const LINE: usize = 64;
    let text = STANDARD.encode(certificate);
    let mut pem = String::with_capacity(text.len() + text.len() / LINE + 60);
    pem.push_str("-----BEGIN CERTIFICATE-----\n");
    for line in text.as_bytes().chunks(LINE) {
        // Base64 is ASCII, so any cut is a character's boundary.
        pem.extend(line.iter().map(|&byte| char::from(byte)));
        pem.push('\n');
    }
    pem.push_str("-----END CERTIFICATE-----\n");
    pem
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::ca::testing::TestCa;

    fn root_of(ca: &TestCa) -> String {
        fs::read_to_string(ca.dir.path().join(ROOT_CERTIFICATE)).unwrap()
    }

    fn certificates(pem: &str) -> Vec<CertificateDer<'static>> {
        read_pem(pem.as_bytes()).unwrap()
    }

    fn no_env(_: &str) -> Option<OsString> {
        None
    }

    #[test]
    fn the_bundle_is_the_systems_roots_and_then_ours() {
        let (ca, system) = (TestCa::new(&["example.com"]), TestCa::new(&["example.org"]));
        let (ours, theirs) = (certificates(&root_of(&ca)), certificates(&root_of(&system)));
        let bundle = compose(theirs.clone(), &root_of(&ca));
        assert_eq!(certificates(&bundle), [theirs, ours].concat());
        assert!(bundle.contains("# paceline's own: CN=paceline root "));
    }

    #[test]
    fn a_root_that_the_system_has_already_is_not_doubled() {
        let ca = TestCa::new(&["example.com"]);
        let ours = certificates(&root_of(&ca));
        let bundle = compose([ours.clone(), ours.clone()].concat(), &root_of(&ca));
        assert_eq!(certificates(&bundle), ours);
    }

    #[test]
    fn without_roots_of_the_system_the_bundle_says_so() {
        let ca = TestCa::new(&["example.com"]);
        let bundle = compose(Vec::new(), &root_of(&ca));
        assert_eq!(certificates(&bundle).len(), 1);
        assert!(bundle.contains("# No roots of the system"));
    }

    #[test]
    fn a_bundle_of_our_own_is_not_taken_for_the_systems() {
        let (ca, old) = (TestCa::new(&["example.com"]), TestCa::new(&["example.com"]));
        let file = ca.dir.path().join("bundle.pem");
        fs::write(&file, compose(Vec::new(), &root_of(&old))).unwrap();
        let old_root = &certificates(&root_of(&old))[0];
        let env = |name: &str| (name == "SSL_CERT_FILE").then(|| file.clone().into_os_string());
        assert!(!system_roots(&env).contains(old_root));

        fs::write(&file, root_of(&old)).unwrap();
        assert_eq!(
            system_roots(&env),
            std::slice::from_ref(old_root),
            "a file that is not ours is honoured"
        );
    }

    #[test]
    fn the_file_is_written_once_and_followed_by_openssl() {
        let ca = TestCa::new(&["example.com"]);
        let path = write_bundle(ca.dir.path()).unwrap();
        assert!(path.is_absolute());
        let written = fs::metadata(&path).unwrap().modified().unwrap();
        assert_eq!(write_bundle(ca.dir.path()).unwrap(), path);
        assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), written);

        let expected = 1 + system_roots(&no_env).len();
        let output = Command::new("openssl")
            .args(["crl2pkcs7", "-nocrl", "-certfile"])
            .arg(&path)
            .args(["-outform", "DER", "-out"])
            .arg(ca.dir.path().join("all.p7b"))
            .status()
            .expect("openssl must be installed for this test");
        assert!(output.success());
        assert_eq!(
            certificates(&fs::read_to_string(&path).unwrap()).len(),
            expected
        );
    }
}

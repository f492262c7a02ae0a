//! `paceline ca init|show|bundle`: makes the CA, describes it, and prints the bundle for clients.
//!
//! Returns the text to print; the arguments are parsed, and the text printed, elsewhere. No key is ever shown.

use std::{
    fmt::Write,
    fs::{self, File, Permissions},
    io::{self, Write as _},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::SystemTime,
};

use crate::{
    authority::HostPattern,
    ca::{
        self, CaError, Certificate, Constraints, Files, ISSUER_CERTIFICATE, ISSUER_KEY, Issuer,
        Outcome, ROOT_CERTIFICATE, ROOT_KEY, Step,
    },
};

/// `paceline ca init`: makes what is missing in `dir`, for the hosts of all intercepted destinations, or for any
/// host with `unconstrained`.
///
/// # Errors
/// Those of [`ca::init`].
pub fn init<'a>(
    dir: &Path,
    hosts: impl IntoIterator<Item = &'a HostPattern>,
    unconstrained: bool,
) -> Result<String, CaError> {
    let constraints = match unconstrained {
        true => Constraints::Unconstrained,
        false => Constraints::permitting(hosts),
    };
    let outcome = ca::init(dir, &constraints, SystemTime::now())?;
    let mut text = describe(&outcome);
    if matches!(outcome.issuer, Step::Made | Step::Renewed { .. }) {
        text.push_str(
            "replicas that run take the issuer up at a SIGHUP, or when they are restarted\n",
        );
    }
    text.push('\n');
    text.push_str(&in_words(dir)?);
    Ok(text)
}

/// What [`ca::init`] did, one line for each thing that an operator should know. Empty if all was there.
pub fn describe(outcome: &Outcome) -> String {
    let at = |name: &str| absolute(&outcome.dir.join(name)).display().to_string();
    let mut text = String::new();
    let mut say = |line: String| {
        text.push_str(&line);
        text.push('\n');
    };
    match &outcome.root {
        Step::Made => say(format!(
            "made a root: give {} to every client, and keep {} where nobody else can read it",
            at(ROOT_CERTIFICATE),
            at(ROOT_KEY)
        )),
        Step::Elsewhere => say(format!(
            "there is no {}: copy it there, so that `paceline env` can make the bundle for clients",
            at(ROOT_CERTIFICATE)
        )),
        Step::Kept | Step::Renewed { .. } | Step::Due { .. } => {}
    }
    match &outcome.issuer {
        Step::Made => say(format!("made an issuer: {}", at(ISSUER_CERTIFICATE))),
        Step::Renewed { old } => say(format!(
            "made a new issuer under the same root: clients need no change; the old one is kept as {}",
            at(&format!("{old}.pem"))
        )),
        Step::Due { reason } => say(format!(
            "the issuer {reason}: run `paceline ca init` where {ROOT_KEY} is, and copy the new {ISSUER_CERTIFICATE} and {ISSUER_KEY} here"
        )),
        Step::Kept | Step::Elsewhere => {}
    }
    text
}

/// `paceline ca show`: both certificates in words, as comments, and the root as PEM: what is printed is a file that
/// clients can trust.
///
/// # Errors
/// Those of [`Issuer::load`], and a `ca.pem` that is there but cannot be read.
pub fn show(dir: &Path) -> Result<String, CaError> {
    let mut text: String = in_words(dir)?
        .lines()
        .map(|line| format!("# {line}\n"))
        .collect();
    let path = Files::new(dir).path(ROOT_CERTIFICATE);
    if path.exists() {
        let root = fs::read_to_string(&path).map_err(|source| CaError::Io {
            action: "read",
            path,
            source,
        })?;
        text.push_str(&root);
    }
    Ok(text)
}

fn in_words(dir: &Path) -> Result<String, CaError> {
    let issuer = Issuer::load(dir)?;
    let mut text = String::new();
    match dir.join(ROOT_CERTIFICATE).exists() {
        true => show_one(
            &mut text,
            "root",
            &Certificate::load_root(dir)?,
            dir,
            ROOT_CERTIFICATE,
            ROOT_KEY,
        ),
        false => text.push_str("root: ca.pem is not here; copy it from where it was made\n"),
    }
    show_one(
        &mut text,
        "issuer",
        issuer.certificate(),
        dir,
        ISSUER_CERTIFICATE,
        ISSUER_KEY,
    );
    Ok(text)
}

/// `paceline ca bundle`: the system's roots and ours, as PEM.
///
/// # Errors
/// When `ca.pem` cannot be read.
pub fn bundle(dir: &Path) -> Result<String, CaError> {
    let path = Files::new(dir).path(ROOT_CERTIFICATE);
    let root = fs::read_to_string(&path).map_err(|source| CaError::Io {
        action: "read",
        path,
        source,
    })?;
    Ok(ca::bundle_pem(&root))
}

/// `paceline ca bundle --output FILE`: the same into a file.
///
/// # Errors
/// When `ca.pem` cannot be read, or the file not written.
pub fn bundle_into(dir: &Path, file: &Path) -> Result<String, CaError> {
    let bundle = bundle(dir)?;
    write_public(file, &bundle).map_err(|source| CaError::Io {
        action: "write",
        path: file.to_owned(),
        source,
    })?;
    Ok(format!("wrote {}\n", file.display()))
}

/// Writes what everybody may read, for all users whatever the umask: workers run as another. A device or a pipe keeps the
/// mode that it has.
fn write_public(path: &Path, text: &str) -> io::Result<()> {
    const READABLE: u32 = 0o644;
    let mut file = File::create(path)?;
    file.write_all(text.as_bytes())?;
    let now = file.metadata()?;
    if now.is_file() && now.permissions().mode() & READABLE != READABLE {
        file.set_permissions(Permissions::from_mode(READABLE))?;
    }
    Ok(())
}

fn show_one(
    text: &mut String,
    title: &str,
    certificate: &Certificate,
    dir: &Path,
    file: &str,
    key: &str,
) {
    let key_path = dir.join(key);
    let key = match key_path.exists() {
        true => absolute(&key_path).display().to_string(),
        false => "not here".into(),
    };
    let day = |time| humantime::format_rfc3339_seconds(time);
    // Writing to a String cannot fail.
    let _ = write!(
        text,
        "{title}: {subject}\n  \
         certificate  {path}\n  \
         key          {key}\n  \
         SHA-256      {fingerprint}\n  \
         valid        {from} to {to}\n  \
         constraints  {rules}\n",
        subject = certificate.subject,
        path = absolute(&dir.join(file)).display(),
        fingerprint = certificate.fingerprint,
        from = day(certificate.not_before),
        to = day(certificate.not_after),
        rules = certificate.rules,
    );
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    fn patterns(texts: &[&str]) -> Vec<HostPattern> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn init_tells_what_it_made_and_what_to_do_with_it() {
        let dir = TempDir::new().unwrap();
        let text = init(dir.path(), &patterns(&["*.example.com"]), false).unwrap();
        assert!(
            text.contains("made a root: give ") && text.contains("made an issuer: "),
            "{text}"
        );
        assert!(
            text.contains("it may sign only for example.com and its subdomains"),
            "{text}"
        );

        let again = init(dir.path(), &patterns(&["*.example.com"]), false).unwrap();
        assert!(!again.contains("made"), "{again}");
        let wider = init(dir.path(), &patterns(&[]), true).unwrap();
        assert!(
            wider.contains("made a new issuer under the same root"),
            "{wider}"
        );
        assert!(!wider.contains("only for"), "{wider}");
    }

    #[test]
    fn init_without_the_root_key_says_where_to_run_it() {
        let dir = TempDir::new().unwrap();
        init(dir.path(), &patterns(&["example.com"]), false).unwrap();
        fs::remove_file(dir.path().join(ROOT_KEY)).unwrap();
        let text = init(dir.path(), &patterns(&["example.org"]), false).unwrap();
        assert!(text.contains("the issuer may not sign for all of the configured hosts: run `paceline ca init` where ca.key is"), "{text}");
        assert!(text.contains("key          not here"), "{text}");
    }

    #[test]
    fn show_has_both_certificates_and_no_key() {
        let dir = TempDir::new().unwrap();
        init(dir.path(), &patterns(&["example.com"]), false).unwrap();
        let text = show(dir.path()).unwrap();
        assert!(
            text.contains("root: CN=paceline root ")
                && text.contains("issuer: CN=paceline issuer "),
            "{text}"
        );
        assert_eq!(text.matches("SHA-256").count(), 2);
        let key = fs::read_to_string(dir.path().join(ISSUER_KEY)).unwrap();
        assert!(
            key.lines()
                .all(|line| line.starts_with("-----") || !text.contains(line))
        );

        fs::remove_file(dir.path().join(ROOT_CERTIFICATE)).unwrap();
        assert!(show(dir.path()).unwrap().contains("ca.pem is not here"));
    }

    #[test]
    fn the_bundle_ends_with_our_root() {
        let dir = TempDir::new().unwrap();
        init(dir.path(), &patterns(&["example.com"]), false).unwrap();
        let root = fs::read_to_string(dir.path().join(ROOT_CERTIFICATE)).unwrap();
        assert!(bundle(dir.path()).unwrap().ends_with(&root));
    }

    #[test]
    fn show_and_bundle_without_a_ca_say_how_to_make_one() {
        let dir = TempDir::new().unwrap();
        assert!(
            show(dir.path())
                .unwrap_err()
                .to_string()
                .contains("paceline ca init")
        );
        assert!(
            bundle(dir.path())
                .unwrap_err()
                .to_string()
                .contains("ca.pem")
        );
    }

    #[test]
    fn a_bundle_may_be_read_by_all_even_where_the_file_was_closed_to_them() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("bundle.pem");
        fs::write(&path, "old").expect("written");
        fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("ours");
        write_public(&path, "new").expect("written");
        let mode = fs::metadata(&path).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o644);
        assert_eq!(fs::read_to_string(&path).expect("text"), "new");
        write_public(Path::new("/dev/null"), "new").expect("a device takes it too");
    }
}

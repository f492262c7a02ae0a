//! Tests with a company's CA, made by OpenSSL as companies make theirs: names of every shape, and issuers that cannot sign.

use std::{
    fs, os::unix::fs::PermissionsExt, path::Path, process::Command, sync::Arc, time::SystemTime,
};

use super::{
    Constraints, ISSUER_CERTIFICATE, ISSUER_KEY, Issuer, ROOT_CERTIFICATE, ROOT_KEY, init,
    testing::{TestCa, chain, constraints, host, openssl_verify, python_handshake},
};

/// Repeats attributes, and has two in one step.
const ROOT_NAME: &str =
    "/DC=com/DC=example/DC=corp/O=Example/OU=Security/OU=PKI/CN=Example Root+OU=R1";
const ISSUER_NAME: &str =
    "/DC=com/DC=example/DC=corp/O=Bücher & Söhne/OU=Proxy/OU=Fetchers/CN=Proxy CA+serialNumber=7";

fn openssl(dir: &Path, arguments: &[&str]) {
    let output = Command::new("openssl")
        .current_dir(dir)
        .args(arguments)
        .output();
    let output = output.expect("openssl must be installed for this test");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}");
}

fn make_root(dir: &Path, extensions: &str) {
    let config = format!("[v3]\nsubjectKeyIdentifier=hash\n{extensions}\n");
    fs::write(
        dir.join("root.cnf"),
        format!("[req]\ndistinguished_name=dn\n[dn]\n{config}"),
    )
    .unwrap();
    let key = [
        "genpkey",
        "-algorithm",
        "EC",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-out",
        ROOT_KEY,
    ];
    openssl(dir, &key);
    openssl(
        dir,
        &[
            "req",
            "-x509",
            "-new",
            "-key",
            ROOT_KEY,
            "-out",
            ROOT_CERTIFICATE,
            "-days",
            "365",
            "-utf8",
            "-multivalue-rdn",
            "-subj",
            ROOT_NAME,
            "-config",
            "root.cnf",
            "-extensions",
            "v3",
        ],
    );
    fs::set_permissions(dir.join(ROOT_KEY), fs::Permissions::from_mode(0o600)).unwrap();
}

fn make_issuer(dir: &Path, extensions: &str) {
    fs::write(
        dir.join("issuer.cnf"),
        format!("subjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n{extensions}\n"),
    )
    .unwrap();
    let key = [
        "genpkey",
        "-algorithm",
        "RSA",
        "-pkeyopt",
        "rsa_keygen_bits:2048",
        "-out",
        ISSUER_KEY,
    ];
    openssl(dir, &key);
    openssl(
        dir,
        &[
            "req",
            "-new",
            "-key",
            ISSUER_KEY,
            "-out",
            "issuer.csr",
            "-utf8",
            "-multivalue-rdn",
            "-subj",
            ISSUER_NAME,
        ],
    );
    openssl(
        dir,
        &[
            "x509",
            "-req",
            "-in",
            "issuer.csr",
            "-CA",
            ROOT_CERTIFICATE,
            "-CAkey",
            ROOT_KEY,
            "-CAcreateserial",
            "-out",
            ISSUER_CERTIFICATE,
            "-days",
            "300",
            "-extfile",
            "issuer.cnf",
        ],
    );
    fs::set_permissions(dir.join(ISSUER_KEY), fs::Permissions::from_mode(0o600)).unwrap();
}

const GOOD_ROOT: &str = "basicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign,cRLSign";
const GOOD_ISSUER: &str = "basicConstraints=critical,CA:TRUE,pathlen:0\nkeyUsage=critical,keyCertSign,cRLSign\n\
                           nameConstraints=critical,permitted;DNS:example.com";

/// Every verifier accepts what this CA's issuer signs.
fn assert_accepted(ca: &TestCa) {
    let name = "a.example.com";
    let config = ca.leaves().server_config(&host(name)).unwrap();
    let sent = chain(&config, ca.client(), name);
    assert_eq!(openssl_verify(ca, &sent[0], name), Ok(()));
    assert_eq!(python_handshake(ca, config, name), "ok");
    ca.issuer.prove(&host(name)).unwrap();
}

#[test]
fn a_company_ca_whose_name_repeats_attributes_signs_leaves_that_clients_accept() {
    let dir = tempfile::TempDir::new().unwrap();
    make_root(dir.path(), GOOD_ROOT);
    make_issuer(dir.path(), GOOD_ISSUER);
    let issuer = Arc::new(Issuer::load(dir.path()).unwrap());
    assert_accepted(&TestCa { dir, issuer });
}

#[test]
fn an_issuer_is_made_under_a_company_root_whose_name_repeats_attributes() {
    let dir = tempfile::TempDir::new().unwrap();
    make_root(dir.path(), GOOD_ROOT);
    init(
        dir.path(),
        &constraints(&["example.com"]),
        SystemTime::now(),
    )
    .unwrap();
    let issuer = Arc::new(Issuer::load(dir.path()).unwrap());
    assert_accepted(&TestCa { dir, issuer });
}

#[test]
fn an_issuer_that_cannot_sign_is_refused_and_the_reason_is_told() {
    let no_usage = GOOD_ISSUER.replace("keyCertSign,cRLSign", "digitalSignature");
    let clients_only = format!("{GOOD_ISSUER}\nextendedKeyUsage=clientAuth");
    let not_an_authority = GOOD_ISSUER.replace("CA:TRUE,pathlen:0", "CA:FALSE");
    let foreign = GOOD_ISSUER.replace("DNS:example.com", "DNS:example.org");
    let no_path = GOOD_ROOT.replace("CA:TRUE", "CA:TRUE,pathlen:0");
    for (root, issuer, words) in [
        (GOOD_ROOT, not_an_authority.as_str(), "its CA flag is FALSE"),
        (GOOD_ROOT, &no_usage, "lacks keyCertSign"),
        (GOOD_ROOT, &clients_only, "lacks serverAuth"),
        (&no_path, GOOD_ISSUER, "pathlen:0"),
        (
            GOOD_ROOT,
            &foreign,
            "signs certificates that clients refuse",
        ),
    ] {
        let dir = tempfile::TempDir::new().unwrap();
        make_root(dir.path(), root);
        make_issuer(dir.path(), issuer);
        let proved = Issuer::load(dir.path()).and_then(|i| i.prove(&host("a.example.com")));
        let said = proved.expect_err(words).to_string();
        assert!(
            said.contains(words) && said.lines().count() == 1,
            "{words}: {said}"
        );
    }
}

#[test]
fn our_own_issuer_proves_itself_with_and_without_constraints() {
    for constraints in [constraints(&["a.example.com"]), Constraints::Unconstrained] {
        let ca = TestCa::with(&constraints);
        ca.issuer.prove(&host("a.example.com")).unwrap();
    }
}

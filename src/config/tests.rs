//! The configuration as a whole: sample files with their expected messages, the environment, the manual, and texts
//! that nobody would write.

use std::{collections::BTreeSet, fs, path::Path, path::PathBuf};

use proptest::prelude::*;

use super::*;

fn nothing(_: &str) -> Option<String> {
    None
}

fn parse(text: &str) -> Result<Config, Faults> {
    Config::parse(text, Path::new("paceline.toml"), &nothing)
}

/// The package's root.
fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Parses each sample in the directory and compares what is printed with the `.expected` file beside it.
fn compare_samples(directory: &str, print: impl Fn(&str, Result<Config, Faults>) -> String) {
    let directory = root().join("tests/config").join(directory);
    let mut samples: Vec<_> = fs::read_dir(&directory)
        .expect("the samples are in the package")
        .map(|entry| entry.expect("a directory entry").path())
        .filter(|path| path.extension().is_some_and(|e| e == "toml"))
        .collect();
    samples.sort();
    assert!(!samples.is_empty(), "{}", directory.display());
    for path in samples {
        let text = fs::read_to_string(&path).expect("a sample");
        let file = Path::new(path.file_name().expect("a file name"));
        let printed = print(&text, Config::parse(&text, file, &nothing));
        let expected = path.with_extension("expected");
        // To be looked at with `git diff` after a message was changed.
        if std::env::var_os("PACELINE_WRITE_EXPECTED").is_some() {
            fs::write(&expected, format!("{printed}\n")).expect("can write");
        }
        let expected = fs::read_to_string(&expected).unwrap_or_default();
        assert_eq!(printed, expected.trim_end(), "{}", path.display());
    }
}

#[test]
fn valid_samples_mean_what_is_expected() {
    compare_samples("valid", |_, result| {
        let config = result.unwrap_or_else(|faults| panic!("{faults}"));
        let printed = config.summary().to_string();
        assert!(!printed.contains("hunter2") && !format!("{config:?}").contains("hunter2"));
        printed
    });
}

#[test]
fn invalid_samples_report_every_mistake_with_its_line_and_no_secret() {
    compare_samples("invalid", |text, result| {
        let faults = result.expect_err("the sample is invalid");
        for fault in faults.iter() {
            let line = fault.to_string();
            assert!(!line.contains('\n') && line.contains("; "), "{line}");
            assert!(!line.contains("hunter2"), "{line}");
            if let Place::Line(_, number) = fault.place {
                assert!((1..=text.lines().count()).contains(&number), "{line}");
            }
        }
        faults.to_string()
    });
}

#[test]
fn without_a_file_googles_hosts_are_paced_at_seven_a_second_on_the_embedded_store() {
    let config = Config::load(None, &nothing).expect("the defaults are valid");
    assert_eq!(config.file, None);
    assert!(config.store.is_none());
    assert_eq!(config.proxy.listen.to_string(), "127.0.0.1:3128");
    assert_eq!(config.admin.listen.to_string(), "127.0.0.1:9128");
    let [destination] = config.destinations.as_slice() else {
        panic!("one destination, not {}", config.destinations.len());
    };
    assert_eq!(
        destination.to_string(),
        "destination google_image: 7/s in all, tls intercept, hosts *.googleusercontent.com drive.google.com \
         drive.usercontent.google.com, max_in_flight no limit, throttle_status [429, 503], lockout_status none, \
         recovery_after 100, retry_after_cap 10m, retry_throttled 0"
    );
}

#[test]
fn the_built_in_destination_has_the_defaults_of_a_written_one() {
    let built_in = Config::load(None, &nothing).expect("valid");
    let hosts = format!("{:?}", default::HOSTS);
    let text = format!("[[destination]]\nname = \"google_image\"\nhosts = {hosts}\nrate = 7\n");
    let written = parse(&text).expect("valid");
    assert_eq!(
        format!("{:?}", built_in.destinations),
        format!("{:?}", written.destinations)
    );
}

#[test]
fn the_environment_names_the_file_and_an_argument_is_stronger() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = |name: &str| {
        let path = directory.path().join(format!("{name}.toml"));
        let text =
            format!("[[destination]]\nname = \"{name}\"\nhosts = [\"{name}.test\"]\nrate = 1\n");
        fs::write(&path, text).expect("can write");
        path
    };
    let (a, b) = (file("a"), file("b"));
    let env = |name: &str| (name == CONFIG_VARIABLE).then(|| a.display().to_string());
    let name = |file| {
        Config::load(file, &env).expect("valid").destinations[0]
            .name
            .clone()
    };
    assert_eq!(name(None), "a");
    assert_eq!(name(Some(b.as_path())), "b");
}

#[test]
fn a_file_that_cannot_be_read_is_a_fault_that_names_it() {
    let directory = tempfile::tempdir().expect("a directory");
    let missing = directory.path().join("missing.toml");
    let message = Config::load(Some(&missing), &nothing)
        .expect_err("missing")
        .to_string();
    assert!(
        message.contains("missing.toml") && message.contains("is not there; put it there"),
        "{message}"
    );
    let binary = directory.path().join("binary.toml");
    fs::write(&binary, [0xff, 0xfe]).expect("can write");
    let message = Config::load(Some(&binary), &nothing)
        .expect_err("not UTF-8")
        .to_string();
    assert!(message.contains("UTF-8"), "{message}");
}

#[test]
fn the_store_url_of_the_environment_is_stronger_and_makes_the_group() {
    let with =
        |url: &'static str| move |name: &str| (name == STORE_URL_VARIABLE).then(|| url.to_owned());
    let url = |config: Config| config.store.map(|store| store.url.reveal().to_owned());
    let minimal = "[[destination]]\nname = \"a\"\nhosts = [\"a.test\"]\nrate = 1\n";
    let file = Path::new("paceline.toml");

    let alone = Config::load(None, &with("postgres://env/x")).expect("valid");
    let store = alone.store.clone().expect("a store");
    assert_eq!(
        (store.table.as_str(), store.key_prefix.as_str()),
        ("paceline", "paceline:")
    );
    assert!(store.replica.ends_with(":3128"), "{}", store.replica);
    assert_eq!(url(alone).as_deref(), Some("postgres://env/x"));

    let without_url = format!("[store]\ntable = \"shared_cache\"\n{minimal}");
    let config = Config::parse(&without_url, file, &with("postgresql://env/x")).expect("valid");
    assert_eq!(config.store.expect("a store").table, "shared_cache");

    let with_url = format!("[store]\nurl = \"postgres://file/x\"\n{minimal}");
    let config = Config::parse(&with_url, file, &with("postgres://env/x")).expect("valid");
    assert_eq!(url(config).as_deref(), Some("postgres://env/x"));
    let config = Config::parse(&with_url, file, &with("")).expect("valid");
    assert_eq!(url(config).as_deref(), Some("postgres://file/x"));

    let faults = Config::load(None, &with("mysql://u:hunter2@env/x")).expect_err("another store");
    let message = faults.to_string();
    assert!(
        message.starts_with("PACELINE_STORE_URL: store.url: "),
        "{message}"
    );
    assert!(!message.contains("hunter2"), "{message}");
}

#[test]
fn the_store_url_is_needed_only_to_serve() {
    let text =
        "[store]\nreplica = \"a\"\n[[destination]]\nname = \"a\"\nhosts = [\"a.test\"]\nrate = 1\n";
    let file = tempfile::NamedTempFile::new().expect("a file");
    let read = |text: &str, purpose| {
        std::fs::write(&file, text).expect("written");
        Config::load_for(purpose, Some(file.path()), &nothing)
    };
    let faults = read(text, Purpose::Serve).expect_err("no URL").to_string();
    assert!(faults.contains("store.url: is missing"), "{faults}");
    let config = read(text, Purpose::Look).expect("a look needs no URL");
    assert_eq!((config.store, config.destinations.len()), (None, 1));
    // What is there has to be right.
    for wrong in [
        "[store]\nurl = \"mysql://h\"\n",
        "[store]\ntable = \"a b\"\n",
    ] {
        assert!(read(wrong, Purpose::Look).is_err(), "{wrong}");
    }
}

#[test]
fn replicas_whose_ports_the_system_chooses_have_different_names() {
    let text = "[proxy]\nlisten = \"127.0.0.1:0\"\n[store]\nurl = \"postgres://db/x\"\n\
                [[destination]]\nname = \"a\"\nhosts = [\"a.test\"]\nrate = 1\n";
    let replica = parse(text).expect("valid").store.expect("a store").replica;
    assert!(
        replica.ends_with(&format!(":pid-{}", std::process::id())),
        "{replica}"
    );
}

#[test]
fn an_open_proxy_needs_to_be_meant() {
    let text = |proxy: &str| {
        format!(
            "[[destination]]\nname = \"a\"\nhosts = [\"a.test\"]\nrate = 1\n[proxy]\nallow_clients = [\"any\"]\n{proxy}"
        )
    };
    assert!(parse(&text("listen = \"127.0.0.1:1\"")).is_ok());
    assert!(parse(&text("listen = \"0.0.0.0:1\"\nopen = true")).is_ok());
    let hash = "ab".repeat(32);
    assert!(
        parse(&text(&format!(
            "listen = \"0.0.0.0:1\"\nauth.users.a = \"{hash}\""
        )))
        .is_ok()
    );
    let message = parse(&text("listen = \"0.0.0.0:1\""))
        .expect_err("open")
        .to_string();
    assert!(
        message.starts_with("paceline.toml:6: proxy.allow_clients: "),
        "{message}"
    );
}

#[test]
fn everybody_in_pieces_is_everybody() {
    let with = |ranges: &str| {
        parse(&format!(
            "[[destination]]\nname = \"a\"\nhosts = [\"a.test\"]\nrate = 1\n[proxy]\nlisten = \"0.0.0.0:1\"\nallow_clients = [{ranges}]"
        ))
    };
    for open in [
        "\"0.0.0.0/1\", \"128.0.0.0/1\"",
        "\"64.0.0.0/2\"",
        "\"8.0.0.0/7\"",
        "\"2000::/3\"",
        "\"::/0\"",
        "\"fc00::/6\"",
        "\"fe80::/9\"",
    ] {
        assert!(with(open).is_err(), "{open}");
    }
    for own in [
        "\"10.0.0.0/8\"",
        "\"9.0.0.0/8\"",
        "\"fc00::/7\"",
        "\"fe80::/10\"",
        "\"2a00::/12\"",
        "\"private\", \"192.0.2.0/24\"",
    ] {
        assert!(with(own).is_ok(), "{own}");
    }
}

/// The keys of the manual: from headings with a `[group]` and table rows that begin with a key.
fn documented_keys() -> BTreeSet<(String, String)> {
    let manual = fs::read_to_string(root().join("docs/configuration.md")).expect("the manual");
    let mut group = String::new();
    let mut keys = BTreeSet::new();
    for line in manual.lines() {
        if line.starts_with('#') {
            let inside = line
                .split_once('[')
                .and_then(|(_, rest)| rest.split_once(']'));
            group = inside.map_or(String::new(), |(name, _)| name.trim_matches('[').to_owned());
        } else if let Some((key, _)) = line
            .strip_prefix("| `")
            .and_then(|rest| rest.split_once('`'))
        {
            keys.insert((group.clone(), key.to_owned()));
        }
    }
    keys
}

#[test]
fn the_manual_has_every_key_and_no_other() {
    let known: BTreeSet<_> = keys::GROUPS
        .iter()
        .flat_map(|group| {
            group
                .keys
                .iter()
                .map(|key| (group.name.to_owned(), (*key).to_owned()))
        })
        .filter(|(group, key)| {
            !keys::GROUPS
                .iter()
                .any(|g| g.name == format!("{group}.{key}"))
        })
        .collect();
    let documented: BTreeSet<_> = documented_keys()
        .into_iter()
        .filter(|(group, _)| !group.is_empty())
        .collect();
    assert_eq!(documented, known);
}

#[test]
fn the_manual_has_every_environment_variable() {
    let documented = documented_keys();
    let token = crate::cli::admin::TOKEN_VARIABLE;
    for variable in [CONFIG_VARIABLE, STORE_URL_VARIABLE, token] {
        assert!(
            documented.contains(&(String::new(), variable.to_owned())),
            "{variable}"
        );
    }
}

#[test]
fn every_known_key_is_read() {
    // A date is right for no key, so each key that is read complains on its own line.
    for group in keys::GROUPS {
        for key in group.keys {
            let header = match group.name {
                "destination" => "[[destination]]".to_owned(),
                name => format!("[{name}]"),
            };
            let text = format!("\n{header}\n{key} = 2020-01-01\n");
            let faults = parse(&text).expect_err("a date is never right");
            let full = format!("{}.{key}", group.name);
            assert!(
                faults
                    .iter()
                    .any(|f| f.key == full && f.place == Place::Line("paceline.toml".into(), 3)),
                "{full}: {faults}"
            );
        }
    }
}

#[test]
fn deeply_nested_text_is_answered() {
    for text in [
        format!("{}b = 1", "a.".repeat(100_000)),
        format!("[{}b]", "a.".repeat(100_000)),
        format!("a = {}", "[".repeat(100_000)),
        format!("a = {}", "{ a = ".repeat(100_000)),
    ] {
        assert!(parse(&text).is_err());
    }
}

fn contract_lines() -> Vec<String> {
    let text =
        fs::read_to_string(root().join("tests/config/valid/contract.toml")).expect("a sample");
    text.lines().map(str::to_owned).collect()
}

proptest! {
    #[test]
    fn any_text_is_answered(text in "\\PC{0,200}|([a-z\\[\\]=\"'{}., \\n#0-9-]{0,120})") {
        if let Err(faults) = parse(&text) {
            prop_assert!(faults.iter().next().is_some());
        }
    }

    #[test]
    fn any_value_for_any_key_is_answered(
        line in any::<prop::sample::Index>(),
        value in "\"[^\"\\\\\\n]{0,30}\"|-?[0-9]{1,25}|[0-9.e+-]{1,12}|\\[\\]|\\{\\}|true|inf|nan|2020-01-01|\\[\"\\*\", 1\\]",
    ) {
        let mut lines = contract_lines();
        let settings: Vec<_> = (0..lines.len()).filter(|i| lines[*i].contains(" = ")).collect();
        let at = settings[line.index(settings.len())];
        let key = lines[at].split(" = ").next().unwrap_or_default().to_owned();
        lines[at] = format!("{key} = {value}");
        if let Err(faults) = parse(&lines.join("\n")) {
            for fault in faults.iter() {
                prop_assert!(!fault.to_string().contains('\n'));
            }
        }
    }

    #[test]
    fn a_mangled_key_is_a_fault_in_its_line(
        line in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(), letter in "[a-z_]",
    ) {
        let mut lines = contract_lines();
        let settings: Vec<_> = (0..lines.len()).filter(|i| lines[*i].contains(" = ")).collect();
        let line = settings[line.index(settings.len())];
        let key_length = lines[line].find(" = ").unwrap_or_default();
        // A letter too many makes no key into another one.
        lines[line].insert_str(at.index(key_length + 1), &letter);
        let faults = parse(&lines.join("\n")).expect_err("an unknown key");
        let place = Place::Line("paceline.toml".into(), line + 1);
        prop_assert!(faults.iter().any(|f| f.place == place && f.complaint.wrong == "unknown key"), "{}", faults);
    }
}

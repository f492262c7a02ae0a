//! From the environment to findings about trust: which clients would accept paceline's certificates. Pure: what a store
//! holds, a function says that is passed in.

use std::path::Path;

use super::{
    Surroundings,
    clients::{FAMILIES, Family, Otherwise, Trust},
    finding::{Finding, Level},
    proxies::{java_option, listed},
};

/// A store of roots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Store<'s> {
    /// A PEM file.
    File(&'s Path),
    /// A folder of PEM files.
    Folder(&'s Path),
    /// The system's.
    System,
}

/// What a store makes of the certificates that paceline presents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Trusted {
    /// They hang from a root in it.
    Yes,
    /// The same, but there is no other root in it.
    Alone,
    /// They do not.
    No,
    /// It cannot be used; the text says why.
    Broken(String),
    /// There is nothing to compare it with.
    Untold,
}

/// What all clients would say to paceline's certificates.
pub(super) fn findings(
    around: &Surroundings<'_>,
    trusts: &dyn Fn(Store<'_>) -> Trusted,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut untold = Vec::new();
    for family in FAMILIES.iter().filter(|f| f.trust != Trust::AsRuntime) {
        match verdict(around, family.trust, trusts) {
            Some((level, text)) => findings.push(of_family(around, family, level, text)),
            None => untold.push(family.name),
        }
    }
    if !untold.is_empty() {
        let text = format!(
            "cannot be told before paceline answers for --url, or --ca FILE names its root: {}",
            untold.join("; ")
        );
        findings.push(Finding::note("trust", text));
    }
    findings
}

fn of_family(around: &Surroundings<'_>, family: &Family, level: Level, text: String) -> Finding {
    let is_absent = level != Level::Ok && !family.is_here(around.present);
    let level = match level {
        Level::Problem if family.minor || is_absent => Level::Note,
        level => level,
    };
    let text = match is_absent {
        true => format!("not found here; {text}"),
        false => text,
    };
    Finding::new(level, format!("{}: trust", family.name), text)
}

/// What clients that find their roots in this way make of paceline's certificates; `None` if it cannot be told.
fn verdict(
    around: &Surroundings<'_>,
    trust: Trust,
    trusts: &dyn Fn(Store<'_>) -> Trusted,
) -> Option<(Level, String)> {
    let own = |to_set: &str| {
        let text = format!("trusts its own roots alone; set {to_set} to the bundle");
        Some((Level::Problem, text))
    };
    match trust {
        Trust::Replaced(variables, otherwise) => {
            if let Some(folder) = of_folders(around, variables, trusts) {
                return Some(folder);
            }
            let set = variables.iter().find_map(|n| Some((*n, around.set(n)?)));
            match (set, otherwise) {
                (Some((name, path)), _) => of_file(name, &path, trusts, false),
                (None, Otherwise::Own) => own(&listed(variables)),
                (None, Otherwise::System) => of_system(
                    trusts,
                    Level::Problem,
                    &format!("set {} to the bundle", listed(variables)),
                ),
            }
        }
        Trust::Added(variable) => match around.set(variable) {
            Some(path) => of_file(variable, &path, trusts, true),
            None => own(variable),
        },
        // No variable can change it, so that only whoever needs it has to.
        Trust::System => of_system(
            trusts,
            Level::Note,
            "no variable changes that; if it fetches from governed hosts, install the root there",
        ),
        Trust::Java => {
            let text = match java_option(around, "javax.net.ssl.trustStore") {
                Some((variable, path)) => {
                    format!("the trustStore in {variable}, {path}, is not looked into; try keytool -list")
                }
                None => "its own trust store is not looked into; import ca.pem with keytool, as `paceline env` says".to_owned(),
            };
            Some((Level::Note, text))
        }
        Trust::Elsewhere(means) => Some((
            Level::Note,
            format!("set by {means}, which is not looked at"),
        )),
        Trust::AsRuntime => None,
    }
}

/// Whoever reads `SSL_CERT_FILE` looks into the folders of `SSL_CERT_DIR` too.
fn of_folders(
    around: &Surroundings<'_>,
    variables: &[&str],
    trusts: &dyn Fn(Store<'_>) -> Trusted,
) -> Option<(Level, String)> {
    if !variables.contains(&"SSL_CERT_FILE") {
        return None;
    }
    let folders = around.set("SSL_CERT_DIR")?;
    let has_it = |folder: &&str| {
        let found = trusts(Store::Folder(Path::new(folder)));
        matches!(found, Trusted::Yes | Trusted::Alone)
    };
    let folder = folders.split(':').find(has_it)?;
    let text = format!("SSL_CERT_DIR has paceline's root, in {folder}");
    Some((Level::Ok, text))
}

fn of_system(
    trusts: &dyn Fn(Store<'_>) -> Trusted,
    level: Level,
    remedy: &str,
) -> Option<(Level, String)> {
    match trusts(Store::System) {
        Trusted::Yes | Trusted::Alone => Some((
            Level::Ok,
            "the system's store has paceline's root".to_owned(),
        )),
        Trusted::Untold => None,
        Trusted::No => {
            let text = format!("the system's store lacks paceline's root; {remedy}");
            Some((level, text))
        }
        Trusted::Broken(why) => Some((level, format!("the system's store: {why}; {remedy}"))),
    }
}

fn of_file(
    name: &str,
    path: &str,
    trusts: &dyn Fn(Store<'_>) -> Trusted,
    adds: bool,
) -> Option<(Level, String)> {
    Some(match trusts(Store::File(Path::new(path))) {
        Trusted::Alone if !adds => (
            Level::Note,
            format!(
                "{name} has paceline's root and no other: hosts that are not intercepted are refused; name the bundle instead"
            ),
        ),
        Trusted::Yes | Trusted::Alone => (Level::Ok, format!("{name} has paceline's root")),
        Trusted::No => (
            Level::Problem,
            format!(
                "{name}: {path} lacks paceline's root; name the bundle that `paceline ca bundle` prints"
            ),
        ),
        Trusted::Broken(why) => (
            Level::Problem,
            format!("{name}: {path}: {why}; name the bundle that `paceline ca bundle` prints"),
        ),
        Trusted::Untold => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::env::TRUST_VARIABLES;

    const BUNDLE: &str = "/bundle.pem";

    fn stores(store: Store<'_>) -> Trusted {
        match store {
            Store::File(path) if path == Path::new(BUNDLE) => Trusted::Yes,
            Store::File(path) if path == Path::new("/ca.pem") => Trusted::Alone,
            Store::File(path) if path == Path::new("/gone.pem") => {
                Trusted::Broken("no such file".to_owned())
            }
            Store::Folder(path) if path == Path::new("/good") => Trusted::Yes,
            _ => Trusted::No,
        }
    }

    /// The findings where every trust variable names the bundle but for what is changed, and every program is found.
    fn found(changes: &[(&str, &str)], trusts: &dyn Fn(Store<'_>) -> Trusted) -> Vec<Finding> {
        let variable = |name: &str| match changes.iter().find(|(n, _)| *n == name) {
            Some((_, value)) => Some((*value).to_owned()),
            None => TRUST_VARIABLES.contains(&name).then(|| BUNDLE.to_owned()),
        };
        let around = Surroundings {
            node: None,
            variable: &variable,
            present: &|_| true,
        };
        findings(&around, trusts)
    }

    fn problems(changes: &[(&str, &str)]) -> Vec<String> {
        let mut found = found(changes, &stores);
        found.retain(|f| f.level == Level::Problem);
        found
            .into_iter()
            .map(|f| f.check.trim_end_matches(": trust").to_owned())
            .collect()
    }

    #[test]
    fn the_bundle_in_every_variable_is_no_problem() {
        assert_eq!(problems(&[]), [""; 0]);
    }

    #[test]
    fn each_missing_variable_is_the_problem_of_those_who_read_it_and_is_named() {
        for (variable, clients) in [
            ("REQUESTS_CA_BUNDLE", &[] as &[&str]),
            ("NODE_EXTRA_CA_CERTS", &["Node"]),
            ("GIT_SSL_CAINFO", &["git"]),
            ("CURL_CA_BUNDLE", &[]),
            (
                "SSL_CERT_FILE",
                &[
                    "Python httpx",
                    "Python urllib, Scrapy, aiohttp",
                    "Go",
                    "Rust reqwest",
                    "Ruby",
                ],
            ),
            ("DENO_CERT", &["Deno"]),
            ("PIP_CERT", &[]),
        ] {
            assert_eq!(problems(&[(variable, "")]), clients, "without {variable}");
            let named = found(&[(variable, "")], &stores);
            let named = named
                .iter()
                .any(|f| f.level != Level::Ok && f.text.contains(variable));
            assert_eq!(
                named,
                !clients.is_empty() || variable == "PIP_CERT",
                "{variable}"
            );
        }
        // requests takes curl's variable too, so that both must be missing.
        let neither = [("REQUESTS_CA_BUNDLE", ""), ("CURL_CA_BUNDLE", "")];
        assert_eq!(problems(&neither), ["Python requests"]);
    }

    #[test]
    fn a_file_without_the_root_or_without_a_file_is_a_problem() {
        for path in ["/other.pem", "/gone.pem"] {
            assert_eq!(
                problems(&[("REQUESTS_CA_BUNDLE", path)]),
                ["Python requests"],
                "{path}"
            );
        }
    }

    #[test]
    fn the_root_alone_is_noted_where_it_replaces_the_others() {
        let found = found(
            &[
                ("SSL_CERT_FILE", "/ca.pem"),
                ("NODE_EXTRA_CA_CERTS", "/ca.pem"),
            ],
            &stores,
        );
        let level = |check: &str| found.iter().find(|f| f.check == check).map(|f| f.level);
        assert_eq!(level("Go: trust"), Some(Level::Note));
        assert_eq!(level("Node: trust"), Some(Level::Ok));
        assert!(found.iter().all(|f| f.level != Level::Problem));
    }

    #[test]
    fn a_folder_of_roots_is_enough_for_those_who_read_it() {
        let changes = [
            ("SSL_CERT_FILE", ""),
            ("SSL_CERT_DIR", "/nowhere:/good"),
            ("REQUESTS_CA_BUNDLE", "/x"),
        ];
        assert_eq!(problems(&changes), ["Python requests"]);
    }

    #[test]
    fn the_systems_store_is_enough_for_those_who_use_it() {
        let unset = TRUST_VARIABLES.map(|name| (name, ""));
        let mut found = found(&unset, &|store| match store {
            Store::System => Trusted::Yes,
            store => stores(store),
        });
        found.retain(|f| f.level == Level::Problem);
        let checks: Vec<_> = found.iter().map(|f| f.check.as_str()).collect();
        assert_eq!(
            checks,
            [
                "Python requests: trust",
                "Python httpx: trust",
                "Node: trust",
                "Deno: trust"
            ]
        );
    }

    #[test]
    fn with_nothing_to_compare_with_there_is_one_note_and_what_is_missing_is_a_problem() {
        let untold = |store: Store<'_>| match store {
            Store::File(path) if path == Path::new("/gone.pem") => stores(store),
            _ => Trusted::Untold,
        };
        let found = found(
            &[("PIP_CERT", "/gone.pem"), ("GIT_SSL_CAINFO", "/gone.pem")],
            &untold,
        );
        let of = |level| {
            found
                .iter()
                .filter(move |f| f.level == level)
                .map(|f| f.check.as_str())
        };
        assert_eq!(of(Level::Problem).collect::<Vec<_>>(), ["git: trust"]);
        assert_eq!(of(Level::Note).filter(|c| *c == "trust").count(), 1);
        assert!(found.len() < 10, "{found:?}");
    }
}

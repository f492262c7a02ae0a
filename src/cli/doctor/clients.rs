//! What each family of clients looks at: for the proxy, and for the roots that it trusts. A table, as it was measured;
//! `docs/clients.md` has it in words.

/// A family of clients with the same habits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Family {
    pub(super) name: &'static str,
    /// Programs of which one must be found for the family to be here; none: it is built into programs of any name.
    pub(super) programs: &'static [&'static str],
    /// It seldom fetches from governed hosts, or cannot be seen to be here: never more than a note.
    pub(super) minor: bool,
    pub(super) proxy: Habit,
    /// Whether it can speak TLS to a proxy.
    pub(super) tls_to_proxy: bool,
    pub(super) trust: Trust,
    /// What the environment does not show.
    pub(super) caveat: &'static str,
}

/// How a family finds its proxy for `https://`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Habit {
    /// The first of these that is set.
    Variables(&'static [&'static str]),
    /// The same, but only with `NODE_USE_ENV_PROXY=1` or `--use-env-proxy`.
    Node(&'static [&'static str]),
    /// `-Dhttps.proxyHost` and `-Dhttps.proxyPort`.
    Java,
}

/// Where a family finds the roots that it trusts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trust {
    /// The file that the first of these names, in place of its usual roots.
    Replaced(&'static [&'static str], Otherwise),
    /// The file that this names, besides its own roots.
    Added(&'static str),
    /// The system's store, and no variable.
    System,
    /// `-Djavax.net.ssl.trustStore`, a store that is not PEM.
    Java,
    /// By the means named, which are not looked at here.
    Elsewhere(&'static str),
    /// As its runtime, which is a family of its own.
    AsRuntime,
}

/// What is trusted where no variable is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Otherwise {
    /// The system's store.
    System,
    /// Roots that come with the client.
    Own,
}

use Habit::{Java, Node, Variables};
use Trust::{Added, AsRuntime, Elsewhere, Replaced, System};

const EITHER: &[&str] = &["https_proxy", "HTTPS_PROXY"];
const EITHER_OR_ALL: &[&str] = &["https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"];
const PYTHON: &[&str] = &["python3", "python"];

const USUAL: Family = Family {
    name: "",
    programs: &[],
    minor: false,
    proxy: Variables(EITHER),
    tls_to_proxy: true,
    trust: System,
    caveat: "",
};

/// All families, the most usual first.
pub(super) const FAMILIES: &[Family] = &[
    Family {
        name: "Python requests",
        programs: PYTHON,
        proxy: Variables(EITHER_OR_ALL),
        trust: Replaced(&["REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"], Otherwise::Own),
        ..USUAL
    },
    Family {
        name: "Python httpx",
        programs: PYTHON,
        proxy: Variables(EITHER_OR_ALL),
        trust: Replaced(&["SSL_CERT_FILE"], Otherwise::Own),
        caveat: "gives up after 5 s unless its read time-out is raised",
        ..USUAL
    },
    Family {
        name: "Python urllib, Scrapy, aiohttp",
        programs: PYTHON,
        tls_to_proxy: false,
        trust: Replaced(&["SSL_CERT_FILE"], Otherwise::System),
        caveat: "aiohttp only with trust_env=True",
        ..USUAL
    },
    Family {
        name: "Python botocore",
        programs: PYTHON,
        minor: true,
        proxy: Variables(EITHER_OR_ALL),
        trust: Replaced(&["AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"], Otherwise::Own),
        ..USUAL
    },
    Family {
        name: "Python httplib2, Google's API client",
        programs: PYTHON,
        minor: true,
        trust: Replaced(&["HTTPLIB2_CA_CERTS"], Otherwise::Own),
        caveat: "only where PySocks is installed",
        ..USUAL
    },
    Family {
        name: "pip",
        programs: &["pip", "pip3"],
        minor: true,
        proxy: Variables(EITHER_OR_ALL),
        trust: Replaced(&["PIP_CERT"], Otherwise::System),
        ..USUAL
    },
    Family {
        name: "Node",
        programs: &["node"],
        proxy: Node(EITHER),
        trust: Added("NODE_EXTRA_CA_CERTS"),
        caveat: "an older one needs undici's EnvHttpProxyAgent",
        ..USUAL
    },
    Family {
        name: "Node axios",
        programs: &["node"],
        minor: true,
        proxy: Variables(EITHER_OR_ALL),
        trust: AsRuntime,
        ..USUAL
    },
    Family {
        name: "curl",
        programs: &["curl"],
        proxy: Variables(EITHER_OR_ALL),
        trust: Replaced(&["CURL_CA_BUNDLE", "SSL_CERT_FILE"], Otherwise::System),
        ..USUAL
    },
    Family {
        name: "git",
        programs: &["git"],
        proxy: Variables(EITHER_OR_ALL),
        trust: Replaced(&["GIT_SSL_CAINFO"], Otherwise::System),
        caveat: "http.proxy and http.sslCAInfo in its configuration are not looked at",
        ..USUAL
    },
    Family {
        name: "wget",
        programs: &["wget"],
        proxy: Variables(&["https_proxy"]),
        tls_to_proxy: false,
        ..USUAL
    },
    Family {
        name: "apt",
        programs: &["apt-get"],
        minor: true,
        proxy: Variables(&["https_proxy"]),
        ..USUAL
    },
    Family {
        name: "Go",
        proxy: Variables(&["HTTPS_PROXY", "https_proxy"]),
        trust: Replaced(&["SSL_CERT_FILE"], Otherwise::System),
        ..USUAL
    },
    Family {
        name: "Rust reqwest",
        proxy: Variables(&["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"]),
        trust: Replaced(&["SSL_CERT_FILE"], Otherwise::System),
        caveat: "builds with webpki-roots trust no file",
        ..USUAL
    },
    Family {
        name: "Java, OkHttp",
        programs: &["java"],
        proxy: Java,
        tls_to_proxy: false,
        trust: Trust::Java,
        caveat: "OkHttp gives up after 10 s unless its read time-out is raised",
        ..USUAL
    },
    Family {
        name: "Ruby",
        programs: &["ruby"],
        proxy: Variables(&["http_proxy"]),
        tls_to_proxy: false,
        trust: Replaced(&["SSL_CERT_FILE"], Otherwise::System),
        ..USUAL
    },
    Family {
        name: "PHP",
        programs: &["php"],
        proxy: Variables(EITHER_OR_ALL),
        trust: Elsewhere("curl.cainfo and openssl.cafile in php.ini"),
        ..USUAL
    },
    Family {
        name: "Chromium",
        programs: &["chromium", "chromium-browser", "google-chrome"],
        proxy: Variables(EITHER_OR_ALL),
        trust: Elsewhere("its profile's certificate store, or a policy"),
        caveat: "credentials in the URL are ignored",
        ..USUAL
    },
    Family {
        name: "gRPC",
        minor: true,
        proxy: Variables(&["grpc_proxy", "https_proxy"]),
        trust: Replaced(&["GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"], Otherwise::Own),
        caveat: "needs HTTP/2, which an intercepted tunnel does not offer",
        ..USUAL
    },
    Family {
        name: "cargo",
        programs: &["cargo"],
        minor: true,
        proxy: Variables(EITHER_OR_ALL),
        trust: Replaced(&["CARGO_HTTP_CAINFO"], Otherwise::System),
        ..USUAL
    },
    Family {
        name: "Deno",
        programs: &["deno"],
        trust: Added("DENO_CERT"),
        ..USUAL
    },
];

impl Family {
    /// Whether the family is here, as far as can be seen. Where no program of any family is found, `PATH` tells nothing.
    pub(super) fn is_here(&self, present: &dyn Fn(&str) -> bool) -> bool {
        let any = |family: &Family| family.programs.iter().any(|p| present(p));
        self.programs.is_empty() || any(self) || !FAMILIES.iter().any(any)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::cli::env::TRUST_VARIABLES;

    fn variables(trust: Trust) -> Vec<&'static str> {
        match trust {
            Replaced(variables, _) => variables.to_vec(),
            Added(variable) => vec![variable],
            _ => Vec::new(),
        }
    }

    #[test]
    fn each_variable_that_env_exports_is_some_clients_and_the_other_way_round() {
        let looked_at: BTreeSet<_> = FAMILIES.iter().flat_map(|f| variables(f.trust)).collect();
        assert_eq!(looked_at, TRUST_VARIABLES.into_iter().collect());
    }

    #[test]
    fn a_family_is_here_if_its_program_is_or_if_nothing_can_be_told() {
        let node = FAMILIES
            .iter()
            .find(|f| f.name == "Node")
            .expect("a family");
        let go = FAMILIES.iter().find(|f| f.name == "Go").expect("a family");
        assert!(node.is_here(&|p| p == "node") && !node.is_here(&|p| p == "curl"));
        assert!(node.is_here(&|_| false), "an empty PATH");
        assert!(go.is_here(&|p| p == "node"));
    }
}

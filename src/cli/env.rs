//! `paceline env`: the export lines that point a worker's clients at the proxy and at its CA.
//!
//! Which client reads which variable is in `docs/clients.md`. No variable works for all of them, so all are set; most
//! trust variables *replace* the system's roots, so they name a bundle of those and ours.

use std::{
    borrow::Cow,
    io,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
};

use thiserror::Error;

use crate::{
    ca,
    config::{Config, host_name},
};

/// The variables that hold the proxy's URL. Some clients read one spelling alone.
pub const PROXY_VARIABLES: [&str; 4] = ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"];

/// The variables that name the file of trusted roots.
pub const TRUST_VARIABLES: [&str; 11] = [
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "PIP_CERT",
    "AWS_CA_BUNDLE",
    "HTTPLIB2_CA_CERTS",
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
    "NODE_EXTRA_CA_CERTS",
    "CARGO_HTTP_CAINFO",
    "DENO_CERT",
];

/// Written in the subset that all clients understand: no `*`, no leading dot, no spaces, no CIDR.
const NO_PROXY: &str = "localhost,127.0.0.1,::1";

/// What a worker has to know.
#[derive(Clone, Copy, Debug)]
pub struct Worker<'w> {
    /// Where the proxy listens; its port must be the one that is bound.
    pub listen: SocketAddr,
    /// Whether the proxy asks for credentials.
    pub credentials: bool,
    /// The name by which workers reach this machine, for a listener on all addresses.
    pub host_name: &'w str,
    /// The file with the system's roots and ours, absolute.
    pub bundle: &'w Path,
}

/// Writes the bundle of roots, and gives the export lines for a worker of this configuration.
///
/// # Errors
/// When the port is chosen only at start, or the bundle can't be written.
pub fn env(config: &Config) -> Result<String, EnvError> {
    if config.proxy.listen.port() == 0 {
        return Err(EnvError::Port);
    }
    let bundle = ca::write_bundle(&config.ca.dir).map_err(|why| EnvError::Bundle {
        dir: config.ca.dir.clone(),
        why,
    })?;
    Ok(exports(Worker {
        listen: config.proxy.listen,
        credentials: config.proxy.auth.is_some(),
        host_name: &host_name(),
        bundle: &bundle,
    }))
}

/// The export lines, for a POSIX shell. Comments come last: `eval $(paceline env)` without quotes joins all lines into
/// one, and a `#` would swallow what follows.
pub fn exports(worker: Worker<'_>) -> String {
    let host = match worker.listen.ip() {
        ip if ip.is_unspecified() => worker.host_name.to_owned(),
        ip => ip.to_string(),
    };
    let port = worker.listen.port();
    let authority = match worker.listen.ip() {
        IpAddr::V6(ip) if !ip.is_unspecified() => format!("[{host}]:{port}"),
        _ => format!("{host}:{port}"),
    };
    let proxy = match worker.credentials {
        true => format!("http://USER:PASSWORD@{authority}"),
        false => format!("http://{authority}"),
    };
    let bundle = worker.bundle.to_string_lossy();
    // `disabledSchemes=`: Java doesn't answer a 407 to CONNECT with Basic credentials otherwise.
    let java = format!(
        "-Dhttps.proxyHost={host} -Dhttps.proxyPort={port} -Dhttp.proxyHost={host} -Dhttp.proxyPort={port} \
         -Dhttp.nonProxyHosts=localhost|127.0.0.1|[::1] -Djdk.http.auth.tunneling.disabledSchemes="
    );
    let mut lines = Vec::new();
    let mut export =
        |name: &str, value: &str| lines.push(format!("export {name}={}", quoted(value)));
    PROXY_VARIABLES.iter().for_each(|name| export(name, &proxy));
    export("NO_PROXY", NO_PROXY);
    export("no_proxy", NO_PROXY);
    export("NODE_USE_ENV_PROXY", "1");
    TRUST_VARIABLES
        .iter()
        .for_each(|name| export(name, &bundle));
    export("JAVA_TOOL_OPTIONS", &java);
    if worker.credentials {
        lines.push(
            "# Put a user of [proxy.auth] and its password, percent-encoded, in the place of USER:PASSWORD.".to_owned(),
        );
    }
    let root = worker.bundle.with_file_name("ca.pem");
    lines.push("# Java's trust store can't be a PEM file, so none is set above. Import the root into the one in use:".to_owned());
    lines.push(format!(
        "# keytool -importcert -noprompt -alias paceline -file {} -cacerts -storepass changeit",
        quoted(&root.to_string_lossy()).replace('\n', " ")
    ));
    lines.iter().map(|line| format!("{line}\n")).collect()
}

/// A word that a POSIX shell reads as the text; quoted only where it has to be, so that other programs can read the
/// lines too.
fn quoted(text: &str) -> Cow<'_, str> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"_@%+=:,./-".contains(&b);
    match !text.is_empty() && text.bytes().all(plain) {
        true => Cow::Borrowed(text),
        false => Cow::Owned(format!("'{}'", text.replace('\'', r"'\''"))),
    }
}

/// Why there are no export lines.
#[derive(Debug, Error)]
pub enum EnvError {
    /// `proxy.listen` has port 0.
    #[error("proxy.listen has port 0, so that the port is known only at start; set a port")]
    Port,
    /// The bundle of roots could not be written.
    #[error("can't write the bundle of roots in {dir} ({why}); run `paceline ca init`, or make the directory writable", dir = dir.display())]
    Bundle {
        /// The directory of the CA.
        dir: PathBuf,
        /// What the system said; the message has it already, so it is no `source`.
        why: io::Error,
    },
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, process::Command};

    use super::*;

    fn lines(listen: &str, credentials: bool, bundle: &str) -> String {
        exports(Worker {
            listen: listen.parse().expect("an address"),
            credentials,
            host_name: "proxy-1.example",
            bundle: Path::new(bundle),
        })
    }

    /// The environment after a shell has evaluated the lines by the given command.
    fn evaluated(lines: &str, command: &str) -> BTreeMap<String, String> {
        let output = Command::new("/bin/sh")
            .args(["-c", &format!("{command}; /usr/bin/env -0"), "sh", lines])
            .env_clear()
            .output()
            .expect("a shell");
        assert!(
            output.status.success() && output.stderr.is_empty(),
            "{output:?}"
        );
        String::from_utf8(output.stdout)
            .expect("UTF-8")
            .split_terminator('\0')
            .filter_map(|line| line.split_once('='))
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect()
    }

    #[test]
    fn a_shell_sets_every_variable_to_its_value() {
        let bundle = "/srv/it's a \"$HOME\" \\ dir/bundle.pem";
        let env = evaluated(&lines("127.0.0.1:3128", false, bundle), "eval \"$1\"");
        for name in PROXY_VARIABLES {
            assert_eq!(env[name], "http://127.0.0.1:3128", "{name}");
        }
        for name in TRUST_VARIABLES {
            assert_eq!(env[name], bundle, "{name}");
        }
        assert_eq!(env["NO_PROXY"], "localhost,127.0.0.1,::1");
        assert_eq!(env["no_proxy"], env["NO_PROXY"]);
        assert_eq!(env["NODE_USE_ENV_PROXY"], "1");
        assert_eq!(
            env["JAVA_TOOL_OPTIONS"],
            "-Dhttps.proxyHost=127.0.0.1 -Dhttps.proxyPort=3128 -Dhttp.proxyHost=127.0.0.1 -Dhttp.proxyPort=3128 \
             -Dhttp.nonProxyHosts=localhost|127.0.0.1|[::1] -Djdk.http.auth.tunneling.disabledSchemes="
        );
    }

    #[test]
    fn evaluation_without_quotes_sets_the_same() {
        let lines = lines("[::1]:3128", true, "/srv/certs/bundle.pem");
        let mut unquoted = evaluated(&lines, "eval $1");
        let mut quoted = evaluated(&lines, "eval \"$1\"");
        for env in [&mut unquoted, &mut quoted] {
            env.remove("_");
        }
        assert_eq!(unquoted, quoted);
        assert!(quoted.len() >= PROXY_VARIABLES.len() + TRUST_VARIABLES.len() + 4);
    }

    #[test]
    fn ipv6_has_brackets_in_urls_and_none_for_java() {
        let env = evaluated(&lines("[2001:db8::1]:3128", false, "/b.pem"), "eval \"$1\"");
        assert_eq!(env["https_proxy"], "http://[2001:db8::1]:3128");
        assert!(env["JAVA_TOOL_OPTIONS"].starts_with("-Dhttps.proxyHost=2001:db8::1 "));
    }

    #[test]
    fn a_listener_on_all_addresses_is_reached_by_the_host_name() {
        for listen in ["0.0.0.0:3128", "[::]:3128"] {
            let env = evaluated(&lines(listen, false, "/b.pem"), "eval \"$1\"");
            assert_eq!(
                env["HTTPS_PROXY"], "http://proxy-1.example:3128",
                "{listen}"
            );
        }
    }

    #[test]
    fn credentials_are_left_for_the_operator_to_put_in() {
        let lines = lines("127.0.0.1:3128", true, "/b.pem");
        assert!(lines.contains("export HTTPS_PROXY=http://USER:PASSWORD@127.0.0.1:3128\n"));
        assert!(lines.contains("# Put a user"));
    }

    #[test]
    fn a_port_that_is_not_known_yet_is_an_error() {
        let mut config = Config::load(None, &|_| None).expect("valid");
        config.proxy.listen.set_port(0);
        let message = env(&config).expect_err("no port").to_string();
        assert!(message.contains("; "), "{message}");
    }
}

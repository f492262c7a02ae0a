//! `paceline doctor`: run where a worker runs, says which of its clients would go round the proxy or refuse its
//! certificates, and what to change.
//!
//! The environment is read through a lookup; what follows from it is pure (`proxies.rs`, `trust.rs`). Only `probe.rs`
//! speaks to the network: it shakes hands with the proxy and spends no slot, for it never makes a request inside.

mod clients;
mod finding;
mod no_proxy;
mod node;
mod probe;
mod proxies;
mod proxy_url;
mod roots;
mod trust;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::Result;
use clap::Args;
use http::Uri;
use rustls::pki_types::CertificateDer;

use self::{
    finding::Finding,
    proxy_url::{ProxyUrl, Transport},
    roots::Judge,
};
use crate::{
    authority::{Authority, Host},
    cli::Usage,
    config::Secret,
};

/// Of the built-in destination.
const DEFAULT_URL: &str = "https://lh3.googleusercontent.com/";

/// What may be typed after `paceline doctor`.
#[derive(Clone, Debug, PartialEq, Args)]
pub struct Options {
    /// A URL of a governed host; it is not fetched, so its path does not matter
    #[arg(long, value_name = "URL", default_value = DEFAULT_URL, value_parser = target)]
    pub url: Authority,
    /// The proxy that workers should use; else the one that the variables name
    #[arg(long, value_name = "URL", value_parser = secret)]
    pub proxy: Option<Secret>,
    /// paceline's root, ca.pem, if what the proxy presents is to be held against it
    #[arg(long, value_name = "FILE")]
    pub ca: Option<PathBuf>,
}

/// The environment of a worker, as far as clients look at it.
#[derive(Clone, Copy)]
struct Surroundings<'s> {
    variable: &'s dyn Fn(&str) -> Option<String>,
    /// Whether a program can be found.
    present: &'s dyn Fn(&str) -> bool,
    /// The version of the Node that is found, major and minor, if it tells.
    node: Option<node::Version>,
}

impl Surroundings<'_> {
    /// A variable that is set, and not to nothing.
    fn set(&self, name: &str) -> Option<String> {
        (self.variable)(name).filter(|value| !value.is_empty())
    }
}

fn target(text: &str) -> Result<Authority, &'static str> {
    const FORM: &str = "write it as https://HOST/ or https://HOST:PORT/";
    let uri: Uri = text.parse().map_err(|_| FORM)?;
    match (uri.scheme_str(), uri.authority()) {
        (Some("https"), Some(authority)) => {
            Authority::parse(authority.as_str(), Some(443)).map_err(|_| FORM)
        }
        _ => Err(FORM),
    }
}

fn secret(text: &str) -> Result<Secret, std::convert::Infallible> {
    Ok(Secret::new(text))
}

/// Looks at everything and returns the report, and whether all is well.
///
/// # Errors
/// An option cannot be meant ([`Usage`]), or the file with the CA cannot be read.
pub async fn run(
    options: &Options,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<(String, bool)> {
    let present = |program: &str| is_on(env("PATH").as_deref().unwrap_or_default(), program);
    let around = Surroundings {
        variable: env,
        present: &present,
        node: match present("node") {
            true => node::version().await,
            false => None,
        },
    };
    let target = &options.url;
    let given = options.ca.as_deref().map(root_file).transpose()?;
    let proxy = match &options.proxy {
        Some(url) => {
            Some(ProxyUrl::parse(url.reveal()).map_err(|e| Usage(format!("--proxy: {e}")))?)
        }
        None => proxies::meant(&around),
    };
    let mut judge = Judge::new(target, given);
    let mut findings = Vec::new();
    if let Some(proxy) = &proxy {
        probed(proxy, target, &mut judge, &mut findings).await;
    }
    findings.push(way_out(target).await);
    findings.extend(proxies::findings(&around, proxy.as_ref(), target));
    findings.extend(trust::findings(&around, &|store| judge.trusts(store)));
    let through = proxy.map_or("no proxy".to_owned(), |p| p.to_string());
    let head = format!("How clients here would reach https://{target}/ through {through}\n\n");
    Ok((
        head + &finding::table(&findings),
        finding::is_well(&findings),
    ))
}

fn root_file(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let unreadable = |e| {
        Usage(format!(
            "--ca {}: {e}; name paceline's ca.pem",
            path.display()
        ))
    };
    let pem = fs::read(path).map_err(unreadable)?;
    let found = roots::certificates(&pem);
    match found.is_empty() {
        true => Err(Usage(format!(
            "--ca {}: no certificate in it; name paceline's ca.pem",
            path.display()
        ))
        .into()),
        false => Ok(found),
    }
}

/// Whether paceline answers, and whose certificates it presents.
async fn probed(
    proxy: &ProxyUrl,
    target: &Authority,
    judge: &mut Judge,
    findings: &mut Vec<Finding>,
) {
    const ANSWERS: &str = "paceline answers";
    const INTERCEPTED: &str = "intercepted";
    match proxy.transport {
        Transport::Http => {}
        // Their own findings say why nothing can be expected of them.
        Transport::Https | Transport::Other => {
            findings.push(Finding::note(
                ANSWERS,
                "not tried: the proxy's URL is not http://",
            ));
            return;
        }
    }
    match probe::answers(proxy).await {
        Ok(()) => findings.push(Finding::ok(ANSWERS, format!("at {}", proxy.authority))),
        Err(e) => {
            findings.push(Finding::problem(
                ANSWERS,
                format!("at {}: {e}", proxy.authority),
            ));
            return;
        }
    }
    findings.push(match probe::presented(proxy, target).await {
        Ok(chain) => judge.hear(chain).map_or_else(
            |e| Finding::problem(INTERCEPTED, format!("{target}: {e}")),
            |by| Finding::ok(INTERCEPTED, format!("{target}, by {by}")),
        ),
        Err(e) => Finding::problem(INTERCEPTED, format!("{target}: {e}")),
    });
}

/// Whether the target can be reached without the proxy.
async fn way_out(target: &Authority) -> Finding {
    const NO_OTHER_WAY: &str = "no other way out";
    match probe::direct(target).await {
        Ok(address) => Finding::problem(
            NO_OTHER_WAY,
            format!(
                "{target} was reached at {address} without the proxy, as any client can that ignores the variables; \
                 let the network leave workers no way but the proxy"
            ),
        ),
        Err(why) => Finding::ok(NO_OTHER_WAY, format!("{target} without the proxy: {why}")),
    }
}

/// Whether a program can be found in the folders of `path`.
fn is_on(path: &str, program: &str) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    let is_program = |folder: &str| {
        let file = fs::metadata(Path::new(folder).join(program));
        file.is_ok_and(|f| f.is_file() && f.permissions().mode() & 0o111 != 0)
    };
    path.split(':')
        .filter(|folder| !folder.is_empty())
        .any(is_program)
}

/// The name under which a certificate for the host is verified.
fn server_name(host: &Host) -> Option<rustls::pki_types::ServerName<'static>> {
    match host {
        Host::Name(name) => name.to_string().try_into().ok(),
        Host::Ip(ip) => Some((*ip).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_https_and_its_path_does_not_matter() {
        for (text, authority) in [
            (DEFAULT_URL, "lh3.googleusercontent.com:443"),
            ("https://Example.COM:8443/a?b", "example.com:8443"),
            ("https://[::1]:9/", "[::1]:9"),
        ] {
            assert_eq!(
                target(text).map(|t| t.to_string()),
                Ok(authority.to_owned())
            );
        }
        for text in [
            "http://a.test/",
            "a.test",
            "a.test:443",
            "https://",
            "",
            "https://u:p@a.test/",
        ] {
            assert!(target(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_program_is_what_can_be_executed_in_a_folder_of_the_path() {
        assert!(is_on("/nowhere::/bin", "sh"));
        assert!(!is_on("/nowhere:", "sh") && !is_on("", "sh"));
        assert!(!is_on("/etc", "passwd"));
    }
}

//! The operator's commands that a running replica carries out: asked of its admin listener, one request each.
//!
//! What the commands mean, the listener knows (`admin.rs`); this is a client of it, over clear-text HTTP, for it is meant
//! for loopback or a trusted network.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, anyhow, bail};
use bytes::Bytes;
use http::{
    HeaderValue, Method, Request, Uri,
    header::{AUTHORIZATION, HOST},
};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use tokio::net::TcpStream;

use crate::{
    cli::{At, Operate, Usage, status},
    config::{self, Environment, Secret},
    headers::PROXY_STATUS,
};

/// The whole of a request and its answer: a call to the store may be part of it.
const DEADLINE: Duration = Duration::from_secs(10);
/// Answers longer than this are nobody's we know.
const LONGEST_ANSWER: usize = 4 * 1024 * 1024;

/// The token of the admin listener that is asked; stronger than `admin.token`, for operators who have no file with it.
pub const TOKEN_VARIABLE: &str = "PACELINE_ADMIN_TOKEN";

/// A replica's admin listener, as it is reached.
#[derive(Clone, Debug)]
pub struct AdminListener {
    authority: String,
    token: Option<Secret>,
}

impl AdminListener {
    /// The one that was named, or else the one that `config` has; the token is that of the environment, or else of the
    /// configuration.
    ///
    /// # Errors
    /// The configuration leaves the port to the system ([`Usage`]).
    pub fn new(at: &At, config: &config::Admin, env: Environment<'_>) -> Result<Self> {
        let authority = match at.admin.as_ref().and_then(Uri::authority) {
            Some(authority) => authority.to_string(),
            None if config.listen.port() == 0 => {
                return Err(Usage(
                    "admin.listen leaves the port to the system; name it with --admin http://HOST:PORT".to_owned(),
                )
                .into());
            }
            None => {
                // Where it listens on all addresses, loopback is one of them, and the one that needs no token.
                let mut at = config.listen;
                match at.ip() {
                    IpAddr::V4(ip) if ip.is_unspecified() => at.set_ip([127, 0, 0, 1].into()),
                    IpAddr::V6(ip) if ip.is_unspecified() => {
                        at.set_ip(std::net::Ipv6Addr::LOCALHOST.into());
                    }
                    _ => {}
                }
                at.to_string()
            }
        };
        Ok(AdminListener {
            authority,
            token: env(TOKEN_VARIABLE)
                .filter(|token| !token.is_empty())
                .map(Secret::new)
                .or_else(|| config.token.clone()),
        })
    }

    /// Has the replica do what was typed; returns what is to be printed.
    ///
    /// # Errors
    /// What the replica says, or why it was not reached.
    pub async fn carry_out(&self, operate: &Operate) -> Result<String> {
        let coded = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
        let target = match operate {
            Operate::Status { json, .. } => {
                let text = self.ask(Method::GET, "/status").await?;
                return match json {
                    true => Ok(text),
                    false => self.table(&text),
                };
            }
            Operate::Unlock { destination, .. } => {
                format!("/unlock?destination={}", coded(destination))
            }
            Operate::Pause {
                destination,
                duration,
                ..
            } => {
                let span = coded(&humantime::format_duration(*duration).to_string());
                format!("/pause?destination={}&for={span}", coded(destination))
            }
            Operate::Resume { destination, .. } => {
                format!("/resume?destination={}", coded(destination))
            }
            Operate::Forget { replica, .. } => format!("/forget?replica={}", coded(replica)),
        };
        self.ask(Method::POST, &target).await
    }

    fn table(&self, text: &str) -> Result<String> {
        let at = &self.authority;
        let status = serde_json::from_str(text).map_err(|_| {
            anyhow!("{at} answers with something that is no status of paceline; check --admin")
        })?;
        Ok(status::table(&status))
    }

    /// Makes one request and returns the text of its answer.
    pub(super) async fn ask(&self, method: Method, target: &str) -> Result<String> {
        let at = &self.authority;
        tokio::time::timeout(DEADLINE, self.exchange(method, target))
            .await
            .map_err(|_| anyhow!("no answer from {at} in time; check that the replica runs"))?
    }

    async fn exchange(&self, method: Method, target: &str) -> Result<String> {
        let at = &self.authority;
        let stream = TcpStream::connect(at).await.with_context(|| {
            format!("cannot reach the admin listener at {at}; check --admin, or admin.listen in the file")
        })?;
        let (mut send, connection) = http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        let mut request = Request::builder()
            .method(method)
            .uri(target)
            .header(HOST, at)
            .body(Empty::<Bytes>::new())?;
        if let Some(token) = &self.token {
            let mut value =
                HeaderValue::from_str(&format!("Bearer {}", token.reveal())).map_err(|_| {
                    anyhow!("the admin token cannot stand in a header; use printable ASCII")
                })?;
            value.set_sensitive(true);
            request.headers_mut().insert(AUTHORIZATION, value);
        }
        let answer = send.send_request(request).await.with_context(|| {
            format!("{at} does not answer as an admin listener does; check --admin")
        })?;
        let status = answer.status();
        if answer.headers().contains_key(PROXY_STATUS) {
            bail!("{at} is the proxy's port; ask the admin listener, at admin.listen");
        }
        let body = Limited::new(answer.into_body(), LONGEST_ANSWER);
        let body = body.collect().await.map_err(|e| anyhow!(e))?.to_bytes();
        let text = String::from_utf8_lossy(&body).into_owned();
        if status.is_success() {
            Ok(text)
        } else {
            bail!("{}", text.trim_end())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listening(on: &str) -> config::Admin {
        config::Admin {
            listen: on.parse().expect("an address"),
            token: None,
        }
    }

    #[test]
    fn the_listener_is_found_by_url_or_by_configuration() {
        let found = |url: Option<&str>, on| {
            let at = At {
                admin: url.map(|url| url.parse().expect("a URL")),
            };
            AdminListener::new(&at, &listening(on), &|_| None).map(|l| l.authority)
        };
        assert_eq!(
            found(Some("http://db1:9128"), "127.0.0.1:1").unwrap(),
            "db1:9128"
        );
        assert_eq!(found(None, "10.0.0.1:9128").unwrap(), "10.0.0.1:9128");
        assert_eq!(found(None, "0.0.0.0:9128").unwrap(), "127.0.0.1:9128");
        assert_eq!(found(None, "[::]:9128").unwrap(), "[::1]:9128");
        let unknown = found(None, "127.0.0.1:0").expect_err("no port");
        assert!(unknown.is::<Usage>(), "{unknown}");
    }

    #[test]
    fn the_token_of_the_environment_is_stronger_and_an_empty_one_counts_as_none() {
        let mut config = listening("127.0.0.1:1");
        config.token = Some(Secret::new("file"));
        let token = |set: Option<&'static str>| {
            let env = move |name: &str| set.filter(|_| name == TOKEN_VARIABLE).map(str::to_owned);
            let listener = AdminListener::new(&At::default(), &config, &env).expect("an address");
            listener.token.map(|t| t.reveal().to_owned())
        };
        assert_eq!(token(None).as_deref(), Some("file"));
        assert_eq!(token(Some("")).as_deref(), Some("file"));
        assert_eq!(token(Some("env")).as_deref(), Some("env"));
    }
}

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

use crate::config;

/// The whole of a request and its answer: a call to the store may be part of it.
const DEADLINE: Duration = Duration::from_secs(10);
/// Answers longer than this are nobody's we know.
const LONGEST_ANSWER: usize = 4 * 1024 * 1024;

/// A replica's admin listener, as it is reached.
#[derive(Clone, Debug)]
pub struct AdminListener {
    authority: String,
    token: Option<config::Secret>,
}

impl AdminListener {
    /// The one at `url`, or else the one that `config` has; the token comes from the configuration either way.
    ///
    /// # Errors
    /// The URL is not `http://HOST:PORT`, or the configuration leaves the port to the system.
    pub fn new(url: Option<&str>, config: &config::Admin) -> Result<Self> {
        let authority = match url {
            Some(url) => {
                let uri: Uri = url
                    .parse()
                    .map_err(|_| anyhow!("--admin {url}: write it as http://HOST:PORT"))?;
                match (uri.scheme_str(), uri.authority()) {
                    (Some("http"), Some(authority)) => authority.to_string(),
                    _ => bail!("--admin {url}: write it as http://HOST:PORT"),
                }
            }
            None if config.listen.port() == 0 => {
                bail!("admin.listen leaves the port to the system; name it with --admin URL")
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
            token: config.token.clone(),
        })
    }

    /// `paceline forget REPLICA`: frees the number of a dead replica.
    ///
    /// # Errors
    /// What the replica says, or why it was not reached.
    pub async fn forget(&self, replica: &str) -> Result<String> {
        let replica = utf8_percent_encode(replica, NON_ALPHANUMERIC);
        self.ask(Method::POST, &format!("/forget?replica={replica}"))
            .await
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
                    anyhow!("admin.token cannot stand in a header; use printable ASCII")
                })?;
            value.set_sensitive(true);
            request.headers_mut().insert(AUTHORIZATION, value);
        }
        let answer = send.send_request(request).await?;
        let status = answer.status();
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
        let found = |url, on| AdminListener::new(url, &listening(on)).map(|l| l.authority);
        assert_eq!(
            found(Some("http://db1:9128"), "127.0.0.1:1").unwrap(),
            "db1:9128"
        );
        assert_eq!(found(None, "10.0.0.1:9128").unwrap(), "10.0.0.1:9128");
        assert_eq!(found(None, "0.0.0.0:9128").unwrap(), "127.0.0.1:9128");
        assert_eq!(found(None, "[::]:9128").unwrap(), "[::1]:9128");
        for url in ["https://db1:9128", "db1:9128", "http://", "not a url"] {
            assert!(found(Some(url), "127.0.0.1:1").is_err(), "{url}");
        }
        assert!(found(None, "127.0.0.1:0").is_err());
    }
}

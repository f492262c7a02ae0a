//! A proxy's URL as clients read it. Its credentials are kept, and never shown.

use std::fmt;

use percent_encoding::percent_decode_str;

use crate::{authority::Authority, config::Secret};

/// What is spoken to the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transport {
    Http,
    Https,
    /// SOCKS, or something else that paceline does not speak.
    Other,
}

/// A proxy's URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ProxyUrl {
    pub(super) transport: Transport,
    /// Host and port.
    pub(super) authority: Authority,
    /// `user:password`, decoded.
    pub(super) credentials: Option<Secret>,
    /// What some clients read otherwise than others; one line with what to change, empty if nothing.
    pub(super) quirk: &'static str,
}

impl ProxyUrl {
    /// Reads what a variable holds.
    pub(super) fn parse(text: &str) -> Result<ProxyUrl, &'static str> {
        const FORM: &str = "is no proxy's URL; write http://HOST:PORT";
        let (scheme, rest) = match text.split_once("://") {
            Some((scheme, rest)) => (Some(scheme.to_ascii_lowercase()), rest),
            None => (None, text),
        };
        let rest = rest.split(['/', '?', '#']).next().unwrap_or_default();
        // The last `@`: a password may hold one that was not encoded.
        let (user, place) = match rest.rsplit_once('@') {
            Some((user, place)) => (Some(user), place),
            None => (None, rest),
        };
        let transport = match scheme.as_deref() {
            Some("http") | None => Transport::Http,
            Some("https") => Transport::Https,
            Some(_) => Transport::Other,
        };
        let usual = match transport {
            Transport::Http => 80,
            Transport::Https => 443,
            Transport::Other => 1080,
        };
        let authority = Authority::parse(place, Some(usual)).map_err(|_| FORM)?;
        let password = user.map(|u| u.split_once(':').map_or("", |(_, p)| p));
        let quirk = if scheme.is_none() {
            "has no scheme, which httpx and Node refuse; write http://HOST:PORT"
        } else if Authority::parse(place, None).is_err() {
            "has no port: curl takes 1080 and others 80; write the port"
        } else if password == Some("") {
            "has a user without a password, which requests and Node do not send; give both"
        } else {
            ""
        };
        let credentials = user.map(|u| Secret::new(percent_decode_str(u).decode_utf8_lossy()));
        Ok(ProxyUrl {
            transport,
            authority,
            credentials,
            quirk,
        })
    }
}

impl fmt::Display for ProxyUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self.transport {
            Transport::Http => "http",
            Transport::Https => "https",
            Transport::Other => "?",
        };
        let user = if self.credentials.is_some() {
            "***@"
        } else {
            ""
        };
        write!(f, "{scheme}://{user}{}", self.authority)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_url_is_read_as_clients_read_it_and_shown_without_its_password() {
        for (text, shown, quirk) in [
            ("http://p.test:3128", "http://p.test:3128", ""),
            ("http://p.test:3128/", "http://p.test:3128", ""),
            ("HTTP://[::1]:3128", "http://[::1]:3128", ""),
            ("https://p.test", "https://p.test:443", "port"),
            ("http://p.test", "http://p.test:80", "port"),
            ("p.test:3128", "http://p.test:3128", "scheme"),
            ("http://u:p%40x@p.test:3128", "http://***@p.test:3128", ""),
            ("http://u:p@x@p.test:3128", "http://***@p.test:3128", ""),
            ("http://u@p.test:3128", "http://***@p.test:3128", "password"),
            (
                "http://u:@p.test:3128",
                "http://***@p.test:3128",
                "password",
            ),
            ("socks5h://p.test:1080", "?://p.test:1080", ""),
        ] {
            let url = ProxyUrl::parse(text).unwrap_or_else(|e| panic!("{text} {e}"));
            assert_eq!(url.to_string(), shown, "{text}");
            assert!(
                url.quirk.contains(quirk) && url.quirk.is_empty() == quirk.is_empty(),
                "{text}"
            );
        }
        let url = ProxyUrl::parse("http://u:p%40x@p.test:1").expect("a URL");
        assert_eq!(url.credentials.as_ref().map(Secret::reveal), Some("u:p@x"));
        assert!(!format!("{url:?}").contains("p@x"));
        for text in [
            "",
            "http://",
            "http://:80",
            "http://p.test:0",
            "http://p test:1",
            "http://p.test:x",
        ] {
            assert!(ProxyUrl::parse(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_answered(text in ".{0,40}|https?://[a-z@:.0-9%/]{0,30}") {
            let _ = ProxyUrl::parse(&text);
        }
    }
}

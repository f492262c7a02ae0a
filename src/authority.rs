//! Host and port: parsed and folded once, here and nowhere else.
//!
//! Policy, cursor, leaf, log and label all use the values made here, so that two spellings of one host can never be
//! two hosts. References: RFC 9110 section 7.2, RFC 3986 section 3.2.2, UTS 46. This file doesn't know DNS, and
//! doesn't judge whether a host may be reached.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use idna::uts46::{AsciiDenyList, DnsLength, Hyphens, Uts46};
use thiserror::Error;

mod pattern;

pub use pattern::{HostPattern, PatternError};

/// The longest name that DNS can carry, in bytes without the trailing dot (RFC 1035 section 2.3.4).
pub const MAX_NAME: usize = 253;

/// The longest label of a name, in bytes (RFC 1035 section 2.3.4).
pub const MAX_LABEL: usize = 63;

/// Text longer than this (bytes) is refused before IDNA looks at it; 253 code points of 4 bytes fit.
const MAX_TEXT: usize = 1024;

/// All ASCII but letters, digits, hyphen, dot and underscore. The underscore is no host name character (RFC 952), yet
/// real hosts have it.
const DENIED: AsciiDenyList = AsciiDenyList::new(true, "!\"#$%&'()*+,/:;<=>?@[\\]^`{|}~");

/// A host: a folded name, or an address.
///
/// A name is lower-case ASCII without a trailing dot, of 1 to 253 bytes, its labels of 1 to 63. An IPv4 address
/// mapped into IPv6 is held as the IPv4 address.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Host {
    /// A DNS name in A-label form.
    Name(Arc<str>),
    /// An address.
    Ip(IpAddr),
}

impl Host {
    /// Parses a name, an IPv4 address, or an IPv6 address with or without brackets.
    ///
    /// # Errors
    /// When the text is no host, or is an address in a form that programs read differently (`127.1`, `0x7f000001`).
    pub fn parse(text: &str) -> Result<Host, AuthorityError> {
        if let Some(rest) = text.strip_prefix('[') {
            return ipv6(rest.strip_suffix(']').ok_or(AuthorityError::Bracket)?);
        }
        if text.contains(':') {
            return ipv6(text);
        }
        name_or_ipv4(text)
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Host::Name(name) => f.write_str(name),
            Host::Ip(address) => address.fmt(f),
        }
    }
}

/// A host and a port: what a request is for (RFC 9110 section 7.2).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Authority {
    /// The host, folded.
    pub host: Host,
    /// The port, never 0.
    pub port: u16,
}

impl Authority {
    /// Parses `host:port`, `[v6]:port` or, where there is a default port, the host alone.
    ///
    /// An IPv6 address needs its brackets here: `::1:443` could be two things.
    ///
    /// # Errors
    /// When the host or the port is malformed, or when there is neither a port nor a default.
    pub fn parse(text: &str, default_port: Option<u16>) -> Result<Authority, AuthorityError> {
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (address, rest) = rest.split_once(']').ok_or(AuthorityError::Bracket)?;
                let port = match rest {
                    "" => None,
                    _ => Some(rest.strip_prefix(':').ok_or(AuthorityError::Bracket)?),
                };
                (ipv6(address)?, port)
            }
            None => match text.split_once(':') {
                // The `:` in `user:password@host` would otherwise be reported as a bad port.
                Some(_) if text.contains('@') => return Err(AuthorityError::UserInfo),
                Some((host, port)) => (name_or_ipv4(host)?, Some(port)),
                None => (name_or_ipv4(text)?, None),
            },
        };
        let port = match port {
            Some(text) => parse_port(text)?,
            None => default_port.ok_or(AuthorityError::MissingPort)?,
        };
        Ok(Authority { host, port })
    }
}

impl fmt::Display for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Ip(IpAddr::V6(address)) => write!(f, "[{address}]:{}", self.port),
            host => write!(f, "{host}:{}", self.port),
        }
    }
}

/// Why a text is no authority. The messages hold nothing of the text but, escaped, one character.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum AuthorityError {
    /// No host at all.
    #[error("the host is empty; name one")]
    Empty,
    /// More than 253 bytes.
    #[error("the host name is longer than 253 bytes; shorten it")]
    TooLong,
    /// A label that is empty or has more than 63 bytes.
    #[error(
        "a label of the host name is empty or longer than 63 bytes; write labels of 1 to 63 bytes between single dots"
    )]
    Label,
    /// A character that no host name has.
    #[error(
        "the character {0:?} can't be in a host name; use letters, digits, hyphens, dots and underscores"
    )]
    Character(char),
    /// A `*`.
    #[error("'*' is no host; name one host")]
    Wildcard,
    /// A `user@`, which RFC 9110 section 4.2.4 forbids here.
    #[error("credentials before '@' aren't allowed here; write host:port")]
    UserInfo,
    /// Percent-encoding or a zone id.
    #[error("'%' can't be in a host; write it decoded, and an IPv6 address without its zone")]
    Percent,
    /// A name that would be read as an address by some programs and as another address, or a name, by others.
    #[error(
        "a host that ends in a number must be an IPv4 address; write four decimal parts such as 192.0.2.1"
    )]
    Number,
    /// Brackets that don't hold an IPv6 address, or aren't closed.
    #[error("brackets are for a whole IPv6 address alone; write [2001:db8::1]:443")]
    Bracket,
    /// Not an IPv6 address.
    #[error("this is no IPv6 address; write one such as [2001:db8::1], or host:port")]
    Address,
    /// A name that UTS 46 refuses, or punycode that isn't what an encoder would have written.
    #[error("this is no valid internationalised name; write its A-label form (xn--...)")]
    Idna,
    /// No port and no default.
    #[error("missing port; write host:port")]
    MissingPort,
    /// A port that isn't a plain number from 1 to 65535.
    #[error("the port is no number from 1 to 65535; write it without sign or leading zeros")]
    Port,
}

fn ipv6(text: &str) -> Result<Host, AuthorityError> {
    if text.contains('%') {
        return Err(AuthorityError::Percent);
    }
    let address: Ipv6Addr = text.parse().map_err(|_| AuthorityError::Address)?;
    Ok(Host::Ip(IpAddr::V6(address).to_canonical()))
}

fn name_or_ipv4(text: &str) -> Result<Host, AuthorityError> {
    // The usual case, on the path of each request: nothing to fold, so nothing is allocated but the result. Punycode
    // always takes the long way, because `xn--` before plain ASCII is a second spelling of that ASCII.
    if is_folded(text) && !text.contains("xn--") {
        return folded(text);
    }
    if text.len() > MAX_TEXT {
        return Err(AuthorityError::TooLong);
    }
    if let Some(c) = text.chars().find(|c| c.is_ascii() && !is_host_ascii(*c)) {
        return Err(match c {
            '*' => AuthorityError::Wildcard,
            '@' => AuthorityError::UserInfo,
            '%' => AuthorityError::Percent,
            '[' | ']' => AuthorityError::Bracket,
            c => AuthorityError::Character(c),
        });
    }
    // Hyphens at odd places are allowed: names such as `r3---sn-4g5e.example` are in use.
    let ascii = Uts46::new()
        .to_ascii(text.as_bytes(), DENIED, Hyphens::Allow, DnsLength::Ignore)
        .map_err(|_| AuthorityError::Idna)?;
    if !is_folded(&ascii) {
        return Err(AuthorityError::Idna);
    }
    folded(&ascii)
}

/// The checks that follow folding, since folding can produce dots (from `。`) and digits (from `１`).
fn folded(text: &str) -> Result<Host, AuthorityError> {
    let text = text.strip_suffix('.').unwrap_or(text);
    if text.is_empty() {
        return Err(AuthorityError::Empty);
    }
    if text.len() > MAX_NAME {
        return Err(AuthorityError::TooLong);
    }
    let mut last = text;
    for label in text.split('.') {
        if label.is_empty() || label.len() > MAX_LABEL {
            return Err(AuthorityError::Label);
        }
        last = label;
    }
    if is_number(last) {
        // `Ipv4Addr` takes exactly four decimal parts without leading zeros; `0177.0.0.1` and `127.1` aren't that.
        let address: Ipv4Addr = text.parse().map_err(|_| AuthorityError::Number)?;
        return Ok(Host::Ip(IpAddr::V4(address)));
    }
    Ok(Host::Name(Arc::from(text)))
}

/// Whether `inet_aton` would take the label for a part of an address.
fn is_number(label: &str) -> bool {
    match label.strip_prefix("0x") {
        Some(hex) => hex.bytes().all(|b| b.is_ascii_hexdigit()),
        None => label.bytes().all(|b| b.is_ascii_digit()),
    }
}

fn is_folded(text: &str) -> bool {
    text.bytes()
        .all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.'))
}

fn is_host_ascii(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.')
}

fn parse_port(text: &str) -> Result<u16, AuthorityError> {
    let digits = text.bytes().all(|b| b.is_ascii_digit());
    if !digits || text.len() > 5 || text.starts_with('0') {
        return Err(AuthorityError::Port);
    }
    text.parse().map_err(|_| AuthorityError::Port)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn host(text: &str) -> Host {
        Host::parse(text).unwrap_or_else(|e| panic!("{text:?}: {e}"))
    }

    fn name(text: &str) -> Host {
        Host::Name(Arc::from(text))
    }

    #[test]
    fn spellings_of_one_host_are_one_host() {
        for text in [
            "gov.test",
            "gov.test.",
            "GOV.Test",
            "Gov.TEST.",
            "gov。test",
            "ｇｏｖ.test",
        ] {
            assert_eq!(host(text), name("gov.test"), "{text}");
        }
        for text in [
            "bücher.example",
            "BÜCHER.example",
            "xn--bcher-kva.example",
            "XN--BCHER-KVA.EXAMPLE.",
        ] {
            assert_eq!(host(text), name("xn--bcher-kva.example"), "{text}");
        }
    }

    #[test]
    fn addresses_have_one_form() {
        let loopback: IpAddr = "127.0.0.1".parse().unwrap();
        for text in [
            "127.0.0.1",
            "127.0.0.1.",
            "[::ffff:127.0.0.1]",
            "::ffff:7f00:1",
            "１２７.0.0.1",
        ] {
            assert_eq!(host(text), Host::Ip(loopback), "{text}");
        }
        assert_eq!(host("[0:0:0:0:0:0:0:1]"), host("::1"));
        assert_eq!(host("[2001:DB8::A]").to_string(), "2001:db8::a");
    }

    #[test]
    fn addresses_in_doubtful_forms_are_refused() {
        for text in [
            "2130706433",
            "127.1",
            "0x7f000001",
            "0x7f.0.0.1",
            "0177.0.0.1",
            "017700000001",
            "0",
            "0x",
            "1.2.3.4.5",
            "256.1.1.1",
            "a.0x7F",
            "1.2.3.08",
            "gov.test.1",
            "127.0.0.1。1",
        ] {
            assert_eq!(Host::parse(text), Err(AuthorityError::Number), "{text}");
        }
    }

    #[test]
    fn what_is_no_host_is_refused() {
        let label = format!("{}.test", "a".repeat(64));
        for (text, error) in [
            ("", AuthorityError::Empty),
            (".", AuthorityError::Empty),
            ("..", AuthorityError::Label),
            ("gov.test..", AuthorityError::Label),
            (".gov.test", AuthorityError::Label),
            ("gov..test", AuthorityError::Label),
            (label.as_str(), AuthorityError::Label),
            ("*", AuthorityError::Wildcard),
            ("*.gov.test", AuthorityError::Wildcard),
            ("u@gov.test", AuthorityError::UserInfo),
            ("gov%2etest", AuthorityError::Percent),
            ("gov.test%00", AuthorityError::Percent),
            ("[fe80::1%25eth0]", AuthorityError::Percent),
            ("fe80::1%eth0", AuthorityError::Percent),
            ("gov.test\0.evil.test", AuthorityError::Character('\0')),
            ("gov test", AuthorityError::Character(' ')),
            ("gov\ttest", AuthorityError::Character('\t')),
            ("gov.test/x", AuthorityError::Character('/')),
            ("gov.test#e", AuthorityError::Character('#')),
            ("gov.test?e", AuthorityError::Character('?')),
            ("gov\\test", AuthorityError::Character('\\')),
            ("gov\"test", AuthorityError::Character('"')),
            ("g$v.test", AuthorityError::Character('$')),
            ("[gov.test]", AuthorityError::Address),
            ("[[::1]]", AuthorityError::Address),
            ("[::1", AuthorityError::Bracket),
            ("::1]", AuthorityError::Address),
            ("https://gov.test", AuthorityError::Address),
            ("xn--abc-", AuthorityError::Idna),
            ("xn--gov-.test", AuthorityError::Idna),
            ("xn--.test", AuthorityError::Idna),
            ("gov\u{ad}\u{200d}.test", AuthorityError::Idna),
        ] {
            assert_eq!(Host::parse(text), Err(error), "{text:?}");
        }
        let long = vec!["a".repeat(50); 6].join(".");
        assert_eq!(Host::parse(&long), Err(AuthorityError::TooLong));
        assert_eq!(
            Host::parse(&"ü".repeat(2_000)),
            Err(AuthorityError::TooLong)
        );
    }

    #[test]
    fn names_at_the_limits_are_accepted() {
        let longest = [63, 63, 63, 61].map(|n| "a".repeat(n)).join(".");
        assert_eq!(longest.len(), MAX_NAME);
        assert_eq!(host(&longest), name(&longest));
        assert_eq!(host(&format!("{longest}.")), name(&longest));
        for text in [
            "localhost",
            "a_b.test",
            "_dmarc.test",
            "r3---sn-4g5e.test",
            "3com.com",
            "0xfg",
            "-a.test",
        ] {
            assert_eq!(host(text), name(text), "{text}");
        }
    }

    #[test]
    fn an_authority_has_a_host_and_a_plain_port() {
        let parsed = Authority::parse("GOV.test.:443", None).unwrap();
        assert_eq!((parsed.host.clone(), parsed.port), (name("gov.test"), 443));
        assert_eq!(parsed.to_string(), "gov.test:443");
        assert_eq!(Authority::parse("gov.test", Some(443)), Ok(parsed));
        assert_eq!(
            Authority::parse("[::1]:80", None).unwrap().to_string(),
            "[::1]:80"
        );
        assert_eq!(
            Authority::parse("[::1]", Some(80)).unwrap().to_string(),
            "[::1]:80"
        );
        assert_eq!(
            Authority::parse("[::ffff:8.8.8.8]:1", None)
                .unwrap()
                .to_string(),
            "8.8.8.8:1"
        );
    }

    #[test]
    fn malformed_authorities_are_refused_whatever_the_default_port() {
        for (text, error) in [
            ("", AuthorityError::Empty),
            (":443", AuthorityError::Empty),
            ("::1:443", AuthorityError::Empty),
            ("gov.test:", AuthorityError::Port),
            ("gov.test:0", AuthorityError::Port),
            ("gov.test:65536", AuthorityError::Port),
            ("gov.test:99999", AuthorityError::Port),
            ("gov.test:100000", AuthorityError::Port),
            ("gov.test:-1", AuthorityError::Port),
            ("gov.test:+443", AuthorityError::Port),
            ("gov.test:0x1bb", AuthorityError::Port),
            ("gov.test:443 ", AuthorityError::Port),
            ("gov.test:https", AuthorityError::Port),
            ("gov.test:00443", AuthorityError::Port),
            ("gov.test:443/x", AuthorityError::Port),
            ("gov.test:４４３", AuthorityError::Port),
            ("a:b:443", AuthorityError::Port),
            ("https://gov.test:443", AuthorityError::Port),
            ("u:p@gov.test:443", AuthorityError::UserInfo),
            ("gov.test:443@evil.test:443", AuthorityError::UserInfo),
            ("u@gov.test", AuthorityError::UserInfo),
            ("*:443", AuthorityError::Wildcard),
            ("[gov.test]:443", AuthorityError::Address),
            ("[[::1]]:443", AuthorityError::Bracket),
            ("[::1", AuthorityError::Bracket),
            ("[::1]443", AuthorityError::Bracket),
            ("[127.0.0.1]:443", AuthorityError::Address),
            ("127.1:443", AuthorityError::Number),
        ] {
            assert_eq!(Authority::parse(text, None), Err(error), "{text:?}");
            assert_eq!(Authority::parse(text, Some(443)), Err(error), "{text:?}");
        }
        assert_eq!(
            Authority::parse("gov.test", None),
            Err(AuthorityError::MissingPort)
        );
        assert_eq!(
            Authority::parse("[::1]", None),
            Err(AuthorityError::MissingPort)
        );
    }

    #[test]
    fn messages_are_one_line_that_says_what_to_change() {
        for error in [
            AuthorityError::Empty,
            AuthorityError::TooLong,
            AuthorityError::Label,
            AuthorityError::Character('\n'),
            AuthorityError::Wildcard,
            AuthorityError::UserInfo,
            AuthorityError::Percent,
            AuthorityError::Number,
            AuthorityError::Bracket,
            AuthorityError::Address,
            AuthorityError::Idna,
            AuthorityError::MissingPort,
            AuthorityError::Port,
        ] {
            let message = error.to_string();
            assert!(
                message.contains("; ") && !message.contains('\n'),
                "{message}"
            );
        }
    }

    fn any_host() -> impl Strategy<Value = Host> {
        prop_oneof![
            "[a-z0-9_-]{1,12}(\\.[a-z0-9_-]{1,12}){0,4}\\.[a-z]{1,8}"
                .prop_filter_map("no host", |text| Host::parse(&text).ok()),
            "\\PC{1,6}\\.test".prop_filter_map("no host", |text| Host::parse(&text).ok()),
            any::<IpAddr>().prop_map(|a| Host::Ip(a.to_canonical())),
        ]
    }

    proptest! {
        #[test]
        fn what_is_printed_parses_to_itself(host in any_host(), port in 1..=u16::MAX) {
            prop_assert_eq!(Host::parse(&host.to_string()), Ok(host.clone()));
            let authority = Authority { host, port };
            prop_assert_eq!(Authority::parse(&authority.to_string(), None), Ok(authority));
        }

        #[test]
        fn case_and_one_trailing_dot_make_no_difference(host in any_host(), upper in any::<u64>()) {
            let text: String = host
                .to_string()
                .chars()
                .enumerate()
                .map(|(i, c)| if upper >> (i % 64) & 1 == 1 { c.to_ascii_uppercase() } else { c })
                .collect();
            prop_assert_eq!(Host::parse(&text), Ok(host.clone()));
            if !text.contains(':') {
                prop_assert_eq!(Host::parse(&format!("{text}.")), Ok(host));
            }
        }

        #[test]
        fn any_text_is_answered_and_folding_is_idempotent(text in "\\PC{0,40}|[ -~]{0,80}|.{0,300}") {
            if let Ok(host) = Host::parse(&text) {
                prop_assert_eq!(Host::parse(&host.to_string()), Ok(host));
            }
            if let Ok(authority) = Authority::parse(&text, Some(443)) {
                prop_assert_eq!(Authority::parse(&authority.to_string(), None), Ok(authority));
            }
        }

        #[test]
        fn punycode_never_hides_plain_ascii(text in "xn--[a-z0-9-]{0,20}") {
            if let Ok(Host::Name(name)) = Host::parse(&text) {
                let (unicode, result) = idna::domain_to_unicode(&name);
                prop_assert!(result.is_ok());
                prop_assert!(!unicode.is_ascii(), "{} is {}", name, unicode);
            }
        }
    }
}

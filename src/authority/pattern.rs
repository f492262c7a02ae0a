//! Host patterns: what the operator writes to say which hosts a destination governs.
//!
//! Only two shapes, so that overlap is decidable and a CA can be constrained to the same set: one host, or all names
//! below one. Doesn't know destinations.

use std::{fmt, str::FromStr};

use thiserror::Error;

use super::{AuthorityError, Host};

/// One host (`example.com`, `192.0.2.1`), or every name below one (`*.example.com`, at any depth, but not
/// `example.com` itself).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HostPattern {
    base: Host,
    subdomains: bool,
}

impl HostPattern {
    /// Whether the pattern governs the host.
    pub fn matches(&self, host: &Host) -> bool {
        if !self.subdomains {
            return self.base == *host;
        }
        let (Host::Name(base), Host::Name(name)) = (&self.base, host) else {
            return false;
        };
        name.strip_suffix(&**base)
            .is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'))
    }

    /// Whether some host matches both patterns.
    pub fn overlaps(&self, other: &HostPattern) -> bool {
        match (self.subdomains, other.subdomains) {
            (_, false) => self.matches(&other.base),
            (false, true) => other.matches(&self.base),
            (true, true) => self == other || self.matches(&other.base) || other.matches(&self.base),
        }
    }

    /// The name without its `*.`, or the address: the base of a CA's name constraint (RFC 5280 section 4.2.1.10,
    /// where a permitted name permits the names below it too).
    pub fn as_constraint_base(&self) -> &Host {
        &self.base
    }
}

impl FromStr for HostPattern {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<Self, PatternError> {
        let (rest, subdomains) = match text.strip_prefix("*.") {
            Some(rest) => (rest, true),
            None => (text, false),
        };
        let base = match Host::parse(rest) {
            Ok(base) => base,
            Err(AuthorityError::Wildcard) => return Err(PatternError::Wildcard),
            Err(_) if rest.contains('*') => return Err(PatternError::Wildcard),
            Err(_) if rest.contains('/') => return Err(PatternError::Path),
            Err(AuthorityError::Address) => return Err(PatternError::Port),
            Err(error) => return Err(PatternError::Host(error)),
        };
        match base {
            Host::Ip(_) if subdomains => Err(PatternError::WildcardAddress),
            base => Ok(HostPattern { base, subdomains }),
        }
    }
}

impl fmt::Display for HostPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.subdomains {
            f.write_str("*.")?;
        }
        self.base.fmt(f)
    }
}

/// Why a text is no host pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PatternError {
    /// A `*` that isn't the whole first label, or stands alone.
    #[error("'*' may only be the first label, before a name; write \"*.example.com\"")]
    Wildcard,
    /// `*.192.0.2.1`
    #[error("an address has no subdomains; write it without \"*.\"")]
    WildcardAddress,
    /// A scheme or a path.
    #[error("a host pattern has no scheme and no path; write the host alone")]
    Path,
    /// A port.
    #[error(
        "a host pattern has no port; write the host alone (ports are limited by proxy.connect_ports)"
    )]
    Port,
    /// The host itself is malformed.
    #[error(transparent)]
    Host(AuthorityError),
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pattern(text: &str) -> HostPattern {
        text.parse().unwrap_or_else(|e| panic!("{text:?}: {e}"))
    }

    fn matches(pattern_text: &str, host: &str) -> bool {
        pattern(pattern_text).matches(&Host::parse(host).expect("a host"))
    }

    #[test]
    fn a_name_matches_itself_alone() {
        assert!(matches("Example.com.", "EXAMPLE.com"));
        assert!(!matches("example.com", "a.example.com"));
        assert!(!matches("example.com", "example.com.evil.test"));
    }

    #[test]
    fn a_wildcard_matches_any_depth_but_not_the_bare_name() {
        assert!(matches("*.example.com", "a.example.com"));
        assert!(matches("*.example.com", "c.b.A.example.com."));
        assert!(!matches("*.example.com", "example.com"));
        assert!(!matches("*.example.com", "badexample.com"));
        assert!(!matches("*.example.com", "a.example.com.evil.test"));
        assert!(!matches("*.com", "192.0.2.1"));
    }

    #[test]
    fn an_address_matches_all_its_spellings() {
        assert!(matches("192.0.2.1", "[::ffff:192.0.2.1]"));
        assert!(matches("[2001:db8::1]", "2001:DB8:0::1"));
        assert!(!matches("192.0.2.1", "192.0.2.2"));
    }

    #[test]
    fn other_shapes_are_refused_with_a_reason() {
        for (text, error) in [
            ("*", PatternError::Wildcard),
            ("*.*.example.com", PatternError::Wildcard),
            ("a.*.example.com", PatternError::Wildcard),
            ("*example.com", PatternError::Wildcard),
            ("a*.example.com", PatternError::Wildcard),
            ("*:443", PatternError::Wildcard),
            ("*.192.0.2.1", PatternError::WildcardAddress),
            ("*.[2001:db8::1]", PatternError::WildcardAddress),
            ("https://example.com", PatternError::Path),
            ("example.com/x", PatternError::Path),
            ("10.0.0.0/8", PatternError::Path),
            ("example.com:443", PatternError::Port),
            ("*.", PatternError::Host(AuthorityError::Empty)),
            ("", PatternError::Host(AuthorityError::Empty)),
            (".example.com", PatternError::Host(AuthorityError::Label)),
            ("127.1", PatternError::Host(AuthorityError::Number)),
        ] {
            assert_eq!(text.parse::<HostPattern>(), Err(error), "{text:?}");
        }
    }

    #[test]
    fn overlap_is_seen_in_both_directions() {
        for (a, b, overlap) in [
            ("example.com", "example.com", true),
            ("*.example.com", "*.example.com", true),
            ("*.example.com", "a.example.com", true),
            ("*.example.com", "*.a.example.com", true),
            ("*.example.com", "example.com", false),
            ("*.a.example.com", "*.b.example.com", false),
            ("*.example.com", "192.0.2.1", false),
        ] {
            assert_eq!(pattern(a).overlaps(&pattern(b)), overlap, "{a} {b}");
            assert_eq!(pattern(b).overlaps(&pattern(a)), overlap, "{b} {a}");
        }
    }

    #[test]
    fn the_constraint_base_is_the_name_or_address() {
        assert_eq!(
            pattern("*.example.com").as_constraint_base().to_string(),
            "example.com"
        );
        assert_eq!(pattern("[::1]").as_constraint_base().to_string(), "::1");
    }

    proptest! {
        #[test]
        fn what_is_printed_parses_to_itself(text in "(\\*\\.)?[a-zA-Z0-9.-]{1,30}|\\PC{0,30}") {
            if let Ok(pattern) = text.parse::<HostPattern>() {
                prop_assert_eq!(pattern.to_string().parse(), Ok(pattern));
            }
        }

        #[test]
        fn patterns_that_match_one_host_overlap(
            a in "(\\*\\.)?([ab]\\.){0,2}test", b in "(\\*\\.)?([ab]\\.){0,2}test", host in "([ab]\\.){0,3}test",
        ) {
            let (a, b) = (pattern(&a), pattern(&b));
            let host = Host::parse(&host).expect("a host");
            if a.matches(&host) && b.matches(&host) {
                prop_assert!(a.overlaps(&b));
            }
        }
    }
}

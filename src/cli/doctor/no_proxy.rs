//! `NO_PROXY` as it is read: by some as suffixes, by others as labels, ranges or patterns. Pure.
//!
//! A host counts as excepted if any client would take it so: that one goes round the proxy.

use ipnet::IpNet;

use crate::authority::{Authority, Host};

/// The entry that excepts the target for some client, if there is one.
pub(super) fn excepting<'t>(list: &'t str, target: &Authority) -> Option<&'t str> {
    // Blanks separate for some clients, and are part of the name for others.
    let entries = list
        .split([',', ' ', '\t'])
        .filter(|entry| !entry.is_empty());
    entries.into_iter().find(|entry| excepts(entry, target))
}

/// What not all clients understand, in one line.
pub(super) fn oddity(list: &str) -> Option<&'static str> {
    let mut entries = list.split(',');
    if list.contains(char::is_whitespace) {
        Some("has blanks, which become part of a name for some clients; separate by commas alone")
    } else if list.contains('*') {
        Some(
            "has a *, which some clients take by the letter; write the plain domain, which covers what is below it",
        )
    } else if entries.any(|entry| entry.contains('/')) {
        Some("has a range, which many clients do not understand; write single addresses")
    } else {
        None
    }
}

fn excepts(entry: &str, target: &Authority) -> bool {
    if entry == "*" {
        return true;
    }
    if let (Host::Ip(ip), Ok(net)) = (&target.host, entry.parse::<IpNet>()) {
        return net.contains(ip);
    }
    let (name, port) = match Host::parse(entry) {
        Ok(_) => (entry, None),
        Err(_) => match entry.rsplit_once(':') {
            Some((name, port)) => (name, port.parse::<u16>().ok()),
            None => (entry, None),
        },
    };
    if port.is_some_and(|port| port != target.port) {
        return false;
    }
    let name = name.trim_start_matches('*').trim_start_matches('.');
    match (Host::parse(name), &target.host) {
        (Ok(Host::Ip(entry)), Host::Ip(ip)) => entry == *ip,
        (Ok(Host::Name(entry)), Host::Name(host)) => {
            let above = host.strip_suffix(&*entry);
            above.is_some_and(|above| above.is_empty() || above.ends_with('.'))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(text: &str) -> Authority {
        Authority::parse(text, Some(443)).expect("an authority")
    }

    #[test]
    fn a_host_is_excepted_if_any_client_takes_it_so() {
        for list in [
            "*",
            "a.b.test",
            ".b.test",
            "b.test",
            "*.b.test",
            "B.Test",
            "x,b.test",
            "x, b.test",
            "b.test:443",
            "test",
        ] {
            assert!(excepting(list, &target("a.b.test")).is_some(), "{list}");
        }
        for list in [
            "",
            "localhost,127.0.0.1,::1",
            "xb.test",
            "c.b.test",
            "b.test:80",
            "b.test.",
            "10.0.0.0/8",
        ] {
            let found = excepting(list, &target("a.xb.testing"));
            assert_eq!(found, None, "{list}");
        }
        assert_eq!(excepting("b.test:80", &target("a.b.test")), None);
        assert_eq!(excepting("xb.test", &target("a.b.test")), None);
    }

    #[test]
    fn addresses_are_excepted_by_themselves_or_in_ranges() {
        for (list, host, is) in [
            ("10.0.0.0/8", "10.1.2.3", true),
            ("10.0.0.0/8", "11.1.2.3", false),
            ("::1", "[::1]", true),
            ("[::1]", "[::1]:9", true),
            ("127.0.0.1", "127.0.0.1", true),
            ("127.0.0.1", "127.0.0.2", false),
        ] {
            assert_eq!(
                excepting(list, &target(host)).is_some(),
                is,
                "{list} {host}"
            );
        }
    }

    #[test]
    fn what_not_all_understand_is_told() {
        assert_eq!(oddity("localhost,127.0.0.1,::1"), None);
        for (list, word) in [("a, b", "blanks"), ("*.a", "*"), ("10.0.0.0/8", "range")] {
            assert!(oddity(list).is_some_and(|o| o.contains(word)), "{list}");
        }
    }
}

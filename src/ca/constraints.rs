//! Name constraints (RFC 5280 section 4.2.1.10): which hosts an issuer may sign for, written and read.
//!
//! Pure: from a list of hosts to the extension's content, and from a parsed extension to an answer.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use rcgen::{CidrSubnet, GeneralSubtree, NameConstraints};
use x509_parser::{certificate::X509Certificate, extensions::GeneralName};

use crate::authority::{Host, HostPattern};

/// A name that RFC 2606 keeps from ever existing. To permit it alone is to permit no DNS name: an empty list would
/// permit all of them, and Java refuses to parse the empty base that would exclude them all.
const NO_NAME: &str = "invalid";

/// Addresses that no host has, used in the same way; their first four bytes differ from those of every host of either
/// family, for Java's sake (see below).
const NO_V4: IpAddr = IpAddr::V4(Ipv4Addr::BROADCAST);
const NO_V6: IpAddr = IpAddr::V6(Ipv6Addr::from_bits(u128::MAX));

/// What an issuer is asked to sign for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Constraints {
    /// Any name and address.
    Unconstrained,
    /// These names with all of their subdomains, and these addresses.
    ///
    /// Name constraints cannot tell a name from its subdomains, so a pattern such as `*.example.com` and the bare
    /// `example.com` both ask for `example.com`.
    Hosts(Vec<Host>),
}

impl Constraints {
    /// Constraints that permit what these patterns match (and, for the reason above, a little more).
    pub fn permitting<'a>(patterns: impl IntoIterator<Item = &'a HostPattern>) -> Constraints {
        Constraints::Hosts(
            patterns
                .into_iter()
                .map(|pattern| pattern.as_constraint_base().clone())
                .collect(),
        )
    }

    /// The extension's content; `None` when there is to be no extension.
    pub(super) fn to_extension(&self) -> Option<NameConstraints> {
        let Constraints::Hosts(hosts) = self else {
            return None;
        };
        let mut hosts: Vec<&Host> = hosts.iter().collect();
        hosts.sort();
        hosts.dedup();

        let mut permitted: Vec<GeneralSubtree> = hosts.iter().map(|host| subtree(host)).collect();
        if !hosts.iter().any(|host| matches!(host, Host::Name(_))) {
            permitted.push(GeneralSubtree::DnsName(NO_NAME.into()));
        }

        // A kind of name that no subtree mentions is unrestricted. Both families of addresses are one kind, but
        // verifiers differ in whether a list of one family restricts the other, so the other is never left out.
        // To exclude all of it would be clearer, but Java compares an IPv4 address with an IPv6 range byte by byte,
        // and so fails on the address that is permitted.
        let any_v4 = hosts
            .iter()
            .any(|host| matches!(host, Host::Ip(IpAddr::V4(_))));
        let any_v6 = hosts
            .iter()
            .any(|host| matches!(host, Host::Ip(IpAddr::V6(_))));
        let mut excluded = Vec::new();
        match (any_v4, any_v6) {
            (false, false) => excluded.extend([
                GeneralSubtree::IpAddress(CidrSubnet::V4([0; 4], [0; 4])),
                GeneralSubtree::IpAddress(CidrSubnet::V6([0; 16], [0; 16])),
            ]),
            (false, true) => permitted.push(permitted_address(NO_V4)),
            (true, false) => permitted.push(permitted_address(NO_V6)),
            (true, true) => {}
        }
        Some(NameConstraints {
            permitted_subtrees: permitted,
            excluded_subtrees: excluded,
        })
    }
}

fn subtree(host: &Host) -> GeneralSubtree {
    match host {
        Host::Name(name) => GeneralSubtree::DnsName(name.to_string()),
        Host::Ip(address) => permitted_address(*address),
    }
}

fn permitted_address(address: IpAddr) -> GeneralSubtree {
    GeneralSubtree::IpAddress(match address {
        IpAddr::V4(address) => CidrSubnet::V4(address.octets(), [0xff; 4]),
        IpAddr::V6(address) => CidrSubnet::V6(address.octets(), [0xff; 16]),
    })
}

/// What a certificate's name constraints permit. Its `Display` puts them in words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NameRules {
    permitted: Vec<Subtree>,
    excluded: Vec<Subtree>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Subtree {
    /// A base name, lower case, without a leading dot; with `below_only`, it was written with one.
    Name { base: String, below_only: bool },
    /// A range of addresses
    Net(IpNet),
    /// A kind of name that no leaf of ours has
    Other,
}

impl NameRules {
    /// Reads the extension; no extension permits all. `None` if it holds something that we would misjudge.
    pub(super) fn read(certificate: &X509Certificate<'_>) -> Option<NameRules> {
        let Some(extension) = certificate.name_constraints().ok()? else {
            return Some(NameRules::default());
        };
        let read = |subtrees: &Option<Vec<x509_parser::extensions::GeneralSubtree<'_>>>| -> Option<Vec<Subtree>> {
            subtrees.iter().flatten().map(|subtree| Subtree::read(&subtree.base)).collect()
        };
        Some(NameRules {
            permitted: read(&extension.value.permitted_subtrees)?,
            excluded: read(&extension.value.excluded_subtrees)?,
        })
    }

    /// Whether a leaf for this host stands up to the constraints.
    pub fn permit(&self, host: &Host) -> bool {
        let same_kind = |subtree: &&Subtree| {
            matches!(
                (subtree, host),
                (Subtree::Name { .. }, Host::Name(_)) | (Subtree::Net(_), Host::Ip(_))
            )
        };
        let mut permitted = self.permitted.iter().filter(same_kind).peekable();
        let allowed = permitted.peek().is_none() || permitted.any(|subtree| subtree.contains(host));
        allowed && !self.excluded.iter().any(|subtree| subtree.contains(host))
    }

    /// Whether everything that is asked for is permitted.
    pub fn cover(&self, constraints: &Constraints) -> bool {
        match constraints {
            Constraints::Unconstrained => self.is_empty(),
            Constraints::Hosts(hosts) => hosts.iter().all(|host| self.permit(host)),
        }
    }

    /// Whether any name is permitted.
    pub fn is_empty(&self) -> bool {
        self.permitted.is_empty() && self.excluded.is_empty()
    }
}

impl fmt::Display for NameRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("none: it may sign for any name and address");
        }
        let names: Vec<String> = self
            .permitted
            .iter()
            .filter_map(|subtree| match subtree {
                Subtree::Name { base, .. } if base == NO_NAME => None,
                Subtree::Name {
                    base,
                    below_only: true,
                } => Some(format!("subdomains of {base}")),
                Subtree::Name { base, .. } => Some(format!("{base} and its subdomains")),
                Subtree::Net(net) if [NO_V4, NO_V6].contains(&net.addr()) => None,
                Subtree::Net(net) if net.prefix_len() == net.max_prefix_len() => {
                    Some(net.addr().to_string())
                }
                Subtree::Net(net) => Some(net.to_string()),
                Subtree::Other => None,
            })
            .collect();
        let excluded: Vec<String> = self
            .excluded
            .iter()
            .filter_map(|subtree| match subtree {
                // Said by "only".
                Subtree::Net(net) if net.prefix_len() == 0 => None,
                Subtree::Name { base, .. } => Some(format!("{base} and its subdomains")),
                Subtree::Net(net) => Some(net.to_string()),
                Subtree::Other => None,
            })
            .collect();
        match names.is_empty() {
            true => f.write_str("it may sign for nothing that is listed")?,
            false => write!(f, "it may sign only for {}", names.join(", "))?,
        }
        if !excluded.is_empty() {
            write!(f, "; not for {}", excluded.join(", "))?;
        }
        Ok(())
    }
}

impl Subtree {
    fn read(base: &GeneralName<'_>) -> Option<Subtree> {
        match base {
            GeneralName::DNSName(name) => {
                let below_only = name.starts_with('.');
                let base = name.trim_start_matches('.').to_ascii_lowercase();
                Some(Subtree::Name { base, below_only })
            }
            GeneralName::IPAddress(octets) => {
                let (address, mask): (IpAddr, IpAddr) = match octets.len() {
                    8 => (
                        read_address::<4>(&octets[..4])?,
                        read_address::<4>(&octets[4..])?,
                    ),
                    32 => (
                        read_address::<16>(&octets[..16])?,
                        read_address::<16>(&octets[16..])?,
                    ),
                    _ => return None,
                };
                Some(Subtree::Net(IpNet::with_netmask(address, mask).ok()?))
            }
            _ => Some(Subtree::Other),
        }
    }

    fn contains(&self, host: &Host) -> bool {
        match (self, host) {
            (Subtree::Name { base, below_only }, Host::Name(name)) => {
                if base.is_empty() {
                    return true;
                }
                match name.strip_suffix(base.as_str()) {
                    Some("") => !below_only,
                    Some(above) => above.ends_with('.'),
                    None => false,
                }
            }
            (Subtree::Net(net), Host::Ip(address)) => net.contains(address),
            _ => false,
        }
    }
}

fn read_address<const N: usize>(octets: &[u8]) -> Option<IpAddr>
where
    IpAddr: From<[u8; N]>,
{
    Some(IpAddr::from(<[u8; N]>::try_from(octets).ok()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ca::testing::{TestCa, constraints, host};

    fn rules_of(constraints: &Constraints) -> NameRules {
        TestCa::with(constraints).issuer.certificate().rules.clone()
    }

    #[test]
    fn a_permitted_name_permits_what_is_below_it_and_nothing_beside_it() {
        let rules = rules_of(&constraints(&["example.com", "192.0.2.7"]));
        for name in [
            "example.com",
            "a.example.com",
            "a.b.example.com",
            "192.0.2.7",
        ] {
            assert!(rules.permit(&host(name)), "{name}");
        }
        for name in [
            "com",
            "notexample.com",
            "example.com.org",
            "example.org",
            "192.0.2.8",
            "::1",
        ] {
            assert!(!rules.permit(&host(name)), "{name}");
        }
    }

    #[test]
    fn a_kind_of_name_that_is_not_asked_for_is_closed() {
        let only_address = rules_of(&constraints(&["192.0.2.7"]));
        assert!(only_address.permit(&host("192.0.2.7")));
        assert!(!only_address.permit(&host("example.com")));
        assert!(!only_address.permit(&host("2001:db8::1")));
        let nothing = rules_of(&constraints(&[]));
        for name in ["example.com", "192.0.2.7", "2001:db8::1"] {
            assert!(!nothing.permit(&host(name)), "{name}");
        }
    }

    #[test]
    fn only_no_constraints_cover_everything() {
        assert!(rules_of(&Constraints::Unconstrained).cover(&Constraints::Unconstrained));
        assert!(rules_of(&Constraints::Unconstrained).cover(&constraints(&["example.com"])));
        assert!(!rules_of(&constraints(&["example.com"])).cover(&Constraints::Unconstrained));
        assert!(
            !rules_of(&constraints(&["example.com"]))
                .cover(&constraints(&["example.com", "example.org"]))
        );
        assert!(rules_of(&constraints(&["example.com"])).cover(&constraints(&["a.example.com"])));
    }

    #[test]
    fn patterns_ask_for_their_base() {
        let patterns: Vec<HostPattern> = ["*.example.com", "192.0.2.7"]
            .iter()
            .map(|text| text.parse().unwrap())
            .collect();
        assert_eq!(
            Constraints::permitting(&patterns),
            constraints(&["example.com", "192.0.2.7"])
        );
    }

    #[test]
    fn words_name_what_is_permitted() {
        let said = |asked: &[&str]| rules_of(&constraints(asked)).to_string();
        assert_eq!(
            said(&["example.com", "192.0.2.7"]),
            "it may sign only for example.com and its subdomains, 192.0.2.7"
        );
        assert_eq!(said(&["192.0.2.7"]), "it may sign only for 192.0.2.7");
        assert_eq!(said(&[]), "it may sign for nothing that is listed");
        assert_eq!(
            rules_of(&Constraints::Unconstrained).to_string(),
            "none: it may sign for any name and address"
        );
    }

    fn any_host() -> impl Strategy<Value = Host> {
        prop_oneof![
            "([ab]\\.){0,2}[ab]{1,2}\\.test".prop_map(|name| Host::Name(name.as_str().into())),
            any::<[u8; 4]>().prop_map(|octets| Host::Ip(octets.map(|octet| octet % 3).into())),
            any::<[u8; 16]>().prop_map(|octets| Host::Ip(octets.map(|octet| octet % 2).into())),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn what_is_asked_for_is_what_is_read_back(asked in proptest::collection::vec(any_host(), 0..6), other in any_host()) {
            let rules = rules_of(&Constraints::Hosts(asked.clone()));
            prop_assert!(rules.cover(&Constraints::Hosts(asked.clone())));
            let expected = asked.iter().any(|base| match (base, &other) {
                (Host::Name(base), Host::Name(other)) => *base == *other || other.ends_with(&format!(".{base}")),
                (base, other) => base == other,
            });
            prop_assert_eq!(rules.permit(&other), expected);
        }
    }
}

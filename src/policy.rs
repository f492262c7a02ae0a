//! Who may connect, and what may be reached.
//!
//! Addresses are checked when they are dialled, whatever name led to them: only globally reachable ones pass, unless
//! the operator listed them. Everything here is a pure question about an address or a port.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{Arc, OnceLock},
};

use ipnet::IpNet;

use crate::{config::ClientRange, error::Error};

/// Whether a client with this address may use the proxy.
pub fn admits(ranges: &[ClientRange], client: IpAddr) -> bool {
    let client = client.to_canonical();
    ranges.iter().any(|range| match range {
        ClientRange::Any => true,
        ClientRange::Loopback => client.is_loopback(),
        ClientRange::Private => is_private(client),
        ClientRange::Net(net) => net.contains(&client),
    })
}

/// The address that stands for a client where something is counted for each: of a public IPv6 address only the network
/// of 64 bits, since whoever has one of its addresses has them all. Private networks number their hosts singly.
pub fn counted_as(client: IpAddr) -> IpAddr {
    match client.to_canonical() {
        IpAddr::V6(ip) if !is_private(ip.into()) && !ip.is_loopback() => {
            Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).into()
        }
        ip => ip,
    }
}

/// RFC 1918, RFC 4193, link-local addresses, and the shared space of RFC 6598, from which cloud networks number
/// their containers.
fn is_private(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_private() || ip.is_link_local() || is_shared(ip),
        IpAddr::V6(ip) => ip.is_unique_local() || ip.is_unicast_link_local(),
    }
}

fn is_shared(ip: Ipv4Addr) -> bool {
    ip.octets()[0] == 100 && ip.octets()[1] & 0xc0 == 64
}

/// Which addresses may be dialled.
#[derive(Clone, Debug)]
pub struct Reach {
    listed: Arc<[IpNet]>,
    /// Our own listeners, known once they are bound.
    own: Arc<OnceLock<Vec<SocketAddr>>>,
}

impl Reach {
    /// Global addresses, and those in `listed`.
    pub fn new(listed: &[IpNet]) -> Self {
        Reach {
            listed: listed.into(),
            own: Arc::default(),
        }
    }

    /// The same with other listed ranges, after a change of the configuration.
    pub fn listing(&self, listed: &[IpNet]) -> Self {
        Reach {
            listed: listed.into(),
            own: self.own.clone(),
        }
    }

    /// What the operator listed.
    pub fn listed(&self) -> &[IpNet] {
        &self.listed
    }

    /// Says which addresses are our own listeners. Only the first call counts.
    pub fn set_own(&self, listeners: Vec<SocketAddr>) {
        let _ = self.own.set(listeners);
    }

    /// Whether `address` may be dialled.
    ///
    /// # Errors
    /// [`Error::Loop`] for our own listeners, [`Error::AddressDenied`] for what is not listed and not global.
    pub fn check(&self, address: SocketAddr) -> Result<(), Error> {
        let ip = address.ip().to_canonical();
        let ours = self.own.get().is_some_and(|own| {
            own.iter().any(|o| {
                let same = o.ip().to_canonical() == ip
                    || o.ip().is_unspecified() && ip.is_loopback()
                    || ip.is_unspecified();
                o.port() == address.port() && same
            })
        });
        if ours {
            return Err(Error::Loop);
        }
        if self.is_listed(ip) || is_global(ip) {
            Ok(())
        } else {
            Err(Error::AddressDenied)
        }
    }

    /// Whether the operator listed this address.
    pub fn is_listed(&self, ip: IpAddr) -> bool {
        self.listed
            .iter()
            .any(|net| net.contains(&ip.to_canonical()))
    }
}

/// Whether an address is globally reachable by the IANA special-purpose registries (RFC 6890 and its updates). An
/// IPv6 address that embeds an IPv4 one (mapped, compatible, NAT64, 6to4, Teredo, ISATAP) is not: where it would lead
/// depends on a gateway.
pub fn is_global(ip: IpAddr) -> bool {
    match ip.to_canonical() {
        IpAddr::V4(ip) => is_global_v4(ip),
        IpAddr::V6(ip) => is_global_v6(ip),
    }
}

fn is_global_v4(ip: Ipv4Addr) -> bool {
    let [a, b, c, _] = ip.octets();
    let special = a == 0
        || ip.is_private()
        || ip.is_loopback()
        || ip.is_link_local()
        || is_shared(ip)
        || (a, b, c) == (192, 0, 0)
        || ip.is_documentation()
        || (a, b, c) == (192, 88, 99)
        || (a == 198 && b & 0xfe == 18)
        || a >= 224;
    // The address on which Azure's hosts offer metadata and DNS to their guests; global by the registry.
    !special && ip != Ipv4Addr::new(168, 63, 129, 16)
}

fn is_global_v6(ip: Ipv6Addr) -> bool {
    let s = ip.segments();
    // Only 2000::/3 is assigned as global unicast.
    let unicast = s[0] & 0xe000 == 0x2000;
    let special = match s[0] {
        0x2001 => s[1] < 0x0200 || s[1] == 0x0db8,
        0x2002 => true,
        0x3fff => s[1] < 0x1000,
        _ => false,
    };
    let isatap = (s[4] & 0xfcff) == 0 && s[5] == 0x5efe;
    unicast && !special && !isatap
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_globally_reachable_addresses_pass() {
        for ip in [
            "8.8.8.8",
            "1.1.1.1",
            "172.15.255.255",
            "172.32.0.0",
            "100.63.255.255",
            "100.128.0.0",
            "169.253.255.255",
            "192.0.1.0",
            "198.17.255.255",
            "198.20.0.0",
            "223.255.255.255",
            "2606:4700::1111",
            "2001:4860:4860::8888",
            "2001:200::1",
            "::ffff:8.8.8.8",
        ] {
            assert!(is_global(ip.parse().expect("an address")), "{ip}");
        }
        for ip in [
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.1",
            "100.64.0.1",
            "100.100.100.200",
            "127.0.0.1",
            "127.255.255.255",
            "168.63.129.16",
            "169.254.169.254",
            "169.254.170.2",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.1",
            "192.0.2.1",
            "192.88.99.1",
            "192.168.1.1",
            "198.18.0.1",
            "198.19.255.255",
            "198.51.100.1",
            "203.0.113.1",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::7f00:1",
            "::ffff:127.0.0.1",
            "64:ff9b::7f00:1",
            "64:ff9b:1::1",
            "100::1",
            "2001::1",
            "2001:10::1",
            "2001:20::1",
            "2001:db8::1",
            "2002:7f00:1::",
            "2002:a00:1::1",
            "3fff::1",
            "5f00::1",
            "fc00::1",
            "fd00:ec2::254",
            "fe80::1",
            "fec0::1",
            "ff02::1",
            "2606:4700::5efe:7f00:1",
            "2606:4700::200:5efe:a00:1",
        ] {
            assert!(!is_global(ip.parse().expect("an address")), "{ip}");
        }
    }

    #[test]
    fn a_listed_range_is_reached_but_never_our_own_listener() {
        let reach = Reach::new(&["127.0.0.0/8".parse().expect("a range")]);
        reach.set_own(vec!["0.0.0.0:3128".parse().expect("an address")]);
        let check = |a: &str| reach.check(a.parse().expect("an address"));
        assert_eq!(check("127.0.0.1:443"), Ok(()));
        assert_eq!(check("[::ffff:127.0.0.1]:443"), Ok(()));
        assert_eq!(check("127.0.0.1:3128"), Err(Error::Loop));
        assert_eq!(check("0.0.0.0:3128"), Err(Error::Loop));
        assert_eq!(check("10.0.0.1:443"), Err(Error::AddressDenied));
    }

    #[test]
    fn a_public_ipv6_network_counts_as_one_client_and_a_private_one_does_not() {
        for (client, counted) in [
            ("2606:4700:1:2:3::4", "2606:4700:1:2::"),
            ("2606:4700:1:3::", "2606:4700:1:3::"),
            ("fd00::1:2", "fd00::1:2"),
            ("::1", "::1"),
            ("::ffff:192.0.2.1", "192.0.2.1"),
            ("192.0.2.1", "192.0.2.1"),
        ] {
            let counted: IpAddr = counted.parse().expect("an address");
            assert_eq!(counted_as(client.parse().expect("an address")), counted);
        }
    }

    #[test]
    fn clients_are_admitted_by_range() {
        let default = [ClientRange::Loopback, ClientRange::Private];
        for (ip, yes) in [
            ("127.0.0.1", true),
            ("::1", true),
            ("10.1.2.3", true),
            ("fd00::1", true),
            ("::ffff:192.168.0.1", true),
            ("8.8.8.8", false),
            ("2606:4700::1", false),
        ] {
            assert_eq!(
                admits(&default, ip.parse().expect("an address")),
                yes,
                "{ip}"
            );
        }
        assert!(admits(
            &[ClientRange::Any],
            "8.8.8.8".parse().expect("an address")
        ));
        assert!(!admits(&[], "127.0.0.1".parse().expect("an address")));
    }
}

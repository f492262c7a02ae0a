//! Who may connect, and what may be reached.
//!
//! Addresses are checked when they are dialled, whatever name led to them: only globally reachable ones pass, unless
//! the operator listed them. All but one are pure questions about an address: whether it is this machine's, only the
//! machine knows.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
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
                let same = || {
                    o.ip().to_canonical() == ip
                        || ip.is_unspecified()
                        || o.ip().is_unspecified() && (ip.is_loopback() || is_of_this_machine(ip))
                };
                o.port() == address.port() && same()
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

    /// Whether the operator listed this address. One at which a cloud hands out credentials must be listed by itself:
    /// whoever opens a range for his own servers does not think of it.
    pub fn is_listed(&self, ip: IpAddr) -> bool {
        let ip = ip.to_canonical();
        let by_itself = METADATA.contains(&ip);
        self.listed.iter().any(|net| {
            net.contains(&ip) && (!by_itself || net.prefix_len() == net.max_prefix_len())
        })
    }
}

/// Where clouds answer their guests: AWS, Azure, Google and others; AWS's containers; AWS by IPv6; Alibaba; Azure's hosts;
/// Oracle; Google by IPv6.
const METADATA: [IpAddr; 7] = [
    IpAddr::V4(Ipv4Addr::new(169, 254, 169, 254)),
    IpAddr::V4(Ipv4Addr::new(169, 254, 170, 2)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)),
    IpAddr::V4(Ipv4Addr::new(100, 100, 100, 200)),
    IpAddr::V4(AZURE),
    IpAddr::V4(Ipv4Addr::new(192, 0, 0, 192)),
    IpAddr::V6(Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254)),
];

/// The address on which Azure's hosts offer metadata and DNS to their guests; global by the registry.
const AZURE: Ipv4Addr = Ipv4Addr::new(168, 63, 129, 16);

/// Whether packets to this address stay on this machine. Connecting a datagram socket sends nothing; it chooses the
/// address to send from, and to itself a machine sends from the very address.
fn is_of_this_machine(ip: IpAddr) -> bool {
    let any = match ip {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    UdpSocket::bind((any, 0))
        .and_then(|socket| {
            socket.connect((ip, 9))?;
            socket.local_addr()
        })
        .is_ok_and(|from| from.ip().to_canonical() == ip)
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
    !special && ip != AZURE
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
    fn a_metadata_service_is_listed_by_itself_or_not_at_all() {
        let listed = |ranges: &[&str], ip: IpAddr| {
            let ranges: Vec<IpNet> = ranges.iter().map(|r| r.parse().expect("a range")).collect();
            Reach::new(&ranges).check(SocketAddr::new(ip, 80)).is_ok()
        };
        for ip in METADATA {
            assert!(
                !listed(&["0.0.0.0/0", "::/0", "169.254.169.254/31"], ip),
                "{ip}"
            );
            assert!(listed(&[&IpNet::from(ip).to_string()], ip), "{ip}");
        }
        let near: IpAddr = "169.254.169.253".parse().expect("an address");
        assert!(listed(&["169.254.0.0/16"], near));
    }

    #[test]
    fn the_neighbours_of_what_is_special_are_global_and_its_ends_are_not() {
        // First and last of each range of the IANA registries, and what is beside them where that is global.
        for (range, before, after) in [
            ("0.0.0.0/8", "", "1.0.0.0"),
            ("10.0.0.0/8", "9.255.255.255", "11.0.0.0"),
            ("100.64.0.0/10", "100.63.255.255", "100.128.0.0"),
            ("127.0.0.0/8", "126.255.255.255", "128.0.0.0"),
            ("169.254.0.0/16", "169.253.255.255", "169.255.0.0"),
            ("172.16.0.0/12", "172.15.255.255", "172.32.0.0"),
            ("192.0.0.0/24", "191.255.255.255", "192.0.1.0"),
            ("192.0.2.0/24", "192.0.1.255", "192.0.3.0"),
            ("192.88.99.0/24", "192.88.98.255", "192.88.100.0"),
            ("192.168.0.0/16", "192.167.255.255", "192.169.0.0"),
            ("198.18.0.0/15", "198.17.255.255", "198.20.0.0"),
            ("198.51.100.0/24", "198.51.99.255", "198.51.101.0"),
            ("203.0.113.0/24", "203.0.112.255", "203.0.114.0"),
            ("224.0.0.0/3", "223.255.255.255", ""),
            ("168.63.129.16/32", "168.63.129.15", "168.63.129.17"),
            ("::/3", "", "2000::"),
            ("64:ff9b::/96", "", ""),
            ("64:ff9b:1::/48", "", ""),
            ("100::/64", "", ""),
            ("2001::/23", "2000:ffff:ffff:ffff::", "2001:200::"),
            ("2001:db8::/32", "2001:db7:ffff::", "2001:db9::"),
            ("2002::/16", "2001:ffff::", "2003::"),
            ("3fff::/20", "3ffe:ffff::", "3fff:1000::"),
            ("4000::/2", "3fff:ffff::", ""),
            ("8000::/1", "", ""),
        ] {
            let range: IpNet = range.parse().expect("a range");
            for ip in [range.network(), range.broadcast()] {
                assert!(!is_global(ip), "{ip} of {range}");
            }
            for ip in [before, after].into_iter().filter(|text| !text.is_empty()) {
                assert!(
                    is_global(ip.parse().expect("an address")),
                    "{ip} beside {range}"
                );
            }
        }
    }

    #[test]
    fn a_listener_on_every_address_is_met_by_each_of_this_machine() {
        assert!(is_of_this_machine("127.0.0.1".parse().expect("an address")));
        assert!(!is_of_this_machine(
            "192.0.2.1".parse().expect("an address")
        ));
        let reach = Reach::new(&["0.0.0.0/0".parse().expect("a range")]);
        reach.set_own(vec!["0.0.0.0:3128".parse().expect("an address")]);
        let check = |a: &str| reach.check(a.parse().expect("an address"));
        assert_eq!(check("127.9.9.9:3128"), Err(Error::Loop));
        assert_eq!(check("198.51.100.7:3128"), Ok(()));
    }

    proptest::proptest! {
        #[test]
        fn a_mapped_address_is_the_address_it_maps(octets: [u8; 4]) {
            let v4 = Ipv4Addr::from(octets);
            proptest::prop_assert_eq!(is_global(v4.into()), is_global(v4.to_ipv6_mapped().into()));
            // Other ways to hide one in IPv6 lead nowhere.
            let [a, b, c, d] = octets.map(u16::from);
            let (high, low) = (a << 8 | b, c << 8 | d);
            for hidden in [
                Ipv6Addr::new(0, 0, 0, 0, 0, 0, high, low),
                Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, high, low),
                Ipv6Addr::new(0x64, 0xff9b, 1, 0, 0, 0, high, low),
                Ipv6Addr::new(0x2002, high, low, 0, 0, 0, 0, 1),
                Ipv6Addr::new(0x2001, 0, high, low, 0, 0, !high, !low),
                Ipv6Addr::new(0x2606, 0x4700, 0, 0, 0, 0x5efe, high, low),
                Ipv6Addr::new(0x2606, 0x4700, 0, 0, 0x200, 0x5efe, high, low),
            ] {
                proptest::prop_assert!(!is_global(hidden.into()), "{}", hidden);
            }
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

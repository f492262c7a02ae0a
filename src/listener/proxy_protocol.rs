//! The PROXY protocol, versions 1 and 2: a load balancer says whose connection it passes on.
//!
//! It reads the header and not a byte beyond it, so that what follows stays in the kernel for whoever serves the
//! connection. Which peers have to send one, and what the client may do, it does not know.

use std::{io, net::IpAddr};

use proxy_header::{ParseConfig, Protocol, ProxyHeader};
use tokio::{io::AsyncReadExt as _, net::TcpStream};

/// The longest header of version 1, line end included.
pub const V1_LIMIT: usize = 107;
/// The longest header of version 2 that is read: its fixed part, and more than the addresses and TLVs of any balancer
/// we know of take (AWS, Google and HAProxy stay under 300 bytes). The format itself has room for 64 KiB.
pub const V2_LIMIT: usize = V2_FIXED + 4096;

const V2_FIXED: usize = 16;
const V2_SIGNATURE: &[u8] = b"\r\n\r\n\0\r\nQUIT\n";
const V1_SIGNATURE: &[u8] = b"PROXY ";

/// A header that was read whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The client; `None` where the balancer speaks for itself (LOCAL) or cannot say (UNKNOWN, a Unix socket). The peer
    /// of the connection counts as the client then.
    pub client: Option<IpAddr>,
    /// How many bytes the header has. What follows is the client's.
    pub length: usize,
}

/// Why a connection has no header that can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The connection begins with something else.
    #[error("it begins with something else")]
    Missing,
    /// It begins as a header does and goes on as none.
    #[error("it is malformed")]
    Malformed,
    /// It is longer than [`V1_LIMIT`] or [`V2_LIMIT`].
    #[error("it is too long")]
    TooLong,
    /// The peer went away before it had sent one, as health checks by connection do.
    #[error("the connection ended before it")]
    Left,
}

/// Reads the header at the beginning of `bytes`; `None` as long as it may still become one with more bytes.
///
/// TLVs are passed over, a checksum among them too. An IPv4 address mapped into IPv6 is the IPv4 address.
///
/// # Errors
/// All [`Fault`]s but [`Fault::Left`].
pub fn parse(bytes: &[u8]) -> Result<Option<Header>, Fault> {
    if begins(bytes, V2_SIGNATURE) {
        parse_v2(bytes)
    } else if begins(bytes, V1_SIGNATURE) {
        parse_v1(bytes)
    } else {
        Err(Fault::Missing)
    }
}

/// Reads the header that `stream` begins with, and nothing beyond; see [`parse`].
///
/// # Errors
/// Any [`Fault`]; a connection that breaks has ended.
pub async fn learn(stream: &mut TcpStream) -> Result<Option<IpAddr>, Fault> {
    let ended = |_: io::Error| Fault::Left;
    let mut head = Vec::new();
    let mut ahead = vec![0; V1_LIMIT];
    loop {
        let seen = head.len();
        // Looked at first and taken then: how much of it is the header shows only afterwards.
        let fresh = stream.peek(&mut ahead).await.map_err(ended)?;
        head.extend_from_slice(&ahead[..fresh]);
        let parsed = parse(&head)?;
        let length = parsed.map_or(head.len(), |h| h.length);
        let taken = &mut head[seen..length];
        stream.read_exact(taken).await.map_err(ended)?;
        match parsed {
            Some(header) => return Ok(header.client),
            None if fresh == 0 => return Err(Fault::Left),
            // Rarely needed: a header of version 2 with many TLVs.
            None => ahead.resize(V2_LIMIT - head.len(), 0),
        }
    }
}

/// Whether one is the beginning of the other.
fn begins(bytes: &[u8], signature: &[u8]) -> bool {
    bytes.iter().zip(signature).all(|(a, b)| a == b)
}

fn parse_v1(bytes: &[u8]) -> Result<Option<Header>, Fault> {
    let Some(end) = bytes.iter().take(V1_LIMIT).position(|b| *b == b'\n') else {
        return if bytes.len() < V1_LIMIT {
            Ok(None)
        } else {
            Err(Fault::TooLong)
        };
    };
    let line = &bytes[..=end];
    // The parser is more lenient than the format: it takes `UNKNOWNS` and a port of `+80`.
    let words = line[V1_SIGNATURE.len()..]
        .strip_suffix(b"\r\n")
        .ok_or(Fault::Malformed)?;
    let unknown = words == b"UNKNOWN" || words.starts_with(b"UNKNOWN ");
    if !unknown && (!words.starts_with(b"TCP") || words.contains(&b'+')) {
        return Err(Fault::Malformed);
    }
    if unknown {
        // What comes behind the word must be ignored (section 2.1).
        return Ok(Some(Header {
            client: None,
            length: line.len(),
        }));
    }
    addressed(line).map(Some)
}

fn parse_v2(bytes: &[u8]) -> Result<Option<Header>, Fault> {
    let Some(fixed) = bytes.first_chunk::<V2_FIXED>() else {
        return Ok(None);
    };
    let [version_and_command, length @ ..] = [fixed[12], fixed[14], fixed[15]];
    let length = V2_FIXED + usize::from(u16::from_be_bytes(length));
    let local = match version_and_command {
        0x20 => true,
        0x21 => false,
        _ => return Err(Fault::Malformed),
    };
    if length > V2_LIMIT {
        return Err(Fault::TooLong);
    }
    let Some(whole) = bytes.get(..length) else {
        return Ok(None);
    };
    if local {
        // The rest is to be discarded, the family included (section 2.2); the parser would refuse one that it lacks.
        return Ok(Some(Header {
            client: None,
            length,
        }));
    }
    addressed(whole).map(Some)
}

/// Leaves the addresses of a header that is there in full to the parser.
fn addressed(whole: &[u8]) -> Result<Header, Fault> {
    let config = ParseConfig {
        include_tlvs: false,
        ..ParseConfig::default()
    };
    let (header, length) = ProxyHeader::parse(whole, config).map_err(|_| Fault::Malformed)?;
    let client = match header.proxied_address() {
        // Datagrams do not come by TCP.
        Some(address) if address.protocol != Protocol::Stream => return Err(Fault::Malformed),
        address => address.map(|a| a.source.ip().to_canonical()),
    };
    if length != whole.len() {
        return Err(Fault::Malformed);
    }
    Ok(Header { client, length })
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use proptest::prelude::*;
    use proxy_header::{ProxiedAddress, Tlv};
    use tokio::{io::AsyncWriteExt as _, net::TcpListener};

    use super::*;

    fn client(bytes: &[u8]) -> Result<Option<IpAddr>, Fault> {
        let header = parse(bytes)?.expect("a whole header");
        assert_eq!(header.length, bytes.len());
        Ok(header.client)
    }

    fn v2(command: u8, family: u8, rest: &[u8]) -> Vec<u8> {
        let length = u16::try_from(rest.len()).expect("short").to_be_bytes();
        [V2_SIGNATURE, &[command, family], &length, rest].concat()
    }

    #[test]
    fn version_1_names_the_client_in_both_families() {
        let four = client(b"PROXY TCP4 192.0.2.7 10.0.0.1 51000 3128\r\n");
        assert_eq!(four, Ok(Some("192.0.2.7".parse().unwrap())));
        let six = client(b"PROXY TCP6 2001:db8::7 ::1 51000 3128\r\n");
        assert_eq!(six, Ok(Some("2001:db8::7".parse().unwrap())));
        let mapped = client(b"PROXY TCP6 ::ffff:192.0.2.7 ::1 51000 3128\r\n");
        assert_eq!(mapped, Ok(Some("192.0.2.7".parse().unwrap())));
    }

    #[test]
    fn a_balancer_that_speaks_for_itself_or_cannot_say_names_nobody() {
        assert_eq!(client(b"PROXY UNKNOWN\r\n"), Ok(None));
        assert_eq!(client(b"PROXY UNKNOWN ffff::1 ffff::2 1 2\r\n"), Ok(None));
        assert_eq!(client(&v2(0x20, 0x00, b"")), Ok(None));
        // A family that nobody knows is of no matter in a LOCAL header.
        assert_eq!(client(&v2(0x20, 0x77, b"anything")), Ok(None));
        assert_eq!(client(&v2(0x21, 0x00, b"")), Ok(None));
        assert_eq!(client(&v2(0x21, 0x31, &[0; 216])), Ok(None));
    }

    #[test]
    fn version_2_names_the_client_and_its_tlvs_are_passed_over() {
        let four = [&[192, 0, 2, 7, 10, 0, 0, 1, 1, 2, 3, 4][..]].concat();
        let named = Ok(Some("192.0.2.7".parse().unwrap()));
        assert_eq!(client(&v2(0x21, 0x11, &four)), named);
        for tlvs in [
            &b"\x04\0\x03abc"[..],
            b"\xea\0\x01z\x03\0\x04\0\0\0\0",
            b"\x01\xff",
        ] {
            assert_eq!(client(&v2(0x21, 0x11, &[&four, tlvs].concat())), named);
        }
    }

    #[test]
    fn what_is_no_header_is_told_from_one_that_is_broken() {
        for other in [
            &b"GET / HTTP/1.1\r\n"[..],
            b"CONNECT a:443 HTTP/1.1\r\n",
            b"\x16\x03\x01",
            b"\r\nGET",
            b"proxy TCP4",
            b"PROXYTCP4 ",
        ] {
            assert_eq!(parse(other), Err(Fault::Missing), "{other:?}");
        }
        for broken in [
            &b"PROXY \r\n"[..],
            b"PROXY TCP4\r\n",
            b"PROXY TCP4 192.0.2.7 10.0.0.1 51000 3128\n",
            b"PROXY TCP4 192.0.2.7 10.0.0.1 51000\r\n",
            b"PROXY TCP4 192.0.2.7 10.0.0.1 51000 +80\r\n",
            b"PROXY TCP4 192.0.2.7 10.0.0.1 51000 70000\r\n",
            b"PROXY TCP4 192.0.2.7 10.0.0.1 51000 3128 x\r\n",
            b"PROXY TCP4 2001:db8::7 ::1 51000 3128\r\n",
            b"PROXY TCP4 192.0.2.7 10.0.0.1 51000 3128\rx\r\n",
            b"PROXY UDP4 192.0.2.7 10.0.0.1 51000 3128\r\n",
            b"PROXY UNKNOWNS\r\n",
        ] {
            assert_eq!(parse(broken), Err(Fault::Malformed), "{broken:?}");
        }
        let four = [0; 12];
        for (command, family, rest) in [
            (0x11, 0x11, &four[..]),
            (0x22, 0x11, &four),
            (0x21, 0x11, &four[1..]),
            (0x21, 0x12, &four),
            (0x21, 0x21, &four),
            (0x21, 0x41, &four),
            (0x21, 0x31, &four),
        ] {
            let header = v2(command, family, rest);
            assert_eq!(parse(&header), Err(Fault::Malformed), "{header:?}");
        }
    }

    #[test]
    fn a_header_is_bounded_before_it_has_come() {
        let endless = [b"PROXY TCP4 ".as_slice(), &[b'1'; V1_LIMIT]].concat();
        assert_eq!(parse(&endless[..V1_LIMIT - 1]), Ok(None));
        assert_eq!(parse(&endless[..V1_LIMIT]), Err(Fault::TooLong));
        let fixed = v2(0x21, 0x11, &[0; V2_LIMIT - V2_FIXED + 1]);
        assert_eq!(parse(&fixed[..V2_FIXED]), Err(Fault::TooLong));
        let longest = v2(0x21, 0x11, &[0; V2_LIMIT - V2_FIXED]);
        assert_eq!(parse(&longest).unwrap().unwrap().length, V2_LIMIT);
    }

    prop_compose! {
        fn any_header()(
            six in any::<bool>(),
            ips in any::<(u128, u128)>(),
            ports in any::<(u16, u16)>(),
            first in any::<bool>(),
            tlv in prop::collection::vec(any::<u8>(), 0..300),
        ) -> (Vec<u8>, IpAddr) {
            let ip = |bits: u128| if six {
                IpAddr::V6(bits.into())
            } else {
                #[allow(clippy::cast_possible_truncation, reason = "any bits will do")]
                IpAddr::V4((bits as u32).into())
            };
            let (from, to) = (SocketAddr::new(ip(ips.0), ports.0), SocketAddr::new(ip(ips.1), ports.1));
            let mut header = ProxyHeader::with_address(ProxiedAddress::stream(from, to));
            let mut bytes = vec![0; 1024];
            let length = if first {
                header.encode_to_slice_v1(&mut bytes)
            } else {
                header.append_tlv(Tlv::Custom(0xea, tlv.into()));
                header.encode_to_slice_v2(&mut bytes)
            };
            bytes.truncate(length.expect("room for a header"));
            (bytes, from.ip().to_canonical())
        }
    }

    proptest! {
        #[test]
        fn every_header_is_read_alike_wherever_it_is_cut_and_whatever_follows(
            (header, from) in any_header(), follows in prop::collection::vec(any::<u8>(), 0..50)
        ) {
            for cut in 0..header.len() {
                prop_assert_eq!(parse(&header[..cut]), Ok(None));
            }
            let whole = Ok(Some(Header { client: Some(from), length: header.len() }));
            prop_assert_eq!(parse(&header), whole);
            prop_assert_eq!(parse(&[&header[..], &follows].concat()), whole);
        }

        #[test]
        fn garbage_behind_a_signature_does_no_harm(
            v1 in any::<bool>(), rest in prop::collection::vec(any::<u8>(), 0..400)
        ) {
            let bytes = [if v1 { V1_SIGNATURE } else { V2_SIGNATURE }, &rest].concat();
            if let Ok(Some(header)) = parse(&bytes) {
                prop_assert!(header.length <= bytes.len());
            }
        }
    }

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let (client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        (client.expect("connected"), accepted.expect("accepted").0)
    }

    #[tokio::test]
    async fn not_a_byte_behind_the_header_is_taken() {
        let many = v2(0x21, 0x11, &[&[192, 0, 2, 7][..], &[0; 3000]].concat());
        let one = b"PROXY TCP4 192.0.2.7 10.0.0.1 51000 3128\r\n".to_vec();
        for header in [one, many] {
            let (mut client, mut server) = pair().await;
            client.set_nodelay(true).expect("set");
            let (begin, end) = header.split_at(header.len() - 7);
            client.write_all(begin).await.expect("written");
            let learning = tokio::spawn(async move { (learn(&mut server).await, server) });
            client
                .write_all(&[end, b"CONNECT"].concat())
                .await
                .expect("written");
            let (learnt, mut server) = learning.await.expect("no panic");
            assert_eq!(learnt, Ok(Some("192.0.2.7".parse().unwrap())));
            let mut rest = [0; 7];
            server.read_exact(&mut rest).await.expect("left there");
            assert_eq!(&rest, b"CONNECT");
        }
    }

    #[tokio::test]
    async fn a_connection_that_ends_before_its_header_has_left() {
        for sent in [&b""[..], b"PROXY TCP4 1"] {
            let (mut client, mut server) = pair().await;
            client.write_all(sent).await.expect("written");
            drop(client);
            assert_eq!(learn(&mut server).await, Err(Fault::Left));
        }
    }
}

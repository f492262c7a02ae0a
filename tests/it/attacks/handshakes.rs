//! TLS from a client in a tunnel: hellos cut in odd ways, hellos of other times, records that are none, and HTTP/2, which is
//! not spoken here.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

use rustls::{ClientConfig, ClientConnection};

use super::{ESTABLISHED, HOST, INSIDE, Reply, Row, Scene, row, trust::blind_tls};

/// What cannot be read as a handshake must end sooner than one that only takes long.
const SOON: Duration = Duration::from_secs(5);

/// A bare connection that has been promised a tunnel.
fn tunnel(scene: &Scene) -> TcpStream {
    let mut tcp = TcpStream::connect(scene.replica.proxy()).expect("the proxy accepts");
    tcp.set_nodelay(true).expect("a socket");
    tcp.set_read_timeout(Some(SOON))
        .expect("a time-out that is not zero");
    tcp.write_all(b"CONNECT gov.test:443 HTTP/1.1\r\n\r\n")
        .expect("the proxy reads");
    established(&mut tcp);
    tcp
}

fn established(tcp: &mut TcpStream) {
    let mut head = [0; ESTABLISHED.len()];
    tcp.read_exact(&mut head).expect("an answer to CONNECT");
    assert_eq!(head, ESTABLISHED.as_bytes());
}

/// A client whose hello is still to be sent, and the hello.
fn hello(tls: &Arc<ClientConfig>) -> (ClientConnection, Vec<u8>) {
    let name = HOST.try_into().expect("a name");
    let mut client = ClientConnection::new(tls.clone(), name).expect("a client");
    let mut bytes = Vec::new();
    client.write_tls(&mut bytes).expect("a buffer");
    (client, bytes)
}

/// Finishes a handshake whose hello has been sent, and fetches.
fn fetch(mut client: ClientConnection, mut tcp: TcpStream, path: &str) -> Result<String, String> {
    while client.is_handshaking() {
        client
            .complete_io(&mut tcp)
            .map_err(|fault| fault.to_string())?;
    }
    let mut stream = rustls::StreamOwned::new(client, tcp);
    let asked = format!("GET {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n");
    stream
        .write_all(asked.as_bytes())
        .map_err(|fault| fault.to_string())?;
    let mut answer = String::new();
    stream
        .read_to_string(&mut answer)
        .map_err(|fault| fault.to_string())?;
    Ok(answer)
}

/// All that comes until the replica closes.
fn rest(tcp: &mut TcpStream) -> Result<Vec<u8>, String> {
    let mut rest = Vec::new();
    match tcp.read_to_end(&mut rest) {
        Err(fault) if fault.kind() != std::io::ErrorKind::ConnectionReset => {
            Err(format!("not closed in time: {fault}"))
        }
        _ => Ok(rest),
    }
}

fn record(payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(payload.len()).expect("a record");
    [b"\x16\x03\x01", &length.to_be_bytes()[..], payload].concat()
}

/// A ClientHello of this version with these suites and extensions.
fn old_hello(version: [u8; 2], suites: &[u8], extensions: &[u8]) -> Vec<u8> {
    let two = |bytes: &[u8]| {
        [
            &u16::try_from(bytes.len()).expect("short").to_be_bytes()[..],
            bytes,
        ]
        .concat()
    };
    let mut body = [&version[..], &[7; 32], b"\0"].concat();
    body.extend(two(suites));
    body.extend(b"\x01\0");
    if !extensions.is_empty() {
        body.extend(two(extensions));
    }
    let length = u32::try_from(body.len()).expect("short").to_be_bytes();
    record(&[b"\x01", &length[1..], &body].concat())
}

#[test]
fn a_hello_may_be_cut_in_any_way() {
    let mut scene = Scene::new();
    let said = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
    scene.tls.script("/warm-up", vec![super::say(said)]);
    let fetched = |outcome: Result<String, String>| {
        let text = outcome.unwrap_or_else(|fault| panic!("{fault}"));
        assert!(
            text.starts_with("HTTP/1.1 200") && text.ends_with("ok"),
            "{text}"
        );
    };

    // F01: each byte in a segment of its own.
    let (client, bytes) = hello(&scene.blind);
    let mut tcp = tunnel(&scene);
    for byte in &bytes {
        tcp.write_all(&[*byte]).expect("the proxy reads");
    }
    fetched(fetch(client, tcp, "/warm-up"));

    // F01: each byte in a record of its own.
    let (client, bytes) = hello(&scene.blind);
    let mut tcp = tunnel(&scene);
    let records: Vec<u8> = bytes[5..]
        .iter()
        .flat_map(|byte| record(&[*byte]))
        .collect();
    tcp.write_all(&records).expect("the proxy reads");
    fetched(fetch(client, tcp, "/warm-up"));

    // A28: in one segment with the CONNECT.
    let (client, bytes) = hello(&scene.blind);
    let mut tcp = TcpStream::connect(scene.replica.proxy()).expect("the proxy accepts");
    tcp.write_all(&[b"CONNECT gov.test:443 HTTP/1.1\r\n\r\n", &bytes[..]].concat())
        .expect("the proxy reads");
    established(&mut tcp);
    fetched(fetch(client, tcp, "/warm-up"));

    // F07: an extension that means nothing, where Encrypted ClientHello would be.
    let (client, bytes) = hello(&greasing_tls());
    assert!(
        bytes.windows(2).any(|two| two == [0xfe, 0x0d]),
        "no such extension"
    );
    let mut tcp = tunnel(&scene);
    tcp.write_all(&bytes).expect("the proxy reads");
    fetched(fetch(client, tcp, "/warm-up"));
    scene.play(&[]);
}

/// A client that pretends to encrypt its hello, as browsers do.
fn greasing_tls() -> Arc<ClientConfig> {
    use rustls::{
        client::{EchGreaseConfig, EchMode},
        crypto::aws_lc_rs::{default_provider, hpke::ALL_SUPPORTED_SUITES},
    };
    let suite = ALL_SUPPORTED_SUITES[0];
    let (key, _) = suite.generate_key_pair().expect("a key");
    let mut config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_ech(EchMode::Grease(EchGreaseConfig::new(suite, key)))
        .expect("TLS 1.3")
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    config
        .dangerous()
        .set_certificate_verifier(super::trust::anyone());
    Arc::new(config)
}

/// How a tunnel ends in which no handshake can be.
enum End {
    /// With a fatal alert.
    Alert,
    /// With an answer in clear text, as whoever speaks no TLS can read.
    NotTls,
    /// With an alert, or without a word: who has sent more than was read may not get to read the last of it.
    Any,
}

#[test]
fn what_is_no_hello_of_ours_is_refused_at_once() {
    let mut scene = Scene::new();
    let aes = b"\xc0\x2f\xc0\x30\x00\x9c";
    // supported_versions with TLS 1.1 and 1.0, and ALPN with h2.
    let versions = b"\0\x2b\0\x05\x04\x03\x02\x03\x01";
    let big = [&b"\x01\0\x40\x01"[..], &[0; 16 * 1024 - 4]].concat();
    let endless = [&b"\x01\xff\xff\xff"[..], &[0; 16 * 1024 - 4]].concat();
    let cases: Vec<(&str, &str, Vec<u8>, End)> = vec![
        ("F04", "SSL 3", old_hello([3, 0], aes, b""), End::Alert),
        ("F04", "TLS 1.0", old_hello([3, 1], aes, b""), End::Alert),
        ("F04", "TLS 1.1", old_hello([3, 2], aes, b""), End::Alert),
        (
            "F04",
            "TLS 1.2 that offers only older ones",
            old_hello([3, 3], aes, versions),
            End::Alert,
        ),
        (
            "F04",
            "suites without encryption",
            old_hello(
                [3, 3],
                b"\0\x01\0\x02\0\x3b",
                b"\0\x0d\0\x04\0\x02\x04\x03\0\x0a\0\x04\0\x02\0\x17",
            ),
            End::Alert,
        ),
        (
            "F04",
            "suites with RC4 and export keys",
            old_hello(
                [3, 3],
                b"\0\x04\0\x05\0\x03\0\x17",
                b"\0\x0d\0\x04\0\x02\x04\x03\0\x0a\0\x04\0\x02\0\x17",
            ),
            End::Alert,
        ),
        (
            "F04",
            "SSL 2",
            b"\x80\x2e\x01\x03\x01\0\x15\0\0\0\x10".to_vec(),
            End::NotTls,
        ),
        (
            "F02",
            "a record of 64 KiB",
            b"\x16\x03\x01\xff\xff\x01\0\0\0".to_vec(),
            End::Alert,
        ),
        (
            "F02",
            "a record of 16 KiB and a hello of one byte more, and no end",
            record(&big),
            End::Any,
        ),
        (
            "F02",
            "a hello of 16 MiB",
            [record(&endless), record(&endless[4..])].concat().repeat(8),
            End::Any,
        ),
        ("F02", "a record of nothing", record(b""), End::Alert),
        (
            "F02",
            "a million records of nothing",
            record(b"").repeat(1_000_000),
            End::Any,
        ),
        (
            "F02",
            "a handshake that begins with another message",
            record(b"\x02\0\0\0"),
            End::Alert,
        ),
        (
            "F02",
            "a hello of nothing",
            record(b"\x01\0\0\0"),
            End::Alert,
        ),
        (
            "F02",
            "a hello of zeros",
            record(&[&b"\x01\0\0\x40"[..], &[0; 64]].concat()),
            End::Alert,
        ),
        (
            "F02",
            "an unknown version of the record",
            b"\x16\x05\x05\0\x01\x01".to_vec(),
            End::Alert,
        ),
        (
            "F03",
            "data before the handshake",
            b"\x17\x03\x03\0\x01x".to_vec(),
            End::NotTls,
        ),
        (
            "F03",
            "an alert before the handshake",
            b"\x15\x03\x03\0\x02\x02\x28".to_vec(),
            End::NotTls,
        ),
        (
            "F03",
            "a heartbeat before the handshake",
            b"\x18\x03\x03\0\x03\x01\x40\0".to_vec(),
            End::NotTls,
        ),
        ("A35", "zeros", vec![0; 64], End::NotTls),
        ("A35", "a million zeros", vec![0; 1_000_000], End::NotTls),
        (
            "A35",
            "Postgres",
            b"\0\0\0\x08\x04\xd2\x16\x2f".to_vec(),
            End::NotTls,
        ),
        (
            "A35",
            "SSH in lower case",
            b"ssh-2.0-x\r\n".to_vec(),
            End::NotTls,
        ),
    ];
    let faults: Vec<String> = cases
        .into_iter()
        .filter_map(|(id, what, bytes, expected)| {
            let began = Instant::now();
            let mut tcp = tunnel(&scene);
            // A long one may be refused, and the connection closed, before all of it is sent.
            let _ = tcp.write_all(&bytes);
            // All that is to come has come, whether or not it is whole.
            let _ = tcp.shutdown(Shutdown::Write);
            let heard = match rest(&mut tcp) {
                Ok(heard) => heard,
                Err(fault) => return Some(format!("{id} {what}: {fault}")),
            };
            let fine = match expected {
                End::Alert => heard.starts_with(b"\x15\x03\x03\0\x02\x02"),
                End::NotTls => heard.starts_with(b"HTTP/1.1 400 ") && heard.ends_with(b"\n"),
                End::Any => heard.is_empty() || heard[0] == 0x15,
            };
            let took = began.elapsed();
            (!fine || took > SOON)
                .then(|| format!("{id} {what}: {took:?} {:?}", &heard[..heard.len().min(40)]))
        })
        .collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    scene.play(&[]);
}

/// What comes of a handshake that offers these protocols: the one agreed on, or the alert.
fn agreed(scene: &Scene, offered: &[&[u8]]) -> Result<Option<Vec<u8>>, String> {
    let (mut client, bytes) = hello(&blind_tls(offered));
    let mut tcp = tunnel(scene);
    tcp.write_all(&bytes).expect("the proxy reads");
    while client.is_handshaking() {
        client
            .complete_io(&mut tcp)
            .map_err(|fault| fault.to_string())?;
    }
    Ok(client.alpn_protocol().map(<[u8]>::to_vec))
}

#[test]
fn http_2_is_not_agreed_on_and_not_understood() {
    let mut scene = Scene::new();
    for offered in [
        &[&b"h2"[..]][..],
        &[b"h3"],
        &[b"h2", b"h2c"],
        &[b"http/1.0"],
        &[b"x"],
    ] {
        let refused = agreed(&scene, offered);
        let alert = refused
            .as_ref()
            .is_err_and(|fault| fault.contains("NoApplicationProtocol"));
        assert!(alert, "F05 {offered:?}: {refused:?}");
    }
    for (offered, agreed_on) in [
        (&[&b"h2"[..], b"http/1.1"][..], Some(b"http/1.1".to_vec())),
        (&[], None),
    ] {
        assert_eq!(agreed(&scene, offered), Ok(agreed_on), "F05 {offered:?}");
    }
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let settings = b"\0\0\0\x04\0\0\0\0\0";
    let frames = |what: &'static str, id: &'static str, frame: &[u8], times: usize| {
        let sends = [&preface[..], settings, &frame.repeat(times)].concat();
        row(id, what, sends, Reply::Ends(400, "http_request_error")).way(INSIDE)
    };
    let reset = b"\0\0\x01\x01\x05\0\0\0\x01\x82\0\0\x04\x03\0\0\0\0\x01\0\0\0\x08";
    let rows: Vec<Row> = vec![
        frames("the preface", "H01", b"", 0),
        frames("20,000 streams, each reset at once", "H02", reset, 20_000),
        frames(
            "CONTINUATION without end",
            "H03",
            b"\0\0\x01\x09\0\0\0\0\x01\x82",
            20_000,
        ),
        frames(
            "a table of 16 MB",
            "H03",
            b"\0\0\x06\x04\0\0\0\0\0\0\x01\x01\0\0\0",
            1,
        ),
        frames(
            "a flood of PING",
            "H04",
            b"\0\0\x08\x06\0\0\0\0\0evilevil",
            20_000,
        ),
        frames(
            "a flood of empty DATA",
            "H04",
            b"\0\0\0\0\0\0\0\0\x01",
            20_000,
        ),
        frames(
            "a window of none",
            "H04",
            b"\0\0\x04\x08\0\0\0\0\x01\0\0\0\0",
            1_000,
        ),
        frames(
            "an extended CONNECT",
            "H07",
            b"\0\0\x06\x04\0\0\0\0\0\0\x08\0\0\0\x01",
            1,
        ),
        row(
            "H05",
            "HTTP/2 without preface",
            settings,
            Reply::Ends(400, "http_request_error"),
        )
        .way(INSIDE),
    ];
    scene.play(&rows);
}

//! Rules about header fields: what ends at a proxy, and what the few fields that we read mean. Pure.

use std::time::Duration;

use http::{
    HeaderMap, HeaderName, HeaderValue, StatusCode, Version,
    header::{
        CONNECTION, CONTENT_LENGTH, COOKIE, DATE, EXPECT, LOCATION, PROXY_AUTHENTICATE,
        PROXY_AUTHORIZATION, RANGE, RETRY_AFTER, TE, TRANSFER_ENCODING, UPGRADE, VIA,
        WWW_AUTHENTICATE,
    },
};

use crate::{
    error::{Error, Seen},
    pacing::queue::Urgency,
};

/// Hop-by-hop fields (RFC 9110 section 7.6.1), and those that only proxies understand.
const HOP_BY_HOP: [HeaderName; 7] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    UPGRADE,
];
/// Fields that must not come late, beside those that the codec knows.
const NOT_IN_TRAILERS: [HeaderName; 7] = [
    PROXY_STATUS,
    VIA,
    COOKIE,
    EXPECT,
    RANGE,
    WWW_AUTHENTICATE,
    LOCATION,
];
/// Fields addressed to us begin so, and go no further.
const OURS: &str = "paceline-";
/// How long a client says it can wait.
pub const MAX_WAIT: HeaderName = HeaderName::from_static("paceline-max-wait");
/// RFC 9218.
const PRIORITY: HeaderName = HeaderName::from_static("priority");
/// RFC 9209.
pub const PROXY_STATUS: HeaderName = HeaderName::from_static("proxy-status");

/// Removes what must not go upstream. `Transfer-Encoding` stays: it is taken off and put on again by the codec, and
/// tells it that a body follows. Trailers are passed on, so a client's wish for them is said for this hop too (RFC 9110
/// section 10.1.4): many origins send none to who does not say it.
pub fn strip_request(headers: &mut HeaderMap) {
    let trailers = headers
        .get_all(TE)
        .iter()
        .filter_map(|v| v.to_str().ok())
        .flat_map(|v| v.split(','))
        .any(|coding| coding.trim().eq_ignore_ascii_case("trailers"));
    strip(headers, |name| {
        HOP_BY_HOP.contains(name) || name.as_str().starts_with(OURS)
    });
    if trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
        headers.insert(CONNECTION, HeaderValue::from_static("TE"));
    }
}

/// Whether the framing of an answer leaves no doubt (RFC 9112 section 6): at most one length, in digits, and no coding
/// but a single `chunked` in its place. The codec would pick one reading; the next recipient might pick another, and a
/// coding that we take off without undoing it would turn the body into another.
pub fn is_framed_well(status: StatusCode, headers: &HeaderMap) -> bool {
    let mut lengths = headers.get_all(CONTENT_LENGTH).iter();
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    match (
        lengths.next(),
        lengths.next(),
        codings.next(),
        codings.next(),
    ) {
        (None, _, None, _) => true,
        (Some(length), None, None, _) => {
            !length.is_empty() && length.as_bytes().iter().all(u8::is_ascii_digit)
        }
        (None, _, Some(coding), None) => {
            status != StatusCode::NO_CONTENT && coding.as_bytes().eq_ignore_ascii_case(b"chunked")
        }
        _ => false,
    }
}

/// Removes what must not go downstream. The codec frames the body anew for the client's version of HTTP.
pub fn strip_response(headers: &mut HeaderMap) {
    // Only we say what `paceline` found: an origin that says so would pass for us.
    let forged = |v: &HeaderValue| {
        let mut members = v.as_bytes().split(|b| *b == b',');
        members.any(|member| {
            let name = member.trim_ascii_start().get(..8);
            name.is_some_and(|name| name.eq_ignore_ascii_case(b"paceline"))
        })
    };
    if headers.get_all(PROXY_STATUS).iter().any(forged) {
        headers.remove(PROXY_STATUS);
    }
    strip(headers, |name| {
        HOP_BY_HOP.contains(name) || *name == TRANSFER_ENCODING || name.as_str().starts_with(OURS)
    });
}

/// Removes from trailers what must not pass: what ends at a proxy, what only we may say, and what would be believed by
/// whoever merges trailers into the head (RFC 9110 section 6.5.1). The codec leaves out framing fields, and all that the
/// head has not announced in `Trailer`.
pub fn strip_trailers(trailers: &mut HeaderMap) {
    strip(trailers, |name| {
        HOP_BY_HOP.contains(name)
            || name.as_str().starts_with(OURS)
            || NOT_IN_TRAILERS.contains(name)
    });
}

/// Removes the fields that `doomed` names and those that `Connection` nominates, keeping the order of the others:
/// taking single entries out of a [`HeaderMap`] would move its last one into the gap.
fn strip(headers: &mut HeaderMap, doomed: impl Fn(&HeaderName) -> bool) {
    if !headers.keys().any(&doomed) {
        return;
    }
    let nominated: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|v| v.to_str().ok())
        .flat_map(|v| v.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    // Nominating these would unframe the message or misdirect it; they are the message's own, not the hop's.
    let essential = |name: &HeaderName| {
        matches!(
            *name,
            http::header::CONTENT_LENGTH | TRANSFER_ENCODING | http::header::HOST
        )
    };
    let mut kept = HeaderMap::with_capacity(headers.len());
    for (name, value) in headers.iter() {
        if !doomed(name) && (essential(name) || !nominated.contains(name)) {
            kept.append(name.clone(), value.clone());
        }
    }
    *headers = kept;
}

/// How long `Retry-After` asks to wait (RFC 9110 section 10.2.3): seconds, or a date, which is taken against the answer's own
/// `Date`, since no other clock counts. `None` for nonsense, for a date without `Date`, and for what is past.
pub fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    let wait = if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) {
        // More digits than fit are as good as for ever.
        Duration::from_secs(text.parse().unwrap_or(u64::from(u32::MAX)))
    } else {
        let date = |text: &str| httpdate::parse_http_date(text).ok();
        let said = headers.get(DATE)?.to_str().ok().and_then(date)?;
        date(text)?.duration_since(said).ok()?
    };
    (!wait.is_zero()).then_some(wait)
}

/// Whether a request asks to switch to WebSocket (RFC 6455 section 4.1): the one protocol that is let through. An upgrade
/// to h2c or TLS would take what follows out of sight.
pub fn asks_for_websocket(headers: &HeaderMap) -> bool {
    let has = |name: HeaderName, wanted: &str| {
        let values = headers.get_all(name).iter().filter_map(|v| v.to_str().ok());
        values
            .flat_map(|v| v.split(','))
            .any(|v| v.trim().eq_ignore_ascii_case(wanted))
    };
    has(CONNECTION, "upgrade") && has(UPGRADE, "websocket")
}

/// Puts the hop-by-hop fields of a switch to WebSocket back, for the next hop.
pub fn put_websocket(headers: &mut HeaderMap) {
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
}

/// Adds ourselves to `Via` (RFC 9110 section 7.6.3). All replicas go by one name: a request that comes back to any of
/// them goes in a circle.
pub fn add_via(headers: &mut HeaderMap, version: Version) {
    let via = if version == Version::HTTP_10 {
        "1.0 paceline"
    } else {
        "1.1 paceline"
    };
    headers.append(VIA, HeaderValue::from_static(via));
}

/// Whether a request has passed one of us already.
pub fn has_passed_us(headers: &HeaderMap) -> bool {
    let hops = headers
        .get_all(VIA)
        .iter()
        .filter_map(|v| v.to_str().ok())
        .flat_map(|v| v.split(','));
    hops.filter_map(|hop| hop.split_whitespace().nth(1))
        .any(|by| by.eq_ignore_ascii_case("paceline"))
}

/// The urgency of RFC 9218: the `u` parameter of `Priority`, 0 to 7; 3 where it is absent or malformed (section 4).
pub fn urgency(headers: &HeaderMap) -> Urgency {
    let text = headers
        .get(PRIORITY)
        .and_then(|v| v.to_str().ok())
        .unwrap_or("");
    let found = text
        .split(',')
        .filter_map(|member| member.trim().strip_prefix("u="))
        .next_back();
    match found.map(|u| u.split(';').next().unwrap_or("").trim().as_bytes()) {
        Some([digit @ b'0'..=b'7']) => digit - b'0',
        _ => 3,
    }
}

/// How long the client says it can wait: `Paceline-Max-Wait: 5s`, or seconds without a unit.
///
/// # Errors
/// The field is there but is not a duration, or there is more than one.
pub fn max_wait(headers: &HeaderMap) -> Result<Option<Duration>, Error> {
    let mut values = headers.get_all(MAX_WAIT).iter();
    let Some(value) = values.next() else {
        return Ok(None);
    };
    if values.next().is_some() {
        return Err(Error::Malformed(
            "there is more than one Paceline-Max-Wait; send one duration, such as 5s",
        ));
    }
    let wrong = Error::MaxWait(Seen::of(value.as_bytes()));
    let text = value.to_str().map_err(|_| wrong)?.trim();
    if text.is_empty() || text.len() > 32 {
        return Err(wrong);
    }
    if text.bytes().all(|b| b.is_ascii_digit() || b == b'.') {
        let seconds: f64 = text.parse().map_err(|_| wrong)?;
        return Duration::try_from_secs_f64(seconds)
            .map(Some)
            .map_err(|_| wrong);
    }
    humantime::parse_duration(text).map(Some).map_err(|_| wrong)
}

/// The value of `Proxy-Status` for an answer of our own.
pub fn proxy_status(error: &Error) -> HeaderValue {
    HeaderValue::from_str(&format!("paceline; error={}", error.proxy_status()))
        .expect("error types are tokens")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn map(fields: &[(&str, &str)]) -> HeaderMap {
        let pair = |(n, v): &(&str, &str)| {
            (
                n.parse::<HeaderName>().expect("a name"),
                v.parse::<HeaderValue>().expect("a value"),
            )
        };
        fields.iter().map(pair).collect()
    }

    #[test]
    fn what_ends_at_a_proxy_is_removed_and_the_rest_keeps_its_order() {
        let mut h = map(&[
            ("accept", "*/*"),
            ("proxy-connection", "keep-alive"),
            ("x-first", "1"),
            ("connection", "close, X-Secret, content-length, Host"),
            ("x-secret", "hush"),
            ("content-length", "5"),
            ("host", "a.test"),
            ("proxy-authorization", "Basic eDp5"),
            ("paceline-max-wait", "4s"),
            ("x-empty", ""),
            ("transfer-encoding", "chunked"),
            ("te", "trailers"),
            ("upgrade", "h2c"),
            ("x-last", "2"),
        ]);
        strip_request(&mut h);
        let names: Vec<_> = h.keys().map(HeaderName::as_str).collect();
        assert_eq!(
            names,
            [
                "accept",
                "x-first",
                "content-length",
                "host",
                "x-empty",
                "transfer-encoding",
                "x-last",
                "te",
                "connection"
            ]
        );
        assert_eq!(
            (&h["te"], &h["connection"]),
            (
                &"trailers".parse().expect("a value"),
                &"TE".parse().expect("a value")
            )
        );
        let mut without = map(&[("te", "gzip;q=0.5"), ("connection", "TE")]);
        strip_request(&mut without);
        assert!(without.is_empty(), "{without:?}");
    }

    #[test]
    fn trailers_say_nothing_that_belongs_in_a_head() {
        let mut trailers = map(&[
            ("x-checksum", "1"),
            ("proxy-authorization", "Basic eDp5"),
            ("cookie", "a=b"),
            ("proxy-status", "paceline; error=dns_error"),
            ("paceline-max-wait", "1s"),
            ("connection", "close"),
            ("via", "1.1 x"),
            ("grpc-status", "0"),
        ]);
        strip_trailers(&mut trailers);
        let names: Vec<_> = trailers.keys().map(HeaderName::as_str).collect();
        assert_eq!(names, ["x-checksum", "grpc-status"]);
    }

    #[test]
    fn only_we_speak_in_our_name() {
        for (said, kept) in [
            ("paceline; error=dns_error", false),
            ("other, PaceLine; error=dns_error", false),
            ("other; error=dns_error", true),
        ] {
            let mut h = map(&[("proxy-status", said), ("x", "y")]);
            strip_response(&mut h);
            assert_eq!(h.contains_key("proxy-status"), kept, "{said}");
        }
    }

    #[test]
    fn an_answer_is_framed_one_way_or_not_believed() {
        for (status, fields, well) in [
            (200, &[][..], true),
            (200, &[("content-length", "5")], true),
            (200, &[("transfer-encoding", "Chunked")], true),
            (304, &[("transfer-encoding", "chunked")], true),
            (204, &[("transfer-encoding", "chunked")], false),
            (200, &[("content-length", "+5")], false),
            (200, &[("content-length", "")], false),
            (200, &[("content-length", "5, 5")], false),
            (
                200,
                &[("content-length", "5"), ("content-length", "5")],
                false,
            ),
            (
                200,
                &[("content-length", "5"), ("transfer-encoding", "chunked")],
                false,
            ),
            (200, &[("transfer-encoding", "gzip, chunked")], false),
            (
                200,
                &[
                    ("transfer-encoding", "gzip"),
                    ("transfer-encoding", "chunked"),
                ],
                false,
            ),
        ] {
            let status = StatusCode::from_u16(status).expect("a status");
            assert_eq!(
                is_framed_well(status, &map(fields)),
                well,
                "{status} {fields:?}"
            );
        }
    }

    #[test]
    fn our_own_via_is_known_again_among_others() {
        let mut h = map(&[("via", "1.0 fred, 1.1 p.example.net (paceline)")]);
        assert!(!has_passed_us(&h));
        add_via(&mut h, Version::HTTP_11);
        assert!(has_passed_us(&h));
        assert!(has_passed_us(&map(&[(
            "via",
            "1.1 a, HTTP/1.1 PaceLine (x), 1.1 b"
        )])));
    }

    #[test]
    fn urgency_is_three_unless_it_is_said_well() {
        for (text, u) in [
            ("u=0", 0),
            ("u=7, i", 7),
            ("i, u=1", 1),
            ("u=2;x=1", 2),
            ("u=8", 3),
            ("u=", 3),
            ("u=-1", 3),
            ("u=10", 3),
            ("", 3),
            ("U=1", 3),
        ] {
            assert_eq!(urgency(&map(&[("priority", text)])), u, "{text}");
        }
        assert_eq!(urgency(&HeaderMap::new()), 3);
    }

    #[test]
    fn max_wait_is_a_duration_or_an_error() {
        for (text, seconds) in [
            ("5s", 5.0),
            ("4", 4.0),
            ("0.4", 0.4),
            ("1m 30s", 90.0),
            ("250ms", 0.25),
            ("0s", 0.0),
        ] {
            let d = max_wait(&map(&[("paceline-max-wait", text)]))
                .expect("valid")
                .expect("there");
            assert!((d.as_secs_f64() - seconds).abs() < 1e-9, "{text}");
        }
        for text in [
            "",
            "-4",
            "NaN",
            "1e9",
            "soon",
            "5 parsecs",
            "99999999999999999999999999",
            "1.2.3",
        ] {
            assert!(
                max_wait(&map(&[("paceline-max-wait", text)])).is_err(),
                "{text}"
            );
        }
        assert!(
            max_wait(&map(&[
                ("paceline-max-wait", "1s"),
                ("paceline-max-wait", "2s")
            ]))
            .is_err()
        );
        assert_eq!(max_wait(&HeaderMap::new()), Ok(None));
    }

    proptest! {
        #[test]
        fn no_value_makes_a_reader_panic(text in "[ -~]{0,40}") {
            let h = map(&[("priority", &text), ("paceline-max-wait", &text)]);
            prop_assert!(urgency(&h) <= 7);
            let _ = max_wait(&h);
        }
    }
}

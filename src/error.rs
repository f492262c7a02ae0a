//! Every way in which a request can fail, and the one place that says what the client is told.
//!
//! [`Error`] is sorted by whose fault it is. Its status, its RFC 9209 error type, the stable reason that the log and
//! the metrics share, and its one-line text are each one `match`. No text repeats anything a client sent, but for a few
//! letters and digits of what was to be a duration.

use std::fmt;

use http::StatusCode;

use crate::pacing::{
    pacer::{Cause, Refusal},
    time::{Nanos, SECOND},
};

/// A request that was not answered by its origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Error {
    // The client's doing.
    /// The client's address is not in `allow_clients`.
    ClientDenied,
    /// The peer has to send a PROXY header, and sent none, or a broken one.
    ProxyHeader,
    /// Credentials are missing, or not of the form that is understood.
    CredentialsNeeded,
    /// There are credentials, but not those of a user; which of both parts is wrong is not told.
    CredentialsWrong,
    /// How long the client can wait is no duration.
    MaxWait(Seen),
    /// The request is malformed, or its framing ambiguous.
    Malformed(&'static str),
    /// TLS where clear-text HTTP is spoken.
    TlsToPlainPort,
    /// The request line is too long.
    TargetTooLong,
    /// The request head is too large, or has too many fields.
    HeadTooLarge,
    /// The request's body is in a coding that we don't take off.
    UnknownCoding,
    /// Authority, SNI and Host disagree inside a tunnel.
    Misdirected,
    /// Nobody governs the host, and only governed hosts may be reached.
    HostDenied,
    /// The port is not in `connect_ports`.
    PortDenied,
    /// The address is private, loopback or otherwise not for fetching.
    AddressDenied,
    /// Too many wrong log-ins came from this address of late.
    Guessing {
        /// After how long the next may be tried.
        retry_after: Nanos,
    },
    /// The client did not go on with its request's body.
    BodyTimeout,
    /// The user of this tunnel is gone, or has other credentials by now.
    Withdrawn,
    /// The request came by way of this proxy already, or is for it.
    Loop,
    // The pace.
    /// It is not this request's turn before its deadline, or the queue is full.
    Paced(Refusal),
    /// This replica is shutting down.
    Draining,
    /// As many connections are open as may be.
    Connections,
    /// This client holds as much as one client may.
    Share,
    // The origin's doing.
    /// The name has no address, or the resolver failed.
    Dns,
    /// The resolver did not answer in time.
    DnsTimeout,
    /// The origin refused the connection.
    ConnectRefused,
    /// The origin cannot be reached.
    Unreachable,
    /// The connection, or TLS on it, was not ready in time.
    ConnectTimeout,
    /// The origin's certificate does not verify.
    Certificate,
    /// TLS with the origin failed otherwise.
    Tls,
    /// The origin closed the connection before it had answered.
    Terminated,
    /// The origin's answer is not valid HTTP/1.1.
    BadResponse,
    /// The origin did not begin its answer in time.
    ResponseTimeout,
    // Ours.
    /// The CA cannot sign for this host.
    NotCovered,
    /// The CA's issuer is before or after its time, so that it signs nothing.
    CaOutOfTime,
}

impl Error {
    /// The status; `refusal` is the configured one for a wait that is too long.
    pub fn status(&self, refusal: StatusCode) -> StatusCode {
        match self {
            Error::ClientDenied
            | Error::HostDenied
            | Error::PortDenied
            | Error::AddressDenied
            | Error::Withdrawn => StatusCode::FORBIDDEN,
            Error::CredentialsNeeded | Error::CredentialsWrong => {
                StatusCode::PROXY_AUTHENTICATION_REQUIRED
            }
            Error::Guessing { .. } => StatusCode::TOO_MANY_REQUESTS,
            Error::BodyTimeout => StatusCode::REQUEST_TIMEOUT,
            Error::Malformed(_)
            | Error::MaxWait(_)
            | Error::ProxyHeader
            | Error::TlsToPlainPort => StatusCode::BAD_REQUEST,
            Error::TargetTooLong => StatusCode::URI_TOO_LONG,
            Error::HeadTooLarge => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Error::UnknownCoding => StatusCode::NOT_IMPLEMENTED,
            Error::Misdirected => StatusCode::MISDIRECTED_REQUEST,
            Error::Paced(Refusal {
                cause: Cause::StoreAway | Cause::LockedOut(_) | Cause::Paused,
                ..
            }) => StatusCode::SERVICE_UNAVAILABLE,
            Error::Paced(_) => refusal,
            Error::Draining | Error::Connections | Error::Share | Error::CaOutOfTime => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Error::DnsTimeout | Error::ConnectTimeout | Error::ResponseTimeout => {
                StatusCode::GATEWAY_TIMEOUT
            }
            Error::Loop
            | Error::Dns
            | Error::ConnectRefused
            | Error::Unreachable
            | Error::Certificate
            | Error::Tls
            | Error::Terminated
            | Error::BadResponse
            | Error::NotCovered => StatusCode::BAD_GATEWAY,
        }
    }

    /// The error type of RFC 9209 section 2.3.
    pub fn proxy_status(&self) -> &'static str {
        match self {
            Error::ClientDenied
            | Error::HostDenied
            | Error::PortDenied
            | Error::Withdrawn
            | Error::CredentialsNeeded
            | Error::CredentialsWrong
            | Error::Guessing { .. } => "http_request_denied",
            Error::AddressDenied => "destination_ip_prohibited",
            Error::Malformed(_)
            | Error::MaxWait(_)
            | Error::TlsToPlainPort
            | Error::ProxyHeader
            | Error::TargetTooLong
            | Error::HeadTooLarge
            | Error::UnknownCoding
            | Error::BodyTimeout
            | Error::Misdirected => "http_request_error",
            Error::Loop => "proxy_loop_detected",
            Error::Paced(Refusal {
                cause: Cause::StoreAway | Cause::LockedOut(_) | Cause::Paused,
                ..
            })
            | Error::Draining => "destination_unavailable",
            Error::Paced(_) | Error::Connections | Error::Share => "connection_limit_reached",
            Error::Dns => "dns_error",
            Error::DnsTimeout => "dns_timeout",
            Error::ConnectRefused => "connection_refused",
            Error::Unreachable => "destination_ip_unroutable",
            Error::ConnectTimeout => "connection_timeout",
            Error::Certificate => "tls_certificate_error",
            Error::Tls => "tls_protocol_error",
            Error::Terminated => "connection_terminated",
            Error::BadResponse => "http_protocol_error",
            Error::ResponseTimeout => "connection_read_timeout",
            Error::NotCovered | Error::CaOutOfTime => "proxy_configuration_error",
        }
    }

    /// The label shared by the access log and the metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Error::ClientDenied => "client_denied",
            Error::ProxyHeader => "proxy_header",
            Error::CredentialsNeeded | Error::CredentialsWrong => "credentials_needed",
            Error::Guessing { .. } => "guessing",
            Error::BodyTimeout => "body_timeout",
            Error::Malformed(_) | Error::MaxWait(_) => "malformed",
            Error::TlsToPlainPort => "tls_to_plain_port",
            Error::TargetTooLong => "target_too_long",
            Error::HeadTooLarge => "head_too_large",
            Error::UnknownCoding => "unknown_coding",
            Error::Misdirected => "misdirected",
            Error::HostDenied => "host_denied",
            Error::PortDenied => "port_denied",
            Error::AddressDenied => "address_denied",
            Error::Withdrawn => "withdrawn",
            Error::Loop => "loop",
            Error::Paced(Refusal {
                cause: Cause::WaitTooLong,
                ..
            }) => "wait_too_long",
            Error::Paced(Refusal {
                cause: Cause::QueueFull,
                ..
            }) => "queue_full",
            Error::Paced(Refusal {
                cause: Cause::StoreAway,
                ..
            }) => "store_away",
            Error::Paced(Refusal {
                cause: Cause::LockedOut(_),
                ..
            }) => "locked_out",
            Error::Paced(Refusal {
                cause: Cause::Paused,
                ..
            }) => "paused",
            Error::Draining => "draining",
            Error::Connections => "connections",
            Error::Share => "share",
            Error::Dns => "dns",
            Error::DnsTimeout => "dns_timeout",
            Error::ConnectRefused => "connect_refused",
            Error::Unreachable => "unreachable",
            Error::ConnectTimeout => "connect_timeout",
            Error::Certificate => "certificate",
            Error::Tls => "tls",
            Error::Terminated => "terminated",
            Error::BadResponse => "bad_response",
            Error::ResponseTimeout => "response_timeout",
            Error::NotCovered => "not_covered",
            Error::CaOutOfTime => "ca_out_of_time",
        }
    }

    /// What to do about it, in one line of ASCII: the body of a refusal, and the reason phrase of a refused CONNECT.
    pub fn text(&self) -> String {
        let fixed = match self {
            Error::ClientDenied => {
                "this client address may not use the proxy; add it to allow_clients"
            }
            Error::ProxyHeader => "the PROXY header is missing or broken; see proxy_protocol_from",
            Error::CredentialsNeeded => {
                "proxy credentials are missing; send those (Basic) of a user in [proxy.auth]"
            }
            Error::CredentialsWrong => {
                "these proxy credentials are wrong; correct user or password, see [proxy.auth]"
            }
            Error::MaxWait(seen) => {
                return format!(
                    "Paceline-Max-Wait {seen} is no duration; write one, such as 5s or 1m30s"
                );
            }
            Error::Guessing { retry_after } => {
                let seconds = retry_seconds(*retry_after);
                return format!(
                    "too many wrong log-ins from this address, correct them and retry in {seconds}s"
                );
            }
            Error::BodyTimeout => "the request's body did not go on for 30 s; send all of it",
            Error::Malformed(what) => what,
            Error::TlsToPlainPort => {
                "TLS came where HTTP is spoken; write the proxy's URL with http://, not https://"
            }
            Error::TargetTooLong => "a request line may have 16 KiB; shorten the URL",
            Error::HeadTooLarge => {
                "a request head may have 64 KiB and 100 fields; send fewer or shorter ones"
            }
            Error::UnknownCoding => {
                "the only transfer coding taken here is chunked; send that alone"
            }
            Error::Misdirected => "this tunnel was opened for another host; open one for this host",
            Error::HostDenied => {
                "no destination governs this host; add it to one or set ungoverned = \"tunnel\""
            }
            Error::PortDenied => "this port may not be reached; add it to connect_ports",
            Error::AddressDenied => "this address is not public; add it to allow_upstreams",
            Error::Withdrawn => {
                "the credentials of this tunnel are no longer valid; open one with new ones"
            }
            Error::Loop => {
                "the request leads back to this proxy; correct the URL or the proxy variables"
            }
            Error::Paced(refusal) => {
                let seconds = retry_seconds(refusal.retry_after);
                return match refusal.cause {
                    Cause::WaitTooLong => {
                        format!("the wait would pass max_wait, retry in {seconds}s")
                    }
                    Cause::QueueFull => format!("queue full, retry in {seconds}s"),
                    Cause::StoreAway => {
                        format!("the store of the pace is away, retry in {seconds}s")
                    }
                    Cause::LockedOut(status) => format!(
                        "locked out, for several URLs were answered {status}; retry in {seconds}s, or see paceline unlock"
                    ),
                    Cause::Paused => {
                        format!(
                            "paused by an operator; retry in {seconds}s, or see paceline resume"
                        )
                    }
                };
            }
            Error::Draining => "this replica is shutting down, retry in 1s",
            Error::Connections => "too many connections, retry in 1s; see max_connections",
            Error::Share => {
                "this client holds its share, retry in 1s; see max_connections_per_client"
            }
            Error::Dns => "the host name does not resolve; check it and the proxy's resolver",
            Error::DnsTimeout => "the resolver did not answer in time; try again later",
            Error::ConnectRefused => "the origin refused the connection; try again later",
            Error::Unreachable => "the origin cannot be reached; check the proxy's routes",
            Error::ConnectTimeout => "no connection to the origin in time; try again later",
            Error::Certificate => {
                "the origin's certificate does not verify; see extra_roots for a private CA"
            }
            Error::Tls => "TLS with the origin failed; it needs TLS 1.2 or later",
            Error::Terminated => {
                "the origin closed the connection before it answered; it was not asked again"
            }
            Error::BadResponse => "the origin's answer is not valid HTTP/1.1",
            Error::ResponseTimeout => "the origin did not answer in time",
            Error::NotCovered => "the CA may not sign for this host; run paceline ca init",
            Error::CaOutOfTime => "the CA's issuer has expired; run paceline ca init and restart",
        };
        fixed.to_owned()
    }

    /// The same for a request to a destination: a refusal of the pace says whose.
    pub fn text_for(&self, destination: Option<&str>) -> String {
        match (self, destination) {
            (Error::Paced(_), Some(name)) => format!("{name}: {}", self.text()),
            _ => self.text(),
        }
    }

    /// After how many whole seconds a new try makes sense, where that can be said.
    pub fn retry_after(&self) -> Option<u64> {
        match self {
            Error::Paced(refusal) => Some(retry_seconds(refusal.retry_after)),
            Error::Guessing { retry_after } => Some(retry_seconds(*retry_after)),
            Error::Draining | Error::Connections | Error::Share => Some(1),
            Error::CaOutOfTime => Some(60),
            _ => None,
        }
    }

    /// Whether the connection must end with the answer, because what follows on it cannot be trusted.
    pub fn closes(&self) -> bool {
        matches!(
            self,
            Error::Malformed(_)
                | Error::TlsToPlainPort
                | Error::TargetTooLong
                | Error::HeadTooLarge
                | Error::UnknownCoding
                | Error::ProxyHeader
                | Error::MaxWait(_)
                | Error::CredentialsNeeded
                | Error::CredentialsWrong
                | Error::Guessing { .. }
                | Error::BodyTimeout
                | Error::ClientDenied
                | Error::Draining
                | Error::Connections
        )
    }
}

/// The beginning of a value that was not understood, as far as it is letters, digits, dots and signs: enough to know a slip
/// by, and too little to carry anything.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    text: [u8; Seen::LONGEST],
    length: u8,
    is_whole: bool,
}

impl Seen {
    const LONGEST: usize = 12;

    /// Of a field's value.
    pub fn of(value: &[u8]) -> Seen {
        let plain = |b: &&u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'+');
        let mut text = [0; Seen::LONGEST];
        let mut length = 0;
        for (to, from) in text.iter_mut().zip(value.iter().take_while(plain)) {
            *to = *from;
            length += 1;
        }
        Seen {
            text,
            length,
            is_whole: usize::from(length) == value.len(),
        }
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.text.iter().take(usize::from(self.length));
        let text: String = text.copied().map(char::from).collect();
        let rest = if self.is_whole { "" } else { "..." };
        write!(f, "\"{text}{rest}\"")
    }
}

impl fmt::Debug for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Whole seconds, rounded up, and at least 1: several clients read digits only, and take 0 as an invitation.
fn retry_seconds(span: Nanos) -> u64 {
    u64::try_from(span.saturating_add(SECOND - 1) / SECOND)
        .unwrap_or(1)
        .max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_is_a_whole_number_of_seconds_and_never_zero() {
        let paced = |ns| {
            Error::Paced(Refusal {
                cause: Cause::WaitTooLong,
                retry_after: ns,
            })
            .retry_after()
        };
        assert_eq!(
            [paced(0), paced(1), paced(SECOND), paced(SECOND + 1)],
            [Some(1), Some(1), Some(1), Some(2)]
        );
    }

    #[test]
    fn texts_fit_a_reason_phrase() {
        let paced = |cause| {
            Error::Paced(Refusal {
                cause,
                retry_after: 9_999 * SECOND,
            })
        };
        for e in [
            Error::ClientDenied,
            Error::ProxyHeader,
            Error::CredentialsNeeded,
            Error::CredentialsWrong,
            Error::MaxWait(Seen::of(&[b'x'; 100])),
            Error::TlsToPlainPort,
            Error::TargetTooLong,
            Error::HeadTooLarge,
            Error::UnknownCoding,
            Error::Misdirected,
            Error::HostDenied,
            Error::PortDenied,
            Error::AddressDenied,
            Error::Withdrawn,
            Error::Loop,
            paced(Cause::WaitTooLong),
            paced(Cause::QueueFull),
            paced(Cause::StoreAway),
            Error::Draining,
            Error::Connections,
            Error::Dns,
            Error::DnsTimeout,
            Error::ConnectRefused,
            Error::Unreachable,
            Error::ConnectTimeout,
            Error::Certificate,
            Error::Tls,
            Error::Terminated,
            Error::BadResponse,
            Error::ResponseTimeout,
            Error::NotCovered,
            Error::CaOutOfTime,
            Error::Share,
            Error::BodyTimeout,
            Error::Guessing {
                retry_after: 9_999 * SECOND,
            },
        ] {
            let text = e.text();
            assert!(
                text.is_ascii() && text.len() <= 90 && !text.contains('\n'),
                "{text}"
            );
        }
    }

    #[test]
    fn of_a_value_only_a_plain_beginning_is_seen() {
        for (value, seen) in [
            ("soon", "\"soon\""),
            ("", "\"\""),
            ("4 s3cret", "\"4...\""),
            ("<script>", "\"...\""),
            ("99999999999999", "\"999999999999...\""),
            ("\u{664}", "\"...\""),
        ] {
            assert_eq!(Seen::of(value.as_bytes()).to_string(), seen);
        }
    }

    #[test]
    fn a_refusal_of_the_pace_names_the_destination_and_no_other_does() {
        let paced = Error::Paced(Refusal {
            cause: Cause::Paused,
            retry_after: SECOND,
        });
        assert!(paced.text_for(Some("maps")).starts_with("maps: paused"));
        assert_eq!(Error::Dns.text_for(Some("maps")), Error::Dns.text());
        assert_eq!(paced.text_for(None), paced.text());
    }
}

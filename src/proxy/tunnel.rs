//! What goes on in a tunnel once its 200 is sent: interception, or the passing of bytes.

use std::{io, pin::Pin, sync::Arc, time::Duration};

use bytes::Bytes;
use rustls::ServerConfig;
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt as _},
    time::Instant,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use crate::{
    authority::{Authority, Host},
    downstream::{self, socket::Socket},
    drain::Signal,
    proxy::{
        Downstream, Pinned, Promise, Proxy,
        connect::Plan,
        relay::{Early, relay},
    },
    record::Record,
    rules::{Kind, Opened},
    upstream::Scheme,
};

/// The client must have begun, and finished its handshake, in this time.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(10);
/// The first byte of a TLS record that carries a handshake (RFC 8446 section 5.1).
const TLS_HANDSHAKE: u8 = 0x16;

/// Carries out what a CONNECT was promised, on the client's connection and what was already read from it.
///
/// Boxed, each kind by itself, and within it each part that takes its turn: many tunnels are open at once, and one that
/// waits for its first byte would have room for all that may come of it.
pub fn run<'a>(
    outer: &'a Downstream,
    promise: Promise,
    client: Socket,
    early: Bytes,
    drain: Signal,
) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
    let client = Early::new(early, client);
    let Promise { plan, record } = promise;
    match plan {
        Plan::Relay {
            origin,
            address,
            authority,
            user,
            share,
        } => Box::pin(async move {
            let (_open, _share) = (outer.proxy.metrics.tunnel(), share);
            let opened = Opened {
                client: outer.client,
                user: user.as_ref(),
                authority: &authority,
                kind: Kind::Relayed(address),
            };
            outer
                .relay(client, origin, record, outer.outlived(&opened))
                .await;
        }),
        Plan::Switched {
            origin,
            early,
            departure,
        } => Box::pin(async move {
            let _under_way = departure;
            let authority = record.as_deref().and_then(Record::authority).cloned();
            let outlived = async {
                match &authority {
                    Some(authority) => outer.outlived(&outer.switched(authority, None)).await,
                    None => std::future::pending().await,
                }
            };
            let origin = Early::new(early, *origin);
            outer.relay(client, origin, record, outlived).await;
        }),
        Plan::Intercept {
            authority,
            tls,
            user,
            share,
        } => Box::pin(async move {
            let (_share, mut record) = (share, record);
            let until = Instant::now() + HANDSHAKE_DEADLINE;
            let pinned = |scheme, sni| Pinned {
                scheme,
                authority: authority.clone(),
                sni,
                user: user.clone(),
            };
            match client.first_byte(until).await {
                Some(TLS_HANDSHAKE) => {
                    let accepted = Box::pin(accept(outer, &authority, tls, client, until)).await;
                    let Some(stream) = accepted else {
                        record
                            .iter_mut()
                            .for_each(|r| r.broke_off("handshake_failed"));
                        return;
                    };
                    let sni = stream.get_ref().1.server_name().map(Host::parse);
                    // A name that is no host name cannot be the tunnel's.
                    let Ok(sni) = sni.transpose() else { return };
                    Box::pin(serve(outer, pinned(Scheme::Https, sni), stream, drain)).await;
                    record.iter_mut().for_each(|r| r.complete());
                }
                Some(letter) if letter.is_ascii_uppercase() => {
                    Box::pin(serve(outer, pinned(Scheme::Http, None), client, drain)).await;
                    record.iter_mut().for_each(|r| r.complete());
                }
                Some(_) => {
                    tracing::info!(host = %authority.host, "tunnel refused: the client speaks neither TLS nor HTTP/1.1");
                    let mut client = client;
                    let _ = client.write_all(downstream::BAD_REQUEST).await;
                    let _ = client.shutdown().await;
                }
                None => {}
            }
        }),
    }
}

/// So much of an answer TLS takes before the client does. A write of so much wakes the client once.
const TLS_AHEAD: usize = 256 * 1024;

/// Ends TLS, unless the handshake fails or takes too long.
async fn accept(
    outer: &Downstream,
    authority: &Authority,
    tls: Arc<ServerConfig>,
    client: Early<Socket>,
    until: Instant,
) -> Option<Box<TlsStream<Early<Socket>>>> {
    let accepting = TlsAcceptor::from(tls).accept(client);
    match tokio::time::timeout_at(until, accepting).await {
        Ok(Ok(mut stream)) => {
            stream.get_mut().1.set_buffer_limit(Some(TLS_AHEAD));
            // Boxed: it is moved about, and there would be room for it in each place.
            Some(Box::new(stream))
        }
        Ok(Err(e)) => {
            handshake_failed(&outer.proxy, &authority.host, &e);
            None
        }
        Err(_) => None,
    }
}

async fn serve<I>(outer: &Downstream, pinned: Pinned, stream: I, drain: Signal)
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let inner = Downstream {
        proxy: outer.proxy.clone(),
        client: outer.client,
        socket: outer.socket.clone(),
        drain: drain.clone(),
        pinned: Some(pinned),
        plan: Default::default(),
    };
    let inner = Arc::new(inner);
    let rest = downstream::serve(stream, inner.clone(), drain).await;
    // No tunnel can open inside a tunnel, but an exchange may have switched protocols.
    if let (Some(rest), Some(promise)) = (rest, inner.promised())
        && let Plan::Switched {
            origin,
            early,
            departure,
        } = promise.plan
    {
        let _under_way = departure;
        let (client, origin) = (
            Early::new(rest.early, rest.stream),
            Early::new(early, *origin),
        );
        let opened = inner.pinned.as_ref();
        let opened = opened.map(|p| inner.switched(&p.authority, p.user.as_ref()));
        let outlived = async {
            match &opened {
                Some(opened) => inner.outlived(opened).await,
                None => std::future::pending().await,
            }
        };
        Box::pin(inner.relay(client, origin, promise.record, outlived)).await;
    }
}

impl Downstream {
    /// Passes bytes both ways; either side may take its time now.
    async fn relay<C, O>(
        &self,
        client: Early<C>,
        origin: O,
        record: Option<Box<Record>>,
        outlived: impl Future<Output = ()>,
    ) where
        C: AsyncRead + AsyncWrite + Unpin,
        O: AsyncRead + AsyncWrite + Unpin,
    {
        self.socket.give_up_after(None);
        relay(client, origin, record, outlived).await;
    }

    /// Resolves when the rules no longer allow this tunnel.
    async fn outlived(&self, opened: &Opened<'_>) {
        let proxy = &self.proxy;
        proxy.in_force.outlived(opened, &proxy.upstream).await;
    }

    fn switched<'t>(&self, authority: &'t Authority, user: Option<&'t Arc<str>>) -> Opened<'t> {
        Opened {
            client: self.client,
            user,
            authority,
            kind: Kind::Switched,
        }
    }
}

/// A client that does not trust the CA breaks off with an alert; the line says what it needs.
fn handshake_failed(proxy: &Proxy, host: &Host, e: &io::Error) {
    let alert = match e
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<rustls::Error>())
    {
        Some(rustls::Error::AlertReceived(alert)) => *alert,
        _ => return tracing::debug!(%host, "TLS handshake with a client failed: {e}"),
    };
    proxy.metrics.untrusting_client();
    if proxy.untrusting.is_due() {
        tracing::warn!(
            %host,
            ?alert,
            "a client broke off TLS; if it does not trust the CA, set what `paceline env` prints in its environment"
        );
    }
}

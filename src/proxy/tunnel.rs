//! What goes on in a tunnel once its 200 is sent: interception, or the passing of bytes.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Buf as _, Bytes};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::TlsAcceptor;

use crate::{
    authority::Host,
    downstream,
    drain::Signal,
    proxy::{Downstream, Pinned, Promise, Proxy, connect::Plan},
    record::Record,
    upstream::Scheme,
};

/// The client must have begun, and finished its handshake, in this time.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(10);
/// Bytes under way in each direction of a relay.
const RELAY_BUFFER: usize = 32 * 1024;
/// The first byte of a TLS record that carries a handshake (RFC 8446 section 5.1).
const TLS_HANDSHAKE: u8 = 0x16;

/// Carries out what a CONNECT was promised, on the client's connection and what was already read from it.
pub async fn run(
    outer: &Downstream,
    promise: Promise,
    client: TcpStream,
    early: Bytes,
    drain: Signal,
) {
    let mut record = promise.record;
    match promise.plan {
        Plan::Relay(mut origin) => {
            let _open = outer.proxy.metrics.tunnel();
            let mut client = Early {
                early,
                stream: client,
            };
            let both = tokio::io::copy_bidirectional_with_sizes(
                &mut client,
                &mut origin,
                RELAY_BUFFER,
                RELAY_BUFFER,
            );
            // A reset by either side is an ordinary end of a tunnel.
            if let (Ok((sent, received)), Some(record)) = (both.await, &mut record) {
                record
                    .sent()
                    .store(sent, std::sync::atomic::Ordering::Relaxed);
                record.received(received);
                record.complete();
            }
        }
        Plan::Intercept {
            authority,
            tls,
            user,
        } => {
            let client = Early {
                early,
                stream: client,
            };
            let pinned = |scheme, sni| Pinned {
                scheme,
                authority: authority.clone(),
                sni,
                user: user.clone(),
            };
            match client.first_byte().await {
                Some(TLS_HANDSHAKE) => {
                    let accepted = tokio::time::timeout(
                        HANDSHAKE_DEADLINE,
                        TlsAcceptor::from(tls).accept(client),
                    )
                    .await;
                    let stream = match accepted {
                        Ok(Ok(stream)) => stream,
                        Ok(Err(e)) => {
                            record
                                .iter_mut()
                                .for_each(|r| r.broke_off("handshake_failed"));
                            return handshake_failed(&outer.proxy, &authority.host, &e);
                        }
                        Err(_) => return,
                    };
                    let sni = stream.get_ref().1.server_name().map(Host::parse);
                    // A name that is no host name cannot be the tunnel's.
                    let Ok(sni) = sni.transpose() else { return };
                    serve(outer, pinned(Scheme::Https, sni), stream, drain).await;
                    record.iter_mut().for_each(Record::complete);
                }
                Some(letter) if letter.is_ascii_uppercase() => {
                    serve(outer, pinned(Scheme::Http, None), client, drain).await;
                    record.iter_mut().for_each(Record::complete);
                }
                Some(_) => {
                    tracing::info!(host = %authority.host, "tunnel refused: the client speaks neither TLS nor HTTP/1.1");
                    let mut client = client;
                    let _ = client.write_all(downstream::BAD_REQUEST).await;
                    let _ = client.shutdown().await;
                }
                None => {}
            }
        }
    }
}

async fn serve<I>(outer: &Downstream, pinned: Pinned, stream: I, drain: Signal)
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let inner = Downstream {
        proxy: outer.proxy.clone(),
        client: outer.client,
        pinned: Some(pinned),
        plan: Default::default(),
    };
    // No tunnel can open inside a tunnel, so nothing is left to do after this.
    downstream::serve(stream, Arc::new(inner), drain).await;
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

/// A client's connection with what was read of it too early put back in front.
#[derive(Debug)]
struct Early {
    early: Bytes,
    stream: TcpStream,
}

impl Early {
    /// The first byte, which stays to be read; `None` if there is none in time.
    async fn first_byte(&self) -> Option<u8> {
        if let Some(first) = self.early.first() {
            return Some(*first);
        }
        let mut first = [0];
        match tokio::time::timeout(HANDSHAKE_DEADLINE, self.stream.peek(&mut first)).await {
            Ok(Ok(1)) => Some(first[0]),
            _ => None,
        }
    }
}

impl AsyncRead for Early {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.early.is_empty() {
            return Pin::new(&mut self.stream).poll_read(cx, buf);
        }
        let n = self.early.len().min(buf.remaining());
        buf.put_slice(&self.early[..n]);
        self.early.advance(n);
        if self.early.is_empty() {
            self.early = Bytes::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Early {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

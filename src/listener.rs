//! Accepts clients: who may come in, how many at once, and what their sockets are set to.
//!
//! Who the client is, a load balancer of `proxy_protocol_from` says; anybody else is the client itself.

pub mod proxy_protocol;

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::{Instant, sleep, sleep_until, timeout},
};

use crate::{
    config,
    downstream::{self, socket::Socket},
    drain::Signal,
    error::Error,
    listener::proxy_protocol::Fault,
    log::Seldom,
    proxy::{Downstream, Proxy, tunnel},
    rules::Rules,
    shares::Share,
};

/// Connections that are told that there are too many, at once; beyond that they are dropped.
const REFUSALS_AT_ONCE: usize = 256;
/// How long such a telling may take.
const REFUSAL_DEADLINE: Duration = Duration::from_secs(2);
/// A load balancer's header must be there this long after its connection.
const HEADER_DEADLINE: Duration = Duration::from_secs(10);
/// A drain goes on accepting until nobody has come for this long: a connection that the kernel has made already would be
/// reset by the end of listening, and its client would not know why.
const LAST_COMERS: Duration = Duration::from_millis(20);
/// Or for this long at the most.
const LAST_CALL: Duration = Duration::from_millis(200);
/// A client that takes none of its answer for this long is given up.
const BLOCKED_DEADLINE: Duration = Duration::from_secs(60);
/// When the process has no file descriptor left, accepting again at once would only burn the processor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Binds a listening socket with a backlog that a fleet's reconnection fits into.
///
/// # Errors
/// The address cannot be bound.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => tokio::net::TcpSocket::new_v4()?,
        SocketAddr::V6(_) => tokio::net::TcpSocket::new_v6()?,
    };
    socket.set_reuseaddr(true)?;
    socket.set_nodelay(true)?;
    socket.bind(address)?;
    socket.listen(4096)
}

/// Accepts until the drain starts, and then who has come already.
pub async fn run(listener: TcpListener, proxy: Arc<Proxy>, mut drain: Signal) {
    let room = Arc::new(Semaphore::new(proxy.room));
    let refusals = Arc::new(Semaphore::new(REFUSALS_AT_ONCE));
    let unheaded = Arc::new(Seldom::default());
    let mut last_call = None;
    loop {
        let accepted = match last_call {
            None => tokio::select! {
                accepted = listener.accept() => accepted,
                () = drain.started() => {
                    last_call = Some(Instant::now() + LAST_CALL);
                    continue;
                }
            },
            Some(end) => tokio::select! {
                biased;
                () = sleep_until(end) => return,
                accepted = listener.accept() => accepted,
                () = sleep(LAST_COMERS) => return,
            },
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(e) => {
                tracing::warn!(
                    "a connection was not accepted: {e}; raise the limit of open files if this stays"
                );
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        // Without this the 200, the handshake and each small answer would wait for the peer's delayed acknowledgement.
        let _ = stream.set_nodelay(true);
        let peer = peer.ip().to_canonical();
        let rules = proxy.in_force.now();
        let mut balancers = rules.settings().proxy_protocol_from.iter();
        let told = balancers.any(|net| net.contains(&peer));
        // Who comes by way of a load balancer is admitted, and counted, when it is known who that is.
        let admitted = if told {
            Ok(None)
        } else {
            admit(&proxy, &rules, peer).map(Some)
        };
        match (admitted, room.clone().try_acquire_owned()) {
            (Ok(share), Ok(permit)) => {
                let (proxy, drain) = (proxy.clone(), drain.clone());
                let unheaded = unheaded.clone();
                tokio::spawn(async move {
                    let introduced = match share {
                        Some(share) => Some((stream, peer, share)),
                        // Boxed: few connections come by a load balancer, and all would have room for it.
                        None => Box::pin(introduced(stream, peer, &proxy, &unheaded)).await,
                    };
                    if let Some((stream, client, share)) = introduced {
                        serve(stream, client, proxy, drain).await;
                        drop(share);
                    }
                    drop(permit);
                });
            }
            (admitted, _) => {
                let error = admitted.err().unwrap_or(Error::Connections);
                proxy.metrics.request("", error.reason());
                if let Ok(permit) = refusals.clone().try_acquire_owned() {
                    let text = head(&error, rules.settings());
                    tokio::spawn(async move {
                        let _ = timeout(REFUSAL_DEADLINE, tell(stream, text)).await;
                        drop(permit);
                    });
                }
            }
        }
    }
}

/// One more connection of this client.
fn admit(proxy: &Proxy, rules: &Rules, client: IpAddr) -> Result<Share, Error> {
    rules.admit(client)?;
    let share = proxy.connections.take(proxy.address_key(client));
    share.ok_or(Error::Share)
}

/// A connection and the client whose it is, as the load balancer `peer` says; nothing where it does not say, or where
/// that client may not come in. Then the connection has had its answer and is over.
async fn introduced(
    mut stream: TcpStream,
    peer: IpAddr,
    proxy: &Proxy,
    unheaded: &Seldom,
) -> Option<(TcpStream, IpAddr, Share)> {
    let learning = proxy_protocol::learn(&mut stream);
    let why = match timeout(HEADER_DEADLINE, learning).await {
        Ok(Ok(client)) => {
            let client = client.unwrap_or(peer);
            match admit(proxy, &proxy.in_force.now(), client) {
                Ok(share) => return Some((stream, client, share)),
                Err(error) => refuse(stream, &error, proxy).await,
            }
            return None;
        }
        // As health checks do that only connect.
        Ok(Err(Fault::Left)) => return None,
        Ok(Err(fault)) => fault.to_string(),
        Err(_) => "it did not come in time".to_owned(),
    };
    if unheaded.is_due() {
        tracing::warn!(
            %peer,
            "no PROXY header from a peer in proxy_protocol_from: {why}; turn it on in the load balancer, or take the peer off the list"
        );
    }
    refuse(stream, &Error::ProxyHeader, proxy).await;
    None
}

async fn refuse(stream: TcpStream, error: &Error, proxy: &Proxy) {
    proxy.metrics.request("", error.reason());
    let text = head(error, proxy.in_force.now().settings());
    let _ = timeout(REFUSAL_DEADLINE, tell(stream, text)).await;
}

async fn serve(stream: TcpStream, client: IpAddr, proxy: Arc<Proxy>, mut drain: Signal) {
    let _counted = proxy.metrics.connection();
    let socket = Socket::new(stream);
    socket.give_up_after(Some(BLOCKED_DEADLINE));
    // All that a request needs is made when there is one: thousands may connect and say nothing.
    let said = tokio::select! {
        said = timeout(downstream::HEAD_DEADLINE, socket.readable()) => matches!(said, Ok(Ok(()))),
        // A request may be on its way, and has an answer then.
        () = drain.started() => true,
    };
    if !said {
        return;
    }
    let downstream = Arc::new(Downstream {
        proxy,
        client,
        socket: socket.clone(),
        drain: drain.clone(),
        pinned: None,
        plan: Default::default(),
    });
    let rest = Box::pin(downstream::serve(socket, downstream.clone(), drain.clone())).await;
    if let (Some(rest), Some(promise)) = (rest, downstream.promised()) {
        tunnel::run(&downstream, promise, rest.stream, rest.early, drain).await;
    }
}

/// A whole answer for a client whose request is not even read: one that gets none may try again at once, for ever.
fn head(error: &Error, settings: &config::Proxy) -> String {
    let status = error.status(settings.refusal_status);
    let text = error.text();
    let retry = error
        .retry_after()
        .map(|s| format!("retry-after: {s}\r\n"))
        .unwrap_or_default();
    format!(
        "HTTP/1.1 {} paceline: {text}\r\nproxy-status: paceline; error={}\r\n{retry}content-type: text/plain\r\n\
         content-length: {}\r\nconnection: close\r\n\r\npaceline: {text}\n",
        status.as_u16(),
        error.proxy_status(),
        text.len() + "paceline: \n".len(),
    )
}

async fn tell(mut stream: TcpStream, text: String) {
    if stream.write_all(text.as_bytes()).await.is_ok() && stream.shutdown().await.is_ok() {
        // Not in the future, of which there are as many as there are refusals.
        let mut scrap = vec![0; 4096];
        while matches!(stream.read(&mut scrap).await, Ok(1..)) {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn future_size<A, B, C, D, F>(_: fn(A, B, C, D) -> F) -> usize {
        size_of::<F>()
    }

    /// What a connection that says nothing costs besides the kernel's part: this, and its socket.
    #[test]
    fn a_silent_connection_is_small() {
        let size = future_size(serve);
        assert!(size <= 768, "{size} bytes");
    }
}

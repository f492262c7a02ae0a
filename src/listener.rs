//! Accepts clients: who may come in, how many at once, and what their sockets are set to.

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
};

use crate::{
    config,
    downstream::{self, socket::Socket},
    drain::Signal,
    error::Error,
    proxy::{Downstream, Proxy, tunnel},
};

/// Connections that are told that there are too many, at once; beyond that they are dropped.
const REFUSALS_AT_ONCE: usize = 256;
/// How long such a telling may take.
const REFUSAL_DEADLINE: Duration = Duration::from_secs(2);
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

/// Accepts until the drain starts.
pub async fn run(listener: TcpListener, proxy: Arc<Proxy>, mut drain: Signal) {
    let most = proxy.in_force.now().settings().max_connections;
    let room = Arc::new(Semaphore::new(most));
    let refusals = Arc::new(Semaphore::new(REFUSALS_AT_ONCE));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = drain.started() => return,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(e) => {
                tracing::warn!(
                    "a connection was not accepted: {e}; raise the limit of open files if this stays"
                );
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        // Without this the 200, the handshake and each small answer would wait for the peer's delayed acknowledgement.
        let _ = stream.set_nodelay(true);
        let client = peer.ip().to_canonical();
        let rules = proxy.in_force.now();
        let refusal = rules.admit(client).err();
        match (refusal, room.clone().try_acquire_owned()) {
            (None, Ok(permit)) => {
                let (proxy, drain) = (proxy.clone(), drain.clone());
                tokio::spawn(async move {
                    serve(stream, client, proxy, drain).await;
                    drop(permit);
                });
            }
            (refusal, _) => {
                let error = refusal.unwrap_or(Error::Connections);
                proxy.metrics.request("", error.reason());
                if let Ok(permit) = refusals.clone().try_acquire_owned() {
                    let text = head(&error, rules.settings());
                    tokio::spawn(async move {
                        let _ = tokio::time::timeout(REFUSAL_DEADLINE, tell(stream, text)).await;
                        drop(permit);
                    });
                }
            }
        }
    }
}

async fn serve(stream: TcpStream, client: IpAddr, proxy: Arc<Proxy>, drain: Signal) {
    let _counted = proxy.metrics.connection();
    let socket = Socket::new(stream);
    let downstream = Arc::new(Downstream {
        proxy,
        client,
        socket: socket.clone(),
        drain: drain.clone(),
        pinned: None,
        plan: Default::default(),
    });
    let rest = downstream::serve(socket, downstream.clone(), drain.clone()).await;
    if let (Some(rest), Some(plan)) = (rest, downstream.promised()) {
        tunnel::run(&downstream, plan, rest.stream, rest.early, drain).await;
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
        let mut scrap = [0; 4096];
        while matches!(stream.read(&mut scrap).await, Ok(1..)) {}
    }
}

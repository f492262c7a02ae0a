//! A TCP relay that can go bad, to be put before Postgres or the origin in place of a mock of either.

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{mpsc, watch},
    task::{JoinHandle, JoinSet},
    time::{Instant, sleep_until},
};

use super::{origin_misbehaves::reset_when_closed, runtime};

/// What the link does to bytes and connections, old and new, from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing: bytes pass.
    Pass,
    /// Connections stay open and no byte moves, either way; what is held back moves later.
    Stall,
    /// Every connection is reset, new ones on accept.
    Reset,
    /// Open connections go on; new ones are closed on accept. (A port that refuses cannot be had back for sure.)
    Refuse,
    /// Every byte arrives this much later, in each direction.
    Delay(Duration),
    /// What the client sends arrives; what the server answers is lost for good, as when a reply is under way while the
    /// network goes.
    LoseReplies,
}

/// A running link; dropped, it is closed with all its connections.
pub struct Link {
    address: SocketAddr,
    fault: watch::Sender<Fault>,
    accepted: Arc<AtomicUsize>,
    accepting: JoinHandle<()>,
}

impl Link {
    /// A link on a free port that leads to `target`.
    pub fn to(target: SocketAddr) -> Link {
        let listener = runtime()
            .block_on(TcpListener::bind("127.0.0.1:0"))
            .expect("a port for the link");
        let address = listener.local_addr().expect("the bound address");
        let (fault, watched) = watch::channel(Fault::Pass);
        let accepted = Arc::new(AtomicUsize::new(0));
        let accepting = runtime().spawn(accept(listener, target, watched, accepted.clone()));
        Link {
            address,
            fault,
            accepted,
            accepting,
        }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// How many connections were made to it so far, whatever became of them.
    pub fn accepted(&self) -> usize {
        self.accepted.load(Relaxed)
    }

    /// Changes what the link does.
    pub fn set(&self, fault: Fault) {
        self.fault.send_replace(fault);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(
    listener: TcpListener,
    target: SocketAddr,
    fault: watch::Receiver<Fault>,
    accepted: Arc<AtomicUsize>,
) {
    let mut relays = JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        accepted.fetch_add(1, Relaxed);
        let now = *fault.borrow();
        match now {
            Fault::Refuse => drop(client),
            Fault::Reset => drop(reset_when_closed(&client)),
            _ => {
                relays.spawn(relay(client, target, fault.clone()));
            }
        }
        while relays.try_join_next().is_some() {}
    }
}

/// Relays one connection until both sides have closed, or the link resets it.
async fn relay(
    client: TcpStream,
    target: SocketAddr,
    mut fault: watch::Receiver<Fault>,
) -> io::Result<()> {
    let server = TcpStream::connect(target).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let (requests, replies) = (fault.clone(), fault.clone());
    // A reset by one side ends the connection to the other too, as it would without a link between them.
    let both = async {
        tokio::try_join!(
            pump(
                &mut from_client,
                &mut to_server,
                Direction::Request,
                requests
            ),
            pump(&mut from_server, &mut to_client, Direction::Reply, replies),
        )
    };
    tokio::select! {
        _ = both => {}
        _ = fault.wait_for(|fault| *fault == Fault::Reset) => {
            reset_when_closed(from_client.as_ref())?;
            reset_when_closed(from_server.as_ref())?;
            // A write half that is merely dropped says FIN first, which reads as an orderly end.
            to_client.forget();
            to_server.forget();
        }
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Request,
    Reply,
}

/// Moves bytes one way. Reading and writing are apart, so that a delay holds bytes back without slowing the stream.
async fn pump(
    from: &mut OwnedReadHalf,
    to: &mut OwnedWriteHalf,
    direction: Direction,
    fault: watch::Receiver<Fault>,
) -> io::Result<()> {
    let (held, mut due) = mpsc::channel::<(Instant, Vec<u8>)>(64);
    let mut watched = fault.clone();
    let read = async move {
        loop {
            let mut piece = vec![0; 16 * 1024];
            let read = from.read(&mut piece).await?;
            piece.truncate(read);
            let delay = match *fault.borrow() {
                Fault::Delay(delay) => delay,
                _ => Duration::ZERO,
            };
            if read == 0 || held.send((Instant::now() + delay, piece)).await.is_err() {
                return io::Result::Ok(());
            }
        }
    };
    let write = async move {
        // TCP loses no single piece: a connection that has lost one never speaks again.
        let mut lost = false;
        while let Some((at, piece)) = due.recv().await {
            sleep_until(at).await;
            let losing = watched
                .wait_for(|fault| *fault != Fault::Stall)
                .await
                .is_ok_and(|fault| *fault == Fault::LoseReplies);
            lost |= direction == Direction::Reply && losing;
            // Who no longer listens may still have spoken: that goes its way, and only a reset that is read ends both.
            if !lost && to.write_all(&piece).await.is_err() {
                return Ok(());
            }
        }
        let _ = to.shutdown().await;
        Ok(())
    };
    tokio::try_join!(read, write).map(|_| ())
}

#[cfg(test)]
mod tests {
    use std::{
        io::{ErrorKind, Read, Write},
        net::TcpStream,
        time::Instant,
    };

    use super::*;

    /// An echo behind a link, and a connection through it.
    fn echo() -> (Link, TcpStream) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let link = Link::to(listener.local_addr().unwrap());
        let client = connect(&link);
        std::thread::spawn(move || {
            while let Ok((mut stream, _)) = listener.accept() {
                std::thread::spawn(move || {
                    std::io::copy(&mut stream.try_clone().unwrap(), &mut stream)
                });
            }
        });
        (link, client)
    }

    fn connect(link: &Link) -> TcpStream {
        let client = TcpStream::connect(link.address()).unwrap();
        client
            .set_read_timeout(Some(Duration::from_secs(5)))
            .unwrap();
        client
    }

    fn round_trip(client: &mut TcpStream) -> io::Result<Duration> {
        let sent = Instant::now();
        client.write_all(b"ping")?;
        client.read_exact(&mut [0; 4])?;
        Ok(sent.elapsed())
    }

    #[test]
    fn a_passing_link_passes_bytes_and_half_closes() {
        let (_link, mut client) = echo();
        round_trip(&mut client).unwrap();
        client.write_all(b"last").unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        let mut rest = Vec::new();
        client.read_to_end(&mut rest).unwrap();
        assert_eq!(rest, b"last");
    }

    #[test]
    fn a_stalled_link_moves_nothing_until_it_passes_again() {
        let (link, mut client) = echo();
        round_trip(&mut client).unwrap();
        link.set(Fault::Stall);
        client
            .set_read_timeout(Some(Duration::from_millis(100)))
            .unwrap();
        client.write_all(b"ping").unwrap();
        assert_eq!(
            client.read(&mut [0; 4]).unwrap_err().kind(),
            ErrorKind::WouldBlock
        );
        link.set(Fault::Pass);
        client
            .set_read_timeout(Some(Duration::from_secs(5)))
            .unwrap();
        client.read_exact(&mut [0; 4]).unwrap();
    }

    #[test]
    fn a_delaying_link_takes_twice_its_delay_for_a_round_trip() {
        let (link, mut client) = echo();
        link.set(Fault::Delay(Duration::from_millis(30)));
        assert!(round_trip(&mut client).unwrap() >= Duration::from_millis(60));
    }

    #[test]
    fn a_resetting_link_resets_old_and_new_connections() {
        let (link, mut client) = echo();
        round_trip(&mut client).unwrap();
        link.set(Fault::Reset);
        assert_eq!(
            client.read(&mut [0; 4]).unwrap_err().kind(),
            ErrorKind::ConnectionReset
        );
        assert!(round_trip(&mut connect(&link)).is_err());
        link.set(Fault::Pass);
        round_trip(&mut connect(&link)).unwrap();
    }

    #[test]
    fn a_refusing_link_keeps_old_connections_and_closes_new_ones() {
        let (link, mut client) = echo();
        round_trip(&mut client).unwrap();
        link.set(Fault::Refuse);
        round_trip(&mut client).unwrap();
        assert!(round_trip(&mut connect(&link)).is_err());
    }

    #[test]
    fn a_connection_that_lost_a_reply_never_speaks_again() {
        let (link, mut client) = echo();
        round_trip(&mut client).unwrap();
        link.set(Fault::LoseReplies);
        client
            .set_read_timeout(Some(Duration::from_millis(100)))
            .unwrap();
        assert_eq!(
            round_trip(&mut client).unwrap_err().kind(),
            ErrorKind::WouldBlock
        );
        link.set(Fault::Pass);
        assert_eq!(
            round_trip(&mut client).unwrap_err().kind(),
            ErrorKind::WouldBlock
        );
        round_trip(&mut connect(&link)).unwrap();
    }
}

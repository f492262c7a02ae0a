//! A client's TCP connection, shared between the codec that reads it and the one who watches whether it is still there.
//!
//! A client that leaves is seen by reading, but the codec reads only as far as it is asked to: while a body waits for its
//! turn, or a next request lies buffered, the end of the stream stands behind bytes that nobody takes. The kernel knows.

use std::{
    io,
    net::Shutdown,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};

use rustix::event::{PollFd, PollFlags, Timespec};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpStream, tcp::OwnedReadHalf},
};

/// The connection. Clones share it; only one of them may read and write.
///
/// It is held by its reading half, through which tokio reads into memory that nobody has to clear first and does not ask
/// a second time after it has read all there is. The lock is there for the form; nobody ever waits for it.
#[derive(Clone, Debug)]
pub struct Socket(Arc<Mutex<OwnedReadHalf>>);

impl Socket {
    /// Shares a connection.
    pub fn new(stream: TcpStream) -> Self {
        let (read, write) = stream.into_split();
        // Dropped, it would end our side of the stream.
        write.forget();
        Socket(Arc::new(Mutex::new(read)))
    }

    fn half(&self) -> MutexGuard<'_, OwnedReadHalf> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the peer has closed its side or reset the connection, whatever lies unread before that.
    pub fn has_left(&self) -> bool {
        let half = self.half();
        let mut fds = [PollFd::new(half.as_ref(), PollFlags::RDHUP)];
        let at_once = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        rustix::event::poll(&mut fds, Some(&at_once)).is_ok() && fds[0].revents().intersects(gone)
    }

    /// Breaks the connection when the peer has taken nothing for so long of what it is sent.
    ///
    /// Only the kernel can tell: it has room for megabytes, and until a slow peer has made some again, nothing is written.
    pub fn give_up_after(&self, patience: Option<Duration>) {
        let milliseconds = patience.map_or(0, |p| p.as_millis().try_into().unwrap_or(u32::MAX));
        // Where it cannot be set, such a connection lasts until the peer is gone.
        let _ = rustix::net::sockopt::set_tcp_user_timeout(self.half().as_ref(), milliseconds);
    }

    /// Makes the close of this connection a reset, by which the peer knows that something was cut.
    pub fn reset_when_closed(&self) {
        // Where it cannot be set, the connection ends in order: no worse than before.
        let _ = socket2::SockRef::from(self.half().as_ref()).set_linger(Some(Duration::ZERO));
    }

    /// Waits until there is something to read, which may be the end of the stream. Asks the kernel nothing, so it may be
    /// mistaken.
    ///
    /// # Errors
    /// The runtime is ending.
    pub async fn readable(&self) -> io::Result<()> {
        std::future::poll_fn(|cx| self.half().as_ref().poll_read_ready(cx)).await
    }

    /// Waits for the next byte, which stays to be read; `None` at the end of the stream.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn first_byte(&self) -> io::Result<Option<u8>> {
        std::future::poll_fn(|cx| self.poll_first_byte(cx)).await
    }

    /// The same, asked once. It wakes in place of a read: only who does not read may wait for it.
    pub fn poll_first_byte(&self, cx: &mut Context<'_>) -> Poll<io::Result<Option<u8>>> {
        let mut first = [0];
        let mut first = ReadBuf::new(&mut first);
        ready!(self.half().as_ref().poll_peek(cx, &mut first))?;
        Poll::Ready(Ok(first.filled().first().copied()))
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.half()).poll_read(cx, buf)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.write(cx, |s| s.try_write(buf))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.write(cx, |s| s.try_write_vectored(bufs))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        match socket2::SockRef::from(self.half().as_ref()).shutdown(Shutdown::Write) {
            // The peer was faster.
            Err(e) if e.kind() == io::ErrorKind::NotConnected => Poll::Ready(Ok(())),
            done => Poll::Ready(done),
        }
    }
}

impl Socket {
    fn write(
        &self,
        cx: &mut Context<'_>,
        attempt: impl Fn(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        let half = self.half();
        let stream: &TcpStream = half.as_ref();
        loop {
            ready!(stream.poll_write_ready(cx))?;
            match attempt(stream) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                done => return Poll::Ready(done),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };

    use super::*;

    async fn pair() -> (TcpStream, Socket) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let (client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        (
            client.expect("connected"),
            Socket::new(accepted.expect("accepted").0),
        )
    }

    async fn until_gone(socket: &Socket) {
        let gone = async {
            while !socket.has_left() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(std::time::Duration::from_secs(5), gone)
            .await
            .expect("the end is seen");
    }

    #[tokio::test]
    async fn an_end_behind_unread_bytes_is_seen_and_the_bytes_stay() {
        let (mut client, mut socket) = pair().await;
        client.write_all(b"unread").await.expect("written");
        assert_eq!(socket.first_byte().await.expect("alive"), Some(b'u'));
        assert!(!socket.has_left());
        drop(client);
        until_gone(&socket).await;
        let mut all = Vec::new();
        socket.read_to_end(&mut all).await.expect("read");
        assert_eq!(all, b"unread");
    }

    #[tokio::test]
    async fn a_peer_that_takes_nothing_for_long_enough_is_given_up() {
        let (_peer, mut socket) = pair().await;
        socket.give_up_after(Some(Duration::from_secs(3600)));
        socket.give_up_after(Some(Duration::from_secs(1)));
        let (piece, began) = (vec![0; 64 * 1024], tokio::time::Instant::now());
        let broken = loop {
            if let Err(e) = socket.write_all(&piece).await {
                break e;
            }
        };
        assert_eq!(broken.kind(), io::ErrorKind::TimedOut);
        assert!(began.elapsed() >= Duration::from_secs(1));
    }

    #[tokio::test]
    async fn a_reset_is_seen() {
        let (client, socket) = pair().await;
        socket2::SockRef::from(&client)
            .set_linger(Some(Duration::ZERO))
            .expect("set");
        drop(client);
        until_gone(&socket).await;
    }
}

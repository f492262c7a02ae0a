//! The origin's bad manners, written by hand because a correct HTTP library refuses to break its promises.

use std::io;

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpStream,
};

use super::{
    http_text::Head,
    origin::{Book, Manner},
};

/// Makes the close of `tcp` a RST: lingering for zero seconds drops what is unsent and resets.
pub fn reset_when_closed(tcp: &TcpStream) -> io::Result<()> {
    socket2::SockRef::from(tcp).set_linger(Some(std::time::Duration::ZERO))
}

/// Reads one request, notes it, and answers as `manner` says.
///
/// # Errors
/// When the peer goes away first.
pub async fn answer<S>(
    mut stream: S,
    manner: Manner,
    connection: usize,
    book: &Book,
) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut text = Vec::new();
    while !text.ends_with(b"\r\n\r\n") {
        text.push(stream.read_u8().await?);
    }
    let head = Head::parse(&text);
    let mut words = head.start_line.split(' ').map(str::to_owned);
    let (method, target) = (
        words.next().unwrap_or_default(),
        words.next().unwrap_or_default(),
    );
    book.note(connection, method, target, head.fields);
    let answer: &[u8] = match manner {
        Manner::ResetMidHead => b"HTTP/1.1 200 OK\r\nContent-Le",
        Manner::HalfBody => b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf.",
        Manner::CloseUnannounced => b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbye.",
        Manner::Serve | Manner::CloseOnAccept | Manner::Silent => b"",
    };
    stream.write_all(answer).await?;
    stream.flush().await?;
    if manner != Manner::ResetMidHead {
        stream.shutdown().await?;
    }
    Ok(())
}

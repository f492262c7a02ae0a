//! A client's byte stream as requests and answers. What time it is, and who may wait how long, is not known here.
//!
//! Every byte is read by the follower of [`framing`](super::framing) before anything else reads it, and a head that it
//! refuses is a request all the same: its refusal takes the way of all answers, after those to the requests before it,
//! with a record, and with its reason.

use std::{
    fmt::{self, Write as _},
    io,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{
    Method, Request, Response, StatusCode, Version,
    header::{CONNECTION, CONTENT_LENGTH, EXPECT, TE, TRANSFER_ENCODING},
    request,
};
use http_body::Body as _;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::{
    downstream::{
        Rest,
        framing::{Fault, Framing},
        incoming::{Incoming, Source},
    },
    error::Error,
    http1::{
        Inbox, READ_AT_FIRST,
        body::{Decoder, Part},
        head,
        outbox::{Encoder, Outbox},
    },
    proxy::answer::Answer,
    upstream::exchange::BODY_BROKEN,
};

/// So much of a body that nobody wanted is thrown away, if it is there already, to keep the connection.
const DISCARDED: usize = 64 * 1024;

/// What a client that waits for leave to send its body is told (RFC 9110 section 10.1.1).
const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// The stream. It is shared with the body of the request under way, which is read by whoever sends it on.
#[derive(Debug)]
pub struct Connection<I>(Arc<Shared<I>>);

struct Shared<I>(Mutex<Inner<I>>);

impl<I> fmt::Debug for Shared<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

struct Inner<I> {
    stream: I,
    inbox: Inbox,
    /// So many of the bytes in the inbox may be read.
    readable: usize,
    framing: Framing,
    /// Heads that were taken out of the inbox.
    taken: u64,
    fault: Option<Fault>,
    outbox: Outbox,
    /// Of the body of the request under way.
    decoder: Decoder,
    /// Its client waits for leave to send it.
    expects: bool,
    /// Whether the client's next byte is waited for, so that its end would be seen.
    reading: bool,
    /// Its end was seen.
    ended: bool,
}

/// What a client asks.
#[derive(Debug)]
pub struct Asked {
    /// The request.
    pub request: Request<Incoming>,
    /// A refusal where its form is not right.
    pub verdict: Result<(), Error>,
    /// What its answer depends on.
    pub form: Form,
}

/// What the form of an answer depends on.
#[derive(Clone, Copy, Debug)]
pub struct Form {
    head: bool,
    connect: bool,
    /// HTTP/1.0
    old: bool,
    /// Whether the client reads trailers (RFC 9110 section 6.5.1).
    trailers: bool,
    /// Whether the client means to go on with this connection.
    kept: bool,
}

/// An answer on its way to the client.
#[derive(Debug)]
pub struct Answering {
    answer: Answer,
    encoder: Encoder,
    /// All of it is in the outbox.
    ended: bool,
    /// It breaks off where it is.
    broken: bool,
    /// Whether the connection goes on.
    pub kept: bool,
}

/// An answer whose body broke off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BrokenOff;

impl<I: AsyncRead + AsyncWrite + Unpin + Send + 'static> Connection<I> {
    /// On `stream`, from its first byte.
    pub fn new(stream: I) -> Self {
        Connection(Arc::new(Shared(Mutex::new(Inner {
            stream,
            inbox: Inbox::default(),
            readable: 0,
            framing: Framing::default(),
            taken: 0,
            fault: None,
            outbox: Outbox::default(),
            decoder: Decoder::Over,
            expects: false,
            reading: false,
            ended: false,
        }))))
    }

    fn inner(&self) -> MutexGuard<'_, Inner<I>> {
        self.0.inner()
    }

    /// The next request; nothing if the stream has ended.
    pub fn poll_asked(&self, cx: &mut Context<'_>) -> Poll<Option<Asked>> {
        let mut inner = self.inner();
        loop {
            if inner.taken < inner.framing.heads() {
                inner.taken += 1;
                return Poll::Ready(Some(inner.take_request(&self.0)));
            }
            match (inner.fault, inner.readable) {
                (Some(Fault::Refused(e)), 0) => {
                    return Poll::Ready(Some(refused(&inner.inbox.bytes, e)));
                }
                (None, 0) => {}
                // The end of a body that nobody wanted, and it was malformed.
                _ => return Poll::Ready(None),
            }
            match ready!(inner.poll_fill(cx)) {
                Ok(1..) => {}
                Err(_) => return Poll::Ready(None),
                Ok(0) if inner.inbox.bytes.iter().all(|b| b"\r\n".contains(b)) => {
                    return Poll::Ready(None);
                }
                Ok(0) => inner.fault = Some(Fault::Refused(HALF_A_HEAD)),
            }
        }
    }

    /// Whether a part of a request has come.
    pub fn has_begun(&self) -> bool {
        !self.inner().inbox.bytes.is_empty()
    }

    /// Whether somebody has waited for the client's next byte since this was last asked: who does so at each look sees its
    /// end, and who no longer does sees nothing.
    pub fn was_reading(&self) -> bool {
        std::mem::take(&mut self.inner().reading)
    }

    /// Lets go of the memory that only an exchange needs.
    pub fn rest(&self) {
        let mut inner = self.inner();
        inner.inbox.rest();
        inner.outbox.rest();
    }

    /// Puts the head of an answer into the outbox. With `last` it tells the client that it is the last.
    pub fn begin(&self, answer: Response<Answer>, form: Form, last: bool) -> Answering {
        let mut inner = self.inner();
        // Who has not been given leave to send a body is not given it behind the answer.
        let unread =
            std::mem::take(&mut inner.expects) || matches!(inner.fault, Some(Fault::Broken(_)));
        let (parts, mut answer) = answer.into_parts();
        // With an answer of our own nobody reads the request's body any more.
        let unread = unread || answer.is_ours() && !inner.discard();
        let (status, fields) = (parts.status, &parts.headers);
        let switched = status == StatusCode::SWITCHING_PROTOCOLS;
        let opened = form.connect && status.is_success();
        let lengthless = switched || opened || status == StatusCode::NO_CONTENT;
        let bodied = !lengthless && !form.head && status != StatusCode::NOT_MODIFIED;
        let length = answer.size_hint().exact();
        let chunked = bodied && length.is_none() && !form.old;
        let kept = form.kept
            && !last
            && !unread
            && !head::has_option(fields, "close")
            && (!bodied || length.is_some() || chunked);
        let out = &mut inner.outbox.lead;
        let old = form.old || parts.version == Version::HTTP_10;
        head::write_status_line(&parts, old, out);
        let spelling = answer.take_spelling();
        // These have no length, whatever the origin says (RFC 9110 section 8.6).
        let said = fields.iter();
        let said = said.filter(|(name, _)| !lengthless || **name != CONTENT_LENGTH);
        spelling.write(said, out);
        match length {
            _ if lengthless || fields.contains_key(CONTENT_LENGTH) => {}
            Some(length) if bodied || length > 0 => {
                // Writing to memory does not fail.
                let _ = write!(out, "content-length: {length}\r\n");
            }
            _ if chunked => head::write_field(spelling.of(&TRANSFER_ENCODING), b"chunked", out),
            _ => {}
        }
        if !switched && !opened && !fields.contains_key(CONNECTION) {
            match (kept, form.old) {
                (true, true) => out.extend_from_slice(b"connection: keep-alive\r\n"),
                (false, false) => out.extend_from_slice(b"connection: close\r\n"),
                // Each version's own way.
                (true, false) | (false, true) => {}
            }
        }
        out.extend_from_slice(b"\r\n");
        Answering {
            encoder: match (chunked, form.trailers) {
                (true, true) => Encoder::chunked(fields),
                (true, false) => Encoder::Chunked(Vec::new()),
                (false, _) => Encoder::Plain,
            },
            answer,
            ended: !bodied,
            broken: false,
            kept,
        }
    }

    /// Sends on what there is of an answer, to its last byte.
    ///
    /// # Errors
    /// Its body has broken off, and what came before is sent; or the client takes no more.
    pub fn poll_answer(
        &self,
        answering: &mut Answering,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), BrokenOff>> {
        loop {
            let waits = answering.gather(self, cx).is_pending();
            let mut inner = self.inner();
            let Inner { stream, outbox, .. } = &mut *inner;
            match outbox.poll_flush(stream, cx) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(_)) => return Poll::Ready(Err(BrokenOff)),
                Poll::Pending => {
                    // A client may read nothing before it has said all.
                    drop(inner);
                    answering.answer.poll_upload(cx);
                    return Poll::Pending;
                }
            }
            match (answering.broken, answering.ended) {
                (true, _) => return Poll::Ready(Err(BrokenOff)),
                (_, true) => return Poll::Ready(Ok(())),
                _ if waits => return Poll::Pending,
                _ => {}
            }
        }
    }

    /// After an answer: whether another request may come, or what is left of the last was in the way.
    pub fn go_on(&self) -> bool {
        let mut inner = self.inner();
        if inner.framing.is_undecided() {
            inner.framing.decide(false);
            inner.follow();
        }
        inner.reading = false;
        inner.discard() && !matches!(inner.fault, Some(Fault::Broken(_)))
    }

    /// Writes a text that is no answer to anything.
    pub async fn say(&self, text: &'static [u8]) -> io::Result<()> {
        self.inner().outbox.lead.extend_from_slice(text);
        std::future::poll_fn(|cx| {
            let mut inner = self.inner();
            let Inner { stream, outbox, .. } = &mut *inner;
            outbox.poll_flush(stream, cx)
        })
        .await
    }

    /// Ends our side of the stream.
    pub async fn shutdown(&self) -> io::Result<()> {
        std::future::poll_fn(|cx| Pin::new(&mut self.inner().stream).poll_shutdown(cx)).await
    }

    /// Whether the client's end was seen: nothing more comes of it.
    pub fn has_ended(&self) -> bool {
        self.inner().ended
    }

    /// Reads and forgets; whether there was anything to read.
    pub async fn forget(&self, scrap: &mut [u8]) -> bool {
        let mut scrap = ReadBuf::new(scrap);
        let read = std::future::poll_fn(|cx| {
            let mut inner = self.inner();
            Pin::new(&mut inner.stream).poll_read(cx, &mut scrap)
        });
        read.await.is_ok() && !scrap.filled().is_empty()
    }

    /// The stream, and what was read of it beyond the last request. Nothing if a body is still being read.
    pub fn into_rest(self) -> Option<Rest<I>> {
        let inner = Arc::into_inner(self.0)?.0.into_inner();
        let Inner { stream, inbox, .. } = inner.unwrap_or_else(PoisonError::into_inner);
        Some(Rest {
            stream,
            // Copied: a tunnel would hold all of the buffer, mostly for no byte at all, until its client says something.
            early: Bytes::copy_from_slice(&inbox.bytes),
        })
    }
}

impl Answering {
    /// Moves what there is of the body into the outbox, as far as there is room.
    fn gather<I>(&mut self, connection: &Connection<I>, cx: &mut Context<'_>) -> Poll<()> {
        while !self.ended && !self.broken && connection.0.inner().outbox.has_room() {
            // Not under the lock: the origin's connection may still read the request's body.
            let frame = match self.answer.is_end_stream() {
                true => None,
                false => ready!(Pin::new(&mut self.answer).poll_frame(cx)),
            };
            let mut inner = connection.0.inner();
            match frame {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => inner.outbox.data(&self.encoder, data),
                    Err(frame) => {
                        inner.outbox.end(&self.encoder, frame.trailers_ref());
                        self.ended = true;
                    }
                },
                Some(Err(_)) => self.broken = true,
                None => {
                    inner.outbox.end(&self.encoder, None);
                    self.ended = true;
                }
            }
        }
        if self.ended {
            self.answer.settle();
        }
        Poll::Ready(())
    }
}

/// What a client is told that leaves amid a head. Who only stopped sending gets an answer.
const HALF_A_HEAD: Error =
    Error::Malformed("the connection ended within a request head; send all of it");

impl<I> Shared<I> {
    fn inner(&self) -> MutexGuard<'_, Inner<I>> {
        // One task uses it; the lock is there for the form, and nobody ever waits for it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<I: AsyncRead + AsyncWrite + Unpin + Send + 'static> Inner<I> {
    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let polled = self.inbox.poll_fill(&mut self.stream, cx);
        self.reading = polled.is_pending();
        self.ended |= matches!(polled, Poll::Ready(Ok(0) | Err(_)));
        if let Poll::Ready(Ok(1..)) = polled {
            self.follow();
        }
        polled
    }

    /// Reads on, in front of everybody.
    fn follow(&mut self) {
        let (passing, fault) = self.framing.follow(&self.inbox.bytes[self.readable..]);
        self.readable += passing;
        // The first fault is the last: nothing is followed after it.
        self.fault = self.fault.or(fault);
    }

    /// Throws away what is there of a body that nobody wants; whether that was all of it.
    fn discard(&mut self) -> bool {
        let mut discarded = 0;
        while discarded < DISCARDED {
            let Inner {
                inbox,
                readable,
                decoder,
                ..
            } = &mut *self;
            match decoder.decode(&mut inbox.bytes, readable) {
                Ok(Part::End) => {
                    // A request that waits holds what its head was read into.
                    inbox.shrink(READ_AT_FIRST);
                    return true;
                }
                Ok(Part::Data(data)) => discarded += data.len(),
                Ok(Part::Trailers(_)) => {}
                Ok(Part::Later) | Err(_) => return false,
            }
        }
        false
    }

    fn take_request(&mut self, shared: &Arc<Shared<I>>) -> Asked {
        let before = self.inbox.bytes.len();
        let read = head::request(&mut self.inbox.bytes);
        self.readable = self
            .readable
            .saturating_sub(before - self.inbox.bytes.len());
        let Ok((parts, spelling)) = read else {
            // What the follower lets pass can be read; or there is a fault in one of them, and nothing may go anywhere.
            self.fault = Some(Fault::Broken(UNREADABLE));
            return refused(&self.inbox.bytes, UNREADABLE);
        };
        let form = Form {
            head: parts.method == Method::HEAD,
            connect: parts.method == Method::CONNECT,
            old: parts.version == Version::HTTP_10,
            trailers: reads_trailers(&parts),
            kept: head::is_kept(parts.version, &parts.headers),
        };
        self.decoder = decoder(&parts);
        self.expects = !self.decoder.is_over()
            && !form.old
            && parts
                .headers
                .get(EXPECT)
                .is_some_and(|v| v.as_bytes().eq_ignore_ascii_case(b"100-continue"));
        let body = match &self.decoder {
            Decoder::Over => Incoming::none(spelling),
            decoder => Incoming::new(shared.clone(), decoder.left(), spelling),
        };
        Asked {
            request: Request::from_parts(parts, body),
            verdict: Ok(()),
            form,
        }
    }
}

const UNREADABLE: Error = Error::Malformed("the request cannot be read");

/// What the follower has found well-formed.
fn decoder(parts: &request::Parts) -> Decoder {
    if parts.method == Method::CONNECT {
        return Decoder::Over;
    }
    if parts.headers.contains_key(TRANSFER_ENCODING) {
        return Decoder::chunked();
    }
    let length = parts.headers.get(CONTENT_LENGTH);
    let length = length.and_then(|v| v.to_str().ok()?.parse().ok());
    length.map_or(Decoder::Over, Decoder::of_length)
}

fn reads_trailers(parts: &request::Parts) -> bool {
    let mut codings = parts.headers.get_all(TE).iter();
    codings.any(|v| {
        let mut codings = v.as_bytes().split(|b| *b == b',');
        codings.any(|c| c.trim_ascii().eq_ignore_ascii_case(b"trailers"))
    })
}

/// A request to stand for a head that is refused. The method stays: it decides what form the answer has.
fn refused(head: &[u8], e: Error) -> Asked {
    let head = head.trim_ascii_start();
    let known = [Method::CONNECT, Method::HEAD, Method::POST];
    let begins = |m: &Method| {
        let rest = head.strip_prefix(m.as_str().as_bytes());
        rest.is_some_and(|rest| rest.starts_with(b" "))
    };
    let method = known.into_iter().find(begins).unwrap_or(Method::GET);
    let form = Form {
        head: method == Method::HEAD,
        connect: method == Method::CONNECT,
        old: false,
        trailers: false,
        kept: false,
    };
    let mut request = Request::new(Incoming::default());
    *request.method_mut() = method;
    Asked {
        request,
        verdict: Err(e),
        form,
    }
}

impl<I: AsyncRead + AsyncWrite + Unpin + Send + 'static> Source for Shared<I> {
    fn poll_part(&self, cx: &mut Context<'_>) -> Poll<Result<Part, Error>> {
        let mut inner = self.inner();
        if std::mem::take(&mut inner.expects) {
            inner.outbox.lead.extend_from_slice(CONTINUE);
        }
        loop {
            let Inner {
                stream,
                inbox,
                readable,
                decoder,
                outbox,
                ..
            } = &mut *inner;
            match decoder.decode(&mut inbox.bytes, readable) {
                Ok(Part::Later) => {}
                Ok(part) => return Poll::Ready(Ok(part)),
                Err(_) => return Poll::Ready(Err(BODY_BROKEN)),
            }
            // Leave to send, if it is to be given. What the client does not take now goes out with the answer.
            if !outbox.is_flushed() {
                let _ = outbox.poll_flush(stream, cx);
            }
            if inner.fault.is_some() {
                return Poll::Ready(Err(BODY_BROKEN));
            }
            match ready!(inner.poll_fill(cx)) {
                Ok(1..) => {}
                Ok(0) | Err(_) => return Poll::Ready(Err(BODY_BROKEN)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};

    use super::*;

    const SWITCH: &[u8] =
        b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";

    /// A client that has said something, and the connection on which it is heard.
    async fn said(text: &[u8]) -> (DuplexStream, Connection<DuplexStream>) {
        let (mut client, server) = duplex(64 * 1024);
        client.write_all(text).await.expect("room");
        (client, Connection::new(server))
    }

    async fn asked(connection: &Connection<DuplexStream>) -> Asked {
        let asked = std::future::poll_fn(|cx| connection.poll_asked(cx)).await;
        asked.expect("the client is there")
    }

    async fn answer(connection: &Connection<DuplexStream>, form: Form, text: &'static str) -> bool {
        let mut answering = connection.begin(Response::new(Answer::text(text)), form, false);
        let sent = std::future::poll_fn(|cx| connection.poll_answer(&mut answering, cx)).await;
        assert_eq!(sent, Ok(()));
        answering.kept && connection.go_on()
    }

    async fn heard(client: &mut DuplexStream, length: usize) -> String {
        let mut bytes = vec![0; length];
        client.read_exact(&mut bytes).await.expect("so much");
        String::from_utf8(bytes).expect("text")
    }

    #[tokio::test]
    async fn what_comes_before_a_switch_is_answered_is_left_as_it_came() {
        let (_client, connection) = said(&[SWITCH, b"\x81\0\n"].concat()).await;
        assert!(asked(&connection).await.verdict.is_ok());
        assert_eq!(
            &connection.into_rest().expect("nobody else's").early[..],
            b"\x81\0\n"
        );
    }

    #[tokio::test]
    async fn what_comes_before_a_switch_is_refused_is_read_as_requests() {
        let next = b"GET /y HTTP/1.1\r\nHost: a\r\n\r\n";
        let (_client, connection) = said(&[SWITCH, next].concat()).await;
        let first = asked(&connection).await;
        assert!(answer(&connection, first.form, "no").await);
        assert_eq!(asked(&connection).await.request.uri(), "/y");

        let (_client, connection) = said(&[SWITCH, b"\x81\0\n"].concat()).await;
        let first = asked(&connection).await;
        assert!(answer(&connection, first.form, "no").await);
        assert!(asked(&connection).await.verdict.is_err());
    }

    #[tokio::test]
    async fn requests_in_a_row_are_answered_in_a_row_and_the_one_refused_is_the_last() {
        let stream = b"GET /1 HTTP/1.1\r\nHost: a\r\n\r\nHEAD /2 HTTP/1.1\r\nHost: a\r\n\r\nPOST / HTTP/1.1\r\n\r\n";
        let (mut client, connection) = said(stream).await;
        let (one, two) = (
            "HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\none",
            "HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n",
        );
        let first = asked(&connection).await;
        assert!(answer(&connection, first.form, "one").await);
        assert_eq!(heard(&mut client, one.len()).await, one);
        let second = asked(&connection).await;
        assert!(answer(&connection, second.form, "two").await);
        assert_eq!(heard(&mut client, two.len()).await, two);
        let third = asked(&connection).await;
        assert_eq!(
            (third.request.method(), third.verdict.is_err()),
            (&Method::POST, true)
        );
        assert!(!answer(&connection, third.form, "bad").await);
    }

    #[tokio::test]
    async fn leave_to_send_a_body_is_given_when_it_is_asked_for_and_not_behind_the_answer() {
        let stream =
            b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n";
        let (mut client, connection) = said(stream).await;
        let mut first = asked(&connection).await;
        let reading = std::future::poll_fn(|cx| Pin::new(first.request.body_mut()).poll_frame(cx));
        let sending = async {
            assert_eq!(
                heard(&mut client, CONTINUE.len()).await.as_bytes(),
                CONTINUE
            );
            client.write_all(b"ab").await.expect("room");
        };
        let (frame, ()) = tokio::join!(reading, sending);
        let frame = frame.expect("a body").expect("whole");
        assert_eq!(frame.into_data().expect("data"), "ab");
        assert!(answer(&connection, first.form, "").await);

        let (mut client, connection) = said(stream).await;
        let first = asked(&connection).await;
        assert!(
            !answer(&connection, first.form, "no").await,
            "it may send the body all the same"
        );
        let part = std::future::poll_fn(|cx| connection.0.poll_part(cx));
        let at_once = std::time::Duration::ZERO;
        assert!(tokio::time::timeout(at_once, part).await.is_err());
        drop((first, connection));
        let mut all = String::new();
        client.read_to_string(&mut all).await.expect("text");
        assert!(all.ends_with("\r\n\r\nno"), "{all}");
    }

    /// Keeps what is written until it is flushed, the first time in vain: as TLS does above a socket that is not ready.
    struct Keeping {
        stream: DuplexStream,
        kept: Vec<u8>,
        asked: bool,
    }

    impl AsyncRead for Keeping {
        fn poll_read(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buf: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            Pin::new(&mut self.stream).poll_read(cx, buf)
        }
    }

    impl AsyncWrite for Keeping {
        fn poll_write(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            self.kept.extend_from_slice(bytes);
            Poll::Ready(Ok(bytes.len()))
        }

        fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            if !self.kept.is_empty() && !std::mem::replace(&mut self.asked, true) {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            let Keeping { stream, kept, .. } = &mut *self;
            while !kept.is_empty() {
                let written = ready!(Pin::new(&mut *stream).poll_write(cx, kept))?;
                kept.drain(..written);
            }
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.stream).poll_shutdown(cx)
        }
    }

    #[tokio::test]
    async fn leave_to_send_a_body_is_not_kept_back_by_a_stream_that_is_slow_to_flush() {
        let (mut client, stream) = duplex(64 * 1024);
        let text =
            b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n";
        client.write_all(text).await.expect("room");
        let connection = Connection::new(Keeping {
            stream,
            kept: Vec::new(),
            asked: false,
        });
        let asked = std::future::poll_fn(|cx| connection.poll_asked(cx)).await;
        let mut request = asked.expect("the client is there").request;
        let reading = std::future::poll_fn(|cx| Pin::new(request.body_mut()).poll_frame(cx));
        let sending = async {
            heard(&mut client, CONTINUE.len()).await;
            client.write_all(b"ab").await.expect("room");
        };
        let both = async { tokio::join!(reading, sending) };
        let (frame, ()) = tokio::time::timeout(std::time::Duration::from_secs(10), both)
            .await
            .expect("the leave has come");
        let frame = frame.expect("a body").expect("whole");
        assert_eq!(frame.into_data().expect("data"), "ab");
    }

    #[tokio::test]
    async fn a_body_that_nobody_wanted_is_in_the_way_unless_it_is_there() {
        let stream = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nabcdGET /y HTTP/1.1\r\nHost: a\r\n\r\n";
        let (_client, connection) = said(stream).await;
        let first = asked(&connection).await;
        assert!(answer(&connection, first.form, "no").await);
        assert_eq!(asked(&connection).await.request.uri(), "/y");
        let (_client, connection) = said(&stream[..stream.len() - 30]).await;
        let first = asked(&connection).await;
        assert!(!answer(&connection, first.form, "no").await);
    }

    #[tokio::test]
    async fn a_client_that_leaves_amid_a_head_is_told_and_one_between_requests_is_not() {
        for (text, told) in [("GET / HTTP/1.1\r\nHo", true), ("\r\n", false), ("", false)] {
            let (client, connection) = said(text.as_bytes()).await;
            drop(client);
            let asked = std::future::poll_fn(|cx| connection.poll_asked(cx)).await;
            assert_eq!(
                asked.is_some_and(|a| a.verdict == Err(HALF_A_HEAD)),
                told,
                "{text}"
            );
        }
    }
}

//! One request and its answer on one ready connection.
//!
//! The connection is read and written by the task that waits for the answer and later by the one that reads its body, in turn
//! with them. So a request crosses from its client's socket to its origin's without a task switch, and dropping the
//! exchange at any point closes the connection: a half-used one is never seen again.

mod answer;
mod outgoing;

use std::{
    pin::Pin,
    sync::{Arc, atomic::Ordering::Relaxed},
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use http::{
    Method, Request, Response, StatusCode, Version,
    header::{CONTENT_LENGTH, TRANSFER_ENCODING},
    response,
};
use http_body::Body as _;
use tokio::{
    io::{AsyncRead as _, ReadBuf},
    task::unconstrained,
    time::{Instant, Sleep, sleep_until},
};

pub use self::{
    answer::AnswerBody,
    outgoing::{BODY_BROKEN, Outgoing},
};
use crate::{
    error::Error,
    headers,
    http1::{
        Inbox, READ_AT_FIRST,
        body::Decoder,
        head::{self, Spelling},
        outbox::{Encoder, Outbox},
    },
    upstream::{Target, pool::Pool, stream::Stream},
};

/// What is read at once at most of clear text: more than of what was encrypted, for it is in no other buffer.
const CLEAR_TEXT_AT_MOST: usize = 512 * 1024;

/// The room for reading that an idle connection keeps for a moment: the next answer is often like the last.
const KEPT_ROOM: usize = 64 * 1024;

/// Interim answers (1xx) that an origin may send before its answer; each is read and left out, which must have an end.
const INTERIM_LIMIT: usize = 16;

/// An origin that sends nothing for this long, while nothing is sent to it either, is given up.
pub const ANSWER_DEADLINE: Duration = Duration::from_secs(60);

/// A connection that a request can be written to.
#[derive(Debug)]
pub struct Ready(Box<Wire>);

#[derive(Debug)]
struct Wire {
    stream: Stream,
    inbox: Inbox,
    outbox: Outbox,
    /// For the wait for an answer. It lives with the connection: to put a timer off is cheap, to set one up is not.
    patience: Pin<Box<Sleep>>,
    target: Target,
    pool: Arc<Pool>,
}

/// A request that was not answered.
#[derive(Debug)]
pub enum Unanswered {
    /// Nothing of it was written; here it is back.
    Unsent(Box<Request<Outgoing>>),
    /// Some of it may have been written: it must not be sent again.
    Failed(Error),
}

impl Ready {
    /// Speaks HTTP/1.1 on a stream.
    pub fn new(stream: Stream, target: Target, pool: Arc<Pool>) -> Self {
        let inbox = match &stream {
            Stream::Plain(_) => Inbox::with_room(READ_AT_FIRST, CLEAR_TEXT_AT_MOST),
            Stream::Tls(_) => Inbox::default(),
        };
        Ready(Box::new(Wire {
            stream,
            inbox,
            outbox: Outbox::default(),
            patience: Box::pin(sleep_until(Instant::now() + ANSWER_DEADLINE)),
            target,
            pool,
        }))
    }

    /// Whom it leads to.
    pub fn target(&self) -> &Target {
        &self.0.target
    }

    /// Whether the origin has not closed it, as far as this machine knows.
    pub fn is_alive(&mut self) -> bool {
        // Without regard to how much this task has done already: a read that is put off for that would pass for a sign of life.
        let ended = unconstrained(std::future::poll_fn(|cx| self.poll_end(cx)));
        let mut cx = Context::from_waker(Waker::noop());
        std::pin::pin!(ended).poll(&mut cx).is_pending()
    }

    /// Itself, if it is alive.
    pub fn if_alive(mut self) -> Option<Self> {
        self.is_alive().then_some(self)
    }

    /// Resolves when the connection ends.
    pub async fn ended(&mut self) {
        std::future::poll_fn(|cx| self.poll_end(cx)).await;
    }

    /// While nothing is asked, whatever comes is an end: the close of the stream, an error, or bytes that answer nothing.
    /// Which does not matter to a request that has not been sent.
    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut scrap = [0; 64];
        let mut scrap = ReadBuf::new(&mut scrap);
        let _ = ready!(Pin::new(&mut self.0.stream).poll_read(cx, &mut scrap));
        Poll::Ready(())
    }

    /// Sends a request and waits for the head of its answer. As long as the request's body moves, the origin has time.
    ///
    /// # Errors
    /// Nothing of the request was written, and it comes back; or it may have been, and the connection is gone.
    pub async fn send(
        mut self,
        request: Box<Request<Outgoing>>,
    ) -> Result<Response<AnswerBody>, Unanswered> {
        if !self.is_alive() {
            return Err(Unanswered::Unsent(request));
        }
        let wire = &mut *self.0;
        let to_head = request.method() == Method::HEAD;
        let sent = request.body().sent.clone();
        let mut before = sent.load(Relaxed);
        let mut upload = Upload::new(request, &mut wire.outbox);
        // Nothing of it has been written.
        let mut whole = true;
        wire.patience
            .as_mut()
            .reset(Instant::now() + ANSWER_DEADLINE);
        let (mut interim, mut seen) = (0, 0);
        let outcome = std::future::poll_fn(|cx| {
            let Wire {
                stream,
                inbox,
                outbox,
                patience,
                ..
            } = &mut *wire;
            if let Poll::Ready(Err(e)) = upload.poll(stream, outbox, cx) {
                return Poll::Ready(Err(e));
            }
            whole &= !outbox.has_moved();
            if upload.cut && whole {
                return Poll::Ready(Ok(None));
            }
            loop {
                match head::response(&mut inbox.bytes, &mut seen) {
                    Err(_) => return Poll::Ready(Err(Error::BadResponse)),
                    Ok(Some((answer, _))) if is_interim(answer.status) => {
                        interim += 1;
                        if interim > INTERIM_LIMIT {
                            return Poll::Ready(Err(Error::BadResponse));
                        }
                        continue;
                    }
                    Ok(Some(answer)) => return Poll::Ready(Ok(Some(answer))),
                    Ok(None) => {}
                }
                match inbox.poll_fill(stream, cx) {
                    Poll::Ready(Ok(1..)) => {}
                    Poll::Ready(Ok(0) | Err(_)) => {
                        return Poll::Ready(match whole {
                            true => Ok(None),
                            false => Err(Error::Terminated),
                        });
                    }
                    Poll::Pending => break,
                }
            }
            while patience.as_mut().poll(cx).is_ready() {
                let now = sent.load(Relaxed);
                if now == before {
                    return Poll::Ready(Err(Error::ResponseTimeout));
                }
                before = now;
                patience.as_mut().reset(Instant::now() + ANSWER_DEADLINE);
            }
            Poll::Pending
        })
        .await;
        match outcome.map_err(Unanswered::Failed)? {
            Some((answer, spelling)) => answered(self, to_head, answer, spelling, upload),
            None => Err(match upload.request {
                Some(request) if !upload.begun => Unanswered::Unsent(request),
                _ => Unanswered::Failed(Error::Terminated),
            }),
        }
    }

    /// Lets go of the memory that only an exchange needs.
    pub fn rest(&mut self) {
        self.0.inbox.rest();
        self.0.outbox.rest();
    }

    /// Back to the pool, if it can take another request.
    fn release(mut self) {
        let Wire {
            stream,
            inbox,
            outbox,
            ..
        } = &mut *self.0;
        if inbox.bytes.is_empty() && outbox.is_empty() {
            outbox.has_moved();
            inbox.shrink(KEPT_ROOM);
            stream.rest();
            let pool = self.0.pool.clone();
            pool.put(self);
        }
    }
}

fn is_interim(status: StatusCode) -> bool {
    status.is_informational() && status != StatusCode::SWITCHING_PROTOCOLS
}

/// RFC 9112 section 6.3. What is ambiguous, [`headers::is_framed_well`] refuses.
fn decoder(to_head: bool, answer: &response::Parts) -> Result<Decoder, Error> {
    let bodyless = [
        StatusCode::NO_CONTENT,
        StatusCode::NOT_MODIFIED,
        StatusCode::SWITCHING_PROTOCOLS,
    ];
    if to_head || bodyless.contains(&answer.status) {
        return Ok(Decoder::Over);
    }
    if answer.headers.contains_key(TRANSFER_ENCODING) {
        // HTTP/1.0 has none (RFC 9112 section 6.1).
        return match answer.version {
            Version::HTTP_10 => Err(Error::BadResponse),
            _ => Ok(Decoder::chunked()),
        };
    }
    match answer.headers.get(CONTENT_LENGTH) {
        None => Ok(Decoder::UntilClose),
        Some(length) => {
            let length = length.to_str().ok().and_then(|text| text.parse().ok());
            length.map(Decoder::of_length).ok_or(Error::BadResponse)
        }
    }
}

fn answered(
    ready: Ready,
    to_head: bool,
    answer: response::Parts,
    spelling: Spelling,
    upload: Upload,
) -> Result<Response<AnswerBody>, Unanswered> {
    if !headers::is_framed_well(answer.status, &answer.headers) {
        return Err(Unanswered::Failed(Error::BadResponse));
    }
    let decoder = decoder(to_head, &answer).map_err(Unanswered::Failed)?;
    // Who gives this one a length may send so much.
    let bodied = answer.status == StatusCode::NO_CONTENT
        && answer.headers.get(CONTENT_LENGTH).is_some_and(|l| l != "0");
    let kept = head::is_kept(answer.version, &answer.headers)
        && !bodied
        && answer.status != StatusCode::SWITCHING_PROTOCOLS
        && !matches!(decoder, Decoder::UntilClose);
    let body = AnswerBody {
        spelling,
        decoder,
        ready: Some(ready),
        upload,
        kept,
        stall: Stall::default(),
        sent: 0,
    };
    Ok(Response::from_parts(answer, body))
}

/// A request on its way out.
#[derive(Debug)]
struct Upload {
    /// Until all of it is written.
    request: Option<Box<Request<Outgoing>>>,
    encoder: Encoder,
    /// Some of the body has been taken.
    begun: bool,
    /// Its end has been put into the outbox.
    ended: bool,
    /// The origin takes no more of it. Its answer may be on the way all the same.
    cut: bool,
}

impl Upload {
    /// Puts the head into the outbox.
    fn new(request: Box<Request<Outgoing>>, outbox: &mut Outbox) -> Self {
        let (fields, body) = (request.headers(), request.body());
        head::write_request_line(request.method(), request.uri(), &mut outbox.lead);
        body.spelling().write(fields, &mut outbox.lead);
        outbox.lead.extend_from_slice(b"\r\n");
        // Also where the body was empty and has been read ahead: the field has been said.
        let chunked = fields.contains_key(TRANSFER_ENCODING);
        Upload {
            encoder: match chunked {
                true => Encoder::chunked(fields),
                false => Encoder::Plain,
            },
            request: Some(request),
            begun: false,
            ended: false,
            cut: false,
        }
    }

    /// How much of the body has been taken.
    fn sent(&self) -> u64 {
        let body = self.request.as_ref().map(|request| request.body());
        body.map_or(0, |body| body.sent.load(Relaxed))
    }

    /// All of it has been written.
    fn is_done(&self) -> bool {
        self.request.is_none() && !self.cut
    }

    /// Writes on: ready when there is nothing more to write, or nobody who takes it.
    ///
    /// # Errors
    /// The client's body breaks off.
    fn poll(
        &mut self,
        stream: &mut Stream,
        outbox: &mut Outbox,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), Error>> {
        let Some(request) = &mut self.request else {
            return Poll::Ready(Ok(()));
        };
        let body = request.body_mut();
        while !self.cut {
            // What there is of a body goes out with the head.
            let mut waits = false;
            while !self.ended && outbox.has_room() {
                if body.is_end_stream() {
                    outbox.end(&self.encoder, None);
                    self.ended = true;
                    break;
                }
                match Pin::new(&mut *body).poll_frame(cx) {
                    Poll::Ready(Some(Ok(frame))) => {
                        self.begun = true;
                        match frame.into_data() {
                            Ok(data) => outbox.data(&self.encoder, data),
                            Err(frame) => {
                                outbox.end(&self.encoder, frame.trailers_ref());
                                self.ended = true;
                            }
                        }
                    }
                    Poll::Ready(Some(Err(e))) => return Poll::Ready(Err(e)),
                    Poll::Ready(None) => {
                        outbox.end(&self.encoder, None);
                        self.ended = true;
                    }
                    Poll::Pending => {
                        waits = true;
                        break;
                    }
                }
            }
            match outbox.poll_flush(stream, cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(_)) => self.cut = true,
                Poll::Ready(Ok(())) if self.ended => {
                    self.request = None;
                    break;
                }
                Poll::Ready(Ok(())) if waits => return Poll::Pending,
                Poll::Ready(Ok(())) => {}
            }
        }
        Poll::Ready(Ok(()))
    }
}

/// Notices that nothing moves.
#[derive(Debug, Default)]
struct Stall {
    /// Runs while nothing comes; most bodies come without it.
    until: Option<Pin<Box<Sleep>>>,
    /// Something came since it was last looked at.
    moved: bool,
}

impl Stall {
    /// To be asked when nothing comes: resolves once that has been so for `patience`.
    fn poll(&mut self, patience: Duration, cx: &mut Context<'_>) -> Poll<()> {
        let until = Instant::now() + patience;
        let sleep = self
            .until
            .get_or_insert_with(|| Box::pin(sleep_until(until)));
        if std::mem::take(&mut self.moved) {
            sleep.as_mut().reset(until);
        }
        sleep.as_mut().poll(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::AsyncWriteExt as _,
        net::{TcpListener, TcpStream},
        task::{consume_budget, coop::has_budget_remaining},
    };

    use super::*;
    use crate::{
        authority::Authority,
        downstream::incoming::{Incoming, Source},
        http1::body::Part,
        upstream::Scheme,
    };

    async fn connected() -> (TcpStream, Ready) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let (ours, theirs) = tokio::join!(TcpStream::connect(address), listener.accept());
        let target = Target {
            scheme: Scheme::Http,
            authority: Authority::parse("a.test:80", None).expect("an authority"),
        };
        let stream = Stream::Plain(ours.expect("connected"));
        let ready = Ready::new(stream, target, Arc::default());
        (theirs.expect("accepted").0, ready)
    }

    #[tokio::test]
    async fn a_connection_is_looked_at_however_much_its_task_has_done() {
        for extra in [&b"HTTP/1.1 200 OK\r\n\r\n"[..], b""] {
            let (mut origin, mut ready) = connected().await;
            assert!(ready.is_alive());
            origin.write_all(extra).await.expect("written");
            drop(origin);
            let Stream::Plain(stream) = &ready.0.stream else {
                panic!("it is plain");
            };
            stream.readable().await.expect("something came");
            std::future::poll_fn(|cx| {
                while has_budget_remaining() {
                    let _ = std::pin::pin!(consume_budget()).poll(cx);
                }
                Poll::Ready(())
            })
            .await;
            assert!(!ready.is_alive());
        }
    }

    /// The parts of a body, one after the other.
    #[derive(Debug)]
    struct Parts(std::sync::Mutex<Vec<Part>>);

    impl Source for Parts {
        fn poll_part(&self, _: &mut Context<'_>) -> Poll<Result<Part, Error>> {
            Poll::Ready(Ok(self.0.lock().expect("one thread").remove(0)))
        }
    }

    #[tokio::test]
    async fn a_body_in_chunks_has_an_end_though_it_was_read_ahead() {
        for (parts, written) in [
            (vec![Part::End], "0\r\n\r\n"),
            (
                vec![
                    Part::Data("a".into()),
                    Part::Data("b".into()),
                    Part::Trailers(
                        [(http::header::ETAG, "x".parse().expect("a value"))]
                            .into_iter()
                            .collect(),
                    ),
                    Part::End,
                ],
                "2\r\nab\r\n0\r\netag: x\r\n\r\n",
            ),
        ] {
            let source = Arc::new(Parts(parts.into()));
            let incoming = Incoming::new(source, None, Spelling::default());
            let mut request = Request::new(Outgoing::new(incoming, Arc::default(), false));
            let fields = request.headers_mut();
            fields.insert(TRANSFER_ENCODING, "chunked".parse().expect("a value"));
            fields.insert(http::header::TRAILER, "ETag".parse().expect("a value"));
            {
                let mut ahead = std::pin::pin!(request.body_mut().read_ahead());
                let polled = ahead.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                assert!(polled.is_pending());
            }
            let (mut origin, mut ready) = connected().await;
            let Wire { stream, outbox, .. } = &mut *ready.0;
            let mut upload = Upload::new(Box::new(request), outbox);
            let sent = std::future::poll_fn(|cx| upload.poll(stream, outbox, cx)).await;
            assert!(sent.is_ok() && upload.is_done());
            drop(ready);
            let mut all = String::new();
            tokio::io::AsyncReadExt::read_to_string(&mut origin, &mut all)
                .await
                .expect("text");
            let (head, body) = all.split_once("\r\n\r\n").expect("a head");
            assert!(head.contains("transfer-encoding: chunked"), "{head}");
            assert_eq!(body, written);
        }
    }
}

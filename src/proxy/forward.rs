//! The life of a request: queue and connect side by side, slot, dispatch, answer.
//!
//! Every guard that the request holds (its place in the queue, its connection, its slot) is a local of [`forward`]; a
//! client that goes away drops the future, and with it all of them.

use std::{sync::Arc, time::Duration};

use http::{Method, Request, Response, StatusCode, header::UPGRADE};
use http_body_util::{BodyExt, Limited};
use tokio::time::Instant;

use crate::{
    config::{self, Ungoverned},
    destination::{self, Destination, Verdict},
    error::Error,
    headers,
    pacing::{
        lane::{Call, Departure, Ticket},
        pacer::Arrival,
        queue::{Client, Urgency},
        time::{LocalTime, nanos},
    },
    proxy::{Downstream, Proxy, answer::Answer, connect::Plan},
    record::Record,
    rules::Rules,
    upstream::{
        Target,
        exchange::{AnswerBody, Outgoing, Ready, Unanswered},
    },
};

/// A connection that has taken this long by a request's deadline is the reason for missing it.
const SLOW_CONNECT: Duration = Duration::from_millis(900);
/// How often a request may come back unsent before it is given up: each time a connection broke at the worst moment.
const UNSENT_LIMIT: usize = 3;

/// The largest answer that is read to its end only to use its connection again, and how long that may take.
const DISCARDED: usize = 64 * 1024;
const DISCARD_DEADLINE: Duration = Duration::from_millis(250);

/// What the client asks of the queue.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// Whom to be fair to.
    pub client: Client,
    /// RFC 9218.
    pub urgency: Urgency,
    /// How long the client can wait, where it says so.
    pub max_wait: Option<Duration>,
}

/// Sends a request on when its turn comes, and brings the answer.
///
/// # Errors
/// Why it was not sent, or not answered.
pub async fn forward(
    downstream: &Downstream,
    rules: &Rules,
    governed: Option<&Arc<Destination>>,
    terms: Terms,
    request: Box<Request<Outgoing>>,
    target: Target,
    record: &mut Record,
) -> Result<Response<Answer>, Error> {
    let longest = rules.settings().max_wait;
    let max_wait = terms.max_wait.map_or(longest, |w| w.min(longest));
    match governed {
        Some(destination) => {
            record.governed_by(destination.clone());
            // One configuration for the whole of a request.
            let config = destination.config();
            if config.dry_run {
                destination.dispatched_dry(max_wait);
                return unpaced(downstream, rules, request, &target, record).await;
            }
            paced(
                downstream,
                rules,
                (destination, &config),
                (terms, max_wait),
                request,
                &target,
                record,
            )
            .await
        }
        None if rules.settings().ungoverned == Ungoverned::Deny => Err(Error::HostDenied),
        None => unpaced(downstream, rules, request, &target, record).await,
    }
}

async fn paced(
    downstream: &Downstream,
    rules: &Rules,
    (destination, config): (&Destination, &config::Destination),
    (terms, max_wait): (Terms, Duration),
    mut request: Box<Request<Outgoing>>,
    target: &Target,
    record: &mut Record,
) -> Result<Response<Answer>, Error> {
    let waiting = destination.queue_share(terms.client)?;
    let arrived = LocalTime::now();
    let arrival = Arrival {
        client: terms.client,
        urgency: terms.urgency,
        deadline: arrived.plus(nanos(max_wait)),
        target: target.key(),
    };
    let mut ticket = destination
        .lane(config.scope, &target.authority.host)?
        .enter(arrival)
        .map_err(Error::Paced)?;
    let (proxy, switches) = (&downstream.proxy, request.headers().contains_key(UPGRADE));
    let (mut unsent, mut is_near, mut waiting) = (0, false, Some(waiting));
    let mut repeats = config.retry_throttled;
    let url = destination::url_of(config, &request, target);
    loop {
        let mut drain = downstream.drain.clone();
        let (departure, ready) = tokio::select! {
            biased;
            turn = turn(proxy, target, ticket, record, (is_near, unsent > 0), request.body_mut()) => turn?,
            () = drain.given_up() => return Err(Error::Draining),
        };
        drop(waiting.take());
        destination.dispatched(&departure, arrived);
        record.queued();
        let repeat = (repeats > 0).then(|| repeatable(&request)).flatten();
        match ready.send(request).await {
            Ok(response) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
                return switch(downstream, switches, response, Some(departure), record).await;
            }
            Ok(response) => {
                let verdict = Verdict::of(config, response.status(), response.headers());
                destination.heed(&departure, verdict, &url).await;
                match repeat {
                    Some(again) if verdict.is_throttled() && departure.may_go_again() => {
                        repeats -= 1;
                        record.goes_again(response.status());
                        discard(response).await;
                        request = again;
                        ticket = departure.go_again();
                        is_near = true;
                    }
                    _ => return Ok(answer(rules, response, Some(departure), record)),
                }
            }
            Err(Unanswered::Failed(e)) => return Err(e),
            Err(Unanswered::Unsent(back)) => {
                unsent += 1;
                if unsent > UNSENT_LIMIT {
                    return Err(Error::Terminated);
                }
                request = back;
                ticket = departure.recall();
                is_near = true;
            }
        }
    }
}

/// The same request once more, if it may be sent twice (RFC 9110 section 9.2.2) and has no body.
fn repeatable(request: &Request<Outgoing>) -> Option<Box<Request<Outgoing>>> {
    let safe = [Method::GET, Method::HEAD, Method::OPTIONS];
    if !safe.contains(request.method()) || request.headers().contains_key(UPGRADE) {
        return None;
    }
    let mut again = Box::new(Request::new(request.body().repeated()?));
    *again.method_mut() = request.method().clone();
    *again.uri_mut() = request.uri().clone();
    *again.version_mut() = request.version();
    *again.headers_mut() = request.headers().clone();
    Some(again)
}

/// Reads an answer that nobody will see, so that its connection can be used again, unless that takes long.
async fn discard(response: Response<AnswerBody>) {
    let body = Limited::new(response.into_body(), DISCARDED);
    let _ = tokio::time::timeout(DISCARD_DEADLINE, body.collect()).await;
}

/// Waits for this request's turn, its connection being made ready meanwhile: at once, with `told`, for one that is back in
/// its place near the head. With `fresh` the connection is a new one: one from the pool has just turned out to be dead.
async fn turn(
    proxy: &Proxy,
    target: &Target,
    mut ticket: Ticket,
    record: &mut Record,
    (mut told, mut fresh): (bool, bool),
    body: &mut Outgoing,
) -> Result<(Departure, Ready), Error> {
    let mut held: Option<Ready> = None;
    let expects = body.is_expected();
    loop {
        if held.is_none() && told {
            let (ready, dialled) = connect(proxy, target, &mut ticket, record, fresh).await?;
            held = Some(ready);
            ticket.ready(dialled);
        }
        let ended = async {
            match &mut held {
                Some(ready) => ready.ended().await,
                None => std::future::pending().await,
            }
        };
        let call = tokio::select! {
            biased;
            call = ticket.next() => call,
            // A connection may be closed while its request waits; then another is made, without losing the place.
            () = ended => {
                ticket.unready();
                (held, fresh) = (None, true);
                continue;
            }
            // A client that waits for leave to send its body is not given it before its turn.
            _ = body.read_ahead(), if !expects => {
                return Err(Error::Malformed("the request's body broke off; send all of it"));
            }
        };
        match call.map_err(Error::Paced)? {
            Call::Connect => told = true,
            Call::Go(pass) => match held.take().and_then(Ready::if_alive) {
                None => {
                    ticket = pass.reconnect();
                    (told, fresh) = (true, true);
                }
                Some(ready) => match pass.depart() {
                    Ok(departure) => return Ok((departure, ready)),
                    Err(stale) => {
                        ticket = *stale;
                        held = Some(ready);
                    }
                },
            },
        }
    }
}

/// Makes the connection ready, unless the request is refused first; also says whether it had to be dialled.
async fn connect(
    proxy: &Proxy,
    target: &Target,
    ticket: &mut Ticket,
    record: &mut Record,
    fresh: bool,
) -> Result<(Ready, bool), Error> {
    if let Some(ready) = (!fresh).then(|| proxy.upstream.idle(target)).flatten() {
        return Ok((ready, false));
    }
    let started = Instant::now();
    let refused = async {
        loop {
            match ticket.next().await {
                Err(refusal) => return Error::Paced(refusal),
                // The turn came in the moment in which the last connection broke. Without a connection it can't be
                // used, and without going back to its place the request would wait for ever.
                Ok(Call::Go(pass)) => *ticket = pass.reconnect(),
                Ok(Call::Connect) => {}
            }
        }
    };
    let made = tokio::select! {
        made = proxy.upstream.fresh(target) => made,
        refusal = refused => Err(refusal),
    };
    let took = started.elapsed();
    record.connected(took);
    match made {
        // A request is told to connect when it is near its turn: one whose connection then takes so long missed its
        // turn for that, and not for the queue.
        Err(Error::Paced(_)) if took >= SLOW_CONNECT => Err(Error::ConnectTimeout),
        made => made.map(|ready| (ready, true)),
    }
}

/// A request that needs no slot.
async fn unpaced(
    downstream: &Downstream,
    rules: &Rules,
    mut request: Box<Request<Outgoing>>,
    target: &Target,
    record: &mut Record,
) -> Result<Response<Answer>, Error> {
    let (proxy, switches) = (&downstream.proxy, request.headers().contains_key(UPGRADE));
    let mut ready = proxy.upstream.ready(target).await?;
    for _ in 0..=UNSENT_LIMIT {
        match ready.send(request).await {
            Ok(response) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
                return switch(downstream, switches, response, None, record).await;
            }
            Ok(response) => return Ok(answer(rules, response, None, record)),
            Err(Unanswered::Failed(e)) => return Err(e),
            Err(Unanswered::Unsent(back)) => request = back,
        }
        ready = proxy.upstream.fresh(target).await?;
    }
    Err(Error::Terminated)
}

/// An answer of 101: the connection is handed over and from now on passes bytes both ways. Nothing that the client sent
/// behind its request has gone to the origin before.
async fn switch(
    downstream: &Downstream,
    asked: bool,
    response: Response<AnswerBody>,
    departure: Option<Departure>,
    record: &mut Record,
) -> Result<Response<Answer>, Error> {
    if !asked {
        return Err(Error::BadResponse);
    }
    record.answered(response.status());
    let (mut head, body) = response.into_parts();
    let (origin, early) = body.into_stream().ok_or(Error::Terminated)?;
    downstream.promise(Plan::Switched {
        origin: Box::new(origin),
        early,
        departure,
    });
    headers::strip_response(&mut head.headers);
    headers::put_websocket(&mut head.headers);
    head.version = http::Version::HTTP_11;
    Ok(Response::from_parts(head, Answer::text("")))
}

fn answer(
    rules: &Rules,
    response: Response<AnswerBody>,
    departure: Option<Departure>,
    record: &mut Record,
) -> Response<Answer> {
    record.answered(response.status());
    let (mut head, body) = response.into_parts();
    headers::strip_response(&mut head.headers);
    if rules.settings().via {
        headers::add_via(&mut head.headers, head.version);
    }
    head.version = http::Version::HTTP_11;
    Response::from_parts(head, Answer::origin(body, departure))
}

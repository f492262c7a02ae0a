//! The table: methods, statuses, framings and versions.

use super::{Row, Scene, check};
use crate::bed::scripted::{Step, say};

#[test]
fn answers_without_a_body_have_none_and_keep_their_fields() {
    check(
        &Scene::new(),
        &[
            Row::new(
                "HEAD with a length",
                "HEAD {at}/head HTTP/1.1\r\nHost: {host}\r\n\r\n",
                "HTTP/1.1 200 OK\r\nContent-Length: 5000\r\nETag: \"x\"\r\n\r\n",
                "HTTP/1.1 200 OK\r\nContent-Length: 5000\r\nETag: \"x\"\r\nvia: 1.1 paceline\r\n\r\n",
            )
            .arrives("HEAD /head HTTP/1.1\r\nHost: {host}\r\nvia: 1.1 paceline\r\n\r\n"),
            Row::new(
                "HEAD of what would be chunked",
                "HEAD {at}/head-chunked HTTP/1.1\r\nHost: {host}\r\n\r\n",
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
                // RFC 9112 section 6.1: a sender may leave it out of an answer to HEAD.
                "HTTP/1.1 200 OK\r\nvia: 1.1 paceline\r\n\r\n",
            ),
            Row::new(
                "204",
                "DELETE {at}/204 HTTP/1.1\r\nHost: {host}\r\n\r\n",
                "HTTP/1.1 204 No Content\r\nX-A: 1\r\n\r\n",
                "HTTP/1.1 204 No Content\r\nX-A: 1\r\nvia: 1.1 paceline\r\n\r\n",
            ),
            Row::new(
                "204 with a length",
                "DELETE {at}/204-length HTTP/1.1\r\nHost: {host}\r\n\r\n",
                "HTTP/1.1 204 No Content\r\nContent-Length: 0\r\nX-A: 1\r\n\r\n",
                // RFC 9110 section 8.6: it has none.
                "HTTP/1.1 204 No Content\r\nX-A: 1\r\nvia: 1.1 paceline\r\n\r\n",
            ),
            Row::new(
                "304 with the length of what it stands for",
                "GET {at}/304 HTTP/1.1\r\nHost: {host}\r\nIf-None-Match: \"x\"\r\n\r\n",
                "HTTP/1.1 304 Not Modified\r\nETag: \"x\"\r\nContent-Length: 77\r\n\r\n",
                // RFC 9110 section 8.6: it is the length of what a 200 would have brought.
                "HTTP/1.1 304 Not Modified\r\nETag: \"x\"\r\nContent-Length: 77\r\nvia: 1.1 paceline\r\n\r\n",
            ),
            Row::new(
                "304 without a length",
                "GET {at}/304-bare HTTP/1.1\r\nHost: {host}\r\nIf-None-Match: \"x\"\r\n\r\n",
                "HTTP/1.1 304 Not Modified\r\nETag: \"x\"\r\n\r\n",
                "HTTP/1.1 304 Not Modified\r\nETag: \"x\"\r\nvia: 1.1 paceline\r\n\r\n",
            ),
            Row::new(
                "205",
                "POST {at}/205 HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\n\r\n",
                "HTTP/1.1 205 Reset Content\r\nContent-Length: 0\r\n\r\n",
                "HTTP/1.1 205 Reset Content\r\nContent-Length: 0\r\nvia: 1.1 paceline\r\n\r\n",
            )
            .arrives("POST /205 HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\nvia: 1.1 paceline\r\n\r\n"),
            Row::new(
                "a phrase of the origin's own",
                "GET {at}/phrase HTTP/1.1\r\nHost: {host}\r\n\r\n",
                "HTTP/1.1 200 Fine By Me\r\nContent-Length: 0\r\n\r\n",
                "HTTP/1.1 200 Fine By Me\r\nContent-Length: 0\r\nvia: 1.1 paceline\r\n\r\n",
            ),
        ],
    );
}

#[test]
fn bodies_pass_in_every_framing() {
    check(
        &Scene::new(),
        &[
            Row::new(
                "an upload with a length",
                "PUT {at}/put HTTP/1.1\r\nHost: {host}\r\nContent-Length: 5\r\n\r\nhello",
                "",
                "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nvia: 1.1 paceline\r\n\r\nok",
            )
            .origin(vec![
                Step::Hear(b"hello"),
                say("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"),
            ])
            .arrives("PUT /put HTTP/1.1\r\nHost: {host}\r\nContent-Length: 5\r\nvia: 1.1 paceline\r\n\r\nhello"),
            Row::new(
                "an upload in chunks, with an extension",
                "POST {at}/chunks HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0\r\n\r\n",
                "",
                "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nvia: 1.1 paceline\r\n\r\nok",
            )
            .origin(vec![
                Step::Hear(b"0\r\n\r\n"),
                say("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"),
            ])
            .arrives(
                "POST /chunks HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\nvia: 1.1 paceline\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
            ),
            Row::new(
                "a GET with a body",
                "GET {at}/get-body HTTP/1.1\r\nHost: {host}\r\nContent-Length: 2\r\n\r\nhi",
                "",
                "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nvia: 1.1 paceline\r\n\r\nok",
            )
            .origin(vec![
                Step::Hear(b"hi"),
                say("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"),
            ]),
            Row::new(
                "an answer in chunks",
                "GET {at}/chunked HTTP/1.1\r\nHost: {host}\r\n\r\n",
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n1;ext=\"x\"\r\n!\r\n0\r\n\r\n",
                "HTTP/1.1 200 OK\r\nvia: 1.1 paceline\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n1\r\n!\r\n0\r\n\r\n",
            ),
            Row::new(
                "an answer that the close delimits",
                "GET {at}/closed HTTP/1.1\r\nHost: {host}\r\n\r\n",
                "",
                "HTTP/1.1 200 OK\r\nvia: 1.1 paceline\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
            )
            .origin(vec![say("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello"), Step::Close]),
            Row::new(
                "an HTTP/1.0 origin",
                "GET {at}/old HTTP/1.1\r\nHost: {host}\r\n\r\n",
                "",
                "HTTP/1.1 200 OK\r\nvia: 1.0 paceline\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
            )
            .origin(vec![say("HTTP/1.0 200 OK\r\n\r\nhello"), Step::Close]),
            Row::new(
                "an HTTP/1.0 origin that keeps the connection",
                "GET {at}/old-kept HTTP/1.1\r\nHost: {host}\r\n\r\n",
                "HTTP/1.0 200 OK\r\nContent-Length: 5\r\nConnection: keep-alive\r\n\r\nhello",
                "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nvia: 1.0 paceline\r\n\r\nhello",
            ),
        ],
    );
}

#[test]
fn clients_of_http_1_0_get_what_they_can_read() {
    check(
        &Scene::new(),
        &[
            Row::new(
                "without keep-alive the connection ends",
                "GET {at}/a HTTP/1.0\r\nHost: {host}\r\n\r\n",
                "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
                "HTTP/1.0 200 OK\r\nContent-Length: 5\r\nvia: 1.1 paceline\r\n\r\nhello",
            )
            .arrives("GET /a HTTP/1.1\r\nHost: {host}\r\nvia: 1.0 paceline\r\n\r\n")
            .ends(),
            Row::new(
                "with keep-alive it is kept, and says so",
                "GET {at}/b HTTP/1.0\r\nHost: {host}\r\nConnection: keep-alive\r\n\r\n",
                "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
                "HTTP/1.0 200 OK\r\nContent-Length: 5\r\nvia: 1.1 paceline\r\nconnection: keep-alive\r\n\r\nhello",
            ),
            Row::new(
                "a chunked answer is delimited by the close",
                "GET {at}/c HTTP/1.0\r\nHost: {host}\r\nConnection: keep-alive\r\n\r\n",
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
                "HTTP/1.0 200 OK\r\nvia: 1.1 paceline\r\nconnection: close\r\n\r\nhello",
            )
            .ends(),
        ],
    );
}

#[test]
fn ranges_pass_as_they_are() {
    const PARTS: &str = "HTTP/1.1 206 Partial Content\r\nContent-Type: multipart/byteranges; boundary=B\r\nContent-Length: 104\r\n\r\n\
        --B\r\nContent-Range: bytes 0-1/9\r\n\r\nab\r\n--B\r\nContent-Range: bytes 7-8/9\r\nContent-Type: x/y\r\n\r\nhi\r\n--B--\r\n";
    check(
        &Scene::new(),
        &[
            Row::new(
                "one range",
                "GET {at}/one HTTP/1.1\r\nHost: {host}\r\nRange: bytes=2-3\r\nIf-Range: \"x\"\r\n\r\n",
                "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 2-3/9\r\nContent-Length: 2\r\n\r\ncd",
                "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 2-3/9\r\nContent-Length: 2\r\nvia: 1.1 paceline\r\n\r\ncd",
            )
            .arrives(
                "GET /one HTTP/1.1\r\nHost: {host}\r\nRange: bytes=2-3\r\nIf-Range: \"x\"\r\nvia: 1.1 paceline\r\n\r\n",
            ),
            Row::new(
                "two ranges",
                "GET {at}/two HTTP/1.1\r\nHost: {host}\r\nRange: bytes=0-1,7-8\r\n\r\n",
                PARTS,
                "HTTP/1.1 206 Partial Content\r\nContent-Type: multipart/byteranges; boundary=B\r\nContent-Length: 104\r\nvia: 1.1 paceline\r\n\r\n\
                 --B\r\nContent-Range: bytes 0-1/9\r\n\r\nab\r\n--B\r\nContent-Range: bytes 7-8/9\r\nContent-Type: x/y\r\n\r\nhi\r\n--B--\r\n",
            ),
            Row::new(
                "416",
                "GET {at}/none HTTP/1.1\r\nHost: {host}\r\nRange: bytes=99-\r\n\r\n",
                "HTTP/1.1 416 Range Not Satisfiable\r\nContent-Range: bytes */9\r\nContent-Length: 0\r\n\r\n",
                "HTTP/1.1 416 Range Not Satisfiable\r\nContent-Range: bytes */9\r\nContent-Length: 0\r\nvia: 1.1 paceline\r\n\r\n",
            ),
        ],
    );
}

#[test]
fn trailers_pass_both_ways() {
    // The codec spells their names in lower case.
    check(
        &Scene::new(),
        &[
            Row::new(
                "of a request",
                "POST {at}/up HTTP/1.1\r\nHost: {host}\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\nX-Sum: 9\r\n\r\n",
                "",
                "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nvia: 1.1 paceline\r\n\r\nok",
            )
            .origin(vec![
                Step::Hear(b"x-sum: 9\r\n\r\n"),
                say("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"),
            ])
            .arrives(
                "POST /up HTTP/1.1\r\nHost: {host}\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\nvia: 1.1 paceline\r\n\r\n2\r\nab\r\n0\r\nx-sum: 9\r\n\r\n",
            ),
            Row::new(
                "of an answer, to a client that takes them",
                "GET {at}/down HTTP/1.1\r\nHost: {host}\r\nTE: trailers\r\nConnection: TE\r\n\r\n",
                "HTTP/1.1 200 OK\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\nX-Sum: 9\r\n\r\n",
                "HTTP/1.1 200 OK\r\nTrailer: X-Sum\r\nvia: 1.1 paceline\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\nx-sum: 9\r\n\r\n",
            )
            .arrives("GET /down HTTP/1.1\r\nHost: {host}\r\nTE: trailers\r\nConnection: TE\r\nvia: 1.1 paceline\r\n\r\n"),
            Row::new(
                "of an answer, to a client that does not",
                "GET {at}/down-not HTTP/1.1\r\nHost: {host}\r\n\r\n",
                "HTTP/1.1 200 OK\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\nX-Sum: 9\r\n\r\n",
                "HTTP/1.1 200 OK\r\nTrailer: X-Sum\r\nvia: 1.1 paceline\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
            ),
        ],
    );
}

#[test]
fn interim_answers_of_the_origin_are_left_out_and_what_follows_is_not_shifted() {
    const FINAL: &str = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nvia: 1.1 paceline\r\n\r\nfinal";
    check(
        &Scene::new(),
        &[
            Row::new(
                "103",
                "GET {at}/103 HTTP/1.1\r\nHost: {host}\r\n\r\n",
                "HTTP/1.1 103 Early Hints\r\nLink: </a.css>; rel=preload\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nfinal",
                FINAL,
            ),
            Row::new(
                "102, 103, 100, unasked",
                "GET {at}/many HTTP/1.1\r\nHost: {host}\r\n\r\n",
                "HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nfinal",
                FINAL,
            ),
            Row::new(
                "100 and the rest apart",
                "POST {at}/apart HTTP/1.1\r\nHost: {host}\r\nContent-Length: 2\r\n\r\nhi",
                "",
                FINAL,
            )
            .origin(vec![
                say("HTTP/1.1 100 Continue\r\n\r\n"),
                Step::Hear(b"hi"),
                say("HTTP/1.1 102 Processing\r\n\r\n"),
                say("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nfinal"),
            ]),
        ],
    );
}

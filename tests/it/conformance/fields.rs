//! Fields: all but those that end at a proxy arrive, in their order, spelling and number.

use super::{Row, Scene, check};

#[test]
fn fields_keep_order_spelling_number_and_empty_values() {
    check(
        &Scene::new(),
        &[
            Row::new(
                "of a request",
                "GET {at}/golden?q=%41&b=a%20b&&c HTTP/1.1\r\nHost: {host}\r\nUser-Agent: x/1 (a; b)\r\nX-Dup: 1\r\nX-Dup: 2\r\nX-EMPTY:\r\n\
                 accept-encoding: gzip, br\r\nCookie: a=1; b=\"2\"\r\nAuthorization: Bearer abc\r\nX-Latin: caf\u{e9}\r\nCache-Control: no-cache\r\n\r\n",
                "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
                "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nvia: 1.1 paceline\r\n\r\n",
            )
            .arrives(
                "GET /golden?q=%41&b=a%20b&&c HTTP/1.1\r\nHost: {host}\r\nUser-Agent: x/1 (a; b)\r\nX-Dup: 1\r\nX-Dup: 2\r\nX-EMPTY:\r\n\
                 accept-encoding: gzip, br\r\nCookie: a=1; b=\"2\"\r\nAuthorization: Bearer abc\r\nX-Latin: caf\u{e9}\r\nCache-Control: no-cache\r\nvia: 1.1 paceline\r\n\r\n",
            ),
            Row::new(
                "of an answer",
                "GET {at}/answer HTTP/1.1\r\nHost: {host}\r\n\r\n",
                "HTTP/1.1 200 OK\r\nDate: Mon, 01 Jan 2024 00:00:00 GMT\r\nServer: x\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nx-empty:\r\n\
                 Content-Encoding: gzip\r\nX-tHiNg: 1\r\nContent-Length: 3\r\nVary: *\r\n\r\n\x1f\x7f\x01",
                "HTTP/1.1 200 OK\r\nDate: Mon, 01 Jan 2024 00:00:00 GMT\r\nServer: x\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nx-empty:\r\n\
                 Content-Encoding: gzip\r\nX-tHiNg: 1\r\nContent-Length: 3\r\nVary: *\r\nvia: 1.1 paceline\r\n\r\n\x1f\x7f\x01",
            ),
            Row::new(
                "an answer without a date gets none",
                "GET {at}/no-date HTTP/1.1\r\nHost: {host}\r\n\r\n",
                "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
                "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nvia: 1.1 paceline\r\n\r\n",
            ),
            Row::new(
                "a Via of others is added to",
                "GET {at}/via HTTP/1.1\r\nHost: {host}\r\nVia: 1.0 fred\r\n\r\n",
                "HTTP/1.1 200 OK\r\nVia: 1.1 cdn\r\nContent-Length: 0\r\n\r\n",
                "HTTP/1.1 200 OK\r\nVia: 1.1 cdn\r\nvia: 1.1 paceline\r\nContent-Length: 0\r\n\r\n",
            )
            .arrives("GET /via HTTP/1.1\r\nHost: {host}\r\nVia: 1.0 fred\r\nvia: 1.1 paceline\r\n\r\n"),
        ],
    );
}

#[test]
fn what_ends_at_a_proxy_and_what_connection_names_goes_no_further() {
    check(
        &Scene::new(),
        &[Row::new(
            "hop by hop",
            "GET {at}/hop HTTP/1.1\r\nHost: {host}\r\nConnection: keep-alive, X-Mine\r\nKeep-Alive: timeout=5\r\nProxy-Connection: keep-alive\r\n\
             X-Mine: secret\r\nProxy-Authorization: Basic eDp5\r\nTE: gzip\r\nPaceline-Max-Wait: 9s\r\nPriority: u=1\r\nX-Kept: 1\r\n\r\n",
            "HTTP/1.1 200 OK\r\nConnection: X-Theirs\r\nKeep-Alive: timeout=9\r\nX-Theirs: secret\r\nProxy-Connection: keep-alive\r\n\
             Proxy-Authenticate: Basic\r\nX-Kept: 2\r\nContent-Length: 0\r\n\r\n",
            "HTTP/1.1 200 OK\r\nX-Kept: 2\r\nContent-Length: 0\r\nvia: 1.1 paceline\r\n\r\n",
        )
        .arrives(
            "GET /hop HTTP/1.1\r\nHost: {host}\r\nPriority: u=1\r\nX-Kept: 1\r\nvia: 1.1 paceline\r\n\r\n",
        )],
    );
}

#[test]
fn via_is_left_out_where_it_is_turned_off() {
    let scene = Scene::with("2000.0", |recipe| recipe.proxy("via = false"));
    let row = Row::new(
        "no via",
        "GET {at}/via HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    )
    .arrives("GET /via HTTP/1.1\r\nHost: {host}\r\n\r\n");
    check(&scene, &[row]);
}

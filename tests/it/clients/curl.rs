//! curl, offering HTTP/1.1 alone and offering h2 too.

fn command() -> Vec<String> {
    vec![format!(
        "{}/tests/it/sh/client_curl",
        env!("CARGO_MANIFEST_DIR")
    )]
}

held_to_all_claims! {
    http1: Program {
        command,
        env: &[("CURL_OPTIONS", "--http1.1")],
        keeps_its_tunnel: true,
        shows_fields: true,
    };
    offering_h2: Program {
        command,
        env: &[("CURL_OPTIONS", "--http2")],
        keeps_its_tunnel: true,
        shows_fields: true,
    };
}

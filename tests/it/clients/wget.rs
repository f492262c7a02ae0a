//! wget, in Debian's build on GnuTLS.

fn command() -> Vec<String> {
    vec![format!(
        "{}/tests/it/sh/client_wget",
        env!("CARGO_MANIFEST_DIR")
    )]
}

held_to_all_claims! {
    gnutls: Program {
        command,
        env: &[],
        keeps_its_tunnel: true,
        shows_fields: true,
    };
}

//! Node's clients, at the versions of `tests/node/package-lock.json`.

use crate::bed::worker::node_folder;

fn script(name: &str) -> Vec<String> {
    let script = format!("{}/tests/node/{name}", env!("CARGO_MANIFEST_DIR"));
    let packages = node_folder().to_string_lossy().into_owned();
    vec!["node".to_owned(), script, packages]
}

held_to_all_claims! {
    // It may open a second tunnel for its second fetch, while the first is being given back.
    undici: Program {
        command: || script("client_undici.mjs"),
        env: &[],
        keeps_its_tunnel: false,
        shows_fields: true,
    };
    axios: Program {
        command: || script("client_axios.mjs"),
        env: &[],
        keeps_its_tunnel: false,
        shows_fields: true,
    };
}

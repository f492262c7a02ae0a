//! Python's clients, in Debian's packages, and requests on urllib3 2 in an environment that `tests/run` makes.

use crate::bed::worker::{python_environment, python_script};

const DEBIAN: &str = "/usr/bin/python3";

fn script(interpreter: &str, name: &str) -> Vec<String> {
    vec![interpreter.to_owned(), python_script(name)]
}

held_to_all_claims! {
    urllib: Program {
        command: || script(DEBIAN, "client_urllib.py"),
        env: &[],
        keeps_its_tunnel: false,
        shows_fields: true,
    };
    requests_on_urllib3_1: Program {
        command: || script(DEBIAN, "client_requests.py"),
        env: &[],
        keeps_its_tunnel: true,
        shows_fields: true,
    };
    requests_on_urllib3_2: Program {
        command: || script(&python_environment(), "client_requests.py"),
        env: &[],
        keeps_its_tunnel: true,
        shows_fields: true,
    };
    httpx: Program {
        command: || script(DEBIAN, "client_httpx.py"),
        env: &[],
        keeps_its_tunnel: true,
        shows_fields: true,
    };
    aiohttp: Program {
        command: || script(DEBIAN, "client_aiohttp.py"),
        env: &[],
        keeps_its_tunnel: true,
        shows_fields: true,
    };
}

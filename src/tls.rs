//! What our two sides of TLS, towards clients and towards origins, have in common.

use rustls::crypto::{
    CryptoProvider,
    aws_lc_rs::{cipher_suite, default_provider},
};

/// The cryptography with AES-128 first: as safe here as AES-256, which the library puts first, and faster.
pub fn provider() -> CryptoProvider {
    let mut provider = default_provider();
    let first = [
        cipher_suite::TLS13_AES_128_GCM_SHA256,
        cipher_suite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
        cipher_suite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
    ];
    provider
        .cipher_suites
        .sort_by_key(|suite| !first.contains(suite));
    provider
}

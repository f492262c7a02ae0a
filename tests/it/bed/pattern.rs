//! Bodies that can be told from any other: made piece by piece on one side, hashed piece by piece on the other, so that
//! a test of 200 MiB holds one piece at a time.

use bytes::Bytes;
use sha2::{Digest, Sha256};

/// SHA-256, in hexadecimal, of the body that `/b/N` answers.
pub fn pattern_digest(length: u64) -> String {
    let mut hash = Sha256::new();
    for piece in pattern(length) {
        hash.update(&piece);
    }
    hex(&hash.finalize())
}

/// The body of `/b/N` in pieces: bytes that count up to 250 and start over, so that a lost or doubled piece shows.
pub fn pattern(length: u64) -> impl Iterator<Item = Bytes> {
    const PIECE: u64 = 251 * 256;
    let piece = Bytes::from_iter((0..PIECE).map(|n| (n % 251) as u8));
    (0..length.div_ceil(PIECE)).map(move |n| piece.slice(..PIECE.min(length - n * PIECE) as usize))
}

/// Bytes in lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

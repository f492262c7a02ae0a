//! Resumption of TLS sessions: one set of ticket keys and one session cache for all names, each entry bound to its name.
//!
//! rustls compares the SNI of a resumed session, but a client that connects to an address sends none, so the name
//! of the tunnel is bound in here.
//!
//! Most clients that open a tunnel for each request never come back with a ticket, and for them it is a tenth of the
//! proxy's work for a new tunnel, and bytes to read. So it is noted whether anybody does.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering::Relaxed},
};

use rustls::server::{ProducesTickets, StoresServerSessions};
use sha2::{Digest, Sha256};

use crate::authority::Host;

const BINDING: usize = 16;

/// So many clients in a row are given a ticket though none has come back with one.
const HOPEFUL: u32 = 8;
/// And then one in so many.
const ONE_IN: u32 = 8;

/// Whether the clients of a host come back with their tickets.
#[derive(Debug, Default)]
pub(super) struct Comeback(AtomicU32);

impl Comeback {
    /// Whether the next client is to be given a ticket.
    pub(super) fn is_likely(&self) -> bool {
        // Which of two at once is counted first does not matter.
        let since = self.0.fetch_add(1, Relaxed);
        since < HOPEFUL || since.is_multiple_of(ONE_IN)
    }

    fn happened(&self) {
        self.0.store(0, Relaxed);
    }
}

/// Tickets and cached sessions that are of use only in tunnels to one host.
#[derive(Debug)]
pub(super) struct BoundToHost {
    /// The first half of a hash of the host
    binding: [u8; BINDING],
    tickets: Arc<dyn ProducesTickets>,
    sessions: Arc<dyn StoresServerSessions>,
    comeback: Arc<Comeback>,
}

impl BoundToHost {
    /// Binds the shared keys and the shared cache to a host.
    pub(super) fn new(
        host: &Host,
        tickets: Arc<dyn ProducesTickets>,
        sessions: Arc<dyn StoresServerSessions>,
        comeback: Arc<Comeback>,
    ) -> Self {
        let hash = Sha256::digest(host.to_string());
        let mut binding = [0; BINDING];
        binding.copy_from_slice(&hash[..BINDING]);
        BoundToHost {
            binding,
            tickets,
            sessions,
            comeback,
        }
    }

    fn bound(&self, bytes: &[u8]) -> Vec<u8> {
        [&self.binding, bytes].concat()
    }
}

impl ProducesTickets for BoundToHost {
    fn enabled(&self) -> bool {
        self.tickets.enabled()
    }

    fn lifetime(&self) -> u32 {
        self.tickets.lifetime()
    }

    fn encrypt(&self, plain: &[u8]) -> Option<Vec<u8>> {
        self.tickets.encrypt(&self.bound(plain))
    }

    fn decrypt(&self, cipher: &[u8]) -> Option<Vec<u8>> {
        // With a ticket of another replica, which cannot be read here, the client is one of those who come back all the same.
        self.comeback.happened();
        let bound = self.tickets.decrypt(cipher)?;
        bound.strip_prefix(&self.binding).map(<[u8]>::to_vec)
    }
}

impl StoresServerSessions for BoundToHost {
    fn put(&self, key: Vec<u8>, value: Vec<u8>) -> bool {
        self.sessions.put(self.bound(&key), value)
    }

    fn get(&self, key: &[u8]) -> Option<Vec<u8>> {
        self.sessions.get(&self.bound(key))
    }

    fn take(&self, key: &[u8]) -> Option<Vec<u8>> {
        self.sessions.take(&self.bound(key))
    }

    fn can_cache(&self) -> bool {
        self.sessions.can_cache()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tickets_are_for_clients_that_come_back_with_them() {
        let comeback = Comeback::default();
        let tickets = |comeback: &Comeback| (0..808).filter(|_| comeback.is_likely()).count();
        assert_eq!(tickets(&comeback), 8 + 100);
        comeback.happened();
        assert_eq!(tickets(&comeback), 8 + 100);
        for _ in 0..100 {
            comeback.happened();
            assert!(comeback.is_likely());
        }
    }
}

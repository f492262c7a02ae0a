//! Resumption of TLS sessions: one set of ticket keys and one session cache for all names, each entry bound to its name.
//!
//! rustls compares the SNI of a resumed session, but a client that connects to an address sends none, so the name
//! of the tunnel is bound in here.

use std::sync::Arc;

use rustls::server::{ProducesTickets, StoresServerSessions};
use sha2::{Digest, Sha256};

use crate::authority::Host;

const BINDING: usize = 16;

/// Tickets and cached sessions that are of use only in tunnels to one host.
#[derive(Debug)]
pub(super) struct BoundToHost {
    /// The first half of a hash of the host
    binding: [u8; BINDING],
    tickets: Arc<dyn ProducesTickets>,
    sessions: Arc<dyn StoresServerSessions>,
}

impl BoundToHost {
    /// Binds the shared keys and the shared cache to a host.
    pub(super) fn new(
        host: &Host,
        tickets: Arc<dyn ProducesTickets>,
        sessions: Arc<dyn StoresServerSessions>,
    ) -> Self {
        let hash = Sha256::digest(host.to_string());
        let mut binding = [0; BINDING];
        binding.copy_from_slice(&hash[..BINDING]);
        BoundToHost {
            binding,
            tickets,
            sessions,
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

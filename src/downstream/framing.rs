//! Follows the bytes of a connection and says where each request begins and ends, or what is wrong with it. Pure.
//!
//! The codec accepts forms that two parsers read as two different things; whoever forwards such a request smuggles. So
//! everything is read here first, by the letter of RFC 9112, and what is ambiguous is refused and never repaired. This
//! file doesn't know sockets, and doesn't judge where a request wants to go.

mod chunks;
mod head;
#[cfg(test)]
mod tests;

use crate::error::Error;

use chunks::Chunks;
use head::{Body, Head};

pub use head::{FIELD_LIMIT, HEAD_LIMIT};

/// Reads a connection from its first byte, a piece at a time.
#[derive(Debug)]
pub struct Framing {
    state: State,
    heads: u64,
}

#[derive(Debug)]
enum State {
    /// In a head, or before one.
    Head(Head),
    /// In a body with a length: so many bytes are to come.
    Length(u64),
    /// In a body of chunks.
    Chunked(Chunks),
    /// After a CONNECT: whatever comes is not for us to read.
    Opaque,
    /// After a request to switch protocols: whether what comes is HTTP depends on the answer.
    Undecided,
    /// After a fault: nothing that comes can be trusted.
    Over,
}

/// What is wrong, and whether the request can still be refused whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing of the request has been let pass.
    Refused(Error),
    /// Its head has been let pass already: what is under way must be broken off, and must not end as if it were whole.
    Broken(Error),
}

impl Default for Framing {
    /// At the first byte of a connection.
    fn default() -> Self {
        Framing {
            state: State::Head(Head::default()),
            heads: 0,
        }
    }
}

impl Framing {
    /// Whether nothing passes until it is known if the last request has switched protocols.
    pub fn is_undecided(&self) -> bool {
        matches!(self.state, State::Undecided)
    }

    /// Says so. What follows is HTTP, or is not for us to read.
    pub fn decide(&mut self, switched: bool) {
        self.state = if switched {
            State::Opaque
        } else {
            State::Head(Head::default())
        };
    }

    /// How many heads have been let pass.
    pub fn heads(&self) -> u64 {
        self.heads
    }

    /// Reads on. The first so many of `bytes` may pass; the others are the beginning of a head, or come too early to be
    /// read, and must be there again, with more behind them, in the next call. After a fault nothing passes any more.
    ///
    /// Heads pass whole, so that a request can be refused in place of being passed on. Bodies pass as they come.
    pub fn follow(&mut self, bytes: &[u8]) -> (usize, Option<Fault>) {
        let mut at = 0;
        // Where the request under way began, if that was among these bytes: then none of it has passed yet.
        let mut began = None;
        loop {
            match &mut self.state {
                State::Head(head) => match head.read(&bytes[at..]) {
                    Ok(None) => return (at, None),
                    Ok(Some((length, body))) => {
                        began = Some(at);
                        at += length;
                        self.heads += 1;
                        self.state = match body {
                            Body::Absent => State::Head(Head::default()),
                            Body::Length(length) => State::Length(length),
                            Body::Chunked => State::Chunked(Chunks::default()),
                            Body::Opaque => State::Opaque,
                            Body::Undecided => State::Undecided,
                        };
                    }
                    Err(e) => return (at, self.over(Fault::Refused(e))),
                },
                State::Length(left) => {
                    let here = bytes.len() - at;
                    match usize::try_from(*left) {
                        Ok(left) if left <= here => {
                            at += left;
                            self.state = State::Head(Head::default());
                        }
                        _ => {
                            *left -= here as u64;
                            return (bytes.len(), None);
                        }
                    }
                }
                State::Chunked(chunks) => match chunks.read(&bytes[at..]) {
                    Ok(None) => return (bytes.len(), None),
                    Ok(Some(length)) => {
                        at += length;
                        self.state = State::Head(Head::default());
                    }
                    Err((good, e)) => {
                        let Some(start) = began else {
                            return (at + good, self.over(Fault::Broken(e)));
                        };
                        self.heads -= 1;
                        return (start, self.over(Fault::Refused(e)));
                    }
                },
                State::Opaque => return (bytes.len(), None),
                State::Undecided => return (at, None),
                State::Over => return (0, None),
            }
        }
    }

    fn over(&mut self, fault: Fault) -> Option<Fault> {
        self.state = State::Over;
        Some(fault)
    }
}

//! When requests go out. The one door for the rest of the program is [`Lane`](lane::Lane): enter it, be told to
//! connect, be told to go (or be refused), and say when the exchange has ended.
//!
//! `time`, `cursor`, `clock`, `queue`, `pacer`, `share`, `course` and `throttle` are pure: `now` and state are arguments. Only `alarm` and `lane`
//! wait for anything.

pub mod alarm;
pub mod clock;
pub mod course;
pub mod cursor;
pub mod lane;
pub mod observed;
pub mod pacer;
pub mod queue;
pub mod share;
pub mod throttle;
pub mod time;
pub mod waits;

//! The cursor's keeper: this process's memory for one replica, or a Postgres table for many.
//!
//! Both execute the rule of [`crate::pacing::cursor`]. Who waits for the slots, this module does not know.

pub mod memory;
pub mod postgres;

use std::sync::Arc;

/// Where the cursors are kept.
#[derive(Clone, Debug)]
pub enum Store {
    /// In this process.
    Memory(memory::Cursors),
    /// In Postgres, shared by all replicas.
    Postgres(Arc<postgres::Postgres>),
}

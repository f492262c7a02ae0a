//! `paceline health`: whether a running replica is ready, as an exit code. For the health checks of containers, which have
//! neither a shell nor curl.
//!
//! What ready means, the replica knows: this asks its `/readyz`.

use anyhow::Result;
use http::Method;

use crate::cli::admin::AdminListener;

impl AdminListener {
    /// `ready`, from a replica that is.
    ///
    /// # Errors
    /// What keeps it from being ready, or why it was not reached.
    pub async fn health(&self) -> Result<String> {
        self.ask(Method::GET, "/readyz").await
    }
}

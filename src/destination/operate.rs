//! What an operator can do to a destination: end a lockout, pause it, end a pause. It counts for all replicas.

use std::{sync::Arc, time::Duration};

use super::Destination;
use crate::{
    authority::Host,
    config::Scope,
    pacing::{
        lane::Lane,
        throttle::tracker::Event,
        time::{LocalTime, nanos},
    },
    store::Store,
};

/// By then the others can know of it, or an operator is told that they cannot.
const TOLD_WITHIN: Duration = Duration::from_secs(2);
/// From one heartbeat of another replica to its next, and the call itself.
const HEARD_WITHIN: Duration = Duration::from_millis(1_200);

impl Destination {
    /// Ends its lockout, and what would soon have led to one. Returns whether there was any.
    ///
    /// # Errors
    /// It is in force in this replica alone; the text says why.
    pub async fn unlock(&self) -> Result<bool, String> {
        self.everywhere(Event::Unlock).await
    }

    /// Refuses its requests for `span` from now.
    ///
    /// # Errors
    /// As for [`Destination::unlock`].
    pub async fn pause(&self, span: Duration) -> Result<(), String> {
        let Some(whole) = &self.whole else {
            return Err("the destination's name is too long for the store".to_owned());
        };
        // Of two orders the later one counts: this one has to be newer than what others were told a moment ago. If the store
        // cannot say, the clock has to do.
        let _ = self.catch_up().await;
        whole.apply(Event::Pause(nanos(span)));
        settled(whole).await?;
        self.heard_by_all().await;
        Ok(())
    }

    /// Ends a pause, an operator's or one that `Retry-After` asked for, and the slow-down after protests. Returns whether
    /// there was any.
    ///
    /// # Errors
    /// As for [`Destination::unlock`].
    pub async fn resume(&self) -> Result<bool, String> {
        self.everywhere(Event::Resume).await
    }

    /// Applies `event` to every cursor of this destination that it may mean something to, in the store too.
    async fn everywhere(&self, event: Event) -> Result<bool, String> {
        let mut lanes: Vec<Arc<Lane>> = self.lanes().values().cloned().collect();
        if self.config().scope == Scope::Host {
            lanes.extend(self.whole.clone());
        }
        lanes.extend(self.catch_up().await?);
        let mut any = false;
        for lane in &lanes {
            any |= lane.apply(event);
        }
        for lane in &lanes {
            settled(lane).await?;
        }
        if any {
            self.heard_by_all().await;
        }
        Ok(any)
    }

    /// Until the other replicas, if there are any, have read the row with a heartbeat. One that refuses requests asks for no
    /// slots, and hears of it no sooner.
    async fn heard_by_all(&self) {
        if let Store::Postgres(store) = &self.ground.store
            && store.membership().count(LocalTime::now()).0 > 1
        {
            tokio::time::sleep(HEARD_WITHIN).await;
        }
    }

    /// Reads what other replicas have written since the last heartbeat, and returns the lanes of hosts whose throttle only they
    /// have had to do with.
    async fn catch_up(&self) -> Result<Vec<Arc<Lane>>, String> {
        let Store::Postgres(store) = &self.ground.store else {
            return Ok(Vec::new());
        };
        if !store.membership().has_read() {
            return Ok(Vec::new());
        }
        let own = store.throttle_key(&self.config().name);
        let prefix = format!("{own}/");
        let rows = store.throttles(&own).await.map_err(|e| e.to_string())?;
        let mut lanes = Vec::new();
        for (key, text) in rows {
            if let Some(whole) = self.whole.as_ref().filter(|_| key == own) {
                whole.heard(Some(&text));
            }
            let host = key.strip_prefix(&prefix).and_then(|h| Host::parse(h).ok());
            if let Some(host) = host
                && let Ok(lane) = self.lane(self.config().scope, &host)
            {
                lane.heard(Some(&text));
                lanes.push(lane);
            }
        }
        Ok(lanes)
    }
}

async fn settled(lane: &Arc<Lane>) -> Result<(), String> {
    match tokio::time::timeout(TOLD_WITHIN, lane.settled()).await {
        Ok(()) if lane.is_told() => Ok(()),
        _ => Err(
            "done in this replica alone: the store is away; the others hear of it when it is back"
                .to_owned(),
        ),
    }
}

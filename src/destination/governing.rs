//! The destinations in force, by the hosts that they govern; and what becomes of each when the configuration changes.

use std::{collections::HashMap, sync::Arc};

use super::{Destination, Ground};
use crate::{
    authority::{Host, HostPattern},
    config,
};

/// All destinations, by the hosts that they govern.
#[derive(Debug)]
pub struct Destinations {
    ground: Ground,
    all: Vec<Arc<Destination>>,
    /// No longer configured, but with requests or a cursor that a return under the same name must not forget.
    retired: Vec<Arc<Destination>>,
    exact: HashMap<Host, usize>,
    /// By the part behind `*.`.
    below: HashMap<Arc<str>, usize>,
}

impl Destinations {
    /// Puts the configured destinations on common ground.
    pub fn new(configured: &[config::Destination], ground: &Ground) -> Self {
        let none = Destinations {
            ground: ground.clone(),
            all: Vec::new(),
            retired: Vec::new(),
            exact: HashMap::new(),
            below: HashMap::new(),
        };
        none.renewed(configured)
    }

    /// The same after a change of the configuration. A destination that keeps its name keeps its queue, its cursor and
    /// its figures, and adopts the new settings at once; what waits for one that is gone is still paced by it.
    pub fn renewed(&self, configured: &[config::Destination]) -> Self {
        let mut found = Destinations {
            ground: self.ground.clone(),
            all: Vec::new(),
            retired: Vec::new(),
            exact: HashMap::new(),
            below: HashMap::new(),
        };
        let mut before: HashMap<&str, &Arc<Destination>> = HashMap::new();
        before.extend(self.retired.iter().chain(&self.all).map(|d| (d.name(), d)));
        for (at, destination) in configured.iter().enumerate() {
            for pattern in &destination.hosts {
                found.claim(pattern, at);
            }
            let same = before.remove(destination.name.as_str());
            found.all.push(match same {
                Some(same) => {
                    same.reconfigure(destination.clone());
                    same.clone()
                }
                None => Arc::new(Destination::new(destination.clone(), self.ground.clone())),
            });
        }
        found.retired = before
            .into_values()
            .filter(|d| !d.is_forgettable())
            .cloned()
            .collect();
        found
    }

    fn claim(&mut self, pattern: &HostPattern, at: usize) {
        // The first in the file governs; the configuration has refused two that claim the same host.
        match pattern.as_constraint_base() {
            Host::Name(base) if !pattern.matches(pattern.as_constraint_base()) => {
                self.below.entry(base.clone()).or_insert(at);
            }
            host => {
                self.exact.entry(host.clone()).or_insert(at);
            }
        }
    }

    /// The destination that governs `host`.
    pub fn governing(&self, host: &Host) -> Option<&Arc<Destination>> {
        let at = self.exact.get(host).copied().or_else(|| {
            let Host::Name(name) = host else { return None };
            let mut rest: &str = name;
            while let Some((_, parent)) = rest.split_once('.') {
                if let Some(at) = self.below.get(parent) {
                    return Some(*at);
                }
                rest = parent;
            }
            None
        });
        self.all.get(at?)
    }

    /// All of them, in the order of the configuration.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Destination>> {
        self.all.iter()
    }
}

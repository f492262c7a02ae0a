//! What the kernel says about a process and all that it has started.

use std::fs;

/// The kernel's unit of CPU time, a hundredth of a second on every Linux of today.
const TICKS: f64 = 100.0;

/// A process and its descendants, those that come later too.
#[derive(Clone, Copy, Debug)]
pub struct Family(pub u32);

impl Family {
    fn members(self) -> Vec<u32> {
        let mut members = vec![self.0];
        let mut next = 0;
        while let Some(&id) = members.get(next) {
            for thread in fs::read_dir(format!("/proc/{id}/task"))
                .into_iter()
                .flatten()
                .flatten()
            {
                let children = fs::read_to_string(thread.path().join("children"));
                let children = children.unwrap_or_default();
                members.extend(
                    children
                        .split_whitespace()
                        .filter_map(|n| n.parse::<u32>().ok()),
                );
            }
            next += 1;
        }
        members
    }

    /// CPU seconds used so far, those of children that have ended included.
    pub fn cpu_seconds(self) -> f64 {
        let ticks = |id: u32| {
            let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
            // The name, in parentheses, may hold anything; the fields behind it begin with the third.
            let fields = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
            let fields = fields.split(' ').skip(11).take(4);
            fields.filter_map(|n| n.parse::<f64>().ok()).sum::<f64>()
        };
        self.members().into_iter().map(ticks).sum::<f64>() / TICKS
    }

    /// Resident memory in KiB, pages that several share counted once.
    pub fn memory_kib(self) -> f64 {
        let pss = |id: u32| {
            let rollup = fs::read_to_string(format!("/proc/{id}/smaps_rollup")).unwrap_or_default();
            let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"));
            line.and_then(|rest| rest.trim().strip_suffix(" kB")?.trim().parse::<f64>().ok())
        };
        self.members().into_iter().filter_map(pss).sum()
    }

    /// Open file descriptors.
    pub fn files(self) -> usize {
        let open = |id: u32| fs::read_dir(format!("/proc/{id}/fd")).map_or(0, Iterator::count);
        self.members().into_iter().map(open).sum()
    }
}

/// The main process of a Postgres server: the parent of any of its sessions.
pub fn postmaster(sql: &super::bed::sql::Sql) -> u32 {
    let session = sql.number("SELECT pg_backend_pid()::int8");
    let status = fs::read_to_string(format!("/proc/{session}/status")).unwrap_or_default();
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"));
    parent
        .and_then(|id| id.trim().parse().ok())
        .expect("a server on this machine")
}

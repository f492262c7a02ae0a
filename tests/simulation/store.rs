//! The model of the store: one row that holds the cursor, a clock that may step, and the account of every slot.
//!
//! It executes the program's own rule ([`cursor::reserve`]) and checks the ceiling at the moment a slot is granted:
//!
//! * Slots are an interval apart on the store's clock, whoever asked, as long as the row and the clock are left alone.
//! * No replica is granted a slot that begins before the end of one it already knows, row or no row.
//! * What a lost row or a step of the clock can cost is bounded: the slots then granted and not yet begun (their holders
//!   keep them, while the new cursor does not know of them), and one more, for a replica that knows no slot and
//!   asks first. Each such moment is an [`Upheaval`], which the account of dispatches allows for.

use paceline::pacing::{
    cursor::{self, Ask, Granted},
    time::{Nanos, StoreTime},
};

use super::clocks::{Clock, True};

/// What became of one slot.
#[derive(Clone, Debug)]
pub struct Account {
    pub start: StoreTime,
    /// When the store's clock, as it ran when the slot was granted, reaches the start.
    pub begins: True,
    /// Whether it was ever given to a request.
    pub given: bool,
    pub used: Option<True>,
    /// How long after its beginning, at most, a request may go out in it; known once the reply has arrived.
    pub lateness: Nanos,
    /// How long before its beginning the reply may have made it seem due: only after a step too small to be seen.
    pub earliness: Nanos,
}

/// A moment at which slots granted before no longer bind those granted after.
#[derive(Clone, Copy, Debug)]
pub struct Upheaval {
    pub at: True,
    /// Slots granted and not yet begun, and when the last of them begins.
    pub outstanding: usize,
    pub until: True,
}

#[derive(Debug)]
pub struct Store {
    clock: Clock,
    stepped: Nanos,
    steps: u64,
    row: Option<StoreTime>,
    /// The throttle's row.
    pub throttle: Option<String>,
    /// The end of the last slot that anybody was granted since the last upheaval.
    end: Option<StoreTime>,
    lost_row: bool,
    pub slots: Vec<Account>,
    /// How far ahead the row ever was.
    pub furthest: Nanos,
    pub upheavals: Vec<Upheaval>,
    /// A planted fault: each replica has a cursor of its own.
    apart: Option<Vec<Option<StoreTime>>>,
}

impl Store {
    pub fn new(clock: Clock, apart: Option<usize>) -> Self {
        Store {
            clock,
            stepped: 0,
            steps: 0,
            row: None,
            throttle: None,
            end: None,
            lost_row: false,
            slots: Vec::new(),
            furthest: 0,
            upheavals: Vec::new(),
            apart: apart.map(|replicas| vec![None; replicas]),
        }
    }

    pub fn now(&self, t: True) -> StoreTime {
        StoreTime(self.clock.read(t) + self.stepped)
    }

    /// How often the clock has stepped.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// How far the row is ahead of now.
    pub fn ahead(&self, t: True) -> Nanos {
        self.row.map_or(0, |row| row.since(self.now(t)).max(0))
    }

    /// Grants what `ask` wants; `knows` is the latest slot end that the replica has been told on this clock.
    pub fn reserve(
        &mut self,
        t: True,
        replica: usize,
        ask: &Ask,
        knows: Option<StoreTime>,
    ) -> Result<Granted, String> {
        let now = self.now(t);
        let cursor = self.apart.as_ref().map_or(self.row, |apart| apart[replica]);
        let granted = cursor::take(cursor, now, ask);
        match &mut self.apart {
            Some(apart) => apart[replica] = Some(granted.end()),
            None => self.row = Some(granted.end()),
        }
        self.furthest = self.furthest.max(self.ahead(t));
        if let Some(knows) = knows.filter(|k| k.since(now) <= ask.horizon)
            && granted.start < knows
        {
            return Err(format!(
                "replica {replica} was granted a slot {} ns before the end of one it knows",
                knows.since(granted.start)
            ));
        }
        self.enter(t, granted.start, granted.interval, granted.slots)?;
        Ok(granted)
    }

    /// A foreign program's `SET value = greatest(now, value) + gap`; returns the index of its slot. It believes
    /// whatever the row says: after a step of the clock it may wait for an hour, which is `None`.
    pub fn take_foreign(&mut self, t: True, gap: Nanos) -> Result<Option<usize>, String> {
        let start = self.row.map_or(self.now(t), |row| row.max(self.now(t)));
        self.row = Some(start.plus(gap));
        let honest = cursor::furthest(gap, cursor::horizon(gap, 1));
        if start.since(self.now(t)) > honest {
            return Ok(None);
        }
        self.enter(t, start, gap, 1)?;
        Ok(Some(self.slots.len() - 1))
    }

    fn enter(
        &mut self,
        t: True,
        start: StoreTime,
        interval: Nanos,
        slots: u32,
    ) -> Result<(), String> {
        if let Some(end) = self.end.filter(|end| start < *end) {
            if !self.lost_row {
                return Err(format!(
                    "ceiling: a slot begins {} ns before the end of the one before",
                    end.since(start)
                ));
            }
            self.upheaval(t);
        }
        self.lost_row = false;
        for i in 0..slots {
            let start = start.plus(interval * Nanos::from(i));
            let begins = self.clock.shows(start.0 - self.stepped);
            self.slots.push(Account {
                start,
                begins,
                given: false,
                used: None,
                lateness: 0,
                earliness: 0,
            });
        }
        self.end = Some(start.plus(interval * Nanos::from(slots)));
        Ok(())
    }

    /// The row is deleted, or overwritten with what is no number.
    pub fn lose_row(&mut self) {
        (self.row, self.lost_row) = (None, true);
        self.throttle = None;
    }

    /// The row is overwritten with an instant days ahead.
    pub fn row_far_ahead(&mut self, t: True) {
        self.row = Some(self.now(t).plus(cursor::horizon(3_600_000_000_000, 1_000)));
        self.lost_row = true;
    }

    pub fn step(&mut self, t: True, by: Nanos) {
        self.upheaval(t);
        self.stepped += by;
        self.steps += 1;
        // The new time may meet any cursor; what it grants is compared only with what it granted itself.
        self.end = None;
    }

    fn upheaval(&mut self, t: True) {
        let outstanding = self.slots.iter().filter(|s| s.begins > t);
        let (outstanding, until) =
            outstanding.fold((0, t), |(n, until), s| (n + 1, until.max(s.begins)));
        self.upheavals.push(Upheaval {
            at: t,
            outstanding,
            until,
        });
    }
}

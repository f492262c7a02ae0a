//! TOML with its lines: groups are read key by key, and each mistake is noted while reading goes on.
//!
//! Serde stops at its first error; an operator would then fix ten mistakes in ten runs. This file knows TOML and
//! lines, but not one key of the configuration.

use std::{cell::RefCell, ops::Range};

use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::{
    faults::{Complaint, Fault, Place, shown},
    keys,
};

/// The text of a configuration and the faults found in it so far.
pub(super) struct Source {
    file: String,
    /// Offset of the first byte of each line.
    lines: Vec<usize>,
    faults: RefCell<Vec<Fault>>,
}

impl Source {
    pub(super) fn new(text: &str, file: String) -> Self {
        let starts = text.bytes().enumerate().filter(|(_, b)| *b == b'\n');
        Source {
            file,
            lines: std::iter::once(0)
                .chain(starts.map(|(i, _)| i + 1))
                .collect(),
            faults: RefCell::default(),
        }
    }

    /// The tables of the text; on a syntax error `None`, since what follows one can't be read with certainty.
    pub(super) fn parse<'t>(&self, text: &'t str) -> Option<DeTable<'t>> {
        let (table, errors) = DeTable::parse_recoverable(text);
        if errors.is_empty() {
            return Some(table.into_inner());
        }
        for error in &errors {
            // The message alone: the error's Display would quote the line, which may hold a password.
            let wrong = format!("TOML syntax: {}", error.message().replace('\n', " "));
            let fix =
                "correct this line; texts and durations need quotes, and a key may be set once";
            let place = self.place(&error.span().unwrap_or(0..0));
            self.push(place, String::new(), Complaint::new(wrong, fix));
        }
        None
    }

    /// The place of a part of the text.
    pub(super) fn place(&self, span: &Range<usize>) -> Place {
        let line = self.lines.partition_point(|start| *start <= span.start);
        Place::Line(self.file.clone(), line)
    }

    /// The place of what is missing from the whole file.
    pub(super) fn whole(&self) -> Place {
        Place::Line(self.file.clone(), 1)
    }

    pub(super) fn push(&self, place: Place, key: String, complaint: Complaint) {
        self.faults.borrow_mut().push(Fault {
            place,
            key,
            complaint,
        });
    }

    pub(super) fn into_faults(self) -> Vec<Fault> {
        self.faults.into_inner()
    }
}

/// A group such as `[proxy]`, or one `[[destination]]`, being read.
pub(super) struct Section<'s, 't> {
    pub(super) source: &'s Source,
    name: &'static str,
    table: Option<&'s DeTable<'t>>,
    place: Place,
}

impl<'s, 't> Section<'s, 't> {
    /// The group at the given place; unknown keys in it are faults.
    pub(super) fn new(
        source: &'s Source,
        name: &'static str,
        table: &'s DeTable<'t>,
        place: Place,
    ) -> Self {
        let section = Section {
            source,
            name,
            table: Some(table),
            place,
        };
        section.refuse_unknown(if name.is_empty() {
            keys::TOP
        } else {
            keys::of(name)
        });
        section
    }

    /// A group that isn't in the file: every key has its default.
    fn absent(source: &'s Source, name: &'static str) -> Self {
        Section {
            source,
            name,
            table: None,
            place: source.whole(),
        }
    }

    /// The group within this one, and whether it is there. Its full name is given, as in `proxy.auth`.
    pub(super) fn section(&self, name: &'static str) -> (Section<'s, 't>, bool) {
        let key = name.rsplit('.').next().unwrap_or(name);
        let Some((place, value)) = self.find(key) else {
            return (Section::absent(self.source, name), false);
        };
        match value {
            DeValue::Table(table) => (Section::new(self.source, name, table, place), true),
            other => {
                let complaint = Complaint::new(
                    format!("is {}, not a group", kind(other)),
                    format!("write [{name}] on a line of its own"),
                );
                self.source.push(place, name.to_owned(), complaint);
                (Section::absent(self.source, name), false)
            }
        }
    }

    /// The value of a key, if it is there; after a complaint too there is none.
    pub(super) fn read<T>(
        &self,
        key: &'static str,
        convert: impl FnOnce(&DeValue<'t>) -> Result<T, Complaint>,
    ) -> Option<T> {
        let (place, value) = self.find(key)?;
        convert(value)
            .map_err(|complaint| self.fault(place, key, complaint))
            .ok()
    }

    /// As `read`, but a missing key is a fault, with the given advice.
    pub(super) fn require<T>(
        &self,
        key: &'static str,
        advice: &str,
        convert: impl FnOnce(&DeValue<'t>) -> Result<T, Complaint>,
    ) -> Option<T> {
        if self.find(key).is_none() {
            self.fault(
                self.place.clone(),
                key,
                Complaint::new("is missing", advice),
            );
        }
        self.read(key, convert)
    }

    /// The elements of a list that convert, each with its place; complaints are placed at the element's own line.
    pub(super) fn list<T>(
        &self,
        key: &'static str,
        convert: impl Fn(&DeValue<'t>) -> Result<T, Complaint>,
    ) -> Option<Vec<(Place, T)>> {
        let (place, value) = self.find(key)?;
        let DeValue::Array(array) = value else {
            let wrong = format!("is {}, not a list", kind(value));
            self.fault(place, key, Complaint::new(wrong, "write it in [brackets]"));
            return None;
        };
        let mut elements = Vec::new();
        for element in array.iter() {
            let place = self.source.place(&element.span());
            match convert(element.get_ref()) {
                Ok(value) => elements.push((place, value)),
                Err(complaint) => self.fault(place, key, complaint),
            }
        }
        Some(elements)
    }

    /// As `list`, where an empty one would leave nothing to do.
    pub(super) fn nonempty_list<T>(
        &self,
        key: &'static str,
        advice: &str,
        convert: impl Fn(&DeValue<'t>) -> Result<T, Complaint>,
    ) -> Option<Vec<(Place, T)>> {
        if let Some((place, DeValue::Array(array))) = self.find(key)
            && array.is_empty()
        {
            self.fault(place, key, Complaint::new("is empty", advice));
        }
        self.list(key, convert)
    }

    /// The entries of a table whose keys are the operator's own, such as host names.
    pub(super) fn entries(
        &self,
        key: &'static str,
    ) -> Option<Vec<(Place, &'s str, &'s DeValue<'t>)>> {
        let (place, value) = self.find(key)?;
        let DeValue::Table(table) = value else {
            let wrong = format!("is {}, not a table", kind(value));
            let fix = format!("write {key} = {{ name = \"value\" }}");
            self.fault(place, key, Complaint::new(wrong, fix));
            return None;
        };
        let entry = |(k, v): (&'s Spanned<_>, &'s Spanned<DeValue<'t>>)| {
            let name: &'s std::borrow::Cow<'t, str> = k.get_ref();
            (self.source.place(&k.span()), &**name, v.get_ref())
        };
        Some(table.iter().map(entry).collect())
    }

    /// Notes a mistake about one of the group's keys.
    pub(super) fn fault(&self, place: Place, key: &str, complaint: Complaint) {
        self.source.push(place, self.full(key), complaint);
    }

    /// The place of a key, or of the group where the key isn't there.
    pub(super) fn place_of(&self, key: &str) -> Place {
        self.find(key)
            .map_or_else(|| self.place.clone(), |(place, _)| place)
    }

    /// The raw value of a key and the line of the key.
    pub(super) fn find(&self, key: &str) -> Option<(Place, &'s DeValue<'t>)> {
        let (key, value) = self.table?.get_key_value(key)?;
        Some((self.source.place(&key.span()), value.get_ref()))
    }

    fn full(&self, key: &str) -> String {
        match self.name {
            "" => key.to_owned(),
            name => format!("{name}.{key}"),
        }
    }

    fn refuse_unknown(&self, known: &[&str]) {
        for key in self.table.iter().flat_map(|table| table.keys()) {
            if known.contains(&&**key.get_ref()) {
                continue;
            }
            let wrong = if self.name.is_empty() {
                "unknown group"
            } else {
                "unknown key"
            };
            let fix = keys::advice(key.get_ref(), self.name, known);
            // A quoted key may hold anything, also a line break.
            let bare = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
            let name = match key.get_ref() {
                name if name.len() <= 60 && name.chars().all(bare) => name.to_string(),
                name => shown(name),
            };
            let place = self.source.place(&key.span());
            self.fault(place, &name, Complaint::new(wrong, fix));
        }
    }
}

/// What a value is, for messages; never the value.
pub(super) fn kind(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "text",
        DeValue::Integer(_) => "a whole number",
        DeValue::Float(_) => "a fraction",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

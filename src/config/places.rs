//! Where a key stands in the file that a configuration came from, for faults that only the parts themselves can find:
//! roots that cannot be read, a host that the CA may not sign for.
//!
//! The file is read again for it: places are needed once something is wrong, and are no part of what was meant.

use std::fs;

use toml::de::{DeTable, DeValue};

use super::{
    Complaint, Config, Fault, Place, STORE_URL_VARIABLE,
    parse::{Environment, variable},
    source::Source,
};

impl Config {
    /// A fault of a key outside the destinations, with its line: that of the key, of its group, or of the beginning of
    /// the file.
    pub fn fault(&self, group: &'static str, key: &str, complaint: Complaint) -> Fault {
        let place = self.place(|table| {
            let (group_key, value) = table.get_key_value(group)?;
            let within = match value.get_ref() {
                DeValue::Table(table) => table.get_key_value(key).map(|(key, _)| key.span()),
                _ => None,
            };
            Some(within.unwrap_or(group_key.span()))
        });
        Fault {
            place,
            key: format!("{group}.{key}"),
            complaint,
        }
    }

    /// A fault of the store's URL, where it was read: in its variable, or in the file.
    pub fn fault_of_url(&self, env: Environment<'_>, complaint: Complaint) -> Fault {
        let mut fault = self.fault("store", "url", complaint);
        if variable(env, STORE_URL_VARIABLE).is_some() {
            fault.place = Place::Variable(STORE_URL_VARIABLE);
        }
        fault
    }

    /// A fault of a key of the destination of that name.
    pub fn fault_of(&self, destination: &str, key: &str, complaint: Complaint) -> Fault {
        let place = self.place(|table| {
            let DeValue::Array(all) = table.get("destination")?.get_ref() else {
                return None;
            };
            all.iter().find_map(|element| {
                let DeValue::Table(table) = element.get_ref() else {
                    return None;
                };
                let name = table.get("name")?.get_ref().as_str();
                let own = (name == Some(destination)).then(|| table.get_key_value(key));
                own.map(|key| key.map_or(element.span(), |(key, _)| key.span()))
            })
        });
        Fault {
            place,
            key: format!("destination.{key}"),
            complaint,
        }
    }

    fn place(&self, find: impl FnOnce(&DeTable<'_>) -> Option<std::ops::Range<usize>>) -> Place {
        let Some(file) = &self.file else {
            return Place::File("built-in defaults".to_owned());
        };
        let name = file.display().to_string();
        let text = fs::read_to_string(file).unwrap_or_default();
        let source = Source::new(&text, name.clone());
        match source.parse(&text) {
            Some(table) => find(&table).map_or(source.whole(), |span| source.place(&span)),
            None => Place::File(name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_found_later_has_its_line_too() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let text = "[store]\nurl = \"postgres://h/d\"\n[upstream]\nextra_roots = \"no.pem\"\n\
                    [[destination]]\nname = \"a\"\nhosts = [\"a.test\"]\nrate = 1\n\
                    [[destination]]\nname = \"b\"\nrate = 1\nhosts = [\"b.test\"]\n";
        fs::write(&file, text).expect("written");
        let config = Config::load(Some(file.path()), &|_| None).expect("valid");
        let wrong = || Complaint::new("is wrong", "correct it");
        let name = file.path().display();
        let url_from = |variable: &'static str| {
            let env = move |name: &str| (name == variable).then(|| "postgres://e/d".to_owned());
            config.fault_of_url(&env, wrong()).to_string()
        };
        for (fault, expected) in [
            (
                config.fault("upstream", "extra_roots", wrong()).to_string(),
                format!("{name}:4: upstream.extra_roots: is wrong; correct it"),
            ),
            (
                config.fault("upstream", "resolve", wrong()).to_string(),
                format!("{name}:3: upstream.resolve: is wrong; correct it"),
            ),
            (
                config.fault("ca", "dir", wrong()).to_string(),
                format!("{name}:1: ca.dir: is wrong; correct it"),
            ),
            (
                config.fault_of("b", "hosts", wrong()).to_string(),
                format!("{name}:12: destination.hosts: is wrong; correct it"),
            ),
            (
                config.fault_of("b", "tls", wrong()).to_string(),
                format!("{name}:9: destination.tls: is wrong; correct it"),
            ),
            (
                url_from("NO_VARIABLE"),
                format!("{name}:2: store.url: is wrong; correct it"),
            ),
            (
                url_from(STORE_URL_VARIABLE),
                "PACELINE_STORE_URL: store.url: is wrong; correct it".to_owned(),
            ),
        ] {
            assert_eq!(fault, expected);
        }
        let built_in = Config::built_in().fault("ca", "dir", wrong()).to_string();
        assert_eq!(built_in, "built-in defaults: ca.dir: is wrong; correct it");
    }
}

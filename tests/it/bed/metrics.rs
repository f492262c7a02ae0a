//! A scrape of `/metrics`, read as Prometheus text.

use std::collections::BTreeMap;

/// The value of every series in one scrape.
#[derive(Clone, Debug)]
pub struct Scrape {
    series: BTreeMap<String, f64>,
}

impl Scrape {
    /// Reads the exposition format; comments are skipped.
    pub fn parse(text: &str) -> Scrape {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let series = lines.filter_map(|line| line.rsplit_once(' '));
        Scrape {
            series: series
                .filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?)))
                .collect(),
        }
    }

    /// The sum over the series called `name` (or `name_count` of a histogram) that carry all of `labels`, each written
    /// as `key="value"`. `None` when there is no such series.
    pub fn sum(&self, name: &str, labels: &[&str]) -> Option<f64> {
        let mut found = None;
        for (series, value) in &self.series {
            let (called, carried) = series.split_once('{').unwrap_or((series, ""));
            if called == name && labels.iter().all(|label| carried.contains(label)) {
                *found.get_or_insert(0.0) += value;
            }
        }
        found
    }

    /// Whether a metric of that name is there, as a number or as a histogram.
    pub fn has(&self, name: &str) -> bool {
        self.sum(name, &[]).is_some() || self.sum(&format!("{name}_count"), &[]).is_some()
    }

    /// Every label value under `key`.
    pub fn label_values(&self, key: &str) -> Vec<&str> {
        let opening = format!("{key}=\"");
        self.series
            .keys()
            .filter_map(|series| series.split_once(&opening)?.1.split('"').next())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_are_summed_by_name_and_label() {
        let scrape = Scrape::parse(
            "# HELP a_total x\na_total{d=\"x\",mode=\"shared\"} 3\na_total{d=\"y\",mode=\"shared\"} 4\nh_count 2\n",
        );
        assert_eq!(scrape.sum("a_total", &[]), Some(7.0));
        assert_eq!(scrape.sum("a_total", &["d=\"x\""]), Some(3.0));
        assert_eq!(scrape.sum("a_total", &["d=\"z\""]), None);
        assert!(scrape.has("h") && !scrape.has("a"));
        assert_eq!(scrape.label_values("d"), vec!["x", "y"]);
    }
}

//! What was measured, by space, and the table at the end.

use super::{Experiment, Metric};

/// The best experiment of a space.
#[derive(Debug, Clone, PartialEq)]
pub struct Best {
    /// Which.
    pub experiment: Experiment,
    /// What it measured.
    pub value: f64,
    /// How many were tried in its space.
    pub experiments: usize,
}

/// All experiments, by space, in the order in which they ran.
#[derive(Debug, Default)]
pub struct Records {
    metric: Metric,
    spaces: Vec<(String, Vec<(Experiment, Option<f64>)>)>,
}

impl Records {
    /// None yet.
    pub fn new(metric: Metric) -> Records {
        Records { metric, spaces: Vec::new() }
    }

    /// What is optimised.
    pub fn metric(&self) -> Metric {
        self.metric
    }

    /// Notes what an experiment measured; nothing where it failed.
    pub fn note(&mut self, space: &str, experiment: &Experiment, value: Option<f64>) {
        let entry = (experiment.clone(), value);
        match self.spaces.iter_mut().find(|(name, _)| name == space) {
            Some((_, entries)) => entries.push(entry),
            None => self.spaces.push((space.to_owned(), vec![entry])),
        }
    }

    /// The best of a space: the first of equals.
    pub fn best_of(&self, space: &str) -> Option<Best> {
        let (_, entries) = self.spaces.iter().find(|(name, _)| name == space)?;
        let mut best: Option<(&Experiment, f64)> = None;
        for (experiment, value) in entries {
            let Some(value) = *value else { continue };
            if best.is_none_or(|(_, found)| self.metric.is_better(value, found)) {
                best = Some((experiment, value));
            }
        }
        best.map(|(experiment, value)| Best {
            experiment: experiment.clone(),
            value,
            experiments: entries.len(),
        })
    }

    /// The best of all.
    pub fn best(&self) -> Option<Best> {
        let of_spaces = self.spaces.iter().filter_map(|(name, _)| self.best_of(name));
        of_spaces.reduce(|best, next| if self.metric.is_better(next.value, best.value) { next } else { best })
    }

    /// The spaces that were searched.
    pub fn spaces(&self) -> impl Iterator<Item = &str> {
        self.spaces.iter().map(|(name, _)| name.as_str())
    }

    /// Every experiment and what it measured.
    pub fn experiments(&self) -> impl Iterator<Item = &(Experiment, Option<f64>)> {
        self.spaces.iter().flat_map(|(_, entries)| entries)
    }

    /// A row per space and one for all.
    pub fn table(&self) -> String {
        let mut rows =
            vec![["tuning_space", "num_experiments", "best_metric_val", "best_exp_name"].map(str::to_owned)];
        let row = |space: &str, count: usize, best: Option<Best>| {
            let (value, name) = best.map_or_else(
                || ("0".to_owned(), "-".to_owned()),
                |best| (format!("{:.4}", best.value), best.experiment.name),
            );
            [space.to_owned(), count.to_string(), value, name]
        };
        for (space, entries) in &self.spaces {
            rows.push(row(space, entries.len(), self.best_of(space)));
        }
        rows.push(row("global", self.experiments().count(), self.best()));
        let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
        let widths: [usize; 4] = std::array::from_fn(width);
        let mut text = String::new();
        for (index, row) in rows.iter().enumerate() {
            let cells = row.iter().zip(widths).map(|(cell, width)| format!(" {cell:<width$} "));
            text += &format!("|{}|\n", cells.collect::<Vec<_>>().join("|"));
            if index == 0 {
                let rules = widths.map(|width| format!(":{}", "-".repeat(width + 1)));
                text += &format!("|{}|\n", rules.join("|"));
            }
        }
        text
    }
}

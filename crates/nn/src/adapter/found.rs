//! What a request meant while a model was built: which layers, which there were, and which cannot be meant.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ferrospeed_tensor::{Result, TensorError};

use super::pattern::{Patterns, is_within, means};
use super::request::{Adapters, Targets, TrainedBiases};

/// A request on its way through a model in the making.
#[derive(Debug)]
pub(crate) struct Adapting {
    pub(crate) adapters: Adapters,
    patterns: Patterns,
    found: Mutex<Found>,
}

/// A layer that has an adapter.
#[derive(Debug, Clone, PartialEq)]
pub struct AdaptedLayer {
    /// Its path.
    pub path: String,
    /// The rank of its adapter.
    pub rank: usize,
    /// By what the product of the adapter's matrices is multiplied.
    pub factor: f32,
}

/// What a request has met.
#[derive(Debug, Clone, Default)]
pub struct Found {
    /// Adapted layers, in order.
    pub adapted: Vec<AdaptedLayer>,
    /// The paths of all linear layers that can be adapted.
    pub linear: Vec<String>,
    /// Layers that are meant by name and have no adapters, with why.
    pub refused: Vec<(String, &'static str)>,
    /// Paths of all parameters but those of adapters.
    parameters: Vec<String>,
}

impl Adapting {
    /// Refuses patterns that are no regular expressions.
    pub(crate) fn new(adapters: &Adapters) -> Result<Adapting> {
        if let Some((key, why)) = adapters.problems().into_iter().next() {
            return Err(TensorError::argument("adapters", format!("{key}: {why}")));
        }
        let patterns = Patterns::of(adapters)?;
        Ok(Adapting { adapters: adapters.clone(), patterns, found: Mutex::default() })
    }

    fn means(&self, path: &str) -> bool {
        self.patterns.adapts(path) && !self.adapters.saves(path)
    }

    /// A linear layer at `path`: its rank and factor where it is adapted. `without`: why none like it is.
    pub(crate) fn linear(&self, path: &str, without: Option<&'static str>) -> Option<(usize, f32)> {
        let is_meant = self.means(path);
        if let Some(why) = without {
            self.refuse(path, why);
            return None;
        }
        let mut found = self.found();
        found.linear.push(path.to_owned());
        if !is_meant {
            return None;
        }
        let (rank, factor) = self.adapters.factor(self.patterns.own(path));
        found.adapted.push(AdaptedLayer { path: path.to_owned(), rank, factor });
        Some((rank, factor))
    }

    /// A layer that is no linear one, or none that is adapted: an error where a name means it.
    pub(crate) fn refuse(&self, path: &str, why: &'static str) {
        if self.adapters.targets != Targets::AllLinear && self.means(path) {
            self.found().refused.push((path.to_owned(), why));
        }
    }

    /// Whether a parameter of the model itself is trained beside the adapters.
    pub(crate) fn trains(&self, path: &str) -> bool {
        self.found().parameters.push(path.to_owned());
        let is_bias = path.ends_with(".bias");
        let is_saved = module_of(path).is_some_and(|module| self.adapters.saves(module));
        is_bias && self.adapters.biases == TrainedBiases::All || is_saved
    }

    pub(crate) fn found(&self) -> MutexGuard<'_, Found> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Found {
    /// What means nothing in a model, or what cannot be meant, each with its key. A file that names more than a model has is
    /// no mistake of anybody's; a person who writes a name that means nothing has made one.
    pub fn problems(&self, adapters: &Adapters) -> Vec<String> {
        let mut problems: Vec<String> = Vec::new();
        for (path, why) in &self.refused {
            problems.push(format!("target_modules: '{path}' {why}"));
        }
        let there = || {
            let names: Vec<String> = self.last_names().into_keys().collect();
            names.join(", ")
        };
        match &adapters.targets {
            Targets::Names(names) => {
                let is_met = |name: &String| {
                    let refused = self.refused.iter().map(|(path, _)| path);
                    self.linear.iter().chain(refused).any(|path| means(name, path))
                };
                for name in names.iter().filter(|name| !is_met(name)) {
                    problems.push(format!(
                        "target_modules: '{name}' means no linear layer of this model; there are: {}",
                        there()
                    ));
                }
            }
            Targets::Pattern(pattern) if self.adapted.is_empty() && self.refused.is_empty() => {
                problems.push(format!(
                    "target_modules: '{pattern}' matches no whole path of a linear layer of this model, such as {}",
                    self.linear.first().map_or("(there is none)", String::as_str)
                ));
            }
            _ => {}
        }
        for name in &adapters.saved_modules {
            if !self
                .parameters
                .iter()
                .any(|path| module_of(path).is_some_and(|module| is_within(name, module)))
            {
                problems.push(format!(
                    "modules_to_save: no module of this model has a path that ends with '{name}'"
                ));
            }
        }
        if self.adapted.is_empty() && problems.is_empty() {
            problems.push("target_modules: no layer of this model is adapted by it".to_owned());
        }
        problems
    }

    /// The last words of the paths of linear layers, each with how many have it and how many of those are adapted.
    fn last_names(&self) -> BTreeMap<String, (usize, usize)> {
        let mut names: BTreeMap<String, (usize, usize)> = BTreeMap::new();
        let adapted: BTreeSet<&String> = self.adapted.iter().map(|layer| &layer.path).collect();
        for path in &self.linear {
            let (there, of_them) = names.entry(last_word(path).to_owned()).or_default();
            *there += 1;
            *of_them += usize::from(adapted.contains(path));
        }
        names
    }

    /// The fewest names that mean the adapted layers and no other linear one: what a file says in place of "all".
    pub fn names(&self) -> Vec<String> {
        let words = self.last_names();
        let is_whole = |word: &str| {
            let elsewhere = self.parameters.iter().filter_map(|path| module_of(path));
            let known: BTreeSet<&String> = self.linear.iter().collect();
            let mut others = elsewhere.filter(|module| !known.contains(&(*module).to_owned()));
            words.get(word).is_some_and(|(there, of_them)| there == of_them)
                && !others.any(|module| last_word(module) == word)
        };
        let whole: BTreeSet<&str> = words.keys().map(String::as_str).filter(|word| is_whole(word)).collect();
        let paths = self.adapted.iter().map(|layer| &layer.path);
        let single = paths.filter(|path| !whole.contains(last_word(path)));
        whole.iter().map(|word| (*word).to_owned()).chain(single.cloned()).collect()
    }
}

fn last_word(path: &str) -> &str {
    path.rsplit_once('.').map_or(path, |(_, word)| word)
}

/// The module that a parameter is of.
fn module_of(parameter: &str) -> Option<&str> {
    parameter.rsplit_once('.').map(|(module, _)| module)
}

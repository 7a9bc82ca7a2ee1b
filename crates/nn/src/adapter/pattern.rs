//! How names mean modules: PEFT's rules, word for word, so that a directory means the same layers here and there.

use std::collections::BTreeMap;

use ferrospeed_tensor::{Result, TensorError};
use regex::Regex;

use super::request::{Adapters, Targets};

/// The patterns of a request, ready to be asked.
#[derive(Debug)]
pub(crate) struct Patterns {
    targets: TargetPattern,
    excluded: TargetPattern,
    ranks: Vec<(Regex, usize)>,
    alphas: Vec<(Regex, f64)>,
}

#[derive(Debug)]
enum TargetPattern {
    All,
    Names(Vec<String>),
    Whole(Regex),
}

/// A list of names means a module of that path, or whose path ends with it.
fn is_named(names: &[String], path: &str) -> bool {
    names.iter().any(|name| means(name, path))
}

pub(crate) fn means(name: &str, path: &str) -> bool {
    path.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

fn compiled(key: &str, pattern: &str, written: &str) -> Result<Regex> {
    Regex::new(pattern).map_err(|error| {
        TensorError::argument(
            "adapters",
            format!("{key}: '{written}' is no regular expression that is known here: {error}"),
        )
    })
}

impl TargetPattern {
    fn of(key: &str, targets: &Targets) -> Result<TargetPattern> {
        Ok(match targets {
            Targets::AllLinear => TargetPattern::All,
            Targets::Names(names) => TargetPattern::Names(names.clone()),
            Targets::Pattern(pattern) => {
                TargetPattern::Whole(compiled(key, &format!("^(?:{pattern})$"), pattern)?)
            }
        })
    }

    fn means(&self, path: &str) -> bool {
        match self {
            TargetPattern::All => true,
            TargetPattern::Names(names) => is_named(names, path),
            TargetPattern::Whole(pattern) => pattern.is_match(path),
        }
    }
}

impl Patterns {
    pub(crate) fn of(adapters: &Adapters) -> Result<Patterns> {
        fn by_key<T: Copy>(name: &str, patterns: &BTreeMap<String, T>) -> Result<Vec<(Regex, T)>> {
            let compile = |(key, value): (&String, &T)| {
                // A path that begins with the mark of a beginning is meant whole.
                let pattern = match key.strip_prefix('^') {
                    Some(whole) => format!("^(?:{whole})$"),
                    None => format!(r"^(?:.*\.)?(?:{key})$"),
                };
                Ok((compiled(name, &pattern, key)?, *value))
            };
            patterns.iter().map(compile).collect()
        }
        Ok(Patterns {
            targets: TargetPattern::of("target_modules", &adapters.targets)?,
            excluded: TargetPattern::of("exclude_modules", &adapters.excluded)?,
            ranks: by_key("rank_pattern", &adapters.rank_pattern)?,
            alphas: by_key("alpha_pattern", &adapters.alpha_pattern)?,
        })
    }

    /// Whether the module at this path is a target.
    pub(crate) fn adapts(&self, path: &str) -> bool {
        self.targets.means(path) && !self.excluded.means(path)
    }

    /// The rank and alpha of a layer that have patterns of their own.
    pub(crate) fn own(&self, path: &str) -> (Option<usize>, Option<f64>) {
        fn first<T: Copy>(patterns: &[(Regex, T)], path: &str) -> Option<T> {
            patterns.iter().find(|(pattern, _)| pattern.is_match(path)).map(|(_, value)| *value)
        }
        (first(&self.ranks, path), first(&self.alphas, path))
    }
}

/// Whether a module whose path ends with `name`, be it within a word, is `path` or above it.
pub(crate) fn is_within(name: &str, path: &str) -> bool {
    let ends = path.match_indices('.').map(|(end, _)| end).chain([path.len()]);
    let mut above = ends.map(|end| &path[..end]);
    above.any(|module| module.ends_with(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(adapters: Adapters) -> Patterns {
        Patterns::of(&adapters).unwrap()
    }

    #[test]
    fn names_mean_whole_paths_or_their_ends() {
        let names = |names: &[&str]| Targets::Names(names.iter().map(|&name| name.to_owned()).collect());
        let patterns = of(Adapters { targets: names(&["q_proj", "mlp.up"]), ..Adapters::default() });
        assert!(
            patterns.adapts("h.0.attn.q_proj") && patterns.adapts("q_proj") && patterns.adapts("h.1.mlp.up")
        );
        assert!(
            !patterns.adapts("h.0.attn.xq_proj")
                && !patterns.adapts("h.0.q_proj.x")
                && !patterns.adapts("up")
        );
        let whole = Targets::Pattern(r".*\.1\..*_proj".into());
        let patterns = of(Adapters { targets: whole, ..Adapters::default() });
        assert!(
            patterns.adapts("h.1.q_proj")
                && !patterns.adapts("h.0.q_proj")
                && !patterns.adapts("h.1.q_proj.x")
        );
        let patterns = of(Adapters { excluded: names(&["lm"]), ..Adapters::default() });
        assert!(patterns.adapts("anything") && !patterns.adapts("lm"));
        let adapters = Adapters { saved_modules: vec!["norm".into()], ..Adapters::default() };
        assert!(adapters.saves("h.layernorm") && adapters.saves("norm.weight") && !adapters.saves("h.norms"));
        assert!(
            Patterns::of(&Adapters { targets: Targets::Pattern("(".into()), ..Adapters::default() }).is_err()
        );
    }

    #[test]
    fn the_first_pattern_that_fits_says_rank_and_alpha() {
        let ranks = [("down", 4), ("h.1.up", 2), ("^up", 9)].map(|(key, rank)| (key.to_owned(), rank));
        let alphas = [("h.[01].up".to_owned(), 3.0)];
        let adapters =
            Adapters { rank_pattern: ranks.into(), alpha_pattern: alphas.into(), ..Adapters::default() };
        let patterns = of(adapters);
        assert_eq!(patterns.own("x.h.1.up"), (Some(2), Some(3.0)));
        assert_eq!(patterns.own("h.0.up"), (None, Some(3.0)));
        assert_eq!(patterns.own("h.2.down"), (Some(4), None));
        assert_eq!((patterns.own("up"), patterns.own("h.2.downs")), ((Some(9), None), (None, None)));
    }
}

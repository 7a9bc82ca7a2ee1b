//! What is asked for: which layers are adapted, and how. The words are PEFT's.

use std::collections::BTreeMap;

use super::pattern::is_within;

/// Which linear layers are meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Targets {
    /// All but the output head, routers and experts.
    AllLinear,
    /// Those of these paths, and those whose path ends with one behind a dot.
    Names(Vec<String>),
    /// Those whose whole path matches a regular expression.
    Pattern(String),
}

impl Targets {
    /// What one text means in place of a list of names.
    pub fn of_text(text: &str) -> Targets {
        match text.eq_ignore_ascii_case("all-linear") {
            true => Targets::AllLinear,
            false => Targets::Pattern(text.to_owned()),
        }
    }

    /// None.
    pub fn nothing() -> Targets {
        Targets::Names(Vec::new())
    }
}

/// By what the product of an adapter's matrices is multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Scaling {
    /// `alpha / rank`.
    #[default]
    ByRank,
    /// `alpha / √rank`: rsLoRA.
    ByRootOfRank,
}

impl Scaling {
    fn factor(self, alpha: f64, rank: usize) -> f32 {
        let rank = rank as f64;
        (match self {
            Scaling::ByRank => alpha / rank,
            Scaling::ByRootOfRank => alpha / rank.sqrt(),
        }) as f32
    }
}

/// Which biases of the model are trained beside the adapters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TrainedBiases {
    /// None.
    #[default]
    None,
    /// All.
    All,
    /// Those of adapted layers.
    OfAdapted,
}

/// Adapters of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Adapters {
    /// Rows of `A`, columns of `B`.
    pub rank: usize,
    /// How much they weigh; see [`Scaling`].
    pub alpha: f64,
    /// How alpha and rank make the factor.
    pub scaling: Scaling,
    /// Whether each output's weights have a length that is learnt apart: DoRA.
    pub magnitudes: bool,
    /// What an adapter does not see of its input in training.
    pub dropout: f32,
    /// Which layers.
    pub targets: Targets,
    /// Which of these are not meant after all.
    pub excluded: Targets,
    /// Modules that are trained whole: those whose path ends with one of these.
    pub saved_modules: Vec<String>,
    /// Ranks of single layers, by the ends of their paths: regular expressions.
    pub rank_pattern: BTreeMap<String, usize>,
    /// Alphas of single layers, likewise.
    pub alpha_pattern: BTreeMap<String, f64>,
    /// Biases that are trained.
    pub biases: TrainedBiases,
}

impl Default for Adapters {
    /// PEFT's numbers, over all linear layers.
    fn default() -> Adapters {
        Adapters {
            rank: 8,
            alpha: 8.0,
            scaling: Scaling::ByRank,
            magnitudes: false,
            dropout: 0.0,
            targets: Targets::AllLinear,
            excluded: Targets::nothing(),
            saved_modules: Vec::new(),
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
            biases: TrainedBiases::None,
        }
    }
}

impl Adapters {
    /// By what the product of the matrices of a layer is multiplied, whose rank and alpha may be its own.
    pub fn factor(&self, (rank, alpha): (Option<usize>, Option<f64>)) -> (usize, f32) {
        let rank = rank.unwrap_or(self.rank);
        (rank, self.scaling.factor(alpha.unwrap_or(self.alpha), rank))
    }

    /// Whether the module at this path, or one above it, is trained whole.
    pub fn saves(&self, path: &str) -> bool {
        self.saved_modules.iter().any(|name| is_within(name, path))
    }

    /// What is wrong with the numbers by themselves: a key, and why.
    pub fn problems(&self) -> Vec<(&'static str, String)> {
        let mut problems = Vec::new();
        let ranks = std::iter::once(("rank", self.rank))
            .chain(self.rank_pattern.values().map(|&rank| ("rank_pattern", rank)));
        for (key, rank) in ranks {
            if !(1..=MAX_RANK).contains(&rank) {
                problems.push((key, format!("{rank} must be at least 1 and at most {MAX_RANK}")));
            }
        }
        let alphas = std::iter::once(("alpha", self.alpha))
            .chain(self.alpha_pattern.values().map(|&alpha| ("alpha_pattern", alpha)));
        for (key, alpha) in alphas {
            if !(alpha.is_finite() && alpha > 0.0) {
                problems.push((key, format!("{alpha} must be more than 0")));
            }
        }
        if !(0.0..1.0).contains(&self.dropout) {
            problems.push(("dropout", format!("{} is not a share in 0..1", self.dropout)));
        }
        problems
    }
}

/// No adapter has more: one of the size of its layer is the layer.
const MAX_RANK: usize = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_follow_rank_and_alpha() {
        let adapters = Adapters { rank: 16, alpha: 32.0, ..Adapters::default() };
        assert_eq!(adapters.factor((None, None)), (16, 2.0));
        assert_eq!(adapters.factor((Some(4), Some(2.0))), (4, 0.5));
        let root = Adapters { scaling: Scaling::ByRootOfRank, ..adapters };
        assert_eq!(root.factor((None, None)), (16, 8.0));
    }

    #[test]
    fn numbers_that_make_no_adapter_are_named() {
        let bad = Adapters {
            rank: 0,
            alpha: f64::NAN,
            dropout: 1.0,
            rank_pattern: [("x".to_owned(), 1 << 20)].into(),
            ..Adapters::default()
        };
        let keys: Vec<&str> = bad.problems().into_iter().map(|(key, _)| key).collect();
        assert_eq!(keys, ["rank", "rank_pattern", "alpha", "dropout"]);
        assert_eq!(Adapters::default().problems(), []);
    }
}

//! The order in which experiments of a space are tried: as listed, at random, or as a model of what was measured suggests.

use serde_json::Value;

use super::boosting::Boosted;
use super::{Experiment, Laboratory, Metric};

/// How a space is searched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    /// As it is listed.
    #[default]
    Grid,
    /// At random, each once.
    Random,
    /// The most promising next, by trees over what was measured; now and then one at random.
    ModelBased,
}

impl Order {
    /// By its name in a configuration.
    pub fn named(name: &str) -> Option<Order> {
        match name {
            "gridsearch" => Some(Order::Grid),
            "random" => Some(Order::Random),
            "model_based" => Some(Order::ModelBased),
            _ => None,
        }
    }
}

/// How long a space is searched.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TunerOptions {
    /// Which comes next.
    pub order: Order,
    /// Experiments without a better one before it stops.
    pub early_stopping: usize,
    /// Experiments at most.
    pub num_trials: usize,
    /// Where chance begins.
    pub seed: u64,
}

impl Default for TunerOptions {
    fn default() -> Self {
        TunerOptions { order: Order::Grid, early_stopping: 5, num_trials: 50, seed: 0 }
    }
}

/// How often the model-based tuner tries something at random.
const EXPLORATION: f64 = 0.2;

/// Tries experiments until the options say that it is enough; returns what each measured, in the order they ran.
pub fn tune<L: Laboratory>(
    options: &TunerOptions,
    metric: Metric,
    experiments: &[Experiment],
    laboratory: &mut L,
) -> Result<Vec<(Experiment, Option<f64>)>, L::Error> {
    let mut chance = Chance(options.seed);
    let features: Vec<Vec<f64>> =
        experiments.iter().map(|experiment| features_of(&experiment.ds_config)).collect();
    let mut left: Vec<usize> = (0..experiments.len()).collect();
    let mut tried: Vec<(usize, Option<f64>)> = Vec::new();
    let mut best: Option<(f64, usize)> = None;
    while tried.len() < options.num_trials && !left.is_empty() {
        let place = match options.order {
            Order::Grid => 0,
            Order::Random => chance.below(left.len()),
            // The first and one at random give the model something to learn from.
            Order::ModelBased if tried.is_empty() => 0,
            Order::ModelBased if tried.len() == 1 || chance.share() < EXPLORATION => chance.below(left.len()),
            Order::ModelBased => most_promising(metric, &features, &tried, &left),
        };
        let index = left.remove(place);
        let value = laboratory.run(&experiments[index..=index])?.first().copied().flatten();
        if let Some(value) = value
            && best.is_none_or(|(found, _)| metric.is_better(value, found))
        {
            best = Some((value, tried.len()));
        }
        tried.push((index, value));
        if tried.len() >= best.map_or(0, |(_, at)| at) + options.early_stopping {
            break;
        }
    }
    Ok(tried.into_iter().map(|(index, value)| (experiments[index].clone(), value)).collect())
}

/// Where in `left` the configuration is of which most is expected. What failed counts as the worst.
fn most_promising(
    metric: Metric,
    features: &[Vec<f64>],
    tried: &[(usize, Option<f64>)],
    left: &[usize],
) -> usize {
    let largest = tried.iter().filter_map(|(_, value)| *value).fold(0.0, f64::max);
    let rows: Vec<&[f64]> = tried.iter().map(|(index, _)| features[*index].as_slice()).collect();
    let of = |value: Option<f64>| match (value, metric) {
        (Some(value), Metric::Latency) => 1.0 - value / largest.max(f64::MIN_POSITIVE),
        (Some(value), _) => value / largest.max(f64::MIN_POSITIVE),
        (None, Metric::Latency) => -1.0,
        (None, _) => 0.0,
    };
    let targets: Vec<f64> = tried.iter().map(|(_, value)| of(*value)).collect();
    let model = Boosted::fit(&rows, &targets);
    let mut best = (0, f64::NEG_INFINITY);
    for (place, &index) in left.iter().enumerate() {
        let expected = model.at(&features[index]);
        if expected > best.1 {
            best = (place, expected);
        }
    }
    best.0
}

/// All numbers of a configuration in the order of its keys; yes and no are numbers too.
fn features_of(config: &Value) -> Vec<f64> {
    match config {
        Value::Object(section) => {
            let mut keys: Vec<&String> = section.keys().collect();
            keys.sort_unstable();
            keys.into_iter().flat_map(|key| features_of(&section[key])).collect()
        }
        Value::Bool(value) => vec![f64::from(u8::from(*value))],
        Value::Number(number) => number.as_f64().into_iter().collect(),
        _ => Vec::new(),
    }
}

/// Chance that is the same in every search with the same seed (SplitMix64).
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, count: usize) -> usize {
        (self.next() % count.max(1) as u64) as usize
    }

    fn share(&mut self) -> f64 {
        self.next() as f64 / u64::MAX as f64
    }
}

//! In which order a run draws its sequences: all of them by its seed, or by a curriculum those that are easy enough.

use std::path::Path;

use ferrospeed_config::{Config, CurriculumMetric, MetricDifficulty};
use ferrospeed_data::{
    Admission, DataError, IndexedData, Metric, MetricIndex, MetricSchedule, Pass, PoolSampler, Position,
    Sampler, Scale, Sequences,
};
use ferrospeed_engine::metric_curricula;

use crate::recipe::Recipe;

const SAMPLING: &str = "data_efficiency.data_sampling";

/// The order of a run.
pub(crate) enum Order {
    /// Every sequence once per epoch.
    Shuffled(Sampler),
    /// Every sequence that is in once per pass.
    ByDifficulty {
        sampler: Box<PoolSampler>,
        /// The sequences of the step at hand.
        drawn: Vec<u64>,
    },
}

impl Order {
    /// An order over `count` sequences by `seed`; of those that come in by `data_seed`.
    pub(crate) fn new(count: u64, seed: u64, admission: Option<Admission>, data_seed: u64) -> Order {
        match admission {
            None => Order::Shuffled(Sampler::new(count, seed)),
            Some(admission) => {
                let sampler = Box::new(PoolSampler::new(admission, data_seed));
                Order::ByDifficulty { sampler, drawn: Vec::new() }
            }
        }
    }

    /// Goes on after `step` with what a checkpoint says; tells what is not as it was.
    pub(crate) fn go_on(&mut self, count: u64, seed: u64, saved: Option<&Pass>, step: u64) -> Option<String> {
        let sampler = match self {
            Order::Shuffled(sampler) => {
                *sampler = Sampler::new(count, seed);
                return None;
            }
            Order::ByDifficulty { sampler, .. } => sampler,
        };
        match saved {
            Some(pass) if sampler.restore(pass, step) => None,
            Some(_) => Some(format!(
                "{SAMPLING}: sequences come in at other steps, or in another order; a first pass over those that are in begins"
            )),
            None => Some(format!("{SAMPLING}: a first pass over the sequences that are in begins")),
        }
    }

    /// How far its pass is, where it has passes.
    pub(crate) fn pass(&self) -> Option<&Pass> {
        match self {
            Order::Shuffled(_) => None,
            Order::ByDifficulty { sampler, .. } => Some(sampler.pass()),
        }
    }

    /// Draws for a step of `batch` samples from `position` on.
    pub(crate) fn begin_step(&mut self, step: u64, position: Position, batch: u64) {
        if let Order::ByDifficulty { sampler, drawn } = self {
            *drawn = sampler.draw(step, position, batch);
        }
    }

    /// The sequences of a rank's micro-batch: see [`Sampler::micro_batch`].
    pub(crate) fn micro_batch(
        &self,
        position: Position,
        micro: u64,
        rank: u64,
        ranks: u64,
        size: u64,
    ) -> Vec<u64> {
        match self {
            Order::Shuffled(sampler) => sampler.micro_batch(position, micro, rank, ranks, size).collect(),
            Order::ByDifficulty { drawn, .. } => {
                let first = (micro * ranks + rank) * size;
                drawn.iter().copied().skip(first as usize).take(size as usize).collect()
            }
        }
    }
}

/// When the sequences of a recipe come in, where it has a curriculum by metrics, and all that is wrong with its indexes. Without
/// the data they are only looked at.
pub(crate) fn admission(recipe: &Recipe, sequences: Option<&Sequences>) -> (Option<Admission>, Vec<String>) {
    // What is wrong with the configuration itself is told elsewhere.
    let Ok((config, _)) = recipe.config() else { return (None, Vec::new()) };
    match (&config.data_sampling, sequences) {
        (None, _) => (None, Vec::new()),
        (Some(_), None) => (None, look(recipe, &config)),
        (Some(_), Some(sequences)) => match admit(recipe, &config, sequences) {
            Ok(admission) => (Some(admission), Vec::new()),
            Err(problems) => (None, problems),
        },
    }
}

/// A warning where a curriculum leaves sequences out.
pub(crate) fn leaves_out(admission: &Admission) -> Option<String> {
    let (left_out, samples) = (admission.left_out(), admission.samples());
    (left_out > 0).then(|| {
        format!(
            "{SAMPLING}.curriculum_learning: {left_out} of {samples} sequences are harder than the schedules ever reach, and are never drawn; a larger max_difficulty lets them in"
        )
    })
}

fn look(recipe: &Recipe, config: &Config) -> Vec<String> {
    let metrics = config.data_sampling.iter().flat_map(|sampling| &sampling.metrics);
    let looked = metrics.filter_map(|metric| {
        match MetricIndex::look(&metric.index_to_sample, difficulties(metric), recipe.data.sequence) {
            Ok(measured) => is_another(metric, &measured),
            Err(error) => Some(of_metric(metric, &error)),
        }
    });
    looked.collect()
}

fn admit(recipe: &Recipe, config: &Config, sequences: &Sequences) -> Result<Admission, Vec<String>> {
    let one = |error: DataError| vec![format!("{SAMPLING}: {error}")];
    let data = IndexedData::of(sequences).map_err(one)?;
    let (mut metrics, mut problems) = (Vec::new(), Vec::new());
    // A schedule that makes no sense is told with the configuration.
    for (metric, curriculum) in metric_curricula(config).unwrap_or_default() {
        match MetricIndex::open(&metric.index_to_sample, difficulties(metric), &data) {
            Ok(index) => {
                problems.extend(is_another(metric, index.metric()));
                metrics.push(MetricSchedule {
                    index,
                    scale: match metric.difficulty {
                        MetricDifficulty::Value { .. } => Scale::Value,
                        MetricDifficulty::Percentile { last } => Scale::Percentile { last },
                    },
                    first_step: Box::new(move |difficulty| curriculum.first_step(difficulty)),
                });
            }
            Err(error) => problems.push(of_metric(metric, &error)),
        }
    }
    let epochs = config.data_sampling.as_ref().map_or(u64::MAX, |sampling| sampling.num_epochs);
    let batch = config.batch.train_batch_size.get();
    let wanted = u128::from(recipe.steps) * u128::from(batch);
    let granted = u128::from(epochs) * u128::from(data.samples());
    if wanted > granted {
        problems.push(format!(
            "{SAMPLING}.num_epochs: {} steps of {batch} samples are {wanted}, and {epochs} times {} sequences are {granted}; grant more epochs, or take fewer steps",
            recipe.steps,
            data.samples()
        ));
    }
    if problems.is_empty() { Admission::new(&data, &metrics).map_err(one) } else { Err(problems) }
}

fn difficulties(metric: &CurriculumMetric) -> Option<&Path> {
    match &metric.difficulty {
        MetricDifficulty::Value { index_to_metric } => Some(index_to_metric),
        MetricDifficulty::Percentile { .. } => None,
    }
}

/// Why an index is not of the metric that its entry is called after. An entry may have any other name.
fn is_another(metric: &CurriculumMetric, measured: &str) -> Option<String> {
    let is_known = Metric::ALL.iter().any(|known| known.name() == metric.name);
    let why = format!(
        "{}: is an index of {measured}; name the one of {}, or call the entry otherwise",
        metric.index_to_sample.display(),
        metric.name
    );
    (is_known && measured != metric.name).then(|| of_metric(metric, &why))
}

fn of_metric(metric: &CurriculumMetric, why: &dyn std::fmt::Display) -> String {
    format!("{SAMPLING}.curriculum_learning.curriculum_metrics.{}: {why}", metric.name)
}

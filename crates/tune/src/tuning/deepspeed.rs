//! DeepSpeed's search: stage by stage, first the largest micro-batch that runs, then sizes around it, then (unless `fast`)
//! the other keys of the stage.

use ferrospeed_config::whole;
use serde_json::{Value, json};

use super::memory::{ModelInfo, Precision, instantiation_bytes};
use super::naming::canonical_name;
use super::records::Records;
use super::space::{combinations, first_values, overlay, ranges, template};
use super::tuner::{TunerOptions, tune};
use super::{Experiment, Laboratory, Metric};

/// A larger size must be so much better to go on.
const WORTHWHILE: f64 = 0.05;
const MICRO_BATCH: &str = "train_micro_batch_size_per_gpu";
const ACCUMULATION: &str = "gradient_accumulation_steps";
const ZERO: &str = "zero_optimization";

/// The `autotuning` section, and what is known of the machine and the model.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// What is optimised.
    pub metric: Metric,
    /// Only micro-batches are tuned.
    pub fast: bool,
    /// The largest batch of all ranks.
    pub max_train_batch_size: Option<u64>,
    /// The largest micro-batch.
    pub max_micro_batch: u64,
    /// The smallest.
    pub min_micro_batch: u64,
    /// How many sizes are tried between.
    pub num_micro_batches: u64,
    /// Ranks that share one model.
    pub model_parallel: u64,
    /// How the other keys are searched.
    pub tuner: TunerOptions,
    /// Ranks of an experiment.
    pub ranks: u64,
    /// Memory of one rank.
    pub device_bytes: u64,
    /// The model.
    pub model: ModelInfo,
}

/// What a stage gave to the next ones.
#[derive(Debug, Clone, Copy, Default)]
struct Reached {
    /// The largest micro-batch that runs.
    largest: u64,
    /// The best.
    best: u64,
    /// What it measured.
    value: f64,
}

/// Searches a configuration in which lists stand for choices. What was tried is in the records; they are empty where the model
/// does not fit at all.
pub fn search<L: Laboratory>(
    user: &Value,
    options: &Options,
    laboratory: &mut L,
) -> Result<Records, L::Error> {
    let mut search = Search { user, options, laboratory, records: Records::new(options.metric) };
    let mut reached = Reached::default();
    for stage in 0..=3 {
        let needed = search.instantiation(stage) + options.model.activation_bytes as f64;
        if options.device_bytes as f64 > needed && search.wants(stage) {
            let next = search.stage(stage, reached)?;
            if next.best > reached.best {
                reached = next;
            }
        }
    }
    Ok(search.records)
}

struct Search<'a, L> {
    user: &'a Value,
    options: &'a Options,
    laboratory: &'a mut L,
    records: Records,
}

impl<L: Laboratory> Search<'_, L> {
    fn wants(&self, stage: u8) -> bool {
        match &self.user[ZERO]["stage"] {
            Value::Null => stage == 0,
            Value::String(all) => all == "all",
            Value::Array(stages) => stages.iter().any(|one| whole(one) == Some(u64::from(stage))),
            number => whole(number) == Some(u64::from(stage)),
        }
    }

    fn instantiation(&self, stage: u8) -> f64 {
        let is_half = ["fp16", "bf16"].iter().any(|section| self.user[section]["enabled"] == true);
        let precision = if is_half { Precision::Half } else { Precision::Full };
        let Options { model, ranks, model_parallel, .. } = *self.options;
        instantiation_bytes(model.parameters, precision, stage, ranks, model_parallel)
    }

    fn accumulation(&self) -> u64 {
        whole(&self.user[ACCUMULATION]).unwrap_or(1).max(1)
    }

    /// Samples of a rank in a step, at most, where the batch has a limit.
    fn limit_per_rank(&self) -> Option<u64> {
        let limit = self.options.max_train_batch_size?;
        Some(limit * self.options.model_parallel / self.options.ranks.max(1))
    }

    fn batch(&self, micro_batch: u64, accumulation: u64) -> u64 {
        micro_batch * accumulation * self.options.ranks / self.options.model_parallel.max(1)
    }

    /// The user's configuration with one stage and one size.
    fn experiment(&self, stage: u8, micro_batch: u64, accumulation: u64) -> Experiment {
        let mut config = first_values(self.user);
        config[ZERO] = json!({ "stage": stage });
        self.set_batch(&mut config, micro_batch, accumulation);
        Experiment { name: format!("z{stage}_gas{accumulation}_tmbspg{micro_batch}"), ds_config: config }
    }

    fn set_batch(&self, config: &mut Value, micro_batch: u64, accumulation: u64) {
        if let Some(config) = config.as_object_mut() {
            config.remove("autotuning");
        }
        config[MICRO_BATCH] = micro_batch.into();
        config[ACCUMULATION] = accumulation.into();
        config["train_batch_size"] = self.batch(micro_batch, accumulation).into();
    }

    fn try_one(&mut self, stage: u8, micro_batch: u64, accumulation: u64) -> Result<Option<f64>, L::Error> {
        let experiment = self.experiment(stage, micro_batch, accumulation);
        let value = self.laboratory.run(std::slice::from_ref(&experiment))?.first().copied().flatten();
        self.records.note(&format!("z{stage}"), &experiment, value);
        Ok(value)
    }

    fn stage(&mut self, stage: u8, before: Reached) -> Result<Reached, L::Error> {
        let activations = self.options.model.activation_bytes.max(1);
        let room = (self.options.device_bytes as f64 - self.instantiation(stage)) as u64;
        let calculated = room / activations;
        if calculated < before.largest {
            return Ok(Reached::default());
        }
        let given: Option<Vec<u64>> =
            self.user[MICRO_BATCH].as_array().map(|sizes| sizes.iter().filter_map(whole).collect());
        let accumulation = self.accumulation();
        let (sizes, per_rank, smallest) = match &given {
            Some(sizes) => {
                let largest = sizes.iter().copied().max().unwrap_or(0);
                (sizes.clone(), largest * accumulation, largest)
            }
            None => {
                let Some((smallest, largest)) = self.extremes(stage, before.largest, calculated)? else {
                    return Ok(Reached::default());
                };
                if largest < before.largest {
                    return Ok(Reached::default());
                }
                let model_parallel = self.options.model_parallel.max(1);
                let per_rank = self.limit_per_rank().unwrap_or(largest * accumulation / model_parallel);
                (self.sizes(smallest, largest, per_rank), per_rank, smallest)
            }
        };
        let Some(&largest) = sizes.last() else { return Ok(Reached::default()) };
        let sizes = self.try_sizes(stage, sizes, per_rank, given.is_none().then_some(smallest))?;
        let Some(best) = self.records.best_of(&format!("z{stage}")) else { return Ok(Reached::default()) };
        let mut reached = Reached { largest, best: best.experiment.micro_batch(), value: best.value };
        let is_worse = before.best > 0 && self.options.metric.is_better(before.value, reached.value);
        if self.options.fast || stage == 0 || reached.best <= before.best || is_worse {
            return Ok(reached);
        }
        if let Some((micro_batch, value)) = self.other_keys(stage, &sizes, per_rank)?
            && self.options.metric.is_better(value, reached.value)
        {
            (reached.best, reached.value) = (micro_batch, value);
        }
        Ok(reached)
    }

    /// The smallest and the largest micro-batch that run; `None` where not even the smallest does.
    fn extremes(&mut self, stage: u8, before: u64, calculated: u64) -> Result<Option<(u64, u64)>, L::Error> {
        let accumulation = self.accumulation();
        let mut used = Vec::new();
        let floor = self.options.min_micro_batch;
        let first = if before >= 1 { before } else { whole(&self.user[MICRO_BATCH]).unwrap_or(1) };
        used.push(first);
        let smallest = match self.try_one(stage, first, accumulation)? {
            Some(_) => first,
            None if before >= 1 || first == floor => return Ok(None),
            None => {
                used.push(floor);
                if self.try_one(stage, floor, accumulation)?.is_none() {
                    return Ok(None);
                }
                floor
            }
        };
        let cap = self.limit_per_rank().unwrap_or(u64::MAX).min(self.options.max_micro_batch);
        let guess = calculated.min(cap);
        let above = (guess as f64 * 1.05).ceil() as u64;
        let below = (guess as f64 * 0.95) as u64;
        for size in [above, guess, below] {
            if size > cap || size == 0 {
                continue;
            }
            if used.contains(&size) || self.try_one(stage, size, accumulation)?.is_some() {
                return Ok(Some((smallest, size)));
            }
            used.push(size);
        }
        let (mut low, mut high, mut last) = (smallest, guess, None);
        while low <= high {
            let middle = (low + high) / 2;
            if used.contains(&middle) {
                low = middle + 1;
                continue;
            }
            let Some(value) = self.try_one(stage, middle, accumulation)? else {
                high = middle.saturating_sub(1);
                continue;
            };
            low = middle + 1;
            used.push(middle);
            if last.is_some_and(|last| self.options.metric.gain(value, last) < WORTHWHILE) {
                break;
            }
            last = Some(value);
        }
        Ok(Some((smallest, low.saturating_sub(1))))
    }

    /// Some sizes between two, of which no two mean the same number of micro-batches, and the largest.
    fn sizes(&self, smallest: u64, largest: u64, per_rank: u64) -> Vec<u64> {
        if smallest == 0 || largest == 0 {
            return Vec::new();
        }
        let smallest = smallest.max(largest / 2);
        let stride = ((largest.saturating_sub(smallest)) / self.options.num_micro_batches.max(1)).max(1);
        let mut sizes: Vec<u64> = (smallest..largest)
            .step_by(stride as usize)
            .filter(|size| per_rank / size != per_rank / largest)
            .collect();
        sizes.push(largest);
        sizes
    }

    /// Tries sizes, each with as many micro-batches as the batch allows; then, where the list was found and not given, smaller
    /// ones than the largest with as many micro-batches as it has. Returns the sizes that were best to go on with.
    fn try_sizes(
        &mut self,
        stage: u8,
        mut sizes: Vec<u64>,
        per_rank: u64,
        smallest: Option<u64>,
    ) -> Result<Vec<u64>, L::Error> {
        let accumulation = |size: u64| (per_rank / size.max(1)).max(1);
        let batch: Vec<Experiment> =
            sizes.iter().map(|&size| self.experiment(stage, size, accumulation(size))).collect();
        let values = self.laboratory.run(&batch)?;
        let space = format!("z{stage}");
        for (experiment, value) in batch.iter().zip(&values) {
            self.records.note(&space, experiment, *value);
        }
        let (Some(smallest), Some(&largest)) = (smallest, sizes.last()) else { return Ok(sizes) };
        let from = sizes.iter().rev().nth(1).map_or(smallest, |second| second + 1);
        let stride = (largest.saturating_sub(from) / 3).max(1);
        let smaller: Vec<u64> = (from..largest).step_by(stride as usize).collect();
        let mut best = values.last().copied().flatten();
        for size in smaller.into_iter().rev() {
            let value = self.try_one(stage, size, accumulation(largest))?;
            let is_worth_it = match (value, best) {
                (Some(value), Some(best)) => self.options.metric.gain(value, best) > WORTHWHILE,
                (Some(_), None) => true,
                (None, _) => false,
            };
            if !is_worth_it {
                break;
            }
            best = value;
            if let Some(last) = sizes.last_mut() {
                *last = size;
            }
        }
        Ok(sizes)
    }

    /// The other keys of a stage with the sizes found: the best micro-batch and what it measured.
    fn other_keys(
        &mut self,
        stage: u8,
        sizes: &[u64],
        per_rank: u64,
    ) -> Result<Option<(u64, f64)>, L::Error> {
        let mut section = Value::Object(ranges(stage));
        let mut given = self.user[ZERO].clone();
        if let Some(given) = given.as_object_mut() {
            given.remove("stage");
        }
        if given.is_object() {
            overlay(&mut section, &given);
        }
        let keys = section.as_object().into_iter().flatten();
        let keys: Vec<String> =
            keys.filter(|(_, value)| value.is_array()).map(|(key, _)| key.clone()).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let mut space = self.user.clone();
        overlay(&mut space, &json!({ ZERO: Value::Null }));
        space[ZERO] = section;
        space[MICRO_BATCH] = sizes.into();
        let prefix = format!("z{stage}_");
        let name = canonical_name(&space, &keys, &prefix, true);
        let mut experiments = Vec::new();
        for mut config in combinations(&space) {
            let mut section = Value::Object(template(stage, self.options.model.hidden_size));
            overlay(&mut section, &config[ZERO]);
            config[ZERO] = section;
            let micro_batch = whole(&config[MICRO_BATCH]).unwrap_or(1).max(1);
            self.set_batch(&mut config, micro_batch, (per_rank / micro_batch).max(1));
            experiments
                .push(Experiment { name: canonical_name(&config, &keys, &prefix, false), ds_config: config });
        }
        let tried = tune(&self.options.tuner, self.options.metric, &experiments, self.laboratory)?;
        for (experiment, value) in &tried {
            self.records.note(&name, experiment, *value);
        }
        let best = self.records.best_of(&name);
        Ok(best.map(|best| (best.experiment.micro_batch(), best.value)))
    }
}

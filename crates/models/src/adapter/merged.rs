//! A model's weights with an adapter worked in: `W + s·B·A`, and where it has magnitudes, each output's weights at their length.
//!
//! Nothing is rounded but by whoever asks for a narrower type; whoever reads a slice computes the slice.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::OnceLock;

use ferrospeed_nn::adapter::{AdaptedLayer, Whole};
use ferrospeed_tensor::store::ParamSource;
use ferrospeed_tensor::{PackedWeight, Packing, Param, Result as TensorResult};

use super::files::AdapterFiles;
use crate::config::ModelConfig;
use crate::decoder::{Decoder, Spread};
use crate::error::{ModelError, Result};
use crate::weights::WeightFiles;

/// Weights of a model and an adapter.
#[derive(Debug)]
pub struct MergedWeights {
    base: WeightFiles,
    adapter: AdapterFiles,
    /// By the name of the weight that they change.
    changes: HashMap<String, Change>,
    /// Names of parameters that the adapter holds whole.
    replaced: Vec<String>,
}

/// What is added to a weight: `left [rows, rank] · right [rank, columns]`, of which it is `[rows, columns]`.
#[derive(Debug)]
struct Change {
    whole: Whole,
    rank: usize,
    left: Vec<f32>,
    right: Vec<f32>,
    magnitudes: Option<Vec<f32>>,
    /// By what each output's weights are then multiplied.
    ratios: OnceLock<Vec<f32>>,
}

impl MergedWeights {
    /// Refuses an adapter that does not fit the model, and weights that are not the model's.
    pub fn new(config: ModelConfig, base: WeightFiles, adapter: AdapterFiles) -> Result<MergedWeights> {
        let ModelConfig::Decoder(config) = config else {
            return Err(ModelError::file(
                adapter.path(),
                "is of no causal language model; only such are adapted here",
            ));
        };
        let model = Decoder::adapted(*config, &Spread::default(), adapter.adapters())?;
        let params = model.parameters().as_slice();
        adapter.check(params)?;
        let mut wholes = Whole::of_adapted(params);
        let layers = model.adapters().map(|(_, found)| found.adapted.as_slice()).unwrap_or_default();
        let mut changes = HashMap::with_capacity(layers.len());
        for layer in layers {
            let Some(whole) = wholes.remove(&layer.path) else { continue };
            let find = |ending: &str| model.parameters().get(&format!("{}.{ending}", layer.path));
            let read = |ending: &str| find(ending).map(|param| values(&adapter, param)).transpose();
            let (Some(a), Some(b)) = (read("lora_A.weight")?, read("lora_B.weight")?) else { continue };
            let magnitudes = read("lora_magnitude_vector")?;
            changes.insert(whole.param.name().to_owned(), Change::new(whole, layer, a, b, magnitudes));
        }
        let is_own = |param: &&Param| ferrospeed_nn::adapter::part_of(param.name()).is_none();
        let trained = params.iter().filter(is_own).filter(|param| param.is_trainable());
        let replaced = trained.map(|param| param.name().to_owned()).collect();
        Ok(MergedWeights { base, adapter, changes, replaced })
    }

    /// The model's own weights.
    pub fn base(&self) -> &WeightFiles {
        &self.base
    }

    /// The adapter.
    pub fn adapter(&self) -> &AdapterFiles {
        &self.adapter
    }
}

/// All values of a parameter of the adapter.
fn values(adapter: &AdapterFiles, param: &Param) -> Result<Vec<f32>> {
    let mut values = vec![0.0; param.numel()];
    adapter.load(param, 0..param.numel(), &mut values)?;
    Ok(values)
}

fn transposed(values: &[f32], rows: usize) -> Vec<f32> {
    let columns = values.len() / rows.max(1);
    (0..values.len()).map(|at| values[at % rows * columns + at / rows]).collect()
}

impl Change {
    fn new(
        whole: Whole,
        layer: &AdaptedLayer,
        a: Vec<f32>,
        mut b: Vec<f32>,
        magnitudes: Option<Vec<f32>>,
    ) -> Change {
        b.iter_mut().for_each(|value| *value *= layer.factor);
        let (left, right) = match whole.param.is_inputs_first() {
            false => (b, a),
            true => (transposed(&a, layer.rank), transposed(&b, whole.outputs)),
        };
        Change { whole, rank: layer.rank, left, right, magnitudes, ratios: OnceLock::new() }
    }

    /// Adds the product to elements from `start` on.
    fn add(&self, start: usize, values: &mut [f32]) {
        let columns = self.whole.param.shape().last();
        let (mut at, mut rest) = (start, values);
        while !rest.is_empty() {
            let (row, column) = (at / columns, at % columns);
            let count = (columns - column).min(rest.len());
            let (now, later) = std::mem::take(&mut rest).split_at_mut(count);
            for rank in 0..self.rank {
                let weight = self.left[row * self.rank + rank];
                let right = &self.right[rank * columns + column..][..count];
                now.iter_mut().zip(right).for_each(|(value, right)| *value += weight * right);
            }
            (at, rest) = (at + count, later);
        }
    }

    /// Works the adapter into elements from `start` on of the weight, which is `base`'s.
    fn work_in(&self, base: &WeightFiles, start: usize, values: &mut [f32]) -> TensorResult<()> {
        self.add(start, values);
        let Some(magnitudes) = &self.magnitudes else { return Ok(()) };
        let ratios = match self.ratios.get() {
            Some(ratios) => ratios,
            None => {
                let squares = self.whole.squares(base, |_, start, values| {
                    self.add(start, values);
                    Ok(())
                })?;
                let ratio = |(magnitude, square): (&f32, f64)| *magnitude / square.sqrt() as f32;
                self.ratios.get_or_init(|| magnitudes.iter().zip(squares).map(ratio).collect())
            }
        };
        for (element, value) in (start..).zip(values) {
            *value *= ratios[self.whole.place(element).0];
        }
        Ok(())
    }
}

impl ParamSource for MergedWeights {
    fn load(&self, param: &Param, range: Range<usize>, out: &mut [f32]) -> TensorResult<()> {
        if self.replaced.iter().any(|name| name == param.name()) {
            return self.adapter.load(param, range, out);
        }
        self.base.load(param, range.clone(), out)?;
        match self.changes.get(param.name()) {
            Some(change) => param.each_run(range, out, |run, out| change.work_in(&self.base, run.start, out)),
            None => Ok(()),
        }
    }

    fn load_packed(&self, param: &Param, packing: Packing) -> TensorResult<Option<PackedWeight>> {
        let is_changed =
            self.changes.contains_key(param.name()) || self.replaced.iter().any(|name| name == param.name());
        if is_changed { Ok(None) } else { self.base.load_packed(param, packing) }
    }
}

//! Where the first values of an adapted model come from.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use ferrospeed_tensor::store::{FromInitializers, ParamSource};
use ferrospeed_tensor::{PackedWeight, Packing, Param, Result, TensorError};

/// What of an adapter a parameter is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdapterPart {
    /// `A`.
    Inwards,
    /// `B`.
    Outwards,
    /// The length of each output's weights.
    Magnitude,
}

/// The path of the layer that a parameter adapts, and what it is; `None` for parameters of the model itself.
pub fn part_of(name: &str) -> Option<(&str, AdapterPart)> {
    [
        (".lora_A.weight", AdapterPart::Inwards),
        (".lora_B.weight", AdapterPart::Outwards),
        (".lora_magnitude_vector", AdapterPart::Magnitude),
    ]
    .into_iter()
    .find_map(|(ending, part)| Some((name.strip_suffix(ending)?, part)))
}

/// A source of a model's own weights, and beside it that of its adapters: of what is trained, values that were saved, else
/// those that adapters begin with, which change nothing.
pub struct Start<'a> {
    base: &'a dyn ParamSource,
    saved: Option<&'a dyn ParamSource>,
    seed: u64,
    /// The weights of layers whose outputs have magnitudes, by the layer's path.
    weights: HashMap<String, Whole>,
    /// The lengths of their outputs' weights, once they were asked for.
    lengths: Mutex<HashMap<String, Vec<f32>>>,
}

impl<'a> Start<'a> {
    /// For a model of these parameters.
    pub fn new(
        base: &'a dyn ParamSource,
        saved: Option<&'a dyn ParamSource>,
        seed: u64,
        params: &[Param],
    ) -> Start<'a> {
        let weights = Whole::of_adapted(params);
        Start { base, saved, seed, weights, lengths: Mutex::default() }
    }

    fn magnitudes(&self, path: &str, param: &Param, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        let mut lengths = self.lengths.lock().unwrap_or_else(PoisonError::into_inner);
        if !lengths.contains_key(path) {
            let missing = || TensorError::argument("adapters", format!("'{path}' has no weight"));
            let weight = self.weights.get(path).ok_or_else(missing)?;
            let squares = weight.squares(self.base, |_, _, _| Ok(()))?;
            lengths.insert(path.to_owned(), squares.into_iter().map(|square| square.sqrt() as f32).collect());
        }
        let lengths = &lengths[path];
        param.each_run(range, out, |run, out| {
            out.copy_from_slice(&lengths[run]);
            Ok(())
        })
    }
}

impl ParamSource for Start<'_> {
    fn load(&self, param: &Param, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        match (self.saved.filter(|_| param.is_trainable()), part_of(param.name())) {
            (Some(saved), _) => saved.load(param, range, out),
            (None, Some((path, AdapterPart::Magnitude))) => self.magnitudes(path, param, range, out),
            (None, Some(_)) => FromInitializers { seed: self.seed }.load(param, range, out),
            (None, None) => self.base.load(param, range, out),
        }
    }

    fn load_packed(&self, param: &Param, packing: Packing) -> Result<Option<PackedWeight>> {
        match part_of(param.name()) {
            Some(_) => Ok(None),
            None => self.base.load_packed(param, packing),
        }
    }
}

/// A layer's weight, all of it, whatever slice of it a rank holds.
#[derive(Debug, Clone)]
pub struct Whole {
    /// Its handle, which nobody reads.
    pub param: Param,
    /// How many outputs the layer has.
    pub outputs: usize,
    /// How many inputs.
    pub inputs: usize,
}

/// Elements that are looked at together.
const AT_ONCE: usize = 1 << 20;

impl Whole {
    /// The whole of a linear layer's weight.
    pub fn of(weight: &Param) -> Option<Whole> {
        let shape = *weight.whole_shape();
        let &[first, second] = shape.sizes() else { return None };
        let (outputs, inputs) = if weight.is_inputs_first() { (second, first) } else { (first, second) };
        let param = Param::new(weight.name(), shape, weight.initializer());
        let param = if weight.is_inputs_first() { param.as_inputs_first() } else { param };
        Some(Whole { param, outputs, inputs })
    }

    /// The weights of layers that have adapters among these parameters, by the layer's path.
    pub fn of_adapted(params: &[Param]) -> HashMap<String, Whole> {
        let paths = params.iter().filter_map(|param| match part_of(param.name())? {
            (path, AdapterPart::Inwards) => Some(path),
            _ => None,
        });
        let paths: std::collections::HashSet<&str> = paths.collect();
        let weights = params.iter().filter_map(|param| {
            let path = param.name().strip_suffix(".weight").filter(|path| paths.contains(path))?;
            Some((path.to_owned(), Whole::of(param)?))
        });
        weights.collect()
    }

    /// (output, input) of an element.
    pub fn place(&self, element: usize) -> (usize, usize) {
        match self.param.is_inputs_first() {
            true => (element % self.outputs, element / self.outputs),
            false => (element / self.inputs, element % self.inputs),
        }
    }

    /// The sum of the squares of each output's weights, to which `change` may do something first: it is told the first element
    /// of a stretch, and the values.
    pub fn squares(
        &self,
        source: &dyn ParamSource,
        change: impl Fn(&Whole, usize, &mut [f32]) -> Result<()>,
    ) -> Result<Vec<f64>> {
        let numel = self.param.numel();
        let (mut squares, mut values) = (vec![0.0f64; self.outputs], Vec::new());
        for start in (0..numel).step_by(AT_ONCE) {
            let end = (start + AT_ONCE).min(numel);
            values.resize(end - start, 0.0);
            source.load(&self.param, start..end, &mut values)?;
            change(self, start, &mut values)?;
            for (element, value) in (start..end).zip(&values) {
                squares[self.place(element).0] += f64::from(*value) * f64::from(*value);
            }
        }
        Ok(squares)
    }
}

//! States of a pipeline that was written without ZeRO: they lie in the stages' module files, by number.
//!
//! Which parameter a number means follows from the order in which a stage has its parameters: first the modules that layers
//! share, in the order in which the stage's layers use them, then those of its own layers. Which layers a stage has, no file
//! says: the division is taken for which all shapes fit and all stages have the same states of what they share. A layer that uses
//! another's module by a function of its own has no file, but its stage has the states of that module: whether one does, is
//! tried. Where there is no division, states are left.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::foreign::Tensor;
use super::pipeline::{TIED, layer_of};
use super::source::{DeepSpeedFiles, whole};
use crate::error::Result;
use crate::manifest::Kind;
use crate::pt::{StoredTensor, Value};
use crate::shard::PieceSpec;

/// What module files have of all stages' parameters.
pub(super) struct NumberedStates {
    /// f32 weights and states, of what is shared once.
    pub(super) tensors: Vec<Tensor>,
    /// How many steps the optimizer made.
    pub(super) steps: u64,
    /// Other names of shared parameters, with the one they go by.
    pub(super) aliases: BTreeMap<String, String>,
}

/// The states of the parameters of the layers' files, where every one has its states in one of the `modules`, stage by stage.
/// `listed` are other names that the files themselves tell of.
pub(super) fn numbered(
    files: &DeepSpeedFiles,
    modules: &[usize],
    weights: &[Tensor],
    listed: &BTreeMap<String, String>,
) -> Result<Option<NumberedStates>> {
    let Some(stages) = modules.iter().map(|file| Stage::of(files, *file)).collect::<Option<Vec<_>>>() else {
        return Ok(None);
    };
    let buffers = |file: &usize| files.files[*file].value().get("buffer_names").and_then(Value::items);
    let buffers: BTreeSet<&str> =
        modules.iter().filter_map(buffers).flatten().filter_map(Value::as_str).collect();
    let is_param = |weight: &&Tensor| {
        let own = listed.get(&weight.spec.name).unwrap_or(&weight.spec.name);
        !buffers.contains(own.as_str()) && !buffers.contains(format!("{TIED}{own}").as_str())
    };
    let params: Vec<&Tensor> = weights.iter().filter(is_param).collect();
    let shared = if listed.is_empty() { shared_layers(files, &params)? } else { listed.clone() };
    let layers = layers_of(&params);
    let called = || std::iter::once(None).chain((0..layers.len()).map(Some));
    // Layers may have the same values by chance.
    for aliases in [shared, BTreeMap::new()] {
        for called in called() {
            let model = Model { layers: layers.clone(), aliases: aliases.clone(), called };
            if let Some(stages) = model.divided(&stages)
                && let Some(found) = model.states(files, &stages)?
            {
                return Ok(Some(found));
            }
        }
    }
    Ok(None)
}

/// A stage's states in the order of their numbers.
struct Stage<'f> {
    file: usize,
    states: Vec<&'f [(Value, Value)]>,
}

impl<'f> Stage<'f> {
    fn of(files: &'f DeepSpeedFiles, file: usize) -> Option<Stage<'f>> {
        let optimizer = files.files[file].value().get("optimizer")?;
        let [group] = optimizer.get("param_groups").and_then(Value::items)? else { return None };
        let known = optimizer.get("state").and_then(Value::pairs).unwrap_or_default();
        let state = |id: &Value| {
            let entry = known.iter().find(|(known, _)| known.as_u64() == id.as_u64());
            entry.and_then(|(_, entry)| entry.pairs())
        };
        let states = group.get("params").and_then(Value::items)?.iter().map(state).collect::<Option<_>>()?;
        Some(Stage { file, states })
    }
}

/// A state's tensors, with their names.
fn tensors(state: &[(Value, Value)]) -> impl Iterator<Item = (&str, &StoredTensor)> {
    let named = state.iter().filter_map(|(name, value)| Some((name.as_str()?, value.as_tensor()?)));
    named.filter(|(name, _)| *name != "step")
}

/// A stage's states, each with the parameter it is of.
type Placed<'a, 'f> = (&'a Stage<'f>, Vec<&'a Tensor>);

/// The parameters of a pipeline, and which of them are one.
struct Model<'a> {
    layers: Vec<Vec<&'a Tensor>>,
    aliases: BTreeMap<String, String>,
    /// A layer whose module others use by a function of their own (`forward_fn`): they have no file.
    called: Option<usize>,
}

impl<'a> Model<'a> {
    /// The parameters of a stage that has these layers, in the order of their numbers; with those of the layer that is called from
    /// elsewhere, where it is said that this stage does.
    fn order(&self, layers: Range<usize>, calls: bool) -> Vec<&'a Tensor> {
        let (mut shared, mut own): (Vec<&Tensor>, Vec<&Tensor>) = (Vec::new(), Vec::new());
        for (index, param) in
            layers.flat_map(|index| self.layers[index].iter().map(move |param| (index, param)))
        {
            let name = &param.spec.name;
            let first = self.aliases.get(name).unwrap_or(name);
            let is_shared = self.called == Some(index) || self.aliases.values().any(|shared| shared == first);
            if !is_shared {
                own.push(param);
            } else if !shared.iter().any(|known| known.spec.name == *first) {
                let all = self.layers.iter().flatten();
                shared.push(all.into_iter().find(|param| param.spec.name == *first).unwrap_or(param));
            }
        }
        if let Some(called) = self.called.filter(|_| calls) {
            shared.extend(&self.layers[called]);
        }
        shared.append(&mut own);
        shared
    }

    /// What each stage has, where all layers can be divided so that the numbers of states and their shapes fit.
    fn divided<'s, 'f>(&self, stages: &'s [Stage<'f>]) -> Option<Vec<Placed<'s, 'f>>>
    where
        'a: 's,
    {
        let mut hopeless = BTreeSet::new();
        let mut found = Vec::new();
        self.divide(stages, 0, &mut hopeless, &mut found).then_some(found)
    }

    /// Divides the layers from `start` on among the stages that have none yet. What led nowhere is tried once.
    fn divide<'s, 'f>(
        &self,
        stages: &'s [Stage<'f>],
        start: usize,
        hopeless: &mut BTreeSet<(usize, usize)>,
        found: &mut Vec<Placed<'s, 'f>>,
    ) -> bool
    where
        'a: 's,
    {
        let Some(stage) = stages.get(found.len()) else { return start == self.layers.len() };
        if hopeless.contains(&(found.len(), start)) {
            return false;
        }
        let elsewhere = |end: usize| self.called.is_some_and(|called| !(start..end).contains(&called));
        let ends = (start..=self.layers.len()).flat_map(|end| [(end, false), (end, true)]);
        for (end, calls) in ends.filter(|&(end, calls)| !calls || elsewhere(end)) {
            let params = self.order(start..end, calls);
            if params.len() > stage.states.len() && !calls {
                break;
            }
            let fits = |(param, state): (&&Tensor, &&[(Value, Value)])| {
                tensors(state).all(|(_, tensor)| tensor.shape == param.spec.shape)
            };
            if params.len() == stage.states.len() && params.iter().zip(&stage.states).all(fits) {
                found.push((stage, params));
                if self.divide(stages, end, hopeless, found) {
                    return true;
                }
                found.pop();
            }
        }
        hopeless.insert((found.len(), start));
        false
    }

    /// Weights and states of all parameters, where stages agree on those that they share.
    fn states(&self, files: &DeepSpeedFiles, stages: &[Placed<'_, '_>]) -> Result<Option<NumberedStates>> {
        let (mut found, mut steps) = (Vec::new(), 0);
        let mut known: BTreeMap<&str, (usize, &[(Value, Value)])> = BTreeMap::new();
        for (stage, params) in stages {
            for (param, state) in params.iter().zip(&stage.states) {
                let read = |(file, state): (usize, &[(Value, Value)])| -> Result<Vec<(String, Vec<f32>)>> {
                    let read = |(name, tensor): (&str, &StoredTensor)| {
                        Ok((name.to_owned(), files.read_f32(&[whole(file, tensor)])?))
                    };
                    tensors(state).map(read).collect()
                };
                if let Some(first) = known.insert(&param.spec.name, (stage.file, state)) {
                    if read(first)? != read((stage.file, state))? {
                        return Ok(None);
                    }
                    continue;
                }
                let spec = |kind| PieceSpec { kind, place: found.len() as u64, ..param.spec.clone() };
                let mut own = vec![Tensor { spec: spec(Kind::Master), stretches: param.stretches.clone() }];
                let step = state.iter().find(|(name, _)| name.as_str() == Some("step"));
                if let Some((_, step)) = step {
                    steps = files.files[stage.file].read_count(step)?;
                }
                for (name, tensor) in tensors(state) {
                    let spec = PieceSpec { dtype: tensor.dtype, ..spec(Kind::State(name.to_owned())) };
                    own.push(Tensor { spec, stretches: vec![whole(stage.file, tensor)] });
                }
                found.extend(own);
            }
        }
        let aliases = self.aliases.clone();
        Ok((!found.is_empty()).then_some(NumberedStates { tensors: found, steps, aliases }))
    }
}

fn layers_of<'a>(params: &[&'a Tensor]) -> Vec<Vec<&'a Tensor>> {
    let layers = params.chunk_by(|one, other| layer_of(&one.spec.name) == layer_of(&other.spec.name));
    layers.map(<[&Tensor]>::to_vec).collect()
}

/// The parameters of layers that have those of one before them, with the names there: modules that are tied have a file for
/// every layer that uses them.
fn shared_layers(files: &DeepSpeedFiles, params: &[&Tensor]) -> Result<BTreeMap<String, String>> {
    let rest = |param: &Tensor| param.spec.name.split_once('.').map(|(_, rest)| rest.to_owned());
    let is_same = |one: &Tensor, other: &Tensor| -> Result<bool> {
        let alike = rest(one) == rest(other) && one.spec.shape == other.spec.shape;
        Ok(alike && files.read_f32(&one.stretches)? == files.read_f32(&other.stretches)?)
    };
    let layers = layers_of(params);
    let mut aliases = BTreeMap::new();
    for (at, layer) in layers.iter().enumerate() {
        for before in &layers[..at] {
            let mut same = layer.len() == before.len();
            for (one, other) in layer.iter().zip(before) {
                same = same && is_same(one, other)?;
            }
            if same {
                let names = layer
                    .iter()
                    .zip(before)
                    .map(|(one, other)| (one.spec.name.clone(), other.spec.name.clone()));
                aliases.extend(names);
                break;
            }
        }
    }
    Ok(aliases)
}

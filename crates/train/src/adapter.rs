//! Runs that train adapters: from a recipe's section to a model with them, to the values that they begin with, and to the directory
//! that such a run leaves.

use std::cell::Cell;
use std::path::Path;

use ferrospeed_checkpoint::{CheckpointError, agree};
use ferrospeed_engine::Engine;
use ferrospeed_hub::HubName;
use ferrospeed_models::adapter::{self, AdapterFiles, stored_name};
use ferrospeed_models::decoder::Spread;
use ferrospeed_models::directory::encode;
use ferrospeed_models::weights::TensorToWrite;
use ferrospeed_models::{Decoder, DecoderConfig, ModelConfig, ModelError, WindowRule};
use ferrospeed_nn::Parameters;
use ferrospeed_nn::adapter::{Adapters, part_of};
use ferrospeed_tensor::Param;
use ferrospeed_tensor::ops::WeightLayout;
use serde_json::Value;

use crate::error::Result;
use crate::recipe::Recipe;

/// What a recipe asks of adapters.
pub(crate) struct Asked {
    pub(crate) adapters: Adapters,
    /// The adapter that is trained further.
    pub(crate) files: Option<AdapterFiles>,
}

impl Asked {
    /// `None` where it asks for none; an error is a line for its author.
    pub(crate) fn of(recipe: &Recipe) -> Result<Option<Asked>, String> {
        let Some(section) = &recipe.adapter else { return Ok(None) };
        if recipe.model.path.is_none() {
            return Err(
                "adapter: it is of a model whose weights stay as they are: name its directory, model.path"
                    .to_owned(),
            );
        }
        let Some(path) = &section.path else {
            return Ok(Some(Asked { adapters: section.adapters(), files: None }));
        };
        let files = AdapterFiles::open(path).map_err(|error| format!("adapter.path: {error}"))?;
        let mut adapters = files.adapters().clone();
        if let Some(dropout) = section.dropout {
            adapters.dropout = dropout as f32;
        }
        Ok(Some(Asked { adapters, files: Some(files) }))
    }

    /// The model with the adapters; every problem is a line.
    pub(crate) fn build(&self, config: DecoderConfig, spread: &Spread) -> Result<Decoder, Vec<String>> {
        let decoder = Decoder::adapted(config, spread, &self.adapters)
            .map_err(|error| vec![format!("adapter: {error}")])?;
        let problems = match (&self.files, decoder.adapters()) {
            // A file may name more layers than there are: what counts is that its tensors fit.
            (Some(files), _) => {
                let checked = files.check(decoder.parameters().as_slice());
                checked.err().map(|error| format!("adapter.path: {error}")).into_iter().collect()
            }
            (None, Some((adapters, found))) => found.problems(adapters),
            (None, None) => Vec::new(),
        };
        if problems.is_empty() {
            return Ok(decoder);
        }
        Err(problems
            .into_iter()
            .map(|problem| if self.files.is_some() { problem } else { format!("adapter.{problem}") })
            .collect())
    }
}

/// The handles of what a recipe trains, and of what it freezes, without values.
pub fn parameters(recipe: &Recipe, model: &Value) -> Option<Parameters> {
    let config = match ModelConfig::from_value(model, WindowRule::default()).ok()? {
        ModelConfig::Decoder(config) => config,
        other @ ModelConfig::Bert(_) => return Some(other.parameters()),
    };
    let decoder = match Asked::of(recipe).ok()? {
        Some(asked) => asked.build(*config, &Spread::default()).ok()?,
        None => Decoder::new(*config),
    };
    recipe.model.frozen.iter().for_each(|pattern| {
        decoder.parameters().freeze(pattern);
    });
    Some(decoder.parameters().clone())
}

/// How many parameters of a recipe's model are not trained, and how many its adapters have, by its `config.json`; nothing of what
/// cannot be read, which is told elsewhere.
pub fn frozen_and_adapters(recipe: &Recipe, model: &Value) -> (u64, u64) {
    let mut counts = (0, 0);
    if recipe.adapter.is_none() && recipe.model.frozen.is_empty() {
        return counts;
    }
    for param in parameters(recipe, model).iter().flat_map(Parameters::as_slice) {
        let numel = param.numel() as u64;
        match part_of(param.name()) {
            Some(_) => counts.1 += numel,
            None if !param.is_trainable() => counts.0 += numel,
            None => {}
        }
    }
    counts
}

/// Writes what a run with adapters has trained, as PEFT reads it: both files or neither. `base` is the directory of the model.
/// All ranks call it together, and all hear when it failed.
pub(crate) fn export(engine: &Engine, model: &Decoder, base: &Path, folder: &Path) -> Result<()> {
    let mut params = trained(model);
    // Which is the order in which the writer asks: so all ranks gather alike.
    params.sort_by(|(a, _), (b, _)| a.cmp(b));
    let gathered = Cell::new(0);
    let written = match engine.world().rank() {
        0 => write(engine, model, &params, base, folder, &gathered),
        _ => Ok(()),
    };
    // Whatever happened on rank 0, its peers gather every parameter, and so does it.
    params[gathered.get()..].iter().try_for_each(|(_, param)| engine.weight_as_read(param).map(drop))?;
    let said = written.map_err(|error| CheckpointError::Request(error.to_string()));
    agree(&engine.world().group(), said)?;
    Ok(())
}

/// What PEFT is told of a model's adapters, where it has some; `base`: the directory of the model.
pub(crate) fn config(model: &Decoder, base: Option<&Path>) -> Option<Value> {
    let ((adapters, found), base) = (model.adapters()?, base?);
    // From wherever it is used later, this is where the model lies.
    // A model of the Hub is known by its name everywhere, and lies elsewhere on another machine.
    let base = match HubName::of_cached(base) {
        Some(name) => name.repository().to_owned(),
        None => std::path::absolute(base).unwrap_or_else(|_| base.to_path_buf()).display().to_string(),
    };
    let inputs_first = model.config().layout == WeightLayout::InOut;
    Some(adapter::to_value(adapters, found.names(), &base, inputs_first))
}

/// Every trained parameter with its name in the file.
fn trained(model: &Decoder) -> Vec<(String, Param)> {
    let layers = model.adapters().map(|(_, found)| found.adapted.as_slice()).unwrap_or_default();
    let adapted: Vec<&str> = layers.iter().map(|layer| layer.path.as_str()).collect();
    let params = model.parameters().as_slice().iter().filter(|param| param.is_trainable());
    params.map(|param| (stored_name(param.name(), &adapted), param.clone())).collect()
}

fn write(
    engine: &Engine,
    model: &Decoder,
    params: &[(String, Param)],
    base: &Path,
    folder: &Path,
    gathered: &Cell<usize>,
) -> std::result::Result<(), ModelError> {
    let dtype = engine.store().dtype();
    let Some(config) = config(model, Some(base)) else { return Ok(()) };
    let tensors: Vec<TensorToWrite> = params
        .iter()
        .map(|(name, param)| TensorToWrite {
            name: name.clone(),
            shape: param.whole_shape().sizes().to_vec(),
            dtype,
        })
        .collect();
    adapter::write(folder, &config, &tensors, &mut |tensor| {
        let (name, param) = &params[gathered.replace(gathered.get() + 1)];
        assert_eq!(*name, tensor.name, "the writer asks in order of name");
        let failed = |why: String| ModelError::BadFile { path: folder.to_path_buf(), why };
        let values = engine.weight_as_read(param).map_err(|error| failed(error.to_string()))?;
        encode(name, &values, dtype)
    })
}

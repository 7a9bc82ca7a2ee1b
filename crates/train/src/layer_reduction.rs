//! A student of fewer layers than its teacher (`compression_training.layer_reduction`): layer `i` starts from the layer of the
//! teacher's that `teacher_layer[i]` names, all else from the same.
//!
//! The teacher is `model.path`. Refused is what says nothing of its own about each layer that the student could have: counts of
//! layers by other names, and layers that are unlike those they would start from.

use std::ops::Range;

use ferrospeed_config::Unresolved;
use ferrospeed_models::weights::WeightFiles;
use ferrospeed_models::{Decoder, DecoderConfig, ModelConfig, WindowRule};
use ferrospeed_nn::adapter::part_of;
use ferrospeed_tensor::store::ParamSource;
use ferrospeed_tensor::{PackedWeight, Packing, Param, Result};
use serde_json::Value;

use crate::recipe::Recipe;

const SECTION: &str = "compression_training.layer_reduction";
/// How a `config.json` calls its number of layers.
const COUNTS: [&str; 3] = ["num_hidden_layers", "n_layer", "num_layers"];
/// Lists with an entry for each layer.
const LISTS: [&str; 2] = ["layer_types", "no_rope_layers"];

/// From which layer of the teacher each of the student starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LayerReduction {
    from: Vec<usize>,
}

impl LayerReduction {
    /// What a recipe asks for; an error is a line for its author.
    pub(crate) fn of(recipe: &Recipe) -> Result<Option<LayerReduction>, String> {
        let reduction = LayerReduction::given(|key| recipe.given([key])[0].take())?;
        if reduction.is_some() && recipe.model.path.is_none() {
            return Err(format!("{SECTION}: a student needs a teacher: name its folder, model.path"));
        }
        Ok(reduction)
    }

    /// From the values as they were given: to resolve the rest the model must be known, which this decides.
    fn given(value: impl Fn(&str) -> Option<Value>) -> Result<Option<LayerReduction>, String> {
        let [enabled, count, layers] =
            ["enabled", "keep_number_layer", "teacher_layer"].map(|key| value(&format!("{SECTION}.{key}")));
        if enabled != Some(Value::Bool(true)) {
            return Ok(None);
        }
        let (count, layers) = (count.unwrap_or_default(), layers.unwrap_or_default());
        LayerReduction::from_values(&count, &layers).map(Some).map_err(|why| format!("{SECTION}: {why}"))
    }

    fn from_values(count: &Value, layers: &Value) -> Result<LayerReduction, String> {
        let Some(layers) = layers.as_array().filter(|layers| !layers.is_empty()) else {
            return Err(
                "teacher_layer is missing: the layer of the teacher that each of the student starts from"
                    .into(),
            );
        };
        let from: Vec<usize> =
            layers.iter().filter_map(|layer| usize::try_from(layer.as_u64()?).ok()).collect();
        match count.as_u64() {
            Some(count) if count as usize != from.len() => {
                Err(format!("keep_number_layer is {count}, and teacher_layer names {} layers", from.len()))
            }
            _ => Ok(LayerReduction { from }),
        }
    }

    /// The student's `config.json` and what it means.
    pub(crate) fn student(
        &self,
        json: &Value,
        teacher: &DecoderConfig,
    ) -> Result<(Value, DecoderConfig), String> {
        let told = |why: String| format!("{SECTION}: {why}");
        if let Some(layer) = self.from.iter().find(|layer| **layer >= teacher.layers) {
            return Err(told(format!(
                "teacher_layer names the layer {layer}, and the teacher has {}, from 0",
                teacher.layers
            )));
        }
        let mut json = json.clone();
        for key in COUNTS {
            if json[key].as_u64() == Some(teacher.layers as u64) {
                json[key] = self.from.len().into();
            }
        }
        for key in LISTS {
            if let Some(list) = json[key].as_array().filter(|list| list.len() == teacher.layers) {
                json[key] = self.from.iter().map(|&layer| list[layer].clone()).collect();
            }
        }
        let parsed =
            ModelConfig::from_value(&json, WindowRule::default()).map_err(|error| told(error.to_string()))?;
        let ModelConfig::Decoder(student) = parsed else {
            return Err(told("only causal language models are trained by recipes".into()));
        };
        if student.layers != self.from.len() {
            return Err(told(format!(
                "a config.json of this family says its layers otherwise than by {COUNTS:?}"
            )));
        }
        for (own, &from) in self.from.iter().enumerate() {
            let seen = |config: &DecoderConfig, layer: usize| {
                (config.scales[layer], config.turns[layer], config.windows[layer])
            };
            if seen(&student, own) != seen(teacher, from) {
                return Err(told(format!(
                    "layer {own} of the student would attend otherwise (window, scale or rotary positions) than the teacher's layer {from} \
                     that it starts from"
                )));
            }
        }
        Ok((json, *student))
    }
}

/// What a run would refuse of `compression_training.layer_reduction` in a configuration whose recipe is not known.
pub fn layer_reduction_problem(read: &Unresolved) -> Option<String> {
    LayerReduction::given(|key| read.given(key).cloned()).err()
}

/// The weights that a model starts from.
pub(crate) struct FirstWeights {
    files: WeightFiles,
    /// Where blocks lie, and from which each starts, where that is not the one of its number.
    taken: Option<(&'static str, LayerReduction)>,
}

impl FirstWeights {
    /// Weights for `decoder`, or of its teacher, which must be whole; or why they are not.
    pub(crate) fn of(
        files: WeightFiles,
        decoder: &Decoder,
        teacher: Option<(LayerReduction, DecoderConfig)>,
    ) -> Result<FirstWeights, ferrospeed_models::ModelError> {
        let Some((reduction, teacher)) = teacher else {
            let own = decoder.parameters().as_slice().iter().filter(|param| part_of(param.name()).is_none());
            files.check(&own.cloned().collect::<Vec<Param>>())?;
            return Ok(FirstWeights { files, taken: None });
        };
        let blocks = teacher.names.blocks;
        files.check(Decoder::new(teacher).parameters().as_slice())?;
        Ok(FirstWeights { files, taken: Some((blocks, reduction)) })
    }

    /// What tells them from others.
    pub(crate) fn fingerprint(&self) -> Result<u32, ferrospeed_models::ModelError> {
        self.files.fingerprint()
    }

    /// The parameter whose values these are, where it has another name.
    fn of_teacher(&self, param: &Param) -> Option<Param> {
        let (blocks, LayerReduction { from }) = self.taken.as_ref()?;
        let (layer, rest) = param.name().strip_prefix(blocks)?.strip_prefix('.')?.split_once('.')?;
        let name = format!("{blocks}.{}.{rest}", from.get(layer.parse::<usize>().ok()?)?);
        Some(match param.slice() {
            Some(slice) => Param::sliced(name, slice.clone(), param.initializer()),
            None => Param::new(name, *param.shape(), param.initializer()),
        })
    }
}

impl ParamSource for FirstWeights {
    fn load(&self, param: &Param, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        self.files.load(self.of_teacher(param).as_ref().unwrap_or(param), range, out)
    }

    fn load_packed(&self, param: &Param, packing: Packing) -> Result<Option<PackedWeight>> {
        self.files.load_packed(self.of_teacher(param).as_ref().unwrap_or(param), packing)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_missing_or_contradicts_itself_is_named() {
        let read = |count: Value, layers: Value| LayerReduction::from_values(&count, &layers);
        assert_eq!(read(json!(2), json!([1, 3])).unwrap().from, [1, 3]);
        assert_eq!(read(json!(null), json!([1])).unwrap().from, [1]);
        for (count, layers, expected) in [
            (json!(2), json!(null), "teacher_layer is missing"),
            (json!(3), json!([1, 3]), "keep_number_layer is 3"),
        ] {
            assert!(read(count, layers).unwrap_err().contains(expected));
        }
    }
}

//! Random layer-token dropping (Yao et al., "Random-LTD: random and layerwise token dropping brings efficient training for
//! large-scale transformers", 2022): how many tokens of a sequence some layers see at a step, more and more until they see all.

use serde::Deserialize;
use serde_json::Value;

use crate::error::{OptimError, Result};
use crate::pace::Growth;

const SECTION: &str = "data_efficiency.data_routing.random_ltd";

/// How many tokens which layers see.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenSchedule {
    growth: Growth,
    layers: Vec<usize>,
    total_layers: Option<usize>,
}

#[derive(Deserialize)]
struct Section {
    total_layer_num: Option<usize>,
    random_ltd_layer_num: Option<usize>,
    random_ltd_layer_id: Option<Vec<usize>>,
    random_ltd_schedule: Option<Schedule>,
}

#[derive(Deserialize)]
struct Schedule {
    min_value: u64,
    max_value: u64,
    schedule_type: String,
    schedule_config: Option<Steps>,
}

#[derive(Deserialize)]
struct Steps {
    require_steps: u64,
    seq_per_step: u64,
}

impl TokenSchedule {
    /// From the section of the configuration.
    pub fn from_section(section: &Value) -> Result<TokenSchedule> {
        let fault = |why: String| OptimError::Section { section: SECTION, why };
        let read: Section =
            serde_json::from_value(section.clone()).map_err(|error| fault(error.to_string()))?;
        let missing = |key: &str, what: &str| fault(format!("{key} is missing: {what}"));
        let layers = read
            .random_ltd_layer_id
            .ok_or_else(|| missing("random_ltd_layer_id", "the layers that drop tokens"))?;
        let schedule = read
            .random_ltd_schedule
            .ok_or_else(|| missing("random_ltd_schedule", "how many tokens they keep at which step"))?;
        if schedule.schedule_type != "fixed_linear" {
            return Err(fault(format!(
                "schedule_type {:?}: only fixed_linear is known",
                schedule.schedule_type
            )));
        }
        let Steps { require_steps: steps, seq_per_step: multiple } = schedule
            .schedule_config
            .ok_or_else(|| missing("random_ltd_schedule.schedule_config", "over how many steps they grow"))?;
        let growth =
            Growth { min: schedule.min_value, max: schedule.max_value, steps, multiple, root_degree: 1.0 };
        if let Some((what, why)) = growth.flaw() {
            return Err(fault(format!("random_ltd_schedule: {what}: {why}")));
        }
        if growth.min == 0 {
            return Err(fault(
                "random_ltd_schedule: min_value 0 leaves a layer without tokens; at least 1".into(),
            ));
        }
        if layers.is_empty() {
            return Err(fault(
                "random_ltd_layer_id names no layer; name those that drop tokens, or do not enable it".into(),
            ));
        }
        if let Some(count) = read.random_ltd_layer_num.filter(|count| *count != layers.len()) {
            let given = layers.len();
            return Err(fault(format!(
                "random_ltd_layer_num is {count}, and random_ltd_layer_id names {given} layers"
            )));
        }
        if let Some(layer) = layers.iter().enumerate().find(|(at, layer)| layers[..*at].contains(layer)) {
            return Err(fault(format!("random_ltd_layer_id names the layer {} twice", layer.1)));
        }
        let schedule = TokenSchedule { growth, layers, total_layers: read.total_layer_num };
        if let Some(total) = schedule.total_layers {
            schedule.fits(total).map_err(fault)?;
        }
        Ok(schedule)
    }

    /// The tokens of a sequence that those layers see in a step after so many.
    pub fn tokens(&self, steps_done: u64) -> u64 {
        self.growth.at(steps_done)
    }

    /// The layers that drop tokens, from 0.
    pub fn layers(&self) -> &[usize] {
        &self.layers
    }

    /// Why it is not for a model of so many layers.
    pub fn fits(&self, layers: usize) -> Result<(), String> {
        if let Some(said) = self.total_layers.filter(|said| *said != layers) {
            return Err(format!("total_layer_num is {said}, and the model has {layers} layers"));
        }
        match self.layers.iter().find(|layer| **layer >= layers) {
            Some(layer) => {
                Err(format!("random_ltd_layer_id names the layer {layer}, and there are {layers}, from 0"))
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn section() -> Value {
        json!({
            "enabled": true, "total_layer_num": 4, "random_ltd_layer_num": 2, "random_ltd_layer_id": [1, 2],
            "random_ltd_schedule": {
                "min_value": 16, "max_value": 64, "schedule_type": "fixed_linear",
                "schedule_config": {"require_steps": 6, "seq_per_step": 8},
            },
        })
    }

    #[test]
    fn layers_see_more_and_more_tokens() {
        let schedule = TokenSchedule::from_section(&section()).unwrap();
        assert_eq!([0, 1, 2, 6, 1_000_000].map(|step| schedule.tokens(step)), [16, 24, 32, 64, 64]);
        assert_eq!(schedule.layers(), [1, 2]);
        assert!(schedule.fits(4).is_ok() && schedule.fits(5).is_err());
    }

    #[test]
    fn what_is_missing_or_contradicts_itself_is_named() {
        let changes: [(&str, Value, &str); 10] = [
            ("/random_ltd_layer_id", json!([]), "names no layer"),
            ("/random_ltd_schedule/schedule_config", json!(null), "schedule_config is missing"),
            ("/random_ltd_layer_id", json!(null), "random_ltd_layer_id is missing"),
            ("/random_ltd_schedule", json!(null), "random_ltd_schedule is missing"),
            ("/random_ltd_layer_num", json!(3), "random_ltd_layer_num is 3, and random_ltd_layer_id names 2"),
            ("/random_ltd_layer_id", json!([1, 1]), "names the layer 1 twice"),
            ("/random_ltd_layer_id", json!([1, 4]), "names the layer 4, and there are 4"),
            ("/random_ltd_schedule/schedule_type", json!("fixed_root"), "only fixed_linear"),
            ("/random_ltd_schedule/min_value", json!(65), "the start: it lies above the end"),
            ("/random_ltd_schedule/min_value", json!(0), "leaves a layer without tokens"),
        ];
        for (key, value, expected) in changes {
            let mut changed = section();
            *changed.pointer_mut(key).unwrap() = value;
            let said = TokenSchedule::from_section(&changed).unwrap_err().to_string();
            assert!(said.starts_with(SECTION) && said.contains(expected), "{said}");
        }
    }
}

//! Weights that wait in host memory or on a disk until a pass needs them: ZeRO-Inference.
//!
//! The model's parameters are attached to a store of ZeRO's third stage without an optimizer. It brings each weight to the device
//! ahead of its use, by the order that the first pass was seen to read them in, and lets it go behind it. A pass costs as much
//! as reading all weights from there, however many tokens it computes: large batches hide it.

use std::path::Path;
use std::sync::Arc;

use ferrospeed_comm::World;
use ferrospeed_config::{AutoValues, Config};
use ferrospeed_engine::{Options, Setup, initialize_model};
use ferrospeed_nn::Parameters;
use ferrospeed_tensor::store::ParamSource;
use ferrospeed_tensor::{DType, Device};
use ferrospeed_zero::ZeroStore;
use serde_json::{Value, json};

use crate::error::{Result, ServeError};

/// Where weights wait.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum WeightsHome {
    /// Where they are used.
    #[default]
    Device,
    /// Where this `zero_optimization` section says.
    Away(Value),
}

impl WeightsHome {
    /// Page-locked memory of the host. For what computes on the host that is no other place.
    pub fn host() -> WeightsHome {
        WeightsHome::Away(json!({"stage": 3, "offload_param": {"device": "cpu", "pin_memory": true}}))
    }

    /// A file without a name in this directory.
    pub fn disk(directory: &Path) -> WeightsHome {
        let path = directory.display().to_string();
        let section = json!({"device": "nvme", "nvme_path": path, "max_in_cpu": 0, "pin_memory": true});
        WeightsHome::Away(json!({"stage": 3, "offload_param": section}))
    }

    /// As a `zero_optimization` section says: away in stage 3 with `offload_param`, else where they are used.
    pub fn of_section(zero: &Value) -> WeightsHome {
        match &zero["offload_param"]["device"] {
            Value::String(device) if zero["stage"] == 3 && device != "none" => {
                WeightsHome::Away(zero.clone())
            }
            _ => WeightsHome::Device,
        }
    }

    /// Whether that is another place than where this device has its memory.
    pub(crate) fn is_away(&self, device: &Device) -> bool {
        match self {
            WeightsHome::Device => false,
            WeightsHome::Away(zero) => {
                zero["offload_param"]["device"] == "nvme" || !device.backend().is_host()
            }
        }
    }
}

/// Reads the weights to where they wait.
pub(crate) fn attach_away(
    parameters: &Parameters,
    dtype: DType,
    device: &Device,
    weights: &dyn ParamSource,
    home: &WeightsHome,
) -> Result<Arc<ZeroStore>> {
    let failed = |error: &dyn std::fmt::Display| ServeError::Away(error.to_string());
    let WeightsHome::Away(zero) = home else { return Err(failed(&"they are to stay on the device")) };
    let mut section = json!({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero});
    match dtype {
        DType::BF16 => section["bf16"] = json!({"enabled": true}),
        DType::F16 => section["fp16"] = json!({"enabled": true}),
        _ => {}
    }
    let config = Config::from_value("zero", &section).map_err(|error| failed(&error))?;
    let (config, _) =
        config.resolve(1.try_into().map_err(|e| failed(&e))?, &AutoValues::new()).map_err(|e| failed(&e))?;
    let setup = Setup::new(config, World::solo(), device.clone());
    let options = Options { source: Some(weights), ..Options::default() };
    let engine = initialize_model(&setup, parameters, options).map_err(|error| failed(&error))?;
    Ok(engine.store().clone())
}

//! DeepSpeed's ZeRO memory estimators: model states only, by formula.
//!
//! They know nothing of activations, buckets or precision; [`crate::plan`] does. They are here because people compare
//! with them.

use std::fmt::Write;

/// The machines and the allowance for fragmentation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Setup {
    /// Nodes.
    pub nodes: u64,
    /// Devices per node.
    pub devices_per_node: u64,
    /// Host memory is multiplied by this.
    pub additional_buffer_factor: f64,
}

impl Setup {
    /// A setup with the usual allowance.
    pub fn new(nodes: u64, devices_per_node: u64) -> Self {
        Setup {
            nodes: nodes.max(1),
            devices_per_node: devices_per_node.max(1),
            additional_buffer_factor: 1.5,
        }
    }

    fn devices(self) -> f64 {
        self.nodes.max(1) as f64 * self.devices_per_node.max(1) as f64
    }
}

/// The size of a model, as the estimators see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelSize {
    /// All parameters, shared ones once.
    pub total_params: u64,
    /// The parameters of the largest layer.
    pub largest_layer_params: u64,
}

impl ModelSize {
    /// Measures a live model: the parameters that each module holds directly, shared tensors listed by the same id.
    pub fn of_modules<'a, Id: std::hash::Hash + Eq + 'a>(
        modules: impl IntoIterator<Item = &'a [(Id, u64)]>,
    ) -> ModelSize {
        let mut seen = std::collections::HashSet::new();
        let mut size = ModelSize { total_params: 0, largest_layer_params: 0 };
        for module in modules {
            let direct = module.iter().map(|(_, elements)| elements).sum();
            size.largest_layer_params = size.largest_layer_params.max(direct);
            let unseen = module.iter().filter(|(id, _)| seen.insert(id));
            size.total_params += unseen.map(|(_, elements)| elements).sum::<u64>();
        }
        size
    }
}

impl ModelSize {
    /// The same of parameters by name, identity and size: those whose names differ in their last word alone are a module's.
    ///
    /// ```
    /// use ferrospeed_tune::estimate::ModelSize;
    ///
    /// let parameters = [("up.weight", 1, 128), ("up.bias", 2, 16), ("down.weight", 3, 128), ("head.weight", 1, 128)];
    /// assert_eq!(ModelSize::of_named(parameters), ModelSize { total_params: 272, largest_layer_params: 144 });
    /// ```
    pub fn of_named<'a, Id: std::hash::Hash + Eq>(
        parameters: impl IntoIterator<Item = (&'a str, Id, u64)>,
    ) -> ModelSize {
        let mut modules = std::collections::BTreeMap::<&str, Vec<(Id, u64)>>::new();
        for (name, id, elements) in parameters {
            let module = name.rsplit_once('.').map_or("", |(module, _)| module);
            modules.entry(module).or_default().push((id, elements));
        }
        ModelSize::of_modules(modules.values().map(Vec::as_slice))
    }
}

/// Where ZeRO-3 keeps model states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Zero3Offload {
    /// Everything on the device.
    None,
    /// Optimizer states in host memory.
    Optimizer,
    /// Parameters as well.
    OptimizerAndParams,
}

/// Bytes per host and per device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Estimate {
    /// Host memory of one node.
    pub host_bytes: u64,
    /// Memory of one device.
    pub device_bytes: u64,
}

/// ZeRO-2.
pub fn zero2(total_params: u64, offload_optimizer: bool, setup: Setup) -> Estimate {
    let params = total_params as f64;
    let (device, host) = if offload_optimizer {
        (2.0 * params, params * (4.0 * setup.devices()).max(16.0))
    } else {
        let device = 4.0 * params + (16.0 * params / setup.devices()).trunc();
        (device, params * 4.0 * setup.devices_per_node as f64)
    };
    Estimate { host_bytes: (host * setup.additional_buffer_factor) as u64, device_bytes: device as u64 }
}

/// ZeRO-3. With `zero_init` the model is split while it is built, so no host ever holds it whole.
pub fn zero3(model: ModelSize, offload: Zero3Offload, zero_init: bool, setup: Setup) -> Estimate {
    let params = model.total_params as f64;
    let layer = 4.0 * model.largest_layer_params as f64;
    let share_of_node = 1.0 / setup.nodes.max(1) as f64;
    let whole_copies = 4.0 * setup.devices_per_node as f64;
    let offloaded = |bytes: f64| {
        if zero_init {
            params * bytes * share_of_node
        } else {
            params * whole_copies.max(bytes * share_of_node)
        }
    };
    let (device, host) = match offload {
        Zero3Offload::OptimizerAndParams => (layer, offloaded(18.0)),
        Zero3Offload::Optimizer => (layer + (2.0 * params / setup.devices()).trunc(), offloaded(16.0)),
        Zero3Offload::None => {
            let built = if zero_init { model.largest_layer_params as f64 } else { params };
            (layer + (18.0 * params / setup.devices()).trunc(), built * whole_copies)
        }
    };
    Estimate { host_bytes: (host * setup.additional_buffer_factor) as u64, device_bytes: device as u64 }
}

/// The printed table of ZeRO-2.
pub fn zero2_table(total_params: u64, setup: Setup) -> String {
    let mut text = header(setup, &format!("{}M total params.", total_params / 1_000_000));
    for (offload, device) in [(true, "cpu "), (false, "none")] {
        row(&mut text, zero2(total_params, offload, setup), &format!("offload_optimizer={device}"));
    }
    text
}

/// The printed table of ZeRO-3.
pub fn zero3_table(model: ModelSize, setup: Setup) -> String {
    let (total, layer) = (model.total_params / 1_000_000, model.largest_layer_params / 1_000_000);
    let mut text = header(setup, &format!("{total}M total params, {layer}M largest layer params."));
    for (offload, params, optimizer) in [
        (Zero3Offload::OptimizerAndParams, "cpu ", "cpu "),
        (Zero3Offload::Optimizer, "none", "cpu "),
        (Zero3Offload::None, "none", "none"),
    ] {
        for zero_init in [true, false] {
            let estimate = zero3(model, offload, zero_init, setup);
            let options = format!(
                "offload_param={params}, offload_optimizer={optimizer}, zero_init={}",
                u8::from(zero_init)
            );
            row(&mut text, estimate, &options);
        }
    }
    text
}

fn header(setup: Setup, model: &str) -> String {
    let plural = |count: u64| if count > 1 { "s" } else { "" };
    format!(
        "Estimated memory needed for params, optim states and gradients for a:\n\
         HW: Setup with {} node{}, {} GPU{} per node.\n\
         SW: Model with {model}\n  per CPU  |  per GPU |   Options\n",
        setup.nodes,
        plural(setup.nodes),
        setup.devices_per_node,
        plural(setup.devices_per_node)
    )
}

fn row(text: &mut String, estimate: Estimate, options: &str) {
    let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        " {:7.2}GB | {:6.2}GB | {options}",
        gib(estimate.host_bytes),
        gib(estimate.device_bytes)
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_live_model_counts_shared_parameters_once_and_finds_its_largest_module() {
        let modules = [vec![("embedding", 300), ("bias", 4)], vec![("mlp", 100)], vec![("embedding", 300)]];
        let size = ModelSize::of_modules(modules.iter().map(Vec::as_slice));
        assert_eq!(size, ModelSize { total_params: 404, largest_layer_params: 304 });
    }
}

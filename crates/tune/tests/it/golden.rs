//! The recorded estimates of DeepSpeed.

use ferrospeed_testkit::golden::{golden, read_json};
use ferrospeed_tune::estimate::{
    Estimate, ModelSize, Setup, Zero3Offload, zero2, zero2_table, zero3, zero3_table,
};
use serde_json::json;

#[test]
fn golden_memory_estimators() {
    golden().each_case("utils/memory_estimators.json", 60, |case| {
        let args = &case["args"];
        let number = |name: &str| args[name].as_u64().unwrap_or(0);
        let setup = Setup {
            nodes: number("num_nodes"),
            devices_per_node: number("num_gpus_per_node"),
            additional_buffer_factor: args["additional_buffer_factor"].as_f64().expect("a factor"),
        };
        let model = ModelSize {
            total_params: number("total_params"),
            largest_layer_params: number("largest_layer_params"),
        };
        let found = match case["fn"].as_str() {
            Some("zero2") => {
                let Estimate { host_bytes, device_bytes } =
                    zero2(model.total_params, args["cpu_offload"] == true, setup);
                json!([host_bytes, device_bytes])
            }
            Some("zero3") => {
                let offload = match (args["cpu_offload"] == true, args["cpu_offload_params"] == true) {
                    (true, true) => Zero3Offload::OptimizerAndParams,
                    (true, false) => Zero3Offload::Optimizer,
                    (false, _) => Zero3Offload::None,
                };
                let estimate = zero3(model, offload, args["zero_init"] == true, setup);
                json!([estimate.host_bytes, estimate.device_bytes, 4 * model.largest_layer_params])
            }
            Some("zero2_table") => zero2_table(model.total_params, setup).into(),
            Some("zero3_table") => zero3_table(model, setup).into(),
            other => panic!("unknown function {other:?}"),
        };
        assert_eq!(found, case["expect"], "{case}");
    });
}

/// The parameters counted from `config.json` are those of the checkpoint beside it.
#[test]
fn golden_models_have_the_counted_parameters() {
    let folders = golden().models_with("config.json");
    golden().each_path("models", folders, 43, |folder| {
        let config = read_json(&folder.join("config.json"));
        let model = ferrospeed_tune::model::from_hugging_face(&config)
            .unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        let mut elements = 0;
        for entry in std::fs::read_dir(folder).expect("a readable folder").flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with("model") && name.ends_with(".safetensors") {
                let tensors = ferrospeed_testkit::tensors::read(&entry.path());
                elements +=
                    tensors.values().map(|tensor| tensor.shape.iter().product::<usize>() as u64).sum::<u64>();
            }
        }
        assert_eq!(model.size.total_params, elements, "{}", folder.display());
    });
}

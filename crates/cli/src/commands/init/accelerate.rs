//! accelerate's YAML: where a job runs and how its state is spread. Model and data are the script's, so the recipe names some to replace.

use serde_json::{Map, Value, json};

use super::draft::{Draft, run_name};

/// What says nothing that a recipe has to say.
const ANYWAY: [&str; 13] = [
    "compute_environment",
    "debug",
    "distributed_type",
    "downcast_bf16",
    "enable_cpu_affinity",
    "machine_rank",
    "main_training_function",
    "rdzv_backend",
    "same_network",
    "tpu_env",
    "tpu_use_cluster",
    "tpu_use_sudo",
    "use_cpu",
];

pub(super) fn translate(keys: &Map<String, Value>, name: &str) -> Draft {
    let mut draft = Draft::default();
    draft.set("", "name", run_name(name));
    draft.set("", "epochs", 1);
    for (key, value) in keys {
        if matches!(value, Value::Null | Value::Bool(false)) || value == "" || ANYWAY.contains(&key.as_str())
        {
            continue;
        }
        match key.as_str() {
            "num_processes" => draft.set("", "ranks", value.clone()),
            "num_machines" if value == 1 => {}
            "num_machines" | "main_process_ip" | "main_process_port" | "deepspeed_hostfile" => {
                draft.leave(
                    key,
                    "several hosts: ferrospeed launch -H hostfile -- ferrospeed train recipe.toml",
                );
            }
            "mixed_precision" if value == "bf16" => {
                draft.set("ds_config", "bf16", json!({ "enabled": true }))
            }
            "mixed_precision" if value == "fp16" => {
                draft.set("ds_config", "fp16", json!({ "enabled": true }))
            }
            "mixed_precision" if value == "no" => {}
            "gpu_ids" if value == "all" => {}
            "deepspeed_config" => deepspeed(&mut draft, value),
            "fsdp_config" => draft.set("ds_config", "zero_optimization", json!({ "stage": 3 })),
            _ => draft.leave(key, "no key of recipes is known for it"),
        }
    }
    draft.set("model", "path", "org/name");
    draft.set("data", "samples", vec![Value::from("chats.jsonl")]);
    draft.set("data", "sequence", 1024);
    // The script says these, too.
    draft.set("training", "per_device_train_batch_size", 1);
    draft.set("training", "learning_rate", 1e-5);
    draft.settle();
    draft
}

fn deepspeed(draft: &mut Draft, value: &Value) {
    if let Some(file) = value["deepspeed_config_file"].as_str() {
        draft.set("", "ds_config", file);
        return;
    }
    let whole = value;
    let mut zero = Map::new();
    for (key, value) in value.as_object().into_iter().flatten() {
        let text = value.as_str().unwrap_or_default();
        match key.as_str() {
            "zero_stage" => drop(zero.insert("stage".into(), value.clone())),
            "offload_optimizer_device" | "offload_param_device" if text == "none" => {}
            "offload_optimizer_device" | "offload_param_device" => {
                let section = key.trim_end_matches("_device").to_owned();
                let mut offload = json!({ "device": value });
                let folder = &whole[format!("{section}_nvme_path")];
                if text == "nvme" && folder.is_string() {
                    offload["nvme_path"] = folder.clone();
                }
                zero.insert(section, offload);
            }
            "gradient_accumulation_steps" | "gradient_clipping" => draft.set("ds_config", key, value.clone()),
            // All ranks start with their part here, and the model is written whole at the end.
            "zero3_init_flag"
            | "zero3_save_16bit_model"
            | "offload_optimizer_nvme_path"
            | "offload_param_nvme_path"
            | "deepspeed_multinode_launcher" => {}
            _ => draft.leave(&format!("deepspeed_config.{key}"), "no key of ds_config is known for it"),
        }
    }
    if !zero.is_empty() {
        draft.set("ds_config", "zero_optimization", zero);
    }
}

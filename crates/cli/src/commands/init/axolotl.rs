//! Axolotl's YAML.

use serde_json::{Map, Value, json};

use super::draft::{Draft, run_name};

/// Keys that mean the same under another name: theirs, our section, our key.
const SAME: [(&str, &str, &str); 27] = [
    ("num_epochs", "", "epochs"),
    ("max_steps", "", "steps"),
    ("seed", "", "seed"),
    ("base_model", "model", "path"),
    ("lora_model_dir", "adapter", "path"),
    ("lora_r", "adapter", "rank"),
    ("lora_alpha", "adapter", "alpha"),
    ("lora_dropout", "adapter", "dropout"),
    ("lora_modules_to_save", "adapter", "modules_to_save"),
    ("peft_use_rslora", "adapter", "use_rslora"),
    ("peft_use_dora", "adapter", "use_dora"),
    ("sequence_len", "data", "sequence"),
    ("val_set_size", "data", "validation"),
    ("micro_batch_size", "training", "per_device_train_batch_size"),
    ("gradient_accumulation_steps", "training", "gradient_accumulation_steps"),
    ("learning_rate", "training", "learning_rate"),
    ("weight_decay", "training", "weight_decay"),
    ("adam_beta1", "training", "adam_beta1"),
    ("adam_beta2", "training", "adam_beta2"),
    ("adam_epsilon", "training", "adam_epsilon"),
    ("max_grad_norm", "training", "max_grad_norm"),
    ("neftune_noise_alpha", "training", "neftune_noise_alpha"),
    ("eval_steps", "eval", "every"),
    ("early_stopping_patience", "eval", "patience"),
    ("save_steps", "save", "every"),
    ("save_total_limit", "save", "keep_last"),
    ("logging_steps", "ds_config", "steps_per_print"),
];

/// What is so here anyway, or has no meaning here.
const ANYWAY: [&str; 22] = [
    "sample_packing",
    "eval_sample_packing",
    "pad_to_sequence_len",
    "multipack_real_batches",
    "flash_attention",
    "sdp_attention",
    "xformers_attention",
    "tf32",
    "strict",
    "save_safetensors",
    "dataset_prepared_path",
    "dataset_processes",
    "model_type",
    "tokenizer_type",
    "trust_remote_code",
    "group_by_length",
    "gradient_checkpointing_kwargs",
    "lora_target_linear",
    "adapter",
    "special_tokens",
    "wandb_watch",
    "eval_batch_size",
];

pub(super) fn translate(keys: &Map<String, Value>, name: &str) -> Draft {
    let mut draft = Draft::default();
    let named = keys.get("output_dir").and_then(Value::as_str).map_or_else(|| run_name(name), run_name);
    draft.set("", "name", named);
    if let Some(Value::String(adapter)) = keys.get("adapter") {
        adapters(&mut draft, keys, adapter);
    }
    for (key, value) in keys {
        // What is off or empty says nothing.
        if matches!(value, Value::Null | Value::Bool(false)) || value == "" {
            continue;
        }
        if let Some(&(_, section, own)) = SAME.iter().find(|(theirs, ..)| theirs == key) {
            // Of an adapter that is not trained, its numbers mean nothing.
            if section != "adapter" || keys.get("adapter").is_some_and(Value::is_string) {
                draft.set(section, own, value.clone());
            }
            continue;
        }
        if !ANYWAY.contains(&key.as_str()) {
            single(&mut draft, keys, key, value);
        }
    }
    if !draft.has("", "epochs") && !draft.has("", "steps") {
        draft.set("", "epochs", 1);
    }
    if !draft.has("data", "sequence") {
        draft.set("data", "sequence", 2048);
    }
    schedule(&mut draft, keys);
    draft.settle();
    draft
}

/// Axolotl's rate falls as a cosine unless it is told otherwise; a warm-up needs a schedule that takes it.
fn schedule(draft: &mut Draft, keys: &Map<String, Value>) {
    let named = keys.get("lr_scheduler").and_then(Value::as_str).unwrap_or("cosine");
    let warms_up = draft.has("training", "warmup_steps") || draft.has("training", "warmup_ratio");
    match named {
        "cosine" => draft.set(
            "ds_config",
            "scheduler",
            json!({ "type": "WarmupCosineLR", "params": { "total_num_steps": "auto", "warmup_num_steps": "auto" } }),
        ),
        "linear" => draft.set(
            "ds_config",
            "scheduler",
            json!({ "type": "WarmupDecayLR", "params": {
                "total_num_steps": "auto", "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"
            } }),
        ),
        name if name.starts_with("constant") && warms_up => draft.set(
            "ds_config",
            "scheduler",
            json!({ "type": "WarmupLR", "params": {
                "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"
            } }),
        ),
        name if name.starts_with("constant") => {}
        name => draft.leave("lr_scheduler", format!("{name}: scheduler in [ds_config], docs/config.md")),
    }
}

fn adapters(draft: &mut Draft, keys: &Map<String, Value>, adapter: &str) {
    match adapter {
        "lora" => {}
        "qlora" => {
            draft.leave("adapter", "a base of four bits (qlora) is not here yet; the base keeps its type")
        }
        other => draft.leave("adapter", format!("{other} is not here; lora, rslora and dora are")),
    }
    let linear = keys.get("lora_target_linear") == Some(&Value::Bool(true));
    match keys.get("lora_target_modules") {
        Some(modules) if !linear && !modules.is_null() => {
            draft.set("adapter", "target_modules", modules.clone())
        }
        _ => draft.set("adapter", "target_modules", "all-linear"),
    }
}

/// A key that means something else than its value alone.
fn single(draft: &mut Draft, keys: &Map<String, Value>, key: &str, value: &Value) {
    let text = value.as_str().unwrap_or_default();
    match key {
        "datasets" => datasets(draft, value),
        "test_datasets" => {
            let paths: Vec<Value> = paths_of(value).into_iter().map(|(path, _)| path.into()).collect();
            draft.set("data", "validation", paths);
        }
        "output_dir" | "lora_target_modules" => {}
        "bf16" | "bfloat16" => draft.set("training", "bf16", true),
        "fp16" | "float16" => draft.set("training", "fp16", true),
        "warmup_steps" => draft.set("training", "warmup_steps", value.clone()),
        "warmup_ratio" => draft.set("training", "warmup_ratio", value.clone()),
        "gradient_checkpointing" => draft.set("model", "activation_checkpointing", true),
        "train_on_inputs" => draft.set("data", "train_on", "all"),
        "chat_template" if text == "tokenizer_default" => {}
        "chat_template" => {
            let named = match text {
                "llama3" => "llama-3",
                "phi_3" => "phi-3",
                other => other,
            };
            draft.set("data", "chat_template", named);
        }
        "lr_scheduler" => {}
        "optimizer" if text.starts_with("adamw") => {}
        "deepspeed" => draft.set("", "ds_config", value.clone()),
        "rl" if ["dpo", "kto", "orpo", "ipo"].contains(&text) => {
            draft.set("objective", "kind", if text == "ipo" { "dpo" } else { text });
            if text == "ipo" {
                draft.set("objective", "loss", "ipo");
            }
        }
        "rl_beta" | "dpo_beta" | "orpo_alpha" => draft.set("objective", "beta", value.clone()),
        "wandb_project" => {
            let mut wandb = json!({ "enabled": true, "project": value });
            if let Some(team) = keys.get("wandb_entity").filter(|team| team.is_string()) {
                wandb["team"] = team.clone();
            }
            draft.set("ds_config", "wandb", wandb);
        }
        "wandb_entity" if keys.contains_key("wandb_project") => {}
        "load_in_4bit" | "load_in_8bit" => {
            draft.leave(key, "weights that are trained keep their type; four bits (qlora) are not here yet")
        }
        "saves_per_epoch" => draft.leave(key, "save.every counts steps"),
        "evals_per_epoch" => draft.leave(key, "eval.every counts steps"),
        "tensor_parallel_size" => draft.leave(key, "[tensor_parallel] autotp_size, or --tp"),
        "sequence_parallel_degree" | "context_parallel_size" => {
            draft.leave(key, "sequence_parallel_size in [ds_config], or --sp")
        }
        _ => draft.leave(key, "no key of recipes is known for it"),
    }
}

/// What Axolotl trains on: files, folders, names on the Hub.
fn datasets(draft: &mut Draft, value: &Value) {
    let found = paths_of(value);
    let kind = found.iter().find_map(|(_, kind)| {
        let kind = kind.as_deref()?.split(['.', ':']).next()?;
        ["alpaca", "sharegpt", "completion"].contains(&kind).then(|| kind.to_owned())
    });
    let is_file = |path: &str| path.contains('.') && !path.ends_with('/') || path.starts_with(['/', '~']);
    match &found[..] {
        [(path, _)] if !is_file(path) && path.matches('/').count() == 1 => {
            draft.set("data", "hub", path.clone())
        }
        _ => {
            let paths = found.iter().map(|(path, _)| match is_file(path) || path.matches('/').count() != 1 {
                true => Value::from(path.clone()),
                false => Value::from(format!("hf://datasets/{path}")),
            });
            draft.set("data", "samples", paths.collect::<Vec<_>>());
        }
    }
    // A completion of Axolotl's is a text, all of which is learnt.
    match kind.as_deref() {
        Some("completion") => draft.set("data", "kind", "text"),
        Some(kind) => draft.set("data", "kind", kind),
        None => {}
    }
    for dataset in value.as_array().into_iter().flatten() {
        for key in dataset.as_object().into_iter().flat_map(Map::keys) {
            if !["path", "type", "ds_type", "split", "data_files"].contains(&key.as_str()) {
                draft.leave(
                    &format!("datasets.{key}"),
                    "records are known by their fields: docs/fine-tuning.md#samples",
                );
            }
        }
    }
}

fn paths_of(value: &Value) -> Vec<(String, Option<String>)> {
    let datasets = value.as_array().into_iter().flatten();
    let text = |value: &Value| value.as_str().map(str::to_owned);
    datasets.filter_map(|dataset| Some((text(&dataset["path"])?, text(&dataset["type"])))).collect()
}

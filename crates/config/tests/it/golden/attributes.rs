//! Our configuration under DeepSpeed's attribute names, so that recorded attributes can be compared one by one.

use ferrospeed_config::{Config, LossScale, Precision};
use serde_json::{Map, Value, json};

/// Keys that came after the recorded version: a recording says nothing of them.
const NEWER: &[&str] = &[
    "reduce_each_micro_batch",
    "sequence_parallel_method",
    "allgather_sequential",
    "autoep_non_moe",
    "compute_grad_norm",
    "cpuadam_cores_perc",
    "debug_log",
    "deepcompile",
    "deadline_s",
    "dir",
    "disable",
    "double_buffer",
    "dynamic_batching",
    "enable_cuda_graph",
    "enable_sanity_checks",
    "free_activation",
    "free_activation_threshold",
    "keep_all_input_tensors",
    "keep_int_input_tensors",
    "leaf_module",
    "log_trace_cache_warnings",
    "module_granularity_threshold",
    "offload_activation",
    "offload_activation_pin_memory",
    "offload_opt_states",
    "offload_parameters",
    "parameter_alignment",
    "passes",
    "save_muon_momentum_buffer_in_memory",
    "schedule",
    "sequence_parallel",
    "super_offload",
    "symmetric_memory",
    "sync_after_allgather",
    "sync_after_reduce",
    "sync_before_allgather",
    "sync_before_reduce",
    "use_all_reduce_for_fetch_params",
    "use_gds",
    "zenflow",
    "zeropp_loco_param",
];

/// A section without the keys that its recording cannot have.
pub(crate) fn without_newer(section: &Value) -> Value {
    match section {
        Value::Object(map) => {
            let known = map.iter().filter(|(key, _)| !NEWER.contains(&key.as_str()));
            Value::Object(known.map(|(key, value)| (key.clone(), without_newer(value))).collect())
        }
        other => other.clone(),
    }
}

/// The `autotuning` section; compression, too, has a key that is called `method`.
fn autotuning(section: &Value) -> Value {
    let mut section = without_newer(section);
    if let Some(section) = section.as_object_mut() {
        section.remove("method");
    }
    section
}

/// The `zero_optimization` section under DeepSpeed's names; `given` is the section as it was written.
pub(crate) fn zero(section: &Value, given: &Value) -> Value {
    let mut zero = without_newer(section);
    if let Some(offload) = zero["offload_optimizer"].as_object_mut() {
        let pipeline = offload["pipeline_read"] == true || offload["pipeline_write"] == true;
        offload.insert("pipeline".into(), pipeline.into());
    }
    // DeepSpeed keeps old spellings that were not given in its result, and removes those that were mapped.
    for (name, absent) in [
        ("cpu_offload", Value::Null),
        ("cpu_offload_param", Value::Null),
        ("stage3_gather_fp16_weights_on_model_save", json!(false)),
    ] {
        if given.get(name).is_none() {
            zero[name] = absent;
        }
    }
    zero["cpu_offload_use_pin_memory"] = given["cpu_offload_use_pin_memory"].clone();
    zero
}

/// Every attribute that the recordings list.
pub(crate) fn all(config: &Config, input: &Value, world_size: u64) -> Value {
    let full = config.to_json();
    let given = if input.is_object() { input.clone() } else { Value::Null };
    let zero = zero(&full["zero_optimization"], &given["zero_optimization"]);
    let mut found = json!({
        "global_rank": 0,
        "world_size": world_size,
        "elasticity_enabled": config.elasticity.is_some(),
        "seq_parallel_communication_data_type": full["seq_parallel_comm_data_type"],
        "sparse_gradients_enabled": config.sparse_gradients,
        "mics_shard_size": zero["mics_shard_size"],
        "mics_hierarchial_params_gather": zero["mics_hierarchical_params_gather"],
        "zero_optimization_stage": config.zero.stage.number(),
        "zero_enabled": config.zero.stage.number() > 0,
        "zero_config": zero,
        "activation_checkpointing_config": full["activation_checkpointing"],
        "flops_profiler_config": full["flops_profiler"],
        "autotuning_config": autotuning(&full["autotuning"]),
        "use_data_before_expert_parallel_": full["use_data_before_expert_parallelism"],
        "data_efficiency_config": data_efficiency(&full["data_efficiency"]),
        "data_efficiency_enabled": full["data_efficiency"]["enabled"],
        "load_universal_checkpoint": config.checkpoint.load_universal,
        "use_node_local_storage": config.checkpoint.use_node_local_storage,
        "checkpoint_tag_validation_enabled": full["checkpoint"]["tag_validation"] != "Ignore",
        "checkpoint_tag_validation_fail": full["checkpoint"]["tag_validation"] == "Fail",
        "checkpoint_parallel_write_pipeline": full["checkpoint"]["parallel_write"]["pipeline_stage"],
        "grad_accum_dtype": full["data_types"]["grad_accum_dtype"],
        "aio_config": full["aio"],
        "weight_quantization_config": full["weight_quantization"],
        "compile_config": full["compile"],
        "compression_config": compression(&full["compression_training"]),
        "pipeline": without_newer(&without_nulls(&full["pipeline"], &["use_reentrant"])),
        "monitor_config": {
            "tensorboard": full["tensorboard"],
            "wandb": full["wandb"],
            "csv_monitor": full["csv_monitor"],
            "enabled": config.monitors.tensorboard.is_some()
                || config.monitors.csv_monitor.is_some()
                || config.monitors.wandb.is_some(),
        },
        "comms_config": comms(&full["comms_logger"]),
        "optimizer_name": optimizer_name(&full["optimizer"]["type"]),
        "optimizer_params": given_params(&full["optimizer"], input, "optimizer"),
        "optimizer_legacy_fusion": full["optimizer"]["legacy_fusion"] == true,
        "scheduler_name": full["scheduler"]["type"],
        "scheduler_params": given_params(&full["scheduler"], input, "scheduler"),
    });
    let map = found.as_object_mut().expect("an object");
    for name in [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "steps_per_print",
        "dump_state",
        "disable_allgather",
        "communication_data_type",
        "prescale_gradients",
        "gradient_predivide_factor",
        "gradient_clipping",
        "graph_harvesting",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "wall_clock_breakdown",
        "memory_breakdown",
        "hybrid_engine",
        "sparse_attention",
        "dataloader_drop_last",
    ] {
        map.insert(name.into(), full[name].clone());
    }
    // DeepSpeed's parsers of these two drop the key (docs/differences.md, "Sparse attention").
    if full["sparse_attention"]["mode"] == "bigbird" || full["sparse_attention"]["mode"] == "bslongformer" {
        map["sparse_attention"].as_object_mut().map(|section| section.remove("attention"));
    }
    if let Some(elasticity) = &config.elasticity {
        map.insert("elastic_model_parallel_size".into(), elasticity.model_parallel_size.into());
        map.insert("num_gpus_per_node".into(), elasticity.num_gpus_per_node.into());
    }
    for (key, value) in full["eigenvalue"].as_object().expect("eigenvalue") {
        map.insert(format!("eigenvalue_{key}"), value.clone());
    }
    let mut nebula = full["nebula"].clone();
    let path = nebula.as_object_mut().and_then(|nebula| nebula.remove("nebula_load_path"));
    nebula["load_path"] = path.unwrap_or_default();
    map.insert("nebula_config".into(), nebula);
    for (section, enabled, params) in [
        ("amp", "amp_enabled", "amp_params"),
        ("progressive_layer_drop", "pld_enabled", "pld_params"),
        ("curriculum_learning", "curriculum_enabled_legacy", "curriculum_params_legacy"),
    ] {
        let mut given = given[section].clone();
        map.insert(enabled.into(), (full[section]["enabled"] == true).into());
        let is_given = given.as_object_mut().map(|given| given.remove("enabled")).is_some();
        map.insert(params.into(), if is_given { given } else { json!(false) });
    }
    precision(config, input, map);
    found
}

fn precision(config: &Config, input: &Value, map: &mut Map<String, Value>) {
    let full = config.to_json();
    let fp16 = matches!(config.precision, Precision::Fp16 { .. });
    map.insert("fp16_enabled".into(), fp16.into());
    map.insert("fp16_auto_cast".into(), if fp16 { full["fp16"]["auto_cast"].clone() } else { Value::Null });
    map.insert("bfloat16_enabled".into(), full["bf16"]["enabled"].clone());
    map.insert("bfloat16_immediate_grad_update".into(), full["bf16"]["immediate_grad_update"].clone());
    let half_masters = fp16 && full["fp16"]["fp16_master_weights_and_grads"] == true;
    map.insert("fp16_master_weights_and_gradients".into(), half_masters.into());
    let (scale, initial) = match config.precision {
        Precision::Fp32 => (0.0, 65536.0),
        Precision::Bf16 { .. } => (1.0, 1.0),
        Precision::Fp16 { loss_scale: LossScale::Static(scale), .. } => {
            (scale, 2f64.powi(full["fp16"]["initial_scale_power"].as_i64().unwrap_or(16) as i32))
        }
        Precision::Fp16 { loss_scale: LossScale::Dynamic { initial_power, .. }, .. } => {
            (0.0, 2f64.powi(initial_power as i32))
        }
    };
    map.insert("loss_scale".into(), scale.into());
    map.insert("initial_dynamic_scale".into(), initial.into());
    let dynamic = [
        "initial_scale_power",
        "loss_scale_window",
        "min_loss_scale",
        "hysteresis",
        "consecutive_hysteresis",
    ];
    let given = dynamic.iter().any(|name| input["fp16"].get(name).is_some());
    let arguments = json!({
        "init_scale": initial,
        "scale_window": full["fp16"]["loss_scale_window"],
        "delayed_shift": full["fp16"]["hysteresis"],
        "consecutive_hysteresis": full["fp16"]["consecutive_hysteresis"],
        "min_scale": full["fp16"]["min_loss_scale"],
    });
    map.insert("dynamic_loss_scale_args".into(), if fp16 && given { arguments } else { Value::Null });
}

/// DeepSpeed writes its own optimizers in lower case and the framework's as they are.
fn optimizer_name(name: &Value) -> Value {
    let own = [
        "Adagrad",
        "Adam",
        "AdamW",
        "Lamb",
        "OneBitAdam",
        "OneBitLamb",
        "ZeroOneAdam",
        "MuAdam",
        "MuAdamW",
        "MuSGD",
        "Lion",
    ];
    match name.as_str() {
        Some(name) if own.contains(&name) => name.to_lowercase().into(),
        _ => name.clone(),
    }
}

/// DeepSpeed hands on what was given; we fill in defaults. So the given keys are compared.
fn given_params(section: &Value, input: &Value, name: &str) -> Value {
    if section["type"].is_null() {
        return Value::Null;
    }
    let given = match input {
        Value::Object(_) => input[name]["params"].clone(),
        // From text, the recorded parameters are all that differs from our defaults or was written; take ours.
        _ => return text_params(section, input, name),
    };
    match given {
        Value::Object(given) => {
            Value::Object(given.keys().map(|key| (key.clone(), section["params"][key].clone())).collect())
        }
        _ => Value::Null,
    }
}

fn text_params(section: &Value, input: &Value, name: &str) -> Value {
    let source = Config::from_str("case", input.as_str().unwrap_or_default())
        .or_else(|_| Config::from_argument(input.as_str().unwrap_or_default()));
    match source.map(|unresolved| unresolved.source()[name]["params"].clone()) {
        Ok(Value::Object(given)) => {
            Value::Object(given.keys().map(|key| (key.clone(), section["params"][key].clone())).collect())
        }
        _ => Value::Null,
    }
}

fn comms(section: &Value) -> Value {
    match section["enabled"] == true {
        true => json!({ "comms_logger_enabled": true, "comms_logger": section }),
        false => json!({ "comms_logger_enabled": false }),
    }
}

/// DeepSpeed leaves out what was not given in the free-form parts.
fn data_efficiency(section: &Value) -> Value {
    let mut section = drop_nulls(section);
    // Newer than the recordings here, though not in the ZeRO section.
    section["data_sampling"].as_object_mut().map(|sampling| sampling.remove("pin_memory"));
    if section["data_sampling"]["curriculum_learning"]["enabled"] == false {
        section["data_sampling"]["curriculum_learning"] = json!({ "enabled": false });
    }
    if section["data_routing"]["random_ltd"]["enabled"] == false {
        let schedule = section["data_routing"]["random_ltd"]["layer_token_lr_schedule"].clone();
        section["data_routing"]["random_ltd"] =
            json!({ "enabled": false, "layer_token_lr_schedule": schedule });
    }
    section
}

fn compression(section: &Value) -> Value {
    let mut section = section.clone();
    let mixed = section["weight_quantization"]["shared_parameters"]["fp16_mixed_quantize"].clone();
    section["weight_quantization"]["shared_parameters"]["fp16_mixed_quantize"] = mixed["enabled"].clone();
    section["weight_quantization"]["shared_parameters"]["quantize_change_ratio"] =
        mixed["quantize_change_ratio"].clone();
    let sparse = &mut section["sparse_pruning"]["shared_parameters"];
    if sparse["method"] == "snip_momentum" {
        if sparse["schedule_offset_end"].is_null() {
            sparse["schedule_offset_end"] = sparse["schedule_offset"].clone();
        }
    } else if let Some(sparse) = sparse.as_object_mut() {
        for name in [
            "block_pattern",
            "dense_ratio",
            "schedule_offset_stride",
            "excluded_modules",
            "schedule_offset_end",
        ] {
            sparse.remove(name);
        }
    }
    section["head_pruning"]["shared_parameters"] = drop_nulls(&section["head_pruning"]["shared_parameters"]);
    section["layer_reduction"] = drop_nulls(&section["layer_reduction"]);
    section
}

fn without_nulls(section: &Value, names: &[&str]) -> Value {
    let mut section = section.clone();
    if let Some(map) = section.as_object_mut() {
        map.retain(|key, value| !(value.is_null() && names.contains(&key.as_str())));
    }
    section
}

fn drop_nulls(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let given = map.iter().filter(|(_, value)| !value.is_null());
            Value::Object(given.map(|(key, value)| (key.clone(), drop_nulls(value))).collect())
        }
        _ => value.clone(),
    }
}

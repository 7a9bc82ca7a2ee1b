//! What is said of configurations such as the newest examples of DeepSpeed and of Hugging Face's Trainer have: that they can be
//! used, or precisely what cannot. The values are our own.

use ferrospeed_config::{Config, Severity};
use serde_json::{Value, json};

/// Findings as `error KEY` and `warning KEY`.
fn findings(config: &Value) -> Vec<String> {
    let report = Config::from_value("example", config).expect("readable").report();
    let word = |severity| if severity == Severity::Error { "error" } else { "warning" };
    report.all().iter().map(|finding| format!("{} {}", word(finding.severity), finding.path)).collect()
}

fn adamw() -> Value {
    json!({ "type": "AdamW", "params": { "lr": 3e-5, "betas": [0.9, 0.98], "eps": 1e-8, "weight_decay": 0.02 } })
}

fn adamw_of_the_trainer() -> Value {
    json!({ "type": "AdamW", "params": { "lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto" } })
}

/// What an example is, its configuration, and what is said of it.
fn examples() -> Vec<(&'static str, Value, Vec<&'static str>)> {
    let warmup = |kind: &str| {
        let mut params =
            json!({ "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto" });
        if kind == "WarmupDecayLR" {
            params["total_num_steps"] = "auto".into();
        }
        json!({ "type": kind, "params": params })
    };
    let batches = |config: Value| {
        let mut config = config;
        for key in [
            "gradient_accumulation_steps",
            "gradient_clipping",
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
        ] {
            config[key] = "auto".into();
        }
        config
    };
    vec![
        (
            "the Trainer's stage 2",
            batches(json!({
                "fp16": { "enabled": "auto", "loss_scale": 0, "loss_scale_window": 500, "initial_scale_power": 12, "hysteresis": 2, "min_loss_scale": 1 },
                "bf16": { "enabled": "auto" },
                "optimizer": adamw_of_the_trainer(), "scheduler": warmup("WarmupLR"),
                "zero_optimization": {
                    "stage": 2, "offload_optimizer": { "device": "cpu", "pin_memory": true }, "allgather_partitions": true,
                    "overlap_comm": true, "reduce_scatter": true, "reduce_bucket_size": 3e8, "contiguous_gradients": true,
                },
            })),
            vec![],
        ),
        (
            "the Trainer's stage 3",
            batches(json!({
                "fp16": { "enabled": "auto" }, "bf16": { "enabled": "auto" },
                "optimizer": adamw_of_the_trainer(), "scheduler": warmup("WarmupLR"),
                "zero_optimization": {
                    "stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                    "stage3_param_persistence_threshold": "auto", "stage3_gather_16bit_weights_on_model_save": true,
                },
            })),
            vec![],
        ),
        (
            "the Trainer with slices",
            batches(json!({
                "bf16": { "enabled": "auto" }, "optimizer": adamw_of_the_trainer(), "scheduler": warmup("WarmupDecayLR"),
                "zero_optimization": { "stage": 2, "gather_16bit_weights_on_model_save": true },
                "tensor_parallel": { "autotp_size": 2 }, "steps_per_print": 5, "wall_clock_breakdown": false,
            })),
            vec![],
        ),
        (
            "slices of layers that a pattern names",
            json!({
                "train_micro_batch_size_per_gpu": 2, "bf16": { "enabled": true }, "optimizer": adamw(),
                "zero_optimization": { "stage": 1 },
                "tensor_parallel": { "autotp_size": 2, "partition_config": { "layer_specs": [{ "patterns": [".*\\.o_proj\\.weight$"], "partition_type": "row" }] } },
            }),
            vec!["error tensor_parallel.partition_config"],
        ),
        (
            "SuperOffload",
            json!({
                "train_batch_size": 8, "gradient_accumulation_steps": 1, "bf16": { "enabled": true }, "wall_clock_breakdown": true,
                "zero_optimization": {
                    "stage": 3, "overlap_comm": false, "reduce_bucket_size": 2e8, "sub_group_size": 2e8,
                    "offload_optimizer": { "device": "cpu", "pin_memory": true, "ratio": 0.75, "super_offload": true, "cpuadam_cores_perc": 0.85 },
                },
            }),
            vec!["warning zero_optimization.offload_optimizer.cpuadam_cores_perc"],
        ),
        (
            "ZenFlow",
            json!({
                "train_batch_size": 16, "bf16": { "enabled": true }, "optimizer": adamw(), "gradient_clipping": 0.5,
                "gradient_accumulation_steps": 1, "zero_allow_untested_optimizer": true,
                "zero_optimization": {
                    "stage": 2, "offload_optimizer": { "device": "cpu", "pin_memory": true },
                    "zenflow": { "topk_ratio": 0.2, "update_interval": 8, "full_warm_up_rounds": 1, "overlap_step": true },
                },
            }),
            vec!["error zero_optimization.zenflow"],
        ),
        (
            "masters in f32",
            json!({
                "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "steps_per_print": 50, "optimizer": adamw(),
                "bf16": { "enabled": true }, "torch_autocast": { "enabled": false },
                "zero_optimization": { "stage": 3, "overlap_comm": true, "contiguous_gradients": true, "reduce_bucket_size": 2e7, "stage3_param_persistence_threshold": 0 },
            }),
            vec![],
        ),
        (
            "masters, gradients and states in bf16",
            json!({
                "train_micro_batch_size_per_gpu": 2, "optimizer": adamw(),
                "bf16": { "enabled": true, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true },
                "zero_optimization": { "stage": 3 }, "torch_autocast": { "enabled": true, "dtype": "torch.bfloat16" },
            }),
            vec![
                "error bf16.bf16_master_weights_and_grads",
                "error bf16.bf16_optimizer_states",
                "error torch_autocast",
            ],
        ),
        (
            "DeepCompile",
            json!({
                "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2, "gradient_clipping": "auto",
                "bf16": { "enabled": true }, "zero_optimization": { "stage": 3, "sub_group_size": 5e7 }, "steps_per_print": 1000,
                "compile": { "deepcompile": true, "offload_activation": false, "double_buffer": true, "free_activation": false, "debug_log": false },
            }),
            vec!["warning compile"],
        ),
        (
            "weights on NVMe, straight into device memory",
            json!({
                "train_batch_size": 1,
                "zero_optimization": {
                    "stage": 3, "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": "auto",
                    "offload_param": { "device": "nvme", "nvme_path": "/nvme/weights", "pin_memory": true, "buffer_size": "auto", "buffer_count": 4 },
                },
                "aio": { "block_size": 4_194_304, "queue_depth": 16, "intra_op_parallelism": 4, "single_submit": false, "overlap_events": true, "use_gds": true },
            }),
            vec!["error aio.use_gds"],
        ),
        (
            "batches of as many tokens",
            json!({
                "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
                "data_efficiency": { "enabled": true, "seed": 7, "data_sampling": { "num_workers": 0, "pin_memory": false, "dynamic_batching": { "enabled": true, "max_tokens": 200 } } },
            }),
            vec!["error data_efficiency.data_sampling.dynamic_batching"],
        ),
        (
            "Muon",
            json!({
                "train_batch_size": 8, "bf16": { "enabled": true }, "zero_optimization": { "stage": 2 },
                "optimizer": { "type": "Muon", "params": { "muon_lr": 0.01, "adam_lr": 2e-4, "momentum": 0.95, "weight_decay": 0.05, "ns_method": "gram" } },
            }),
            vec![],
        ),
    ]
}

#[test]
fn the_newest_examples_can_be_used_or_say_what_cannot() {
    for (what, config, expected) in examples() {
        assert_eq!(findings(&config), expected, "{what}");
    }
}

//! What other programs call a key of recipes: the words that people bring from Hugging Face's Trainer, TRL, Axolotl, torchtitan and
//! nanoGPT, with ours.

/// Their key, by its path in a recipe, and what to write here.
const KNOWN: &[(&str, &str)] = &[
    // Adapters, by PEFT's names.
    ("lora", "[adapter], with rank, alpha, target_modules"),
    ("qlora", "[adapter], with rank, alpha, target_modules"),
    ("dora", "[adapter], with use_dora = true"),
    ("peft", "[adapter], with rank, alpha, target_modules"),
    ("lora_r", "rank in [adapter]"),
    ("lora_alpha", "alpha in [adapter]"),
    ("adapter.r", "adapter.rank"),
    ("adapter.lora_r", "adapter.rank"),
    ("adapter.lora_alpha", "adapter.alpha"),
    ("adapter.lora_dropout", "adapter.dropout"),
    ("adapter.targets", "adapter.target_modules"),
    // What is minimised.
    ("dpo", "objective = \"dpo\""),
    ("kto", "objective = \"kto\""),
    ("orpo", "objective = \"orpo\""),
    ("rl", "objective = \"dpo\" (or kto, orpo)"),
    ("loss", "objective"),
    ("beta", "beta in [objective]"),
    // How long.
    ("max_steps", "steps"),
    ("max_iters", "steps"),
    ("train_iters", "steps"),
    ("num_epochs", "epochs"),
    ("num_train_epochs", "epochs"),
    ("training.epochs", "epochs, above all sections"),
    ("training.num_epochs", "epochs, above all sections"),
    ("training.num_train_epochs", "epochs, above all sections"),
    ("training.steps", "steps, above all sections"),
    ("training.max_steps", "steps, above all sections"),
    // Numbers of the optimizer.
    ("lr", "learning_rate in [training]"),
    ("learning_rate", "learning_rate in [training]"),
    ("weight_decay", "weight_decay in [training]"),
    ("warmup_steps", "warmup_steps in [training]"),
    ("warmup_ratio", "warmup_ratio in [training]"),
    ("max_grad_norm", "max_grad_norm in [training]"),
    ("grad_clip", "max_grad_norm in [training]"),
    ("optim", "optimizer in [ds_config], such as { type = \"AdamW\" }"),
    ("optimizer", "optimizer in [ds_config], such as { type = \"AdamW\" }"),
    ("training.lr", "training.learning_rate"),
    ("training.optim", "optimizer in [ds_config], such as { type = \"AdamW\" }"),
    ("training.optimizer", "optimizer in [ds_config], such as { type = \"AdamW\" }"),
    ("training.warmup", "training.warmup_steps; below 1 it is a share of all steps"),
    ("training.gradient_clipping", "training.max_grad_norm"),
    ("lr_scheduler", COSINE),
    ("lr_scheduler_type", COSINE),
    ("scheduler", COSINE),
    ("cosine", COSINE),
    ("training.lr_scheduler", COSINE),
    ("training.lr_scheduler_type", COSINE),
    ("training.scheduler", COSINE),
    ("training.cosine", COSINE),
    // How much at once, and in which type.
    ("batch_size", BATCH),
    ("micro_batch_size", BATCH),
    ("per_device_train_batch_size", BATCH),
    ("training.batch_size", BATCH),
    ("training.micro_batch_size", BATCH),
    ("training.train_batch_size", "train_batch_size in [ds_config], or training.per_device_train_batch_size"),
    ("gradient_accumulation_steps", "gradient_accumulation_steps in [training]"),
    ("bf16", "bf16 in [training]"),
    ("fp16", "fp16 in [training]"),
    ("dtype", "bf16 = true or fp16 = true in [training]"),
    ("precision", "bf16 = true or fp16 = true in [training]"),
    ("mixed_precision", "bf16 = true or fp16 = true in [training]"),
    ("model.dtype", "bf16 = true or fp16 = true in [training]"),
    ("model.torch_dtype", "bf16 = true or fp16 = true in [training]"),
    // Where, and how it is spread.
    ("zero", ZERO),
    ("zero_stage", ZERO),
    ("fsdp", ZERO),
    ("zero_optimization", "[ds_config.zero_optimization]"),
    ("deepspeed", "ds_config, the path of the file or its keys"),
    ("deepspeed_config", "ds_config, the path of the file or its keys"),
    ("gpus", "ranks"),
    ("num_gpus", "ranks"),
    ("nproc_per_node", "ranks"),
    ("world_size", "ranks"),
    ("tp", "autotp_size in [tensor_parallel]"),
    ("pp", "stages in [pipeline]"),
    ("output_dir", "the option --out; without it the folder is runs/NAME"),
    ("device", "the option --device, or FERROSPEED_DEVICE"),
    // The model.
    ("base_model", "path in [model]"),
    ("model_name_or_path", "path in [model]"),
    ("model.name", "model.path, a directory or a name on the Hugging Face Hub"),
    ("model.base_model", "model.path"),
    ("model.model_name_or_path", "model.path"),
    ("model.type", "model.preset for a new one, gpt2 or llama; model.path for one that is there"),
    ("model.n_layer", "model.layers"),
    ("model.num_layers", "model.layers"),
    ("model.n_embd", "model.width"),
    ("model.hidden_size", "model.width"),
    ("model.n_head", "model.heads"),
    ("model.num_heads", "model.heads"),
    ("model.vocab_size", "model.vocabulary"),
    ("gradient_checkpointing", "activation_checkpointing in [model]"),
    ("activation_checkpoint", "activation_checkpointing in [model]"),
    ("training.gradient_checkpointing", "activation_checkpointing in [model]"),
    ("model.gradient_checkpointing", "model.activation_checkpointing"),
    // The data.
    ("datasets", FILES),
    ("dataset", FILES),
    ("dataset_name", "hub in [data]"),
    ("data.dataset", FILES),
    ("data.path", FILES),
    ("data.paths", FILES),
    ("data.files", FILES),
    ("data.train", FILES),
    ("data.conversations", "data.samples"),
    ("data.name", "data.hub"),
    ("data.type", "data.kind, which is told by the first sample where it is left out"),
    ("data.format", "data.kind, which is told by the first sample where it is left out"),
    ("sequence_len", "sequence in [data]"),
    ("seq_len", "sequence in [data]"),
    ("max_seq_length", "sequence in [data]"),
    ("max_length", "sequence in [data]"),
    ("block_size", "sequence in [data]"),
    ("data.seq_len", "data.sequence"),
    ("data.sequence_len", "data.sequence"),
    ("data.sequence_length", "data.sequence"),
    ("data.max_length", "data.sequence"),
    ("data.block_size", "data.sequence"),
    ("data.val_set_size", "data.validation"),
    ("val_set_size", "validation in [data]"),
    ("data.train_on_inputs", "data.train_on: assistant (the default), last or all"),
    ("train_on_inputs", "train_on in [data]: assistant (the default), last or all"),
    ("data.packing", "nothing: samples are always laid together, and do not see each other"),
    ("sample_packing", "nothing: samples are always laid together, and do not see each other"),
    ("chat_template", "chat_template in [data]"),
    ("tokenizer", "tokenizer in [data]"),
    // On the way.
    ("save_steps", "every in [save]"),
    ("save_total_limit", "keep_last in [save]"),
    ("save.steps", "save.every"),
    ("save.interval", "save.every"),
    ("save.total_limit", "save.keep_last"),
    ("eval_steps", "every in [eval]"),
    ("eval.steps", "eval.every"),
    ("eval.interval", "eval.every"),
    ("early_stopping_patience", "patience in [eval]"),
    ("load_best_model_at_end", "keep_best in [eval]"),
    ("logging_steps", "steps_per_print in [ds_config]; every step is in log.jsonl anyway"),
    ("wandb_project", "wandb in [ds_config], such as { enabled = true, project = \"…\" }"),
];

const BATCH: &str =
    "per_device_train_batch_size in [training], or train_micro_batch_size_per_gpu in [ds_config]";
const COSINE: &str = "scheduler in [ds_config], such as { type = \"WarmupCosineLR\", params = { total_num_steps = 1000, warmup_num_steps = 50 } }";
const FILES: &str =
    "text, jsonl, parquet or samples in [data], lists of files or folders, or hub = \"org/name\"";
const ZERO: &str = "zero_optimization = { stage = 3 } in [ds_config]";

/// What to write here for a key of another program's.
pub(super) fn ours(path: &str) -> Option<&'static str> {
    KNOWN.iter().find(|(known, _)| *known == path).map(|(_, own)| *own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_key_is_there_twice() {
        for (at, (key, _)) in KNOWN.iter().enumerate() {
            assert!(KNOWN[..at].iter().all(|(other, _)| other != key), "{key}");
            assert!(!super::super::schema::is_recipe_key(key), "{key} is one of ours");
        }
    }
}

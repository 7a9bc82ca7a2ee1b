//! Sections that came after DeepSpeed 0.14. Few of their keys are acted on yet; each is known by its name.

use super::*;

/// `comet`.
pub(super) const COMET: &[Key] = &[
    key("enabled", Kind::Bool, "false", "Turn it on."),
    key("samples_log_interval", POSITIVE_COUNT, "100", "Samples from one record to the next."),
    key("project", Kind::Text, "null", "Project."),
    key("workspace", Kind::Text, "null", "Workspace that owns it."),
    key("api_key", Kind::Text, "null", "Key of the service."),
    key("experiment_name", Kind::Text, "null", "Name of the experiment."),
    key("experiment_key", Kind::Text, "null", "Key of the experiment."),
    key("online", Kind::Bool, "null", "Send while training goes on."),
    key("mode", Kind::Text, "null", "Go on with an experiment, or begin one."),
];

/// `torch_autocast`.
pub(super) const TORCH_AUTOCAST: &[Key] = &[
    key("enabled", Kind::Bool, "false", "Choose the format operation by operation."),
    key("dtype", Kind::DataType, "null", "The lower format."),
    key("lower_precision_safe_modules", TEXT_LIST, "null", "Modules that may use it."),
];

const TP: &[Key] = &[
    key("tp_size", POSITIVE_COUNT, "1", "Ranks that share one layer."),
    key("tp_grain_size", POSITIVE_COUNT, "1", "Parts are multiples of this."),
];

/// `tensor_parallel`.
pub(super) const TENSOR_PARALLEL: &[Key] = &[
    key("autotp_size", COUNT, "0", "Ranks that hold slices of the same layers; 0 and 1 turn it off.").done(),
    key(
        "sequence_parallel",
        Kind::Bool,
        "false",
        "Between layers each of these ranks has a part of the tokens, not all of them: as many bytes travel, and less is kept. (Ferrospeed's own.)",
    )
    .done(),
    key("dtype", Kind::DataType, "null", "Format of the divided model."),
    key("tp_overlap_comm", Kind::Bool, "false", "Compute while sums travel."),
    key("vocab_parallel_lm_head", Kind::Bool, "null", "Divide the head by tokens."),
    key("vocab_parallel_ce_backend", choice(&["torch", "liger"]), "\"torch\"", "Who computes its loss."),
    key("tensor_parallel", Kind::Section(TP, Form::Schema), "{}", "Sizes.").alias(&["tp"]),
    key("partition_config", Kind::Json, "null", "Which layers are divided, and how."),
    key("preset_model", Kind::Text, "null", "A known division: `llama`, `mixtral`, …"),
    key("keep_module_on_host", Kind::Bool, "false", "Load weights in host memory."),
    key("replace_with_kernel_inject", Kind::Bool, "false", "Replace layers by faster ones.")
        .alias(&["kernel_inject"]),
];

/// `expert_parallel`.
pub(super) const EXPERT_PARALLEL: &[Key] = &[
    key("enabled", Kind::Bool, "false", "Divide experts over ranks; here `autoep_size` alone decides.")
        .done(),
    key(
        "autoep_size",
        POSITIVE_COUNT,
        "1",
        "Ranks that share the experts of a layer, among those that see different samples.",
    )
    .done(),
    key("expert_tensor_parallel_size", POSITIVE_COUNT, "1", "Ranks that share one expert."),
    key("validate_folding_routing", Kind::Bool, "false", "Check that ranks route alike."),
    key("async_split_plan", Kind::Bool, "false", "Plan the exchange while computing."),
    key("preset_model", Kind::Text, "null", "A known model."),
    key("moe_layer_pattern", Kind::Text, "null", "Which modules are mixtures."),
    key("expert_pattern", Kind::Text, "null", "Which modules are experts."),
    key("router_pattern", Kind::Text, "null", "Which modules route."),
    key("use_grouped_mm", Kind::Bool, "true", "Multiply all experts at once."),
    key("disable_triton_grouped_mm", Kind::Bool, "false", "Do so without Triton."),
    key("route_norm", Kind::Bool, "null", "Normalise the router's weights."),
    key("route_scale", NON_NEGATIVE, "1.0", "Multiplies them."),
    key("score_apply", Kind::Json, "\"auto\"", "Where weights are applied."),
    key("combine_impl", Kind::Json, "\"auto\"", "How outputs are combined."),
    key("row_weighting_impl", Kind::Json, "\"auto\"", "How rows are weighted."),
    key("gate_up_impl", Kind::Json, "\"separate\"", "How the first two products are computed."),
    key("comm_backend", Kind::Json, "\"comm\"", "What carries tokens."),
    key("comm_num_sm", COUNT, "12", "Multiprocessors that carry them."),
    key("comm_qp_margin", COUNT, "4", "Spare queues."),
    key("comm_max_tokens_per_rank", COUNT, "0", "Tokens a rank sends at most."),
    key("num_expert_groups", POSITIVE_COUNT, "null", "Groups of experts."),
    key("num_limited_groups", POSITIVE_COUNT, "null", "Groups a token may choose from."),
    key("score_func", Kind::Json, "\"auto\"", "How scores become weights."),
    key("top_k", Kind::Json, "\"auto\"", "Experts per token."),
    key("load_balance_coeff", Kind::Json, "null", "Not available."),
    key("routed_scaling_factor", Kind::Json, "\"auto\"", "Multiplies the routed output."),
    key("expert_w1", Kind::Text, "null", "Name of the gate's weight."),
    key("expert_w2", Kind::Text, "null", "Name of the output's weight."),
    key("expert_w3", Kind::Text, "null", "Name of the input's weight."),
    key("num_experts_attr", Kind::Text, "null", "Where the number of experts stands."),
    key("top_k_attr", Kind::Text, "null", "Where the experts per token stand."),
    key("has_shared_experts", Kind::Bool, "null", "Whether all tokens share some experts."),
    key("shared_experts_pattern", Kind::Text, "null", "Which modules those are."),
    key("shared_experts_gate_pattern", Kind::Text, "null", "Which modules gate them."),
    key("expert_activation", Kind::Text, "null", "Activation of the experts."),
];

const THROUGHPUT: &[Key] = &[
    key("enabled", Kind::Bool, "true", "Measure samples per second."),
    key("synchronized", Kind::Bool, "true", "Wait for the device when measuring."),
];

/// `timers`.
pub(super) const TIMERS: &[Key] =
    &[key("throughput", Kind::Section(THROUGHPUT, Form::Schema), "{}", "Samples per second.")];

/// `data_efficiency.data_sampling.dynamic_batching`.
pub(super) const DYNAMIC_BATCHING: &[Key] = &[
    key("enabled", Kind::Bool, "false", "Fill batches by tokens."),
    key("metrics_path", Kind::Text, "null", "Lengths of the samples."),
    key(
        "lr_scaling_method",
        choice(&["linear", "sqrt", "none"]),
        "\"linear\"",
        "Rate for another batch size.",
    ),
    key("min_batch_size", POSITIVE_COUNT, "1", "Fewest samples."),
    key("max_batch_size", POSITIVE_COUNT, "null", "Most samples."),
    key(
        "sequence_picking_order",
        choice(&["random", "seqlen", "dataloader"]),
        "\"dataloader\"",
        "Their order.",
    ),
    key("max_tokens", POSITIVE_COUNT, "null", "Tokens per batch."),
    key("verbose", Kind::Bool, "false", "Log each batch."),
];

/// `checkpoint.writer`.
pub(super) const CHECKPOINT_WRITER: &[Key] = &[
    key("type", Kind::Text, "null", "Which writer."),
    key("io_buffer_size", POSITIVE_COUNT, "67108864", "Bytes per buffer."),
    key("io_buffer_double", Kind::Bool, "true", "Fill one buffer while another is written."),
    key("show_statistics", Kind::Bool, "false", "Log how fast it was."),
    key("data_parallel", Kind::Text, "null", "Which ranks share the work."),
    key("decoupled", Kind::Bool, "false", "Write while training goes on."),
    key("io_multiplier", POSITIVE_COUNT, "1", "Buffers per request."),
];

/// `zero_optimization.zenflow`.
pub(super) const ZENFLOW: &[Key] = &[
    key("topk_ratio", OPEN_FRACTION, "0.1", "Share of gradient columns that are updated at once."),
    key("select_strategy", choice(&["auto", "step", "epoch"]), "\"auto\"", "When they are chosen anew."),
    key("select_interval", STEPS_OR_AUTO, "\"auto\"", "After how many."),
    key("update_interval", STEPS_OR_AUTO, "\"auto\"", "Steps between updates of the rest."),
    key("overlap_step", Kind::Bool, "false", "Update the rest while training goes on."),
    key("offload", Kind::Bool, "false", "Keep the states of chosen columns in host memory."),
    key("auto_ratio", FRACTION, "0.99", "Threshold of `auto`."),
    key("full_warm_up_rounds", COUNT, "0", "Steps at the start that update all."),
    key("pt_reserved_cores_perc", FRACTION, "0.5", "Share of cores that is left to the rest of the program."),
    key("steps_per_epoch", POSITIVE_COUNT, "null", "Set by the program."),
];
const STEPS_OR_AUTO: Kind = Kind::Either(&[POSITIVE_COUNT, choice(&["auto"])]);

/// `zero_optimization.leaf_module`.
pub(super) const LEAF_MODULE: &[Key] = &[
    key("classes", TEXT_LIST, "null", "Classes of modules that are gathered whole."),
    key("names", TEXT_LIST, "[]", "Their paths."),
    key("name_suffixes", TEXT_LIST, "[]", "Ends of their paths."),
];

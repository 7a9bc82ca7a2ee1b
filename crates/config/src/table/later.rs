//! Sections that came after DeepSpeed 0.14. Each key is known by its name, and says what becomes of it.

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
    key("dtype", Kind::DataType, "null", "Format of the divided model.").refused("`bf16` and `fp16` say what kernels read"),
    key("tp_overlap_comm", Kind::Bool, "false", "Compute while sums travel.").inert("what follows in a layer needs the sums"),
    key("vocab_parallel_lm_head", Kind::Bool, "null", "Divide the head by tokens.").refused("families say which tables are divided"),
    key("vocab_parallel_ce_backend", choice(&["torch", "liger"]), "\"torch\"", "Who computes its loss.").refused("there is one implementation here, with the same result"),
    key("tensor_parallel", Kind::Section(TP, Form::Schema), "{}", "Sizes.").alias(&["tp"]).refused("write `autotp_size`"),
    key("partition_config", Kind::Json, "null", "Which layers are divided, and how.").refused("families say which layers are divided, and a model of your own says it of its layers"),
    key("preset_model", Kind::Text, "null", "A known division: `llama`, `mixtral`, …").refused("a model's `config.json` says which family it is"),
    key("keep_module_on_host", Kind::Bool, "false", "Load weights in host memory.").always("true", "weights are read slice by slice, straight to where they are used"),
    key("replace_with_kernel_inject", Kind::Bool, "false", "Replace layers by faster ones.")
        .alias(&["kernel_inject"]).always("true", "layers have the engine's own kernels"),
];

const OF_THE_MODEL: &str = "the model's `config.json` and its family say it";
const ONE_WAY: &str = "there is one implementation here, with the same result";

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
    key("expert_tensor_parallel_size", POSITIVE_COUNT, "1", "Ranks that share one expert.")
        .refused("each expert is whole on its rank, or in the slices of `tensor_parallel`"),
    key("validate_folding_routing", Kind::Bool, "false", "Check that ranks route alike.").always(
        "true",
        "ranks that hold slices route alike by construction, and collectives compare what they bring",
    ),
    key("async_split_plan", Kind::Bool, "false", "Plan the exchange while computing.")
        .refused("tokens are counted before they are sent"),
    key("preset_model", Kind::Text, "null", "A known model.").refused(OF_THE_MODEL),
    key("moe_layer_pattern", Kind::Text, "null", "Which modules are mixtures.").refused(OF_THE_MODEL),
    key("expert_pattern", Kind::Text, "null", "Which modules are experts.").refused(OF_THE_MODEL),
    key("router_pattern", Kind::Text, "null", "Which modules route.").refused(OF_THE_MODEL),
    key("use_grouped_mm", Kind::Bool, "true", "Multiply all experts at once.")
        .always("true", "all experts of a rank are multiplied at once"),
    key("disable_triton_grouped_mm", Kind::Bool, "false", "Do so without Triton.")
        .always("true", "there is no Triton here"),
    key("route_norm", Kind::Bool, "null", "Normalise the router's weights.").refused(OF_THE_MODEL),
    key("route_scale", NON_NEGATIVE, "1.0", "Multiplies them.").refused(OF_THE_MODEL),
    key("score_apply", Kind::Json, "\"auto\"", "Where weights are applied.").refused(ONE_WAY),
    key("combine_impl", Kind::Json, "\"auto\"", "How outputs are combined.").refused(ONE_WAY),
    key("row_weighting_impl", Kind::Json, "\"auto\"", "How rows are weighted.").refused(ONE_WAY),
    key("gate_up_impl", Kind::Json, "\"separate\"", "How the first two products are computed.")
        .refused(ONE_WAY),
    key("comm_backend", Kind::Json, "\"comm\"", "What carries tokens.")
        .refused("what connects the ranks carries tokens: NCCL, shared memory or TCP"),
    key("comm_num_sm", COUNT, "12", "Multiprocessors that carry them.")
        .refused("what connects the ranks carries tokens: NCCL, shared memory or TCP"),
    key("comm_qp_margin", COUNT, "4", "Spare queues.")
        .refused("what connects the ranks carries tokens: NCCL, shared memory or TCP"),
    key("comm_max_tokens_per_rank", COUNT, "0", "Tokens a rank sends at most.")
        .refused("no token is dropped, and a rank takes as many as are sent to it"),
    key("num_expert_groups", POSITIVE_COUNT, "null", "Groups of experts.").refused(OF_THE_MODEL),
    key("num_limited_groups", POSITIVE_COUNT, "null", "Groups a token may choose from.")
        .refused(OF_THE_MODEL),
    key("score_func", Kind::Json, "\"auto\"", "How scores become weights.").refused(OF_THE_MODEL),
    key("top_k", Kind::Json, "\"auto\"", "Experts per token.").refused(OF_THE_MODEL),
    key("load_balance_coeff", Kind::Json, "null", "Not available.").refused(OF_THE_MODEL),
    key("routed_scaling_factor", Kind::Json, "\"auto\"", "Multiplies the routed output.")
        .refused(OF_THE_MODEL),
    key("expert_w1", Kind::Text, "null", "Name of the gate's weight.").refused(OF_THE_MODEL),
    key("expert_w2", Kind::Text, "null", "Name of the output's weight.").refused(OF_THE_MODEL),
    key("expert_w3", Kind::Text, "null", "Name of the input's weight.").refused(OF_THE_MODEL),
    key("num_experts_attr", Kind::Text, "null", "Where the number of experts stands.").refused(OF_THE_MODEL),
    key("top_k_attr", Kind::Text, "null", "Where the experts per token stand.").refused(OF_THE_MODEL),
    key("has_shared_experts", Kind::Bool, "null", "Whether all tokens share some experts.")
        .refused(OF_THE_MODEL),
    key("shared_experts_pattern", Kind::Text, "null", "Which modules those are.").refused(OF_THE_MODEL),
    key("shared_experts_gate_pattern", Kind::Text, "null", "Which modules gate them.").refused(OF_THE_MODEL),
    key("expert_activation", Kind::Text, "null", "Activation of the experts.").refused(OF_THE_MODEL),
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
    key("classes", TEXT_LIST, "null", "Classes of modules that are gathered whole.")
        .refused("modules have paths here, and no classes: write `names` or `name_suffixes`"),
    key("names", TEXT_LIST, "[]", "Their paths.").done(),
    key("name_suffixes", TEXT_LIST, "[]", "Ends of their paths.").done(),
];

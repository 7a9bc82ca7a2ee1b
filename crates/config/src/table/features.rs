//! The smaller sections.

use super::later::CHECKPOINT_WRITER;
use super::*;

/// `amp`.
pub(super) const AMP: &[Key] = &[
    key("enabled", Kind::Bool, "false", "Turn Apex on."),
    key("opt_level", Kind::Text, "null", "Apex optimisation level, such as `O1`."),
    key("cast_model_type", Kind::Json, "null", "Passed to Apex."),
    key("patch_torch_functions", Kind::Json, "null", "Passed to Apex."),
    key("keep_batchnorm_fp32", Kind::Json, "null", "Passed to Apex."),
    key("master_weights", Kind::Json, "null", "Passed to Apex."),
    key("loss_scale", Kind::Json, "null", "Passed to Apex."),
    key("min_loss_scale", Kind::Json, "null", "Passed to Apex."),
    key("max_loss_scale", Kind::Json, "null", "Passed to Apex."),
    key("num_losses", Kind::Json, "null", "Passed to Apex."),
    key("verbosity", Kind::Json, "null", "Passed to Apex."),
    key("cast_model_outputs", Kind::Json, "null", "Passed to Apex."),
];

/// `activation_checkpointing`.
pub(super) const ACTIVATION_CHECKPOINTING: &[Key] = &[
    key("partition_activations", Kind::Bool, "false", "Split kept activations over tensor-parallel ranks.")
        .done(),
    key("number_checkpoints", POSITIVE_COUNT, "null", "Kept inputs of one shape for which there is room.")
        .done(),
    key(
        "contiguous_memory_optimization",
        Kind::Bool,
        "false",
        "No more kept inputs than `number_checkpoints`; needs `partition_activations`.",
    )
    .done(),
    key("synchronize_checkpoint_boundary", Kind::Bool, "false", "Wait for the device at each checkpoint.")
        .done(),
    key("profile", Kind::Bool, "false", "Time blocks that are recomputed, forward and backward.").done(),
    key("cpu_checkpointing", Kind::Bool, "false", "Keep activations in host memory.").done(),
];

/// `flops_profiler`.
pub(super) const FLOPS_PROFILER: &[Key] = &[
    key("enabled", Kind::Bool, "false", "Count and time one micro-batch of one step.").done(),
    key(
        "recompute_fwd_factor",
        NON_NEGATIVE,
        "0.0",
        "Forward passes that the report takes backward to repeat.",
    )
    .done(),
    key("profile_step", COUNT, "1", "Which step, from 0.").done(),
    key(
        "module_depth",
        Kind::Int { min: -1, max: i64::MAX },
        "-1",
        "Levels of the summary by class; -1 goes to the level above the last.",
    )
    .done(),
    key("top_modules", POSITIVE_COUNT, "1", "Classes named at each level.").done(),
    key("detailed", Kind::Bool, "true", "Print the tree of modules.").done(),
    key("output_file", Kind::Text, "null", "Write there instead of to the log.").done(),
];

const MODEL_INFO: &[Key] = &[
    key("profile", Kind::Bool, "false", "Measure the model first.")
        .always("true", "what a run would measure, the memory plan knows"),
    key("num_params", COUNT, "null", "Parameters of the model; default: the plan's count.").done(),
    key("hidden_size", POSITIVE_COUNT, "null", "Its width; default: the model's.").done(),
    key("num_layers", POSITIVE_COUNT, "null", "Its depth.").refused("no rule of the search asks for it"),
];

const SET_FOR_EXPERIMENTS: &str = "a search sets what its runs need itself";

/// `autotuning`.
pub(super) const AUTOTUNING: &[Key] = &[
    key("enabled", Kind::Bool, "false", "`train --autotuning tune` or `run` searches whatever this says.").done(),
    key(
        "method",
        choice(&["plan", "deepspeed"]),
        "\"plan\"",
        "Who chooses what is tried: a model of costs and the memory plan, in at most ten runs, or DeepSpeed's rules.",
    )
    .done(),
    key("deadline_s", POSITIVE, "600", "Seconds that one run may take.").done(),
    key("fast", Kind::Bool, "true", "Only search micro-batch sizes.").done(),
    key("results_dir", Kind::NonEmptyText, "\"autotuning_results\"", "Folder for results.").done(),
    key("exps_dir", Kind::NonEmptyText, "\"autotuning_exps\"", "Folder for experiments.").done(),
    key("overwrite", Kind::Bool, "true", "Empty both folders first; else go on with what is in them.").done(),
    key("start_profile_step", COUNT, "3", "Steps before those that are measured.").done(),
    key("end_profile_step", COUNT, "5", "Last measured step.").done(),
    key("start_step", COUNT, "null", "Set for experiments.").inert(SET_FOR_EXPERIMENTS),
    key("end_step", COUNT, "null", "Set for experiments.").inert(SET_FOR_EXPERIMENTS),
    key("metric", choice(&["throughput", "latency", "flops"]), "\"throughput\"", "What is optimised.").done(),
    key("metric_path", Kind::Text, "null", "Where an experiment writes its measurement.")
        .refused("it is `metrics.json` in the experiment's folder of `results_dir`"),
    key(
        "tuner_type",
        choice(&["gridsearch", "random", "model_based"]),
        "\"gridsearch\"",
        "How the space is searched, by DeepSpeed's rules when not `fast`.",
    )
    .done(),
    key("tuner_early_stopping", POSITIVE_COUNT, "5", "Experiments without improvement before it stops.").done(),
    key("tuner_num_trials", POSITIVE_COUNT, "50", "Experiments at most.").done(),
    key("arg_mappings", Kind::Named(&Kind::Text), "null", "Command-line flags that carry options.")
        .refused("a recipe has no script whose flags would carry options"),
    key("model_info", Kind::Section(MODEL_INFO, Form::Plain), "null", "What is known about the model.").done(),
    key("model_info_path", Kind::Text, "null", "Where that is written.")
        .refused("it is `profile_model_info/model_info.json` in `results_dir`"),
    key("mp_size", POSITIVE_COUNT, "1", "Model-parallel size.").done(),
    key("max_train_batch_size", POSITIVE_COUNT, "null", "Largest batch.").done(),
    key("min_train_batch_size", POSITIVE_COUNT, "1", "Smallest batch.")
        .refused("DeepSpeed's search does not read it either"),
    key("max_train_micro_batch_size_per_gpu", POSITIVE_COUNT, "1024", "Largest micro-batch.").done(),
    key("min_train_micro_batch_size_per_gpu", POSITIVE_COUNT, "1", "Smallest micro-batch.").done(),
    key("num_tuning_micro_batch_sizes", POSITIVE_COUNT, "3", "Micro-batch sizes tried.").done(),
];

/// `comms_logger`.
pub(super) const COMMS_LOGGER: &[Key] = &[
    key("enabled", Kind::Bool, "false", "Count them.").done(),
    key("prof_all", Kind::Bool, "true", "All of them.").done(),
    key("prof_ops", TEXT_LIST, "[]", "These, when not all: `all_reduce`, `all_gather`, ….").done(),
    key("verbose", Kind::Bool, "false", "Log each as it ends, on rank 0.").done(),
    key("debug", Kind::Bool, "false", "Count them by where they are called, too.").done(),
];

const OUTPUT_PATH: Key =
    key("output_path", Kind::Text, "\"\"", "Folder, below the working directory.").done();
const JOB_NAME: Key =
    key("job_name", Kind::Text, "\"DeepSpeedJobName\"", "Folder of this run below it.").done();
const MONITOR_ENABLED: Key = key("enabled", Kind::Bool, "false", "Turn it on.").done();

/// `tensorboard`.
pub(super) const TENSORBOARD: &[Key] = &[MONITOR_ENABLED, OUTPUT_PATH, JOB_NAME];
/// `csv_monitor`.
pub(super) const CSV_MONITOR: &[Key] = &[MONITOR_ENABLED, OUTPUT_PATH, JOB_NAME];
/// `wandb`.
pub(super) const WANDB: &[Key] = &[
    MONITOR_ENABLED,
    key("group", Kind::Text, "null", "Group of runs.").done(),
    key("team", Kind::Text, "null", "Team that owns the project.").done(),
    key("project", Kind::Text, "\"deepspeed\"", "Project.").done(),
    key("dir", Kind::NonEmptyText, "null", "Folder; default `wandb`, which `train` has in the run's own.")
        .done(),
];

/// A number of ranks.
const RANKS: Kind = Kind::Int { min: 1, max: u32::MAX as i64 };

/// `elasticity`.
pub(super) const ELASTICITY: &[Key] = &[
    key("enabled", Kind::Bool, "false", "Choose the batch size from this section.").done(),
    key(
        "max_train_batch_size",
        Kind::Int { min: 1, max: 1 << 32 },
        "2000",
        "Largest batch; required when enabled.",
    )
    .done(),
    key(
        "micro_batch_sizes",
        Kind::List { item: &POSITIVE_COUNT, length: None },
        "[2, 4, 6]",
        "Micro-batch sizes to choose from; required when enabled.",
    )
    .done(),
    key("min_gpus", RANKS, "1", "Fewest ranks.").done(),
    key("max_gpus", RANKS, "10000", "Most ranks.").done(),
    key("num_gpus_per_node", RANKS, "1", "Ranks per node (version 0.2).").done(),
    key("model_parallel_size", RANKS, "1", "Ranks per model replica (version 0.2).").done(),
    key("min_time", COUNT, "0", "Minutes a job should last on the chosen ranks; for the scheduler.").done(),
    key("version", Kind::Either(&[POSITIVE, Kind::Text]), "0.2", "0.1 or 0.2.").done(),
    key("prefer_larger_batch", Kind::Bool, "true", "Among equals take the larger batch.")
        .alias(&["prefer_large_batch"])
        .done(),
    key("ignore_non_elastic_batch_info", Kind::Bool, "false", "Overwrite batch keys that are given as well.")
        .done(),
];

/// `pipeline`.
pub(super) const PIPELINE: &[Key] = &[
    key(
        "stages",
        Kind::Either(&[POSITIVE_COUNT, choice(&["auto"])]),
        "\"auto\"",
        "Stages; `auto` takes the module's.",
    )
    .done(),
    key(
        "partition",
        Kind::Text,
        "\"best\"",
        "How layers are divided: `uniform`, `parameters`, `type:REGEX`, `profile` (measured time) or `memory`; `best` is `parameters`.",
    )
    .done(),
    key(
        "schedule",
        Kind::Text,
        "\"1f1b\"",
        "The order of a step's work: `1f1b`, `interleaved:CHUNKS`, `zb-h1` or `zb-v`; see `docs/pipeline.md`.",
    )
    .done(),
    key("seed_layers", Kind::Bool, "false", "Seed each layer by its index.")
        .always("true", "first values follow the names of parameters, wherever they lie"),
    key("activation_checkpoint_interval", COUNT, "0", "Recompute every this many layers; 0 never.").done(),
    key("pipe_partitioned", Kind::Bool, "true", "Send a share of activations per tensor-parallel rank.").done(),
    key("grad_partitioned", Kind::Bool, "true", "The same for gradients.").done(),
    key("use_reentrant", Kind::Bool, "null", "Kind of recomputation.")
        .inert("there is one kind of recomputation here"),
];

const PARALLEL_WRITE: &[Key] =
    &[key("pipeline_stage", Kind::Bool, "false", "Spread the writing of pipeline stages over ranks.")];

/// `checkpoint`.
pub(super) const CHECKPOINT: &[Key] = &[
    key(
        "tag_validation",
        Kind::Choice { values: &["Ignore", "Warn", "Fail"], any_case: true },
        "\"Warn\"",
        "What happens when ranks disagree about the tag.",
    )
    .done(),
    key("load_universal", Kind::Bool, "false", "Load a universal checkpoint.").done(),
    key("use_node_local_storage", Kind::Bool, "false", "Each node writes to its own disk.")
        .refused("a checkpoint lies in one folder that all hosts see; copy what a host needs to its disk"),
    key("checkpoint_serialization", Kind::Bool, "true", "Write files in the framework's newer format.")
        .always("true", "files in DeepSpeed's form are in the newer one"),
    key("writer", Kind::Section(CHECKPOINT_WRITER, Form::Plain), "null", "How bytes are written.").always(
        "{\"type\":\"FAST\"}",
        "each rank writes its own files, many requests at once and past the cache",
    ),
    key("parallel_write", Kind::Section(PARALLEL_WRITE, Form::Plain), "{}", "Who writes what.")
        .always("{\"pipeline_stage\":true}", "each rank writes what it holds"),
];

/// `data_types`.
pub(super) const DATA_TYPES: &[Key] = &[
    key("grad_accum_dtype", Kind::DataType, "null", "Format in which gradients accumulate.").done(),
    key("param_dtype", Kind::DataType, "null", "Format of parameters, where it is not that of training.")
        .refused("`bf16` and `fp16` say what kernels read; masters are f32"),
    key("buffer_dtype", Kind::DataType, "null", "Format of buffers.")
        .refused("a model knows the types of its buffers"),
    key("keep_in_fp32_modules", Kind::Json, "\"auto\"", "Names of buffers that stay in fp32.")
        .refused("a model knows what of it stays in f32"),
];

/// `aio`.
pub(super) const AIO: &[Key] = &[
    key("block_size", POSITIVE_COUNT, "1048576", "Bytes per request.").done(),
    key("queue_depth", POSITIVE_COUNT, "8", "Requests in flight.").done(),
    key(
        "thread_count",
        POSITIVE_COUNT,
        "1",
        "Threads that read and write, where the kernel permits no io_uring.",
    )
    .alias(&["intra_op_parallelism"])
    .done(),
    key(
        "single_submit",
        Kind::Bool,
        "false",
        "Enter the kernel for each request, and not once for all of a transfer.",
    )
    .done(),
    key("overlap_events", Kind::Bool, "true", "Submit while others complete.")
        .always("true", "requests are always submitted while others are under way"),
    key("use_gds", Kind::Bool, "false", "Read straight into device memory.")
        .refused("bytes go through page-locked memory of the host"),
];

/// `hybrid_engine`.
pub(super) const HYBRID_ENGINE: &[Key] = &[
    key("enabled", Kind::Bool, "false", "Turn it on: the model in training generates (`serve::hybrid`).")
        .done(),
    key("max_out_tokens", POSITIVE_COUNT, "512", "Tokens of a prompt and its continuation, at most.").done(),
    key("inference_tp_size", POSITIVE_COUNT, "1", "Tensor-parallel size while generating.")
        .refused("generation uses the slices that training has"),
    key("release_inference_cache", Kind::Bool, "false", "Free the cache after generating.").done(),
    key("pin_parameters", Kind::Bool, "true", "Page-lock offloaded parameters.")
        .inert("`offload_param.pin_memory` says so"),
    key("tp_gather_partition_size", POSITIVE_COUNT, "8", "Layers gathered at once.")
        .inert("`stage3_prefetch_bucket_size` says how much is gathered ahead"),
    key("enable_cuda_graph", Kind::Bool, "false", "Replay the steps of generation as graphs.")
        .always("true", "they are recorded wherever weights stay in their place"),
];

/// `nebula`.
pub(super) const NEBULA: &[Key] = &[
    key("enabled", Kind::Bool, "false", "Use the service."),
    key("nebula_load_path", Kind::Text, "null", "Where to load from."),
    key("enable_nebula_load", Kind::Bool, "true", "Load through the service."),
    key("persistent_storage_path", Kind::Text, "null", "Where checkpoints end up."),
    key("persistent_time_interval", POSITIVE_COUNT, "100", "Seconds between copies."),
    key("num_of_version_in_retention", POSITIVE_COUNT, "2", "Checkpoints kept."),
];

/// `compile`.
pub(super) const COMPILE: &[Key] = &[
    key("enabled", Kind::Bool, "false", "Compile the model."),
    key("disable", Kind::Bool, "false", "Compile nothing, whatever else is said."),
    key("backend", Kind::Text, "\"inductor\"", "Compiler."),
    key("kwargs", Kind::Json, "{}", "Passed to it."),
    key("deepcompile", Kind::Bool, "false", "Let the compiler place gathers and reductions."),
    key("autoep_non_moe", Kind::Bool, "false", "Compile what surrounds mixtures."),
    key("free_activation", Kind::Bool, "false", "Free activations early."),
    key("free_activation_threshold", COUNT, "10485760", "Bytes from which on."),
    key("offload_activation", Kind::Bool, "false", "Keep activations in host memory."),
    key("offload_activation_pin_memory", Kind::Bool, "true", "Page-lock it."),
    key("offload_opt_states", Kind::Bool, "false", "Keep optimizer states in host memory."),
    key("offload_parameters", Kind::Bool, "false", "Keep parameters in host memory."),
    key("double_buffer", Kind::Bool, "true", "Fill one buffer while another travels."),
    key("symmetric_memory", Kind::Bool, "false", "Exchange through symmetric memory."),
    key("debug_log", Kind::Bool, "false", "Log what the compiler does."),
    key("sync_before_reduce", Kind::Bool, "false", "Wait before reductions."),
    key("sync_after_reduce", Kind::Bool, "false", "Wait after reductions."),
    key("sync_before_allgather", Kind::Bool, "false", "Wait before gathers."),
    key("sync_after_allgather", Kind::Bool, "false", "Wait after gathers."),
    key("keep_int_input_tensors", Kind::Bool, "true", "Keep integer inputs."),
    key("keep_all_input_tensors", Kind::Bool, "false", "Keep all inputs."),
    key("passes", TEXT_LIST, "null", "Passes of the compiler."),
];

/// `weight_quantization`.
pub(super) const WEIGHT_QUANTIZATION: &[Key] = &[
    key("enabled", Kind::Bool, "true", "Turn it on."),
    key("num_bits", POSITIVE_COUNT, "8", "Bits per weight."),
    key("q_type", Kind::Text, "\"symmetric\"", "Whether zero lies in the middle."),
    key("q_groups", POSITIVE_COUNT, "1", "Groups with a scale of their own."),
    key("quantized_initialization", Kind::Json, "{}", "Quantise while loading."),
    key("post_init_quant", Kind::Json, "{}", "Quantise after loading, by module name."),
];

//! The top level of `ds_config.json`.

use super::attention::SPARSE_ATTENTION;
use super::compression::COMPRESSION;
use super::data::{CURRICULUM, DATA_EFFICIENCY, EIGENVALUE, PROGRESSIVE_LAYER_DROP};
use super::features::*;
use super::later::{COMET, EXPERT_PARALLEL, TENSOR_PARALLEL, TIMERS, TORCH_AUTOCAST};
use super::optimizer::OPTIMIZER;
use super::precision::{BF16, FP16};
use super::scheduler::SCHEDULER;
use super::zero::ZERO;
use super::*;

const COMMUNICATION_TYPE: Kind = Kind::Choice { values: &["fp16", "bf16", "fp32"], any_case: true };
const ZERO_SECTION: Kind = Kind::Either(&[Kind::Section(ZERO, Form::Schema), Kind::Bool]);

/// Every top-level option.
pub const ROOT: &[Key] = &[
    key(
        "compat",
        choice(crate::compat::VERSIONS),
        "\"0.14.1\"",
        "The DeepSpeed whose defaults hold for what a file does not say; `config check` names those that differ. (Ferrospeed's own.)",
    )
    .done(),
    key(
        "train_batch_size",
        POSITIVE_COUNT,
        "null",
        "Samples per optimizer step over all ranks: micro batch × accumulation steps × data-parallel ranks.",
    )
    .done(),
    key(
        "train_micro_batch_size_per_gpu",
        POSITIVE_COUNT,
        "null",
        "Samples per rank in one forward and backward pass.",
    )
    .done(),
    key(
        "gradient_accumulation_steps",
        POSITIVE_COUNT,
        "null",
        "Forward and backward passes per optimizer step.",
    )
    .done(),
    key("optimizer", Kind::Section(OPTIMIZER, Form::Plain), "null", "The optimizer and its parameters.")
        .done(),
    key(
        "scheduler",
        Kind::Section(SCHEDULER, Form::Plain),
        "null",
        "The learning-rate schedule and its parameters.",
    )
    .done(),
    key(
        "steps_per_print",
        Kind::Interval,
        "10",
        "Report progress every this many optimizer steps; `null` and infinity, which accelerate writes, never do.",
    )
    .nullable()
    .done()
    .since("0.15.2", "null"),
    key("fp16", Kind::Section(FP16, Form::Plain), "{}", "Half-precision training with loss scaling.").done(),
    key("bf16", Kind::Section(BF16, Form::Plain), "{}", "bfloat16 training.").done(),
    key("bfloat16", Kind::Section(BF16, Form::Plain), "null", "Old name of `bf16`.")
        .deprecated(Deprecated::Superseded("bf16")),
    key(
        "amp",
        Kind::Section(AMP, Form::Plain),
        "{}",
        "NVIDIA Apex mixed precision; there is no Apex here, use `fp16` or `bf16`.",
    ).refused_later().refused("mixed precision by apex does not exist here; `fp16` and `bf16` replace it"),
    key("gradient_clipping", NON_NEGATIVE, "0.0", "Largest global gradient norm; 0 turns clipping off.")
        .done()
        .since("0.19.3", "1.0"),
    key(
        "prescale_gradients",
        Kind::Bool,
        "false",
        "Divide gradients by the data-parallel size before they are summed instead of after.",
    )
    .done(),
    key(
        "gradient_predivide_factor",
        POSITIVE,
        "1.0",
        "Divide gradients by this before they are summed, and make up for it after.",
    )
    .done(),
    key(
        "sparse_gradients",
        Kind::Bool,
        "false",
        "Exchange embedding gradients as rows instead of whole tables (stage 0; a warning in others).",
    )
    .done().refused_later(),
    key(
        "communication_data_type",
        COMMUNICATION_TYPE,
        "null",
        "The number format in which gradients travel; `null` follows the training precision.",
    )
    .done(),
    key(
        "seq_parallel_comm_data_type",
        COMMUNICATION_TYPE,
        "\"fp32\"",
        "As `communication_data_type`, when sequence parallelism is on.",
    )
    .alias(&["seq_parallel_communication_data_type"])
    .done(),
    key(
        "zero_optimization",
        ZERO_SECTION,
        "{}",
        "ZeRO: which model states are split over ranks and where they live.",
    )
    .done(),
    key(
        "zero_allow_untested_optimizer",
        Kind::Bool,
        "false",
        "Run ZeRO with an optimizer outside its tested list.",
    )
    .done(),
    key(
        "zero_force_ds_cpu_optimizer",
        Kind::Bool,
        "true",
        "With offloaded optimizer state, refuse optimizers other than the built-in CPU ones.",
    )
    .always("true", "optimizers come from the configuration only, and all of them run on the host"),
    key(
        "activation_checkpointing",
        Kind::Section(ACTIVATION_CHECKPOINTING, Form::Plain),
        "{}",
        "Recompute activations in the backward pass instead of keeping them.",
    )
    .done(),
    key(
        "wall_clock_breakdown",
        Kind::Bool,
        "false",
        "Time forward, backward, reduction and step, of each micro-batch and of each step.",
    )
    .done(),
    key(
        "memory_breakdown",
        Kind::Bool,
        "false",
        "Report memory before and after forward, backward and step.",
    )
    .done(),
    key(
        "dump_state",
        Kind::Bool,
        "false",
        "Print what the engine is, once it is made, and its configuration.",
    )
    .done(),
    key(
        "tensorboard",
        Kind::Section(TENSORBOARD, Form::Schema),
        "{}",
        "Write training curves for TensorBoard.",
    )
    .done(),
    key("csv_monitor", Kind::Section(CSV_MONITOR, Form::Schema), "{}", "Write training curves as CSV files.")
        .done(),
    key(
        "wandb",
        Kind::Section(WANDB, Form::Schema),
        "{}",
        "Keep training curves for Weights & Biases, to be uploaded with `wandb sync`.",
    )
    .done(),
    key(
        "comms_logger",
        Kind::Section(COMMS_LOGGER, Form::Schema),
        "null",
        "Count what ranks send each other: sizes, times, bandwidths; `train` ends with a summary.",
    )
    .done(),
    key(
        "flops_profiler",
        Kind::Section(FLOPS_PROFILER, Form::Plain),
        "{}",
        "Count floating-point operations and time per module.",
    )
    .done(),
    key("pipeline", Kind::Section(PIPELINE, Form::Plain), "{}", "Pipeline parallelism.").done(),
    key("checkpoint", Kind::Section(CHECKPOINT, Form::Plain), "{}", "How checkpoints are written and read.")
        .done(),
    key("data_types", Kind::Section(DATA_TYPES, Form::Plain), "{}", "Number formats of intermediate values.")
        .done(),
    key("aio", Kind::Section(AIO, Form::Plain), "{}", "Asynchronous reads and writes for NVMe offload.")
        .nullable()
        .done(),
    key(
        "elasticity",
        Kind::Section(ELASTICITY, Form::Plain),
        "{}",
        "Batch sizes that stay valid when the number of ranks changes.",
    )
    .done().refused_later(),
    key(
        "autotuning",
        Kind::Section(AUTOTUNING, Form::Plain),
        "{}",
        "Search for the fastest configuration: `train --autotuning`.",
    )
    .done(),
    key(
        "data_efficiency",
        Kind::Section(DATA_EFFICIENCY, Form::Plain),
        "{}",
        "Curriculum sampling and random layer-token dropping.",
    )
    .done(),
    key(
        "curriculum_learning",
        Kind::Section(CURRICULUM, Form::Plain),
        "null",
        "Sequence-length curriculum (the older form; see `data_efficiency`).",
    )
    .done().refused_later(),
    key(
        "progressive_layer_drop",
        Kind::Section(PROGRESSIVE_LAYER_DROP, Form::Plain),
        "null",
        "Drop layers at random, more and more of them.",
    )
    .done().refused_later(),
    key(
        "eigenvalue",
        Kind::Section(EIGENVALUE, Form::Plain),
        "{}",
        "Largest Hessian eigenvalue per block, for quantisation schedules.",
    )
    .done().refused_later(),
    key(
        "compression_training",
        Kind::Section(COMPRESSION, Form::Plain),
        "{}",
        "Training a model to be compressed: weights and activations in few bits, pruning.",
    )
    .done().refused_later(),
    key(
        "sparse_attention",
        SPARSE_ATTENTION,
        "null",
        "Attention over some blocks of keys alone: decoders that `train` trains have it, a program's own model asks the engine for it.",
    )
    .done().refused_later(),
    key(
        "hybrid_engine",
        Kind::Section(HYBRID_ENGINE, Form::Schema),
        "{}",
        "Switch one model between training and generation.",
    )
    .done(),
    key(
        "weight_quantization",
        Kind::Section(WEIGHT_QUANTIZATION, Form::Schema),
        "null",
        "Weight-only quantisation for inference.",
    ).refused("it is of DeepSpeed's inference: `serve` and `generate` quantise weights by their own options"),
    key("compile", Kind::Section(COMPILE, Form::Schema), "{}", "Graph compilation by the tensor framework.")
        .inert("models are compiled ahead of time here"),
    key("nebula", Kind::Section(NEBULA, Form::Plain), "{}", "Azure's asynchronous checkpoint service.").refused_later().refused("`train` writes checkpoints in the background by itself"),
    key("dataloader_drop_last", Kind::Bool, "false", "Drop the last batch when it is not full.").done(),
    key(
        "use_data_before_expert_parallelism",
        Kind::Bool,
        "false",
        "Rank order of mixture-of-experts groups: data before expert.",
    )
    .done(),
    key("comet", Kind::Section(COMET, Form::Schema), "{}", "Send training curves to Comet.").inert("there is no client of Comet here: `csv_monitor`, `tensorboard` and `wandb` keep curves"),
    key(
        "torch_autocast",
        Kind::Section(TORCH_AUTOCAST, Form::Plain),
        "{}",
        "Mixed precision operation by operation; use `bf16` or `fp16`.",
    ).refused("the type is the weights', not an operation's; use `bf16` or `fp16`"),
    key("tensor_parallel", Kind::Section(TENSOR_PARALLEL, Form::Schema), "{}", "Divide layers over ranks.")
        .done(),
    key("expert_parallel", Kind::Section(EXPERT_PARALLEL, Form::Plain), "{}", "Divide experts over ranks.")
        .done(),
    key("sequence_parallel_size", POSITIVE_COUNT, "1", "Ranks that share one sequence.").done(),
    key(
        "sequence_parallel_method",
        Kind::Choice { values: &["ulysses", "ring"], any_case: false },
        "\"ulysses\"",
        "How ranks that share a sequence attend over all of it (docs/sequence-parallel.md).",
    )
    .done(),
    key("data_parallel_size", POSITIVE_COUNT, "null", "Ranks that see different samples.").refused("it follows from the ranks and the sizes of the other axes"),
    key(
        "gradient_allreduce_op",
        Kind::Choice { values: &["mean", "sum"], any_case: true },
        "\"mean\"",
        "Whether gradients of ranks are averaged or added.",
    ).refused("gradients of ranks are averaged; multiply the learning rate by the ranks for their sum"),
    key(
        "managed_gradient_accumulation",
        Kind::Bool,
        "true",
        "Count micro-batches; see `Engine::set_gradient_accumulation_boundary`.",
    ).always("true", "the engine counts micro-batches; a program of your own says when with `Engine::set_gradient_accumulation_boundary`"),
    key("disable_python_gc", Kind::Bool, "false", "Collect Python's garbage only after steps.")
        .always("true", "there is no Python here"),
    key("log_level", Kind::Text, "null", "How much is logged.").inert("`RUST_LOG` says how much is logged"),
    key("timers", Kind::Section(TIMERS, Form::Plain), "{}", "What is timed.").always("{\"throughput\":{\"enabled\":true,\"synchronized\":true}}", "reports have samples per second, measured when the device is done"),
    key("datastates_ckpt", Kind::Json, "null", "Checkpoints by DataStates.")
        .refused("checkpoints are written in the background here"),
    key("graph_harvesting", Kind::Bool, "false", "Capture and replay device graphs in the bf16 optimizer.").refused_later().always("true", "a GPU records what it can repeat by itself"),
    key("vocabulary_size", POSITIVE_COUNT, "null", "Only checked: a multiple of 8 is faster.").done(),
    key("disable_allgather", Kind::Bool, "false", "Has never done anything.")
        .inert("it has never done anything in DeepSpeed either"),
    key(
        "allgather_size",
        COUNT,
        "500000000",
        "All-gather bucket of the boolean form of `zero_optimization`.",
    )
    .done(),
    key(
        "quantize_training",
        Kind::Json,
        "null",
        "Obsolete form of `compression_training.weight_quantization`.",
    )
    .refused("it is obsolete; use `compression_training.weight_quantization`").refused_later(),
];

//! `zero_optimization`.

use super::later::{LEAF_MODULE, ZENFLOW};
use super::*;

const OFFLOAD_DEVICE: Kind = choice(&["none", "cpu", "nvme"]);

const OFFLOAD_PARAM: &[Key] = &[
    key("device", OFFLOAD_DEVICE, "\"none\"", "Where parameters wait while they are not in use.").done(),
    key("nvme_path", Kind::Text, "null", "Folder on the NVMe disk.").done(),
    key("buffer_count", COUNT, "5", "Parameters that are read from NVMe at once.").done(),
    key("buffer_size", COUNT, "100000000", "Elements per buffer.")
        .inert("a parameter is read into memory of its own size"),
    key(
        "max_in_cpu",
        COUNT,
        "1000000000",
        "Elements of each rank that host memory takes before NVMe does; 0 puts all on NVMe.",
    )
    .done(),
    key("pin_memory", Kind::Bool, "false", "Page-lock the host buffers.")
        .always("true", "copies to and from a GPU always go through page-locked buffers")
        .since("0.19.5", "true"),
];

const OFFLOAD_OPTIMIZER: &[Key] = &[
    key("device", OFFLOAD_DEVICE, "\"none\"", "Where optimizer states and master weights live.").done(),
    key("nvme_path", Kind::Text, "null", "Folder on the NVMe disk.").done(),
    key("buffer_count", COUNT, "4", "Buffers for states that travel to and from NVMe.").done(),
    key(
        "pin_memory",
        Kind::Bool,
        "false",
        "Gradients leave a GPU for page-locked memory while backward goes on; with `nvme`, its buffers are page-locked and kept between steps.",
    )
    .done()
    .since("0.19.5", "true"),
    key("pipeline_read", Kind::Bool, "false", "Read the next states while these are updated.")
        .always("true", "the next states are always read ahead, as far as buffer_count allows"),
    key("pipeline_write", Kind::Bool, "false", "Write the last states while these are updated.")
        .always("true", "the last states are always written while others are updated"),
    key("fast_init", Kind::Bool, "false", "Initialise NVMe states in bulk.")
        .always("true", "new states are zeros, which a new file holds already"),
    key("ratio", FRACTION, "1.0", "Share of the states that is moved; the rest stays on the device (stage 3 only).")
        .done(),
    key("super_offload", Kind::Bool, "false", "Update on the CPU while backward goes on (stage 3).").always("true", "the update of offloaded states runs beside the next forward, exactly: nothing is guessed and taken back"),
    key("cpuadam_cores_perc", FRACTION, "0.8", "Share of the cores that updates.").inert("kernels of the host share all threads of a rank; the launcher's `--bind_cores_to_rank` divides them"),
];

const SWITCH_TO_CPU: &str = r#"{"device":"cpu"}"#;

/// `zero_optimization`.
pub(super) const ZERO: &[Key] = &[
    key(
        "stage",
        Kind::IntChoice(&[0, 1, 2, 3]),
        "0",
        "0 splits nothing, 1 optimizer states, 2 also gradients, 3 also parameters.",
    )
    .done(),
    key("contiguous_gradients", Kind::Bool, "true", "Copy gradients into one buffer as they are produced.")
        .always("true", "gradients always travel in contiguous buckets"),
    key("reduce_scatter", Kind::Bool, "true", "Reduce each gradient to its owner only, instead of to all.")
        .always("true", "each gradient is always reduced to its owners, with the same result"),
    key("reduce_bucket_size", COUNT, "500000000", "Gradient elements reduced at once.").done(),
    key(
        "use_multi_rank_bucket_allreduce",
        Kind::Bool,
        "true",
        "Reduce a bucket whose owners are several ranks in one collective.",
    )
    .always("true", "a bucket is always reduced in one collective, with the same result"),
    key("allgather_partitions", Kind::Bool, "true", "Collect updated parameters by all-gather.")
        .always("true", "updated parameters are always gathered"),
    key("allgather_bucket_size", COUNT, "500000000", "Parameter elements gathered at once.")
        .inert("updated parameters are gathered in place, without a buffer to bound"),
    key(
        "overlap_comm",
        Kind::Bool,
        "null",
        "Reduce gradients while the backward pass goes on; `null` means only in stage 3.",
    )
    .done(),
    key(
        "load_from_fp32_weights",
        Kind::Bool,
        "true",
        "Restore master weights from the checkpoint's fp32 copy.",
    )
    .done(),
    key(
        "elastic_checkpoint",
        Kind::Bool,
        "false",
        "Write checkpoints that another number of ranks can load.",
    )
    .always("true", "every checkpoint loads on any number of ranks"),
    key(
        "offload_param",
        Kind::Section(OFFLOAD_PARAM, Form::Schema),
        "null",
        "Keep parameters in host memory or on NVMe (stage 3).",
    )
    .done(),
    key(
        "offload_optimizer",
        Kind::Section(OFFLOAD_OPTIMIZER, Form::Schema),
        "null",
        "Keep optimizer states in host memory or on NVMe.",
    )
    .done(),
    key(
        "sub_group_size",
        COUNT,
        "1000000000",
        "Parameter elements updated at once where they come from a disk: at most this many, and at most 4194304.",
    )
    .done(),
    key("prefetch_bucket_size", COUNT, "50000000", "Parameter elements fetched ahead of use.")
        .alias(&["stage3_prefetch_bucket_size"])
        .done(),
    key("param_persistence_threshold", COUNT, "100000", "Smaller parameters are never split.")
        .alias(&["stage3_param_persistence_threshold"])
        .done(),
    key(
        "model_persistence_threshold",
        COUNT,
        "9223372036854775807",
        "Elements that may stay whole in total.",
    )
    .alias(&["stage3_model_persistence_threshold"])
    .done(),
    key("max_live_parameters", COUNT, "1000000000", "Parameter elements that may be whole at once.")
        .alias(&["stage3_max_live_parameters"])
        .done(),
    key(
        "max_reuse_distance",
        COUNT,
        "1000000000",
        "Keep a parameter that is used again within this many elements.",
    )
    .alias(&["stage3_max_reuse_distance"])
    .done(),
    key(
        "gather_16bit_weights_on_model_save",
        Kind::Bool,
        "false",
        "Collect the whole 16-bit model on rank 0 when it is saved.",
    )
    .alias(&["stage3_gather_16bit_weights_on_model_save"])
    .always("true", "a model is saved tensor by tensor in every stage"),
    key("ignore_unused_parameters", Kind::Bool, "true", "Accept parameters that received no gradient.")
        .always("true", "a parameter without a gradient counts as zero in every stage"),
    key("legacy_stage1", Kind::Bool, "false", "The first implementation of stage 1; it is gone.").refused("the first implementation of stage 1 does not exist any more"),
    key(
        "reduce_each_micro_batch",
        Kind::Bool,
        "false",
        "Average every micro-batch over ranks in stages 0 and 1 too, as 2 and 3 do, so that all four give the same bits; else once per step. (Ferrospeed's own.)",
    )
    .done(),
    key("round_robin_gradients", Kind::Bool, "false", "Spread gradient partitions over ranks in turn.")
        .done(),
    key(
        "zenflow",
        Kind::Section(ZENFLOW, Form::Schema),
        "null",
        "Update the most important gradients first.",
    ).refused("it updates with gradients that are late, and stages would not agree; offloaded states are updated beside the next forward here"),
    key(
        "leaf_module",
        Kind::Section(LEAF_MODULE, Form::Schema),
        "{}",
        "Modules that are gathered whole (stage 3).",
    ).done(),
    key(
        "module_granularity_threshold",
        COUNT,
        "0",
        "Modules of smaller parameters are gathered whole (stage 3).",
    )
    .alias(&["stage3_module_granularity_threshold"]).inert("what is small stays whole by `param_persistence_threshold`, and the rest is fetched ahead in the order in which it is read"),
    key("use_all_reduce_for_fetch_params", Kind::Bool, "false", "Gather parameters by a sum (stage 3).")
        .alias(&["stage3_use_all_reduce_for_fetch_params"]).inert("a gather brings the same values with half the bytes"),
    key("allgather_sequential", Kind::Bool, "false", "Gather parameters one after another (stage 3).")
        .alias(&["stage3_allgather_sequential"]).inert("gathers are few and large, and one rank's follow each other"),
    key("compute_grad_norm", Kind::Bool, "true", "Measure the norm of gradients.")
        .always("true", "the norm is always measured: it also finds what is no number"),
    key("parameter_alignment", Kind::Bool, "false", "Align each parameter in its buffer.").inert("kernels take parameters wherever they begin"),
    key("log_trace_cache_warnings", Kind::Bool, "false", "Log when the order of modules changes (stage 3).").inert("an order of reads that changes is recorded anew; `RUST_LOG=ferrospeed_zero=debug` shows placements"),
    key("enable_sanity_checks", Kind::Bool, "false", "Check that ranks agree.")
        .always("true", "ranks always check that they agree"),
    key("save_muon_momentum_buffer_in_memory", Kind::Bool, "false", "Where Muon's momentum stays (stage 3).").inert("the momentum is a state like others, and lies where `offload_optimizer` puts states"),
    key("zeropp_loco_param", Kind::Json, "null", "LoCo: make up for the error of quantised gradients.")
        .refused_later().refused("the error of quantised gradients is not fed back; DeepSpeed has removed it too"),
    key("zero_hpz_partition_size", COUNT, "1", "ZeRO++: ranks that hold a second copy of the parameters.").done(),
    key("zero_quantized_weights", Kind::Bool, "false", "ZeRO++: gather parameters as int8.").done(),
    key(
        "zero_quantized_nontrainable_weights",
        Kind::Bool,
        "false",
        "ZeRO++: keep frozen parameters as int8.",
    )
    .done(),
    key("zero_quantized_gradients", Kind::Bool, "false", "ZeRO++: reduce gradients as int4 between hosts.").done(),
    key(
        "mics_shard_size",
        ANY_INT,
        "-1",
        "MiCS: ranks that share one copy of the model states; 0 or less turns it off.",
    )
    .done()
    .refused_later(),
    key(
        "mics_hierarchical_params_gather",
        Kind::Bool,
        "false",
        "MiCS: gather between nodes first, then within.",
    )
    .always("true", "a shard that spans hosts is always gathered in two levels")
    .refused_later(),
    key(
        "memory_efficient_linear",
        Kind::Bool,
        "true",
        "Free the weight of a linear layer between forward and backward.",
    )
    .always("true", "weights are always freed between uses here"),
    key("pipeline_loading_checkpoint", Kind::Bool, "false", "Load a stage-3 checkpoint file by file.")
        .always("true", "checkpoints are always read in pieces here"),
    key("override_module_apply", Kind::Bool, "true", "Make initialisers see whole parameters.")
        .always("true", "initialisers always see whole parameters here"),
    key("cpu_offload", Kind::Bool, "null", "Old form of `offload_optimizer`.")
        .deprecated(Deprecated::Switch { replaced_by: "offload_optimizer", on: SWITCH_TO_CPU }),
    key("cpu_offload_param", Kind::Bool, "null", "Old form of `offload_param`.")
        .deprecated(Deprecated::Switch { replaced_by: "offload_param", on: SWITCH_TO_CPU }),
    key("cpu_offload_use_pin_memory", Kind::Bool, "null", "Old form of `pin_memory`.").deprecated(
        Deprecated::NoEffect("write `\"pin_memory\": true` in `offload_optimizer` or `offload_param`"),
    ),
    key(
        "stage3_gather_fp16_weights_on_model_save",
        Kind::Bool,
        "null",
        "Old name of `gather_16bit_weights_on_model_save`.",
    )
    .deprecated(Deprecated::Renamed("gather_16bit_weights_on_model_save")),
];

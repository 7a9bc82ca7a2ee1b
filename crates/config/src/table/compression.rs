//! `compression_training`.

use super::*;

const ENABLED: Key = key("enabled", Kind::Bool, "false", "Turn it on.").done();
const OFFSET: Key =
    key("schedule_offset", COUNT, "1000", "Optimizer steps, without skipped ones, after which it starts.")
        .done();
const QUANTIZATION_TYPE: Key = key(
    "quantization_type",
    choice(&["symmetric", "asymmetric"]),
    "\"symmetric\"",
    "Whether levels lie around zero, or from the smallest value to the largest.",
)
.done();
const MODULES: Key = key(
    "modules",
    Kind::Either(&[Kind::Text, TEXT_LIST]),
    "\"*\"",
    "Regular expressions, each found somewhere in the names of modules; `*` is found in all.",
)
.done();
const RELATED: Key = key(
    "related_modules",
    Kind::List { item: &TEXT_LIST, length: None },
    "null",
    "Modules whose columns go when these rows go.",
)
.inert("rows become zeros and stay where they are, and so do the columns that they meet");

const NOT_RELATED: Key = key(
    "related_modules",
    Kind::List { item: &TEXT_LIST, length: None },
    "null",
    "Modules whose columns go when rows of these go.",
)
.refused("no rows go");

const MIXED: &[Key] = &[
    ENABLED,
    key(
        "quantize_change_ratio",
        FRACTION,
        "0.001",
        "How much less of exact weights is mixed in with every step since the last bit went.",
    )
    .done(),
];

const WEIGHT_SHARED: &[Key] = &[
    ENABLED,
    key("quantizer_kernel", Kind::Bool, "false", "Use the fused kernel.")
        .always("true", "there is one kernel"),
    key("schedule_offset", COUNT, "0", "Optimizer steps, without skipped ones, after which it starts.")
        .done(),
    key(
        "quantize_groups",
        POSITIVE_COUNT,
        "1",
        "Groups of a weight with levels of their own; tables have one for each row.",
    )
    .done(),
    key("quantize_verbose", Kind::Bool, "false", "Log each change of precision.").done(),
    QUANTIZATION_TYPE,
    key(
        "quantize_weight_in_forward",
        Kind::Bool,
        "false",
        "Take `target_bits` at once; otherwise bits become fewer, from `start_bits` on.",
    )
    .done(),
    key("rounding", choice(&["nearest", "stochastic"]), "\"nearest\"", "How values are rounded.").done(),
    key(
        "fp16_mixed_quantize",
        Kind::Section(MIXED, Form::Plain),
        "{}",
        "Mix exact weights in as bits become fewer, in every precision.",
    )
    .done(),
];
const WEIGHT_PARAMS: &[Key] = &[
    key("start_bits", POSITIVE_COUNT, "null", "Bits at the start, at most 16.").required().done(),
    key("target_bits", POSITIVE_COUNT, "null", "Bits at the end.").required().done(),
    key(
        "quantization_period",
        POSITIVE_COUNT,
        "1",
        "The step that takes the first bit; each further takes twice as long.",
    )
    .done(),
];

const ACTIVATION_SHARED: &[Key] = &[
    ENABLED,
    QUANTIZATION_TYPE,
    key(
        "range_calibration",
        choice(&["dynamic", "static"]),
        "\"dynamic\"",
        "Whether ranges are those of each token; only `dynamic` runs.",
    )
    .done(),
    OFFSET,
];
const ACTIVATION_PARAMS: &[Key] = &[key("bits", POSITIVE_COUNT, "null", "Bits, 4 or 8.").required().done()];

/// Why keys of a method that does not run mean nothing.
const SNIP: &str = "`snip_momentum`, which does not run, has the only use for it";

const SPARSE_SHARED: &[Key] = &[
    ENABLED,
    key(
        "method",
        choice(&["l1", "topk", "snip_momentum"]),
        "\"l1\"",
        "How weights are ranked; only `l1` runs.",
    )
    .done(),
    OFFSET,
    key("block_pattern", Kind::Text, "\"4x1\"", "Block shape for `snip_momentum`.").refused(SNIP),
    key("dense_ratio", OPEN_FRACTION, "0.1", "Share of weights kept by `snip_momentum`.").refused(SNIP),
    key("schedule_offset_stride", POSITIVE_COUNT, "1", "Steps between prunings of `snip_momentum`.")
        .refused(SNIP),
    key("excluded_modules", TEXT_LIST, "[]", "Modules that `snip_momentum` leaves alone.").refused(SNIP),
    key(
        "schedule_offset_end",
        COUNT,
        "null",
        "Last pruning step of `snip_momentum`; `null` means the first.",
    )
    .inert("what was pruned once stays so, in DeepSpeed too"),
];
const ROW_SHARED: &[Key] = &[
    ENABLED,
    key("method", choice(&["l1", "topk"]), "\"l1\"", "How rows are ranked; only `l1` runs.").done(),
    OFFSET,
];
const HEAD_SHARED: &[Key] = &[
    ENABLED,
    key("method", choice(&["topk", "l1"]), "\"topk\"", "How heads are ranked; only `l1` runs.").done(),
    OFFSET,
    key("num_heads", POSITIVE_COUNT, "null", "Heads per layer.").done(),
];
const RATIO_PARAMS: &[Key] = &[key("dense_ratio", FRACTION, "null", "Share that is kept.").required().done()];

const LAYER_REDUCTION: &[Key] = &[
    key(
        "enabled",
        Kind::Bool,
        "false",
        "Start a student of fewer layers from the model that a recipe names (`model.path`); for `ferrospeed train`.",
    )
    .done(),
    key("keep_number_layer", POSITIVE_COUNT, "null", "Layers of the student.").done(),
    key("module_name_prefix", Kind::Text, "null", "Module that holds the layers.")
        .inert("models know where their layers are"),
    key("teacher_layer", COUNT_LIST, "null", "The teacher's layer, from 0, that starts each layer of the student.")
        .done(),
    key("other_module_name", TEXT_LIST, "null", "Other modules that are copied.").inert("all others are"),
];

macro_rules! technique {
    ($shared:expr, $params:expr, $related:expr) => {
        Kind::Section(
            &[
                key("shared_parameters", Kind::Section($shared, Form::Plain), "{}", "What all groups share.")
                    .done(),
                key(
                    "different_groups",
                    Kind::Named(&Kind::Section(
                        &[
                            key(
                                "params",
                                Kind::Section($params, Form::Plain),
                                "null",
                                "The group's parameters.",
                            )
                            .required()
                            .done(),
                            MODULES,
                            $related,
                        ],
                        Form::Plain,
                    )),
                    "{}",
                    "Groups of modules, under names of your own.",
                )
                .done(),
            ],
            Form::Plain,
        )
    };
}

/// `compression_training`.
pub(super) const COMPRESSION: &[Key] = &[
    key(
        "weight_quantization",
        technique!(WEIGHT_SHARED, WEIGHT_PARAMS, NOT_RELATED),
        "{}",
        "Weights that kernels see in few bits, fewer and fewer.",
    )
    .done(),
    key(
        "activation_quantization",
        technique!(ACTIVATION_SHARED, ACTIVATION_PARAMS, NOT_RELATED),
        "{}",
        "Inputs of linear layers that are seen in few bits.",
    )
    .done(),
    key(
        "sparse_pruning",
        technique!(SPARSE_SHARED, RATIO_PARAMS, NOT_RELATED),
        "{}",
        "Single weights that are seen as zeros.",
    )
    .done(),
    key(
        "row_pruning",
        technique!(ROW_SHARED, RATIO_PARAMS, RELATED),
        "{}",
        "Outputs of linear layers that are seen as zeros.",
    )
    .done(),
    key(
        "head_pruning",
        technique!(HEAD_SHARED, RATIO_PARAMS, RELATED),
        "{}",
        "Attention heads that are seen as zeros, at the input of the layer behind attention.",
    )
    .done(),
    key(
        "channel_pruning",
        technique!(ROW_SHARED, RATIO_PARAMS, RELATED),
        "{}",
        "Channels of convolutions that are seen as zeros.",
    )
    .done(),
    key(
        "layer_reduction",
        Kind::Section(LAYER_REDUCTION, Form::Plain),
        "{}",
        "Start a shallow student from a teacher.",
    )
    .done(),
];

//! `compression_training`.

use super::*;

const ENABLED: Key = key("enabled", Kind::Bool, "false", "Turn it on.");
const OFFSET: Key = key("schedule_offset", COUNT, "1000", "Optimizer step at which it starts.");
const QUANTIZATION_TYPE: Key = key(
    "quantization_type",
    choice(&["symmetric", "asymmetric"]),
    "\"symmetric\"",
    "Whether zero lies in the middle.",
);
const MODULES: Key =
    key("modules", Kind::Either(&[Kind::Text, TEXT_LIST]), "\"*\"", "Patterns of module names.");
const RELATED: Key = key(
    "related_modules",
    Kind::List { item: &TEXT_LIST, length: None },
    "null",
    "Modules whose columns go when these rows go.",
);

const MIXED: &[Key] =
    &[ENABLED, key("quantize_change_ratio", FRACTION, "0.001", "Change of the mixing ratio per step.")];

const WEIGHT_SHARED: &[Key] = &[
    ENABLED,
    key("quantizer_kernel", Kind::Bool, "false", "Use the fused kernel."),
    key("schedule_offset", COUNT, "0", "Optimizer step at which it starts."),
    key("quantize_groups", POSITIVE_COUNT, "1", "Groups with a scale of their own."),
    key("quantize_verbose", Kind::Bool, "false", "Log each change of precision."),
    QUANTIZATION_TYPE,
    key(
        "quantize_weight_in_forward",
        Kind::Bool,
        "false",
        "Quantise in the forward pass instead of after the step.",
    ),
    key("rounding", choice(&["nearest", "stochastic"]), "\"nearest\"", "How values are rounded."),
    key("fp16_mixed_quantize", Kind::Section(MIXED, Form::Plain), "{}", "Mix exact and quantised weights."),
];
const WEIGHT_PARAMS: &[Key] = &[
    key("start_bits", POSITIVE_COUNT, "null", "Bits at the start.").required(),
    key("target_bits", POSITIVE_COUNT, "null", "Bits at the end.").required(),
    key("quantization_period", POSITIVE_COUNT, "1", "Steps per bit."),
];

const ACTIVATION_SHARED: &[Key] = &[
    ENABLED,
    QUANTIZATION_TYPE,
    key(
        "range_calibration",
        choice(&["dynamic", "static"]),
        "\"dynamic\"",
        "Whether ranges follow each batch.",
    ),
    OFFSET,
];
const ACTIVATION_PARAMS: &[Key] = &[key("bits", POSITIVE_COUNT, "null", "Bits.").required()];

const SPARSE_SHARED: &[Key] = &[
    ENABLED,
    key("method", choice(&["l1", "topk", "snip_momentum"]), "\"l1\"", "How weights are ranked."),
    OFFSET,
    key("block_pattern", Kind::Text, "\"4x1\"", "Block shape for `snip_momentum`."),
    key("dense_ratio", OPEN_FRACTION, "0.1", "Share of weights kept by `snip_momentum`."),
    key("schedule_offset_stride", POSITIVE_COUNT, "1", "Steps between prunings of `snip_momentum`."),
    key("excluded_modules", TEXT_LIST, "[]", "Modules that `snip_momentum` leaves alone."),
    key(
        "schedule_offset_end",
        COUNT,
        "null",
        "Last pruning step of `snip_momentum`; `null` means the first.",
    ),
];
const ROW_SHARED: &[Key] =
    &[ENABLED, key("method", choice(&["l1", "topk"]), "\"l1\"", "How rows are ranked."), OFFSET];
const HEAD_SHARED: &[Key] = &[
    ENABLED,
    key("method", choice(&["topk", "l1"]), "\"topk\"", "How heads are ranked."),
    OFFSET,
    key("num_heads", POSITIVE_COUNT, "null", "Heads per layer."),
];
const RATIO_PARAMS: &[Key] = &[key("dense_ratio", FRACTION, "null", "Share that is kept.").required()];

const LAYER_REDUCTION: &[Key] = &[
    ENABLED,
    key("keep_number_layer", POSITIVE_COUNT, "null", "Layers of the student."),
    key("module_name_prefix", Kind::Text, "null", "Module that holds the layers."),
    key("teacher_layer", COUNT_LIST, "null", "Teacher layer that starts each student layer."),
    key("other_module_name", TEXT_LIST, "null", "Other modules that are copied."),
];

macro_rules! technique {
    ($shared:expr, $params:expr) => {
        Kind::Section(
            &[
                key("shared_parameters", Kind::Section($shared, Form::Plain), "{}", "What all groups share."),
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
                            .required(),
                            MODULES,
                            RELATED,
                        ],
                        Form::Plain,
                    )),
                    "{}",
                    "Groups of modules, under names of your own.",
                ),
            ],
            Form::Plain,
        )
    };
}

/// `compression_training`.
pub(super) const COMPRESSION: &[Key] = &[
    key(
        "weight_quantization",
        technique!(WEIGHT_SHARED, WEIGHT_PARAMS),
        "{}",
        "Quantisation-aware training of weights.",
    ),
    key(
        "activation_quantization",
        technique!(ACTIVATION_SHARED, ACTIVATION_PARAMS),
        "{}",
        "Quantisation-aware training of activations.",
    ),
    key("sparse_pruning", technique!(SPARSE_SHARED, RATIO_PARAMS), "{}", "Prune single weights."),
    key("row_pruning", technique!(ROW_SHARED, RATIO_PARAMS), "{}", "Prune rows of linear layers."),
    key("head_pruning", technique!(HEAD_SHARED, RATIO_PARAMS), "{}", "Prune attention heads."),
    key("channel_pruning", technique!(ROW_SHARED, RATIO_PARAMS), "{}", "Prune convolution channels."),
    key(
        "layer_reduction",
        Kind::Section(LAYER_REDUCTION, Form::Plain),
        "{}",
        "Start a shallow student from a teacher.",
    ),
];

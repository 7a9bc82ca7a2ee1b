//! Mixed precision.

use super::*;

/// `fp16`.
pub(super) const FP16: &[Key] = &[
    key("enabled", Kind::Bool, "false", "Train in half precision.").done(),
    key("auto_cast", Kind::Bool, "false", "Cast floating-point inputs of the model to half precision.").inert("models make their inputs in the type of their weights"),
    key("loss_scale", NON_NEGATIVE, "0", "Constant loss scale; 0 adapts it.").done(),
    key(
        "initial_scale_power",
        Kind::Int { min: 0, max: 126 },
        "16",
        "The adaptive scale starts at two to this power.",
    )
    .done(),
    key("loss_scale_window", POSITIVE_COUNT, "1000", "Steps without overflow before the scale doubles.")
        .done(),
    key("hysteresis", POSITIVE_COUNT, "2", "Overflows before the scale halves.").done(),
    key(
        "consecutive_hysteresis",
        Kind::Bool,
        "false",
        "Refill the hysteresis at every step without overflow.",
    )
    .done(),
    key("min_loss_scale", POSITIVE, "1", "The scale never falls below this.").done(),
    key(
        "fp16_master_weights_and_grads",
        Kind::Bool,
        "false",
        "Keep master weights and gradients in half precision (stage 2 with CPU offload).",
    ).refused("an update is often less than half precision can tell from nothing: masters and their states stay in f32"),
];

/// `bf16`.
pub(super) const BF16: &[Key] = &[
    key("enabled", Kind::Bool, "false", "Train in bfloat16.").done(),
    key(
        "immediate_grad_update",
        Kind::Bool,
        "false",
        "Add each gradient to the fp32 buffer as it is produced.",
    ).always("true", "a gradient goes where it is summed up as soon as it is produced"),
    key("check_grad_overflow", Kind::Bool, "true", "Skip a step whose gradient is not a number.").always("true", "such a step is always skipped"),
    key(
        "bf16_master_weights_and_grads",
        Kind::Bool,
        "false",
        "Keep master weights and gradients in bfloat16.",
    ).refused("an update is often less than bf16 can tell from nothing: masters stay in f32; offload_optimizer or stage 3 save their memory"),
    key("bf16_optimizer_states", Kind::Bool, "false", "Keep optimizer states in bfloat16.").refused("states stay in f32; offload_optimizer or stage 3 save their memory"),
];

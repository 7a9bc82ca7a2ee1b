//! `scheduler`: the parameters depend on the type.

use super::*;

const RATE_OR_RATES: Kind = Kind::Either(&[NON_NEGATIVE, Kind::List { item: &NON_NEGATIVE, length: None }]);
const LAST_ITERATION: Key = key(
    "last_batch_iteration",
    Kind::Int { min: -1, max: i64::MAX },
    "-1",
    "Where the schedule stands at the start.",
)
.done();
const WARMUP_STEPS: Key =
    key("warmup_num_steps", COUNT, "1000", "Steps of warm-up; at least 2 are taken.").done();
const WARMUP_TYPE: Key =
    key("warmup_type", choice(&["log", "linear"]), "\"log\"", "The shape of the warm-up.").done();
const WARMUP_MIN: Key =
    key("warmup_min_lr", RATE_OR_RATES, "0.0", "Learning rate at the start of the warm-up.").done();
const WARMUP_MAX: Key = key("warmup_max_lr", RATE_OR_RATES, "0.001", "Learning rate at its end.").done();
const TOTAL_STEPS: Key =
    key("total_num_steps", POSITIVE_COUNT, "null", "Steps of the whole schedule.").required().done();

const LR_RANGE_TEST: &[Key] = &[
    key("lr_range_test_min_lr", RATE_OR_RATES, "0.001", "Learning rate at the start.").done(),
    key("lr_range_test_step_size", POSITIVE_COUNT, "2000", "Steps per interval.").done(),
    key("lr_range_test_step_rate", NON_NEGATIVE, "1.0", "Growth per interval.").done(),
    key("lr_range_test_staircase", Kind::Bool, "false", "Grow in stairs instead of steadily.").done(),
    LAST_ITERATION,
];

const ONE_CYCLE: &[Key] = &[
    key("cycle_min_lr", NON_NEGATIVE, "null", "Learning rate at both ends of the cycle.").required().done(),
    key("cycle_max_lr", NON_NEGATIVE, "null", "Learning rate at its middle.").required().done(),
    key("decay_lr_rate", NON_NEGATIVE, "0.0", "Decay of the learning rate after the cycle.").done(),
    key("cycle_first_step_size", POSITIVE_COUNT, "2000", "Steps of the rising half.").done(),
    key("cycle_second_step_size", POSITIVE_COUNT, "null", "Steps of the falling half; `null` means as many.")
        .done(),
    key("cycle_first_stair_count", COUNT, "0", "Stairs in the rising half.")
        .inert("DeepSpeed ignores it too"),
    key("cycle_second_stair_count", COUNT, "null", "Stairs in the falling half.")
        .inert("DeepSpeed ignores it too"),
    key("decay_step_size", COUNT, "0", "Steps per decay interval.").done(),
    key("cycle_momentum", Kind::Bool, "true", "Cycle the momentum against the learning rate.").done(),
    key("cycle_min_mom", BETA, "0.8", "Momentum at the middle of the cycle.").done(),
    key("cycle_max_mom", BETA, "0.9", "Momentum at its ends.").done(),
    key("decay_mom_rate", NON_NEGATIVE, "0.0", "Growth of the momentum after the cycle.").done(),
    LAST_ITERATION,
];

const WARMUP_LR: &[Key] = &[WARMUP_MIN, WARMUP_MAX, WARMUP_STEPS, WARMUP_TYPE, LAST_ITERATION];
const WARMUP_DECAY_LR: &[Key] =
    &[TOTAL_STEPS, WARMUP_MIN, WARMUP_MAX, WARMUP_STEPS, WARMUP_TYPE, LAST_ITERATION];
const WARMUP_COSINE_LR: &[Key] = &[
    TOTAL_STEPS,
    key("warmup_min_ratio", NON_NEGATIVE, "0.0", "Start of the warm-up, as a share of the learning rate.")
        .done(),
    WARMUP_STEPS,
    key("cos_min_ratio", NON_NEGATIVE, "0.0001", "End of the decay, as a share of the learning rate.").done(),
    WARMUP_TYPE,
    LAST_ITERATION,
];

const fn done(tag: &'static str, keys: &'static [Key]) -> Variant {
    Variant { tag, keys: Some(keys), status: Status::Implemented }
}

const fn framework(tag: &'static str) -> Variant {
    Variant { tag, keys: None, status: Status::NotYet }
}

/// Every schedule by its name.
pub(super) const SCHEDULES: &[Variant] = &[
    done("LRRangeTest", LR_RANGE_TEST),
    done("OneCycle", ONE_CYCLE),
    done("WarmupLR", WARMUP_LR),
    done("WarmupDecayLR", WARMUP_DECAY_LR),
    done("WarmupCosineLR", WARMUP_COSINE_LR),
    framework("StepLR"),
    framework("MultiStepLR"),
    framework("ConstantLR"),
    framework("LinearLR"),
    framework("ExponentialLR"),
    framework("PolynomialLR"),
    framework("CosineAnnealingLR"),
    framework("CosineAnnealingWarmRestarts"),
    framework("CyclicLR"),
    framework("OneCycleLR"),
    framework("ReduceLROnPlateau"),
];

/// `scheduler`.
pub(super) const SCHEDULER: &[Key] = &[
    key("type", Kind::Text, "null", "Which schedule; upper and lower case do not matter.").done(),
    key("params", Kind::Variants { tag: Tag::Beside("type"), variants: SCHEDULES }, "{}", "Its parameters.")
        .nullable()
        .done(),
];

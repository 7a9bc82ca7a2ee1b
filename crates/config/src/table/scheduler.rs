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

const WARMUP_LR: &[Key] = &[
    WARMUP_MIN,
    key("warmup_max_lr", RATE_OR_RATES, "0.001", "Learning rate at its end; `null` means the optimizer's.")
        .nullable()
        .done()
        .since("0.17.2", "null"),
    WARMUP_STEPS,
    WARMUP_TYPE,
    LAST_ITERATION,
];
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

const LAST_EPOCH: Key =
    key("last_epoch", Kind::Int { min: -1, max: -1 }, "-1", "Where the schedule stands at the start.")
        .always("-1", "a checkpoint says where a schedule stands");
const VERBOSE: Key = key("verbose", Kind::Either(&[Kind::Bool, Kind::Text]), "false", "Print each change.")
    .always("true", "the log has every rate");
const GAMMA: Key = key("gamma", NON_NEGATIVE, "0.1", "What is left of the rate after a fall.").done();
const TOTAL_ITERS: Key = key("total_iters", POSITIVE_COUNT, "5", "Steps that it takes.").done();
const ETA_MIN: Key = key("eta_min", NON_NEGATIVE, "0.0", "The lowest rate.").done();
const CYCLE_MOMENTUM: Key =
    key("cycle_momentum", Kind::Bool, "true", "Cycle the momentum against the rate.").done();
const MOMENTA: Kind = Kind::Either(&[BETA, Kind::List { item: &BETA, length: None }]);
const MAX_LR: Key = key("max_lr", RATE_OR_RATES, "null", "The highest rate.").required().done();

const STEP_LR: &[Key] = &[
    key("step_size", POSITIVE_COUNT, "null", "Steps from one fall to the next.").required().done(),
    GAMMA,
    LAST_EPOCH,
    VERBOSE,
];
const MULTI_STEP_LR: &[Key] = &[
    key("milestones", COUNT_LIST, "null", "The steps at which it falls.").required().done(),
    GAMMA,
    LAST_EPOCH,
    VERBOSE,
];
const CONSTANT_LR: &[Key] = &[
    key("factor", FRACTION, "0.3333333333333333", "Multiplies the rate at first.").done(),
    TOTAL_ITERS,
    LAST_EPOCH,
    VERBOSE,
];
const LINEAR_LR: &[Key] = &[
    key("start_factor", FRACTION, "0.3333333333333333", "The factor at the start.").done(),
    key("end_factor", FRACTION, "1.0", "The factor at the end.").done(),
    TOTAL_ITERS,
    LAST_EPOCH,
    VERBOSE,
];
const EXPONENTIAL_LR: &[Key] = &[
    key("gamma", NON_NEGATIVE, "null", "What is left of the rate after a step.").required().done(),
    LAST_EPOCH,
    VERBOSE,
];
const POLYNOMIAL_LR: &[Key] =
    &[TOTAL_ITERS, key("power", NON_NEGATIVE, "1.0", "The power of the line.").done(), LAST_EPOCH, VERBOSE];
const COSINE_ANNEALING_LR: &[Key] = &[
    key("T_max", POSITIVE_COUNT, "null", "Steps from the highest rate to the lowest.").required().done(),
    ETA_MIN,
    LAST_EPOCH,
    VERBOSE,
];
const WARM_RESTARTS: &[Key] = &[
    key("T_0", POSITIVE_COUNT, "null", "Steps until the first restart.").required().done(),
    key("T_mult", POSITIVE_COUNT, "1", "How much longer each run is than the one before.").done(),
    ETA_MIN,
    LAST_EPOCH,
    VERBOSE,
];
const CYCLIC_LR: &[Key] = &[
    key("base_lr", RATE_OR_RATES, "null", "The lower rate.").required().done(),
    MAX_LR,
    key("step_size_up", POSITIVE_COUNT, "2000", "Steps up.").done(),
    key("step_size_down", POSITIVE_COUNT, "null", "Steps down; `null` means as many.").done(),
    key(
        "mode",
        choice(&["triangular", "triangular2", "exp_range"]),
        "\"triangular\"",
        "How the height of cycles changes.",
    )
    .done(),
    key("gamma", NON_NEGATIVE, "1.0", "What is left of the height after a step, with `exp_range`.").done(),
    key(
        "scale_mode",
        choice(&["cycle", "iterations"]),
        "\"cycle\"",
        "What a function of one's own is given.",
    )
    .inert("a file has no function of one's own"),
    CYCLE_MOMENTUM,
    key("base_momentum", MOMENTA, "0.8", "The lower momentum.").done(),
    key("max_momentum", MOMENTA, "0.9", "The upper momentum.").done(),
    LAST_EPOCH,
    VERBOSE,
];
const ONE_CYCLE_LR: &[Key] = &[
    MAX_LR,
    key("total_steps", POSITIVE_COUNT, "null", "Steps in all, or `epochs` and `steps_per_epoch`.").done(),
    key("epochs", POSITIVE_COUNT, "null", "Epochs.").done(),
    key("steps_per_epoch", POSITIVE_COUNT, "null", "Steps of each.").done(),
    key("pct_start", FRACTION, "0.3", "The share that rises.").done(),
    key("anneal_strategy", choice(&["cos", "linear"]), "\"cos\"", "The shape.").done(),
    CYCLE_MOMENTUM,
    key("base_momentum", MOMENTA, "0.85", "The lower momentum.").done(),
    key("max_momentum", MOMENTA, "0.95", "The upper momentum.").done(),
    key("div_factor", POSITIVE, "25.0", "The highest rate over the first.").done(),
    key("final_div_factor", POSITIVE, "10000.0", "The first rate over the last.").done(),
    key("three_phase", Kind::Bool, "false", "Fall to the first rate before falling to the last.").done(),
    LAST_EPOCH,
    VERBOSE,
];
const PLATEAU: &[Key] = &[
    key("mode", choice(&["min", "max"]), "\"min\"", "Whether less of the metric is better, or more.").done(),
    key("factor", BETA, "0.1", "What is left of the rate after a fall.").done(),
    key("patience", COUNT, "10", "Steps without progress that are suffered.").done(),
    key("threshold", NON_NEGATIVE, "0.0001", "What counts as progress.").done(),
    key("threshold_mode", choice(&["rel", "abs"]), "\"rel\"", "Whether that is a share or a difference.")
        .done(),
    key("cooldown", COUNT, "0", "Steps after a fall that do not count.").done(),
    key("min_lr", RATE_OR_RATES, "0.0", "The lowest rate.").done(),
    key("eps", NON_NEGATIVE, "1e-8", "A fall of less is none.").done(),
    VERBOSE,
];

const fn done(tag: &'static str, keys: &'static [Key]) -> Variant {
    Variant { tag, keys: Some(keys), status: Status::Implemented }
}

/// Every schedule by its name.
pub(super) const SCHEDULES: &[Variant] = &[
    done("LRRangeTest", LR_RANGE_TEST),
    done("OneCycle", ONE_CYCLE),
    done("WarmupLR", WARMUP_LR),
    done("WarmupDecayLR", WARMUP_DECAY_LR),
    done("WarmupCosineLR", WARMUP_COSINE_LR),
    done("StepLR", STEP_LR),
    done("MultiStepLR", MULTI_STEP_LR),
    done("ConstantLR", CONSTANT_LR),
    done("LinearLR", LINEAR_LR),
    done("ExponentialLR", EXPONENTIAL_LR),
    done("PolynomialLR", POLYNOMIAL_LR),
    done("CosineAnnealingLR", COSINE_ANNEALING_LR),
    done("CosineAnnealingWarmRestarts", WARM_RESTARTS),
    done("CyclicLR", CYCLIC_LR),
    done("OneCycleLR", ONE_CYCLE_LR),
    done("ReduceLROnPlateau", PLATEAU),
];

/// `scheduler`.
pub(super) const SCHEDULER: &[Key] = &[
    key("type", Kind::Text, "null", "Which schedule; upper and lower case do not matter.").done(),
    key("params", Kind::Variants { tag: Tag::Beside("type"), variants: SCHEDULES }, "{}", "Its parameters.")
        .nullable()
        .done(),
];

//! `optimizer`: the parameters depend on the type.

use super::*;

const BETAS: Kind = Kind::List { item: &BETA, length: Some(2) };

const LEARNING_RATE: Key = key("lr", NON_NEGATIVE, "0.001", "Learning rate.").done();
const ADAM_BETAS: Key = key("betas", BETAS, "[0.9, 0.999]", "Decay of the two moments.").done();
const EPS: Key = key("eps", NON_NEGATIVE, "1e-8", "Added to the denominator.").done();
const WEIGHT_DECAY: Key = key("weight_decay", NON_NEGATIVE, "0.0", "Weight decay.").done();
const BIAS_CORRECTION: Key =
    key("bias_correction", Kind::Bool, "true", "Correct the moments for their start at zero.").done();
const AMSGRAD: Key =
    key("amsgrad", Kind::Bool, "false", "Divide by the largest second moment so far (AMSGrad).").done();
const MAXIMIZE: Key = key("maximize", Kind::Bool, "false", "Climb instead of descend.").done();
const SAME: &str = "there is one implementation here, with the same result";
const FOREACH: Key = key("foreach", Kind::Bool, "null", "Update many tensors at once.")
    .always("true", "weights lie end to end, and are updated so");
const FUSED: Key = key("fused", Kind::Bool, "null", "Update in one kernel.")
    .always("true", "weights, states and the 16-bit copy are updated in one pass");
const CAPTURABLE: Key = key("capturable", Kind::Bool, "false", "Run within a device graph.").inert(SAME);
const DIFFERENTIABLE: Key = key("differentiable", Kind::Bool, "false", "Differentiate through the update.")
    .inert("updates are not recorded");
const DECOUPLED: Key = key("decoupled_weight_decay", Kind::Bool, "false", "Decay weights directly.").done();
/// What every optimizer of the framework has.
macro_rules! of_the_framework {
    ($($key:expr),* $(,)?) => { &[$($key,)* WEIGHT_DECAY, MAXIMIZE, FOREACH, CAPTURABLE, DIFFERENTIABLE] };
}

const ADAM: &[Key] = &[
    LEARNING_RATE,
    ADAM_BETAS,
    EPS,
    WEIGHT_DECAY,
    BIAS_CORRECTION,
    key("adam_w_mode", Kind::Bool, "true", "Decay weights directly (AdamW) instead of through the gradient.")
        .done(),
    key("torch_adam", Kind::Bool, "false", "Use the framework's own Adam.").inert("there is one Adam here"),
    AMSGRAD,
    MAXIMIZE,
    FOREACH,
    FUSED,
    CAPTURABLE,
    DIFFERENTIABLE,
];

const SGD: &[Key] = &[
    LEARNING_RATE,
    key("momentum", NON_NEGATIVE, "0.0", "Momentum.").done(),
    key("dampening", NON_NEGATIVE, "0.0", "Dampening of the momentum.").done(),
    WEIGHT_DECAY,
    key("nesterov", Kind::Bool, "false", "Nesterov momentum.").done(),
    MAXIMIZE,
    FOREACH,
    FUSED,
    DIFFERENTIABLE,
];

const ADAGRAD: &[Key] = &[
    key("lr", NON_NEGATIVE, "0.01", "Learning rate.").done(),
    key("eps", NON_NEGATIVE, "1e-10", "Added to the denominator.").done(),
    WEIGHT_DECAY,
    key("lr_decay", NON_NEGATIVE, "0.0", "Decay of the learning rate.").done(),
    key("initial_accumulator_value", NON_NEGATIVE, "0.0", "What the sum of squares starts with.").done(),
    MAXIMIZE,
    FOREACH,
    FUSED,
    DIFFERENTIABLE,
];

const LION: &[Key] = &[LEARNING_RATE, ADAM_BETAS, WEIGHT_DECAY];

const MAX_COEFF: Key = key("max_coeff", POSITIVE, "10.0", "Largest trust ratio.").done();
const MIN_COEFF: Key = key("min_coeff", POSITIVE, "0.01", "Smallest trust ratio.").done();
const EPS_INSIDE_SQRT: Key = key("eps_inside_sqrt", Kind::Bool, "false", "Add eps under the root.").done();

const LAMB: &[Key] = &[
    LEARNING_RATE,
    ADAM_BETAS,
    EPS,
    EPS_INSIDE_SQRT,
    WEIGHT_DECAY,
    BIAS_CORRECTION,
    AMSGRAD,
    MAX_COEFF,
    MIN_COEFF,
];

const MUON: &[Key] = &[
    key("lr", NON_NEGATIVE, "null", "Learning rate, where the next two are not given.").done(),
    key("muon_lr", NON_NEGATIVE, "null", "Learning rate of hidden matrices; `null` is `lr`, or else 0.02.")
        .done(),
    key("adam_lr", NON_NEGATIVE, "null", "Learning rate of all else; `null` is `lr`, or else 0.0003.").done(),
    key("momentum", BETA, "0.95", "Decay of the matrices' momentum, which looks one step ahead (Nesterov).")
        .done(),
    WEIGHT_DECAY,
    key("betas", BETAS, "[0.9, 0.95]", "Decay of the two moments of all else.").done(),
    key("eps", NON_NEGATIVE, "1e-10", "Added to their denominator.").done(),
    key(
        "adam_w_mode",
        Kind::Bool,
        "true",
        "Decay what is no matrix directly (AdamW) instead of through the gradient.",
    )
    .done(),
    key("ns_method", choice(&["gram", "standard"]), "\"gram\"", "In which order DeepSpeed multiplies.")
        .inert("both are one iteration; here it runs in f32, in the order of the paper"),
    key("per_head_muon", Kind::Bool, "false", "Make the matrices of each head orthogonal by themselves.")
        .done(),
    key("torch_adam", Kind::Bool, "false", "Use the framework's own Adam.").inert("there is one Adam here"),
];

const SCHEDULE_FREE: &[Key] = &[
    key("lr", NON_NEGATIVE, "0.0025", "Learning rate; there is no schedule.").done(),
    key(
        "betas",
        Kind::List { item: &BETA, length: Some(2) },
        "[0.9, 0.999]",
        "Where training lies between the mean of all steps (1) and the newest one (0), and the decay of the second moment.",
    )
    .done(),
    EPS,
    WEIGHT_DECAY,
    key("warmup_steps", COUNT, "0", "Steps over which the rate grows.").done(),
];

const FREEZE_STEP: Key = key(
    "freeze_step",
    POSITIVE_COUNT,
    "100000",
    "The step of plain training after which compression starts.",
)
.done();
const CUDA_AWARE: Key = key("cuda_aware", Kind::Bool, "false", "The MPI library reads device memory.")
    .inert("these optimizers run in host memory");
const BACKEND: Key = key(
    "comm_backend_name",
    choice(&["nccl", "mpi", "hccl"]),
    "\"nccl\"",
    "What carries the compressed momentum.",
)
.inert("what connects the ranks carries it");
const NEVER_CORRECTED: Key =
    key("bias_correction", Kind::Bool, "true", "Correct the moments for their start at zero.")
        .always("false", "1-bit optimizers correct nothing, in DeepSpeed either");
const NEVER_INSIDE: Key = key("eps_inside_sqrt", Kind::Bool, "false", "Add eps under the root.")
    .always("false", "1-bit optimizers add it after the root, in DeepSpeed too");

const ONE_BIT_ADAM: &[Key] = &[
    LEARNING_RATE,
    ADAM_BETAS,
    EPS,
    NEVER_INSIDE,
    WEIGHT_DECAY,
    NEVER_CORRECTED,
    AMSGRAD,
    FREEZE_STEP,
    CUDA_AWARE,
    BACKEND,
];

const ZERO_ONE_ADAM: &[Key] = &[
    LEARNING_RATE,
    ADAM_BETAS,
    EPS,
    NEVER_INSIDE,
    WEIGHT_DECAY,
    NEVER_CORRECTED,
    AMSGRAD,
    key("var_freeze_step", POSITIVE_COUNT, "100000", "Step after which the second moment stays as it is.")
        .done(),
    key("var_update_scaler", POSITIVE_COUNT, "16", "Updates before the second moment's interval doubles.")
        .done(),
    key("local_step_scaler", POSITIVE_COUNT, "32678", "Steps before the local-step interval doubles.").done(),
    key("local_step_clipper", POSITIVE_COUNT, "16", "Longest local-step interval.").done(),
    CUDA_AWARE,
    BACKEND,
];

const ONE_BIT_LAMB: &[Key] = &[
    LEARNING_RATE,
    ADAM_BETAS,
    EPS,
    NEVER_INSIDE,
    WEIGHT_DECAY,
    NEVER_CORRECTED,
    AMSGRAD,
    FREEZE_STEP,
    MAX_COEFF,
    MIN_COEFF,
    key("coeff_beta", BETA, "0.9", "Decay of the averaged trust ratio.").done(),
    key("factor_max", POSITIVE, "4.0", "Largest correction of the frozen trust ratio.").done(),
    key("factor_min", POSITIVE, "0.5", "Smallest correction of the frozen trust ratio.").done(),
    key("factor_threshold", NON_NEGATIVE, "0.1", "Largest change of the correction per step.").done(),
    CUDA_AWARE,
    BACKEND,
];

const RMSPROP: &[Key] = of_the_framework![
    key("lr", NON_NEGATIVE, "0.01", "Learning rate.").done(),
    key("alpha", BETA, "0.99", "Decay of the squares.").done(),
    EPS,
    key("momentum", NON_NEGATIVE, "0.0", "Momentum.").done(),
    key("centered", Kind::Bool, "false", "Divide by the deviation instead of the root of squares.").done(),
];
const ADADELTA: &[Key] = of_the_framework![
    key("lr", NON_NEGATIVE, "1.0", "Learning rate.").done(),
    key("rho", FRACTION, "0.9", "Decay of both averages.").done(),
    key("eps", NON_NEGATIVE, "1e-6", "Added under the roots.").done(),
];
const RATE_OF_ADAMAX: Key = key("lr", NON_NEGATIVE, "0.002", "Learning rate.").done();
const ADAMAX: &[Key] = of_the_framework![RATE_OF_ADAMAX, ADAM_BETAS, EPS];
const NADAM: &[Key] = of_the_framework![
    RATE_OF_ADAMAX,
    ADAM_BETAS,
    EPS,
    key("momentum_decay", NON_NEGATIVE, "0.004", "How the momentum grows.").done(),
    DECOUPLED,
];
const RADAM: &[Key] = of_the_framework![LEARNING_RATE, ADAM_BETAS, EPS, DECOUPLED];
const ASGD: &[Key] = of_the_framework![
    key("lr", NON_NEGATIVE, "0.01", "Learning rate.").done(),
    key("lambd", NON_NEGATIVE, "0.0001", "Decay of weights.").done(),
    key("alpha", NON_NEGATIVE, "0.75", "Power of the rate's decay.").done(),
    key("t0", NON_NEGATIVE, "1000000.0", "The step at which averaging starts.").done(),
];
const RPROP: &[Key] = &[
    key("lr", NON_NEGATIVE, "0.01", "The first step's size.").done(),
    key(
        "etas",
        Kind::List { item: &POSITIVE, length: Some(2) },
        "[0.5, 1.2]",
        "Factors of a step that shrinks and of one that grows.",
    )
    .done(),
    key(
        "step_sizes",
        Kind::List { item: &NON_NEGATIVE, length: Some(2) },
        "[1e-6, 50]",
        "Smallest and largest step.",
    )
    .done(),
    MAXIMIZE,
    FOREACH,
    CAPTURABLE,
    DIFFERENTIABLE,
];

const fn done(tag: &'static str, keys: &'static [Key]) -> Variant {
    Variant { tag, keys: Some(keys), status: Status::Implemented }
}

const fn not_yet(tag: &'static str, keys: Option<&'static [Key]>) -> Variant {
    Variant { tag, keys, status: Status::NotYet }
}

/// Every optimizer by its canonical name. Those without keys take whatever the framework's class takes.
pub(super) const OPTIMIZERS: &[Variant] = &[
    done("Adam", ADAM),
    done("AdamW", ADAM),
    done("SGD", SGD),
    done("Adagrad", ADAGRAD),
    done("Lion", LION),
    done("Lamb", LAMB),
    done("OneBitAdam", ONE_BIT_ADAM),
    done("ZeroOneAdam", ZERO_ONE_ADAM),
    done("OneBitLamb", ONE_BIT_LAMB),
    done("Muon", MUON),
    done("ScheduleFreeAdamW", SCHEDULE_FREE),
    not_yet("MuAdam", None),
    not_yet("MuAdamW", None),
    not_yet("MuSGD", None),
    done("RMSprop", RMSPROP),
    done("Adadelta", ADADELTA),
    done("Adamax", ADAMAX),
    done("NAdam", NADAM),
    done("RAdam", RADAM),
    done("ASGD", ASGD),
    done("Rprop", RPROP),
];

/// `optimizer`.
pub(super) const OPTIMIZER: &[Key] = &[
    key("type", Kind::Text, "null", "Which optimizer; upper and lower case do not matter.").done(),
    key("params", Kind::Variants { tag: Tag::Beside("type"), variants: OPTIMIZERS }, "{}", "Its parameters.")
        .nullable()
        .done(),
    key("legacy_fusion", Kind::Bool, "false", "An old calling convention of fused optimizers.")
        .refused("there is one calling convention here"),
];

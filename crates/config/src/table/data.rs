//! Curricula, token and layer dropping, eigenvalues.

use super::later::DYNAMIC_BATCHING;
use super::*;

const SCHEDULE_TYPE: Kind = choice(&["fixed_linear", "fixed_root", "fixed_discrete", "custom"]);

const CURRICULUM_SCHEDULE: &[Key] = &[
    key("total_curriculum_step", POSITIVE_COUNT, "null", "Steps until the full difficulty.").done(),
    key(
        "difficulty_step",
        POSITIVE_COUNT,
        "null",
        "Difficulties are multiples of this; 8 suits tensor cores.",
    )
    .done(),
    key("root_degree", POSITIVE_COUNT, "null", "Degree of the root for `fixed_root`.").done(),
    key("difficulty", COUNT_LIST, "null", "Difficulties in turn for `fixed_discrete`.").done(),
    key("max_step", COUNT_LIST, "null", "Last step of each difficulty but the last.").done(),
];
const SCHEDULE_CONFIG: Kind = Kind::Section(CURRICULUM_SCHEDULE, Form::Plain);

/// `curriculum_learning`, the older form.
pub(super) const CURRICULUM: &[Key] = &[
    key("enabled", Kind::Bool, "false", "Turn the curriculum on.").done(),
    key("curriculum_type", Kind::Text, "\"seqlen\"", "What is made harder; `seqlen` is the sequence length.")
        .done(),
    key("min_difficulty", COUNT, "null", "Difficulty at the start.").done(),
    key("max_difficulty", COUNT, "null", "Difficulty at the end.").done(),
    key("schedule_type", SCHEDULE_TYPE, "null", "How difficulty grows.").done(),
    key("schedule_config", SCHEDULE_CONFIG, "null", "Parameters of the growth.").done(),
];

const METRIC: &[Key] = &[
    key(
        "index_to_sample_path",
        Kind::Text,
        "null",
        "Sequences by rising difficulty: a file that `ferrospeed data analyze` wrote.",
    )
    .done(),
    key(
        "index_to_metric_path",
        Kind::Text,
        "null",
        "The difficulties of that file's sequences; needed where difficulties are values.",
    )
    .done(),
    key(
        "difficulty_type",
        choice(&["value", "percentile"]),
        "null",
        "Whether the schedule's difficulties are values of the metric, or parts of the sequences, of which there are `max_difficulty`.",
    )
    .done(),
    key(
        "clustering_type",
        choice(&["schedule_based", "single_cluster"]),
        "null",
        "Whether sequences come in as the schedule reaches them, or are all in from the start; the latter for `seqlen_truncate` alone.",
    )
    .done(),
    key("min_difficulty", COUNT, "null", "Difficulty at the start.").done(),
    key("max_difficulty", COUNT, "null", "Difficulty at the end; what is harder is never drawn.").done(),
    key("schedule_type", SCHEDULE_TYPE, "null", "How difficulty grows; `custom` is for programs and refused here.")
        .done(),
    key("schedule_config", SCHEDULE_CONFIG, "null", "Parameters of the growth.").done(),
];

const METRIC_CURRICULUM: &[Key] = &[
    key("enabled", Kind::Bool, "false", "Draw sequences by difficulty, the easy ones first.").done(),
    key("data_cluster_path", Kind::Text, "null", "Folder for the groups of samples.")
        .inert("which sequences are in follows from the indexes and the step, and nothing has to be written"),
    key(
        "curriculum_metrics",
        Kind::Named(&Kind::Section(METRIC, Form::Plain)),
        "null",
        "One entry per metric, under its name. A sequence comes in when all metrics have reached it; `seqlen_truncate` cuts sequences.",
    )
    .done(),
];

const DATA_SAMPLING: &[Key] = &[
    key(
        "enabled",
        Kind::Bool,
        "false",
        "Turn data sampling on; as in DeepSpeed, `curriculum_learning.enabled` decides.",
    )
    .done(),
    key(
        "num_epochs",
        POSITIVE_COUNT,
        "1000",
        "With a curriculum, how often as many samples as there are sequences are drawn at most; a longer run is refused.",
    )
    .done(),
    key("num_workers", COUNT, "0", "Loader threads.")
        .inert("sequences are read from files of tokens in microseconds, by the rank that trains on them"),
    key("pin_memory", Kind::Bool, "false", "Page-lock what is loaded.")
        .always("true", "whatever goes to a GPU goes through page-locked memory"),
    key("dynamic_batching", Kind::Section(DYNAMIC_BATCHING, Form::Plain), "{}", "Batches of as many tokens.").refused("batches have as many samples as the file says; recipes pack sequences to one length instead"),
    key(
        "curriculum_learning",
        Kind::Section(METRIC_CURRICULUM, Form::Plain),
        "{}",
        "Sample by difficulty.",
    )
    .done(),
];

const LTD_SCHEDULE_CONFIG: &[Key] = &[
    key("require_steps", POSITIVE_COUNT, "null", "Steps until all tokens that `max_value` says are kept.")
        .done(),
    key("seq_per_step", POSITIVE_COUNT, "null", "Numbers of tokens are multiples of this.").done(),
];

const LTD_SCHEDULE: &[Key] = &[
    key("min_value", COUNT, "null", "Tokens of a sequence kept at the start.").done(),
    key(
        "max_value",
        COUNT,
        "null",
        "Tokens kept at the end; as long as sequences, or longer, to drop none then.",
    )
    .done(),
    key("schedule_type", choice(&["fixed_linear"]), "null", "How the number grows.").done(),
    key(
        "schedule_config",
        Kind::Section(LTD_SCHEDULE_CONFIG, Form::Plain),
        "null",
        "Parameters of the growth.",
    )
    .done(),
];

const TOKEN_LR_SCHEDULE: &[Key] = &[
    key("enabled", Kind::Bool, "false", "Not available."),
    key("total_layer_tokens", COUNT, "null", "Layer tokens of the whole schedule."),
    key("warmup_layer_tokens", COUNT, "null", "Layer tokens of the warm-up."),
];

const RANDOM_LTD: &[Key] = &[
    key("enabled", Kind::Bool, "false", "Some layers see some tokens of each sequence, drawn anew for each layer and pass; the others pass them by.").done(),
    key("total_layer_num", POSITIVE_COUNT, "null", "Layers of the model.").done(),
    key("random_ltd_layer_num", POSITIVE_COUNT, "null", "How many layers drop tokens.").done(),
    key("random_ltd_layer_id", COUNT_LIST, "null", "Which layers, from 0.").done(),
    key("model_mask_name", Kind::Text, "null", "Argument that carries the attention mask.").inert("models know their masks"),
    key("model_type", choice(&["encoder", "decoder"]), "null", "How the mask is cut.").inert("models know their masks; decoders drop tokens"),
    key("hidden_state_order", choice(&["batch_seq_dim", "seq_batch_dim"]), "null", "Order of the axes.").inert("sequences come first in ours"),
    key("random_ltd_schedule", Kind::Section(LTD_SCHEDULE, Form::Plain), "null", "How many tokens are kept.").done(),
    key(
        "layer_token_lr_schedule",
        Kind::Section(TOKEN_LR_SCHEDULE, Form::Plain),
        "{}",
        "Learning rate by layer tokens; not available.",
    ).refused("learning rates that follow the tokens of layers are not available, in DeepSpeed neither"),
];

const DATA_ROUTING: &[Key] = &[
    key(
        "enabled",
        Kind::Bool,
        "false",
        "Turn data routing on; as in DeepSpeed, `random_ltd.enabled` decides.",
    )
    .done(),
    key(
        "random_ltd",
        Kind::Section(RANDOM_LTD, Form::Plain),
        "{}",
        "Random layer-token dropping (random-LTD).",
    )
    .done(),
];

/// `data_efficiency`.
pub(super) const DATA_EFFICIENCY: &[Key] = &[
    key(
        "enabled",
        Kind::Bool,
        "false",
        "Turn the whole section on; as in DeepSpeed, the innermost switches decide.",
    )
    .done(),
    key(
        "seed",
        COUNT,
        "1234",
        "Seed of the order in which a curriculum draws; without one the recipe's orders.",
    )
    .done(),
    key("data_sampling", Kind::Section(DATA_SAMPLING, Form::Plain), "{}", "Which samples are drawn.").done(),
    key("data_routing", Kind::Section(DATA_ROUTING, Form::Plain), "{}", "Which tokens pass which layers.")
        .done(),
];

/// `progressive_layer_drop`.
pub(super) const PROGRESSIVE_LAYER_DROP: &[Key] = &[
    key("enabled", Kind::Bool, "false", "Turn layer dropping on.").done(),
    key("theta", FRACTION, "0.5", "Share of layers kept in the end.").done(),
    key("gamma", NON_NEGATIVE, "0.001", "How fast that is reached.").done(),
];

/// `eigenvalue`.
pub(super) const EIGENVALUE: &[Key] = &[
    key("enabled", Kind::Bool, "false", "Measure blocks as training goes on (fp32).").done(),
    key("verbose", Kind::Bool, "false", "Log each iteration.").done(),
    key("max_iter", POSITIVE_COUNT, "100", "Power iterations at most.").done(),
    key("tol", POSITIVE, "0.01", "Relative change at which iteration stops.").done(),
    key("stability", NON_NEGATIVE, "1e-6", "Added to norms.").done(),
    key("gas_boundary_resolution", POSITIVE_COUNT, "1", "Optimizer steps from one measurement to the next.")
        .done(),
    key("layer_name", Kind::Text, "\"bert.encoder.layer\"", "Module that holds the blocks.").done(),
    key("layer_num", COUNT, "0", "Number of blocks; 0 for all.").done(),
];

//! `ferrospeed model inspect`: what a model directory holds, whether it is sound, and what it takes to train and to serve.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use ferrospeed_command::hub::config_at;
use ferrospeed_command::{Failure, terminal};
use ferrospeed_config::{AutoValues, Config};
use ferrospeed_models::adapter::AdapterFiles;
use ferrospeed_models::decoder::name_of_dtype;
use ferrospeed_models::gguf;
use ferrospeed_models::roles::Role;
use ferrospeed_models::weights::{BlockForm, WeightFiles};
use ferrospeed_models::{ModelConfig, WindowRule};
use ferrospeed_tensor::DType;
use ferrospeed_train::shape_of;
use ferrospeed_tune::model::{Model, Transformer};
use ferrospeed_tune::plan::{Activations, Operands, Processor, Purpose, Request, human, plan};
use ferrospeed_tune::serve::{Serving, serving};
use serde_json::{Value, json};

use super::adapter_inspect;
use super::model::read_config;
use super::model_directory::refusal;

#[derive(Debug, Args)]
pub(super) struct InspectArgs {
    /// The model: a directory with config.json and, if there are any, weights, a GGUF file, a directory with an adapter, or a
    /// name on the Hub, of which the weights are looked at if they are here
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// The model that an adapter is of [default: the directory that the adapter names]
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,
    /// Sequences at a time, for the memory to train and to serve
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    batch: u64,
    /// Tokens of a sequence, for the same [default: the model's longest]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u64).range(1..))]
    sequence: Option<u64>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Everything that is found out about a model.
struct Report {
    shape: Transformer,
    model_type: String,
    architecture: Option<String>,
    groups: BTreeMap<Role, (usize, u64)>,
    stored: Option<Stored>,
    batch: u64,
    sequence: u64,
    training: Vec<Training>,
    serving: Vec<(&'static str, Serving)>,
}

/// The weights as they lie on the disk.
struct Stored {
    files: usize,
    tensors: usize,
    /// Bytes by type.
    bytes: BTreeMap<&'static str, u64>,
}

/// One way to train.
struct Training {
    precision: &'static str,
    state_bytes: u64,
    activations: Activations,
}

pub(super) fn run(args: &InspectArgs) -> Result<ExitCode, Failure> {
    let directory = config_at(&args.directory)?;
    if AdapterFiles::are_in(&directory) && !WeightFiles::are_in(&directory) {
        return adapter_inspect::run(&directory, args.base.as_deref(), args.json);
    }
    if args.base.is_some() {
        let why = "is no directory with an adapter, so it has no base model; leave out --base";
        return Err(Failure::Usage(format!("{} {why}", args.directory.display())));
    }
    let report = inspect(args, &directory)?;
    let text = if args.json { format!("{:#}", as_json(&report)) } else { as_text(&report) };
    terminal::print_output(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn inspect(args: &InspectArgs, directory: &Path) -> Result<Report, Failure> {
    let (path, value) = read_config(directory)?;
    let refuse = |why: String| Failure::Usage(format!("{}: {why}", path.display()));
    let config = ModelConfig::from_value(&value, WindowRule::default()).map_err(refusal)?;
    let shape = shape_of(&value).map_err(|error| refuse(error.to_string()))?;
    let parameters = config.parameters();
    let mut groups = BTreeMap::new();
    for param in parameters.as_slice() {
        let (tensors, elements) = groups.entry(config.role_of(param.name())).or_insert((0, 0));
        *tensors += 1;
        *elements += param.numel() as u64;
    }
    let opened = if gguf::is_gguf(directory) {
        Some(gguf::weights(directory))
    } else {
        WeightFiles::are_in(directory).then(|| WeightFiles::open_directory(directory))
    };
    let stored = if let Some(weights) = opened.transpose().map_err(refusal)? {
        weights.check(parameters.as_slice()).map_err(refusal)?;
        let mut bytes = BTreeMap::new();
        for (name, tensor) in weights.tensors() {
            // Blocks of few bits lie in the files as bytes.
            let packed = BlockForm::of_tensor(name).filter(|_| tensor.dtype == DType::U8);
            let kind = packed.map_or(name_of_dtype(tensor.dtype), BlockForm::name);
            *bytes.entry(kind).or_insert(0) += tensor.size_bytes() as u64;
        }
        Some(Stored { files: weights.paths().count(), tensors: weights.tensors().len(), bytes })
    } else {
        None
    };
    let sequence = args.sequence.unwrap_or(shape.max_positions);
    let training = [("float32", "fp32"), ("bfloat16", "bf16")]
        .map(|(precision, key)| training(&shape, precision, key, args.batch, sequence));
    Ok(Report {
        shape,
        model_type: value["model_type"].as_str().unwrap_or_default().to_owned(),
        architecture: value["architectures"][0].as_str().map(str::to_owned),
        groups,
        stored,
        batch: args.batch,
        sequence,
        training: training.into_iter().collect::<Result<_, _>>()?,
        serving: [("float32", 4), ("bfloat16", 2)]
            .map(|(precision, bytes)| {
                (precision, serving(&shape, bytes, args.batch, sequence, Operands::InPlace))
            })
            .into(),
    })
}

/// The planner's bytes for one rank that trains with Adam.
fn training(
    shape: &Transformer,
    precision: &'static str,
    key: &str,
    batch: u64,
    sequence: u64,
) -> Result<Training, Failure> {
    let mut config = json!({"train_micro_batch_size_per_gpu": batch, "optimizer": {"type": "Adam"}});
    if key == "bf16" {
        config[key] = json!({"enabled": true});
    }
    let failed = |error: &dyn std::fmt::Display| Failure::Run(error.to_string());
    let read = Config::from_value("inspect", &config).map_err(|error| failed(&error))?;
    let (config, _) =
        read.resolve(std::num::NonZeroU64::MIN, &AutoValues::new()).map_err(|error| failed(&error))?;
    let planned = plan(&Request {
        model: &Model::Transformer(*shape),
        config: &config,
        data_parallel_size: 1,
        sequence_ranks: 1,
        sequence_length: sequence,
        checkpoint_activations: false,
        mlp_chunk: None,
        keeps_attention_matrix: false,
        processor: Processor::Cpu,
        operands: Operands::InPlace,
    });
    let of_model = [Purpose::Parameters, Purpose::Gradients, Purpose::OptimizerStates];
    let states = planned.rows.iter().filter(|row| of_model.contains(&row.purpose)).map(|row| row.bytes);
    let none = Activations { kept_bytes: 0, checkpointed_bytes: 0 };
    Ok(Training {
        precision,
        state_bytes: states.fold(0, u64::saturating_add),
        activations: planned.activations.unwrap_or(none),
    })
}

fn as_text(report: &Report) -> String {
    let shape = &report.shape;
    let mut text = format!(
        "{}{}: {} layers, width {}, {} heads ({} for keys and values), feed-forward {}, vocabulary {}, {} positions\n",
        report.model_type,
        report.architecture.as_ref().map(|name| format!(" ({name})")).unwrap_or_default(),
        shape.layers,
        shape.hidden,
        shape.heads,
        shape.kv_heads,
        shape.intermediate,
        shape.vocab,
        shape.max_positions,
    );
    let total: u64 = report.groups.values().map(|(_, elements)| elements).sum();
    // Writing to a text cannot fail.
    let _ = writeln!(text, "\nparameters {:>20} {:>16}", "", grouped(total));
    for (role, (tensors, elements)) in &report.groups {
        let share = 100.0 * *elements as f64 / total.max(1) as f64;
        let _ = writeln!(text, "  {role:<13} {tensors:>7} tensors {:>16} {share:>6.1} %", grouped(*elements));
    }
    match &report.stored {
        Some(stored) => {
            let by_type: Vec<String> =
                stored.bytes.iter().map(|(dtype, bytes)| format!("{} of {dtype}", human(*bytes))).collect();
            let (tensors, files) = (stored.tensors, stored.files);
            let _ = writeln!(text, "weights: {}; {tensors} tensors in {files} file(s)", by_type.join(", "));
        }
        None => text.push_str("weights: none in this directory\n"),
    }
    let _ = writeln!(
        text,
        "\nto train {} × {} tokens on one rank with Adam\n  {:<10}{:>14}{:>14}{:>28}",
        report.batch, report.sequence, "", "model states", "activations", "activations, checkpointed"
    );
    for way in &report.training {
        let (states, kept) = (human(way.state_bytes), human(way.activations.kept_bytes));
        let recomputed = human(way.activations.checkpointed_bytes);
        let _ = writeln!(text, "  {:<10}{states:>14}{kept:>14}{recomputed:>28}", way.precision);
    }
    let _ = writeln!(
        text,
        "to serve {} × {} tokens\n  {:<10}{:>14}{:>14}{:>14}{:>14}",
        report.batch, report.sequence, "", "weights", "cache", "working", "total"
    );
    for (precision, serving) in &report.serving {
        let parts = [serving.weight_bytes, serving.cache_bytes, serving.working_bytes, serving.total_bytes()];
        let [weights, cache, working, total] = parts.map(human);
        let _ = writeln!(text, "  {precision:<10}{weights:>14}{cache:>14}{working:>14}{total:>14}");
    }
    text
}

/// Digits in groups of three.
pub(super) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.char_indices() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn as_json(report: &Report) -> Value {
    let shape = &report.shape;
    let groups: serde_json::Map<String, Value> = report
        .groups
        .iter()
        .map(|(role, (tensors, elements))| {
            (role.name().to_owned(), json!({"tensors": tensors, "parameters": elements}))
        })
        .collect();
    let training: Vec<Value> = report
        .training
        .iter()
        .map(|way| {
            json!({
                "precision": way.precision,
                "model_state_bytes": way.state_bytes,
                "activation_bytes": way.activations.kept_bytes,
                "checkpointed_activation_bytes": way.activations.checkpointed_bytes,
            })
        })
        .collect();
    let serving: Vec<Value> = report
        .serving
        .iter()
        .map(|(precision, serving)| {
            let mut row = json!(serving);
            row["precision"] = (*precision).into();
            row["total_bytes"] = serving.total_bytes().into();
            row
        })
        .collect();
    json!({
        "model_type": report.model_type,
        "architecture": report.architecture,
        "layers": shape.layers, "width": shape.hidden, "heads": shape.heads, "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "intermediate": shape.intermediate, "vocabulary": shape.vocab,
        "max_positions": shape.max_positions,
        "parameters": report.groups.values().map(|(_, elements)| elements).sum::<u64>(),
        "groups": groups,
        "weights": report.stored.as_ref().map(|stored| json!({
            "files": stored.files, "tensors": stored.tensors, "bytes_by_dtype": stored.bytes,
        })),
        "batch": report.batch,
        "sequence": report.sequence,
        "to_train": training,
        "to_serve": serving,
    })
}

//! `ferrospeed eval`: how likely a model holds texts and samples, which tasks it does, and what another one does otherwise.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use ferrospeed_checkpoint::manifest::MANIFEST_FILE;
use ferrospeed_command::hub::{Wanted, brought};
use ferrospeed_command::terminal::{print_note, print_output};
use ferrospeed_command::{DeviceChoice, Failure, NamedModel};
use ferrospeed_data::{SampleKind, TokenType};
use ferrospeed_evaluate::{Change, EvaluateError, Model, Part, Reading, changes, evaluate};
use ferrospeed_text::TrainOn;
use serde_json::{Value, json};

use super::checkpoint_weights::export_quietly;
use super::checkpoint_which::Which;

/// Arguments of `eval`.
#[derive(Debug, Args)]
pub(crate) struct EvalArgs {
    #[command(flatten)]
    model: NamedModel,
    /// What to measure it on: samples, tasks, text or tokens; may be repeated
    #[arg(long, value_name = "FILE", required = true, num_args = 1..)]
    data: Vec<PathBuf>,
    /// The checkpoint of a run, by its name, in place of the weights that the run ended with
    #[arg(long, value_name = "TAG")]
    checkpoint: Option<String>,
    /// Another model on the same data, and the tasks that one of both does
    #[arg(long, value_name = "MODEL")]
    against: Option<PathBuf>,
    /// The checkpoint of the other one
    #[arg(long, value_name = "TAG", requires = "against")]
    against_checkpoint: Option<String>,
    /// Tokens of a sequence [default: what the model can see, at most 2048]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(2..))]
    sequence: Option<u32>,
    /// What records of samples are [default: told by the first]
    #[arg(long, value_parser = ["messages", "sharegpt", "alpaca", "completion", "text", "preference", "unpaired"])]
    kind: Option<String>,
    /// How conversations become text: a name or a file [default: the model's own]
    #[arg(long, value_name = "NAME")]
    chat_template: Option<String>,
    /// What of samples counts
    #[arg(long, value_name = "WHAT", default_value = "assistant", value_parser = ["assistant", "last", "all"])]
    train_on: String,
    /// How token files are written
    #[arg(long, value_name = "TYPE", default_value = "u16", value_parser = ["u16", "u32"])]
    token_type: String,
    /// The type to compute in [default: the model's own]
    #[arg(long, value_parser = ["float32", "bfloat16", "float16"])]
    dtype: Option<String>,
    /// Where to compute: auto, cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto", env = "FERROSPEED_DEVICE", value_parser = DeviceChoice::parse)]
    device: DeviceChoice,
    /// Print one JSON object, with every task's outcome
    #[arg(long)]
    json: bool,
}

/// What one model was found to be.
struct Measured {
    name: String,
    parts: Vec<Part>,
}

pub(crate) fn run(args: &EvalArgs) -> Result<ExitCode, Failure> {
    if let Some(missing) =
        args.data.iter().find(|path| !path.exists() && !path.with_extension("idx").is_file())
    {
        return Err(Failure::Usage(format!("--data: {} does not exist", missing.display())));
    }
    let kept = tempfile::tempdir()
        .map_err(|error| Failure::Run(format!("no folder for what is made on the way: {error}")))?;
    let measured = measure(args, args.model.given(), args.checkpoint.as_deref(), kept.path())?;
    let against = match &args.against {
        None => None,
        Some(other) => Some(measure(args, other, args.against_checkpoint.as_deref(), kept.path())?),
    };
    let changed = against.as_ref().map(|other| changes(&measured.parts, &other.parts)).unwrap_or_default();
    let out = match args.json {
        true => format!("{:#}\n", as_json(&measured, against.as_ref(), &changed)),
        false => as_text(&measured, against.as_ref(), &changed),
    };
    print_output(&out)?;
    Ok(ExitCode::SUCCESS)
}

fn measure(args: &EvalArgs, path: &Path, checkpoint: Option<&str>, kept: &Path) -> Result<Measured, Failure> {
    let failed = |error: EvaluateError| match error {
        EvaluateError::Unanswered { .. } | EvaluateError::Engine(_) => Failure::Run(error.to_string()),
        error => Failure::Usage(error.to_string()),
    };
    let exported = tempfile::tempdir_in(kept).map_err(|error| Failure::Run(error.to_string()))?;
    let place = brought(path, &Wanted::Model)?;
    let directory = model_of(&place, checkpoint, &exported.path().join("model"))?;
    let model = Model::open(&directory, args.dtype.as_deref(), &args.device.open()?).map_err(failed)?;
    model.facts().notes().iter().for_each(|note| print_note(note));
    if let Some(asked) = args.sequence.filter(|asked| *asked as usize > model.longest()) {
        let (name, longest) = (path.display(), model.longest());
        print_note(&format!(
            "--sequence {asked}: {name} sees {longest} tokens, and is measured on sequences of so many"
        ));
    }
    let reading = Reading {
        sequence: args.sequence.map(|tokens| tokens as usize),
        kind: args.kind.as_deref().and_then(SampleKind::of_name),
        chat_template: args.chat_template.clone(),
        train_on: TrainOn::of_name(&args.train_on).unwrap_or_default(),
        token_type: Some(if args.token_type == "u32" { TokenType::U32 } else { TokenType::U16 }),
    };
    let cache = kept.join("tokens");
    let parts = args.data.iter().map(|data| evaluate(&model, data, &reading, &cache).map_err(failed));
    let parts = parts.collect::<Result<Vec<_>, _>>()?;
    let name = match checkpoint {
        Some(tag) => format!("{} ({tag})", path.display()),
        None => path.display().to_string(),
    };
    Ok(Measured { name, parts })
}

/// Whether a model lies in a directory, or an adapter of one.
fn is_model(path: &Path) -> bool {
    ["config.json", "adapter_config.json"].iter().any(|name| path.join(name).is_file())
}

/// Where the weights lie that are meant: those of a checkpoint are written to `exported` first.
fn model_of(path: &Path, checkpoint: Option<&str>, exported: &Path) -> Result<PathBuf, Failure> {
    let is_checkpoint = path.join(MANIFEST_FILE).is_file();
    if checkpoint.is_some() || is_checkpoint {
        let which = Which { dir: path.to_path_buf(), tag: checkpoint.map(str::to_owned) };
        export_quietly(&which, exported)?;
        if !is_model(exported) {
            return Err(Failure::Usage(format!(
                "{}: the checkpoint does not say what its model is; write its weights beside a config.json (`ferrospeed checkpoint export-hf`) and evaluate that",
                path.display()
            )));
        }
        return Ok(exported.to_path_buf());
    }
    if path.is_file() || is_model(path) {
        return Ok(path.to_path_buf());
    }
    let model = path.join("model");
    if is_model(&model) {
        return Ok(model);
    }
    let why = match path {
        path if !path.exists() => "does not exist".to_owned(),
        path if path.join("checkpoints").is_dir() => {
            "is a run that has not exported its weights yet; name one of its checkpoints with --checkpoint TAG (`ferrospeed checkpoint list` shows them)".to_owned()
        }
        _ => "is no model: neither config.json nor a run's model/ is in it".to_owned(),
    };
    Err(Failure::Usage(format!("{} {why}", path.display())))
}

fn as_json(measured: &Measured, against: Option<&Measured>, changed: &[Change]) -> Value {
    let of = |measured: &Measured| json!({ "model": measured.name, "data": measured.parts.iter().map(part_json).collect::<Vec<_>>() });
    let mut out = of(measured);
    if let Some(other) = against {
        out["against"] = of(other);
        out["changed"] = json!(changed);
    }
    out
}

fn part_json(part: &Part) -> Value {
    let mut out = json!(part);
    if let Some(totals) = &part.totals {
        out["loss"] = totals.loss().into();
        out["perplexity"] = totals.perplexity().into();
        out["bits_per_byte"] = totals.bits_per_byte().into();
    }
    out
}

fn as_text(measured: &Measured, against: Option<&Measured>, changed: &[Change]) -> String {
    let mut out = match against {
        None => format!("{}\n", measured.name),
        Some(other) => format!("{}\nagainst {}\n", measured.name, other.name),
    };
    for (index, part) in measured.parts.iter().enumerate() {
        let other = against.and_then(|other| other.parts.get(index));
        out += &format!("\n{} ({})\n", part.path.display(), part.kind);
        let (own, others) = (numbers(part), other.map(numbers).unwrap_or_default());
        for (at, (name, value)) in own.iter().enumerate() {
            let beside = others.get(at).map_or(String::new(), |(_, value)| format!("{value:>14}"));
            out += &format!("  {name:<28}{value:>14}{beside}\n");
        }
    }
    if against.is_some() {
        let gains = changed.iter().filter(|change| change.is_gain).count();
        out += &format!(
            "\n{gains} tasks are done that the other does not, {} the other way round\n",
            changed.len() - gains
        );
        for change in changed {
            let mark = if change.is_gain { '+' } else { '-' };
            let id = change.id.as_ref().map_or(String::new(), |id| format!(" ({id})"));
            out += &format!(
                "{mark} {}{id}: expected {:?}, gives {:?}, the other {:?}\n",
                change.place, change.expected, change.given, change.against
            );
        }
    }
    out
}

/// The numbers of a file, by name.
fn numbers(part: &Part) -> Vec<(&'static str, String)> {
    let (whole, exact) = (|count: u64| count.to_string(), |number: f64| format!("{number:.4}"));
    let mut numbers = Vec::new();
    if let Some(totals) = &part.totals {
        numbers.push(("texts", whole(totals.texts)));
        if totals.cut > 0 {
            numbers.push(("cut, longer than --sequence", whole(totals.cut)));
        }
        numbers.push(("tokens that count", whole(totals.tokens)));
        numbers.push(("loss", exact(totals.loss())));
        numbers.push(("perplexity", exact(totals.perplexity())));
        numbers.extend(totals.bits_per_byte().map(|bits| ("bits per byte", exact(bits))));
    }
    if let Some(pairs) = &part.pairs {
        numbers.push(("pairs", whole(pairs.pairs)));
        numbers.push(("chosen is likelier", exact(pairs.preferred)));
        numbers.push(("chosen is likelier per token", exact(pairs.preferred_per_token)));
    }
    if let Some(tasks) = &part.tasks {
        if tasks.choices > 0 {
            numbers.push(("questions with choices", whole(tasks.choices)));
            numbers.push(("accuracy", exact(tasks.accuracy)));
            numbers.push(("accuracy per token", exact(tasks.accuracy_per_token)));
            numbers.push(("accuracy per byte", exact(tasks.accuracy_per_byte)));
        }
        if tasks.exact > 0 {
            numbers.push(("questions with an answer", whole(tasks.exact)));
            numbers.push(("exact match", exact(tasks.exact_match)));
        }
    }
    numbers
}

//! `ferrospeed config check|show|schema|docs`: what a ds_config.json says, and whether it can be used.

use std::num::NonZeroU64;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::ExitCode;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Subcommand};
use ferrospeed_command::Failure;
use ferrospeed_command::hub::HubName;
use ferrospeed_command::terminal::{self, Colour, Paint};
use ferrospeed_config::{AutoValues, Config, ConfigError, Diagnostic, Drifted, Report, Severity, Unresolved};
use ferrospeed_engine::refusals;
use ferrospeed_train::recipe::trainer_defaults;
use ferrospeed_train::{FromHub, Recipe, TrainError, layer_reduction_problem};
use serde_json::{Value, json};

use super::counts::at_least_one;
use super::train_start::besides_data;
use super::{offload_folders, outputs};

#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    action: ConfigAction,
}

#[derive(Debug, Subcommand)]
enum ConfigAction {
    /// Report every mistake and warning of a configuration
    Check(CheckArgs),
    /// Print a configuration with every default filled in
    Show(ShowArgs),
    /// Print the JSON schema of ds_config.json
    Schema,
    /// Print the manual of ds_config.json as Markdown
    Docs,
}

#[derive(Debug, Args)]
struct CheckArgs {
    #[command(flatten)]
    input: InputArgs,
    /// Check the batch sizes too, for so many data-parallel ranks
    #[arg(long = "world_size", alias = "world-size", short = 'w', value_name = "COUNT", value_parser = at_least_one)]
    world_size: Option<NonZeroU64>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct ShowArgs {
    #[command(flatten)]
    input: InputArgs,
    /// The number of data-parallel ranks; default: the recipe's, or 1
    #[arg(long = "world_size", alias = "world-size", short = 'w', value_name = "COUNT", value_parser = at_least_one)]
    world_size: Option<NonZeroU64>,
}

#[derive(Debug, Args)]
pub(super) struct InputArgs {
    /// The configuration: a file, URL-safe base64, or a recipe (.toml), which fills every "auto"
    #[arg(value_name = "FILE", value_parser = NonEmptyStringValueParser::new())]
    file: String,
    /// Override a value: `zero_optimization.stage=3`
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// The model's hidden size, from which `"auto"` buffer sizes follow
    #[arg(long = "hidden_size", alias = "hidden-size", value_name = "COUNT")]
    hidden_size: Option<u64>,
}

/// A configuration, and what is known beside it.
struct Input {
    read: Unresolved,
    auto: AutoValues,
    recipe: Option<Recipe>,
    /// Where a recipe and its ds_config contradict each other.
    contradictions: Vec<String>,
}

impl Input {
    /// The data-parallel ranks of a recipe.
    fn ranks(&self) -> Option<NonZeroU64> {
        self.recipe.as_ref().map(Recipe::data_ranks)
    }
}

impl InputArgs {
    /// The file, where it is a recipe.
    pub(super) fn recipe(&self) -> Option<&Path> {
        let path = Path::new(&self.file);
        path.extension().is_some_and(|extension| extension == "toml").then_some(path)
    }

    pub(super) fn overrides(&self) -> &[String] {
        &self.overrides
    }

    /// Reads a configuration, or the recipe that holds one. Without a recipe the Trainer's defaults stand for what it would say.
    fn open(&self, ranks: Option<NonZeroU64>) -> Result<Input, Failed> {
        let Some(path) = self.recipe() else {
            let read = self.read()?;
            let auto = trainer_defaults(&read, ranks.unwrap_or(NonZeroU64::MIN), self.auto_values());
            return Ok(Input { read, auto, recipe: None, contradictions: Vec::new() });
        };
        let mut recipe = Recipe::load(path, &self.overrides).map_err(Failed::Recipe)?;
        recipe
            .bring(path, FromHub::ModelConfig, &mut |_| ControlFlow::Continue(()))
            .map_err(Failed::Recipe)?;
        let (read, auto, contradictions) = recipe.unresolved()?;
        Ok(Input { read, auto, recipe: Some(recipe), contradictions })
    }

    /// Reads the configuration and applies the overrides.
    pub(super) fn read(&self) -> Result<Unresolved, ConfigError> {
        let read = Config::from_argument(&self.file)?;
        if self.overrides.is_empty() {
            return Ok(read);
        }
        let mut value = read.source().clone();
        self.overrides.iter().try_for_each(|assignment| ferrospeed_config::set(&mut value, assignment))?;
        Config::from_value(&self.file, &value)
    }

    pub(super) fn auto_values(&self) -> AutoValues {
        match self.hidden_size {
            Some(size) => AutoValues::new().with_hidden_size(size),
            None => AutoValues::new(),
        }
    }
}

/// Why there is nothing to look at.
enum Failed {
    Config(ConfigError),
    Recipe(TrainError),
}

impl From<ConfigError> for Failed {
    fn from(error: ConfigError) -> Failed {
        Failed::Config(error)
    }
}

impl From<Failed> for Failure {
    fn from(failed: Failed) -> Failure {
        match failed {
            Failed::Config(error) => refusal(error),
            Failed::Recipe(error) => Failure::Usage(error.to_string()),
        }
    }
}

pub(crate) fn run(args: &ConfigArgs) -> Result<ExitCode, Failure> {
    match &args.action {
        ConfigAction::Check(args) => check(args),
        ConfigAction::Show(args) => show(args),
        ConfigAction::Schema => {
            let schema = serde_json::to_string_pretty(&ferrospeed_config::schema::render());
            print(&schema.unwrap_or_default())
        }
        ConfigAction::Docs => print(&ferrospeed_config::docs::render()),
    }
}

fn print(text: &str) -> Result<ExitCode, Failure> {
    terminal::print_output(text)?;
    Ok(ExitCode::SUCCESS)
}

fn check(args: &CheckArgs) -> Result<ExitCode, Failure> {
    let mut drifted = Vec::new();
    let examined = args.input.open(args.world_size).and_then(|input| {
        drifted = input.read.drifted();
        let report = match args.world_size.or(input.ranks()) {
            Some(ranks) => match input.read.resolve(ranks, &input.auto) {
                Ok((_, report)) | Err(ConfigError::Invalid(report)) => report,
                Err(error) => return Err(error.into()),
            },
            None => input.read.report(),
        };
        // What `plan` and `train` would say beyond the rules of a configuration.
        let (problems, notes) = match input.recipe {
            Some(mut recipe) => {
                let ranks = args
                    .world_size
                    .map(|ranks| ranks.get().saturating_mul(recipe.mesh().ranks_of_a_sample() as u64));
                recipe.ranks = ranks.map_or(recipe.ranks, |ranks| u32::try_from(ranks).unwrap_or(u32::MAX));
                let (mut problems, model) = ferrospeed_train::problems(&recipe);
                // Of a model of the Hub its configuration is brought to be looked at, and no weights.
                if recipe.model.path.as_deref().and_then(HubName::of_cached).is_some() {
                    problems.retain(|problem| !problem.contains("holds no weights"));
                }
                // What is wrong with the configuration itself is in the report, with its places.
                let reported = recipe.config().err().map(|error| error.to_string().replace('\n', "\n  "));
                problems.retain(|problem| Some(problem) != reported.as_ref());
                problems.extend(besides_data(&recipe, model.as_ref()));
                let notes =
                    recipe.config().map_or_else(|_| Vec::new(), |(config, _)| recipe.too_late(&config));
                (problems, notes)
            }
            None => {
                let folders = offload_folders::problems(input.read.source());
                let refused = refusals_of_an_engine(&input.read);
                let student = layer_reduction_problem(&input.read);
                let monitors = outputs::problems(&input.read);
                let problems = folders.into_iter().chain(monitors).chain(refused).chain(student).collect();
                (problems, stand_ins(&input.read).into_iter().collect())
            }
        };
        Ok((report, problems, notes))
    });
    let (report, problems, notes) = match examined {
        Ok(found) => found,
        Err(Failed::Config(ConfigError::Invalid(report))) => (report, Vec::new(), Vec::new()),
        Err(failed) => return Err(failed.into()),
    };
    let errors = report.errors().count() + problems.len();
    let warnings = report.warnings().count() + notes.len();
    if args.json {
        let of_recipe = |severity: &'static str| {
            let file = &args.input.file;
            move |why: &String| json!({"severity": severity, "code": "Recipe", "file": file, "why": why})
        };
        let (problems, notes) =
            (problems.iter().map(of_recipe("error")), notes.iter().map(of_recipe("warning")));
        let findings: Vec<Value> = report.all().iter().map(as_json).chain(problems).chain(notes).collect();
        let document = json!({"ok": errors == 0, "errors": errors, "warnings": warnings, "findings": findings, "drifted": drifted.iter().map(ToString::to_string).collect::<Vec<_>>()});
        terminal::print_output(&serde_json::to_string_pretty(&document).unwrap_or_default())?;
    } else {
        print_findings(&report);
        problems.iter().for_each(|why| terminal::print_error(&format!("{}: {why}", args.input.file)));
        notes.iter().for_each(|why| terminal::print_note(&format!("{}: {why}", args.input.file)));
        print_drifted(&args.input.file, &drifted);
        let verdict = if errors == 0 { "can be used" } else { "cannot be used" };
        let line = format!("{}: {verdict}: {errors} error(s), {warnings} warning(s)", args.input.file);
        terminal::print_output(&line)?;
    }
    Ok(ExitCode::from(if errors == 0 { 0 } else { 2 }))
}

/// Says where a file means one thing by DeepSpeed 0.14.1 and another by 0.19.8.
fn print_drifted(file: &str, drifted: &[Drifted]) {
    if drifted.is_empty() {
        return;
    }
    let each: Vec<String> = drifted.iter().map(ToString::to_string).collect();
    let chosen = "`compat` says whose defaults hold, 0.14.1's where it is not given";
    terminal::print_line(&format!(
        "{file}: what it means depends on DeepSpeed's version: {}; {chosen}",
        each.join("; ")
    ));
}

/// What is to be said where nothing but a recipe knows the values of `"auto"`s.
fn stand_ins(read: &Unresolved) -> Option<String> {
    let count = read.autos().count();
    (count > 0).then(|| {
        format!(
            "{count} value(s) are \"auto\": a recipe (.toml) that names this file as its ds_config fills them in, and is what to check; here the defaults of Hugging Face's Trainer stand for them (`ferrospeed config show` prints which)"
        )
    })
}

/// What an engine would say of a configuration whose ranks and `"auto"`s are not known: it is looked at on one rank, with the
/// defaults in their place.
fn refusals_of_an_engine(read: &Unresolved) -> Vec<String> {
    let mut value = read.source().clone();
    if !value.is_object() {
        return Vec::new();
    }
    let batch = ["train_batch_size", "gradient_accumulation_steps", "elasticity"];
    for path in read.autos().chain(batch) {
        let (section, key) = path.rsplit_once('.').map_or(("", path), |(section, key)| (section, key));
        let pointer = section.split('.').filter(|part| !part.is_empty()).map(|part| format!("/{part}"));
        if let Some(Value::Object(section)) = value.pointer_mut(&pointer.collect::<String>()) {
            section.remove(key);
        }
    }
    value["train_micro_batch_size_per_gpu"] = 1.into();
    let resolved = Config::from_value("ds_config", &value)
        .and_then(|read| read.resolve(NonZeroU64::MIN, &AutoValues::new()));
    // What else is wrong is in the report.
    let Ok((config, _)) = resolved else { return Vec::new() };
    refusals(&config, None).iter().map(ToString::to_string).collect()
}

fn show(args: &ShowArgs) -> Result<ExitCode, Failure> {
    let input = args.input.open(args.world_size)?;
    let ranks = args.world_size.or(input.ranks()).unwrap_or(NonZeroU64::MIN);
    let Input { read, auto, contradictions, .. } = input;
    if !contradictions.is_empty() {
        let path = args.input.file.clone().into();
        return Err(Failure::Usage(TrainError::Recipe { path, problems: contradictions }.to_string()));
    }
    let (config, report) = read.resolve(ranks, &auto).map_err(refusal)?;
    print_findings(&report);
    for filled in read.filled(&auto) {
        let line = format!("`{}`: \"auto\" is {}, from {}", filled.path, filled.value, filled.from);
        terminal::print_line(&line);
    }
    print(&serde_json::to_string_pretty(&config.to_json()).unwrap_or_default())
}

/// Prints the findings of a refused configuration and gives the one line that follows them.
pub(super) fn refusal(error: ConfigError) -> Failure {
    match error {
        ConfigError::Invalid(report) => {
            print_findings(&report);
            Failure::Usage(format!("the configuration has {} error(s)", report.errors().count()))
        }
        other => Failure::Usage(other.to_string()),
    }
}

/// Prints each finding on standard error, with its severity in colour.
pub(super) fn print_findings(report: &Report) {
    let paint = Paint::for_stderr();
    for finding in report.all() {
        let (colour, word) = match finding.severity {
            Severity::Error => (Colour::Red, ": error: "),
            Severity::Warning => (Colour::Yellow, ": warning: "),
        };
        let text = finding.to_string().replacen(word, &paint.paint(colour, word), 1);
        terminal::print_line(&text);
    }
}

fn as_json(finding: &Diagnostic) -> Value {
    json!({
        "severity": match finding.severity {
            Severity::Error => "error",
            Severity::Warning => "warning",
        },
        "code": format!("{:?}", finding.code),
        "file": finding.file,
        "line": finding.position.map(|position| position.line),
        "column": finding.position.map(|position| position.column),
        "path": finding.path,
        "why": finding.why,
        "help": finding.help,
    })
}

//! `ferrospeed config check|show|schema|docs`: what a ds_config.json says, and whether it can be used.

use std::num::NonZeroU64;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use ferrospeed_config::{AutoValues, Config, ConfigError, Diagnostic, Report, Severity, Unresolved};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::terminal::{self, Colour, Paint};

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
    #[arg(long = "world_size", alias = "world-size", short = 'w', value_name = "COUNT")]
    world_size: Option<NonZeroU64>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct ShowArgs {
    #[command(flatten)]
    input: InputArgs,
    /// The number of data-parallel ranks
    #[arg(long = "world_size", alias = "world-size", short = 'w', value_name = "COUNT", default_value = "1")]
    world_size: NonZeroU64,
}

#[derive(Debug, Args)]
pub(super) struct InputArgs {
    /// The configuration: a file, or URL-safe base64
    #[arg(value_name = "FILE")]
    file: String,
    /// Override a value: `zero_optimization.stage=3`
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// The model's hidden size, from which `"auto"` buffer sizes follow
    #[arg(long = "hidden_size", alias = "hidden-size", value_name = "COUNT")]
    hidden_size: Option<u64>,
}

impl InputArgs {
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
    let examined = args.input.read().and_then(|read| match args.world_size {
        Some(ranks) => read.resolve(ranks, &args.input.auto_values()).map(|(_, report)| report),
        None => Ok(read.report()),
    });
    let report = match examined {
        Ok(report) | Err(ConfigError::Invalid(report)) => report,
        Err(error) => return Err(Failure::Usage(error.to_string())),
    };
    let (errors, warnings) = (report.errors().count(), report.warnings().count());
    if args.json {
        let findings: Vec<Value> = report.all().iter().map(as_json).collect();
        let document =
            json!({"ok": errors == 0, "errors": errors, "warnings": warnings, "findings": findings});
        terminal::print_output(&serde_json::to_string_pretty(&document).unwrap_or_default())?;
    } else {
        print_findings(&report);
        let verdict = if errors == 0 { "can be used" } else { "cannot be used" };
        let line = format!("{}: {verdict}: {errors} error(s), {warnings} warning(s)", args.input.file);
        terminal::print_output(&line)?;
    }
    Ok(ExitCode::from(if errors == 0 { 0 } else { 2 }))
}

fn show(args: &ShowArgs) -> Result<ExitCode, Failure> {
    let resolved =
        args.input.read().and_then(|read| read.resolve(args.world_size, &args.input.auto_values()));
    let (config, report) = resolved.map_err(refusal)?;
    print_findings(&report);
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

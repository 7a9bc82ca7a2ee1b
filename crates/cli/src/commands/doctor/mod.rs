//! `ferrospeed doctor`: what this machine can do, found out by trying, and what is missing and why.
//!
//! It never fails because something is missing: a laptop without a GPU is healthy. It exits with 1 only when
//! something that every run needs does not work.

mod checks;

use std::path::PathBuf;
use std::process::ExitCode;

use ferrospeed_command::Failure;
use ferrospeed_command::terminal::{self, Colour, Paint};

pub(super) use checks::operands;

#[derive(Debug, clap::Args)]
pub(crate) struct DoctorArgs {
    /// Also look at the disks of these folders
    #[arg(long = "path", value_name = "FOLDER")]
    paths: Vec<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// It works.
    Good,
    /// It works less well than it could, or is not there; runs that do not need it are fine.
    Limited,
    /// Runs will fail.
    Bad,
}

impl Verdict {
    fn word(self) -> &'static str {
        match self {
            Verdict::Good => "ok",
            Verdict::Limited => "limited",
            Verdict::Bad => "bad",
        }
    }

    fn colour(self) -> Colour {
        match self {
            Verdict::Good => Colour::Green,
            Verdict::Limited => Colour::Yellow,
            Verdict::Bad => Colour::Red,
        }
    }
}

/// One thing that was looked at.
#[derive(Debug)]
struct Check {
    topic: &'static str,
    name: String,
    verdict: Verdict,
    found: String,
    /// What it means for runs, where that is not plain.
    advice: Option<String>,
}

pub(crate) fn run(args: &DoctorArgs) -> Result<ExitCode, Failure> {
    let checks = checks::all(&args.paths);
    let text = if args.json { as_json(&checks) } else { as_text(&checks, Paint::for_stdout()) };
    terminal::print_output(&text)?;
    let bad = checks.iter().any(|check| check.verdict == Verdict::Bad);
    Ok(if bad { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn as_json(checks: &[Check]) -> String {
    let checks: Vec<serde_json::Value> = checks
        .iter()
        .map(|check| {
            serde_json::json!({
                "topic": check.topic,
                "name": check.name,
                "verdict": check.verdict.word(),
                "found": check.found,
                "advice": check.advice,
            })
        })
        .collect();
    serde_json::to_string_pretty(&serde_json::json!({ "checks": checks })).unwrap_or_default()
}

fn as_text(checks: &[Check], paint: Paint) -> String {
    let width = checks.iter().map(|check| check.name.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    let mut topic = "";
    for check in checks {
        if check.topic != topic {
            topic = check.topic;
            text.push_str(&format!("{}\n", paint.paint(Colour::Bold, topic)));
        }
        let verdict = paint.paint(check.verdict.colour(), &format!("{:<7}", check.verdict.word()));
        text.push_str(&format!("  {verdict} {:<width$}  {}\n", check.name, check.found));
        if let Some(advice) = &check.advice {
            text.push_str(&format!("  {:7} {:<width$}  → {advice}\n", "", ""));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_lines_up_and_advises_below() {
        let check = |name: &str, verdict, advice: Option<&str>| Check {
            topic: "CPU",
            name: name.to_owned(),
            verdict,
            found: "x".to_owned(),
            advice: advice.map(str::to_owned),
        };
        let checks = [check("a", Verdict::Good, None), check("long", Verdict::Limited, Some("do this"))];
        let plain = Paint::for_stdout();
        let text = as_text(&checks, plain);
        assert!(text.contains("limited") && text.contains("→ do this"));
        let json: serde_json::Value = serde_json::from_str(&as_json(&checks)).unwrap();
        assert_eq!(json["checks"][1]["verdict"], "limited");
    }
}

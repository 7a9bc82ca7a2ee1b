//! A run as lines: for logs, pipes and terminals that cannot be drawn over.

use std::collections::BTreeMap;
use std::path::Path;

use ferrospeed_command::terminal::{print_note, print_progress};
use ferrospeed_observe::{EvalRecord, RoutingSummary, StepRecord};
use ferrospeed_train::{Progress, RunInfo};

/// One line every few steps.
pub(super) struct Lines {
    steps: u64,
    first: u64,
    every: u64,
    peak_flops_per_s: f64,
}

impl Lines {
    pub(super) fn new(steps: u64, every: u64) -> Lines {
        Lines { steps, first: 1, every, peak_flops_per_s: f64::NAN }
    }
}

/// What is about to be trained, in a line, and where its layers are.
pub(super) fn describe(info: &RunInfo) -> String {
    let stages = info.division.as_ref().map_or_else(String::new, |division| format!("\nstages: {division}"));
    let trained = match info.trained < info.parameters {
        true => format!(" ({} of them trained)", grouped(info.trained)),
        false => String::new(),
    };
    format!(
        "{} parameters{trained} in {}, {} ranks, ZeRO stage {}, {} sequences of {} tokens per step; {} to train on, {} to validate{stages}",
        grouped(info.parameters),
        info.dtype,
        info.ranks,
        info.stage,
        info.batch,
        info.sequence,
        info.train_sequences,
        info.validation_sequences,
    )
}

/// Where a run goes on from, if it does.
pub(super) fn describe_resumed(info: &RunInfo) -> Option<String> {
    let resumed = info.resumed.as_ref()?;
    let mut text = format!("going on after step {} from {}", resumed.step, resumed.path.display());
    resumed.changes.iter().for_each(|change| text.push_str(&format!("\n  {change}")));
    Some(text)
}

impl Progress for Lines {
    fn started(&mut self, info: &RunInfo) {
        for warning in &info.warnings {
            print_note(warning);
        }
        (self.peak_flops_per_s, self.steps) = (info.peak_flops_per_s, info.steps);
        print_progress(&describe(info));
        if let Some(text) = describe_resumed(info) {
            self.first = info.resumed.as_ref().map_or(1, |resumed| resumed.step + 1);
            print_progress(&text);
        }
    }

    fn step(&mut self, record: &StepRecord) {
        if record.step != self.first && record.step != self.steps && !record.step.is_multiple_of(self.every) {
            return;
        }
        let norm = record.grad_norm.map_or("skipped".to_owned(), |norm| format!("{norm:.3}"));
        let left = (self.steps - record.step) as f64 * record.step_ms / 1e3;
        let memory = record.memory_bytes.get("total").copied().unwrap_or(0) as f64 / f64::from(1 << 20);
        let loss =
            record.measured_loss().map_or("none, nothing to predict".to_owned(), |loss| format!("{loss:.4}"));
        let text = format!(
            "step {:>5}/{}  loss {loss}  lr {:.2e}  norm {norm}  {:.0} tokens/s  {:.1} GFLOP/s ({:.0} % of peak)  {memory:.0} MiB  {left:.0} s left",
            record.step,
            self.steps,
            record.lr,
            record.tokens_per_s,
            record.flops_per_s / 1e9,
            100.0 * record.flops_per_s / self.peak_flops_per_s,
        );
        let routing = RoutingSummary::of(&record.routing);
        let routing = routing.map(|routing| format!("  {}", routing.describe()));
        print_progress(&(text + &measures(&record.measures) + &routing.unwrap_or_default()));
    }

    fn eval(&mut self, record: &EvalRecord) {
        print_progress(&format!(
            "step {:>5}/{}  validation loss {:.4}{}",
            record.step,
            self.steps,
            record.loss,
            measures(&record.measures)
        ));
    }

    fn saved(&mut self, path: &Path) {
        print_progress(&format!("saved {}", path.display()));
    }

    fn warning(&mut self, text: &str) {
        print_note(text);
    }
}

/// What of an objective's measures fits on a line.
fn measures(all: &BTreeMap<String, f64>) -> String {
    let shown = [("rewards/accuracies", "accuracy"), ("rewards/margins", "margin"), ("kl", "kl")];
    let shown = shown.iter().filter_map(|(name, short)| Some(format!("  {short} {:.3}", all.get(*name)?)));
    shown.collect()
}

/// A number in groups of three digits.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

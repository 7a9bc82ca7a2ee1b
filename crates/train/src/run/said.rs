//! What a run says of itself: before its first step, on its way, and at its end.

use std::path::{Path, PathBuf};

use ferrospeed_observe::{EvalRecord, StepRecord};

use crate::checkpoint::{Ending, Resumed};

/// What is known before the first step.
#[derive(Debug, Clone, PartialEq)]
pub struct RunInfo {
    /// Parameters of the model, with those of adapters.
    pub parameters: u64,
    /// How many of them are trained.
    pub trained: u64,
    /// Ranks.
    pub ranks: usize,
    /// Steps to take.
    pub steps: u64,
    /// ZeRO stage.
    pub stage: u8,
    /// The type of weights.
    pub dtype: String,
    /// Samples per step over all ranks.
    pub batch: u64,
    /// Tokens per sample.
    pub sequence: u64,
    /// Sequences to train on.
    pub train_sequences: u64,
    /// Sequences to measure on.
    pub validation_sequences: u64,
    /// What the configuration warned about.
    pub warnings: Vec<String>,
    /// Floating-point operations per second that all ranks together reach in a matrix product, measured at the start.
    pub peak_flops_per_s: f64,
    /// Which stage has which layers, where the model is in stages.
    pub division: Option<String>,
    /// The checkpoint that it goes on from.
    pub resumed: Option<Resumed>,
}

impl RunInfo {
    /// By name, for people.
    pub(crate) fn facts(&self) -> Vec<(String, String)> {
        let facts = [
            ("parameters", self.parameters.to_string()),
            ("type", self.dtype.clone()),
            ("ranks", self.ranks.to_string()),
            ("ZeRO stage", self.stage.to_string()),
            ("sequences per step", self.batch.to_string()),
            ("tokens per sequence", self.sequence.to_string()),
            ("sequences to train on", self.train_sequences.to_string()),
            ("sequences to validate on", self.validation_sequences.to_string()),
            ("measured peak", format!("{:.1} GFLOP/s", self.peak_flops_per_s / 1e9)),
        ];
        let trained = (self.trained < self.parameters).then(|| ("trained", self.trained.to_string()));
        let division = self.division.iter().map(|division| ("stages", division.clone()));
        facts
            .into_iter()
            .chain(trained)
            .chain(division)
            .map(|(name, value)| (name.to_owned(), value))
            .collect()
    }
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// Steps taken.
    pub steps: u64,
    /// Of these, those that were taken now; all may have been taken before.
    pub new_steps: u64,
    /// The loss of the last new step that has one.
    pub loss: Option<f32>,
    /// The last validation's loss.
    pub validation_loss: Option<f32>,
    /// How much text a token stands for, where a tokenizer made tokens of plain text: losses per byte can be compared
    /// between tokenizers.
    pub bytes_per_token: Option<f64>,
    /// The text the model wrote.
    pub sample: Option<String>,
    /// Whether it came to its end.
    pub ending: Ending,
    /// The checkpoint that was written last, where the run waited for it.
    pub checkpoint: Option<PathBuf>,
    /// Wall-clock seconds.
    pub seconds: f64,
    /// Of these, seconds spent on logs, monitors, progress and report.
    pub observing_seconds: f64,
    /// With [`Observing::Alternating`].
    pub observing_cost: Option<ObservingCost>,
    /// With `comms_logger`: what ranks sent each other, in a table.
    pub communication: Option<String>,
}

impl Summary {
    /// Of a run that has done so many steps before.
    pub(super) fn of_steps(steps: u64, bytes_per_token: Option<f64>) -> Summary {
        Summary {
            steps,
            new_steps: 0,
            loss: None,
            validation_loss: None,
            bytes_per_token,
            sample: None,
            ending: Ending::Finished,
            checkpoint: None,
            seconds: 0.0,
            observing_seconds: 0.0,
            observing_cost: None,
            communication: None,
        }
    }
}

/// Who is told what happens. Only rank 0 tells.
pub trait Progress {
    /// Before the first step.
    fn started(&mut self, _info: &RunInfo) {}
    /// After each step.
    fn step(&mut self, _record: &StepRecord) {}
    /// After each validation.
    fn eval(&mut self, _record: &EvalRecord) {}
    /// After each checkpoint.
    fn saved(&mut self, _path: &Path) {}
    /// Something went wrong that does not end the run.
    fn warning(&mut self, _text: &str) {}
}

/// When steps are logged, monitored and shown.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Observing {
    /// In every step.
    #[default]
    Always,
    /// In every other block of ten steps, to measure what it costs.
    Alternating,
}

impl Observing {
    pub(super) fn is_on(self, step: u64) -> bool {
        self == Observing::Always || ((step - 1) / 10).is_multiple_of(2)
    }
}

/// What observing costs: median milliseconds of a step with and without, and of how many.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ObservingCost {
    /// With.
    pub with_ms: f64,
    /// Without.
    pub without_ms: f64,
    /// How many steps there were of the rarer kind.
    pub steps: usize,
}

impl ObservingCost {
    /// `None` where there are not both.
    pub(super) fn of(mut with_ms: Vec<f64>, mut without_ms: Vec<f64>) -> Option<ObservingCost> {
        let steps = with_ms.len().min(without_ms.len());
        let median = |values: &mut Vec<f64>| {
            values.sort_by(f64::total_cmp);
            values.get(values.len() / 2).copied()
        };
        Some(ObservingCost { with_ms: median(&mut with_ms)?, without_ms: median(&mut without_ms)?, steps })
    }
}

//! Runs an experiment: a short training in a process of its own, and what it measured.

use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use ferrospeed_comm::logger::trimmed_mean;
use ferrospeed_command::Failure;
use ferrospeed_command::terminal::print_output;
use ferrospeed_config::whole;
use ferrospeed_launch::bounded::{BoundedEnd, Bounds, run_bounded};
use ferrospeed_launch::shell;
use ferrospeed_observe::report::TriedPoint;
use ferrospeed_observe::{StepRecord, read_json_lines};
use ferrospeed_train::{Recipe, RunFolder};
use ferrospeed_tune::tuning::planned::Outcome;
use ferrospeed_tune::tuning::{Experiment, Laboratory, ModelInfo};
use serde_json::{Value, json};

use super::folders::Folders;
use super::settings::Settings;
use crate::commands::train::TrainArgs;

/// The share of the shortest and longest steps that a measurement leaves out.
const TRIMMED_SHARE: f64 = 0.1;
/// How much of a program's last words is kept.
const MAX_LOG_BYTES: u64 = 16 << 20;
/// Nothing is said for this long at most.
const SILENCE: Duration = Duration::from_secs(20);
/// Why an experiment failed that needs more than there is.
const OUT_OF_MEMORY: &str = "out of memory";

/// What all experiments of a search have in common.
pub(super) struct Runs<'a> {
    pub(super) args: &'a TrainArgs,
    pub(super) recipe: &'a Recipe,
    pub(super) settings: &'a Settings,
    /// What one rank may take.
    pub(super) memory_bytes: u64,
}

/// Runs experiments one after the other.
pub(super) struct Bench<'a> {
    runs: Runs<'a>,
    folders: &'a Folders,
    count: usize,
    tried: Vec<TriedPoint>,
}

/// How an experiment ended.
enum Ended {
    Measured(Value),
    Failed(String),
}

impl Laboratory for Bench<'_> {
    type Error = Failure;

    fn run(&mut self, experiments: &[Experiment]) -> Result<Vec<Option<f64>>, Failure> {
        let recompute = self.runs.recipe.model.activation_checkpointing;
        let mut measured = Vec::with_capacity(experiments.len());
        for experiment in experiments {
            measured.push(self.measure(experiment, recompute)?.value());
        }
        Ok(measured)
    }
}

impl<'a> Bench<'a> {
    pub(super) fn new(runs: Runs<'a>, folders: &'a Folders) -> Bench<'a> {
        Bench { runs, folders, count: 0, tried: Vec::new() }
    }

    /// What DeepSpeed finds out in a run of its own, and the memory plan knows.
    pub(super) fn note_model(&self, model: &ModelInfo) -> Result<(), Failure> {
        let info = json!({
            "num_params": model.parameters,
            "trainable_num_params": model.parameters,
            "activation_mem_per_gpu": model.activation_bytes,
            "rank": 0,
        });
        let path = self.folders.result("profile_model_info").join("model_info.json");
        self.folders.write(&path, &format!("{info:#}\n"))
    }

    /// What was tried so far, in order.
    pub(super) fn tried(&self) -> &[TriedPoint] {
        &self.tried
    }

    /// What an experiment measures, or measured before.
    pub(super) fn measure(&mut self, experiment: &Experiment, recompute: bool) -> Result<Outcome, Failure> {
        let folder = self.folders.result(&experiment.name);
        let (known, is_new) = match self.known(&folder, experiment) {
            Some(known) => (known, false),
            None => (self.start(&folder, experiment, recompute)?, true),
        };
        self.count += usize::from(is_new);
        let key = self.runs.settings.metric.key();
        let memory_bytes = match &known {
            Ended::Measured(metrics) => positive(&metrics["memory_bytes"]),
            Ended::Failed(_) => None,
        };
        let (outcome, text) = match known {
            Ended::Measured(metrics) => match positive(&metrics[key]) {
                Some(value) => (Outcome::Measured(value), format!("{key} {value:.2}")),
                None => (Outcome::Failed, format!("no {key}")),
            },
            Ended::Failed(why) if why == OUT_OF_MEMORY => (Outcome::OutOfMemory, why),
            Ended::Failed(why) => (Outcome::Failed, why),
        };
        self.tried.push(TriedPoint {
            name: experiment.name.clone(),
            memory_bytes,
            value: outcome.value(),
            said: text.clone(),
        });
        let known = if is_new { "" } else { " (known)" };
        let _ = print_output(&format!("experiment {:>3}  {:<28} {text}{known}", self.count, experiment.name));
        Ok(outcome)
    }

    /// The outcome of the same configuration, where an experiment of this name has come to one. What is no measure in its
    /// files was not measured.
    fn known(&self, folder: &Path, experiment: &Experiment) -> Option<Ended> {
        let read = |name: &str| -> Option<Value> {
            let text = ferrospeed_files::read(folder.join(name), MAX_LOG_BYTES).ok()?;
            serde_json::from_slice(&text).ok()
        };
        let about = read("exp.json").filter(|about| about["ds_config"] == experiment.ds_config)?;
        match &about["error"] {
            Value::String(why) => Some(Ended::Failed(why.clone())),
            _ => {
                let metrics = read("metrics.json")?;
                positive(&metrics[self.runs.settings.metric.key()])?;
                Some(Ended::Measured(metrics))
            }
        }
    }

    fn start(&self, folder: &Path, experiment: &Experiment, recompute: bool) -> Result<Ended, Failure> {
        let Runs { args, recipe, settings, memory_bytes } = &self.runs;
        // What an attempt that was interrupted has left would be taken for this one's.
        if folder.exists() {
            let io = |error| Failure::Run(format!("{}: {error}", folder.display()));
            std::fs::remove_dir_all(folder).map_err(io)?;
        }
        let config = folder.join("ds_config.json");
        self.folders.write(&config, &format!("{:#}\n", without_monitors(&experiment.ds_config)))?;
        let mut short = (*recipe).clone();
        short.steps = settings.end_profile_step + 1;
        (short.eval, short.save, short.sample, short.trace) = (Default::default(), None, None, None);
        short.model.activation_checkpointing = recompute;
        short.ds_config = config.display().to_string().into();
        let text = short.to_toml().map_err(|error| Failure::Run(format!("the recipe: {error}")))?;
        let recipe_path = folder.join("recipe.toml");
        self.folders.write(&recipe_path, &text)?;

        let run = RunFolder::at(folder.join("run"));
        let program = std::env::current_exe()
            .map_err(|error| Failure::Run(format!("cannot find this program: {error}")))?;
        let mut words = vec!["train".to_owned(), recipe_path.display().to_string()];
        words.extend(["--out".into(), run.path().display().to_string(), "--overwrite".into()]);
        words.extend(["--force".into(), "--experiment".into()]);
        words.extend(args.words_of_place(recipe.ranks));
        let mut about = json!({
            "name": experiment.name,
            "ds_config": experiment.ds_config,
            "num_gpus": recipe.ranks,
            "num_nodes": 1,
            "hostfile": null,
            "exp_id": self.count,
            "result_dir": folder,
            "user_script": args.recipe(),
            "user_args": words,
        });
        self.folders.write(&self.folders.experiment(&experiment.name), &format!("{about:#}\n"))?;
        let mut line = vec![program.display().to_string()];
        line.extend(words.iter().cloned());
        self.folders.write(&folder.join("cmd.txt"), &(shell::join(&line) + "\n"))?;

        let output = |name: &str| -> Result<(PathBuf, Stdio), Failure> {
            let path = folder.join(name);
            let options = File::options().create(true).write(true).truncate(true).clone();
            let file = ferrospeed_files::open_to_write(&path, &options)
                .map_err(|error| Failure::Run(format!("{}: {error}", path.display())))?;
            Ok((path, file.into()))
        };
        let ((_, stdout), (stderr_path, stderr)) = (output("stdout.log")?, output("stderr.log")?);
        let mut command = Command::new(&program);
        command.args(&words).stdin(Stdio::null()).stdout(stdout).stderr(stderr);
        let bounds = Bounds { deadline: settings.deadline, memory_bytes: Some(*memory_bytes) };
        let number = self.count + 1;
        let still = |elapsed: Duration| {
            let (name, most) = (&experiment.name, settings.deadline.as_secs());
            let _ = print_output(&format!(
                "experiment {number:>3}  {name:<28} runs for {} s now, {most} s at most",
                elapsed.as_secs()
            ));
        };
        let ended = told_every(SILENCE, still, || run_bounded(&mut command, &bounds))
            .map_err(|error| Failure::Run(format!("cannot start {}: {error}", program.display())))?;
        let outcome = match ended {
            BoundedEnd::OutOfTime => {
                Ended::Failed(format!("out of time: {:?} were not enough", settings.deadline))
            }
            BoundedEnd::Exited(status) if status.success() => match self.metrics(&run, experiment) {
                Some(metrics) => Ended::Measured(metrics),
                None => Ended::Failed("it measured nothing: its log is too short".into()),
            },
            BoundedEnd::Exited(status) => {
                let said = ferrospeed_files::read_text(&stderr_path, MAX_LOG_BYTES).unwrap_or_default();
                Ended::Failed(reason(&said, status.code(), status.signal()))
            }
        };
        match &outcome {
            Ended::Failed(why) => about["error"] = why.clone().into(),
            Ended::Measured(metrics) => {
                self.folders.write(&folder.join("metrics.json"), &format!("{metrics:#}\n"))?;
            }
        }
        // Last: an experiment without it has not ended.
        self.folders.write(&folder.join("exp.json"), &format!("{about:#}\n"))?;
        Ok(outcome)
    }

    /// From the log of a run: times in microseconds, of a micro-batch and of a step.
    fn metrics(&self, run: &RunFolder, experiment: &Experiment) -> Option<Value> {
        let Runs { settings, recipe, .. } = &self.runs;
        let mut laid_out = (*recipe).clone();
        laid_out.ds_config = experiment.ds_config.clone();
        let records: Vec<StepRecord> = read_json_lines(&run.log()).ok()?;
        let measured: Vec<&StepRecord> =
            records.iter().filter(|record| record.step > settings.start_profile_step).collect();
        if measured.is_empty() {
            return None;
        }
        let mean = |value: fn(&StepRecord) -> f64| {
            let values: Vec<f64> = measured.iter().map(|record| value(record)).collect();
            trimmed_mean(&values, TRIMMED_SHARE)
        };
        let accumulation = whole(&experiment.ds_config["gradient_accumulation_steps"]).unwrap_or(1).max(1);
        let per_micro = |value: f64| value * 1e3 / accumulation as f64;
        let latency_us = mean(|record| record.step_ms) * 1e3;
        let batch = experiment.micro_batch() * accumulation * laid_out.data_ranks().get();
        let memory = measured.iter().filter_map(|record| record.memory_bytes.get("total")).max();
        Some(json!({
            "fwd": per_micro(mean(|record| record.forward_ms)),
            "bwd": per_micro(mean(|record| record.backward_ms)),
            "step": per_micro(mean(|record| record.optimizer_ms)),
            "latency": latency_us,
            "throughput": batch as f64 * 1e6 / latency_us,
            "FLOPS_per_gpu": mean(|record| record.flops_per_s) / f64::from(recipe.ranks.max(1)),
            "memory_bytes": memory,
            "rank": 0,
        }))
    }
}

/// A number that something can have measured.
fn positive(value: &Value) -> Option<f64> {
    value.as_f64().filter(|value| value.is_finite() && *value > 0.0)
}

/// Does something, and tells how long it takes whenever so much time has passed.
fn told_every<R>(every: Duration, tell: impl Fn(Duration) + Send, work: impl FnOnce() -> R) -> R {
    let (done, waiting) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let start = Instant::now();
            while let Err(RecvTimeoutError::Timeout) = waiting.recv_timeout(every) {
                tell(start.elapsed());
            }
        });
        // A process that dies with its starter dies with the thread that started it: it is started here.
        let result = work();
        drop(done);
        result
    })
}

/// The curves of experiments are nobody's, and would lie among those of real runs.
fn without_monitors(ds_config: &Value) -> Value {
    let mut ds_config = ds_config.clone();
    if let Some(config) = ds_config.as_object_mut() {
        config.retain(|key, _| !["tensorboard", "csv_monitor", "wandb"].contains(&key.as_str()));
    }
    ds_config
}

/// Why a run failed, from its last words and its end.
fn reason(said: &str, code: Option<i32>, signal: Option<i32>) -> String {
    let lower = said.to_lowercase();
    let is_memory = ["out of memory", "memory allocation of", "cannot allocate memory", "does not fit"];
    if is_memory.iter().any(|words| lower.contains(words)) {
        return OUT_OF_MEMORY.to_owned();
    }
    let last = said.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or("it said nothing");
    match (code, signal) {
        (Some(code), _) => format!("failed with code {code}: {last}"),
        (None, Some(signal)) => format!("killed by signal {signal}: {last}"),
        (None, None) => format!("failed: {last}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_run_is_not_silent() {
        let (told, heard) = mpsc::channel();
        let tell = move |elapsed: Duration| told.send(elapsed).unwrap();
        let deadline = Duration::from_secs(30);
        let seen = told_every(Duration::from_millis(1), tell, || {
            [(); 2].map(|()| heard.recv_timeout(deadline).expect("it tells again and again"))
        });
        assert!(seen[1] > seen[0]);
        // What is over is not told of.
        assert_eq!(told_every(deadline, |_| panic!("it was quick"), || 7), 7);
    }

    #[test]
    fn running_out_of_memory_is_told_from_other_ends() {
        assert_eq!(reason("error: CUDA: out of memory\nbye", Some(1), None), "out of memory");
        assert_eq!(reason("memory allocation of 99 bytes failed\n", None, Some(6)), "out of memory");
        assert_eq!(
            reason("a warning about an error\n\n", Some(2), None),
            "failed with code 2: a warning about an error"
        );
        assert_eq!(reason("", None, Some(9)), "killed by signal 9: it said nothing");
    }
}

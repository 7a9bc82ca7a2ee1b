//! The `tensorboard`, `csv_monitor` and `wandb` sections: curves of a run, written by rank 0 under DeepSpeed's names.
//!
//! A monitor that fails while a run goes on is a warning: what was learned cannot be made again, a curve can be done
//! without.

use std::path::Path;
use std::time::{Duration, Instant};

use ferrospeed_comm::World;
use ferrospeed_config::{Config, Precision};
use ferrospeed_observe::ObserveError;
use ferrospeed_observe::monitor::{
    CsvMonitor, Monitor, Monitors, Samples, StepEvents, TensorBoard, TimesMs, WandbOffline, WandbRun,
};

use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::timers::StepTimes;

/// Where W&B keeps the runs of a folder unless it is told otherwise.
const WANDB_FOLDER: &str = "wandb";

/// The monitors of a run.
pub(crate) struct Monitoring {
    /// Rank 0's; the others have none.
    monitors: Monitors,
    /// Whether rank 0 has any, which all ranks know: they average the loss for it.
    has_any: bool,
    is_on: bool,
    spent: Duration,
}

impl Monitoring {
    /// Those that the configuration asks for, in the places it names: relative to the folder the program runs in.
    pub(crate) fn of_run(config: &Config, world: &World) -> Result<Monitoring> {
        let configured = &config.monitors;
        let has_any = configured.tensorboard.is_some()
            || configured.csv_monitor.is_some()
            || configured.wandb.is_some();
        let mut monitors = Monitors::default();
        if world.rank() == 0 {
            if let Some(board) = &configured.tensorboard {
                let folder = made("tensorboard.output_path", &board.output_path)?;
                let board = TensorBoard::create(folder, &board.job_name);
                monitors.add(board.map_err(cannot_write("tensorboard.job_name"))?);
            }
            if let Some(csv) = &configured.csv_monitor {
                let folder = made("csv_monitor.output_path", &csv.output_path)?;
                let csv = CsvMonitor::create(folder, &csv.job_name);
                monitors.add(csv.map_err(cannot_write("csv_monitor.job_name"))?);
            }
            if let Some(wandb) = &configured.wandb {
                let (project, group, team) = (wandb.project.clone(), wandb.group.clone(), wandb.team.clone());
                let folder = wandb.dir.as_deref().unwrap_or(WANDB_FOLDER);
                let made = WandbOffline::create(Path::new(folder), &WandbRun { project, group, team });
                monitors.add(made.map_err(cannot_write("wandb.dir"))?);
            }
        }
        Ok(Monitoring { monitors, has_any, is_on: true, spent: Duration::ZERO })
    }

    /// Whether the next step is told to anybody.
    pub(crate) fn is_due(&self) -> bool {
        self.has_any && self.is_on
    }

    fn write(&mut self, act: impl FnOnce(&mut Monitors)) {
        let start = Instant::now();
        act(&mut self.monitors);
        for note in self.monitors.take_notes() {
            tracing::warn!("{note}");
        }
        self.spent += start.elapsed();
    }
}

/// The folder of a key, made by itself: so that the folder of the job below it is not blamed on it.
fn made<'a>(key: &'static str, folder: &'a str) -> Result<&'a Path> {
    let why = |error: std::io::Error| format!("{folder}: {error}");
    match folder.is_empty() {
        true => Ok(()),
        false => std::fs::create_dir_all(folder)
            .map_err(|error| EngineError::Argument { what: key, why: why(error) }),
    }
    .map(|()| Path::new(folder))
}

/// Names the key that says where a monitor writes.
fn cannot_write(what: &'static str) -> impl FnOnce(ObserveError) -> EngineError {
    move |error| EngineError::Argument { what, why: error.to_string() }
}

impl Engine {
    /// Adds a monitor to those that the configuration asks for. All ranks call it together; rank 0 makes it.
    pub fn add_monitor<M: Monitor + 'static>(
        &mut self,
        make: impl FnOnce() -> Result<M, ObserveError>,
    ) -> Result<()> {
        if self.world.rank() == 0 {
            self.monitoring.monitors.add(make()?);
        }
        self.monitoring.has_any = true;
        Ok(())
    }

    /// Whether the steps to come are told to the monitors. All ranks say the same.
    pub fn set_monitoring(&mut self, is_on: bool) {
        self.monitoring.is_on = is_on;
    }

    /// Tells a number of the program's own to rank 0's monitors, at the samples seen so far.
    pub fn monitor(&mut self, tag: &str, value: f64) {
        let samples = self.global_samples;
        self.monitoring.write(|monitors| {
            monitors.emit(tag, value, samples);
            monitors.flush();
        });
    }

    /// Ends the monitors, and gives what is missing in those of this rank that are not complete. Steps that come after it are
    /// told to nobody.
    pub fn finish_monitors(&mut self) -> Vec<String> {
        std::mem::take(&mut self.monitoring.monitors).finish()
    }

    /// How long monitors took so far.
    pub fn time_monitoring(&self) -> Duration {
        self.monitoring.spent
    }

    /// After a step: tells it to the monitors.
    pub(crate) fn monitor_step(&mut self, loss: f64) {
        if !self.monitoring.is_due() || self.world.rank() != 0 {
            return;
        }
        let after = self.global_samples;
        let is_timed = self.config.wall_clock_breakdown || self.config.flops_profiler.is_some();
        let is_scaled = matches!(self.config.precision, Precision::Fp16 { .. });
        let events = StepEvents {
            samples: Samples { before: after.saturating_sub(self.train_batch_size()), after },
            loss,
            lr: self.get_lr().first().copied().unwrap_or(0.0),
            loss_scale: is_scaled.then(|| self.loss_scale()),
            times: is_timed.then(|| self.last_step_times().in_ms()),
        };
        let eigenvalues = self.eigenvalues_of(self.global_steps).to_vec();
        let layer_norms = self.layer_norms().to_vec();
        self.monitoring.write(|monitors| {
            monitors.step(&events);
            for (layer, norm) in layer_norms {
                monitors.emit(&format!("Train/Gradients/{layer}"), norm, after);
            }
            for (block, value) in eigenvalues.into_iter().enumerate() {
                let tag = format!("Train/Eigenvalues/ModelBlockParam_{block}");
                monitors.emit(&tag, value, after);
            }
        });
    }
}

impl StepTimes {
    fn in_ms(self) -> TimesMs {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        TimesMs {
            forward: ms(self.forward),
            backward: ms(self.backward),
            backward_inner: ms(self.backward_inner),
            backward_allreduce: ms(self.backward_allreduce),
            step: ms(self.step),
        }
    }
}

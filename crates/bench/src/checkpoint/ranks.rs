//! One rank of the measurement: raw transfers, saves, loads and steps, in turn and together with the others.

use std::num::NonZeroU64;
use std::path::Path;
use std::time::Instant;

use ferrospeed_comm::{Group, World};
use ferrospeed_config::{AutoValues, Config};
use ferrospeed_engine::{Engine, LoadOptions, SaveOptions, Setup, initialize};
use ferrospeed_nn::Linear;
use ferrospeed_tensor::{DType, Tensor, ops};
use serde_json::json;

use super::raw::{self, Way};
use super::{STATE_BYTES_PER_WEIGHT, WIDTH};

/// Rows of a micro-batch: a step then takes about as long as it takes to write its state.
const ROWS: usize = 16;

/// Seconds of one round.
#[derive(Debug, Clone, Copy)]
pub(super) struct Round {
    pub(super) raw_write_s: f64,
    pub(super) save_s: f64,
    pub(super) raw_read_s: f64,
    pub(super) load_s: f64,
    /// A training step with nothing beside it.
    pub(super) step_s: f64,
    /// The call that saves in the background.
    pub(super) call_s: f64,
    /// That call and the training step after it.
    pub(super) saving_step_s: f64,
    /// Copying the state into fresh memory, with nothing beside it.
    pub(super) copy_s: f64,
}

struct Rank<'a> {
    group: Group,
    leads: bool,
    engine: Engine,
    model: Vec<Linear>,
    input: Tensor,
    dir: &'a Path,
}

type Outcome<T> = Result<T, String>;

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Runs `rounds` rounds in the folder `dir`, where raw files go too.
pub(super) fn run(world: World, layers: usize, dir: &Path, rounds: u32) -> Outcome<Vec<Round>> {
    let config = json!({
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    });
    let ranks = NonZeroU64::new(world.size() as u64).unwrap_or(NonZeroU64::MIN);
    let config = Config::from_value("bench", &config).map_err(text)?;
    let (config, _) = config.resolve(ranks, &AutoValues::new()).map_err(text)?;
    let (number, group) = (world.rank(), world.group());
    let device = ferrospeed_cpu::with_threads(1);
    let raw_file = dir.join(format!("raw-{number}"));
    let bytes = layers * WIDTH * WIDTH * STATE_BYTES_PER_WEIGHT / world.size();
    let setup = Setup::new(config, world, device.clone());
    let (engine, model) = initialize(&setup, |init| {
        let layer = |layer| Linear::new(&init.at(format!("layer.{layer}")), WIDTH, WIDTH, false);
        (0..layers).map(layer).collect::<Vec<_>>()
    })
    .map_err(text)?;
    let input = Tensor::full([ROWS, WIDTH], 0.01, DType::F32, &device).map_err(text)?;
    let checkpoints = dir.join("checkpoints");
    let mut rank = Rank { group, leads: number == 0, engine, model, input, dir: &checkpoints };
    // The first step allocates what all others use again.
    rank.step()?;
    (0..rounds).map(|_| rank.round(&raw_file, bytes)).collect()
}

impl Rank<'_> {
    /// Seconds until every rank has done its work.
    fn timed(&mut self, work: impl FnOnce(&mut Self) -> Outcome<()>) -> Outcome<f64> {
        self.group.barrier().map_err(text)?;
        let start = Instant::now();
        work(self)?;
        self.group.barrier().map_err(text)?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Empties the cache for all.
    fn forget(&mut self, dir: &Path) -> Outcome<()> {
        self.group.barrier().map_err(text)?;
        if self.leads {
            raw::forget(dir).map_err(text)?;
        }
        Ok(())
    }

    fn round(&mut self, raw_file: &Path, bytes: usize) -> Outcome<Round> {
        let folder = raw_file.parent().unwrap_or(raw_file).to_path_buf();
        let (mut raw_write_s, mut raw_read_s) = (f64::INFINITY, f64::INFINITY);
        for way in [Way::Cached, Way::Direct] {
            let write_s = match self.timed(|_| raw::write(raw_file, bytes, way).map_err(text)) {
                // A file system that cannot be reached past the cache gives one figure less.
                Err(_) if way == Way::Direct => continue,
                outcome => outcome?,
            };
            self.forget(&folder)?;
            raw_write_s = raw_write_s.min(write_s);
            raw_read_s = raw_read_s.min(self.timed(|_| raw::read(raw_file, way).map_err(text))?);
        }
        std::fs::remove_file(raw_file).map_err(text)?;
        let (dir, options) = (self.dir.to_path_buf(), SaveOptions::default());
        let save_s =
            self.timed(|rank| rank.engine.save_checkpoint(&dir, &options).map(drop).map_err(text))?;
        self.forget(&dir)?;
        let load = LoadOptions::default();
        let load_s = self.timed(|rank| rank.engine.load_checkpoint(&dir, &load).map(drop).map_err(text))?;
        let step_s = self.timed(Rank::step)?;
        let mut call_s = 0.0;
        let saving_step_s = self.timed(|rank| {
            let start = Instant::now();
            rank.engine.save_checkpoint_in_background(&dir, &options).map_err(text)?;
            call_s = start.elapsed().as_secs_f64();
            rank.step()
        })?;
        self.engine.finish_checkpoint().map_err(text)?;
        let copy_s = self.timed(Rank::copy)?;
        Ok(Round { raw_write_s, save_s, raw_read_s, load_s, step_s, call_s, saving_step_s, copy_s })
    }

    fn step(&mut self) -> Outcome<()> {
        let (model, input) = (&self.model, &self.input);
        let loss = self.engine.forward(|_| {
            let output = model.iter().try_fold(input.clone(), |x, layer| layer.forward(&x))?;
            ops::mean(&output)
        });
        let loss = loss.map_err(|error: ferrospeed_tensor::TensorError| text(error))?;
        self.engine.backward(&loss).map_err(text)?;
        self.engine.step().map(drop).map_err(text)
    }

    fn copy(&mut self) -> Outcome<()> {
        let store = self.engine.store();
        let pieces = store.pieces_to_write();
        let held = store.hold(&pieces).map_err(text)?;
        let copies = pieces.iter().enumerate().map(|(index, piece)| {
            let mut copy = Vec::with_capacity(piece.len * piece.dtype.size_bytes());
            held.read(index, 0..piece.len, &mut copy).map(|()| copy).map_err(text)
        });
        // As a save keeps them: all at once.
        std::hint::black_box(copies.collect::<Outcome<Vec<Vec<u8>>>>()?);
        Ok(())
    }
}

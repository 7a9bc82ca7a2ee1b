//! The exports of a checkpoint, as processes of their own whose peak memory is looked at.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ferrospeed_checkpoint::{
    Contents, Disk, Dtype, Kind, Origin, PieceSpec, Retention, Target, TrainingState, save,
};
use ferrospeed_comm::World;
use ferrospeed_command::Failure;
use serde_json::Value;

use super::{WIDTH, failed};
use crate::measure::peak_rss_bytes_of;

/// How often a child's memory is looked at; its peak only grows.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// How one export went.
pub(super) struct Export {
    pub(super) seconds: f64,
    pub(super) peak_rss_bytes: u64,
}

/// Writes a checkpoint of layers and Adam's states from numbers made on the way: it may be larger than memory.
pub(super) fn write_checkpoint(layers: usize, ranks: usize, dir: &Path) -> Result<(), Failure> {
    let started: Vec<_> = World::threads(ranks)
        .into_iter()
        .map(|world| {
            let dir = dir.to_path_buf();
            std::thread::spawn(move || write_rank(&world, layers, &dir))
        })
        .collect();
    started.into_iter().try_for_each(|rank| match rank.join() {
        Ok(outcome) => outcome.map_err(Failure::Run),
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

fn write_rank(world: &World, layers: usize, dir: &Path) -> Result<(), String> {
    let numel = (WIDTH * WIDTH) as u64;
    let (rank, ranks) = (world.rank() as u64, world.size() as u64);
    let start = numel * rank / ranks;
    let mut pieces = Vec::new();
    for layer in 0..layers {
        let states = ["exp_avg", "exp_avg_sq"].map(|name| Kind::State(name.to_owned()));
        pieces.extend([Kind::Master].into_iter().chain(states).map(|kind| PieceSpec {
            name: format!("layer.{layer}.weight"),
            kind,
            shape: vec![WIDTH as u64; 2],
            dtype: Dtype::F32,
            place: layer as u64,
            part: None,
            start,
            len: numel * (rank + 1) / ranks - start,
        }));
    }
    let contents = Contents {
        origin: Origin {
            ranks: world.size(),
            stage: 2,
            dtype: Dtype::F32,
            optimizer: Some("adam".into()),
            kernels: None,
        },
        training: TrainingState::default(),
        client_state: Value::Null,
        config: Value::Null,
        aliases: Default::default(),
    };
    let target =
        Target { dir, tag: "bench", update_latest: true, retention: Retention::default(), fs: &Disk };
    let mut bytes = |piece: usize, elements: std::ops::Range<u64>, out: &mut Vec<u8>| {
        let value = |element: u64| (element as u32 ^ (piece as u32) << 8) as f32;
        elements.for_each(|element| out.extend_from_slice(&value(element).to_le_bytes()));
        Ok(())
    };
    save(&world.group(), &target, contents, &pieces, &mut bytes).map(drop).map_err(|error| error.to_string())
}

/// Runs `ferrospeed checkpoint ACTION` and watches its memory.
pub(super) fn run(checkpoints: &Path, action: &str, output: &Path) -> Result<Export, Failure> {
    let program = std::env::current_exe()
        .map_err(|error| Failure::Run(format!("cannot find this program: {error}")))?;
    let start = Instant::now();
    let mut child = Command::new(program)
        .args(["checkpoint", action])
        .args([checkpoints, output])
        .stdout(Stdio::null())
        .spawn()
        .map_err(|error| failed(output, &error))?;
    let mut peak_rss_bytes = 0;
    let status = loop {
        peak_rss_bytes = peak_rss_bytes.max(peak_rss_bytes_of(child.id()).unwrap_or(0));
        if let Some(status) = child.try_wait().map_err(|error| failed(output, &error))? {
            break status;
        }
        std::thread::sleep(LOOK_EVERY);
    };
    if !status.success() {
        return Err(Failure::Run(format!("`checkpoint {action}` ended with {status}")));
    }
    Ok(Export { seconds: start.elapsed().as_secs_f64(), peak_rss_bytes })
}

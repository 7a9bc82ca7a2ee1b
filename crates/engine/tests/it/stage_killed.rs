//! A stage whose process is killed in the middle of a batch: all others end within bounds and say who it was, whatever the
//! schedule. Ranks are processes here, so that nothing of the dead one is left to answer for it.

use std::time::Duration;

use super::common::{config, device};
use ferrospeed_comm::{ConnectOptions, World};
use ferrospeed_engine::{EngineError, Options, Setup, initialize_pipeline};
use ferrospeed_nn::{Init, Linear, Sequential, Trained};
use ferrospeed_tensor::{Tensor, TensorError, ops};
use ferrospeed_testkit::ranks::{Job, finish, role};
use serde_json::json;

const STAGES: usize = 4;
const VICTIM: usize = 2;
const MICRO_BATCHES: usize = 8;
/// A lost rank must be noticed within 5 seconds; the rest is start-up on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

fn mean_square(y: &Tensor, target: &Tensor) -> Result<Tensor, TensorError> {
    ops::mean(&ops::square(&ops::sub(y, target)?)?)
}

/// What a rank does when this binary is started as one: trains until it is killed, or until another is.
#[test]
fn rank_process() {
    let Some(schedule) = role() else { return };
    let world = World::connect(ConnectOptions::from_env().unwrap()).unwrap();
    let rank = world.rank();
    let init = Init::root();
    let layers = (0..2 * STAGES)
        .fold(Sequential::new(&init), |layers, _| layers.add(|init| Linear::new(init, 6, 6, true)));
    let model = Trained { layers, loss: mean_square };
    let value = json!({
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "pipeline": {"schedule": schedule, "partition": "uniform"},
    });
    let setup = Setup::new(config(&value, 1), world, device(1));
    let stages = STAGES.try_into().unwrap();
    let mut engine =
        initialize_pipeline(&setup, stages, &model, &init.parameters(), Options::default()).unwrap();
    let values = Tensor::from_slice(&[0.5f32; 12], [2, 6], engine.device()).unwrap();
    for step in 0..1000 {
        let run = engine.train_batch(&model, |micro| {
            if (step, micro, rank) == (1, MICRO_BATCHES / 2, VICTIM) {
                // SAFETY: ends this process and touches no memory.
                unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            }
            Ok::<_, EngineError>((values.clone(), values.clone()))
        });
        if let Err(error) = run {
            println!("\nOUTCOME of step {step}: {error}");
            return;
        }
    }
    println!("\nNEVER TOLD");
}

#[test]
fn all_stages_end_and_name_the_one_that_was_killed() {
    for schedule in ["zb-v", "1f1b"] {
        let job = Job::new(module_path!(), STAGES, schedule).with("FERROSPEED_THREADS", 1);
        let endings = finish(job.start(), LIMIT);
        for (stage, ending) in endings.iter().enumerate() {
            assert_eq!(ending.success, stage != VICTIM, "{schedule}, stage {stage}: {}", ending.output);
        }
        for stage in (0..STAGES).filter(|stage| *stage != VICTIM) {
            let told = &endings[stage].output;
            assert!(told.contains("OUTCOME of step 1: "), "{schedule}, stage {stage}: {told}");
            assert!(told.contains(&format!("rank {VICTIM} ")), "{schedule}, stage {stage}: {told}");
        }
    }
}

//! A run that was saved and loaded is the run that never stopped, whatever the stage, the precision and the ranks.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::common::{Batch, Model, engine, on_ranks};
use ferrospeed_checkpoint::{Disk, FileSystem};
use ferrospeed_engine::{Engine, LoadOptions, SaveOptions, StepReport};
use ferrospeed_nn::Parameters;
use ferrospeed_tensor::{Device, Tensor};
use ferrospeed_zero::Held;
use ferrospeed_zero::access::Which;
use serde_json::{Value, json};

fn description() -> Value {
    json!({"kind": "lm", "vocab": 13, "dm": 12, "nh": 3, "nl": 2, "tmax": 7})
}

fn batch(step: usize, rank: usize, device: &Device) -> Batch {
    let ids: Vec<i64> = (0..14).map(|i| ((i * 7 + step * 5 + rank * 11 + i * i) % 13) as i64).collect();
    Batch::Tokens(Tensor::from_slice(&ids, [2, 7], device).unwrap())
}

fn configuration(stage: u8, precision: &str) -> Value {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 12}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 500, "stage3_param_persistence_threshold": 20},
    });
    match precision {
        // The scale falls in the first steps and grows in later ones: its state matters.
        "fp16" => {
            config["fp16"] =
                json!({"enabled": true, "initial_scale_power": 18, "hysteresis": 1, "loss_scale_window": 6})
        }
        "bf16" => config["bf16"] = json!({"enabled": true}),
        _ => {}
    }
    config
}

/// Masters, states, counters and losses, as bits.
#[derive(Debug, PartialEq, Eq, Clone, Default)]
struct Outcome {
    losses: Vec<u32>,
    weights: Vec<u32>,
    states: Vec<u32>,
    counters: Vec<u64>,
}

fn train(engine: &mut Engine, model: &Model, steps: std::ops::Range<usize>, losses: &mut Vec<u32>) {
    let (rank, device) = (engine.world().rank(), engine.device().clone());
    for step in steps {
        let batch = batch(step, rank, &device);
        let loss = engine.forward(|_| model.loss(&batch)).unwrap();
        losses.push(loss.item().unwrap().to_bits());
        engine.backward(&loss).unwrap();
        assert_ne!(engine.step().unwrap(), StepReport::Accumulating);
    }
}

fn state_of(engine: &Engine, parameters: &Parameters) -> Outcome {
    let mut outcome = Outcome::default();
    for param in parameters.as_slice() {
        let full = |which| engine.store().full(param, which).unwrap().into_iter().map(f32::to_bits);
        outcome.weights.extend(full(Which::Weight));
        if param.is_trainable() {
            outcome.states.extend(full(Which::State("exp_avg")));
            outcome.states.extend(full(Which::State("exp_avg_sq")));
        }
        // What kernels read must follow the masters.
        outcome.weights.extend(engine.store().full_as_read(param).unwrap().into_iter().map(f32::to_bits));
    }
    outcome.counters = vec![
        engine.global_steps(),
        engine.global_samples(),
        engine.micro_steps(),
        engine.skipped_steps(),
        engine.loss_scale().to_bits(),
        engine.get_lr()[0].to_bits(),
    ];
    outcome
}

/// Trains `steps`, loading before and saving after where a folder is given; `saved` compares what was saved.
fn run(
    ranks: usize,
    config: Value,
    steps: std::ops::Range<usize>,
    load: Option<&Path>,
    save: Option<&Path>,
) -> Vec<Outcome> {
    let (config, load, save) = (Arc::new(config), load.map(PathBuf::from), save.map(PathBuf::from));
    on_ranks(ranks, move |world| {
        let (model, parameters) = Model::build(&description());
        let mut engine = engine(world, &config, &parameters, None, None, 1);
        if let Some(dir) = &load {
            let loaded = engine
                .load_checkpoint(dir, &LoadOptions::default())
                .unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(loaded.client_state, json!({"epoch": 3}));
            assert_eq!(loaded.data_position, engine.global_samples());
        }
        let mut losses = Vec::new();
        train(&mut engine, &model, steps.clone(), &mut losses);
        if let Some(dir) = &save {
            let options = SaveOptions { client_state: json!({"epoch": 3}), ..Default::default() };
            engine.save_checkpoint(dir, &options).unwrap_or_else(|error| panic!("{error}"));
        }
        Outcome { losses, ..state_of(&engine, &parameters) }
    })
}

#[test]
fn a_resumed_run_is_the_run_that_never_stopped() {
    for stage in 0..=3 {
        for precision in ["fp32", "bf16", "fp16"] {
            let config = configuration(stage, precision);
            let dir = tempfile::tempdir().unwrap();
            let whole = run(2, config.clone(), 0..20, None, None);
            let first = run(2, config.clone(), 0..10, None, Some(dir.path()));
            let second = run(2, config, 10..20, Some(dir.path()), None);
            for (rank, whole) in whole.iter().enumerate() {
                let mut resumed = second[rank].clone();
                resumed.losses.splice(0..0, first[rank].losses.iter().copied());
                assert_eq!(&resumed, whole, "stage {stage}, {precision}, rank {rank}");
            }
        }
    }
}

#[test]
fn masters_and_states_survive_other_ranks_stages_and_precisions() {
    let dir = tempfile::tempdir().unwrap();
    let first = run(2, configuration(2, "bf16"), 0..5, None, Some(dir.path()));
    let state = |outcome: &Outcome| (outcome.weights.clone(), outcome.states.clone());
    // Each loads what the one before saved and saves it again, without a step between.
    for (ranks, stage) in [(1, 0), (3, 3), (2, 1), (4, 3), (3, 0), (2, 2)] {
        let again = run(ranks, configuration(stage, "bf16"), 5..5, Some(dir.path()), Some(dir.path()));
        for outcome in &again {
            assert_eq!(state(outcome), state(&first[0]), "{ranks} ranks, stage {stage}");
        }
    }
    // Masters are f32 in every precision.
    let masters = |outcome: &Outcome| outcome.states.clone();
    for precision in ["fp32", "fp16"] {
        let other = run(3, configuration(3, precision), 5..5, Some(dir.path()), None);
        assert_eq!(masters(&other[0]), masters(&first[0]), "{precision}");
    }
}

#[test]
fn a_save_in_the_background_holds_the_state_of_its_moment() {
    let config = configuration(3, "bf16");
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().to_path_buf();
    let given = Arc::new(config.clone());
    let whole = on_ranks(2, move |world| {
        let (model, parameters) = Model::build(&description());
        let mut engine = engine(world, &given, &parameters, None, None, 1);
        let mut losses = Vec::new();
        train(&mut engine, &model, 0..4, &mut losses);
        let options = SaveOptions { client_state: json!({"epoch": 3}), ..Default::default() };
        engine.save_checkpoint_in_background(&folder, &options).unwrap();
        // Training goes on, and a second save waits for the first.
        train(&mut engine, &model, 4..8, &mut losses);
        let late = SaveOptions { tag: Some("late".into()), save_latest: false, ..options };
        engine.save_checkpoint_in_background(&folder, &late).unwrap();
        assert!(engine.finish_checkpoint().unwrap().is_some_and(|path| path.ends_with("late")));
        assert!(engine.finish_checkpoint().unwrap().is_none());
        Outcome { losses, ..state_of(&engine, &parameters) }
    });
    let resumed = run(2, config, 4..8, Some(dir.path()), None);
    for rank in 0..2 {
        assert_eq!(resumed[rank].losses, whole[rank].losses[4..]);
        assert_eq!(resumed[rank].weights, whole[rank].weights);
    }
}

/// A disk that makes no file before somebody waits to change the state.
struct NotBeforeAStep(Mutex<Option<Held>>);

impl FileSystem for NotBeforeAStep {
    fn create_file(&self, path: &Path) -> std::io::Result<File> {
        if let Some(held) = self.0.lock().unwrap().take() {
            let deadline = Instant::now() + Duration::from_secs(60);
            while !held.is_waited_for() {
                assert!(Instant::now() < deadline, "no step came");
                std::thread::yield_now();
            }
        }
        Disk.create_file(path)
    }
    fn create_folder(&self, path: &Path) -> std::io::Result<()> {
        Disk.create_folder(path)
    }
    fn write(&self, file: &mut File, bytes: &[u8]) -> std::io::Result<()> {
        Disk.write(file, bytes)
    }
    fn sync_file(&self, file: &File) -> std::io::Result<()> {
        Disk.sync_file(file)
    }
    fn sync_folder(&self, path: &Path) -> std::io::Result<()> {
        Disk.sync_folder(path)
    }
    fn rename(&self, from: &Path, to: &Path) -> std::io::Result<()> {
        Disk.rename(from, to)
    }
    fn remove_folder(&self, path: &Path) -> std::io::Result<()> {
        Disk.remove_folder(path)
    }
    fn available_bytes(&self, path: &Path) -> std::io::Result<u64> {
        Disk.available_bytes(path)
    }
}

#[test]
fn a_step_that_comes_before_the_first_byte_is_written_changes_nothing_that_is_saved() {
    for (stage, precision) in [(0, "fp32"), (2, "fp32"), (2, "bf16"), (3, "fp32")] {
        let config = configuration(stage, precision);
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().to_path_buf();
        let given = Arc::new(config.clone());
        let saved = on_ranks(2, move |world| {
            let (model, parameters) = Model::build(&description());
            let mut engine = engine(world, &given, &parameters, None, None, 1);
            let mut losses = Vec::new();
            train(&mut engine, &model, 0..4, &mut losses);
            let saved = state_of(&engine, &parameters);
            let fs = Arc::new(NotBeforeAStep(Mutex::new(Some(engine.store().hold(&[]).unwrap()))));
            let options = SaveOptions { client_state: json!({"epoch": 3}), fs, ..Default::default() };
            engine.save_checkpoint_in_background(&folder, &options).unwrap();
            train(&mut engine, &model, 4..6, &mut losses);
            engine.finish_checkpoint().unwrap();
            saved
        });
        assert_eq!(run(2, config, 0..0, Some(dir.path()), None), saved, "stage {stage}, {precision}");
    }
}

/// Loads into an engine with this model and configuration on one rank, and returns the error.
fn refusal(
    dir: &Path,
    model: Value,
    config: Value,
    strict: bool,
) -> Result<ferrospeed_engine::Loaded, String> {
    let dir = dir.to_path_buf();
    let outcomes = on_ranks(1, move |world| {
        let (_, parameters) = Model::build(&model);
        let mut engine = engine(world, &config, &parameters, None, None, 1);
        let options = LoadOptions { load_module_strict: strict, ..Default::default() };
        engine.load_checkpoint(&dir, &options).map_err(|error| error.to_string())
    });
    outcomes.into_iter().next().unwrap()
}

#[test]
fn another_model_or_optimizer_is_refused_with_every_difference() {
    let dir = tempfile::tempdir().unwrap();
    run(2, configuration(2, "fp32"), 0..1, None, Some(dir.path()));
    let config = configuration(1, "fp32");

    let mut wider = description();
    wider["vocab"] = 17.into();
    let error = refusal(dir.path(), wider.clone(), config.clone(), false).unwrap_err();
    assert!(error.contains("wrong shape tok.weight is [13, 12], expected [17, 12]"), "{error}");
    assert!(error.contains("wrong shape head.weight"), "every difference is listed: {error}");

    let mut deeper = description();
    deeper["nl"] = 3.into();
    let error = refusal(dir.path(), deeper, config.clone(), true).unwrap_err();
    assert!(error.contains("missing     blocks.2.ln1.weight"), "{error}");
    let mut shallower = description();
    shallower["nl"] = 1.into();
    let error = refusal(dir.path(), shallower.clone(), config.clone(), true).unwrap_err();
    assert!(error.contains("unknown     blocks.1.ln1.weight"), "{error}");
    let loaded = refusal(dir.path(), shallower, config.clone(), false).unwrap();
    assert!(loaded.unexpected.contains(&"blocks.1.ln1.weight".to_owned()) && loaded.missing.is_empty());
    assert!(loaded.changes.iter().any(|change| change == "ranks: 2 -> 1"), "{:?}", loaded.changes);

    let mut lion = config;
    lion["optimizer"]["type"] = "Lion".into();
    lion["zero_allow_untested_optimizer"] = true.into();
    let error = refusal(dir.path(), description(), lion, true).unwrap_err();
    assert!(error.contains("states of adam, this run uses lion"), "{error}");
}

#[test]
fn gradients_that_wait_for_a_step_are_not_silently_lost() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().to_path_buf();
    on_ranks(2, move |world| {
        let (rank, mut config) = (world.rank(), configuration(2, "fp32"));
        config["gradient_accumulation_steps"] = 2.into();
        let (model, parameters) = Model::build(&description());
        let mut engine = engine(world, &config, &parameters, None, None, 1);
        let batch = batch(0, rank, &engine.device().clone());
        let loss = engine.forward(|_| model.loss(&batch)).unwrap();
        engine.backward(&loss).unwrap();
        engine.step().unwrap();
        let error = engine.save_checkpoint(&folder, &SaveOptions::default()).unwrap_err().to_string();
        assert!(error.contains("accumulation boundary"), "{error}");
    });
}

#[test]
fn a_load_that_fails_halfway_leaves_an_engine_that_refuses_to_train() {
    let dir = tempfile::tempdir().unwrap();
    for tag in ["damaged", "whole"] {
        let folder = dir.path().join(tag);
        run(2, configuration(2, "bf16"), 0..2, None, Some(&folder));
    }
    // The last tensor of rank 1's file: by then the others have been replaced.
    let file = dir.path().join("damaged/global_step2/rank_00001.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let folder = dir.path().to_path_buf();
    on_ranks(2, move |world| {
        let rank = world.rank();
        let (model, parameters) = Model::build(&description());
        let mut engine = engine(world, &configuration(2, "bf16"), &parameters, None, None, 1);
        let batch = batch(0, rank, &engine.device().clone());
        let before = engine.forward(|_| model.loss(&batch)).unwrap();
        let error = engine.load_checkpoint(folder.join("damaged"), &LoadOptions::default()).unwrap_err();
        assert!(error.to_string().contains("is damaged between bytes"), "rank {rank}: {error}");
        let expect = |what: &str, outcome: Result<(), String>| {
            let error = outcome.err().unwrap_or_else(|| panic!("{what} went on with half a state"));
            assert!(error.contains("damaged/global_step2 failed halfway"), "{what}: {error}");
            assert!(error.contains("load another checkpoint first"), "{what}: {error}");
        };
        let forward = engine.forward(|_| model.loss(&batch)).map(drop);
        expect("forward", forward.map_err(|error| error.to_string()));
        expect("backward", engine.backward(&before).map(drop).map_err(|error| error.to_string()));
        expect("step", engine.step().map(drop).map_err(|error| error.to_string()));
        let saved = engine.save_checkpoint(folder.join("new"), &SaveOptions::default()).map(drop);
        expect("save_checkpoint", saved.map_err(|error| error.to_string()));
        // A load that finds nothing changes nothing: the engine stays refused, and a good load frees it.
        engine.load_checkpoint(folder.join("absent"), &LoadOptions::default()).unwrap_err();
        expect("step", engine.step().map(drop).map_err(|error| error.to_string()));
        engine.load_checkpoint(folder.join("whole"), &LoadOptions::default()).unwrap();
        engine.forward(|_| model.loss(&batch)).unwrap();
    });
    assert!(!dir.path().join("new").exists());
}

#[test]
fn the_16_bit_model_is_what_kernels_read_in_every_stage() {
    for (stage, precision) in [(0, "fp32"), (2, "bf16"), (3, "fp16")] {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().to_path_buf();
        let read = on_ranks(2, move |world| {
            let (model, parameters) = Model::build(&description());
            let mut engine = engine(world, &configuration(stage, precision), &parameters, None, None, 1);
            train(&mut engine, &model, 0..2, &mut Vec::new());
            let path = engine.save_16bit_model(&folder, "pytorch_model.bin", false).unwrap();
            assert_eq!(path, folder.join("pytorch_model.bin"));
            // A folder that is a file: every rank is told, and none waits for a parameter.
            let error = engine.save_16bit_model(&path, "x", false).unwrap_err();
            assert!(error.to_string().contains("pytorch_model.bin"), "{error}");
            let whole = |param: &ferrospeed_tensor::Param| engine.store().full_as_read(param).unwrap();
            parameters
                .as_slice()
                .iter()
                .map(|param| (param.name().to_owned(), whole(param)))
                .collect::<Vec<_>>()
        });
        let file = ferrospeed_checkpoint::pt::PtFile::open(&dir.path().join("pytorch_model.bin")).unwrap();
        let pairs = file.value().pairs().unwrap();
        assert_eq!(pairs.len(), read[0].len());
        for ((name, value), (own, expected)) in pairs.iter().zip(&read[0]) {
            assert_eq!(name.as_str(), Some(own.as_str()));
            let tensor = value.as_tensor().unwrap();
            assert_eq!(&file.read_f32(tensor, 0..tensor.numel()).unwrap(), expected, "{own}, stage {stage}");
        }
    }
}

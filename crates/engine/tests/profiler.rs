//! The `flops_profiler` section: which step is counted, who reports it, and where.

mod common;

use common::{config, device, on_ranks};
use ferrospeed_comm::World;
use ferrospeed_engine::{Engine, Options, Setup, initialize_model};
use ferrospeed_nn::{Init, Linear, Mode, Sequential};
use ferrospeed_tensor::{Activation, DType, Tensor, ops};
use serde_json::{Value, json};

const ROWS: usize = 4;

fn configuration(profiler: Value) -> Value {
    json!({
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "flops_profiler": profiler,
    })
}

fn start(world: World, value: &Value) -> (Engine, Sequential) {
    let init = Init::root();
    let model = Sequential::new(&init.at("net"))
        .add(|init| Linear::new(init, 16, 32, true))
        .add(|_| Activation::GeluErf)
        .add(|init| Linear::new(init, 32, 4, true));
    let setup = Setup::new(config(value, world.size()), world, device(1));
    (initialize_model(&setup, &init.parameters(), Options::default()).unwrap(), model)
}

/// A whole step; returns the loss.
fn step(engine: &mut Engine, model: &Sequential) -> f32 {
    let x = Tensor::full([ROWS, 16], 0.5, DType::F32, engine.device()).unwrap();
    let mut last = 0.0;
    for _ in 0..engine.gradient_accumulation_steps() {
        let loss = engine.forward(|mode: Mode| ops::mean(&ops::square(&model.forward(&x, mode)?)?)).unwrap();
        last = engine.backward(&loss).unwrap();
        engine.step().unwrap();
    }
    last
}

#[test]
fn one_micro_batch_of_the_configured_step_is_reported_by_rank_0() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().to_owned();
    let written = on_ranks(2, move |world| {
        let rank = world.rank();
        let file = place.join("reports/profile.txt");
        let (mut engine, model) = start(
            world,
            &configuration(json!({
                "enabled": true, "profile_step": 2, "recompute_fwd_factor": 1.0, "top_modules": 2,
                "output_file": file,
            })),
        );
        let mut seen = Vec::new();
        for _ in 0..4 {
            step(&mut engine, &model);
            seen.push((file.exists(), engine.model_profile().is_some()));
        }
        (rank, seen, engine.model_profile().cloned(), std::fs::read_to_string(&file).unwrap())
    });
    for (rank, seen, profile, text) in written {
        let has_profile: Vec<bool> = seen.iter().map(|(_, has_profile)| *has_profile).collect();
        assert_eq!(has_profile, [false, false, rank == 0, rank == 0], "rank {rank}");
        if rank != 0 {
            continue;
        }
        assert_eq!(seen.iter().map(|(exists, _)| *exists).collect::<Vec<_>>(), [false, false, true, true]);
        let profile = profile.unwrap();
        let macs = (ROWS * (16 * 32 + 32 * 4)) as u64;
        let flops = 2 * macs + (ROWS * 32) as u64;
        assert_eq!((profile.macs(), profile.flops(), profile.params()), (macs, flops, 676));
        assert_eq!(profile.total().backward.macs, 2 * macs, "one micro-batch, not two");
        for line in [
            "Profile Summary at step 2:",
            "world size:                                                             2       ",
            "batch size per GPU:                                                     4       ",
            "params per GPU:                                                         676     ",
            "fwd MACs per GPU:                                                       2.56 KMACs",
            "  (net): Sequential(",
        ] {
            assert!(text.lines().any(|found| found == line), "{line:?} in {text}");
        }
        assert!(text.contains("bwd FLOPS per GPU = 3 * fwd flops per GPU / bwd latency: "), "{text}");
        assert!(text.contains("    (0): Linear(544 = 80.47% Params, 2.05 KMACs = 80% MACs, "), "{text}");
        assert!(text.contains(", in_features=16, out_features=32, bias=True)\n    (1): GELU("), "{text}");
    }
}

#[test]
fn profiling_changes_no_number_and_without_detail_there_is_no_tree() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("profile.txt");
    let losses = |profiler: Value| {
        let (mut engine, model) = start(World::solo(), &configuration(profiler));
        (0..3).map(|_| step(&mut engine, &model).to_bits()).collect::<Vec<_>>()
    };
    let profiled = json!({
        "enabled": true, "profile_step": 0, "detailed": false, "module_depth": 1, "output_file": file,
    });
    assert_eq!(losses(profiled), losses(json!({"enabled": false})));
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(text.contains("Profile Summary at step 0:") && !text.contains("Detailed Profile"), "{text}");
    assert_eq!(text.lines().filter(|line| line.starts_with("depth ")).count(), 1, "{text}");
}

#[test]
fn a_report_that_cannot_be_written_does_not_end_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let taken = folder.path().join("taken");
    std::fs::write(&taken, "a file, not a folder").unwrap();
    let file = taken.join("profile.txt");
    let profiler = json!({"enabled": true, "profile_step": 0, "output_file": file});
    let (mut engine, model) = start(World::solo(), &configuration(profiler));
    step(&mut engine, &model);
    assert!(engine.model_profile().is_some());
    assert_eq!(engine.global_steps(), 1);
}

#[test]
fn evaluations_are_not_profiled() {
    let profiler = json!({"enabled": true, "profile_step": 0, "output_file": "/dev/null"});
    let (mut engine, model) = start(World::solo(), &configuration(profiler));
    let x = Tensor::full([3 * ROWS, 16], 0.5, DType::F32, engine.device()).unwrap();
    engine.eval();
    engine.forward(|mode: Mode| model.forward(&x, mode)).unwrap();
    engine.train();
    step(&mut engine, &model);
    assert_eq!(engine.model_profile().unwrap().macs(), (ROWS * (16 * 32 + 32 * 4)) as u64);
}

/// Each op's operands and results count once, in the pass that reads and writes them.
#[test]
fn bytes_are_those_of_operands_and_results() {
    on_ranks(1, |world| {
        let (mut engine, model) = start(world, &configuration(json!({"enabled": true, "profile_step": 0})));
        step(&mut engine, &model);
        let profile = engine.model_profile().unwrap();
        let of = |path: &str| {
            let module = profile.profile().modules().iter().find(|module| &*module.path == path).unwrap();
            [module.own.forward.bytes, module.own.backward.bytes]
        };
        let bytes = |elements: usize| 4 * elements as u64;
        let (x, weight, bias, y) = (ROWS * 32, 32 * 4, 4, ROWS * 4);
        let [forward, backward] = of("net.2");
        assert_eq!(forward, bytes(x + weight + bias + y));
        // Gradients of the output, the input, the weight and the bias; the input and the weight are read once more.
        assert_eq!(backward, bytes(y + x + weight + bias + x + weight));
    });
}

//! How sharply the loss bends in each block, measured as training goes on: against Hessians that are known.

use std::sync::{Arc, Mutex};

use super::common::{config, device, on_ranks};
use ferrospeed_comm::World;
use ferrospeed_engine::{Engine, EngineError, Options, Result, Setup, initialize_model};
use ferrospeed_nn::{Init, Linear, Mode};
use ferrospeed_tensor::{DType, Device, Tensor, ops};
use ferrospeed_zero::access::Which;
use serde_json::{Value, json};

const CURVATURES: [f32; 4] = [1.0, 0.5, 4.0, 2.0];

fn configuration(stage: u8, eigenvalue: Value) -> Value {
    json!({
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "eigenvalue": eigenvalue,
    })
}

fn build(world: World, value: &Value) -> (Result<Engine>, Vec<Linear>, Init) {
    let init = Init::root();
    let block = |layer: usize| Linear::new(&init.at(format!("h.{layer}")), 6, 6, true);
    let blocks = (0..CURVATURES.len()).map(block).collect();
    let setup = Setup::new(config(value, world.size()), world, device(1));
    (initialize_model(&setup, &init.parameters(), Options::default()), blocks, init)
}

/// Half of c·w² bends by c everywhere; a bias adds what does not bend.
fn loss(blocks: &[Linear], device: &Device) -> Result<Tensor> {
    let mut sum = Tensor::zeros([], DType::F32, device)?;
    for (block, curvature) in blocks.iter().zip(CURVATURES) {
        let squares = ops::sum(&ops::square(block.weight())?)?;
        sum = ops::add(&sum, &ops::affine(&squares, 0.5 * curvature, 0.0)?)?;
        sum = ops::add(&sum, &ops::sum(block.bias().expect("there is one"))?)?;
    }
    Ok(sum)
}

fn weights(engine: &Engine, init: &Init) -> Vec<u32> {
    let full = |param| engine.store().full(param, Which::Weight).unwrap();
    init.parameters().as_slice().iter().flat_map(full).map(f32::to_bits).collect()
}

/// Trains for some steps and measures wherever the configuration says so. Returns what each step measured, and the
/// weights in the end.
fn train(world: World, value: &Value, steps: u64) -> (Vec<Vec<f64>>, Vec<u32>) {
    let (engine, blocks, init) = build(world, value);
    let mut engine = engine.unwrap_or_else(|error| panic!("{error}"));
    let device = engine.device().clone();
    let mut measured = Vec::new();
    for step in 1..=steps {
        for micro in 0..2 {
            if micro == 0 {
                engine.update_eigenvalues(|_| loss(&blocks, &device)).unwrap();
            }
            let value = engine.forward(|_| loss(&blocks, &device).map_err(as_tensor_error)).unwrap();
            engine.backward(&value).unwrap();
            engine.step().unwrap();
        }
        measured.push(engine.eigenvalues_of(step).to_vec());
    }
    (measured, weights(&engine, &init))
}

fn as_tensor_error(error: EngineError) -> ferrospeed_tensor::TensorError {
    ferrospeed_tensor::TensorError::argument("loss", error.to_string())
}

#[test]
fn blocks_are_measured_every_so_many_steps_alike_in_all_stages_and_training_goes_on_as_without() {
    let section = json!({
        "enabled": true, "layer_name": "h", "max_iter": 200, "tol": 1e-6, "stability": 0.0,
        "gas_boundary_resolution": 2,
    });
    let run = |stage: u8, section: &Value| {
        let value = configuration(stage, section.clone());
        on_ranks(2, move |world| train(world, &value, 4))
    };
    let plain = run(0, &json!({}));
    assert!(plain[0].0.iter().all(Vec::is_empty), "nothing is measured unless it is asked for");
    let expected = run(0, &section);
    for stage in 0..=3 {
        let outcome = run(stage, &section);
        assert_eq!(outcome, expected, "stage {stage}");
        for (measured, weights) in outcome {
            assert_eq!(measured.iter().map(Vec::len).collect::<Vec<_>>(), [0, 4, 0, 4], "stage {stage}");
            for (value, curvature) in measured.iter().flatten().zip(CURVATURES.iter().cycle()) {
                assert!((value - f64::from(curvature / 4.0)).abs() < 0.01, "stage {stage}: {measured:?}");
            }
            assert_eq!(weights, plain[0].1, "stage {stage}");
        }
    }
}

#[test]
fn blocks_that_are_not_there_are_refused_before_anything_runs() {
    let refusal = |section: Value| {
        let (engine, ..) = build(World::solo(), &configuration(0, section));
        engine.err().expect("it is refused").to_string()
    };
    assert_eq!(
        refusal(json!({"enabled": true})),
        "eigenvalue.layer_name: no trained parameter lies below 'bert.encoder.layer.0'; numbered blocks lie below 'h'"
    );
    assert_eq!(
        refusal(json!({"enabled": true, "layer_name": "h", "layer_num": 5})),
        "eigenvalue.layer_num: there are 4 blocks below 'h', not 5; 0 measures all there are"
    );
    let two = json!({"enabled": true, "layer_name": "h", "layer_num": 2});
    let (measured, _) = train(World::solo(), &configuration(0, two), 1);
    assert_eq!(measured[0].len(), 2);
}

#[test]
fn a_block_can_be_measured_by_hand_only_where_that_means_something() {
    let section = json!({"layer_name": "h"});
    let (engine, blocks, init) = build(World::solo(), &configuration(0, section.clone()));
    let mut engine = engine.unwrap();
    let device = engine.device().clone();
    let before = weights(&engine, &init);
    // Without `enabled` nothing is measured on the way, but it can be asked for.
    assert_eq!(engine.block_eigenvalues(|_| loss(&blocks, &device)).unwrap().len(), 4);
    let failure =
        engine.block_eigenvalues(|_| Err::<Tensor, _>(EngineError::Order { call: "loss", why: "it failed" }));
    assert_eq!(failure.unwrap_err().to_string(), "loss: it failed");
    assert_eq!(weights(&engine, &init), before);
    engine.eval();
    let refused = engine.block_eigenvalues(|_| loss(&blocks, &device)).unwrap_err().to_string();
    assert_eq!(refused, "block_eigenvalues: the engine is evaluating; call train() first");
    engine.train();
    let value = engine.forward(|_| loss(&blocks, &device).map_err(as_tensor_error)).unwrap();
    engine.backward(&value).unwrap();
    let refused = engine.block_eigenvalues(|_| loss(&blocks, &device)).unwrap_err().to_string();
    assert!(refused.contains("gradients wait for a step"), "{refused}");

    let mut value = configuration(0, section);
    value["bf16"] = json!({"enabled": true});
    let (engine, blocks, _) = build(World::solo(), &value);
    let refused = engine.unwrap().block_eigenvalues(|_| loss(&blocks, &device)).unwrap_err().to_string();
    assert_eq!(refused, "eigenvalue: a small change of 16-bit weights is rounded away; measure in fp32");
}

/// Collects what is logged.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn logged(work: impl FnOnce()) -> String {
    let log = Log::default();
    let sink = log.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || sink.clone()).finish();
    tracing::subscriber::with_default(subscriber, work);
    let bytes = log.0.lock().unwrap().clone();
    String::from_utf8(bytes).unwrap()
}

#[test]
fn what_is_not_measured_and_each_iteration_are_told() {
    let section = json!({"enabled": true, "layer_name": "h"});
    let text = logged(|| {
        let (engine, blocks, _) = build(World::solo(), &configuration(0, section.clone()));
        let mut engine = engine.unwrap();
        let device = engine.device().clone();
        for _ in 0..4 {
            let value = engine.forward(|_: Mode| loss(&blocks, &device).map_err(as_tensor_error)).unwrap();
            engine.backward(&value).unwrap();
            engine.step().unwrap();
        }
        assert!(engine.eigenvalues().is_empty());
    });
    let missed = "eigenvalue.enabled: nothing was measured; call Engine::update_eigenvalues";
    assert_eq!(text.matches(missed).count(), 1, "{text}");

    let mut verbose = section;
    verbose["verbose"] = true.into();
    let text = logged(|| {
        train(World::solo(), &configuration(0, verbose), 1);
    });
    for block in 0..CURVATURES.len() {
        assert!(text.contains(&format!("eigenvalue of block {block}: iteration 1 gives ")), "{text}");
    }
    assert!(!text.contains("nothing was measured"), "{text}");
}

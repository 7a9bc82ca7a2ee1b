//! DeepSpeed's files by the names that transformers 5 has in memory: every recorded model is written in the recorded order and
//! shapes, and what was written comes back, to the bit.

use std::path::Path;

use super::common::{engine, on_ranks};
use ferrospeed_checkpoint::deepspeed::{DeepSpeedFiles, Spelling};
use ferrospeed_checkpoint::pt::Unknown;
use ferrospeed_engine::{Engine, Format, LoadOptions, SaveOptions, StepReport};
use ferrospeed_models::{ModelConfig, WindowRule};
use ferrospeed_nn::Parameters;
use ferrospeed_tensor::ops;
use ferrospeed_testkit::golden::{read_json, repository_root};
use ferrospeed_zero::access::Which;
use serde_json::{Value, json};

fn configuration(stage: u8, universal: bool) -> Value {
    json!({
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
        "checkpoint": {"load_universal": universal},
    })
}

/// A step on a loss that every parameter has its share in.
fn step(engine: &mut Engine, parameters: &Parameters) {
    let loss = engine.forward(|_| {
        let mut sum = None;
        for param in parameters.as_slice() {
            let share = ops::mean(ops::square(param)?)?;
            sum = Some(match sum {
                None => share,
                Some(sum) => ops::add(&sum, &share)?,
            });
        }
        Ok::<_, ferrospeed_tensor::TensorError>(sum.expect("a model has parameters"))
    });
    engine.backward(&loss.unwrap()).unwrap();
    assert!(matches!(engine.step().unwrap(), StepReport::Applied { .. }));
}

fn bits(engine: &Engine, parameters: &Parameters) -> Vec<u32> {
    let all = [Which::Weight, Which::State("exp_avg"), Which::State("exp_avg_sq")];
    let of = |param| all.map(|which| engine.store().full(param, which).unwrap()).concat();
    parameters.as_slice().iter().flat_map(of).map(f32::to_bits).collect()
}

/// Names and shapes of the trained parameters, in order, as the files list them.
fn listed(folder: &Path) -> Vec<(String, Value)> {
    let files = DeepSpeedFiles::open(folder, Unknown::Refuse).unwrap();
    let groups = files.files[0].value().get("param_shapes").unwrap().items().unwrap();
    let shapes = groups.iter().flat_map(|group| group.pairs().unwrap());
    let sizes = |shape: &ferrospeed_checkpoint::pt::Value| match shape {
        ferrospeed_checkpoint::pt::Value::Size(sizes) => json!(sizes),
        other => panic!("{other:?} is no shape"),
    };
    shapes.map(|(name, shape)| (name.as_str().unwrap().to_owned(), sizes(shape))).collect()
}

#[test]
fn every_family_is_written_as_transformers_5_lists_it_and_comes_back() {
    let recorded = repository_root().join("tests/golden/transformers/parameters/5.22.json");
    let models = read_json(&recorded);
    let models = models.as_object().unwrap();
    assert!(models.len() > 20, "all families are recorded");
    for (name, model) in models {
        // Where memory has the names of files, one layout shows it.
        let in_file = model["in_file"].as_array().unwrap();
        let other_names =
            model["in_order"].as_array().unwrap().iter().any(|entry| !in_file.contains(&entry[0]));
        let layouts = [(1, Format::DeepSpeed), (3, Format::DeepSpeed), (2, Format::Universal)];
        for (stage, format) in layouts.into_iter().take(if other_names { 3 } else { 1 }) {
            let case = format!("{name}, stage {stage}, {format:?}");
            let parameters =
                || ModelConfig::from_value(&model["config"], WindowRule::default()).unwrap().parameters();
            let folder = tempfile::tempdir().unwrap();
            let config = configuration(stage, format == Format::Universal);
            let saved = {
                let parameters = parameters();
                let world = ferrospeed_comm::World::solo();
                let mut engine = engine(world, &config, &parameters, None, None, 1);
                step(&mut engine, &parameters);
                let options = SaveOptions { format, spelling: Spelling::Transformers5, ..Default::default() };
                let path = engine.save_checkpoint(folder.path(), &options).unwrap();
                let expected = model["in_order"].as_array().unwrap().iter();
                let expected: Vec<(String, Value)> =
                    expected.map(|entry| (entry[0].as_str().unwrap().into(), entry[1].clone())).collect();
                assert_eq!(listed(&path), expected, "{case}");
                bits(&engine, &parameters)
            };
            let (config, dir) = (config.clone(), folder.path().to_path_buf());
            let model = model["config"].clone();
            let loaded = on_ranks(2, move |world| {
                let parameters = ModelConfig::from_value(&model, WindowRule::default()).unwrap().parameters();
                let mut engine = engine(world, &config, &parameters, None, None, 1);
                engine.load_checkpoint(&dir, &LoadOptions::default()).unwrap();
                bits(&engine, &parameters)
            });
            assert!(loaded.iter().all(|loaded| *loaded == saved), "{case}: other bits came back");
        }
    }
}

//! What pipelines do besides training: skip, save, refuse, die and divide.

use std::path::Path;

use ferrospeed_comm::topology::{DATA, MODEL, PIPE};
use ferrospeed_comm::{Mesh, ProcessTopology};
use ferrospeed_nn::Module;
use ferrospeed_nn::tensor_parallel::{Between, Cut, Slices};
use ferrospeed_tensor::ops::WeightLayout;

use super::*;

#[test]
fn all_stages_skip_a_step_whose_gradient_overflows_on_one() {
    let mut value = configuration(1, "fp32", 2);
    value["fp16"] = json!({"enabled": true, "initial_scale_power": 32, "hysteresis": 1});
    let value = Arc::new(value);
    let reports = on_ranks(4, move |world| {
        let model = build(Which::Llama);
        let mut engine = start(world, &value, &model, 2);
        let before = weights(&engine, &model);
        let batches: Vec<Batch> = (0..2).map(|micro| model.batch(&engine, micro)).collect();
        let mut batches = batches.into_iter();
        let (_, report) =
            engine.train_batch(&model, |_| Ok::<_, EngineError>(batches.next().unwrap())).unwrap();
        assert_eq!(bits(&weights(&engine, &model)), bits(&before));
        (report, engine.loss_scale(), engine.skipped_steps())
    });
    assert!(matches!(&reports[0].0, StepReport::Skipped { .. }), "{:?}", reports[0]);
    assert!(reports.iter().all(|report| *report == reports[0]), "{reports:?}");
    assert_eq!(reports[0].2, 1);
}

#[test]
fn a_checkpoint_goes_on_with_any_number_of_stages() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().to_path_buf();
    for which in [Which::Llama, Which::Gpt2Tied] {
        let value = Arc::new(configuration(1, "bf16", 2));
        // Two steps, a save, one more: the last step again from the save, in other layouts.
        let run = |stages: usize, data: usize, resume: bool| {
            let (value, dir) = (value.clone(), dir.join(format!("{which:?}")));
            on_ranks(stages * data, move |world| {
                let model = build(which);
                let mut engine = if stages > 1 {
                    start(world, &value, &model, stages)
                } else {
                    let setup = Setup::new(config(&value, world.size()), world, device(1));
                    initialize_model(&setup, model.parameters(), Options::default()).unwrap()
                };
                if resume {
                    let loaded = engine.load_checkpoint(&dir, &LoadOptions::default()).unwrap();
                    assert_eq!(loaded.tag, "global_step2");
                } else {
                    train(&mut engine, &model, 0..2);
                    engine.save_checkpoint(&dir, &SaveOptions::default()).unwrap();
                }
                let (losses, _) = train(&mut engine, &model, 2..3);
                (losses, weights(&engine, &model))
            })
            .swap_remove(0)
        };
        let saved = run(2, 2, false);
        assert_eq!(run(2, 2, true), saved, "{which:?}: the same layout gives the same bits");
        for (stages, data) in [(1, 2), (3, 2)] {
            let found = run(stages, data, true);
            if which == Which::Llama {
                assert_eq!(bits(&found.1), bits(&saved.1), "{which:?} pp {stages} dp {data}");
            }
            assert!((found.0[0] - saved.0[0]).abs() < 0.02, "{which:?} pp {stages}: {found:?} {saved:?}");
        }
    }
}

/// The first two steps: taken and saved in DeepSpeed's layout, or loaded.
fn begin(engine: &mut Engine, model: &Model, dir: &Path, resume: bool) {
    if resume {
        engine.load_checkpoint(dir, &LoadOptions::default()).unwrap();
    } else {
        train(engine, model, 0..2);
        let options = SaveOptions { format: Format::DeepSpeed, ..Default::default() };
        engine.save_checkpoint(dir, &options).unwrap();
    }
}

fn expect_files(dir: &Path, names: &[&str]) {
    let saved = dir.join(std::fs::read_to_string(dir.join("latest")).unwrap().trim());
    names.iter().for_each(|name| assert!(saved.join(name).is_file(), "{name}"));
}

#[test]
fn a_list_of_layers_is_saved_in_the_layout_of_deepspeeds_pipelines_and_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().to_path_buf();
    let value = scheduled("zb-h1", 1, "fp32", 4);
    let run = |stages: usize, data: usize, resume: bool| {
        let (value, dir) = (value.clone(), dir.clone());
        on_ranks(stages * data, move |world| {
            let model = build(Which::Mlp);
            let mut engine = start(world, &value, &model, stages);
            begin(&mut engine, &model, &dir, resume);
            train(&mut engine, &model, 2..3);
            bits(&weights(&engine, &model))
        })
    };
    let expected = run(2, 2, false);
    expect_files(
        &dir,
        &[
            "layer_00-model_states.pt",
            "layer_09-model_states.pt",
            "mp_rank_01_model_states.pt",
            "zero_pp_rank_1_mp_rank_01_optim_states.pt",
        ],
    );
    for stages in [2, 4] {
        let found = run(stages, 2, true);
        assert!(found.iter().all(|found| *found == expected[0]), "{stages} stages");
    }
}

/// A layer that is cut by outputs: its input's gradient is the sum of the slices'.
struct Entered(Slices, Linear);

impl Module for Entered {
    fn forward(&self, x: &Tensor, _: Mode) -> Result<Tensor, TensorError> {
        self.1.forward(&self.0.enter(x)?)
    }
}

#[test]
fn a_list_of_layers_in_slices_is_saved_so_for_deepspeed_and_goes_on_in_any() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().to_path_buf();
    let value = Arc::new(configuration(1, "fp32", 4));
    let run = |tensor: usize, resume: bool| {
        let (value, dir) = (value.clone(), dir.clone());
        on_ranks(2 * tensor, move |world| {
            let sizes = [(PIPE, 2), (DATA, 1), (MODEL, tensor)];
            let mesh = Mesh::new(world.clone(), ProcessTopology::new(sizes).unwrap()).unwrap();
            let slices = Slices::over(&mesh.tensor().unwrap(), Between::AllTokens);
            let init = Init::root().over(Some(&slices));
            let linear = |init: &Init, inputs, outputs| {
                Linear::normal(init, inputs, outputs, true, WeightLayout::OutIn, 0.3)
            };
            let mut layers = Sequential::new(&init);
            for _ in 0..2 {
                layers = layers
                    .add(|init| {
                        let cut = Cut::Outputs { sections: 1, units: 12 };
                        Entered(slices.clone(), linear(&init.cut(cut), 6, 12))
                    })
                    .add(|_| Activation::Tanh)
                    .add(|init| linear(&init.cut(Cut::Inputs { units: 12 }), 12, 6));
            }
            let loss: fn(&Tensor, &Tensor) -> Result<Tensor, TensorError> = mean_square;
            let model = Model::from(Family::Mlp(Trained { layers, loss }, Box::new(init.parameters())));
            let mut options = Options::default();
            options.spread_over(&mesh).unwrap();
            let setup = Setup::new(config(&value, 1), world, device(1));
            let mut engine =
                initialize_pipeline(&setup, 2.try_into().unwrap(), &model, model.parameters(), options)
                    .unwrap();
            begin(&mut engine, &model, &dir, resume);
            let saved = bits(&weights(&engine, &model));
            train(&mut engine, &model, 2..3);
            (saved, bits(&weights(&engine, &model)))
        })
    };
    let expected = run(2, false);
    expect_files(
        &dir,
        &[
            "layer_00-model_00-model_states.pt",
            "layer_05-model_01-model_states.pt",
            "mp_rank_03_model_states.pt",
            "zero_pp_rank_0_mp_rank_03_optim_states.pt",
        ],
    );
    assert!(run(2, true).iter().all(|found| *found == expected[0]), "the same mesh gives the same bits");
    for tensor in [1, 3] {
        assert!(run(tensor, true).iter().all(|found| found.0 == expected[0].0), "{tensor} slices");
    }
}

#[test]
fn what_makes_no_pipeline_is_refused_with_the_reason() {
    let told = on_ranks(2, |world| {
        let model = build(Which::Llama);
        let try_with = |value: &Value, stages: usize| {
            // Some of it no configuration may say.
            let config = match try_config(value, 1) {
                Ok(config) => config,
                Err(refusal) => return refusal,
            };
            let setup = Setup::new(config, world.clone(), device(1));
            let made = initialize_pipeline(
                &setup,
                stages.try_into().unwrap(),
                &build(Which::Llama),
                &Parameters::default(),
                Options::default(),
            );
            made.err().map(|error| error.to_string()).unwrap_or_default()
        };
        let plain = configuration(0, "fp32", 2);
        let mut by_type = plain.clone();
        by_type["pipeline"] = json!({"partition": "type:nothing"});
        let with_schedule = |name: &str| try_with(&scheduled(name, 0, "fp32", 3), 2);
        let refused = [
            try_with(&configuration(2, "fp32", 2), 2),
            try_with(&plain, 3),
            try_with(&by_type, 2),
            with_schedule("zigzag"),
            with_schedule("inference"),
            with_schedule("interleaved:2"),
            try_with(&scheduled("interleaved:9", 0, "fp32", 2), 2),
        ];
        let mut engine = start(world, &plain, &model, 2);
        let forward = engine.forward(|_| Err::<Tensor, _>(TensorError::argument("x", String::new())));
        let step = engine.step().unwrap_err().to_string();
        (refused, forward.unwrap_err().to_string(), step)
    });
    let (refused, forward, step) = &told[0];
    assert!(refused[0].contains("zero_optimization.stage: stage 2 cannot be combined"), "{}", refused[0]);
    assert!(refused[1].contains("2 ranks cannot be divided over 3 stages"), "{}", refused[1]);
    assert!(refused[2].contains("no layer has such a name"), "{}", refused[2]);
    assert!(refused[3].contains("pipeline.schedule") && refused[3].contains("'zigzag'"), "{}", refused[3]);
    assert!(refused[4].contains("'inference' does not train"), "{}", refused[4]);
    assert!(refused[5].contains("3 micro-batches are not a multiple of 2 stages"), "{}", refused[5]);
    assert!(refused[6].contains("chunk 8 of 18 gets none of 8 layers"), "{}", refused[6]);
    assert!(forward.contains("call train_batch"), "{forward}");
    assert!(step.contains("call train_batch"), "{step}");
}

#[test]
fn a_stage_that_dies_is_named_by_those_that_wait_for_it() {
    for schedule in ["1f1b"].into_iter().chain(SCHEDULES) {
        for dying in 0..2 {
            let value = scheduled(schedule, 0, "fp32", 4);
            let told = on_ranks(2, move |world| {
                let model = build(Which::Llama);
                let mut engine = start(world, &value, &model, 2);
                // One that dies in the middle of a batch: it asks for micro-batches in order.
                let (is_dying, batches) = (engine.stage().0 == dying, 0..4);
                let batches: Vec<Batch> = batches.map(|micro| model.batch(&engine, micro)).collect();
                let mut batches = batches.into_iter();
                let run = engine.train_batch(&model, |micro| match is_dying && micro == 2 {
                    true => Err(EngineError::Order { call: "batch", why: "this rank dies" }),
                    false => Ok(batches.next().unwrap()),
                });
                run.unwrap_err().to_string()
            });
            let (other, told) = (1 - dying, &told[1 - dying]);
            // Who, doing what, on which micro-batch, with whom; and why.
            assert!(told.starts_with(&format!("stage {other} (")), "{schedule}, stage {dying} dies: {told}");
            assert!(told.contains("ing ") && told.contains(" of micro-batch "), "{schedule}: {told}");
            assert!(told.contains(&format!(" stage {dying}): rank {dying} ")), "{schedule}: {told}");
        }
    }
}

#[test]
fn a_stage_that_dies_behind_the_last_message_is_named_by_those_that_wait_for_losses() {
    // With zb-v the first stage has the loss: it fails there, when the other has nothing more to send.
    let value = scheduled("zb-v", 0, "fp32", 4);
    let told = on_ranks(2, move |world| {
        let model = build(Which::Llama);
        let mut engine = start(world, &value, &model, 2);
        let (tokens, labels) = labelled(&device(1), 0);
        let labels = match engine.stage().0 {
            0 => ops::narrow(&labels, 1, 0, 3).unwrap(),
            _ => labels,
        };
        let batch = |_| Ok::<_, EngineError>(Batch::Labelled((tokens.clone(), labels.clone())));
        engine.eval_batch(&model, 1, batch).unwrap_err().to_string()
    });
    assert!(
        told[1].starts_with("stage 1 (receiving losses up to micro-batch 0 from stage 0): rank 0 "),
        "{}",
        told[1]
    );
}

#[test]
fn layers_are_divided_by_what_they_take() {
    let divided = |partition: &'static str| {
        let mut value = configuration(0, "fp32", 2);
        value["pipeline"] = json!({"partition": partition});
        let divisions = on_ranks(2, move |world| {
            let model = build(Which::Llama);
            let setup = Setup::new(config(&value, 1), world, device(1));
            let refused = initialize_pipeline(
                &setup,
                2.try_into().unwrap(),
                &model,
                model.parameters(),
                Options::default(),
            );
            let refused = refused.err().map(|error| error.to_string()).unwrap_or_default();
            let (scratch, batch) = (build(Which::Llama), Batch::Labelled(labelled(&device(1), 3)));
            let measured = measure_layers(&setup, &scratch, &batch).unwrap();
            assert_eq!(measured.len(), 8);
            let options = Options { measured: Some(measured.clone()), ..Default::default() };
            let engine =
                initialize_pipeline(&setup, 2.try_into().unwrap(), &model, model.parameters(), options);
            (engine.unwrap().division().unwrap().clone(), measured, refused)
        });
        // Rank 0 has measured, and all divide by what it found.
        assert_eq!(divisions[0], divisions[1]);
        divisions[0].clone()
    };
    let (by_time, measured, refused) = divided("profile");
    assert!(
        refused.contains("pipeline.partition: ") && refused.contains("was not: measure them first"),
        "{refused}"
    );
    // Blocks are of one kind, which is measured once.
    assert!(measured.iter().all(|layer| layer.seconds > 0.0 && layer.activation_bytes > 0.0), "{measured:?}");
    assert!(measured[1..7].iter().all(|block| *block == measured[1]), "{measured:?}");
    let times =
        |layers: std::ops::Range<usize>| -> f64 { measured[layers].iter().map(|layer| layer.seconds).sum() };
    let apart = |cut: usize| (times(0..cut) - times(cut..8)).abs();
    let best = (1..8).map(apart).fold(f64::INFINITY, f64::min);
    assert!((apart(by_time.boundaries[1]) - best).abs() < 1e-12, "{by_time}: {measured:?}");
    let (by_memory, _, _) = divided("memory");
    // The first stage holds two micro-batches, the last one.
    assert!(by_memory.boundaries[1] <= 4, "{by_memory}");
}

//! The doors of the manual that a program of one's own uses: activation checkpointing by the configuration, inference, evaluation
//! of pipelines, schedules that remember, state by its names, profiles by hand, weights without an engine.

use std::sync::Arc;

use super::common::{config, device, on_ranks};
use ferrospeed_checkpoint::pt::PtFile;
use ferrospeed_checkpoint::weights::{
    convert_zero_checkpoint_to_fp32_state_dict, get_fp32_state_dict_from_zero_checkpoint,
};
use ferrospeed_comm::World;
use ferrospeed_engine::checkpointing::{self, Recomputed, checkpoint};
use ferrospeed_engine::{
    Engine, EngineError, EvalOptions, FlopsProfiler, Format, LoadOptions, Options, Reduce, SaveOptions,
    Setup, init_inference, initialize, initialize_stages, initialize_with, safe_get_full_fp32_param,
    safe_get_full_optimizer_state, safe_get_local_fp32_param, safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
};
use ferrospeed_nn::{Dropout, Init, Linear, Mode, Sequential, Trained};
use ferrospeed_optim::GroupOptions;
use ferrospeed_optim::schedule::{OwnSchedule, Rates, Scheduler};
use ferrospeed_pipeline::schedule::{Instruction, Kind, Schedule};
use ferrospeed_tensor::store::FromInitializers;
use ferrospeed_tensor::{Activation, DType, Tensor, TensorError, ops};
use ferrospeed_zero::access::Which;
use serde_json::{Value, json};

const ROWS: usize = 4;

fn configuration(more: Value) -> Value {
    let mut value = json!({
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    });
    value.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    value
}

fn input(engine: &Engine, width: usize) -> Tensor {
    let values: Vec<f32> = (0..ROWS * width).map(|i| (i % 7) as f32 / 7.0 - 0.4).collect();
    Tensor::from_slice(&values, [ROWS, width], engine.device()).unwrap()
}

/// Layers with dropout, of which some are recomputed where it is asked for.
fn layers(init: &Init, recomputed: bool) -> Sequential {
    let mut layers = Sequential::new(init);
    for _ in 0..3 {
        layers = match recomputed {
            true => layers.add(|init| Recomputed::of(Linear::new(init, 6, 6, true))),
            false => layers.add(|init| Linear::new(init, 6, 6, true)),
        };
        layers = layers.add(|_| Dropout { probability: 0.3 }).add(|_| Activation::Tanh);
    }
    layers
}

fn step(engine: &mut Engine, model: &Sequential) -> Result<f32, EngineError> {
    let x = input(engine, 6);
    let loss = engine.forward(|mode| ops::mean(&ops::square(&model.forward(&x, mode)?)?))?;
    engine.backward(&loss)?;
    engine.step()?;
    Ok(loss.item()?)
}

#[test]
fn layers_that_are_recomputed_train_to_the_same_bits_in_every_stage() {
    for stage in 0..=3 {
        let value = configuration(json!({
            "zero_optimization": {"stage": stage}, "activation_checkpointing": {"cpu_checkpointing": true},
        }));
        let losses = |recomputed: bool| {
            let value = value.clone();
            on_ranks(2, move |world| {
                let setup = Setup::new(config(&value, 2), world, device(1));
                let (mut engine, model) = initialize(&setup, |init| layers(init, recomputed)).unwrap();
                (0..3).map(|_| step(&mut engine, &model).unwrap().to_bits()).collect::<Vec<_>>()
            })
        };
        assert_eq!(losses(true), losses(false), "stage {stage}");
    }
}

#[test]
fn the_section_of_the_configuration_acts_in_a_programs_own_model_and_what_the_program_says_goes_first() {
    let slots = |count: u64| {
        json!({"activation_checkpointing": {
            "partition_activations": true, "contiguous_memory_optimization": true, "number_checkpoints": count,
        }})
    };
    let trained = |count: u64| {
        let setup = Setup::new(config(&configuration(slots(count)), 1), World::solo(), device(1));
        let (mut engine, model) = initialize(&setup, |init| layers(init, true)).unwrap();
        step(&mut engine, &model)
    };
    assert!(trained(3).is_ok());
    let error = trained(2).unwrap_err().to_string();
    assert!(error.contains("activation_checkpointing.number_checkpoints is 2"), "{error}");
    // The program's word counts before the engine's, until it is taken back.
    assert!(!checkpointing::is_configured());
    let plain = config(&configuration(json!({})), 1);
    checkpointing::configure(&plain.activation_checkpointing, None);
    assert!(checkpointing::is_configured() && trained(2).is_ok());
    checkpointing::reset();
    assert!(!checkpointing::is_configured() && trained(2).is_err());
}

#[test]
fn a_segment_of_several_tensors_is_computed_again_with_its_random_numbers() {
    let setup = Setup::new(config(&configuration(json!({})), 1), World::solo(), device(1));
    let gradient = |again: bool| {
        let (mut engine, layer) = initialize(&setup, |init| Arc::new(Linear::new(init, 6, 6, true))).unwrap();
        let (x, held) = (input(&engine, 6), Arc::clone(&layer));
        let segment = move |inputs: &[Tensor]| {
            let y = ops::dropout(&held.forward(&inputs[0])?, 0.5)?;
            Ok(vec![ops::mul(&y, &inputs[1])?, y])
        };
        let loss = engine.forward(|_| {
            let inputs = [x.clone(), ops::square(&x)?];
            let made = if again { checkpoint(&inputs, segment)? } else { segment(&inputs)? };
            ops::mean(&ops::add(&made[0], &made[1])?)
        });
        engine.backward(&loss.unwrap()).unwrap();
        engine.store().full(layer.weight(), Which::Gradient).unwrap()
    };
    assert_eq!(gradient(true), gradient(false));
}

#[test]
fn a_model_of_ones_own_says_the_same_however_its_weights_are_divided_and_trains_nothing() {
    let said = |ranks: usize, zero: Value| {
        on_ranks(ranks, move |world| {
            let value = configuration(json!({"zero_optimization": zero}));
            let setup = Setup::new(config(&value, ranks), world, device(1));
            let weights = FromInitializers { seed: 5 };
            let (mut engine, model) =
                init_inference(&setup, Some(&weights), |init| layers(init, false)).unwrap();
            let x = input(&engine, 6);
            let y = engine.forward(|mode| {
                assert_eq!(mode, Mode::Evaluate);
                model.forward(&x, mode)
            });
            let y = y.unwrap().to_vec::<f32>().unwrap();
            let loss = Tensor::full([1], 0.0, DType::F32, engine.device()).unwrap();
            assert!(engine.backward(&loss).is_err() && engine.store().optimizer().is_none());
            y
        })
    };
    let whole = said(1, json!({"stage": 2})).remove(0);
    let divided = json!({"stage": 3, "offload_param": {"device": "cpu"}});
    assert_eq!(said(2, divided), [whole.clone(), whole]);
}

fn mean_square(y: &Tensor, target: &Tensor) -> Result<Tensor, TensorError> {
    ops::mean(&ops::square(&ops::sub(y, target)?)?)
}

type Loss = fn(&Tensor, &Tensor) -> Result<Tensor, TensorError>;

#[test]
fn an_evaluation_in_stages_gives_what_is_asked_for_and_where() {
    let found = on_ranks(2, |world| {
        let value = configuration(json!({"pipeline": {"stages": 2}}));
        let setup = Setup::from_config(&value.to_string(), world, device(1)).unwrap();
        let (mut engine, model) = initialize_stages(&setup, Options::default(), |init| Trained {
            layers: layers(init, false),
            loss: mean_square as Loss,
        })
        .unwrap();
        let device = engine.device().clone();
        let x = input(&engine, 6);
        let mut batch = |micro: usize| {
            let target = Tensor::full([ROWS, 6], micro as f32 / 4.0, DType::F32, &device)?;
            Ok::<_, EngineError>((x.clone(), target))
        };
        let mean = engine.eval_batch(&model, 3, &mut batch).unwrap();
        let mut with = |options: EvalOptions| engine.eval_batch_with(&model, options, &mut batch).unwrap();
        let averaged = with(EvalOptions::of(3));
        assert_eq!((averaged.losses, averaged.logits.len()), (vec![mean], 0));
        let each = with(EvalOptions { reduce_output: Reduce::Nothing, ..EvalOptions::of(3) }).losses;
        assert!(each.len() == 3 && (each.iter().sum::<f32>() / 3.0 - mean).abs() < 1e-6, "{each:?}");
        let here = with(EvalOptions { bcast_loss: false, return_logits: true, ..EvalOptions::of(3) });
        let alone = with(EvalOptions { compute_loss: false, return_logits: true, ..EvalOptions::of(3) });
        assert!(alone.losses.is_empty());
        // An iterator that ends is told by the stage that asks it first.
        let error = engine.train_batch_from(&model, &mut std::iter::empty(), &mut batch).unwrap_err();
        assert!(
            engine.stage().0 == 1 || error.to_string().contains("it has nothing more to give"),
            "{error}"
        );
        (here.losses.len(), here.logits.len(), alone.logits.len())
    });
    assert_eq!(found, [(0, 0, 0), (1, 3, 3)]);
}

#[test]
fn a_schedule_of_ones_own_trains_to_the_same_bits_and_a_wrong_one_is_refused_before_anything_is_computed() {
    let trained = |own: bool| {
        on_ranks(2, move |world| {
            let value = configuration(json!({
                "gradient_accumulation_steps": 3, "pipeline": {"stages": 2, "partition": "uniform"},
            }));
            let setup = Setup::from_config(&value.to_string(), world, device(1)).unwrap();
            let (mut engine, model) = initialize_stages(&setup, Options::default(), |init| Trained {
                layers: layers(init, false),
                loss: mean_square as Loss,
            })
            .unwrap();
            let (device, x) = (engine.device().clone(), input(&engine, 6));
            let batch = |micro: usize| {
                let target = Tensor::full([ROWS, 6], micro as f32 / 4.0, DType::F32, &device)?;
                Ok::<_, EngineError>((x.clone(), target))
            };
            // All forwards, then all backwards: GPipe.
            let kind = Kind::OneForwardOneBackward;
            let mut schedule = Schedule::new(kind, 2, 3).unwrap();
            for stage in 0..2 {
                let all: Vec<Instruction> = schedule.instructions(stage).collect();
                let goes_back = |one: &Instruction| {
                    matches!(
                        one,
                        Instruction::Backward(_)
                            | Instruction::SendGradient(_)
                            | Instruction::ReceiveGradient(_)
                    )
                };
                let (back, forth): (Vec<_>, Vec<_>) =
                    all.into_iter().filter(|one| one.item().is_some()).partition(goes_back);
                schedule.steps[stage] = vec![forth, back];
            }
            let wrong = Schedule::new(kind, 2, 5).unwrap();
            let error = engine.train_batch_by(&wrong, &model, batch).unwrap_err().to_string();
            assert!(error.contains("it has 5 micro-batches, and a step 3"), "{error}");
            let mut broken = schedule.clone();
            broken.steps[1].reverse();
            assert!(engine.train_batch_by(&broken, &model, batch).is_err());
            let mut losses = Vec::new();
            for _ in 0..2 {
                let (loss, _) = match own {
                    true => engine.train_batch_by(&schedule, &model, batch).unwrap(),
                    false => engine.train_batch(&model, batch).unwrap(),
                };
                losses.push(loss.to_bits());
            }
            losses
        })
    };
    assert_eq!(trained(true), trained(false));
}

/// Halves the rate with every step.
struct Halving(i32);

impl OwnSchedule for Halving {
    fn step(&mut self) {
        self.0 += 1;
    }

    fn rates(&self, _: usize, base: &GroupOptions) -> Rates {
        Rates::lr(base.lr * 0.5f64.powi(self.0))
    }

    fn state(&self) -> Value {
        json!({"halvings": self.0})
    }

    fn load(&mut self, state: &Value) -> Result<(), String> {
        self.0 = state["halvings"].as_i64().ok_or("no halvings")? as i32;
        Ok(())
    }
}

#[test]
fn a_schedule_that_remembers_goes_on_where_it_was_and_never_begins_anew_without_a_word() {
    let folder = tempfile::tempdir().unwrap();
    let group = GroupOptions { lr: 0.1, weight_decay: 0.0, betas: [0.9, 0.999] };
    let start = |own: bool| {
        let setup = Setup::new(config(&configuration(json!({})), 1), World::solo(), device(1));
        let scheduler = match own {
            true => Scheduler::object(Halving(0), &[group]),
            false => Scheduler::constant(&[group]),
        };
        let options = Options { scheduler: Some(scheduler), ..Options::default() };
        initialize_with(&setup, options, |init| layers(init, false)).unwrap()
    };
    let (mut engine, model) = start(true);
    for rate in [0.1, 0.05, 0.025] {
        assert_eq!(engine.get_lr(), [rate]);
        step(&mut engine, &model).unwrap();
    }
    engine.save_checkpoint(folder.path(), &SaveOptions::default()).unwrap();
    let (mut again, _) = start(true);
    again.load_checkpoint(folder.path(), &LoadOptions::default()).unwrap();
    assert_eq!(again.get_lr(), engine.get_lr());
    // Of a run with another schedule it cannot go on.
    let (mut other, model) = start(false);
    step(&mut other, &model).unwrap();
    let elsewhere = folder.path().join("other");
    other.save_checkpoint(&elsewhere, &SaveOptions::default()).unwrap();
    let (mut again, _) = start(true);
    let refused = again.load_checkpoint(&elsewhere, &LoadOptions::default()).unwrap_err().to_string();
    assert!(refused.contains("holds no state of it"), "{refused}");
    let without = LoadOptions { load_lr_scheduler_states: false, ..LoadOptions::default() };
    assert!(again.load_checkpoint(&elsewhere, &without).is_ok());
}

#[test]
fn state_is_looked_at_and_changed_by_its_names_whole_and_in_parts() {
    for stage in 1..=3 {
        let seen = on_ranks(2, move |world| {
            let rank = world.rank() as f32;
            let value = configuration(json!({"zero_optimization": {"stage": stage}}));
            let setup = Setup::new(config(&value, 2), world, device(1));
            let (mut engine, model) = initialize(&setup, |init| layers(init, false)).unwrap();
            step(&mut engine, &model).unwrap();
            let param = engine.store().params()[0].clone();
            let whole = safe_get_full_fp32_param(&engine, &param).unwrap();
            let (start, own) = safe_get_local_fp32_param(&engine, &param).unwrap();
            assert_eq!(whole[start..start + own.len()], own);
            assert_eq!(safe_get_full_optimizer_state(&engine, &param, "exp_avg").unwrap().len(), 36);
            let wrong = safe_set_local_optimizer_state(&engine, &param, &[0.0; 99], "exp_avg").unwrap_err();
            assert!(wrong.to_string().contains("elements on this rank"), "{wrong}");
            safe_set_local_fp32_param(&engine, &param, &vec![rank + 1.0; own.len()]).unwrap();
            (
                own.len(),
                safe_get_full_fp32_param(&engine, &param).unwrap(),
                engine.weight_as_read(&param).unwrap(),
            )
        });
        let expected: Vec<f32> =
            seen.iter().zip([1.0, 2.0]).flat_map(|((own, ..), value)| vec![value; *own]).collect();
        assert!(seen.iter().all(|(_, whole, read)| *whole == expected && *read == expected), "stage {stage}");
    }
}

#[test]
fn what_a_frozen_parameter_has_not_is_told_without_contradiction() {
    let value = configuration(json!({"zero_optimization": {"stage": 2}}));
    let setup = Setup::new(config(&value, 1), World::solo(), device(1));
    let init = Init::root();
    let model = layers(&init, false);
    init.parameters().freeze("0.*");
    let mut engine =
        ferrospeed_engine::initialize_model(&setup, &init.parameters(), Options::default()).unwrap();
    step(&mut engine, &model).unwrap();
    let frozen = init.parameters().get("0.weight").unwrap().clone();
    let said = safe_get_full_optimizer_state(&engine, &frozen, "exp_avg").unwrap_err().to_string();
    assert!(said.contains("is frozen and has no optimizer states") && !said.contains("there are"), "{said}");
}

#[test]
fn a_profile_by_hand_counts_between_start_and_stop_and_leaves_out_classes() {
    let setup = Setup::new(config(&configuration(json!({})), 1), World::solo(), device(1));
    let (mut engine, model) = initialize(&setup, |init| layers(init, false)).unwrap();
    let x = input(&engine, 6);
    let parameters: ferrospeed_nn::Parameters = engine.store().params().iter().cloned().collect();
    let mut profiler = FlopsProfiler::new(engine.device(), &parameters);
    profiler.profiled(|| engine.forward(|mode| model.forward(&x, mode))).unwrap();
    assert_eq!(profiler.get_total_macs(), 0);
    profiler.start_profile(&["Linear"]);
    for _ in 0..2 {
        profiler.profiled(|| engine.forward(|mode| model.forward(&x, mode))).unwrap();
    }
    profiler.stop_profile();
    profiler.profiled(|| engine.forward(|mode| model.forward(&x, mode))).unwrap();
    assert_eq!(profiler.get_total_macs(), 2 * 3 * (ROWS * 6 * 6) as u64);
    assert_eq!((profiler.get_total_params(), profiler.text_of_macs().as_str()), (126, "864 MACs"));
    assert!(profiler.model_profile().model().children.iter().all(|child| child.class != "Linear"));
    profiler.reset_profile();
    assert_eq!(profiler.get_total_flops(), 0);
    profiler.end_profile();
}

#[test]
fn weights_come_out_of_either_kind_of_checkpoint_in_f32_without_an_engine() {
    let folder = tempfile::tempdir().unwrap();
    let value = configuration(json!({"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}));
    let setup = Setup::new(config(&value, 1), World::solo(), device(1));
    let (mut engine, _) = initialize(&setup, |init| Linear::new(&init.at("head"), 6, 2, true)).unwrap();
    let expected = safe_get_full_fp32_param(&engine, &engine.store().params()[0].clone()).unwrap();
    for (name, format) in [("ours", Format::Ferrospeed), ("theirs", Format::DeepSpeed)] {
        let dir = folder.path().join(name);
        engine.save_checkpoint(&dir, &SaveOptions { format, ..SaveOptions::default() }).unwrap();
        let weights = get_fp32_state_dict_from_zero_checkpoint(&dir, None).unwrap();
        let found = weights.iter().find(|weight| weight.name == "head.weight").unwrap();
        assert_eq!((&found.shape[..], &found.values), (&[2, 6][..], &expected), "{name}");
        let file = folder.path().join("weights.bin");
        convert_zero_checkpoint_to_fp32_state_dict(&dir, &file, None).unwrap();
        let file = PtFile::open(&file).unwrap();
        let tensor = file.value().get("head.weight").unwrap().as_tensor().unwrap().clone();
        assert_eq!(file.read_f32(&tensor, 0..12).unwrap(), expected, "{name}");
    }
}

//! Parameters of every kind in every stage: tied, frozen, unused, empty, smaller than the world, read by some ranks only;
//! and looking in from outside.

use std::sync::Arc;

use super::common::{config, device, on_ranks};
use ferrospeed_comm::World;
use ferrospeed_engine::{Engine, Options, Setup, initialize_model};
use ferrospeed_nn::{Init, Linear, Parameters};
use ferrospeed_tensor::{Initializer, Param, Result, Tensor, ops};
use ferrospeed_zero::access::Which;
use serde_json::{Value, json};

fn configuration(stage: u8) -> Value {
    json!({
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": true},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": stage, "reduce_bucket_size": 50, "stage3_param_persistence_threshold": 0,
        },
    })
}

fn start(world: World, stage: u8, parameters: &Parameters, leaf_modules: Vec<String>) -> Engine {
    let setup = Setup::new(config(&configuration(stage), world.size()), world, device(1));
    initialize_model(&setup, parameters, Options { leaf_modules, ..Default::default() }).unwrap()
}

fn step(engine: &mut Engine, loss: impl Fn(&Tensor) -> Result<Tensor>) -> ferrospeed_engine::Result<()> {
    let values: Vec<f32> = (0..10).map(|at| ((at * 3 + engine.world().rank()) as f32).sin()).collect();
    let x = Tensor::from_f32(&values, [2, 5], ferrospeed_tensor::DType::BF16, engine.device())?;
    let loss = engine.forward(|_| loss(&x))?;
    engine.backward(&loss)?;
    engine.step()?;
    Ok(())
}

fn weights(engine: &Engine, parameters: &Parameters) -> Vec<Vec<u32>> {
    let full = |param| engine.store().full(param, Which::Weight).unwrap();
    parameters.as_slice().iter().map(|param| full(param).into_iter().map(f32::to_bits).collect()).collect()
}

/// A model with one parameter of every kind.
struct Odd {
    layer: Linear,
    frozen: Param,
    scalar: Param,
}

impl Odd {
    fn build(init: &Init) -> Odd {
        let normal = Initializer::Normal { mean: 0.0, std: 0.3 };
        let odd = Odd {
            layer: Linear::new(&init.at("layer"), 5, 5, true),
            frozen: init.param("frozen", [5], normal),
            scalar: init.param("scalar", [1], Initializer::Constant(0.7)),
        };
        init.param("unused", [3, 2], normal);
        init.param("empty", [0, 4], normal);
        odd.frozen.set_trainable(false);
        odd
    }

    /// The layer is used twice, so its weight is tied to itself.
    fn loss(&self, x: &Tensor) -> Result<Tensor> {
        let hidden = ops::add(&ops::tanh(&self.layer.forward(x)?)?, &self.frozen)?;
        let out = ops::mul(&self.layer.forward(&hidden)?, &self.scalar)?;
        ops::mean(&ops::square(&out)?)
    }
}

#[test]
fn parameters_of_every_kind_train_alike_in_all_stages() {
    for ranks in [1, 2, 4] {
        let run = move |stage: u8| {
            on_ranks(ranks, move |world| {
                let init = Init::root();
                let odd = Odd::build(&init);
                let parameters = init.parameters();
                let mut engine = start(world, stage, &parameters, Vec::new());
                let before = weights(&engine, &parameters);
                for _ in 0..3 {
                    step(&mut engine, |x| odd.loss(x)).unwrap();
                }
                let after = weights(&engine, &parameters);
                for (param, (before, after)) in parameters.as_slice().iter().zip(before.iter().zip(&after)) {
                    // Weight decay moves what is trained even where its gradient is zero.
                    let moves = param.name() != "frozen" && param.numel() > 0;
                    assert_eq!(before != after, moves, "{} in stage {stage}", param.name());
                }
                after
            })
        };
        let expected = run(0);
        for stage in 1..=3 {
            assert_eq!(run(stage), expected, "stage {stage}, {ranks} ranks");
        }
    }
}

/// Two experts between two layers; a rank reads its own alone.
struct Experts {
    input: Linear,
    experts: Vec<Linear>,
    output: Linear,
}

impl Experts {
    fn build(init: &Init) -> Experts {
        Experts::build_at(init, &init.at("moe"))
    }

    fn build_at(init: &Init, moe: &Init) -> Experts {
        Experts {
            input: Linear::new(&init.at("input"), 5, 6, true),
            experts: (0..3)
                .map(|expert| Linear::new(&moe.at(format!("experts.{expert}")), 6, 6, true))
                .collect(),
            output: Linear::new(&init.at("output"), 6, 5, true),
        }
    }

    fn loss(&self, x: &Tensor, chosen: &[usize]) -> Result<Tensor> {
        let mut hidden = ops::tanh(&self.input.forward(x)?)?;
        for &expert in chosen {
            hidden = ops::tanh(&self.experts[expert].forward(&hidden)?)?;
        }
        ops::mean(&ops::square(&self.output.forward(&hidden)?)?)
    }
}

/// What each rank reads: unlike ones, and not equally many.
fn chosen(rank: usize) -> &'static [usize] {
    if rank == 0 { &[0] } else { &[1, 2, 1] }
}

#[test]
fn a_leaf_module_is_gathered_whole_so_that_ranks_may_read_it_unlike_each_other() {
    let run = |stage: u8, leaf_modules: Vec<String>| {
        let leaf_modules = Arc::new(leaf_modules);
        on_ranks(2, move |world| {
            let rank = world.rank();
            let init = Init::root();
            let model = Experts::build(&init);
            let parameters = init.parameters();
            let mut engine = start(world, stage, &parameters, leaf_modules.to_vec());
            for _ in 0..4 {
                step(&mut engine, |x| model.loss(x, chosen(rank))).map_err(|error| error.to_string())?;
            }
            Ok::<_, String>(weights(&engine, &parameters))
        })
    };
    let leaf = || vec!["moe".to_owned()];
    let expected = run(0, leaf());
    assert!(expected[0].is_ok(), "{:?}", expected[0]);
    for stage in 1..=3 {
        assert_eq!(run(stage, leaf()), expected, "stage {stage}");
    }
    // Without it the ranks' collectives differ, which each is told instead of waiting for ever, or mixing experts that are
    // as large as each other.
    for outcome in run(3, Vec::new()) {
        let error = outcome.unwrap_err();
        assert!(error.contains("moe.experts.") && error.contains("all_gather"), "{error}");
        assert!(error.contains("Init::as_unit()"), "{error}");
    }
}

#[test]
fn a_leaf_module_may_be_named_by_the_configuration() {
    let run = |leaf_module: Value| {
        on_ranks(2, move |world| {
            let rank = world.rank();
            let init = Init::root();
            let model = Experts::build(&init);
            let parameters = init.parameters();
            let mut value = configuration(3);
            value["zero_optimization"]["leaf_module"] = leaf_module.clone();
            let setup = Setup::new(config(&value, world.size()), world, device(1));
            let mut engine = initialize_model(&setup, &parameters, Options::default()).unwrap();
            for _ in 0..4 {
                step(&mut engine, |x| model.loss(x, chosen(rank))).map_err(|error| error.to_string())?;
            }
            Ok::<_, String>(weights(&engine, &parameters))
        })
    };
    let named = run(json!({"names": ["moe"]}));
    assert!(named[0].is_ok(), "{:?}", named[0]);
    assert_eq!(run(json!({"name_suffixes": ["oe"]})), named);
    assert!(run(json!({"names": []}))[0].is_err());
}

#[test]
fn a_unit_needs_no_naming_and_routers_may_change_their_minds() {
    let run = |stage: u8| {
        on_ranks(2, move |world| {
            let rank = world.rank();
            let init = Init::root();
            let model = Experts::build_at(&init, &init.at("moe").as_unit());
            let parameters = init.parameters();
            let mut engine = start(world, stage, &parameters, Vec::new());
            for turn in 0..12 {
                // Each rank's own choice, of another length every time.
                let chosen: Vec<usize> =
                    (0..1 + (turn + rank) % 3).map(|n| (n * 2 + turn + rank) % 3).collect();
                step(&mut engine, |x| model.loss(x, &chosen)).map_err(|error| error.to_string())?;
            }
            Ok::<_, String>(weights(&engine, &parameters))
        })
    };
    let expected = run(0);
    assert!(expected[0].is_ok(), "{:?}", expected[0]);
    for stage in 1..=3 {
        assert_eq!(run(stage), expected, "stage {stage}");
    }
}

#[test]
fn a_leaf_module_that_is_not_there_is_refused() {
    let init = Init::root();
    Experts::build(&init);
    let setup = Setup::solo(config(&configuration(3), 1), ferrospeed_cpu::device());
    let options = Options { leaf_modules: vec!["experts.*".into()], ..Default::default() };
    let error = initialize_model(&setup, &init.parameters(), options).err().unwrap().to_string();
    assert_eq!(error, "leaf modules: no module of this model has a path like 'experts.*'");
}

#[test]
fn state_is_read_and_written_from_outside_in_every_stage() {
    for stage in 0..=3 {
        on_ranks(3, move |world| {
            let init = Init::root();
            let odd = Odd::build(&init);
            let parameters = init.parameters();
            let mut engine = start(world, stage, &parameters, Vec::new());
            let weight = parameters.get("layer.weight").unwrap();
            let error = engine.store().full(weight, Which::Gradient).unwrap_err().to_string();
            assert!(error.contains("ask between backward and step"), "{error}");
            step(&mut engine, |x| odd.loss(x)).unwrap();
            let store = engine.store().clone();
            let moment = store.full(weight, Which::State("exp_avg")).unwrap();
            assert!(moment.len() == 25 && moment.iter().any(|value| *value != 0.0));
            let (start, own) = store.local(weight, Which::State("exp_avg")).unwrap();
            assert_eq!(own[..], moment[start..start + own.len()], "this rank's part of it");
            let error = store.full(weight, Which::State("momentum")).unwrap_err().to_string();
            assert!(error.contains("there are: exp_avg, exp_avg_sq"), "{error}");
            let error =
                store.full(parameters.get("frozen").unwrap(), Which::Gradient).unwrap_err().to_string();
            assert!(error.contains("frozen"), "{error}");

            let ones = vec![1.0; 25];
            store.set_full(weight, Which::Weight, &ones).unwrap();
            store.set_full(weight, Which::State("exp_avg"), &ones).unwrap();
            assert_eq!(store.full(weight, Which::Weight).unwrap(), ones);
            assert_eq!(store.full(weight, Which::State("exp_avg")).unwrap(), ones);
            assert_eq!(store.full_as_read(weight).unwrap(), ones, "kernels read it too");
            let error = store.set_full(weight, Which::Weight, &[1.0]).unwrap_err().to_string();
            assert!(error.contains("has 25 elements, the new value 1"), "{error}");
        });
    }
}

#[test]
fn weights_that_ranks_have_in_common_change_only_when_no_rank_reads_them_any_more() {
    for stage in 1..=2 {
        let about_to_write = Arc::new(std::sync::Barrier::new(2));
        on_ranks(2, move |world| {
            let init = Init::root();
            Odd::build(&init);
            let parameters = init.parameters();
            let engine = start(world, stage, &parameters, Vec::new());
            let weight = parameters.get("layer.weight").unwrap();
            let before = engine.store().full_as_read(weight).unwrap();
            about_to_write.wait();
            if engine.world().rank() == 1 {
                // The other rank writes its part now, unless it waits for this one.
                for _ in 0..10_000 {
                    assert_eq!(engine.store().full_as_read(weight).unwrap(), before, "stage {stage}");
                }
            }
            engine.store().set_full(weight, Which::Weight, &[2.0; 25]).unwrap();
            assert_eq!(engine.store().full_as_read(weight).unwrap(), [2.0; 25], "stage {stage}");
        });
    }
}

#[test]
fn the_cache_of_whole_parameters_can_be_emptied_at_any_time() {
    on_ranks(2, |world| {
        let init = Init::root();
        let odd = Odd::build(&init);
        let mut engine = start(world, 3, &init.parameters(), Vec::new());
        let held =
            |engine: &Engine| engine.device().memory_usage().current(ferrospeed_tensor::Category::Parameters);
        engine.store().empty_partition_cache().unwrap();
        let sharded = held(&engine);
        {
            let value = odd.frozen.read().unwrap();
            assert!(held(&engine) > sharded);
            engine.store().empty_partition_cache().unwrap();
            assert!(
                value.to_vec_f32().unwrap().iter().all(|value| value.is_finite()),
                "a borrow stays valid"
            );
        }
        step(&mut engine, |x| odd.loss(x)).unwrap();
        engine.store().empty_partition_cache().unwrap();
        assert_eq!(held(&engine), sharded);
    });
}

/// What a step, new weights and a checkpoint would write, while a clone of the value outlives its guard.
#[test]
fn what_is_written_while_the_program_looks_at_it_is_refused_in_every_stage_and_home() {
    for (stage, is_offloaded) in [(0, false), (1, false), (2, false), (3, false), (2, true), (3, true)] {
        on_ranks(2, move |world| {
            let init = Init::root();
            let odd = Odd::build(&init);
            let parameters = init.parameters();
            let mut configuration = configuration(stage);
            if is_offloaded {
                configuration["zero_optimization"]["offload_optimizer"] = json!({"device": "cpu"});
            }
            let setup = Setup::new(config(&configuration, world.size()), world, device(1));
            let mut engine = initialize_model(&setup, &parameters, Options::default()).unwrap();
            step(&mut engine, |x| odd.loss(x)).unwrap();
            let weight = parameters.get("layer.weight").unwrap();
            let guard = weight.read().unwrap();
            let seen = guard.slice(5, [5]).unwrap();
            drop(guard);
            let before = seen.to_vec_f32().unwrap();

            let error = step(&mut engine, |x| odd.loss(x)).unwrap_err().to_string();
            assert!(error.contains("step writes parameter 'layer.weight'"), "{error}");
            assert!(error.contains("parameters.rs:"), "the line that read it: {error}");
            let new = vec![1.0; 25];
            let error = engine.store().set_full(weight, Which::Weight, &new).unwrap_err().to_string();
            assert!(error.contains("setting weights writes parameter 'layer.weight'"), "{error}");
            assert_eq!(seen.to_vec_f32().unwrap(), before, "stage {stage}");

            drop(seen);
            engine.step().unwrap();
            engine.store().set_full(weight, Which::Weight, &new).unwrap();
        });
    }
}

/// Every rank would see what it has added up itself.
#[test]
fn a_gradient_that_ranks_have_not_averaged_yet_is_no_gradient() {
    for stage in 0..=3 {
        let seen = on_ranks(2, move |world| {
            let init = Init::root();
            let odd = Odd::build(&init);
            let parameters = init.parameters();
            let mut configuration = configuration(stage);
            configuration["gradient_accumulation_steps"] = 2.into();
            let setup = Setup::new(config(&configuration, world.size()), world, device(1));
            let mut engine = initialize_model(&setup, &parameters, Options::default()).unwrap();
            let weight = parameters.get("layer.weight").unwrap();
            step(&mut engine, |x| odd.loss(x)).unwrap();
            let first = engine.store().full(weight, Which::Gradient);
            let x = Tensor::full([2, 5], 0.5, ferrospeed_tensor::DType::BF16, engine.device()).unwrap();
            let loss = engine.forward(|_| odd.loss(&x)).unwrap();
            engine.backward(&loss).unwrap();
            engine.store().full(weight, Which::Gradient).unwrap();
            first.map_err(|error| error.to_string())
        });
        match &seen[0] {
            Ok(_) => assert!(stage >= 2, "stage {stage}"),
            Err(error) => {
                assert!(stage < 2, "stage {stage}: {error}");
                assert!(error.contains("ask after its last backward"), "{error}");
            }
        }
        assert_eq!(seen[0], seen[1], "ranks agree in stage {stage}");
    }
}

//! Stage 3 beside DeepSpeed's recorded coordinator: which parameters stay whole, and in what order the others are read.
//!
//! DeepSpeed fetches by module, with biases that a backward pass does not need; here an operation reads what it
//! computes with. So orders are compared by module, and in backward ours may leave some out.

use std::sync::Arc;

use super::common::{Batch, Model, engine, on_ranks};
use ferrospeed_tensor::Tensor;
use ferrospeed_testkit::golden::{golden, read_json};
use ferrospeed_zero::Pass;
use serde_json::{Value, json};

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

/// The modules with parameters of their own that a recorded pass fetched for, in order.
fn fetched(trace: &Value, iteration: usize, forward: bool) -> Vec<String> {
    let owners: Vec<&str> =
        trace["params"].as_array().unwrap().iter().map(|param| module_of(text(&param[0]))).collect();
    let events = trace["iterations"][iteration]["events"].as_array().unwrap().iter();
    let fetches = events.filter(|event| event["ev"] == "enter_fetch" && event["fwd"] == forward);
    let modules = fetches.map(|event| text(&event["module"])).filter(|module| owners.contains(module));
    let mut modules: Vec<String> = modules.map(str::to_owned).collect();
    modules.dedup();
    modules
}

fn module_of(param: &str) -> &str {
    param.rsplit_once('.').map_or("", |(module, _)| module)
}

/// One rank's persistent parameters, and the modules it read for in the first pass and in the third.
fn run(trace: &Value) -> Vec<(Vec<String>, Vec<String>, Vec<String>)> {
    let trace = Arc::new(trace.clone());
    let ranks = trace["world_size"].as_u64().unwrap() as usize;
    on_ranks(ranks, move |world| {
        let rank = world.rank();
        let mut zero = trace["zero"].clone();
        zero["stage"] = 3.into();
        let config = json!({
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "zero_optimization": zero,
        });
        let (model, parameters) = Model::build(&trace["model"]);
        let mut engine = engine(world, &config, &parameters, None, None, 1);
        let device = engine.device().clone();
        let size = |key: &str| trace["model"][key].as_u64().map(|size| size as usize);
        let mut orders = Vec::new();
        for _ in 0..3 {
            let batch = match (size("vocab"), size("tmax")) {
                (Some(vocab), Some(tokens)) => {
                    let ids: Vec<i64> = (0..2 * tokens).map(|at| ((at * 5 + rank) % vocab) as i64).collect();
                    Batch::Tokens(Tensor::from_slice(&ids, [2, tokens], &device).unwrap())
                }
                _ => {
                    let width = |at: usize| trace["model"]["d"][at].as_u64().unwrap() as usize;
                    let values = |count: usize| (0..count).map(|at| (at as f32).sin()).collect::<Vec<_>>();
                    let tensor =
                        |width: usize| Tensor::from_slice(&values(2 * width), [2, width], &device).unwrap();
                    Batch::Regression { x: tensor(width(0)), y: tensor(width(3)) }
                }
            };
            let loss = engine.forward(|_| model.loss(&batch)).unwrap();
            engine.backward(&loss).unwrap();
            engine.step().unwrap();
            let params = engine.store().params();
            let order = engine.store().read_order(Pass::Train);
            let mut modules: Vec<String> =
                order.iter().map(|&param| module_of(params[param].name()).to_owned()).collect();
            modules.dedup();
            orders.push(modules);
        }
        let stays = parameters.as_slice().iter().filter(|param| engine.store().is_persistent(param).unwrap());
        (stays.map(|param| param.name().to_owned()).collect(), orders.remove(0), orders.remove(1))
    })
}

#[test]
fn golden_gathers_follow_the_recorded_order() {
    golden().each_entry("zero/z3trace", ".json", 14, |path| {
        let trace = read_json(path);
        let name = text(&trace["name"]);
        let recorded: Vec<String> = trace["params"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|param| param[5] == true)
            .map(|param| text(&param[0]).to_owned())
            .collect();
        let (forward, backward) = (fetched(&trace, 0, true), fetched(&trace, 0, false));
        for (stays, first, third) in run(&trace) {
            assert_eq!(stays, recorded, "{name}: what stays whole");
            assert_eq!(first[..forward.len()], forward[..], "{name}: forward");
            // In backward the last module of forward is the first again.
            let mut rest = forward[forward.len() - 1..].iter().chain(&backward);
            for module in &first[forward.len()..] {
                assert!(
                    rest.any(|next| next == module),
                    "{name}: {module} out of turn in {first:?}, {backward:?}"
                );
            }
            assert_eq!(first, third, "{name}: a pass leaves the order it recorded");
        }
    });
}

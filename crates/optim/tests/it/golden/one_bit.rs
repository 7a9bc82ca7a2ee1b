//! `optimizers/onebit.json`: 1-bit Adam, 0/1 Adam and 1-bit LAMB on two to four ranks, step by step.
//!
//! The recording's first call makes buffers and changes nothing; here there is no such call, so its step k is our k-th.

use std::sync::Arc;

use ferrospeed_collective::one_bit::{self, Feedback, padded_numel};
use ferrospeed_comm::{Group, World};
use ferrospeed_optim::one_bit::{Exchange, Memory, OneBit, Values, Whole};
use ferrospeed_optim::{Copy16, Gradient, GroupOptions, Optimizer};
use ferrospeed_testkit::close::assert_close;
use ferrospeed_testkit::golden::golden;
use serde_json::{Value, json};

use super::{flat, resolve};

struct Ranks {
    group: Group,
    feedbacks: Vec<Option<Feedback>>,
}

impl Exchange for Ranks {
    type Error = ferrospeed_collective::CollectiveError;

    fn padded(&self, numel: usize) -> usize {
        padded_numel(numel, self.group.size())
    }

    fn average(&mut self, tensors: Vec<(usize, &mut dyn Values)>) -> Result<(), Self::Error> {
        for (tensor, given) in tensors {
            let mut values = vec![0.0; given.numel()];
            given.give(0, &mut values);
            self.feedbacks.resize(self.feedbacks.len().max(tensor + 1), None);
            let feedback =
                self.feedbacks[tensor].get_or_insert_with(|| Feedback::new(values.len(), self.group.size()));
            one_bit::all_reduce(&self.group, &ferrospeed_cpu::device(), &mut values, feedback)?;
            given.take(0, &values);
        }
        Ok(())
    }

    fn forget(&mut self) {
        self.feedbacks.clear();
    }
}

fn rule(case: &Value) -> (OneBit, GroupOptions) {
    let optimizer = json!({ "type": case["optimizer"], "params": case["hyper"] });
    let config = resolve(json!({ "optimizer": optimizer })).expect("it is valid");
    match Optimizer::from_config(&config.optimizer.expect("it was given")) {
        Some((Optimizer::OneBit(rule), options)) => (rule, options),
        other => panic!("{other:?}"),
    }
}

/// The numbers of each parameter.
fn tensors(value: &Value) -> Vec<Vec<f32>> {
    let tensors = value.as_array().expect("a list of tensors");
    tensors.iter().map(|tensor| flat(tensor).into_iter().map(|value| value as f32).collect()).collect()
}

/// What a step recorded under this name for a rank, where ranks may differ.
fn recorded(step: &Value, name: &str, rank: usize) -> Option<Vec<Vec<f32>>> {
    let of_rank = &step[format!("{name}_per_rank")][rank];
    [of_rank, &step[name]].into_iter().find(|value| value.is_array()).map(tensors)
}

fn mean(grads: &[Vec<Vec<f32>>]) -> Vec<Vec<f32>> {
    let mut mean = grads[0].clone();
    for (index, tensor) in mean.iter_mut().enumerate() {
        for (at, value) in tensor.iter_mut().enumerate() {
            let sum: f64 = grads.iter().map(|grads| f64::from(grads[index][at])).sum();
            *value = (sum / grads.len() as f64) as f32;
        }
    }
    mean
}

fn compare(case: &Value, world: &World) {
    let (rule, options) = rule(case);
    let rank = world.rank();
    let mut exchange = Ranks { group: world.group(), feedbacks: Vec::new() };
    let mut memory = Memory::default();
    let mut weights = tensors(&case["initial_params"]);
    let zeros = |tensor: &Vec<f32>| vec![vec![0.0; tensor.len()]; rule.state_names().len()];
    let mut states: Vec<Vec<Vec<f32>>> = weights.iter().map(zeros).collect();
    let steps = case["steps"].as_array().expect("steps");
    for (number, step) in steps.iter().enumerate().skip(1) {
        let grads: Vec<Vec<Vec<f32>>> =
            step["local_grads_per_rank"].as_array().expect("ranks").iter().map(tensors).collect();
        let local = rule.takes_local_gradients(number as u64);
        assert_eq!(Some(!local), step["allreduce_before_step"].as_bool(), "step {number}: its gradients");
        let gradient = if local { grads[rank].clone() } else { mean(&grads) };
        let mut params: Vec<Whole<'_>> = weights
            .iter_mut()
            .zip(&gradient)
            .zip(&mut states)
            .map(|((weights, gradient), states)| Whole {
                weights,
                gradient: Gradient::F32(gradient),
                gradient_factor: 1.0,
                states: states.iter_mut().map(|state| &mut state[..]).collect(),
                copy: Copy16::None,
                options,
            })
            .collect();
        rule.step(&ferrospeed_cpu::device(), &mut memory, &mut params, number as u64, &mut exchange)
            .expect("ranks can talk");
        for (name, index) in [("params", None), ("exp_avg", Some(0)), ("exp_avg_sq", Some(1))] {
            let Some(expected) = recorded(step, name, rank) else { continue };
            for (param, expected) in expected.iter().enumerate() {
                let found = index.map_or(&weights[param], |index| &states[param][index]);
                let what = format!("step {number}: {name} {param} on rank {rank}");
                assert_close(&what, found, expected, 4e-6, 2e-6);
            }
        }
        for (ratio, expected) in memory.ratios.iter().zip(step["lamb"].as_array().into_iter().flatten()) {
            let mut pairs = vec![(ratio.frozen, "lamb_coeff_freeze"), (ratio.factor, "last_factor")];
            pairs.extend((ratio.scale != 0.0).then_some((ratio.scale, "scaling_coeff")));
            for (found, name) in pairs {
                let expected = expected[name].as_f64().expect("a number") as f32;
                assert_close(&format!("step {number}: {name}"), &[found as f32], &[expected], 4e-6, 4e-6);
            }
        }
    }
}

#[test]
fn steps_are_as_recorded_on_every_rank() {
    golden().each_case("optimizers/onebit.json", 9, |case| {
        let ranks = case["world_size"].as_u64().expect("a count") as usize;
        let case = Arc::new(case.clone());
        let start = |world: World| {
            let case = case.clone();
            std::thread::spawn(move || compare(&case, &world))
        };
        let threads: Vec<_> = World::threads(ranks).into_iter().map(start).collect();
        for thread in threads {
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
    });
}

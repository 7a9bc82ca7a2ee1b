//! The engine on a GPU: stages equal to the bit, several ranks on one device, the CPU's trajectory within rounding.
//!
//! Without a device each test says so and passes: there is nothing to compare.

use std::num::NonZeroU64;
use std::sync::Arc;

use super::common::{Batch, Model, on_ranks};
use ferrospeed_comm::DType as comm;
use ferrospeed_comm::{Backend, ConnectOptions, DeviceStream, ReduceOp, Region, Work, World};
use ferrospeed_config::{AutoValues, Config};
use ferrospeed_engine::{Options, Setup, StepReport, initialize_model};
use ferrospeed_tensor::{DType, Device, Tensor, ops};
use ferrospeed_zero::access::Which;
use serde_json::{Value, json};

fn has_device() -> bool {
    if ferrospeed_cuda::device_count() == 0 {
        ferrospeed_testkit::skip::skip("no CUDA device");
        return false;
    }
    true
}

/// Losses and norms of three steps, and the f32 weights after them.
#[derive(Debug, Clone, PartialEq)]
struct Outcome {
    losses: Vec<f32>,
    norms: Vec<f64>,
    weights: Vec<f32>,
}

fn train(on_gpu: bool, ranks: usize, config: Value) -> Vec<Outcome> {
    let config = Arc::new(config);
    on_ranks(ranks, move |world: World| {
        let device = if on_gpu {
            ferrospeed_cuda::device(0, &ferrospeed_cpu::device()).unwrap()
        } else {
            ferrospeed_cpu::with_threads(1)
        };
        train_rank(world, device, &config)
    })
}

fn train_rank(world: World, device: Device, config: &Value) -> Outcome {
    let rank = world.rank();
    let size = NonZeroU64::new(world.size() as u64).unwrap();
    let (resolved, _) =
        Config::from_value("test", config).unwrap().resolve(size, &AutoValues::new()).unwrap();
    let accumulation = resolved.batch.gradient_accumulation_steps.get();
    let (model, parameters) =
        Model::build(&json!({"kind": "lm", "vocab": 40, "dm": 32, "nh": 2, "nl": 2, "tmax": 16}));
    let setup = Setup::new(resolved, world, device.clone());
    let mut engine = initialize_model(&setup, &parameters, Options::default()).unwrap();
    let mut outcome = Outcome { losses: Vec::new(), norms: Vec::new(), weights: Vec::new() };
    for step in 0..3 {
        for micro in 0..accumulation as usize {
            let ids: Vec<i64> =
                (0..32).map(|i| ((i * 7 + step * 5 + micro * 3 + rank * 11 + i * i) % 40) as i64).collect();
            let batch = Batch::Tokens(Tensor::from_slice(&ids, [2, 16], &device).unwrap());
            let loss = engine.forward(|_| model.loss(&batch)).unwrap();
            outcome.losses.push(loss.item().unwrap());
            engine.backward(&loss).unwrap();
            if let StepReport::Applied { grad_norm } = engine.step().unwrap() {
                outcome.norms.push(grad_norm);
            }
        }
    }
    assert_eq!(outcome.norms.len(), 3, "every step was applied");
    for param in parameters.as_slice() {
        outcome.weights.extend(engine.store().full(param, Which::Weight).unwrap());
    }
    outcome
}

fn configuration(stage: u8, precision: &str, optimizer: &str, accumulation: u64) -> Value {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "optimizer": {"type": optimizer, "params": {"lr": 0.01, "weight_decay": 0.01}},
        "zero_allow_untested_optimizer": true,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 3000, "stage3_param_persistence_threshold": 20, "reduce_each_micro_batch": true},
    });
    if precision != "fp32" {
        config[precision] = json!({"enabled": true});
        if precision == "fp16" {
            // A scale of 128 that nothing moves in three steps; a fixed one is refused for LAMB.
            config[precision]["initial_scale_power"] = json!(7);
        }
    }
    config
}

#[test]
fn stages_agree_to_the_bit_and_runs_repeat() {
    if !has_device() {
        return;
    }
    for ranks in [1, 2] {
        for precision in ["fp32", "bf16", "fp16"] {
            for accumulation in [1, 2] {
                let plain = train(true, ranks, configuration(0, precision, "AdamW", accumulation));
                for stage in 0..=3 {
                    let other = train(true, ranks, configuration(stage, precision, "AdamW", accumulation));
                    assert!(
                        plain == other,
                        "stage {stage} {precision} {ranks} ranks, {accumulation} micro-batches"
                    );
                }
            }
        }
    }
}

/// A job of one rank that must use NCCL.
fn nccl_world() -> World {
    let options = ConnectOptions { backend: Backend::Nccl, ..ConnectOptions::new(0, 1, "127.0.0.1", 0) };
    World::connect(options).unwrap()
}

fn stream_of(device: &Device) -> Option<DeviceStream> {
    device.backend().stream().map(|(ordinal, handle)| DeviceStream { ordinal, handle })
}

#[test]
fn nccl_carries_every_operation_on_device_memory() {
    if !has_device() {
        return;
    }
    let (world, device) = (nccl_world(), ferrospeed_cuda::device(0, &ferrospeed_cpu::device()).unwrap());
    world.attach_device(stream_of(&device)).unwrap();
    let group = world.group();
    let group = group.on_devices().unwrap().expect("one rank has its GPU to itself");
    assert_eq!((group.backend(), group.size()), ("nccl", 1));
    // Long enough that an operation that did not wait for it would read something else.
    let values: Vec<f32> = (0..4_000_000).map(|i| (i % 1000) as f32).collect();
    let full = |values: &[f32], dtype| Tensor::from_f32(values, [values.len()], dtype, &device).unwrap();
    let region = |tensor: &Tensor| {
        // SAFETY: the tensor is kept alive, and nobody touches it before the operation is done.
        unsafe { Region::from_raw(tensor.address().as_ptr(), tensor.size_bytes(), tensor.keep_alive()) }
    };
    for (dtype, wire) in [(DType::F32, comm::F32), (DType::BF16, comm::BF16), (DType::F16, comm::F16)] {
        let data = ops::affine(full(&values, dtype), 1.0, 1.0).unwrap();
        let expected = data.to_vec_f32().unwrap();
        for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::Min, ReduceOp::Product] {
            group.all_reduce_async(&region(&data), wire, op).wait().unwrap();
            group.reduce_async(&region(&data), wire, op, 0).wait().unwrap();
            assert_eq!(data.to_vec_f32().unwrap(), expected, "{op:?} {dtype}");
        }
        let zeros = || Tensor::zeros([values.len()], dtype, &device).unwrap();
        let (all, count) = (zeros(), [values.len()]);
        let from = |work: &dyn Fn(&Region, &Region) -> Work| {
            let target = zeros();
            work(&region(&data), &region(&target)).wait().unwrap();
            assert_eq!(target.to_vec_f32().unwrap(), expected, "{dtype}");
        };
        from(&|input, output| group.all_gather_async(input, output, wire));
        from(&|input, output| group.all_gather_unequal_async(input, output, &count, wire));
        from(&|input, output| group.reduce_scatter_async(input, output, wire, ReduceOp::Sum));
        from(&|input, output| group.reduce_scatter_unequal_async(input, output, &count, wire, ReduceOp::Sum));
        from(&|input, output| group.scatter_async(Some(input), output, wire, 0));
        from(&|input, output| group.gather_async(input, Some(output), wire, 0));
        from(&|input, output| group.all_to_all_async(input, output, wire));
        group.broadcast_async(&region(&data), wire, 0).wait().unwrap();
        let pairs = [(region(&data), region(&all)), (region(&data), region(&zeros()))];
        group.all_gather_coalesced(&pairs, wire).wait().unwrap();
        assert_eq!(all.to_vec_f32().unwrap(), expected, "{dtype} coalesced");
    }
    group.barrier().unwrap();
    let booleans = Tensor::zeros([4], DType::Bool, &device).unwrap();
    let refused = group.all_reduce_async(&region(&booleans), comm::Bool, ReduceOp::BitOr).wait().unwrap_err();
    assert!(refused.to_string().contains("NCCL does not reduce bool"), "{refused}");
    let records = world.recorder().records();
    assert!(
        records.iter().any(|record| record.description.starts_with("reduce_scatter(sum, bf16")),
        "{records:?}"
    );
}

#[test]
fn training_over_nccl_gives_the_same_bits() {
    if !has_device() {
        return;
    }
    for stage in [0, 2, 3] {
        let config = configuration(stage, "bf16", "AdamW", 2);
        let ours =
            train_rank(nccl_world(), ferrospeed_cuda::device(0, &ferrospeed_cpu::device()).unwrap(), &config);
        assert!(train(true, 1, config) == [ours], "stage {stage}");
    }
}

#[test]
fn the_trajectory_is_the_cpus_within_rounding() {
    if !has_device() {
        return;
    }
    for (precision, tolerance) in [("fp32", 2e-5), ("bf16", 3e-2), ("fp16", 5e-3)] {
        for optimizer in ["Adam", "AdamW", "SGD", "Adagrad", "Lion", "Lamb"] {
            for ranks in [1, 2] {
                let config = configuration(2, precision, optimizer, 1);
                let (gpu, cpu) = (train(true, ranks, config.clone()), train(false, ranks, config));
                for (gpu, cpu) in gpu.iter().zip(&cpu) {
                    for (step, (a, b)) in gpu.losses.iter().zip(&cpu.losses).enumerate() {
                        assert!(
                            (a - b).abs() <= tolerance * b.abs(),
                            "{optimizer} {precision} {ranks} ranks, loss {step}: {a} on the GPU, {b} on the CPU"
                        );
                    }
                    for (step, (a, b)) in gpu.norms.iter().zip(&cpu.norms).enumerate() {
                        assert!(
                            (a - b).abs() <= f64::from(tolerance) * 3.0 * b.abs(),
                            "{optimizer} {precision} {ranks} ranks, norm {step}: {a} on the GPU, {b} on the CPU"
                        );
                    }
                }
            }
        }
    }
}

/// Steps on batches whose inputs are all one number, and the f32 weights after them.
fn steps_on(inputs: &[f32]) -> (Vec<StepReport>, u64, Vec<f32>) {
    let device = ferrospeed_cuda::device(0, &ferrospeed_cpu::device()).unwrap();
    let (config, _) = Config::from_value("test", &configuration(1, "bf16", "AdamW", 1))
        .unwrap()
        .resolve(NonZeroU64::MIN, &AutoValues::new())
        .unwrap();
    let (model, parameters) = Model::build(&json!({"kind": "mlp", "d": [4, 8, 8, 2]}));
    let setup = Setup::new(config, World::solo(), device.clone());
    let mut engine = initialize_model(&setup, &parameters, Options::default()).unwrap();
    let y = Tensor::zeros([2, 2], ferrospeed_tensor::DType::F32, &device).unwrap();
    let mut reports = Vec::new();
    for &input in inputs {
        let x = Tensor::from_slice(&[input; 8], [2, 4], &device).unwrap();
        let loss = engine.forward(|_| model.loss(&Batch::Regression { x, y: y.clone() })).unwrap();
        engine.backward(&loss).unwrap();
        reports.push(engine.step().unwrap());
    }
    let weights = parameters.as_slice().iter();
    let weights = weights.flat_map(|param| engine.store().full(param, Which::Weight).unwrap()).collect();
    (reports, engine.skipped_steps(), weights)
}

#[test]
fn a_gradient_that_is_no_number_is_skipped_named_and_leaves_no_trace() {
    if !has_device() {
        return;
    }
    let (reports, skipped, weights) = steps_on(&[f32::NAN, 0.5, 0.25]);
    match &reports[0] {
        StepReport::Skipped { param, rank: 0 } => assert_eq!(param, "fc1.weight"),
        other => panic!("{other:?}"),
    }
    let (expected, never, same_weights) = steps_on(&[0.5, 0.25]);
    assert_eq!((&reports[1..], skipped, never), (&expected[..], 1, 0));
    assert_eq!(weights, same_weights);
}

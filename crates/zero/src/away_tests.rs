//! A step whose states are on a disk returns before they are written, and readers wait for what they read alone.

use std::fs::File;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use ferrospeed_comm::World;
use ferrospeed_config::{AutoValues, Config, NvmeBuffers, OptimizerTier};
use ferrospeed_io::{Layer, Queue, QueueOptions, System};
use ferrospeed_optim::{GroupOptions, Optimizer, adam::Adam};
use ferrospeed_tensor::store::FromInitializers;
use ferrospeed_tensor::{DType, Initializer, Param, Tensor};

use crate::access::Which;
use crate::home::Disk;
use crate::homes::Homes;
use crate::residency::Pass;
use crate::sharding::Sharding;
use crate::step::{StepOptions, StepOutcome};
use crate::store::{ParamGroup, StoreOptions, ZeroStore};

const PARAMS: usize = 6;
/// A tile of the smallest size.
const NUMEL: usize = 2048;

/// A disk that writes while its gate is open.
#[derive(Default)]
struct Gated {
    is_closed: Mutex<bool>,
    changed: Condvar,
}

impl Gated {
    fn set_closed(&self, is_closed: bool) {
        *self.is_closed.lock().unwrap() = is_closed;
        self.changed.notify_all();
    }
}

impl Layer for Gated {
    fn read_at(&self, file: &File, bytes: &mut [u8], offset: u64) -> std::io::Result<usize> {
        System.read_at(file, bytes, offset)
    }

    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> std::io::Result<usize> {
        let is_closed = self.is_closed.lock().unwrap();
        drop(self.changed.wait_while(is_closed, |is_closed| *is_closed).unwrap());
        System.write_at(file, bytes, offset)
    }
}

fn store(disk: Option<Disk>, params: &[Param]) -> Arc<ZeroStore> {
    store_in(3, &World::solo(), disk, params)
}

fn store_in(stage: u64, world: &World, disk: Option<Disk>, params: &[Param]) -> Arc<ZeroStore> {
    let json = serde_json::json!({
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "sub_group_size": 1, "stage3_param_persistence_threshold": 0},
    });
    let is_on_disk = disk.is_some();
    let homes = disk.map_or_else(Homes::default, |disk| Homes::on(disk, 1));
    let ranks = std::num::NonZeroU64::new(world.size() as u64).unwrap();
    let config = Config::from_value("test", &json).unwrap().resolve(ranks, &AutoValues::new()).unwrap().0;
    let options = GroupOptions { lr: 0.01, weight_decay: 0.01, betas: [0.9, 0.999] };
    let groups = [ParamGroup { params: params.to_vec(), options }];
    let mut zero = config.zero;
    if is_on_disk {
        // Configurations have it in stage 3 only; stores have it in all.
        let buffers = NvmeBuffers { path: "/".into(), count: 1, pinned: false };
        zero.offload_optimizer.tier =
            OptimizerTier::Nvme { buffers, pipeline_read: false, pipeline_write: false, fast_init: false };
    }
    let adam = Adam { eps: 1e-8, bias_correction: true, decoupled: true };
    let options = StoreOptions {
        zero: &zero,
        dtype: DType::BF16,
        wire: DType::BF16,
        kept: DType::F32,
        accumulates: false,
        predivide: 1.0,
        prescale: false,
        sparse_gradients: false,
        sharding: Sharding::over_world(world),
        elsewhere: &[],
        agreement: None,
        reduces_each_micro_batch: true,
        leaf_modules: &[],
        optimizer: Some(Optimizer::Adam(adam)),
        homes,
    };
    let device = ferrospeed_cpu::with_threads(1);
    ZeroStore::attach(world, &device, params, &groups, &options, &FromInitializers { seed: 7 }).unwrap()
}

fn params() -> Vec<Param> {
    let initializer = || Initializer::Normal { mean: 1.0, std: 0.5 };
    (0..PARAMS).map(|index| Param::new(format!("p{index}"), [NUMEL], initializer())).collect()
}

/// Reads all parameters from the last to the first, and steps.
fn step(store: &ZeroStore, params: &[Param]) {
    store.begin_pass(Pass::Train);
    params.iter().rev().for_each(|param| drop(param.read().unwrap()));
    store.begin_backward(true).unwrap();
    for (index, param) in params.iter().enumerate() {
        let value = 0.25 + (index + store.world().rank()) as f32;
        let gradient = Tensor::full([NUMEL], value, DType::BF16, store.device()).unwrap();
        param.push_grad(gradient).unwrap();
    }
    store.finish_backward().unwrap();
    let outcome = store.step(StepOptions { loss_scale: 1.0, clip: None }).unwrap();
    assert!(matches!(outcome, StepOutcome::Applied { .. }));
}

fn value(param: &Param) -> Vec<f32> {
    param.read().unwrap().to_vec_f32().unwrap()
}

#[test]
fn a_step_returns_before_its_tiles_are_written_and_readers_wait_for_theirs_alone() {
    let reference = params();
    let in_memory = store(None, &reference);
    step(&in_memory, &reference);
    step(&in_memory, &reference);
    let expected: Vec<Vec<f32>> = reference.iter().map(value).collect();

    let folder = tempfile::tempdir().unwrap();
    let gate = Arc::new(Gated::default());
    let options = QueueOptions { threads: 32, deadline: Duration::from_secs(60), ..QueueOptions::default() };
    let queue = Queue::over(gate.clone(), options);
    let params = params();
    let away = store(Some(Disk::over(queue, folder.path())), &params);
    step(&away, &params);
    step_while_closed(&away, &params, &gate, &expected);
    for (param, expected) in params.iter().zip(&expected) {
        assert_eq!(value(param), *expected);
        assert_eq!(
            away.full(param, Which::Weight).unwrap(),
            in_memory.full(&reference[away.index_of(param).unwrap()], Which::Weight).unwrap()
        );
    }
}

fn step_while_closed(store: &Arc<ZeroStore>, params: &[Param], gate: &Gated, expected: &[Vec<f32>]) {
    // What the first step has queued is done: from here on nothing is written.
    store.settle("test").unwrap();
    gate.set_closed(true);
    step(store, params);
    // What is read first was updated first, though none of it could be written.
    store.begin_pass(Pass::Train);
    assert_eq!(value(&params[PARAMS - 1]), expected[PARAMS - 1]);
    let (read, reads) = channel();
    let last = params[0].clone();
    let reader = std::thread::spawn(move || read.send(value(&last)).unwrap());
    assert_eq!(reads.recv_timeout(Duration::from_millis(200)), Err(RecvTimeoutError::Timeout));
    // Nobody holds the lock of the store while somebody waits for a tile.
    assert_eq!(store.group_options().len(), 1);
    gate.set_closed(false);
    assert_eq!(reads.recv_timeout(Duration::from_secs(60)).unwrap(), expected[0]);
    reader.join().unwrap();
}

/// What each of two ranks gives, as threads.
fn on_two_ranks<R: Send + 'static>(work: impl Fn(World) -> R + Send + Sync + 'static) -> Vec<R> {
    let work = Arc::new(work);
    let start = |world: World| {
        let work = Arc::clone(&work);
        std::thread::spawn(move || work(world))
    };
    let threads: Vec<_> = World::threads(2).into_iter().map(start).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

#[test]
fn below_stage_3_ranks_read_the_tiles_that_all_have_updated_while_others_wait_for_their_disks() {
    for stage in [1, 2] {
        let expected = on_two_ranks(move |world| {
            let params = params();
            let store = store_in(stage, &world, None, &params);
            step(&store, &params);
            step(&store, &params);
            params.iter().map(value).collect::<Vec<_>>()
        });
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_path_buf();
        let told = expected.clone();
        let found = on_two_ranks(move |world| {
            let gate = Arc::new(Gated::default());
            let options =
                QueueOptions { threads: 32, deadline: Duration::from_secs(60), ..QueueOptions::default() };
            let disk = Disk::over(Queue::over(gate.clone(), options), &path);
            let params = params();
            let store = store_in(stage, &world, Some(disk), &params);
            step(&store, &params);
            store.settle("test").unwrap();
            gate.set_closed(true);
            step(&store, &params);
            store.begin_pass(Pass::Train);
            // The first tile of both ranks' parts is there, the last one of neither.
            let expected = &told[world.rank()];
            assert_eq!(value(&params[0]), expected[0]);
            assert_eq!(value(&params[PARAMS / 2]), expected[PARAMS / 2]);
            let (read, reads) = channel();
            let last = params[PARAMS - 1].clone();
            let reader = std::thread::spawn(move || read.send(value(&last)).unwrap());
            assert_eq!(reads.recv_timeout(Duration::from_millis(200)), Err(RecvTimeoutError::Timeout));
            gate.set_closed(false);
            assert_eq!(reads.recv_timeout(Duration::from_secs(60)).unwrap(), expected[PARAMS - 1]);
            reader.join().unwrap();
            params.iter().map(value).collect::<Vec<_>>()
        });
        assert_eq!(found, expected, "stage {stage}");
    }
}

#[test]
fn a_step_from_a_disk_is_measured_with_the_bytes_it_moves() {
    let folder = tempfile::tempdir().unwrap();
    let device = ferrospeed_cpu::with_threads(1);
    let step = crate::bench::disk_step(folder.path(), 1, 1, QueueOptions::default(), &device).unwrap();
    // The f32 weight and two moments of each.
    assert_eq!(step.bytes_each_way, 12 * step.weights);
    assert!(step.weights > 0 && step.best_s.is_finite() && step.best_s > 0.0);
}

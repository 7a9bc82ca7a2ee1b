//! The bytes of a placement are the bytes that a store allocates, in every stage and mode that a host has.

use std::num::NonZeroU64;

use ferrospeed_comm::World;
use ferrospeed_config::{AutoValues, Config};
use ferrospeed_optim::{GroupOptions, Optimizer, adam::Adam};
use ferrospeed_placement::share::{Home, Purpose};
use ferrospeed_placement::{Memory, Tile};
use ferrospeed_tensor::store::FromInitializers;
use ferrospeed_tensor::{Category, DType, Initializer, Param};
use ferrospeed_zero::{Homes, ParamGroup, Sharding, StoreOptions, ZeroStore};
use serde_json::{Value, json};

/// What the tests vary.
#[derive(Debug, Clone)]
struct Case {
    zero: Value,
    dtype: DType,
    kept: DType,
    accumulates: bool,
    each_micro_batch: bool,
    /// Whether the last parameter is frozen.
    frozen: bool,
}

fn params(frozen: bool) -> Vec<Param> {
    let shapes: [&[usize]; 4] = [&[60, 100], &[101], &[40, 100], &[80, 30]];
    let param = |(index, shape): (usize, &&[usize])| {
        let param = Param::new(format!("p{index}"), *shape, Initializer::Constant(1.0));
        param.set_trainable(!frozen || index != 3);
        param
    };
    shapes.iter().enumerate().map(param).collect()
}

/// Bytes by what they are for: as placed in memory, and as the rank's device counts them.
fn bytes(case: &Case, world: &World) -> ([u64; 4], [u64; 4]) {
    let json = json!({"train_micro_batch_size_per_gpu": 1, "zero_optimization": case.zero});
    let ranks = NonZeroU64::new(world.size() as u64).unwrap();
    let config = Config::from_value("test", &json).unwrap().resolve(ranks, &AutoValues::new()).unwrap().0;
    let device = ferrospeed_cpu::with_threads(1);
    let params = params(case.frozen);
    let options = GroupOptions { lr: 0.01, weight_decay: 0.01, betas: [0.9, 0.999] };
    let groups = [ParamGroup { params: params.clone(), options }];
    let options = StoreOptions {
        zero: &config.zero,
        dtype: case.dtype,
        wire: case.dtype,
        kept: case.kept,
        accumulates: case.accumulates,
        predivide: 1.0,
        prescale: false,
        sparse_gradients: false,
        sharding: Sharding::over_world(world),
        elsewhere: &[],
        agreement: None,
        reduces_each_micro_batch: case.each_micro_batch,
        leaf_modules: &[],
        optimizer: Some(Optimizer::Adam(Adam { eps: 1e-8, bias_correction: true, decoupled: true })),
        homes: Homes::from_config(&config.zero, &config.aio, &device),
    };
    let source = FromInitializers { seed: 1 };
    let store = ZeroStore::attach(world, &device, &params, &groups, &options, &source).unwrap();
    let placed = |purposes: &[Purpose]| {
        let of_purpose = |tile: &Tile| purposes.contains(&tile.purpose) && tile.home != Home::Disk;
        store.placement().tiles().filter(of_purpose).map(|tile| allocated(&tile)).sum()
    };
    let usage = device.memory_usage();
    let measured = |category| usage.current(category) as u64;
    let found = [
        measured(Category::Parameters),
        measured(Category::Optimizer),
        measured(Category::Gradients),
        measured(Category::Buffers),
    ];
    let all = [
        placed(&[Purpose::Values]),
        placed(&[Purpose::Master, Purpose::State]),
        placed(&[Purpose::Gradients]),
        placed(&[Purpose::Buckets]),
    ];
    (all, found)
}

/// What an allocator gives for a tile: whole cache lines, and one for nothing; memory that others know is mapped as it is.
fn allocated(tile: &Tile) -> u64 {
    match tile.memory {
        Memory::Own => tile.bytes.next_multiple_of(64).max(64),
        Memory::Reached | Memory::Common => tile.bytes,
    }
}

fn check(case: &Case) {
    for ranks in [1, 2, 3] {
        let start = |world: World| {
            let case = case.clone();
            std::thread::spawn(move || bytes(&case, &world))
        };
        let threads: Vec<_> = World::threads(ranks).into_iter().map(start).collect();
        for (rank, thread) in threads.into_iter().enumerate() {
            let (placed, found) = thread.join().unwrap();
            let alone = ranks == 1 && !case.accumulates;
            for (index, what) in ["values", "states", "gradients", "buckets"].into_iter().enumerate() {
                // Gradients that stay where backward makes them are not there before it.
                let expected = if alone && what == "gradients" { 0 } else { placed[index] };
                assert_eq!(found[index], expected, "{what} of rank {rank} of {ranks}: {case:?}");
            }
        }
    }
}

#[test]
fn what_is_placed_is_what_is_allocated() {
    for stage in 0..4 {
        for (dtype, kept, accumulates) in [
            (DType::F32, DType::F32, false),
            (DType::BF16, DType::BF16, false),
            (DType::F32, DType::F32, true),
            (DType::BF16, DType::F32, true),
        ] {
            for (overlap, each_micro_batch) in [(false, false), (true, false), (false, true)] {
                let zero = json!({"stage": stage, "overlap_comm": overlap, "reduce_bucket_size": 7000});
                let frozen = overlap;
                check(&Case { zero, dtype, kept, accumulates, each_micro_batch, frozen });
            }
        }
    }
}

#[test]
fn what_is_placed_on_a_disk_is_not_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    let disk = |more: Value| {
        let mut section = json!({"device": "nvme", "nvme_path": folder.path()});
        more.as_object().unwrap().iter().for_each(|(key, value)| section[key] = value.clone());
        section
    };
    for zero in [
        json!({"stage": 3, "offload_optimizer": disk(json!({}))}),
        json!({"stage": 3, "offload_optimizer": disk(json!({"ratio": 0.5}))}),
        json!({"stage": 3, "offload_optimizer": disk(json!({})), "offload_param": disk(json!({"max_in_cpu": 5000}))}),
    ] {
        let (dtype, kept) = (DType::BF16, DType::BF16);
        check(&Case { zero, dtype, kept, accumulates: false, each_micro_batch: false, frozen: true });
    }
}

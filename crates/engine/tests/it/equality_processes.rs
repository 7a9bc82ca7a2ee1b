//! The stages as jobs of real processes, on every family of kernels: where state lives changes no bit, whether ranks are
//! processes or threads, and whichever instructions multiply.
//!
//! Each job trains once per stage and compares the stages itself. The jobs are chosen so that every pair of a family, a mesh, a
//! precision and a number of micro-batches occurs in one of them. The products are large enough that each family takes its own
//! way through them; that it does is seen by its bits.

use std::collections::BTreeSet;
use std::time::Duration;

use super::common::{Batch, Model, config, on_ranks};
use ferrospeed_comm::{ConnectOptions, World};
use ferrospeed_engine::{Options, Setup, StepReport, initialize_model};
use ferrospeed_tensor::loops::simd::{Level, level, wants_tiles};
use ferrospeed_tensor::{Device, Tensor};
use ferrospeed_testkit::ranks::{Ending, Job, finish, role};
use ferrospeed_testkit::skip::skip;
use ferrospeed_zero::Sharding;
use ferrospeed_zero::access::Which;
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(240);
const FAMILIES: [&str; 5] = ["amx", "avx512_bf16", "avx512", "avx2", "portable"];
/// Ranks, and how many of them share one copy of the state.
const MESHES: [[usize; 2]; 3] = [[2, 2], [4, 4], [4, 2]];
const PRECISIONS: [&str; 3] = ["fp32", "bf16", "fp16"];
const ACCUMULATIONS: [usize; 2] = [1, 2];
/// Rows of every product, its other sizes being at least as large: f32 goes through tiles from 128 on.
const TOKENS: usize = 128;
const VOCABULARY: usize = 144;

/// One job: an index into each of the lists above.
type Combination = [usize; 4];

/// Every pair of two lists' entries, in as many jobs as the two longest lists need.
fn combinations() -> Vec<Combination> {
    (0..FAMILIES.len() * MESHES.len())
        .map(|at| {
            let (family, mesh) = (at / MESHES.len(), at % MESHES.len());
            [family, mesh, (family + mesh) % PRECISIONS.len(), (family / 2 + mesh) % ACCUMULATIONS.len()]
        })
        .collect()
}

#[test]
fn the_jobs_have_every_pair_of_values() {
    let sizes = [FAMILIES.len(), MESHES.len(), PRECISIONS.len(), ACCUMULATIONS.len()];
    for first in 0..4 {
        for second in first + 1..4 {
            let pairs: BTreeSet<_> = combinations().iter().map(|one| [one[first], one[second]]).collect();
            assert_eq!(pairs.len(), sizes[first] * sizes[second], "lists {first} and {second}");
        }
    }
}

fn configuration(stage: u8, precision: &str, micro_steps: usize) -> Value {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": stage, "overlap_comm": true, "reduce_bucket_size": 40_000,
            "stage3_param_persistence_threshold": 200, "stage3_prefetch_bucket_size": 50_000,
            "reduce_each_micro_batch": true,
        },
    });
    match precision {
        "fp32" => {}
        "fp16" => config["fp16"] = json!({"enabled": true, "loss_scale": 128.0}),
        _ => config[precision] = json!({"enabled": true}),
    }
    config
}

/// What a run gives, as bits: losses and norms, and the weights after it.
#[derive(Debug, PartialEq, Eq, Clone)]
struct Outcome {
    seen: Vec<u64>,
    weights: Vec<u32>,
}

impl Outcome {
    /// A number that changes with every bit.
    fn fingerprint(&self) -> u64 {
        let words = self.seen.iter().copied().chain(self.weights.iter().map(|&bits| u64::from(bits)));
        words.fold(0xcbf2_9ce4_8422_2325, |hash, word| (hash ^ word).wrapping_mul(0x0100_0000_01b3))
    }
}

fn train(
    world: World,
    device: Device,
    shard: usize,
    stage: u8,
    precision: &str,
    micro_steps: usize,
) -> Outcome {
    let description =
        json!({"kind": "lm", "vocab": VOCABULARY, "dm": 128, "nh": 2, "nl": 1, "tmax": TOKENS + 1});
    let (model, parameters) = Model::build(&description);
    let (rank, sharding) = (world.rank(), Sharding::in_shards_of(&world, shard).unwrap());
    let value = configuration(stage, precision, micro_steps);
    let setup = Setup::new(config(&value, world.size()), world, device);
    let options = Options { sharding: Some(sharding), ..Default::default() };
    let mut engine = initialize_model(&setup, &parameters, options).unwrap();
    let mut seen = Vec::new();
    for step in 0..2 {
        for micro in 0..micro_steps {
            let id = |i: usize| ((i * 7 + step * 5 + micro * 3 + rank * 11 + i * i) % VOCABULARY) as i64;
            let ids: Vec<i64> = (0..=TOKENS).map(id).collect();
            let ids = Tensor::from_slice(&ids, [1, TOKENS + 1], engine.device()).unwrap();
            let loss = engine.forward(|_| model.loss(&Batch::Tokens(ids))).unwrap();
            seen.push(u64::from(loss.item().unwrap().to_bits()));
            engine.backward(&loss).unwrap();
            if let StepReport::Applied { grad_norm } = engine.step().unwrap() {
                seen.push(grad_norm.to_bits());
            }
        }
    }
    assert_eq!(seen.len(), 2 * micro_steps + 2, "every step was applied");
    let full = |param| engine.store().full(param, Which::Weight).unwrap();
    let weights = parameters.as_slice().iter().flat_map(full).map(f32::to_bits).collect();
    Outcome { seen, weights }
}

/// What a rank does when this binary is started as one: the stages that its role names after the combination, which must agree.
#[test]
fn rank_process() {
    let Some(role) = role() else { return };
    if let Some(stage) = role.strip_prefix("gpu-") {
        let world = World::connect(ConnectOptions::from_env().unwrap()).unwrap();
        let device = ferrospeed_cuda::device(
            world.rank() % ferrospeed_cuda::device_count(),
            &ferrospeed_cpu::device(),
        )
        .unwrap();
        let outcome = train(world.clone(), device, 2, stage.parse().unwrap(), "bf16", 2);
        let by = world.group().on_devices().unwrap().map_or("host", |group| group.backend());
        return println!("outcome {:x} by {by}", outcome.fingerprint());
    }
    let numbers: Vec<usize> = role.split('-').map(|number| number.parse().unwrap()).collect();
    let &[family, mesh, precision, accumulation, ref stages @ ..] = &numbers[..] else { panic!("{role}") };
    let most = match FAMILIES[family] {
        "portable" => Level::Portable,
        "avx2" => Level::Avx2,
        _ => Level::Avx512,
    };
    assert!(level() <= most && wants_tiles() == (FAMILIES[family] == "amx"), "{:?}", level());
    let world = World::connect(ConnectOptions::from_env().unwrap()).unwrap();
    let (shard, micro_steps) = (MESHES[mesh][1], ACCUMULATIONS[accumulation]);
    let device = || ferrospeed_cpu::with_threads(1);
    let run =
        |stage: usize| train(world.clone(), device(), shard, stage as u8, PRECISIONS[precision], micro_steps);
    let first = run(stages[0]);
    for &stage in &stages[1..] {
        assert!(run(stage) == first, "stage {stage} differs from stage {}", stages[0]);
    }
    println!("outcome {:x}", first.fingerprint());
}

fn name(&[family, mesh, precision, accumulation]: &Combination) -> String {
    let ([ranks, shard], micro_steps) = (MESHES[mesh], ACCUMULATIONS[accumulation]);
    let (family, precision) = (FAMILIES[family], PRECISIONS[precision]);
    format!("{family}, {ranks} ranks in shards of {shard}, {precision}, {micro_steps} micro-batches")
}

/// Runs a job, and gives the bits of what each rank has seen.
fn job(combination: &Combination, stages: &[usize]) -> Vec<String> {
    let numbers: Vec<String> = combination.iter().chain(stages).map(usize::to_string).collect();
    let job = Job::new(module_path!(), MESHES[combination[1]][0], &numbers.join("-"))
        .with("FERROSPEED_CPU_KERNELS", FAMILIES[combination[0]]);
    outcomes(job, &name(combination))
}

fn outcomes(job: Job, name: &str) -> Vec<String> {
    let told = |(rank, ending): (usize, Ending)| {
        assert!(ending.success, "{name}: rank {rank} failed:\n{}", ending.output);
        let line = ending.output.lines().find_map(|line| line.split("outcome ").nth(1));
        line.unwrap_or_else(|| panic!("rank {rank} told nothing:\n{}", ending.output)).to_owned()
    };
    finish(job.start(), LIMIT).into_iter().enumerate().map(told).collect()
}

/// Two values have one sum, in whatever order: so NCCL's bits are ours.
#[test]
fn gpus_that_nccl_connects_give_the_bits_of_those_that_exchange_through_the_host() {
    let may_share = std::env::var_os("NCCL_MULTI_RANK_GPU_ENABLE").is_some_and(|value| value == "1");
    if ferrospeed_cuda::device_count() == 0 {
        return skip("no CUDA device");
    }
    if ferrospeed_cuda::device_count() == 1 && !may_share {
        return skip("one GPU, and NCCL is not told to let ranks share it (NCCL_MULTI_RANK_GPU_ENABLE=1)");
    }
    for stage in 0..=3 {
        let on = |backend: &str| {
            let job =
                Job::new(module_path!(), 2, &format!("gpu-{stage}")).with("FERROSPEED_COMM_BACKEND", backend);
            outcomes(job, &format!("stage {stage} by {backend}"))
        };
        let host = on("local");
        let by_host: Vec<String> =
            host.iter().map(|outcome| outcome.replace(" by host", " by nccl")).collect();
        assert_ne!(host, by_host, "the host was asked for by name");
        assert_eq!(on("nccl"), by_host, "stage {stage}");
        assert_eq!(on("auto"), by_host, "stage {stage}: NCCL is the choice of itself");
    }
}

#[test]
fn stages_agree_as_processes_on_every_mesh_precision_and_family_of_kernels() {
    for combination in combinations() {
        job(&combination, &[0, 1, 2, 3]);
    }
}

#[test]
fn processes_give_the_bits_of_threads() {
    let named = std::env::var("FERROSPEED_CPU_KERNELS").unwrap_or_default();
    let family = FAMILIES.iter().position(|family| *family == named).unwrap_or(0);
    let combination = [family, 2, 1, 1];
    let threads = on_ranks(4, |world| {
        train(world, ferrospeed_cpu::with_threads(1), 2, 2, PRECISIONS[1], ACCUMULATIONS[1])
    });
    let threads: Vec<String> = threads.iter().map(|outcome| format!("{:x}", outcome.fingerprint())).collect();
    assert_eq!(job(&combination, &[2]), threads);
}

#[test]
fn each_family_multiplies_in_its_own_way_here() {
    let flags = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    if !["amx_bf16", "avx512vl"].iter().all(|flag| flags.contains(flag)) {
        return skip("the processor has no tiles, so families fall together");
    }
    // Pairs are of bf16 alone.
    for (precision, different) in [(0, 3), (1, 3 + usize::from(flags.contains("avx512_bf16")))] {
        // The library that multiplies without AVX-512 chooses its own instructions, so the last two families share it.
        let bits: BTreeSet<Vec<String>> =
            (0..4).map(|family| job(&[family, 0, precision, 0], &[0])).collect();
        assert_eq!(bits.len(), different, "{}", PRECISIONS[precision]);
    }
}

//! Optimizers that exchange momentum at one bit per value give the same bits through shared memory, through sockets and
//! through MPI (cargo feature `mpi`).
//!
//! `FERROSPEED_MPIRUN` names the program that starts ranks; it must belong to the library that this was built with.

use ferrospeed_comm::{Limits, World};
use ferrospeed_config::{AutoValues, Config};
use ferrospeed_optim::Optimizer;
use ferrospeed_tensor::store::FromInitializers;
use ferrospeed_tensor::{DType, Initializer, Param, Tensor, autograd, ops};
use ferrospeed_zero::access::Which;
use ferrospeed_zero::{Homes, ParamGroup, Sharding, StepOptions, StepOutcome, StoreOptions, ZeroStore};
use serde_json::{Value, json};

const RANKS: usize = 3;
/// The last step with averaged gradients.
const FREEZE: usize = 4;
const STEPS: usize = 12;
const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

fn optimizers() -> [Value; 3] {
    [
        json!({"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": FREEZE}}),
        json!({"type": "ZeroOneAdam", "params": {
            "lr": 0.01, "var_freeze_step": FREEZE, "var_update_scaler": 2, "local_step_scaler": 3, "local_step_clipper": 2,
        }}),
        json!({"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": FREEZE}}),
    ]
}

/// The bits of all weights after some steps, by optimizer and type.
fn trained(world: &World) -> Vec<u32> {
    let cases = optimizers();
    let cases = cases.iter().flat_map(|optimizer| DTYPES.map(|dtype| (optimizer, dtype)));
    cases.flat_map(|(optimizer, dtype)| trained_by(world, optimizer, dtype)).collect()
}

fn trained_by(world: &World, optimizer: &Value, dtype: DType) -> Vec<u32> {
    let json = json!({"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer});
    let ranks = (world.size() as u64).try_into().unwrap();
    let config = Config::from_value("test", &json).unwrap().resolve(ranks, &AutoValues::new()).unwrap().0;
    let (rule, group) = Optimizer::from_config(config.optimizer.as_ref().unwrap()).unwrap();
    let shapes: [&[usize]; 3] = [&[13, 7], &[7], &[5, 11]];
    let normal = Initializer::Normal { mean: 0.0, std: 0.5 };
    let params: Vec<Param> =
        shapes.iter().enumerate().map(|(at, shape)| Param::new(format!("w{at}"), *shape, normal)).collect();
    let groups = [ParamGroup { params: params.clone(), options: group }];
    let options = StoreOptions {
        zero: &config.zero,
        dtype,
        wire: dtype,
        kept: dtype,
        accumulates: false,
        predivide: 1.0,
        prescale: false,
        sparse_gradients: false,
        sharding: Sharding::over_world(world),
        elsewhere: &[],
        agreement: None,
        reduces_each_micro_batch: false,
        leaf_modules: &[],
        optimizer: Some(rule),
        homes: Homes::default(),
    };
    let device = ferrospeed_cpu::with_threads(1);
    let store =
        ZeroStore::attach(world, &device, &params, &groups, &options, &FromInitializers { seed: 7 }).unwrap();
    for step in 0..STEPS {
        store.begin_backward(true).unwrap();
        for (at, param) in params.iter().enumerate() {
            let seed = step * 31 + world.rank() * 17 + at * 5;
            let target: Vec<f32> = (0..param.numel()).map(|i| ((i * 7 + seed) as f32 * 0.37).sin()).collect();
            let target = Tensor::from_slice(&target, *param.shape(), &device).unwrap();
            let apart = ops::sub(param, ops::cast(&target, dtype).unwrap()).unwrap();
            autograd::backward(&ops::mean(ops::square(&apart).unwrap()).unwrap()).unwrap();
        }
        store.finish_backward().unwrap();
        let outcome = store.step(StepOptions { loss_scale: 1.0, clip: None }).unwrap();
        assert!(matches!(outcome, StepOutcome::Applied { .. }), "{outcome:?}");
    }
    let weights = params.iter().flat_map(|param| store.full(param, Which::Weight).unwrap());
    weights.map(f32::to_bits).collect()
}

/// What ranks that are threads of this process come to.
fn by_threads(hosts: &[usize]) -> Vec<Vec<u32>> {
    let worlds = World::threads_on(hosts, &Limits::default()).unwrap();
    let ranks: Vec<_> = worlds.into_iter().map(|world| std::thread::spawn(move || trained(&world))).collect();
    ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
}

#[test]
fn sockets_give_the_bits_of_shared_memory() {
    let shared = by_threads(&[RANKS]);
    assert!(by_threads(&[1; RANKS]) == shared, "three hosts");
    assert!(by_threads(&[2, 1]) == shared, "two hosts");
}

#[cfg(feature = "mpi")]
mod mpi {
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    use ferrospeed_comm::{Backend, ConnectOptions};
    use ferrospeed_testkit::child;

    use super::*;

    const ROLE: &str = "FERROSPEED_TEST_ROLE";
    const FOLDER: &str = "FERROSPEED_TEST_FOLDER";
    const LIMIT: Duration = Duration::from_secs(120);

    /// What a rank does when `mpirun` starts this binary.
    #[test]
    fn rank_process() {
        let Some(folder) = std::env::var_os(FOLDER).filter(|_| std::env::var_os(ROLE).is_some()) else {
            return;
        };
        let options = ConnectOptions { backend: Backend::Mpi, ..ConnectOptions::from_env().unwrap() };
        let world = World::connect(options).unwrap();
        assert_eq!(world.group().backend(), "mpi");
        let bytes: Vec<u8> = trained(&world).iter().flat_map(|bits| bits.to_le_bytes()).collect();
        std::fs::write(std::path::Path::new(&folder).join(world.rank().to_string()), bytes).unwrap();
    }

    #[test]
    fn mpi_gives_the_bits_of_shared_memory() {
        let folder = tempfile::tempdir().unwrap();
        let mpirun = std::env::var("FERROSPEED_MPIRUN").unwrap_or_else(|_| "mpirun".into());
        let said = Command::new(&mpirun).arg("--version").output().expect("mpirun, or FERROSPEED_MPIRUN");
        let mut command = Command::new(&mpirun);
        if !String::from_utf8_lossy(&said.stdout).contains("HYDRA") {
            command.args(["--allow-run-as-root", "--oversubscribe"]);
        }
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut child = command
            .args(["-n", &RANKS.to_string()])
            .arg(std::env::current_exe().unwrap())
            .args(child::arguments(module_path!(), "rank_process"))
            .env(ROLE, "train")
            .env(FOLDER, folder.path())
            .env("MASTER_PORT", port.to_string())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let limit = Instant::now() + LIMIT;
        let status = loop {
            match child.try_wait().unwrap() {
                Some(status) => break status,
                None if Instant::now() > limit => {
                    let _ = child.kill();
                    panic!("the job was still running at its limit: {:?}", child.wait());
                }
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        assert!(status.success(), "{status}");
        for (rank, expected) in by_threads(&[RANKS]).iter().enumerate() {
            let found = std::fs::read(folder.path().join(rank.to_string())).unwrap();
            let expected: Vec<u8> = expected.iter().flat_map(|bits| bits.to_le_bytes()).collect();
            assert!(found == expected, "rank {rank}");
        }
    }
}

//! Two hosts, made of network namespaces, with two ranks each and a link of 1 Gbit/s: what crosses it, as the interface
//! counts. `scripts/two-hosts` runs it with a larger model and prints step times too.

use std::time::{Duration, Instant};

use super::common::{Batch, Model, engine};
use ferrospeed_comm::{ConnectOptions, World};
use ferrospeed_tensor::Tensor;
use ferrospeed_testkit::hosts::Hosts;
use ferrospeed_testkit::ranks::{Job, finish, role};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(240);
const WARM_UP: usize = 4;
const MEASURED: usize = 3;
/// The measuring rank is the first of the second host.
const MEASURING: usize = 2;
const WIDTH: &str = "FERROSPEED_TWO_HOSTS_WIDTH";
const RATE: &str = "FERROSPEED_TWO_HOSTS_RATE";

fn variable(name: &str, default: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| default.to_owned())
}

fn ds_config(role: &str) -> Value {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": true},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
    });
    // Backward gathers again what forward has let go, as it must where a model does not fit.
    let zero = json!({"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0});
    match role {
        "adam" => {}
        "one-bit" => {
            config["optimizer"] = json!({"type": "OneBitAdam", "params": {"lr": 0.0001, "freeze_step": 2}});
        }
        "zero-3" => config["zero_optimization"] = zero,
        _ => {
            config["zero_optimization"] = zero;
            config["zero_optimization"]["zero_quantized_weights"] = true.into();
            config["zero_optimization"]["zero_hpz_partition_size"] = 2.into();
            config["zero_optimization"]["zero_quantized_gradients"] = true.into();
        }
    }
    config
}

/// Bytes that this host's line has received and sent.
fn counted() -> [u64; 2] {
    let table = std::fs::read_to_string("/proc/net/dev").unwrap();
    let line = table.lines().find_map(|line| line.trim().strip_prefix("wire:"));
    let Some(line) = line else { return [0; 2] };
    let numbers: Vec<u64> = line.split_whitespace().map(|word| word.parse().unwrap()).collect();
    [numbers[0], numbers[8]]
}

/// What a rank does when this binary is started as one.
#[test]
fn rank_process() {
    let Some(role) = role() else { return };
    let world = World::connect(ConnectOptions::from_env().unwrap()).unwrap();
    assert_eq!(world.hosts(), [vec![0, 1], vec![2, 3]]);
    let width: u64 = variable(WIDTH, "128").parse().unwrap();
    let description = json!({"kind": "lm", "vocab": 64, "dm": width, "nh": 4, "nl": 4, "tmax": 8});
    let (model, parameters) = Model::build(&description);
    let numel: usize = parameters.as_slice().iter().map(|param| param.numel()).sum();
    let mut engine = engine(world, &ds_config(&role), &parameters, None, None, 1);
    let (device, rank) = (engine.device().clone(), engine.world().rank());
    let mut begun = (Instant::now(), [0; 2]);
    for number in 0..WARM_UP + MEASURED {
        if number == WARM_UP {
            engine.world().group().barrier().unwrap();
            begun = (Instant::now(), counted());
        }
        let ids: Vec<i64> = (0..8).map(|i| ((i * 7 + number * 5 + rank * 3 + i * i) % 64) as i64).collect();
        let batch = Batch::Tokens(Tensor::from_slice(&ids, [1, 8], &device).unwrap());
        let loss = engine.forward(|_| model.loss(&batch)).unwrap();
        engine.backward(&loss).unwrap();
        engine.step().unwrap();
    }
    engine.world().group().barrier().unwrap();
    let (took, after) = (begun.0.elapsed(), counted());
    if rank == MEASURING {
        let per_step = |index: usize| (after[index] - begun.1[index]) as f64 / MEASURED as f64;
        let model_bytes = (2 * numel) as f64;
        let found = json!({
            "role": role,
            "model_bytes": model_bytes,
            "received": per_step(0) / model_bytes,
            "sent": per_step(1) / model_bytes,
            "step_ms": took.as_secs_f64() * 1e3 / MEASURED as f64,
        });
        println!("FOUND {found}");
    }
}

fn measure(hosts: &Hosts, role: &str) -> Value {
    let mut job = Job::new(module_path!(), 4, role).with("MASTER_ADDR", "10.231.31.1");
    job.prefix = [0, 0, 1, 1].iter().map(|host| hosts.enter(*host)).collect();
    let endings = finish(job.start(), LIMIT);
    for (rank, ending) in endings.iter().enumerate() {
        assert!(ending.success, "rank {rank} of {role} failed:\n{}", ending.output);
    }
    let line = endings[MEASURING].output.lines().find_map(|line| line.split_once("FOUND "));
    let found: Value = serde_json::from_str(line.expect("the measuring rank tells").1).unwrap();
    println!("{found}");
    found
}

#[test]
fn all_of_zero_plus_plus_and_one_bit_cross_hosts_with_a_fraction_of_the_bytes() {
    let Some(hosts) = Hosts::make(2, 31) else { return };
    let rate = variable(RATE, "1gbit");
    for (host, line) in [(0, "wire1"), (1, "wire")] {
        let words = format!("tc qdisc add dev {line} root tbf rate {rate} burst 512kb latency 50ms");
        let command: Vec<String> =
            hosts.enter(host).into_iter().chain(words.split(' ').map(str::to_owned)).collect();
        let output = std::process::Command::new(&command[0]).args(&command[1..]).output();
        if !output.as_ref().is_ok_and(|output| output.status.success()) {
            ferrospeed_testkit::skip::skip("no traffic control here");
            eprintln!("{command:?}: {output:?}");
            return;
        }
    }
    let number = |found: &Value, key: &str| found[key].as_f64().unwrap();
    let both = |found: &Value| number(found, "sent") + number(found, "received");
    let (plain, all) = (measure(&hosts, "zero-3"), measure(&hosts, "all"));
    // Both directions of the link, in sizes of the 16-bit model M: gathers 2 M, reductions 2 M; then 0.5 M and 0.25 M.
    assert!((3.8..4.6).contains(&both(&plain)), "{plain}");
    assert!(number(&all, "sent") < 0.75 && both(&all) < 0.21 * both(&plain), "{all} of {plain}");
    let (adam, one_bit) = (measure(&hosts, "adam"), measure(&hosts, "one-bit"));
    assert!(both(&one_bit) < both(&adam) / 5.0, "{one_bit} of {adam}");
}

//! Jobs of real processes that go well, on every backend.

mod support;

use std::time::Duration;

use ferrospeed_comm::{ConnectOptions, World};
use support::processes::{Job, role};
use support::script;

const LIMIT: Duration = Duration::from_secs(60);

/// What a rank does when this binary is started as one.
#[test]
fn rank_process() {
    let Some(role) = role() else { return };
    let world = World::connect(ConnectOptions::from_env().unwrap()).unwrap();
    let number = |name: &str| std::env::var(name).unwrap().parse::<u64>().unwrap();
    match role.as_str() {
        "script" => {
            let backend = std::env::var("EXPECT_BACKEND").unwrap();
            assert_eq!(world.group().backend(), backend);
            script::run(&world, number("SEED"), number("OPERATIONS") as usize);
        }
        other => panic!("unknown role {other}"),
    }
}

fn script_job(size: usize, backend: &str, expected: &str, seed: u64, operations: usize) -> Job {
    Job::new(size, "script")
        .with("FERROSPEED_COMM_BACKEND", backend)
        .with("EXPECT_BACKEND", expected)
        .with("SEED", seed)
        .with("OPERATIONS", operations)
}

#[test]
fn local_processes_give_the_reference_bits() {
    for (size, seed) in [(1, 11), (2, 12), (4, 13), (8, 14)] {
        script_job(size, "auto", "local", seed, 40).run(LIMIT);
    }
}

#[test]
fn tcp_processes_give_the_reference_bits() {
    for (size, seed) in [(2, 21), (3, 22), (8, 23)] {
        script_job(size, "tcp", "tcp", seed, 40).run(LIMIT);
    }
}

#[test]
fn a_ring_of_more_than_eight_ranks_gives_the_reference_bits() {
    script_job(9, "tcp", "tcp", 31, 15).run(LIMIT);
}

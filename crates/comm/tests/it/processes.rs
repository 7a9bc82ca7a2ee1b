//! Jobs of real processes that go well, on every backend.

use std::time::Duration;

use super::support::script;
use ferrospeed_comm::{Backend, ConnectOptions, World};
use ferrospeed_testkit::hosts::Hosts;
use ferrospeed_testkit::ranks::{Job, role};

const LIMIT: Duration = Duration::from_secs(60);

/// What a rank does when this binary is started as one.
#[test]
fn rank_process() {
    let Some(role) = role() else { return };
    let mut options = ConnectOptions::from_env().unwrap();
    if let Ok(bytes) = std::env::var("STAGING_BYTES") {
        options.limits.staging_bytes = bytes.parse().unwrap();
    }
    let world = World::connect(options).unwrap();
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
    Job::new(module_path!(), size, "script")
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

#[test]
fn several_hosts_give_the_reference_bits() {
    let Some(hosts) = Hosts::make(3, 7) else { return };
    // Ranks in order, on two hosts and on three, with half types handed from host to host too where there are five per
    // host; one rank per host; hosts that alternate.
    for (layout, expected, seed) in [
        (&[0, 0, 0, 1, 1, 1][..], "hierarchical", 41),
        (&[0, 0, 0, 0, 0, 1, 1, 1, 1, 1], "hierarchical", 44),
        (&[0, 0, 1, 1, 2, 2], "hierarchical", 45),
        (&[0, 1], "tcp", 42),
        (&[0, 1, 0, 1], "tcp", 43),
    ] {
        let mut job = script_job(layout.len(), "auto", expected, seed, 40)
            .with("MASTER_ADDR", "10.231.7.1")
            // Small enough that operations take several windows.
            .with("STAGING_BYTES", 256 << 10);
        job.prefix = layout.iter().map(|host| hosts.enter(*host)).collect();
        job.run(LIMIT);
    }
}

#[test]
fn one_process_may_join_one_job_after_another() {
    // By sockets, because a lone local rank meets nobody.
    let options = ConnectOptions {
        token: format!("again-{}", std::process::id()),
        backend: Backend::Tcp,
        ..ConnectOptions::new(0, 1, "127.0.0.1", 29999)
    };
    for _ in 0..3 {
        let deadline = std::time::Instant::now() + LIMIT;
        // The port is given back a moment after the job has ended.
        let world = loop {
            match World::connect(options.clone()) {
                Ok(world) => break world,
                Err(error) => assert!(std::time::Instant::now() < deadline, "{error}"),
            }
        };
        world.group().barrier().unwrap();
    }
}

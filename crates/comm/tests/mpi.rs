//! The `mpi` backend under the real `mpirun` (cargo feature `mpi`).

#![cfg(feature = "mpi")]

mod support;

use std::process::Command;

use ferrospeed_comm::{Backend, ConnectOptions, World};
use support::processes::{free_port, role};
use support::script;

/// What a rank does when `mpirun` starts this binary.
#[test]
fn rank_process() {
    if role().is_none() {
        return;
    }
    let options = ConnectOptions { backend: Backend::Mpi, ..ConnectOptions::from_env().unwrap() };
    let world = World::connect(options).unwrap();
    assert_eq!(world.group().backend(), std::env::var("EXPECT_BACKEND").unwrap());
    script::run(&world, 51, 60);
    println!("RANK-IS-DONE");
}

#[test]
fn ranks_under_mpirun_give_the_reference_bits() {
    for size in [2, 3, 4] {
        let output = Command::new("mpirun")
            .args(["--allow-run-as-root", "--oversubscribe", "-n", &size.to_string()])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "rank_process", "--nocapture", "--test-threads=1"])
            .env("FERROSPEED_TEST_ROLE", "script")
            .env("EXPECT_BACKEND", "mpi")
            .env("MASTER_PORT", free_port().to_string())
            .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
            .output()
            .expect("mpirun, from the package openmpi-bin or mpich");
        let text =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}");
        assert_eq!(text.matches("RANK-IS-DONE").count(), size, "{text}");
    }
}

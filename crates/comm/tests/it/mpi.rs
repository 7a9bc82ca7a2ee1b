//! The `mpi` backend under the real `mpirun` (cargo feature `mpi`), OpenMPI's or MPICH's.
//!
//! `FERROSPEED_MPIRUN` names the program that starts ranks; it must belong to the library that this was built with.
//! `scripts/test-mpi` runs everything here with both.

#![cfg(feature = "mpi")]

use ferrospeed_testkit::child;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::support::script;
use ferrospeed_comm::{Backend, ConnectOptions, DType, Error, ReduceOp, Region, World};
use ferrospeed_testkit::ranks::{free_port, role};

/// A lost rank must be noticed within 5 seconds; the rest is start-up on a busy machine.
const LIMIT: Duration = Duration::from_secs(40);
const VICTIM: usize = 1;

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"))
}

/// What a rank does when `mpirun` starts this binary.
#[test]
fn rank_process() {
    let Some(role) = role() else { return };
    println!("PID {}", std::process::id());
    let options = ConnectOptions { backend: Backend::Mpi, ..ConnectOptions::from_env().unwrap() };
    let rank = options.rank;
    let world = World::connect(options).unwrap();
    assert_eq!(world.group().backend(), "mpi");
    let outcome = match role.as_str() {
        "script" => {
            script::run(&world, 51, 60);
            Ok(())
        }
        "struck" => struck(&world),
        "disagree" => disagree(&world),
        other => panic!("unknown role {other}"),
    };
    match outcome {
        Ok(()) => println!("RANK-IS-DONE"),
        Err(error) => {
            println!("OUTCOME of rank {rank}: {error}");
            // The launcher then ends those that are left, a stopped one too.
            std::process::exit(3);
        }
    }
}

/// Reduces until it fails; the victim is struck in the middle of it.
fn struck(world: &World) -> Result<(), Error> {
    if world.rank() == VICTIM {
        let signal: i32 = variable("SIGNAL").parse().unwrap();
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(150));
            // SAFETY: signals this very process.
            unsafe { libc::kill(libc::getpid(), signal) };
        });
    }
    let data = Region::zeroed(1 << 20);
    let started = Instant::now();
    loop {
        assert!(started.elapsed() < LIMIT, "the victim was never struck");
        world.group().all_reduce_async(&data, DType::F32, ReduceOp::Sum).wait()?;
    }
}

fn disagree(world: &World) -> Result<(), Error> {
    let group = world.group();
    group.barrier()?;
    if world.rank() == VICTIM {
        return group.broadcast(&mut vec![1.0f32; 1000], 0);
    }
    group.all_reduce(&mut vec![1.0f32; 1000], ReduceOp::Sum)
}

fn mpirun() -> String {
    std::env::var("FERROSPEED_MPIRUN").unwrap_or_else(|_| "mpirun".into())
}

/// Whether the launcher is OpenMPI's; MPICH's calls itself Hydra.
fn is_open_mpi() -> bool {
    let version = Command::new(mpirun()).arg("--version").output();
    let version =
        version.expect("mpirun, from the package openmpi-bin or mpich; FERROSPEED_MPIRUN names another");
    !String::from_utf8_lossy(&version.stdout).contains("HYDRA")
}

/// Starts ranks of this binary. `survive`: the launcher leaves the others alone when one is lost.
///
/// MPICH's launcher ends the ranks of the host that lost one in any case, and its shared memory waits for the dead, so
/// there the ranks are on hosts of their own, as far as the launcher can see, and talk by sockets.
fn start(size: usize, role: &str, survive: bool, variables: &[(&str, String)]) -> Child {
    let mut command = Command::new(mpirun());
    if is_open_mpi() {
        command.args(["--allow-run-as-root", "--oversubscribe"]);
    }
    if survive && is_open_mpi() {
        command.arg("--enable-recovery");
    } else if survive {
        let hosts: Vec<String> = (1..=size).map(|host| format!("127.0.0.{host}:1")).collect();
        command.args(["-disable-auto-cleanup", "-launcher", "fork", "-hosts", &hosts.join(",")]);
        command.env("UCX_TLS", "tcp,self");
    }
    command
        .args(["-n", &size.to_string()])
        .arg(std::env::current_exe().unwrap())
        .args(child::arguments(module_path!(), "rank_process"))
        .env("FERROSPEED_TEST_ROLE", role)
        .env("MASTER_PORT", free_port().to_string())
        .envs(variables.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{}: {error}", mpirun()))
}

/// Waits for the launcher's end; returns whether it was a success, and what was said. Nothing may be left running.
fn finish(mut child: Child) -> (bool, String) {
    let pipes = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let read = |mut pipe: Box<dyn Read + Send>| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = pipe.read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).into_owned()
        })
    };
    let readers = [read(Box::new(pipes.0)), read(Box::new(pipes.1))];
    let limit = Instant::now() + LIMIT;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break Some(status);
        }
        if Instant::now() > limit {
            let _ = child.kill();
            let _ = child.wait();
            break None;
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let text: String = readers.into_iter().map(|reader| reader.join().unwrap()).collect();
    let status = status.unwrap_or_else(|| panic!("the job was still running at its limit:\n{text}"));
    for pid in text.lines().filter_map(|line| line.strip_prefix("PID ")) {
        let path = format!("/proc/{}", pid.trim());
        let limit = Instant::now() + Duration::from_secs(10);
        while std::path::Path::new(&path).exists() {
            assert!(Instant::now() < limit, "process {pid} was left running:\n{text}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    (status.success(), text)
}

#[test]
fn ranks_under_mpirun_give_the_reference_bits() {
    for size in [2, 3, 4] {
        let (success, text) = finish(start(size, "script", false, &[]));
        assert!(success, "{text}");
        assert_eq!(text.matches("RANK-IS-DONE").count(), size, "{text}");
    }
}

#[test]
fn a_killed_rank_ends_the_job_and_survivors_name_it() {
    let signal = [("SIGNAL", libc::SIGKILL.to_string())];
    let (success, text) = finish(start(3, "struck", false, &signal));
    assert!(!success, "{text}");
    // Where the launcher leaves the others alone, they notice themselves.
    let (_, text) = finish(start(3, "struck", true, &signal));
    for rank in [0, 2] {
        assert!(text.contains(&format!("OUTCOME of rank {rank}: ")), "rank {rank} said nothing:\n{text}");
    }
    assert!(text.contains("rank 1 died"), "{text}");
}

#[test]
fn a_stopped_rank_ends_the_job_and_is_named() {
    let (success, text) = finish(start(3, "struck", false, &[("SIGNAL", libc::SIGSTOP.to_string())]));
    assert!(!success, "{text}");
    assert!(text.contains("OUTCOME of rank ") && text.contains("rank 1 stopped responding"), "{text}");
}

#[test]
fn ranks_that_disagree_print_both_calls() {
    let (success, text) = finish(start(3, "disagree", false, &[]));
    assert!(!success, "{text}");
    for said in [
        "ranks disagree in group world",
        "all_reduce(sum, f32, 1000 elements) #1 at",
        "broadcast(",
        "mpi.rs:",
    ] {
        assert!(text.contains(said), "{said}:\n{text}");
    }
}

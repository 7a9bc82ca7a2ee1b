//! Ranks that die, stop, disagree or never come: the others end within bounds, and say who it was.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ferrospeed_comm::{ConnectOptions, DType, Error, ReduceOp, Region, World, trace};
use ferrospeed_testkit::hosts::Hosts;
use ferrospeed_testkit::ranks::{Ending, Job, finish, role};

/// A lost rank must be noticed within 5 seconds; the rest is start-up on a busy machine.
const LIMIT: Duration = Duration::from_secs(25);
const VICTIM: usize = 1;
const OPERATIONS: [&str; 10] = [
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "scatter",
    "gather",
    "all_to_all",
    "barrier",
    "messages",
];

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"))
}

/// What a rank does when this binary is started as one.
#[test]
fn rank_process() {
    let Some(role) = role() else { return };
    let mut options = ConnectOptions::from_env().unwrap();
    if let Ok(seconds) = std::env::var("DEADLINE_S") {
        options.limits.deadline = Duration::from_secs_f64(seconds.parse().unwrap());
    }
    if let Ok(hash) = std::env::var("CONFIG_HASH") {
        options.config_hash = hash;
    }
    let rank = options.rank;
    let world = match World::connect(options) {
        Ok(world) => world,
        Err(error) => return println!("\nREFUSED: {error}"),
    };
    let outcome = match role.as_str() {
        "forever" => forever(&world, &variable("OPERATION")),
        "disagree" => disagree(&world, &variable("HOW")),
        "late" => late(&world),
        "once" => world.group().barrier(),
        other => panic!("unknown role {other}"),
    };
    match outcome {
        Ok(()) => println!("\nFINISHED: rank {rank}"),
        Err(error) => println!("\nOUTCOME: {error}"),
    }
}

/// Repeats one operation until it fails; the victim is struck from inside.
fn forever(world: &World, operation: &str) -> Result<(), Error> {
    let signal: i32 = variable("SIGNAL").parse().unwrap();
    let victim: usize = variable("VICTIM").parse().unwrap();
    if world.rank() == victim {
        std::thread::spawn(move || {
            let after_ms = std::env::var("STRIKE_AFTER_MS").map_or(150, |text| text.parse().unwrap());
            std::thread::sleep(Duration::from_millis(after_ms));
            // SAFETY: signals this very process.
            unsafe { libc::kill(libc::getpid(), signal) };
        });
    }
    let group = world.group();
    let (size, me) = (group.size(), group.rank());
    let data = Region::zeroed(size * (256 << 10));
    let part = data.slice(0..256 << 10);
    let other = Region::zeroed(data.len());
    let mut mark = std::env::var("MARK_BEGIN").ok();
    let started = Instant::now();
    loop {
        assert!(started.elapsed() < Duration::from_secs(20), "the victim was never struck");
        match operation {
            "all_reduce" => group.all_reduce_async(&data, DType::F32, ReduceOp::Sum).wait()?,
            "reduce" => group.reduce_async(&data, DType::F32, ReduceOp::Sum, 0).wait()?,
            "reduce_scatter" => {
                group.reduce_scatter_async(&data, &part, DType::BF16, ReduceOp::Sum).wait()?
            }
            "all_gather" => group.all_gather_async(&part, &other, DType::U8).wait()?,
            "broadcast" => group.broadcast_async(&data, DType::F32, 0).wait()?,
            "scatter" => group.scatter_async((me == 0).then_some(&data), &part, DType::F32, 0).wait()?,
            "gather" => group.gather_async(&part, (me == 0).then_some(&other), DType::F32, 0).wait()?,
            "all_to_all" => group.all_to_all_async(&data, &other, DType::F32).wait()?,
            "barrier" => group.barrier()?,
            "messages" => {
                let sent = group.send_async(&data, DType::U8, (me + 1) % size, 1);
                group.recv_async(&other, DType::U8, (me + size - 1) % size, 1).wait()?;
                sent.wait()?;
            }
            unknown => panic!("unknown operation {unknown}"),
        }
        if let Some(folder) = mark.take() {
            std::fs::write(recorder_of(folder, world.rank()), "").unwrap();
        }
    }
}

fn disagree(world: &World, how: &str) -> Result<(), Error> {
    let group = world.group();
    group.barrier()?;
    if world.rank() != VICTIM {
        return group.all_reduce(&mut vec![1.0f32; 1000], ReduceOp::Sum);
    }
    match how {
        "operation" => group.broadcast(&mut vec![1.0f32; 1000], 0),
        "dtype" => group.all_reduce(&mut vec![1i32; 1000], ReduceOp::Sum),
        "count" => group.all_reduce(&mut vec![1.0f32; 1001], ReduceOp::Sum),
        unknown => panic!("unknown way {unknown}"),
    }
}

/// The victim never enters the second barrier, but stays until its flight recorder has been asked for.
fn late(world: &World) -> Result<(), Error> {
    world.group().barrier()?;
    if world.rank() != VICTIM {
        return world.group().barrier();
    }
    wait_for_file(&recorder_of(variable("FERROSPEED_TRACE_DIR"), VICTIM));
    Ok(())
}

fn recorder_of(folder: impl AsRef<Path>, rank: usize) -> PathBuf {
    folder.as_ref().join(format!("rank-{rank:05}.jsonl"))
}

fn wait_for_file(path: &Path) {
    let limit = Instant::now() + LIMIT;
    while !path.exists() {
        assert!(Instant::now() < limit, "{} never came", path.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn expect(endings: &[Ending], skip: Option<usize>, wanted: &[&str]) {
    for (rank, ending) in endings.iter().enumerate().filter(|(rank, _)| Some(*rank) != skip) {
        for text in wanted {
            assert!(ending.output.contains(text), "rank {rank} did not say {text:?}:\n{}", ending.output);
        }
    }
}

fn strike(backend: &str, operation: &str, signal: i32, victim: usize, wanted: &str) {
    let job = Job::new(module_path!(), 3, "forever")
        .with("FERROSPEED_COMM_BACKEND", backend)
        .with("OPERATION", operation)
        .with("SIGNAL", signal)
        .with("VICTIM", victim);
    let mut ranks = job.start();
    let struck = ranks.remove(victim);
    let survivors = finish(ranks, LIMIT);
    expect(&survivors, None, &["OUTCOME: ", &format!("rank {victim} {wanted}")]);
    drop(struck);
}

/// Runs all of them at once: a stopped rank costs its survivors four seconds of waiting, not of work.
fn strike_every_operation(backend: &'static str, signal: i32, wanted: &'static str) {
    std::thread::scope(|scope| {
        for operation in OPERATIONS {
            scope.spawn(move || strike(backend, operation, signal, VICTIM, wanted));
        }
    });
}

#[test]
fn a_rank_killed_inside_any_local_operation_is_named() {
    strike_every_operation("local", libc::SIGKILL, "died");
}

#[test]
fn a_rank_killed_inside_any_tcp_operation_is_named() {
    strike_every_operation("tcp", libc::SIGKILL, "died");
}

#[test]
fn a_rank_stopped_inside_any_local_operation_is_named() {
    strike_every_operation("local", libc::SIGSTOP, "stopped responding");
}

#[test]
fn a_rank_stopped_inside_any_tcp_operation_is_named() {
    strike_every_operation("tcp", libc::SIGSTOP, "stopped responding");
}

#[test]
fn the_loss_of_rank_0_tells_what_it_did_last() {
    let job = Job::new(module_path!(), 3, "forever")
        .with("OPERATION", "all_reduce")
        .with("SIGNAL", libc::SIGKILL)
        .with("VICTIM", 0)
        .with("STRIKE_AFTER_MS", 1600);
    let mut ranks = job.start();
    let struck = ranks.remove(0);
    let survivors = finish(ranks, LIMIT);
    expect(
        &survivors,
        None,
        &["OUTCOME: rank 0 died; the last operation that it told of: ", "all_reduce(sum, f32, "],
    );
    let nothing = "the last operation that it told of: none yet";
    assert!(survivors.iter().all(|ending| !ending.output.contains(nothing)));
    drop(struck);
}

#[test]
fn the_loss_of_rank_0_itself_is_noticed() {
    strike("local", "all_reduce", libc::SIGKILL, 0, "died");
    strike("tcp", "barrier", libc::SIGSTOP, 0, "stopped responding");
}

#[test]
fn ranks_that_disagree_all_print_both_calls() {
    for backend in ["local", "tcp"] {
        for how in ["operation", "dtype", "count"] {
            let job = Job::new(module_path!(), 4, "disagree")
                .with("FERROSPEED_COMM_BACKEND", backend)
                .with("HOW", how);
            let endings = finish(job.start(), LIMIT);
            expect(
                &endings,
                None,
                &["OUTCOME: ranks disagree in group world", "all_reduce(sum, f32, 1000 elements) #1 at"],
            );
            for ending in &endings {
                assert!(ending.output.matches("faults.rs:").count() >= 2, "{}", ending.output);
            }
        }
    }
}

#[test]
fn a_rank_that_never_enters_is_named_and_found_in_the_flight_recorders() {
    let folder = std::env::temp_dir().join(format!("ferrospeed-faults-{}", std::process::id()));
    for backend in ["local", "tcp"] {
        let _ = std::fs::remove_dir_all(&folder);
        let job = Job::new(module_path!(), 3, "late")
            .with("FERROSPEED_COMM_BACKEND", backend)
            .with("DEADLINE_S", 1.5)
            .with("FERROSPEED_TRACE_DIR", folder.display());
        let ranks = job.start();
        wait_for_file(&recorder_of(&folder, 0));
        wait_for_file(&recorder_of(&folder, 2));
        ranks[VICTIM].signal(libc::SIGUSR1);
        let endings = finish(ranks, LIMIT);
        expect(&endings, Some(VICTIM), &["OUTCOME: barrier() #1", "waiting for rank 1 (its last operation"]);
        let sentence = trace::diff(&folder).unwrap();
        assert!(
            sentence.starts_with("rank 1 (whose last operation there was barrier() #0")
                && sentence.contains("never entered barrier() #1"),
            "{backend}: {sentence}"
        );
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_missing_rank_is_named_at_the_rendezvous() {
    let job = Job::new(module_path!(), 3, "once").with("DEADLINE_S", 1.5);
    let endings = finish(vec![job.start_rank(0), job.start_rank(2)], LIMIT);
    expect(&endings, None, &["REFUSED: ", "gave up waiting for rank 1 of 3"]);
}

#[test]
fn a_duplicate_rank_is_refused_and_the_job_goes_on() {
    let job = Job::new(module_path!(), 3, "once");
    let first = job.start_rank(0);
    let mut doubles = vec![job.start_rank(1), job.start_rank(1)];
    let deadline = Instant::now() + LIMIT;
    let refused = loop {
        if let Some(index) = doubles.iter_mut().position(|double| !double.is_running()) {
            break doubles.remove(index);
        }
        assert!(Instant::now() < deadline, "both ranks 1 are still waiting");
        std::thread::sleep(Duration::from_millis(5));
    };
    expect(&finish(vec![refused], LIMIT), None, &["REFUSED: ", "rank 1 is already here, from 127.0.0.1:"]);
    let mut ranks = vec![first, job.start_rank(2)];
    ranks.append(&mut doubles);
    expect(&finish(ranks, LIMIT), None, &["FINISHED"]);
}

#[test]
fn another_configuration_is_refused_on_every_rank() {
    let job = Job::new(module_path!(), 2, "once").with("CONFIG_HASH", "aaaa");
    let other = Job { port: job.port, token: job.token.clone(), ..Job::new(module_path!(), 2, "once") }
        .with("CONFIG_HASH", "bbbb");
    let endings = finish(vec![job.start_rank(0), other.start_rank(1)], LIMIT);
    expect(&endings, None, &["REFUSED: ", "rank 1", "configuration hash \"bbbb\", but rank 0 has \"aaaa\""]);
}

#[test]
fn two_jobs_may_name_the_same_port() {
    let first = Job::new(module_path!(), 2, "once");
    let second = Job { port: first.port, ..Job::new(module_path!(), 2, "once") };
    let mut ranks = first.start();
    ranks.extend(second.start());
    expect(&finish(ranks, LIMIT), None, &["FINISHED"]);
}

#[test]
fn a_stranger_is_turned_away_and_the_job_goes_on() {
    let job = Job::new(module_path!(), 2, "once");
    let first = job.start_rank(0);
    let deadline = Instant::now() + LIMIT;
    let mut stranger = loop {
        match TcpStream::connect(("127.0.0.1", job.port)) {
            Ok(stream) => break stream,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
    };
    stranger.write_all(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n").unwrap();
    let mut silent = TcpStream::connect(("127.0.0.1", job.port)).unwrap();
    let mut answer = Vec::new();
    stranger.set_read_timeout(Some(LIMIT)).unwrap();
    let _ = stranger.read_to_end(&mut answer);
    assert!(String::from_utf8_lossy(&answer).contains("does not speak this protocol"));
    expect(&finish(vec![first, job.start_rank(1)], LIMIT), None, &["FINISHED"]);
    silent.flush().unwrap();
}

#[test]
fn nothing_is_left_in_shared_memory() {
    let count = || std::fs::read_dir("/dev/shm").map_or(0, Iterator::count);
    let before = count();
    strike("local", "all_reduce", libc::SIGKILL, VICTIM, "died");
    assert!(count() <= before, "something was left in /dev/shm");
}

#[test]
fn a_host_that_is_cut_off_is_noticed_on_both_sides() {
    let Some(hosts) = Hosts::make(2, 8) else { return };
    let folder = std::env::temp_dir().join(format!("ferrospeed-cut-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let mut job = Job::new(module_path!(), 2, "forever")
        .with("MASTER_ADDR", "10.231.8.1")
        .with("OPERATION", "all_reduce")
        .with("SIGNAL", 0)
        .with("VICTIM", 0)
        .with("MARK_BEGIN", folder.display());
    job.prefix = vec![hosts.enter(0), hosts.enter(1)];
    let ranks = job.start();
    // Both are in the middle of it, and would go on for 20 seconds.
    wait_for_file(&recorder_of(&folder, 0));
    wait_for_file(&recorder_of(&folder, 1));
    hosts.cut();
    let endings = finish(ranks, LIMIT);
    expect(&endings[..1], None, &["OUTCOME: rank 1 stopped responding"]);
    expect(&endings[1..], None, &["OUTCOME: rank 0 stopped responding"]);
    std::fs::remove_dir_all(&folder).unwrap();
}

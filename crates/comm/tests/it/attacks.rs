//! Strangers on the same host: they take no link, keep nobody out, wear nothing out, and find nothing to read or to replace.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ferrospeed_comm::{ConnectOptions, Error, ReduceOp, World};
use ferrospeed_testkit::ranks::{Ending, Job, RankProcess, finish, role};

const LIMIT: Duration = Duration::from_secs(40);

/// What a rank does when this binary is started as one.
#[test]
fn rank_process() {
    let Some(role) = role() else { return };
    let options = ConnectOptions::from_env().unwrap();
    let rank = options.rank;
    let world = match World::connect(options) {
        Ok(world) => world,
        Err(error) => return println!("\nREFUSED: {error}"),
    };
    let outcome = match role.as_str() {
        "once" => world.group().barrier(),
        "links" => links(&world),
        "disagree" => world.group().all_reduce(&mut vec![0f32; 1 + rank], ReduceOp::Sum),
        other => panic!("unknown role {other}"),
    };
    match outcome {
        Ok(()) => println!("\nFINISHED: rank {rank}"),
        Err(error) => println!("\nOUTCOME: {error}"),
    }
}

/// New links again and again: every group has its own.
fn links(world: &World) -> Result<(), Error> {
    for round in 0..30 {
        let group = world.new_group(&[0, 1, 2])?.expect("all ranks are in it");
        let mut value = [world.rank() as i64];
        group.all_reduce(&mut value, ReduceOp::Sum)?;
        let next = (group.rank() + 1) % 3;
        let before = (group.rank() + 2) % 3;
        let sent =
            group.send_async(&ferrospeed_comm::Region::zeroed(8), ferrospeed_comm::DType::U8, next, round);
        group
            .recv_async(&ferrospeed_comm::Region::zeroed(8), ferrospeed_comm::DType::U8, before, round)
            .wait()?;
        sent.wait()?;
        assert_eq!(value, [3]);
    }
    Ok(())
}

fn expect(endings: &[Ending], wanted: &str) {
    for (rank, ending) in endings.iter().enumerate() {
        assert!(ending.output.contains(wanted), "rank {rank} did not say {wanted:?}:\n{}", ending.output);
    }
}

/// The ports of this host at which a process listens.
fn ports_of(pid: i32) -> Vec<u16> {
    let links = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let sockets: Vec<String> = links
        .filter_map(|entry| std::fs::read_link(entry.path()).ok()?.into_os_string().into_string().ok())
        .collect();
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap_or_default();
    let listening = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let inode = format!("socket:[{}]", fields.get(9)?);
        let is_ours = *fields.get(3)? == "0A" && sockets.contains(&inode);
        is_ours.then(|| u16::from_str_radix(fields.get(1)?.rsplit(':').next()?, 16).ok()).flatten()
    };
    table.lines().skip(1).filter_map(listening).collect()
}

/// Says everything a caller could say without the token: all claims of the first links, with a proof that is none.
fn pretend(port: u16, group: u64, from_rank: u64, purpose: u64) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_millis(500)))?;
    let mut greeting = [0u8; 40];
    stream.read_exact(&mut greeting)?;
    let mut words = greeting[..8].to_vec();
    words.extend([7u8; 32]);
    for word in [purpose, group, from_rank, 2] {
        words.extend(word.to_le_bytes());
    }
    words.extend([0u8; 32]);
    stream.write_all(&words)?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    // A rank that has ended in the meantime closes what it had open without a word.
    let verdict = *answer.first().ok_or(std::io::ErrorKind::UnexpectedEof)?;
    assert_eq!(verdict, 0, "a stranger was taken for a member");
    Ok(())
}

#[test]
fn a_stranger_without_the_token_takes_no_link() {
    let job = Job::new(module_path!(), 3, "links").with("FERROSPEED_COMM_BACKEND", "tcp");
    let ranks = job.start();
    let pids: Vec<i32> = ranks.iter().map(RankProcess::pid).collect();
    let is_over = AtomicBool::new(false);
    let (endings, refused) = std::thread::scope(|scope| {
        let attack = scope.spawn(|| {
            let mut refused = 0;
            for round in 0u64.. {
                if is_over.load(Ordering::SeqCst) {
                    break;
                }
                for port in pids.iter().flat_map(|pid| ports_of(*pid)) {
                    refused += usize::from(pretend(port, round % 40, round % 3, 1 + round % 2).is_ok());
                }
            }
            refused
        });
        let endings = finish(ranks, LIMIT);
        is_over.store(true, Ordering::SeqCst);
        (endings, attack.join().unwrap())
    });
    expect(&endings, "FINISHED");
    assert!(refused > 0, "the stranger never got to speak");
}

#[test]
fn the_token_leaves_no_trace_that_others_can_read() {
    let job = Job::new(module_path!(), 2, "once");
    let first = job.start_rank(0);
    let limit = Instant::now() + LIMIT;
    while ports_of(first.pid()).is_empty() {
        assert!(Instant::now() < limit, "rank 0 never listened");
        std::thread::sleep(Duration::from_millis(5));
    }
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    assert!(!sockets.contains("ferrospeed"), "{sockets}");
    expect(&finish(vec![first, job.start_rank(1)], LIMIT), "FINISHED");
}

fn allow_many_descriptors() {
    // SAFETY: reads and writes one `rlimit`, which outlives both calls.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
        limit.rlim_cur = limit.rlim_max.min(8192);
        libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
    }
}

/// Connections that say nothing.
fn silent_strangers(port: u16, count: usize) -> Vec<TcpStream> {
    let limit = Instant::now() + LIMIT;
    let mut strangers = Vec::new();
    while strangers.len() < count {
        assert!(Instant::now() < limit, "only {} of {count} strangers came in", strangers.len());
        match TcpStream::connect_timeout(&([127, 0, 0, 1], port).into(), Duration::from_secs(5)) {
            Ok(stream) => strangers.push(stream),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
    strangers
}

#[test]
fn a_thousand_silent_strangers_keep_no_rank_out() {
    allow_many_descriptors();
    let job = Job::new(module_path!(), 2, "once");
    let first = job.start_rank(0);
    let strangers = silent_strangers(job.port, 1200);
    let endings = finish(vec![first, job.start_rank(1)], LIMIT);
    expect(&endings, "FINISHED");
    drop(strangers);
}

/// Seconds of processor time that a process has used.
fn processor_s(pid: i32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
    let ticks: u64 = [11, 12].iter().filter_map(|&at| fields.get(at)?.parse::<u64>().ok()).sum();
    ticks as f64 / 100.0
}

#[test]
fn rank_0_without_a_free_descriptor_does_not_spin_and_goes_on_after() {
    let mut job = Job::new(module_path!(), 2, "once");
    job.prefix = vec![["sh", "-c", "ulimit -n 40; exec \"$0\" \"$@\""].map(str::to_owned).to_vec()];
    let first = job.start_rank(0);
    let strangers = silent_strangers(job.port, 120);
    let before = processor_s(first.pid());
    std::thread::sleep(Duration::from_secs(1));
    let used = processor_s(first.pid()) - before;
    assert!(used < 0.4, "rank 0 used {used} s of processor time in a second of waiting");
    drop(strangers);
    expect(&finish(vec![first, job.start_rank(1)], LIMIT), "FINISHED");
}

fn scratch(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}

fn private_folder(temporary: &Path) -> PathBuf {
    // SAFETY: a system call without arguments that cannot fail.
    temporary.join(format!("ferrospeed-{}", unsafe { libc::geteuid() }))
}

#[test]
fn flight_recorders_go_where_only_their_owner_can_look() {
    let temporary = scratch("recorders");
    let job = Job::new(module_path!(), 2, "disagree")
        .with("TMPDIR", temporary.display())
        .with("FERROSPEED_TRACE_DIR", "");
    expect(&finish(job.start(), LIMIT), "OUTCOME: ranks disagree");
    let left: Vec<PathBuf> =
        std::fs::read_dir(&temporary).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(left, [private_folder(&temporary)]);
    let kept: Vec<PathBuf> =
        std::fs::read_dir(&left[0]).unwrap().map(|entry| entry.unwrap().path()).collect();
    let [folder] = &kept[..] else { panic!("one folder of recorders, and no meeting is left: {kept:?}") };
    for path in [&left[0], folder] {
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o700, "{}", path.display());
    }
    assert!(folder.join("rank-00000.jsonl").is_file() && folder.join("rank-00001.jsonl").is_file());
    std::fs::remove_dir_all(temporary).unwrap();
}

#[test]
fn a_link_in_place_of_a_recorder_is_not_followed() {
    let folder = scratch("link");
    let precious = folder.join("precious");
    std::fs::write(&precious, "kept").unwrap();
    std::os::unix::fs::symlink(&precious, folder.join("rank-00000.jsonl")).unwrap();
    let job = Job::new(module_path!(), 2, "disagree").with("FERROSPEED_TRACE_DIR", folder.display());
    expect(&finish(job.start(), LIMIT), "OUTCOME: ranks disagree");
    assert_eq!(std::fs::read_to_string(&precious).unwrap(), "kept");
    assert!(folder.join("rank-00000.jsonl").symlink_metadata().unwrap().is_file());
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_private_folder_that_somebody_else_put_there_is_refused() {
    let temporary = scratch("foreign");
    let elsewhere = temporary.join("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, private_folder(&temporary)).unwrap();
    let job =
        Job::new(module_path!(), 2, "once").with("TMPDIR", temporary.display()).with("DEEPSPEED_TIMEOUT", 1);
    let endings = finish(vec![job.start_rank(0)], LIMIT);
    expect(&endings, "is not a folder; remove it, or set TMPDIR to a folder of your own");
    assert_eq!(std::fs::read_dir(&elsewhere).unwrap().count(), 0);
    std::fs::remove_dir_all(temporary).unwrap();
}

#[test]
fn ranks_without_a_token_meet_on_one_host() {
    let temporary = scratch("tokenless");
    let job = Job::new(module_path!(), 3, "once")
        .with("FERROSPEED_JOB_TOKEN", "")
        .with("TMPDIR", temporary.display());
    expect(&finish(job.start(), LIMIT), "FINISHED");
    std::fs::remove_dir_all(temporary).unwrap();
}

#[test]
fn a_token_may_lie_in_a_file_that_only_its_owner_reads() {
    let folder = scratch("token-file");
    let path = folder.join("token");
    std::fs::write(&path, "a token of this job\n").unwrap();
    let mode = |mode| std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
    mode(0o600);
    let job = Job::new(module_path!(), 2, "once")
        .with("FERROSPEED_JOB_TOKEN", "")
        .with("FERROSPEED_JOB_TOKEN_FILE", path.display());
    expect(&finish(job.start(), LIMIT), "FINISHED");
    mode(0o644);
    expect(&finish(vec![job.start_rank(0)], LIMIT), "may be read or written by other users; `chmod 600` it");
    std::fs::remove_dir_all(folder).unwrap();
}

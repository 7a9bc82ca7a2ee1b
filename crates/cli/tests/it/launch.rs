//! `ferrospeed launch` with real processes, from outside: what ranks see, how jobs end, and that nothing stays.

use super::support;
use std::process::{Command, Stdio};
use std::time::Instant;

use super::support::{PATIENCE, ferrospeed, is_running, lines_of, start, stderr, stdout, wait_until};

#[test]
fn ranks_see_their_environment_behind_their_prefix() {
    let script = "echo $RANK/$WORLD_SIZE local $LOCAL_RANK/$LOCAL_WORLD_SIZE cross $CROSS_RANK/$CROSS_SIZE";
    let output = ferrospeed(&["launch", "-n", "4", "--", "sh", "-c", script]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let mut lines: Vec<String> = stdout(&output).lines().map(str::to_owned).collect();
    lines.sort();
    let expected: Vec<String> =
        (0..4).map(|rank| format!("[rank {rank}] {rank}/4 local {rank}/4 cross 0/1")).collect();
    assert_eq!(lines, expected);
}

#[test]
fn two_jobs_at_once_meet_at_different_ports() {
    let run = || {
        start(&[
            "launch",
            "-n",
            "2",
            "--no_prefix",
            "--",
            "sh",
            "-c",
            "echo $MASTER_PORT $FERROSPEED_JOB_TOKEN",
        ])
    };
    let (first, second) = (run().finish(), run().finish());
    let unique = |output: &std::process::Output| {
        let mut lines: Vec<String> = stdout(output).lines().map(str::to_owned).collect();
        lines.dedup();
        assert_eq!(lines.len(), 1, "both ranks see the same port and token");
        lines.remove(0)
    };
    assert_ne!(unique(&first), unique(&second));
}

#[test]
fn a_killed_rank_ends_the_job_with_a_report() {
    let folder = tempfile::tempdir().unwrap();
    let script =
        format!("echo started as $RANK; echo $$ > {0}/pid.$RANK; exec sleep 600", folder.path().display());
    let job = start(&["launch", "-n", "3", "--", "sh", "-c", &script]);
    let pids: Vec<String> =
        (0..3).map(|rank| wait_for_pid(&folder.path().join(format!("pid.{rank}")))).collect();
    let killed = Instant::now();
    send_signal("KILL", &pids[1]);
    let output = job.finish();
    assert!(killed.elapsed() < PATIENCE);
    assert_eq!(output.status.code(), Some(137));
    let report = stderr(&output);
    assert!(report.contains("rank 1 on "), "{report}");
    assert!(report.contains("was killed by SIGKILL, "), "{report}");
    assert!(report.contains("started as 1"), "{report}");
    assert!(pids.iter().all(|pid| !is_running(pid)), "every rank is gone");
}

#[test]
fn nothing_outlives_a_launcher_that_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!(
        "sleep 600 & echo $! > {0}/child.$RANK; echo $$ > {0}/pid.$RANK; \
         setsid sh -c 'setsid sleep 600 & echo $! > {0}/far.$RANK; echo $$ > {0}/session.$RANK; wait' & wait",
        folder.path().display()
    );
    let job = start(&["launch", "-n", "2", "--", "sh", "-c", &script]);
    let files = ["pid.0", "pid.1", "child.0", "child.1", "session.0", "session.1", "far.0", "far.1"];
    let pids: Vec<String> = files.iter().map(|file| wait_for_pid(&folder.path().join(file))).collect();
    assert!(pids.iter().all(|pid| is_running(pid)));
    send_signal("KILL", &job.pid());
    job.finish();
    for (file, pid) in files.iter().zip(&pids) {
        wait_until(&format!("{file} to be gone"), || !is_running(pid));
    }
}

#[test]
fn a_daemon_with_nothing_of_its_job_left_ends_with_a_launcher_that_is_killed_where_there_is_a_control_group()
{
    if let Err(why) = ferrospeed_launch::supervise::can_cage() {
        return ferrospeed_testkit::skip::skip(&format!("no cgroup v2 that may be written ({why})"));
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("daemon");
    let script =
        format!("setsid env -i sh -c 'setsid sleep 600 & echo $! > {}; wait' & wait", file.display());
    let job = start(&["launch", "-n", "1", "--", "sh", "-c", &script]);
    let daemon = wait_for_pid(&file);
    assert!(is_running(&daemon));
    send_signal("KILL", &job.pid());
    job.finish();
    wait_until("the daemon to be gone", || !is_running(&daemon));
}

#[test]
fn a_stopped_guardian_keeps_no_launcher_from_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let (pid, go) = (folder.path().join("pid"), folder.path().join("go"));
    let script =
        format!("echo $PPID > {0}; until [ -e {1} ]; do sleep 0.01; done", pid.display(), go.display());
    let job = start(&["launch", "-n", "1", "--", "sh", "-c", &script]);
    let guardian = guardian_of(&wait_for_pid(&pid));
    send_signal("STOP", &guardian);
    std::fs::write(&go, "").unwrap();
    let output = job.finish();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let said = stderr(&output);
    assert!(said.contains(&format!("process {guardian}, which guards the job")), "{said}");
    assert!(!is_running(&guardian), "it stays behind");
}

#[test]
fn a_rank_ends_with_a_launcher_that_is_killed_together_with_its_guardian() {
    let folder = tempfile::tempdir().unwrap();
    let (pid, own) = (folder.path().join("pid"), folder.path().join("own"));
    let script = format!("echo $PPID > {}; echo $$ > {}; exec sleep 600", pid.display(), own.display());
    let job = start(&["launch", "-n", "1", "--", "sh", "-c", &script]);
    let (launcher, rank) = (wait_for_pid(&pid), wait_for_pid(&own));
    let guardian = guardian_of(&launcher);
    send_signal("KILL", &format!("{guardian} {launcher}"));
    job.finish();
    // The kernel does it: the rank has asked to end with its parent.
    wait_until("the rank to end", || !is_running(&rank));
}

#[test]
fn a_job_that_was_stopped_as_a_whole_says_so_when_it_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let (pid, go) = (folder.path().join("pid"), folder.path().join("go"));
    let script =
        format!("echo $PPID > {0}; until [ -e {1} ]; do sleep 0.01; done", pid.display(), go.display());
    let job = start(&["launch", "-n", "1", "--", "sh", "-c", &script]);
    let launcher = wait_for_pid(&pid);
    send_signal("STOP", &launcher);
    // As long as it takes to be told from a busy machine.
    std::thread::sleep(std::time::Duration::from_millis(2500));
    send_signal("CONT", &launcher);
    std::fs::write(&go, "").unwrap();
    let output = job.finish();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let said = stderr(&output);
    assert!(said.contains("stood still for") && said.contains("and goes on"), "{said}");
}

#[test]
fn ranks_meet_the_limit_of_a_files_size_as_programs_do() {
    // Eight times 512 or 1024 bytes; the signal's number is 25.
    let script = "ulimit -f 8; head -c 100000 /dev/zero > \"$0\"; echo \"ended $?\"";
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    let words = ["sh", "-c", script, file.to_str().unwrap()];
    let launched = ferrospeed(&[&["launch", "-n", "1", "--no_prefix", "--"], &words[..]].concat());
    let exec = ["rank-env", "--launcher", "mpich", "--no_python"];
    let environment = [("PMI_RANK", "0"), ("MPI_LOCALRANKID", "0")];
    let replaced = support::output_of(support::binary().args(exec).args(words).envs(environment));
    for output in [launched, replaced] {
        assert!(stdout(&output).contains("ended 153\n"), "{}{}", stdout(&output), stderr(&output));
    }
}

#[test]
fn sigterm_is_forwarded_and_ranks_may_tidy_up() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!(
        "trap 'touch {0}/saved.$RANK; exit 0' TERM; echo $$ > {0}/pid.$RANK; while :; do sleep 0.05; done",
        folder.path().display()
    );
    let job = start(&["launch", "-n", "2", "--", "sh", "-c", &script]);
    let pids: Vec<String> =
        (0..2).map(|rank| wait_for_pid(&folder.path().join(format!("pid.{rank}")))).collect();
    send_signal("TERM", &job.pid());
    let output = job.finish();
    assert_eq!(output.status.code(), Some(143), "{}", stderr(&output));
    assert!((0..2).all(|rank| folder.path().join(format!("saved.{rank}")).exists()));
    assert!(pids.iter().all(|pid| !is_running(pid)));
}

#[test]
fn ranks_that_ignore_a_signal_are_killed_after_the_grace() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!(
        "trap '' INT TERM; echo $$ > {0}/pid.$RANK; while :; do sleep 0.05; done",
        folder.path().display()
    );
    let job = start(&["launch", "-n", "2", "--grace_s", "1", "--", "sh", "-c", &script]);
    let pids: Vec<String> =
        (0..2).map(|rank| wait_for_pid(&folder.path().join(format!("pid.{rank}")))).collect();
    let sent = Instant::now();
    send_signal("INT", &job.pid());
    let output = job.finish();
    assert!(sent.elapsed() < PATIENCE);
    assert_eq!(output.status.code(), Some(130));
    assert!(pids.iter().all(|pid| !is_running(pid)));
}

#[test]
fn a_second_signal_ends_the_patience() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!(
        "trap 'touch {0}/told' TERM; echo $$ > {0}/pid; while :; do sleep 0.05; done",
        folder.path().display()
    );
    let job = start(&["launch", "-n", "1", "--grace_s", "600", "--", "sh", "-c", &script]);
    wait_for_pid(&folder.path().join("pid"));
    send_signal("TERM", &job.pid());
    wait_until("the rank to be told", || folder.path().join("told").exists());
    send_signal("TERM", &job.pid());
    assert_eq!(job.finish().status.code(), Some(143));
}

#[test]
fn exit_codes_tell_ranks_from_usage_from_failure() {
    let code = |arguments: &[&str]| ferrospeed(arguments).status.code();
    assert_eq!(code(&["launch", "-n", "2", "--", "true"]), Some(0));
    assert_eq!(code(&["launch", "-n", "2", "--", "sh", "-c", "exit 42"]), Some(42));
    assert_eq!(code(&["launch", "-n", "2", "--", "/does/not/exist"]), Some(1));
    assert_eq!(code(&["launch", "-n", "2"]), Some(2));
    assert_eq!(code(&["launch", "--bogus", "true"]), Some(2));
    assert_eq!(code(&["launch", "-n", "0", "--", "true"]), Some(2));
    assert_eq!(code(&["launch", "-n", "1", "--launcher", "bogus", "--", "true"]), Some(2));
    assert_eq!(code(&["launch", "-n", "1", "--autotuning", "run", "--", "true"]), Some(2));
    assert_eq!(code(&["--help"]), Some(0));
}

#[test]
fn each_rank_has_its_log() {
    let folder = tempfile::tempdir().unwrap();
    let logs = folder.path().join("deep/logs");
    let script = "echo out $RANK; echo err $RANK >&2; [ $RANK = 0 ] || exit 5";
    let output =
        ferrospeed(&["launch", "-n", "2", "--log-dir", logs.to_str().unwrap(), "--", "sh", "-c", script]);
    assert_eq!(output.status.code(), Some(5));
    for rank in 0..2 {
        let log = std::fs::read_dir(&logs)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .find(|path| path.to_string_lossy().ends_with(&format!("_rank{rank}.log")))
            .unwrap();
        let mut lines = lines_of(&log);
        lines.sort();
        assert_eq!(lines, [format!("err {rank}"), format!("out {rank}")]);
    }
    assert!(stderr(&output).contains("its log: "), "{}", stderr(&output));
    std::fs::write(folder.path().join("file"), "").unwrap();
    let occupied = folder.path().join("file");
    let output = ferrospeed(&["launch", "-n", "1", "--log-dir", occupied.to_str().unwrap(), "--", "true"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("cannot create log folder"), "{}", stderr(&output));
}

#[test]
fn hostile_hostfiles_are_refused_with_their_line() {
    let folder = tempfile::tempdir().unwrap();
    let hostfile = folder.path().join("hosts");
    for (text, expected) in [
        ("-oProxyCommand=id slots=1\n", "line 1: a host name cannot begin with"),
        ("a slots=1\na slots=2\n", "line 2: host \"a\" is already listed"),
        ("a slots=4294967296\n", "line 1: the slot count is larger"),
        ("# nothing\n", "lists no host"),
        ("a b c\n", "line 1: the second word must be"),
    ] {
        std::fs::write(&hostfile, text).unwrap();
        let output = ferrospeed(&["launch", "-H", hostfile.to_str().unwrap(), "--", "true"]);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(stderr(&output).contains(expected), "{text}: {}", stderr(&output));
    }
    std::fs::remove_file(&hostfile).unwrap();
    let output = ferrospeed(&["launch", "-H", hostfile.to_str().unwrap(), "-n", "1", "--", "true"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stderr(&output).contains("there is no hostfile at"), "{}", stderr(&output));
    std::fs::write(&hostfile, [0xff, 0xfe, 0]).unwrap();
    let output = ferrospeed(&["launch", "-H", hostfile.to_str().unwrap(), "--", "true"]);
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn a_dry_run_prints_the_command_and_contacts_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let hostfile = folder.path().join("hosts");
    std::fs::write(&hostfile, "nowhere-0.invalid slots=2\nnowhere-1.invalid slots=2\n").unwrap();
    let hosts = hostfile.to_str().unwrap();
    let output = ferrospeed(&["launch", "-H", hosts, "--dry-run", "--", "./train", "a b", "$HOME"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let line = stdout(&output);
    assert!(line.contains("pdsh -S -f 1024 -w nowhere-0.invalid,nowhere-1.invalid "), "{line}");
    assert!(
        line.contains("# hands the job's token by standard input to:\n#   ssh nowhere-0.invalid "),
        "{line}"
    );
    assert!(line.contains("--node_rank=%n"), "{line}");
    let output = ferrospeed(&[
        "launch",
        "-H",
        hosts,
        "--launcher",
        "slurm",
        "--dry-run",
        "--json",
        "--",
        "./train",
        "x",
    ]);
    let document: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(document["command"][0], "srun");
    assert_eq!(document["command"].as_array().unwrap().last().unwrap(), "x");
    assert_eq!(document["environment_set"]["MASTER_ADDR"], "nowhere-0.invalid");
}

#[test]
fn an_openmpi_parameter_that_the_user_chooses_is_given_once() {
    let folder = tempfile::tempdir().unwrap();
    let hostfile = folder.path().join("hosts");
    std::fs::write(&hostfile, "a slots=1\nb slots=1\n").unwrap();
    let chosen = "--mca btl_tcp_if_include ib0";
    let hosts = hostfile.to_str().unwrap();
    let output = ferrospeed(&[
        "launch",
        "-H",
        hosts,
        "--launcher",
        "openmpi",
        "--launcher_args",
        chosen,
        "--dry-run",
        "--",
        "true",
    ]);
    let line = stdout(&output);
    assert_eq!(line.matches("btl_tcp_if_include").count(), 1, "{line}");
    assert!(line.contains("--mca btl_tcp_if_include ib0") && line.contains("^openib"), "{line}");
}

#[test]
fn one_remote_host_is_reached_through_the_backend() {
    let folder = tempfile::tempdir().unwrap();
    let hostfile = folder.path().join("hosts");
    std::fs::write(&hostfile, "elsewhere.invalid slots=2\n").unwrap();
    let output = ferrospeed(&["launch", "-H", hostfile.to_str().unwrap(), "--dry-run", "--", "true"]);
    assert!(stdout(&output).contains("pdsh "), "{}", stdout(&output));
    std::fs::write(&hostfile, "localhost slots=2\n").unwrap();
    let output = ferrospeed(&["launch", "-H", hostfile.to_str().unwrap(), "--dry-run", "--", "true"]);
    assert!(stdout(&output).contains(" node-launch "), "{}", stdout(&output));
}

#[test]
fn a_printed_node_launch_runs_as_it_was_printed() {
    let output = ferrospeed(&[
        "launch",
        "-n",
        "2",
        "--dry-run",
        "--json",
        "--",
        "sh",
        "-c",
        "echo $RANK of $WORLD_SIZE",
    ]);
    let document: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    let words: Vec<String> = serde_json::from_value(document["command"].clone()).unwrap();
    let output = support::output_of(Command::new(&words[0]).args(&words[1..]).stdin(Stdio::null()));
    let mut lines: Vec<String> = stdout(&output).lines().map(str::to_owned).collect();
    lines.sort();
    assert_eq!(lines, ["[rank 0] 0 of 2", "[rank 1] 1 of 2"]);
}

#[test]
fn an_elastic_job_restarts_all_ranks() {
    let script =
        "echo $RANK try $TORCHELASTIC_RESTART_COUNT; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 9; sleep 0";
    let elastic = ["launch", "-n", "2", "--elastic_training", "--master_addr", "127.0.0.1"];
    let tail = ["--", "sh", "-c", script];
    let output = ferrospeed(&[&elastic[..], &tail[..]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stdout(&output).contains("[rank 1] 1 try 1"));
    assert!(stderr(&output).contains("restart 1 of all ranks"), "{}", stderr(&output));
    let output = ferrospeed(&[&elastic[..], &["--max_restarts", "0"], &tail[..]].concat());
    assert_eq!(output.status.code(), Some(9));
}

#[test]
fn bound_ranks_run_on_their_own_cores() {
    let script = "echo $OMP_NUM_THREADS; grep Cpus_allowed_list /proc/self/status";
    let list = ["launch", "-n", "1", "--no_prefix", "--bind_cores_to_rank", "--bind_core_list", "0"];
    let output = ferrospeed(&[&list[..], &["--", "sh", "-c", script]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(stdout(&output), "1\nCpus_allowed_list:\t0\n");
    let too_many = ["launch", "-n", "2", "--bind_cores_to_rank", "--bind_core_list", "0", "--", "true"];
    let output = ferrospeed(&too_many);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("cannot bind 2 ranks to 1 cores"), "{}", stderr(&output));
}

#[test]
fn an_env_file_reaches_every_rank() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("env");
    std::fs::write(&file, "# for every rank\nFROM_FILE=a=b\n").unwrap();
    let path = file.to_str().unwrap();
    let output = ferrospeed(&[
        "launch",
        "-n",
        "2",
        "--no_prefix",
        "--env_file",
        path,
        "--",
        "sh",
        "-c",
        "echo $FROM_FILE",
    ]);
    assert_eq!(stdout(&output), "a=b\na=b\n", "{}", stderr(&output));
}

#[test]
fn a_pid_file_lives_as_long_as_the_job() {
    let folder = tempfile::tempdir().unwrap();
    let script = "cat $TMPDIR/*.ferrospeed";
    let arguments = ["launch", "-n", "1", "--no_prefix", "--save_pid", "--", "sh", "-c", script];
    let output = support::output_of(support::binary().args(arguments).env("TMPDIR", folder.path()));
    assert!(stdout(&output).trim().parse::<u32>().is_ok(), "{output:?}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn rank_env_translates_mpich_and_keeps_the_exit_code() {
    let run = |variables: &[(&str, &str)]| {
        let script = "echo $RANK $LOCAL_RANK; exit 6";
        let arguments = ["rank-env", "--launcher", "mpich", "--no_python", "sh", "-c", script];
        support::output_of(support::binary().args(arguments).envs(variables.iter().copied()))
    };
    let output = run(&[("PMI_RANK", "3"), ("MPI_LOCALRANKID", "1")]);
    assert_eq!((stdout(&output).as_str(), output.status.code()), ("3 1\n", Some(6)));
    let output = run(&[("PMI_RANK", "3")]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("neither PALS_LOCAL_RANKID nor MPI_LOCALRANKID is set"));
}

/// The process that guards a launcher's job.
fn guardian_of(launcher: &str) -> String {
    let guardians = || -> Vec<String> {
        let children = std::fs::read_dir("/proc").unwrap().flatten().filter(|entry| {
            let status = std::fs::read_to_string(entry.path().join("status")).unwrap_or_default();
            status.contains(&format!("\nPPid:\t{launcher}\n"))
                && status.starts_with("Name:\tferro-guardian\n")
        });
        children.map(|entry| entry.file_name().into_string().unwrap()).collect()
    };
    wait_until("the guardian to call itself so", || guardians().len() == 1);
    guardians().remove(0)
}

fn wait_for_pid(path: &std::path::Path) -> String {
    wait_until(&format!("{} to be written", path.display()), || {
        std::fs::read_to_string(path).is_ok_and(|text| text.ends_with('\n'))
    });
    std::fs::read_to_string(path).unwrap().trim().to_owned()
}

fn send_signal(name: &str, pid: &str) {
    let sent = Command::new("sh").args(["-c", &format!("kill -{name} {pid}")]).status().unwrap();
    assert!(sent.success());
}

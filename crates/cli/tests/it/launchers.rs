//! Ranks that the real `mpirun` and `srun` start, alone and behind `ferrospeed launch`: one job, one folder, one log.

use super::support;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::support::{
    binary, finish, in_path, is_running, output_of, stderr, stdout, take_signals, wait_until,
};

const BINARY: &str = env!("CARGO_BIN_EXE_ferrospeed");
const STEPS: usize = 5;

/// A folder with a recipe for the given number of steps.
fn workplace() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let text = "the quick brown fox jumps over the lazy dog\n".repeat(300);
    std::fs::write(folder.path().join("text.txt"), text).unwrap();
    let recipe = format!(
        r#"
        name = "small"
        steps = {STEPS}
        ranks = 2
        [model]
        preset = "gpt2"
        layers = 1
        width = 64
        heads = 2
        [data]
        text = ["text.txt"]
        sequence = 64
        [ds_config]
        train_micro_batch_size_per_gpu = 4
        steps_per_print = 1
        optimizer = {{ type = "AdamW", params = {{ lr = 3e-3 }} }}
        zero_optimization = {{ stage = 2 }}
        "#
    );
    std::fs::write(folder.path().join("recipe.toml"), recipe).unwrap();
    std::fs::write(folder.path().join("hosts"), "localhost slots=2\n").unwrap();
    folder
}

/// Runs a command whose ranks train in `folder/run`, and checks that they were one job.
fn expect_one_job(command: &mut Command, folder: &Path, ranks: usize) {
    let output = output_of(command.current_dir(folder).env("HOME", folder));
    let said = format!("{}\n{}", stdout(&output), stderr(&output));
    assert!(output.status.success(), "{said}");
    assert_eq!(said.matches(&format!("finished {STEPS} steps")).count(), 1, "{said}");
    assert!(said.contains(&format!(" {ranks} rank")), "{said}");
    let log = std::fs::read_to_string(folder.join("run/log.jsonl")).unwrap();
    let steps: Vec<u64> = log
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["step"].as_u64().unwrap())
        .collect();
    assert_eq!(steps, (1..=STEPS as u64).collect::<Vec<_>>());
    std::fs::remove_dir_all(folder.join("run")).unwrap();
}

const TRAIN: [&str; 5] = [BINARY, "train", "recipe.toml", "--out", "run"];

/// `ferrospeed launch` over another launcher, with one of its options.
fn behind_launch(launcher: &str, option: &str) -> Command {
    let mut command = binary();
    command.args(["launch", "-H", "hosts", "--force_multi", "--no_ssh_check", "--master_addr", "127.0.0.1"]);
    command.args(["--launcher", launcher, "--launcher_args", option, "--"]).args(TRAIN);
    command
}

fn mpirun(ranks: &str) -> Command {
    let mut command = Command::new("mpirun");
    take_signals(&mut command).args(["--allow-run-as-root", "--oversubscribe", "-n", ranks]);
    command
}

/// The right to run `mpirun`, if it is Open MPI's: two that begin at once may fail over the folder that both make.
fn openmpi() -> Option<MutexGuard<'static, ()>> {
    static ALONE: Mutex<()> = Mutex::new(());
    let version = in_path("mpirun").then(|| output_of(Command::new("mpirun").arg("--version")));
    if !version.is_some_and(|output| stdout(&output).contains("Open MPI")) {
        eprintln!("skipped: no Open MPI here");
        return None;
    }
    Some(ALONE.lock().unwrap_or_else(PoisonError::into_inner))
}

#[test]
fn ranks_of_mpirun_are_one_job() {
    let Some(_alone) = openmpi() else { return };
    let folder = workplace();
    expect_one_job(mpirun("2").args(TRAIN), folder.path(), 2);
    expect_one_job(mpirun("1").args(TRAIN), folder.path(), 1);
    expect_one_job(&mut behind_launch("openmpi", "--allow-run-as-root --oversubscribe"), folder.path(), 2);
}

#[test]
fn a_mistake_in_the_recipe_is_said_once_under_mpirun() {
    let Some(_alone) = openmpi() else { return };
    let folder = workplace();
    let output =
        output_of(mpirun("2").args(TRAIN).args(["--set", "data.text=[\"gone.txt\"]"]).current_dir(&folder));
    assert!(!output.status.success());
    let said = stderr(&output);
    assert_eq!(said.matches("gone.txt does not exist").count(), 1, "{said}");
}

/// The steps that the log of `folder/run` has.
fn logged(folder: &Path) -> usize {
    std::fs::read_to_string(folder.join("run/log.jsonl")).unwrap().lines().count()
}

/// Ranks that `start` starts replace an earlier run together, and give it back where they take no step.
fn expect_replacement(start: impl Fn() -> Command, folder: &Path) {
    let run = |more: &[&str]| {
        let mut command = start();
        output_of(command.args(more).current_dir(folder).env("HOME", folder))
    };
    let said = |output: &Output| format!("{}\n{}", stdout(output), stderr(output));
    let first = run(&[]);
    assert!(first.status.success(), "{}", said(&first));
    // Without a word nothing is replaced.
    let refused = run(&["--set", "steps=2"]);
    assert!(
        !refused.status.success() && said(&refused).matches("--overwrite").count() == 1,
        "{}",
        said(&refused)
    );
    assert_eq!(logged(folder), STEPS);
    // No rank gets as far as a step, and the old run is where it was.
    let failed = run(&["--set", "steps=2", "--overwrite", "--device", "cuda:999"]);
    assert!(!failed.status.success(), "{}", said(&failed));
    assert!(said(&failed).contains("the earlier run is as it was"), "{}", said(&failed));
    assert_eq!(logged(folder), STEPS);
    let replaced = run(&["--set", "steps=2", "--overwrite"]);
    assert!(replaced.status.success(), "{}", said(&replaced));
    assert_eq!(
        (said(&replaced).matches("finished 2 steps").count(), logged(folder)),
        (1, 2),
        "{}",
        said(&replaced)
    );
    assert!(!folder.join("run/.replaced").exists() && !folder.join("run/.moving").exists());
    std::fs::remove_dir_all(folder.join("run")).unwrap();
}

#[test]
fn one_rank_of_mpirun_replaces_an_earlier_run_and_the_others_wait() {
    let Some(_alone) = openmpi() else { return };
    let folder = workplace();
    let start = || {
        let mut command = mpirun("2");
        command.args(TRAIN);
        command
    };
    expect_replacement(start, folder.path());
}

const TOO_LARGE: [&str; 6] =
    ["--set", "model.layers=1000", "--set", "model.width=65536", "--set", "model.heads=64"];

#[test]
fn memory_is_counted_before_ranks_of_mpirun_begin() {
    let Some(_alone) = openmpi() else { return };
    let folder = workplace();
    let output = output_of(mpirun("2").args(TRAIN).args(TOO_LARGE).current_dir(&folder));
    let said = stderr(&output);
    assert!(!output.status.success());
    assert_eq!(said.matches("this run does not fit: 2 rank(s) need").count(), 1, "{said}");
    assert!(!folder.path().join("run/logs").exists());
}

/// Ranks with the variables that torchrun gives them.
#[test]
fn memory_is_counted_by_one_rank_of_a_host_and_the_others_hear_of_it() {
    let folder = workplace();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let start = |rank: &str| {
        let mut command = binary();
        command.args(&TRAIN[1..]).args(TOO_LARGE).current_dir(&folder);
        let place = [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "127.0.0.1")];
        command.envs(place).env("MASTER_PORT", &port).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let ranks = ["0", "1", "2"].map(start);
    let said = ranks.map(|rank| {
        let output = finish(rank);
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        stderr(&output)
    });
    assert!(said[0].contains("this run does not fit: 3 rank(s) need"), "{}", said[0]);
    for other in &said[1..] {
        assert_eq!(other.trim(), "error: the run does not start: rank 0 says why");
    }
}

/// A rank of a job of two, as MPI's variables call it.
fn rank_of_two(rank: &str, folder: &Path, port: &str) -> Command {
    let mut command = binary();
    command.args(&TRAIN[1..]).current_dir(folder).stdin(Stdio::null());
    let place = [("OMPI_COMM_WORLD_RANK", rank), ("OMPI_COMM_WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")];
    command.envs(place).envs([("OMPI_COMM_WORLD_LOCAL_RANK", rank), ("OMPI_COMM_WORLD_LOCAL_SIZE", "2")]);
    command.env("MASTER_PORT", port);
    command
}

fn free_port() -> String {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string()
}

#[test]
fn a_rank_that_does_not_come_is_named_while_the_others_wait() {
    let folder = workplace();
    for (here, waits_for) in
        [("0", "waiting for rank 1 of 2 since "), ("1", "rank 1 looks for rank 0 at 127.0.0.1:")]
    {
        let said = folder.path().join(format!("said-{here}"));
        let file = std::fs::File::create(&said).unwrap();
        let mut rank = rank_of_two(here, folder.path(), &free_port())
            .env("DEEPSPEED_TIMEOUT", "1")
            .stdout(Stdio::null())
            .stderr(file)
            .spawn()
            .unwrap();
        wait_until("a word about the rank that is missing", || {
            std::fs::read_to_string(&said).unwrap().contains(waits_for)
        });
        rank.kill().unwrap();
        rank.wait().unwrap();
    }
}

#[test]
fn another_number_of_ranks_than_the_launcher_started_is_refused() {
    let folder = workplace();
    let output = output_of(rank_of_two("0", folder.path(), &free_port()).args(["-n", "3"]));
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("-n 3: a launcher has started 2 rank(s)"), "{}", stderr(&output));
}

#[test]
fn a_rank_with_another_ds_config_is_told_which_key_differs() {
    let folder = workplace();
    let port = free_port();
    let start = |rank: &str, more: &[&str]| {
        let mut command = rank_of_two(rank, folder.path(), &port);
        command.args(more).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let ranks = [start("0", &[]), start("1", &["--set", "zero_optimization.stage=1"])];
    let said = ranks.map(|rank| {
        let output = finish(rank);
        assert!(!output.status.success());
        stderr(&output)
    });
    assert!(said[1].contains("ds_config.zero_optimization.stage is 1 here and 2 there"), "{said:?}");
}

#[test]
fn ranks_leave_when_who_started_them_is_killed() {
    let folder = workplace();
    // More steps than it will make.
    let recipe = std::fs::read_to_string(folder.path().join("recipe.toml")).unwrap();
    let recipe = recipe.replace(&format!("steps = {STEPS}"), "steps = 1000000");
    std::fs::write(folder.path().join("recipe.toml"), recipe + "\n[save]\n").unwrap();
    let port = free_port();
    // A shell stands for mpirun: it starts ranks and waits for them.
    let script = format!(
        "for rank in 0 1; do OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_LOCAL_RANK=$rank {} > out-$rank 2> err-$rank & \
         echo $! > pid-$rank; done; wait",
        TRAIN.join(" ")
    );
    let mut starter = Command::new("sh");
    take_signals(&mut starter).args(["-c", &script]).current_dir(&folder);
    starter.envs([("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "2")]);
    starter.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)]).stdin(Stdio::null());
    let mut starter = starter.spawn().unwrap();
    let log = folder.path().join("run/log.jsonl");
    wait_until("a step", || std::fs::read_to_string(&log).is_ok_and(|log| log.lines().count() > 0));
    let pids = [0, 1].map(|rank| {
        std::fs::read_to_string(folder.path().join(format!("pid-{rank}"))).unwrap().trim().to_owned()
    });
    starter.kill().unwrap();
    starter.wait().unwrap();
    wait_until("the ranks to leave", || !pids.iter().any(|pid| is_running(pid)));
    // The rank that notices it first has all leave.
    let said =
        ["err-0", "err-1"].map(|name| std::fs::read_to_string(folder.path().join(name)).unwrap()).concat();
    assert!(said.contains("which started this rank, is gone") && said.contains("--resume"), "{said}");
    let saved = std::fs::read_dir(folder.path().join("run/checkpoints")).unwrap().count();
    assert!(saved > 0, "nothing was saved");
    // Who reads the run's folder and not the ranks' output learns it too.
    let outcome = std::fs::read_to_string(folder.path().join("run/outcome.json")).unwrap();
    assert!(
        outcome.contains("\"failed\"") && outcome.contains("is gone: the run saves and ends"),
        "{outcome}"
    );
    let report = std::fs::read_to_string(folder.path().join("run/report.html")).unwrap();
    assert!(report.contains("is gone: the run saves and ends"), "the report does not say why");
}

#[test]
fn ranks_that_a_signal_ends_while_they_meet_leave_no_file_behind() {
    let folder = workplace();
    let (port, temporary) = (free_port(), folder.path().join("tmp"));
    std::fs::create_dir(&temporary).unwrap();
    let left = || -> Vec<String> {
        let own = std::fs::read_dir(&temporary).unwrap().map(|entry| entry.unwrap().path());
        let inside = own.flat_map(|own| std::fs::read_dir(own).unwrap());
        let names = inside.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.starts_with("meeting-")).collect()
    };
    // Ranks of our own launcher, which knows what the codes mean, give that of a run that has stopped.
    for (signal, code) in
        [(libc::SIGTERM, None), (libc::SIGINT, None), (libc::SIGTERM, Some(75)), (libc::SIGINT, Some(130))]
    {
        // Rank 1 never comes.
        let mut command = rank_of_two("0", folder.path(), &port);
        take_signals(&mut command)
            .env("TMPDIR", &temporary)
            .env("DEEPSPEED_TIMEOUT", "1")
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        if code.is_some() {
            command.env("FERROSPEED_TRAIN_LOOKED_AHEAD", "1");
        }
        let mut rank = command.spawn().unwrap();
        wait_until("rank 0 to wait for others", || !left().is_empty());
        // SAFETY: the process is a child of this one that nobody has waited for.
        assert_eq!(unsafe { libc::kill(rank.id() as i32, signal) }, 0);
        let status = support::wait_for(&mut rank);
        match code {
            Some(code) => assert_eq!(status.code(), Some(code)),
            None => assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(signal)),
        }
        assert_eq!(left(), Vec::<String>::new());
    }
}

#[test]
fn a_folder_that_is_taken_is_bad_input_to_every_rank() {
    let folder = workplace();
    let run = folder.path().join("run");
    std::fs::create_dir(&run).unwrap();
    std::fs::write(run.join("log.jsonl"), "{}\n").unwrap();
    let port = free_port();
    let start = |rank: &str| {
        let mut command = rank_of_two(rank, folder.path(), &port);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    for rank in ["0", "1"].map(start) {
        let output = finish(rank);
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    }
}

#[test]
fn what_mpirun_passes_on_is_lines_and_no_drawing() {
    let Some(_alone) = openmpi() else { return };
    let folder = workplace();
    let output = output_of(mpirun("2").args(TRAIN).env("TERM", "xterm").current_dir(&folder));
    let said = stdout(&output) + &stderr(&output);
    assert!(output.status.success(), "{said}");
    assert!(!said.contains("\u{1b}["), "{said:?}");
    assert!(said.lines().filter(|line| line.contains("loss")).count() >= STEPS, "{said}");
}

#[test]
fn benchmarks_measure_on_the_ranks_of_mpirun() {
    let Some(_alone) = openmpi() else { return };
    let run = |words: &[&str]| -> Output { output_of(mpirun("2").arg(BINARY).arg("bench").args(words)) };
    let comm = ["comm", "--op", "barrier", "--size", "4KiB", "--dtype", "f32", "--memory", "staged"];
    let output = run(&[&comm[..], &["--case_ms", "1", "--json"]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(stdout(&output).lines().count(), 1, "{}", stdout(&output));
    let output = run(&["checkpoint"]);
    assert!(stderr(&output).contains("bench checkpoint starts its own ranks"), "{}", stderr(&output));
}

/// Slurm on this host alone, with all of its files in one folder; gone when dropped.
struct Slurm {
    folder: tempfile::TempDir,
}

impl Slurm {
    /// `None` where it cannot be started: its daemons want root.
    fn start() -> Option<Slurm> {
        // SAFETY: a system call without arguments that cannot fail.
        let is_root = unsafe { libc::geteuid() } == 0;
        let programs = ["munged", "slurmctld", "slurmd", "srun", "sinfo", "sbatch"];
        if !is_root || !programs.into_iter().all(in_path) {
            eprintln!("skipped: no Slurm here, or no root to start it");
            return None;
        }
        let slurm = Slurm { folder: tempfile::tempdir().unwrap() };
        let configuration = slurm.configuration();
        std::fs::write(slurm.path("slurm.conf"), configuration).unwrap();
        // Any 128 bytes do: nothing here is meant to be secret.
        std::fs::write(slurm.path("key"), [b'k'; 128]).unwrap();
        std::fs::set_permissions(slurm.path("key"), std::os::unix::fs::PermissionsExt::from_mode(0o600))
            .unwrap();
        let files =
            ["key-file=key", "socket=socket", "pid-file=munged.pid", "log-file=munged.log", "seed-file=seed"];
        let options = files.map(|file| {
            let (option, name) = file.split_once('=').unwrap();
            format!("--{option}={}", slurm.path(name).display())
        });
        slurm.run(Command::new("munged").arg("--force").args(options));
        slurm.run(&mut Command::new("slurmctld"));
        slurm.run(&mut Command::new("slurmd"));
        wait_until("the node to be ready", || {
            let output = output_of(slurm.with_configuration(Command::new("sinfo").args(["-h", "-o", "%T"])));
            stdout(&output).trim() == "idle"
        });
        Some(slurm)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn configuration(&self) -> String {
        let ports = [0; 2].map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
        let [control, node] = ports.map(|listener| listener.local_addr().unwrap().port());
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        let host = host.trim().split('.').next().unwrap_or_default();
        let folder = self.folder.path().display();
        format!(
            "ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={control}\nSlurmdPort={node}\n\
             AuthType=auth/munge\nAuthInfo=socket={folder}/socket,cred_expire=5\nSlurmUser=root\nSlurmdUser=root\n\
             StateSaveLocation={folder}\nSlurmdSpoolDir={folder}/spool\nSlurmctldPidFile={folder}/slurmctld.pid\n\
             SlurmdPidFile={folder}/slurmd.pid\nSlurmctldLogFile={folder}/slurmctld.log\n\
             SlurmdLogFile={folder}/slurmd.log\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n\
             MpiDefault=none\nReturnToService=2\nSelectType=select/linear\n\
             NodeName={host} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN\n\
             PartitionName=all Nodes={host} Default=YES State=UP\n"
        )
    }

    fn with_configuration<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.env("SLURM_CONF", self.path("slurm.conf"))
    }

    /// Starts a daemon, which goes into the background by itself.
    fn run(&self, command: &mut Command) {
        let output = output_of(take_signals(self.with_configuration(command)));
        assert!(output.status.success(), "{}", stderr(&output));
    }
}

impl Drop for Slurm {
    fn drop(&mut self) {
        for daemon in ["slurmd", "slurmctld", "munged"] {
            let pid = std::fs::read_to_string(self.path(&format!("{daemon}.pid"))).unwrap_or_default();
            if !pid.trim().is_empty() {
                let _ = Command::new("kill").arg(pid.trim()).status();
            }
        }
    }
}

#[test]
fn ranks_of_srun_are_one_job_and_a_batch_script_is_none() {
    let Some(slurm) = Slurm::start() else { return };
    let folder = workplace();
    let mut command = Command::new("srun");
    command.args(["--overcommit", "-n", "2"]).args(TRAIN);
    expect_one_job(slurm.with_configuration(&mut command), folder.path(), 2);
    let mut command = behind_launch("slurm", "--overcommit");
    expect_one_job(slurm.with_configuration(&mut command), folder.path(), 2);
    let start = || {
        let mut command = Command::new("srun");
        slurm.with_configuration(command.args(["--overcommit", "-n", "2"]).args(TRAIN));
        command
    };
    expect_replacement(start, folder.path());
    let mut command = Command::new("sbatch");
    command.args(["--wait", "--overcommit", "-n", "2", "-o", "said", "--wrap"]).arg(TRAIN.join(" "));
    let output = output_of(slurm.with_configuration(&mut command).current_dir(&folder));
    let said = std::fs::read_to_string(folder.path().join("said")).unwrap_or_default();
    assert!(output.status.success() && said.contains("finished"), "{said}{}", stderr(&output));
}

/// The script that is written for `sbatch`, in Slurm's own hands: told that its time is nearly over it has the run saved, and begun again
/// by the queue it goes on.
fn expect_to_be_begun_again(slurm: &Slurm, more: &[&str]) {
    let folder = workplace();
    let mut writing = binary();
    writing.args(["launch", "--write", "slurm", "-n", "2", "--no_gpus"]).args(more);
    writing.args(["--launcher_args", "--overcommit --output=said", "--"]).args(TRAIN);
    let written = output_of(writing.args(["--set", "steps=400"]).current_dir(&folder));
    assert!(written.status.success(), "{}", stderr(&written));
    std::fs::write(folder.path().join("job.sh"), &written.stdout).unwrap();
    let mut submit = Command::new("sbatch");
    let submit = slurm.with_configuration(submit.args(["--parsable", "job.sh"])).current_dir(&folder);
    let submitted = output_of(submit.env("FERROSPEED_THREADS", "1"));
    assert!(submitted.status.success(), "{}", stderr(&submitted));
    let job = stdout(&submitted).trim().to_owned();
    let said = || std::fs::read_to_string(folder.path().join("said")).unwrap_or_default();
    let log = folder.path().join("run/log.jsonl");
    let steps = || std::fs::read_to_string(&log).unwrap_or_default().lines().count();
    wait_until("the first steps of the job", || steps() > 20);
    // As Slurm does by `--signal=B:USR2@120`.
    let mut notice = Command::new("scancel");
    let notice = output_of(slurm.with_configuration(notice.args(["--batch", "--signal=USR2", &job])));
    assert!(notice.status.success(), "{}", stderr(&notice));
    wait_until("the job to save and leave", || said().contains("stopped by request after"));
    let saved = steps();
    assert!(saved < 400, "{}", said());
    wait_until("the job to be begun again", || said().contains(&format!("going on after step {saved}")));
    wait_until("the job to finish", || said().contains("finished 400 steps"));
    assert_eq!(steps(), 400);
}

#[test]
fn a_job_that_was_written_for_slurm_saves_at_its_notice_and_goes_on_when_it_is_begun_again() {
    let Some(slurm) = Slurm::start() else { return };
    expect_to_be_begun_again(&slurm, &[]);
    expect_to_be_begun_again(&slurm, &["--elastic_training", "--min_nodes", "1", "--max_nodes", "1"]);
}

/// A pod of Kubeflow's trainer, or of the manifests that are written, runs `launch` with torchrun's variables.
#[test]
fn pods_with_torchruns_variables_are_nodes_of_one_job() {
    let folder = workplace();
    let port = free_port();
    let pod = |index: &str| {
        let mut command = binary();
        command.args(["launch", "--"]).args(TRAIN).current_dir(&folder).stdin(Stdio::null());
        let place = [("PET_NNODES", "2"), ("PET_NPROC_PER_NODE", "1"), ("JOB_COMPLETION_INDEX", index)];
        command.envs(place).env("PET_MASTER_ADDR", "127.0.0.1").env("PET_MASTER_PORT", &port);
        command.env("FERROSPEED_JOB_TOKEN", "0123456789abcdef").stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let pods = ["0", "1"].map(pod).map(finish);
    let said = pods.iter().map(|pod| format!("{}{}", stdout(pod), stderr(pod))).collect::<String>();
    assert!(pods.iter().all(|pod| pod.status.success()), "{said}");
    assert!(said.contains("2 ranks") && said.contains(&format!("finished {STEPS} steps")), "{said}");
    let mut alone = binary();
    let alone = output_of(alone.args(["launch", "--", "true"]).env("PET_NNODES", "2"));
    assert!(stderr(&alone).contains("PET_NODE_RANK is missing"), "{}", stderr(&alone));
}

/// Runs two ranks, each in a folder of its own, as hosts with disks of their own have them; what both said of their failure.
fn on_two_hosts(hosts: [&Path; 2], more: &[&str]) -> [String; 2] {
    let port = free_port();
    let start = |rank: usize| {
        let mut command = rank_of_two(&rank.to_string(), hosts[rank], &port);
        command.args(more).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    [start(0), start(1)].map(|rank| {
        let output = finish(rank);
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        stderr(&output)
    })
}

#[test]
fn ranks_whose_files_differ_do_not_train_together() {
    let hosts = [workplace(), workplace()];
    let [first, second] = [hosts[0].path(), hosts[1].path()];
    let made = ["--preset", "llama", "--layers", "1", "--width", "64", "--heads", "2", "--sequence", "64"];
    for host in &hosts {
        let output = output_of(binary().args(["model", "init", "model"]).args(made).current_dir(host));
        assert!(output.status.success(), "{}", stderr(&output));
        let recipe = std::fs::read_to_string(host.path().join("recipe.toml")).unwrap();
        let kept =
            recipe.lines().filter(|line| !["layers", "width", "heads"].iter().any(|key| line.contains(key)));
        let kept: Vec<&str> = kept.collect();
        let recipe = kept.join("\n").replace("preset = \"gpt2\"", "path = \"model\"");
        std::fs::write(host.path().join("recipe.toml"), recipe).unwrap();
    }
    let edit = |name: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let path = second.join(name);
        let before = std::fs::read(&path).unwrap();
        let mut bytes = before.clone();
        change(&mut bytes);
        assert_ne!(bytes, before);
        std::fs::write(&path, bytes).unwrap();
        (path, before)
    };
    let rope = |bytes: &mut Vec<u8>| {
        let mut config: serde_json::Value = serde_json::from_slice(bytes).unwrap();
        config["rope_theta"] = 5e5.into();
        *bytes = serde_json::to_vec(&config).unwrap();
    };
    let last = |bytes: &mut Vec<u8>| *bytes.last_mut().unwrap() ^= 1;
    let word = |bytes: &mut Vec<u8>| bytes[4] = b'Q';
    let cases: [(&str, &str, &dyn Fn(&mut Vec<u8>)); 3] = [
        ("model/config.json", "model.config.rope_theta is 500000.0 there", &rope),
        ("model/model.safetensors", "model.path is ", &last),
        ("text.txt", "data.train.checksum is ", &word),
    ];
    for (name, told, change) in cases {
        let (path, before) = edit(name, change);
        for said in on_two_hosts([first, second], &[]) {
            assert!(said.contains("rank 1 was told something else than rank 0: "), "{name}: {said}");
            assert!(said.contains(told), "{name}: {said}");
        }
        std::fs::write(path, before).unwrap();
    }

    // Runs of their own: what lies under one name is another checkpoint on each.
    for (host, seed) in [(first, "seed=1"), (second, "seed=2")] {
        let train = [&TRAIN[1..], &["--set", seed, "--set", "save.every=5"]].concat();
        let output = output_of(binary().args(train).current_dir(host));
        assert!(output.status.success(), "{}", stderr(&output));
    }
    for said in on_two_hosts([first, second], &["--resume", "--set", "seed=1", "--set", "steps=9"]) {
        assert!(said.contains("rank 1 finds another checkpoint here than rank 0"), "{said}");
    }
}

#[test]
fn ranks_with_other_kernels_do_not_train_together() {
    let folder = workplace();
    let port = free_port();
    let start = |rank: &str, kernels: &str| {
        let mut command = rank_of_two(rank, folder.path(), &port);
        command.env("FERROSPEED_CPU_KERNELS", kernels).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    for rank in [start("0", ""), start("1", "portable")] {
        let output = finish(rank);
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        assert!(
            stderr(&output).contains("kernels (FERROSPEED_CPU_KERNELS) is \"portable\" there"),
            "{}",
            stderr(&output)
        );
    }
}

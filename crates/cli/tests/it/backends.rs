//! Jobs on many hosts, with stand-ins for the backends that run every "host" on this one.

use super::support;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use super::support::{PATIENCE, is_running, output_of, stderr, stdout, wait_until};

/// Does what pdsh does with `-w`, `%n` and `%%`, calls ssh for each host, says which one failed, and waits for all.
const PDSH: &str = r#"#!/bin/bash
while [ "$1" != -w ]; do [ "$1" = -S ] || { echo "pdsh: invalid option $1" >&2; exit 1; }; shift; [ "$1" != -f ] || shift 2; done
hosts=$2; shift 2
node=0; pids=
for host in $(echo "$hosts" | tr , ' '); do
  line=$(for word in "$@"; do printf '%s ' "$word"; done | sed "s/%%/\x01/g; s/%n/$node/g; s/\x01/%/g")
  (ssh $host "$line"; code=$?; [ $code = 0 ] || echo "pdsh@here: $host: ssh exited with exit code $code" >&2; exit $code) & pids="$pids $!"
  node=$((node + 1))
done
code=0
for pid in $pids; do
  wait $pid; ended=$?
  [ $ended = 0 ] || code=$ended
done
exit $code
"#;

/// Hands the command line to a shell of this host, as sshd would: without the caller's environment.
const SSH: &str = r#"#!/bin/bash
while :; do case $1 in -o|-p|-l|-i) shift 2;; -*) shift;; *) break;; esac; done
shift
unset FERROSPEED_JOB_TOKEN
exec sh -c "$*"
"#;

/// A cluster that stops its hosts does so by their names, so each test that fails has names of its own.
pub(super) struct Cluster {
    folder: tempfile::TempDir,
}

impl Cluster {
    pub(super) fn new(hostfile: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("hosts"), hostfile).unwrap();
        let cluster = Cluster { folder };
        cluster.install("pdsh", PDSH);
        cluster.install("ssh", SSH);
        cluster
    }

    fn install(&self, name: &str, script: &str) {
        let path = self.folder.path().join(name);
        std::fs::write(&path, script).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }

    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// `ferrospeed launch` on this cluster.
    pub(super) fn launch(&self, arguments: &[&str]) -> Command {
        let mut command = support::binary();
        let inherited = std::env::var("PATH").unwrap_or_default();
        command
            .args(["launch", "--no_ssh_check", "--master_addr", "127.0.0.1", "-H"])
            .arg(self.path().join("hosts"))
            .args(arguments)
            .env("PATH", format!("{}:{inherited}", self.path().display()))
            .env("HOME", self.path())
            .current_dir(self.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }
}

fn sorted_lines(text: &str) -> Vec<String> {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

#[test]
fn ranks_of_uneven_hosts_are_numbered_host_by_host_and_arguments_arrive_as_written() {
    let cluster = Cluster::new("node-a slots=2\nnode-b slots=3\n");
    let hostile = "a \"b\" $HOME `id` 100% %h %n ;'";
    let script = "echo \"$RANK $LOCAL_RANK $CROSS_RANK/$CROSS_SIZE $LOCAL_SIZE $WORLD_SIZE <$1>\"";
    let output = output_of(&mut cluster.launch(&["--", "sh", "-c", script, "sh", hostile]));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let expected: Vec<String> = [(0, 0, 0, 2), (1, 1, 0, 2), (2, 0, 1, 3), (3, 1, 1, 3), (4, 2, 1, 3)]
        .iter()
        .map(|(rank, local, node, size)| {
            format!("[rank {rank}] {rank} {local} {node}/2 {size} 5 <{hostile}>")
        })
        .collect();
    assert_eq!(sorted_lines(&stdout(&output)), expected);
}

#[test]
fn every_host_gets_the_same_token_the_exports_and_the_env_file() {
    let cluster = Cluster::new("node-a slots=1\nnode-b slots=1\n");
    std::fs::write(cluster.path().join(".deepspeed_env"), "# exported\nFROM_FILE=it's \"quoted\"\n").unwrap();
    let script = "echo \"$FERROSPEED_JOB_TOKEN $UCX_ODD $FROM_FILE\"; pwd";
    let output = output_of(cluster.launch(&["--", "sh", "-c", script]).env("UCX_ODD", "a;b $c"));
    let shown = stdout(&output).replace("[rank 0] ", "").replace("[rank 1] ", "");
    let mut lines = sorted_lines(&shown);
    lines.dedup();
    assert_eq!(lines.len(), 2, "both hosts say the same: {lines:?} {}", stderr(&output));
    let folder = cluster.path().display().to_string();
    assert!(lines.contains(&folder), "ranks start in the folder of the launch: {lines:?}");
    let line = lines.iter().find(|line| **line != folder).unwrap();
    let (token, rest) = line.split_once(' ').unwrap();
    assert_eq!((token.len(), rest), (32, "a;b $c it's \"quoted\""));
}

/// Says whether the job's token stands on anybody's command line; the pattern itself stands on none.
const LOOK_FOR_TOKEN: &str = r#"case "$(cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\0' ' ')" in
*"$FERROSPEED_JOB_TOKEN"*) echo leaked;; *) echo "hidden ${#FERROSPEED_JOB_TOKEN}";; esac"#;

#[test]
fn the_token_stands_on_no_command_line_and_no_file_of_it_stays() {
    let cluster = Cluster::new("node-a slots=1\nnode-b slots=1\n");
    std::fs::write(cluster.path().join("look"), LOOK_FOR_TOKEN).unwrap();
    let command = &mut cluster.launch(&["--", "sh", "./look"]);
    let output = output_of(command.env("TMPDIR", cluster.path()));
    let expected = ["[rank 0] hidden 32", "[rank 1] hidden 32"];
    assert_eq!(sorted_lines(&stdout(&output)), expected, "{}", stderr(&output));
    // SAFETY: a system call without arguments that cannot fail.
    let private = cluster.path().join(format!("ferrospeed-{}", unsafe { libc::geteuid() }));
    assert_eq!(std::fs::read_dir(private).unwrap().count(), 0);
}

#[test]
fn debians_pdsh_starts_every_host_and_a_failed_one_stops_the_others() {
    let cluster = Cluster::new("real-a slots=1\nreal-b slots=1\n");
    std::fs::remove_file(cluster.path().join("pdsh")).unwrap();
    if !support::in_path("pdsh") {
        return eprintln!("skipped: no pdsh here");
    }
    std::fs::write(cluster.path().join("look"), LOOK_FOR_TOKEN).unwrap();
    let output = output_of(&mut cluster.launch(&["--", "sh", "./look"]));
    let expected = ["real-a: [rank 0] hidden 32", "real-b: [rank 1] hidden 32"];
    assert_eq!(sorted_lines(&stdout(&output)), expected, "{}", stderr(&output));

    let script = "echo $$ > pid.$RANK; while [ ! -e pid.0 ]; do sleep 0.02; done; [ $RANK = 0 ] || exit 21; exec sleep 600";
    let output = output_of(&mut cluster.launch(&["--", "sh", "-c", script]));
    assert_eq!(output.status.code(), Some(21), "{}", stderr(&output));
    let other = std::fs::read_to_string(cluster.path().join("pid.0")).unwrap();
    wait_until("the rank on the other host to be gone", || !is_running(other.trim()));
}

#[test]
fn rank_logs_and_core_binding_reach_the_hosts() {
    let cluster = Cluster::new("node-a slots=1\nnode-b slots=1\n");
    let options = ["--log-dir", "logs", "--bind_cores_to_rank", "--bind_core_list", "0"];
    let program = ["--", "sh", "-c", "echo $OMP_NUM_THREADS"];
    let output = output_of(&mut cluster.launch(&[&options[..], &program[..]].concat()));
    assert_eq!(sorted_lines(&stdout(&output)), ["[rank 0] 1", "[rank 1] 1"], "{}", stderr(&output));
    assert_eq!(std::fs::read_dir(cluster.path().join("logs")).unwrap().count(), 2);
}

#[test]
fn a_failed_host_stops_the_others_and_its_exit_code_is_the_launchers() {
    let cluster = Cluster::new("failing-a slots=1\nfailing-b slots=1\n");
    let script = "echo $$ > pid.$RANK; while [ ! -e pid.0 ]; do sleep 0.02; done; [ $RANK = 0 ] || exit 21; exec sleep 600";
    let started = Instant::now();
    let output = output_of(&mut cluster.launch(&["--", "sh", "-c", script]));
    assert!(started.elapsed() < PATIENCE);
    assert_eq!(output.status.code(), Some(21));
    let other = std::fs::read_to_string(cluster.path().join("pid.0")).unwrap();
    wait_until("the rank on the other host to be gone", || !is_running(other.trim()));
    assert!(stderr(&output).contains("rank 1 on failing-b failed with exit code 21"), "{}", stderr(&output));
}

#[test]
fn interrupting_the_front_end_stops_every_host() {
    let cluster = Cluster::new("stopping-a slots=2\nstopping-b slots=1\n");
    let script = "echo $$ > pid.$RANK; exec sleep 600";
    let job = cluster.launch(&["--grace_s", "2", "--", "sh", "-c", script]).spawn().unwrap();
    let files: Vec<_> = (0..3).map(|rank| cluster.path().join(format!("pid.{rank}"))).collect();
    for file in &files {
        wait_until("a rank to start", || {
            std::fs::read_to_string(file).is_ok_and(|text| text.ends_with('\n'))
        });
    }
    let sent = Instant::now();
    let killed = Command::new("sh").args(["-c", &format!("kill -TERM {}", job.id())]).status().unwrap();
    assert!(killed.success());
    let output = support::finish(job);
    assert!(sent.elapsed() < PATIENCE);
    assert_eq!(output.status.code(), Some(143), "{}", stderr(&output));
    for file in &files {
        let pid = std::fs::read_to_string(file).unwrap();
        wait_until("every rank to be gone", || !is_running(pid.trim()));
    }
}

#[test]
fn a_backend_that_is_not_installed_is_named() {
    let cluster = Cluster::new("node-a slots=1\nnode-b slots=1\n");
    let output =
        output_of(cluster.launch(&["--launcher", "slurm", "--", "true"]).env("PATH", cluster.path()));
    assert_eq!(output.status.code(), Some(1));
    let expected = "launcher \"slurm\" is not installed: \"sinfo\" was not found in PATH";
    assert!(stderr(&output).contains(expected), "{}", stderr(&output));
}

#[test]
fn slurm_gets_hosts_by_name_and_the_meeting_point_by_environment() {
    let cluster = Cluster::new("node-a slots=2\nnode-b slots=2\nnode-c slots=2\n");
    cluster.install("sinfo", "#!/bin/sh\n");
    cluster.install(
        "srun",
        "#!/bin/sh\nprintf '%s\\n' \"$*\"; echo $MASTER_ADDR $MASTER_PORT ${#FERROSPEED_JOB_TOKEN}\n",
    );
    let output =
        output_of(&mut cluster.launch(&["--launcher", "slurm", "--exclude", "node-b", "--", "./train"]));
    let lines: Vec<String> = stdout(&output).lines().map(str::to_owned).collect();
    assert!(lines[0].starts_with("-n 4 --exclude node-b --export=ALL,"), "{lines:?}");
    assert_eq!(lines[1], "127.0.0.1 29500 32");
    let output = output_of(&mut cluster.launch(&[
        "--launcher",
        "slurm",
        "--include",
        "node-a:0@node-b",
        "--",
        "./train",
    ]));
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("cannot choose slots within a host"), "{}", stderr(&output));
}

#[test]
fn mvapich_gets_a_hostfile_that_does_not_stay() {
    let cluster = Cluster::new("node-a slots=2\nnode-b slots=2\n");
    cluster.install("mpiname", "#!/bin/sh\necho MVAPICH2-GDR 2.3\n");
    cluster.install("mpirun", "#!/bin/sh\necho $6; cat $6\n");
    let output =
        output_of(cluster.launch(&["--launcher", "mvapich", "--", "./train"]).env("TMPDIR", cluster.path()));
    let text = stdout(&output);
    let mut lines = text.lines();
    let path = lines.next().expect("the hostfile's path");
    assert_eq!(lines.collect::<Vec<_>>(), ["node-a", "node-b"], "{}", stderr(&output));
    assert!(!Path::new(path).exists());
}

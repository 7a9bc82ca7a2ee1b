//! [`LocalJob`] with real processes: what ranks see, and how a job ends.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use ferrospeed_launch::supervise::{OutputMode, SignalHandling, can_cage};
use ferrospeed_launch::{Ended, JobOutcome, LaunchError, LocalJob};
use ferrospeed_testkit::skip::skip;

/// How long a job of this file may take: far above what it needs, far below a hang.
const PATIENCE: Duration = Duration::from_secs(5);

/// A job of `sh -c script` that leaves the test process's signals alone.
fn shell_job(script: &str, ranks: u32, logs: &Path) -> LocalJob {
    LocalJob {
        log_dir: Some(logs.to_owned()),
        output: OutputMode::Hidden,
        signals: SignalHandling::LeaveAlone,
        ..LocalJob::new("sh", ["-c", script], ranks)
    }
}

fn log_of(rank: u32, logs: &Path) -> String {
    let suffix = format!("_rank{rank}.log");
    let entry = std::fs::read_dir(logs)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.to_string_lossy().ends_with(&suffix))
        .unwrap_or_else(|| panic!("no log of rank {rank}"));
    std::fs::read_to_string(entry).unwrap()
}

#[test]
fn four_ranks_see_their_environment() {
    let folder = tempfile::tempdir().unwrap();
    let script = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $LOCAL_SIZE $CROSS_RANK $CROSS_SIZE \
                  $MASTER_ADDR; echo $MASTER_PORT $FERROSPEED_JOB_TOKEN >&2";
    let outcome = shell_job(script, 4, folder.path()).run().unwrap();
    assert_eq!(outcome, JobOutcome::Succeeded);
    let mut meeting_points = std::collections::BTreeSet::new();
    for rank in 0..4 {
        let log = log_of(rank, folder.path());
        let (ranks, meeting_point): (Vec<&str>, Vec<&str>) =
            log.lines().partition(|line| line.ends_with("127.0.0.1"));
        assert_eq!(ranks, [format!("{rank} 4 {rank} 4 4 0 1 127.0.0.1")]);
        meeting_points.insert(meeting_point.join("\n"));
    }
    let shared = meeting_points.pop_first().unwrap();
    assert!(meeting_points.is_empty(), "every rank has the same port and token");
    let (port, token) = shared.split_once(' ').unwrap();
    assert!(port.parse::<u16>().unwrap() > 0);
    assert_eq!(token.len(), 32);
}

/// Between a program's own handlers and the supervisor's no signal is lost.
#[test]
fn a_job_that_was_told_to_stop_before_it_began_starts_no_rank() {
    let folder = tempfile::tempdir().unwrap();
    for (told, expected) in
        [([true, false], Some(libc::SIGINT)), ([false, true], Some(libc::SIGTERM)), ([false; 2], None)]
    {
        let flags = [libc::SIGINT, libc::SIGTERM].into_iter().zip(told.map(AtomicBool::new).map(Arc::new));
        let mut job = shell_job("touch $0.$RANK", 2, folder.path());
        let begun = folder.path().join("begun");
        job.args.push(begun.display().to_string());
        job.signals = SignalHandling::ForwardSince(flags.collect());
        let outcome = job.run().unwrap();
        match expected {
            Some(signal) => {
                assert_eq!(outcome, JobOutcome::Interrupted { signal, agreed_code: None, all_well: false });
            }
            None => assert_eq!(outcome, JobOutcome::Succeeded),
        }
        assert_eq!(begun.with_extension("1").exists(), expected.is_none());
    }
}

#[test]
fn the_first_failure_is_reported_and_the_others_are_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let script = "if [ $RANK = 1 ]; then echo about to fail; exit 7; fi; exec sleep 600";
    let started = Instant::now();
    let outcome = shell_job(script, 3, folder.path()).run().unwrap();
    assert!(started.elapsed() < PATIENCE);
    let JobOutcome::Failed(failure) = &outcome else { panic!("{outcome:?}") };
    assert_eq!((failure.rank, failure.ended), (Some(1), Ended::Code(7)));
    assert_eq!(failure.last_lines, ["about to fail"]);
    assert!(failure.log.as_ref().is_some_and(|log| log.exists()));
    assert_eq!(outcome.exit_code(), 7);
}

#[test]
fn ranks_that_ignore_sigterm_are_killed() {
    let folder = tempfile::tempdir().unwrap();
    let ready = folder.path().join("ready");
    let script = format!(
        "if [ $RANK = 0 ]; then while [ ! -e {0} ]; do sleep 0.02; done; exit 3; fi; \
         trap '' TERM; touch {0}; while :; do sleep 0.1; done",
        ready.display()
    );
    let started = Instant::now();
    let outcome = shell_job(&script, 2, &folder.path().join("logs")).run().unwrap();
    assert!(started.elapsed() < PATIENCE);
    assert_eq!(outcome.exit_code(), 3);
}

#[test]
fn a_killed_rank_is_decoded() {
    let folder = tempfile::tempdir().unwrap();
    let outcome = shell_job("[ $RANK = 2 ] && kill -9 $$; exec sleep 600", 3, folder.path()).run().unwrap();
    let JobOutcome::Failed(failure) = &outcome else { panic!("{outcome:?}") };
    assert_eq!((failure.rank, failure.ended, outcome.exit_code()), (Some(2), Ended::Signal(9), 137));
    assert!(failure.to_string().contains("was killed by SIGKILL, "));
}

#[test]
fn a_stopped_rank_is_named_beside_the_one_that_waited_for_it() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!(
        "if [ $RANK = 1 ]; then echo $$ > {0}/pid; exec sleep 600; fi; while [ ! -s {0}/pid ]; do sleep 0.01; done; \
         pid=$(cat {0}/pid); kill -STOP $pid; until grep -q '^State:.T' /proc/$pid/status; do sleep 0.01; done; exit 1",
        folder.path().display()
    );
    let outcome = shell_job(&script, 2, &folder.path().join("logs")).run().unwrap();
    let JobOutcome::Failed(failure) = &outcome else { panic!("{outcome:?}") };
    assert_eq!((failure.rank, failure.ended), (Some(0), Ended::Code(1)));
    let said = failure.to_string();
    assert!(said.starts_with("rank 1 on ") && said.contains("is stopped (SIGSTOP"), "{said}");
    assert!(said.contains("rank 0 waited for it and failed with exit code 1"), "{said}");
}

#[test]
fn a_killed_rank_is_blamed_though_another_exited_first() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!(
        "trap '' TERM; if [ $RANK = 0 ]; then touch {0}/exiting; exit 1; fi; \
         while [ ! -e {0}/exiting ]; do sleep 0.01; done; sleep 0.05; kill -9 $$",
        folder.path().display()
    );
    let outcome = shell_job(&script, 2, &folder.path().join("logs")).run().unwrap();
    let JobOutcome::Failed(failure) = &outcome else { panic!("{outcome:?}") };
    assert_eq!((failure.rank, failure.ended), (Some(1), Ended::Signal(9)));
}

#[test]
fn who_failed_by_itself_is_blamed_though_those_that_followed_it_were_gone_first() {
    let folder = tempfile::tempdir().unwrap();
    // The one that failed still writes down why, longer than its peers take, and longer than they may.
    for wait in ["0.5", "1.5"] {
        let logs = folder.path().join(wait);
        let script =
            format!("trap '' TERM; [ $RANK = 2 ] || exit $FERROSPEED_FOLLOWER_EXIT; sleep {wait}; exit 1");
        let outcome = shell_job(&script, 3, &logs).run().unwrap();
        let JobOutcome::Failed(failure) = &outcome else { panic!("{outcome:?}") };
        assert_eq!(
            (failure.rank, failure.ended, outcome.exit_code()),
            (Some(2), Ended::Code(1), 1),
            "{wait}"
        );
    }
    let outcome = shell_job("exit $FERROSPEED_FOLLOWER_EXIT", 2, &folder.path().join("all")).run().unwrap();
    assert_eq!(outcome.exit_code(), 1, "the one that they followed was not seen: {outcome:?}");
}

#[test]
fn grandchildren_do_not_outlive_the_job_even_in_another_session() {
    let folder = tempfile::tempdir().unwrap();
    let pids = |rank: u32| folder.path().join(format!("pids{rank}"));
    let script = format!(
        "pids={}/pids$RANK; sleep 600 & echo $! >> $pids; setsid sh -c \"echo \\$\\$ >> $pids; exec sleep 600\" & \
         while [ $(wc -l < $pids) -lt 2 ]; do sleep 0.02; done",
        folder.path().display()
    );
    let job = shell_job(&script, 2, &folder.path().join("logs"));
    assert_eq!(job.run().unwrap(), JobOutcome::Succeeded);
    for rank in 0..2 {
        let started = std::fs::read_to_string(pids(rank)).unwrap();
        assert_eq!(started.lines().count(), 2);
        for pid in started.lines() {
            assert!(!is_running(pid), "process {pid} outlived the job");
        }
    }
}

#[test]
fn a_daemon_with_nothing_of_its_job_left_ends_with_the_job_where_there_is_a_control_group() {
    let above = match can_cage() {
        Ok(above) => above,
        Err(why) => return skip(&format!("no cgroup v2 that may be written ({why})")),
    };
    let folder = tempfile::tempdir().unwrap();
    let (pid, group) = (folder.path().join("pid"), folder.path().join("group"));
    let script = format!(
        "setsid env -i sh -c 'echo $$ > {0}.new; mv {0}.new {0}; exec sleep 600' & \
         while [ ! -e {0} ]; do sleep 0.02; done; sed -n 's/^0:://p' /proc/self/cgroup > {1}",
        pid.display(),
        group.display()
    );
    let job = shell_job(&script, 1, &folder.path().join("logs"));
    assert_eq!(job.run().unwrap(), JobOutcome::Succeeded);
    let daemon = std::fs::read_to_string(pid).unwrap();
    assert!(!is_running(daemon.trim()), "process {daemon} outlived the job");
    let group = std::fs::read_to_string(group).unwrap();
    let name = group.trim().rsplit('/').next().unwrap();
    assert!(name.starts_with("ferrospeed-"), "the rank was in {group}");
    assert!(!above.join(name).exists(), "{name} is still there");
}

fn is_running(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
}

#[test]
fn long_lines_and_binary_output_are_passed_on() {
    let folder = tempfile::tempdir().unwrap();
    let script = "head -c 200000 /dev/zero | tr '\\0' x; printf '\\n\\377\\376 end'; exit 1";
    let outcome = shell_job(script, 1, folder.path()).run().unwrap();
    let JobOutcome::Failed(failure) = outcome else { panic!() };
    assert!(failure.last_lines.iter().all(|line| line.len() <= 3 * 2048));
    assert!(failure.last_lines.last().unwrap().ends_with(" end"));
}

#[test]
fn a_program_that_is_not_there_names_the_rank_and_the_program() {
    let job = LocalJob {
        signals: SignalHandling::LeaveAlone,
        ..LocalJob::new("/does/not/exist", Vec::<String>::new(), 2)
    };
    let error = job.run().unwrap_err();
    assert!(matches!(error, LaunchError::Spawn { rank: 0, .. }));
    assert!(
        error.to_string().starts_with("rank 0: cannot start \"/does/not/exist\": No such file"),
        "{error}"
    );
}

#[test]
fn no_ranks_and_absurdly_many_are_refused() {
    for ranks in [0, u32::MAX] {
        let job = LocalJob {
            signals: SignalHandling::LeaveAlone,
            ..LocalJob::new("true", Vec::<String>::new(), ranks)
        };
        assert!(job.run().is_err());
    }
}

//! Runs what was planned: the ranks of this node, or a backend for many.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::error::LaunchError;
use crate::exports::Environment;
use crate::node::{Machine, NodeLaunch, dlts_variables};
use crate::plan::LaunchPlan;
use crate::supervise::{
    JobOutcome, Orders, OutputMode, ProcessSpec, ShownOutput, SignalHandling, Supervisor, SupervisorOptions,
};
use crate::{cores, surroundings};

/// How long ranks may take to go after a forwarded signal, unless told otherwise: time for a checkpoint.
pub const DEFAULT_INTERRUPT_GRACE: Duration = Duration::from_secs(30);

const RESTART_DELAY: Duration = Duration::from_secs(1);
const DLTS_POD_FILE: &str = "/dlts-runtime/env/pod.env";

/// How ranks are run, whatever they are.
#[derive(Debug, Clone)]
pub struct RunOptions {
    /// What becomes of the ranks' output.
    pub output: OutputMode,
    /// How long ranks may take to go after a forwarded signal.
    pub interrupt_grace: Duration,
    /// Whether this process's signals are forwarded.
    pub signals: SignalHandling,
}

impl Default for RunOptions {
    fn default() -> Self {
        RunOptions {
            output: OutputMode::Prefixed,
            interrupt_grace: DEFAULT_INTERRUPT_GRACE,
            signals: SignalHandling::Forward,
        }
    }
}

/// Runs the ranks of one node, again and again if the job is elastic.
///
/// Each failure that is followed by a restart goes to `on_restart` with the number of the restart.
pub fn run_node(
    node: &NodeLaunch,
    environment: Environment,
    job_token: String,
    options: &RunOptions,
    mut on_restart: impl FnMut(&crate::RankFailure, u32),
) -> Result<JobOutcome, LaunchError> {
    let mut machine = Machine {
        environment,
        python: surroundings::python(),
        job_token,
        topology: cores::Topology::read(),
        restart_count: 0,
    };
    machine.environment.extend(dlts_variables(&std::fs::read_to_string(DLTS_POD_FILE).unwrap_or_default()));
    let log_dir = node.log_dir.as_ref().map(|folder| make_log_dir(Path::new(folder))).transpose()?;
    let _pid_file = node.save_pid.map(PidFile::create).transpose()?;
    let host = match node.host()? {
        "localhost" => surroundings::host_name(),
        host => host.to_owned(),
    };
    let supervisor = Supervisor::new(SupervisorOptions {
        host,
        log_dir,
        interrupt_grace: options.interrupt_grace,
        signals: options.signals.clone(),
        orders: Orders::default(),
    })?;
    let interrupted = |signal| JobOutcome::Interrupted { signal, agreed_code: None, all_well: false };
    if let Some(signal) = supervisor.pause(Duration::ZERO) {
        return Ok(interrupted(signal));
    }
    let started = timestamp(SystemTime::now());
    loop {
        let ranks = node.rank_specs(&machine)?;
        let specs: Vec<ProcessSpec> = ranks
            .into_iter()
            .map(|rank| {
                let log_name = log_name(&started, rank.rank, machine.restart_count);
                ProcessSpec::of_rank(rank, options.output, Some(log_name))
            })
            .collect();
        let outcome = supervisor.run(&specs)?;
        let restarts_left = node.elastic.is_some_and(|elastic| machine.restart_count < elastic.max_restarts);
        match &outcome {
            JobOutcome::Failed(failure) if restarts_left => {
                machine.restart_count += 1;
                on_restart(failure, machine.restart_count);
                if let Some(signal) = supervisor.pause(RESTART_DELAY) {
                    return Ok(interrupted(signal));
                }
            }
            _ => return Ok(outcome),
        }
    }
}

/// Runs a backend's command.
pub fn run_backend(
    plan: &LaunchPlan,
    label: &str,
    job_token: &str,
    options: &RunOptions,
) -> Result<JobOutcome, LaunchError> {
    if let Some(handover) = &plan.handover {
        handover.deliver(job_token)?;
    }
    let _files = plan
        .files
        .iter()
        .map(|(path, text)| ScratchFile::write(path, text))
        .collect::<Result<Vec<_>, _>>()?;
    let mut environment = surroundings::environment();
    environment.retain(|name, _| !plan.environment_removed.contains(name));
    environment.extend(plan.environment_set.clone());
    let supervisor = Supervisor::new(SupervisorOptions {
        host: surroundings::host_name(),
        log_dir: None,
        interrupt_grace: options.interrupt_grace,
        signals: options.signals.clone(),
        orders: Orders::default(),
    })?;
    let outcome = supervisor.run(&[ProcessSpec {
        label: label.to_owned(),
        rank: None,
        output: ShownOutput::Prefixed(String::new()),
        log_name: None,
        command: plan.command.clone(),
        environment: environment.clone(),
        binding: None,
        // pdsh answers a first SIGINT with a list of hosts; every backend understands SIGTERM.
        stop_signal: Some(libc::SIGTERM),
        complaint: plan.complaint,
    }])?;
    if let (JobOutcome::Succeeded, _) | (_, None) = (&outcome, &plan.remote_stop) {
        return Ok(outcome);
    }
    if let Some((program, arguments)) = plan.remote_stop.as_ref().and_then(|words| words.split_first()) {
        let mut stop = Command::new(program);
        stop.args(arguments)
            .envs(&environment)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        // Node launchers that are already gone make this fail; the job's outcome is known either way.
        let _ = stop.status();
    }
    Ok(outcome)
}

pub(crate) fn make_log_dir(folder: &Path) -> Result<PathBuf, LaunchError> {
    let refuse = |source| LaunchError::File { action: "create log folder", path: folder.to_owned(), source };
    ferrospeed_files::create_folder(folder).map_err(refuse)?;
    Ok(folder.to_owned())
}

pub(crate) fn log_name(started: &str, rank: u32, restart: u32) -> String {
    match restart {
        0 => format!("{started}_rank{rank}.log"),
        _ => format!("{started}_rank{rank}_restart{restart}.log"),
    }
}

/// `YYYYmmddHHMMSS` in UTC.
pub(crate) fn timestamp(now: SystemTime) -> String {
    let seconds = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let (days, second_of_day) = (seconds / 86_400, seconds % 86_400);
    // Counting years from March puts the leap day last: Hinnant, "chrono-compatible low-level date algorithms".
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (second_of_day / 3_600, second_of_day / 60 % 60, second_of_day % 60);
    format!("{year:04}{month:02}{day:02}{hour:02}{minute:02}{second:02}")
}

/// The node launcher's pid in a file named after the front-end's, removed when the job ends.
struct PidFile {
    _file: ScratchFile,
}

impl PidFile {
    fn create(front_end_pid: u32) -> Result<Self, LaunchError> {
        let path = std::env::temp_dir().join(format!("{front_end_pid}.ferrospeed"));
        Ok(PidFile { _file: ScratchFile::write(path, &format!("{}\n", std::process::id()))? })
    }
}

/// A new file, removed when dropped.
struct ScratchFile(PathBuf);

impl ScratchFile {
    fn write(path: impl Into<PathBuf>, text: &str) -> Result<Self, LaunchError> {
        let path = path.into();
        // `create_new` does not follow what someone else may have put at a name they could guess.
        let opened = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        match opened.and_then(|mut file| file.write_all(text.as_bytes())) {
            Ok(()) => Ok(ScratchFile(path)),
            Err(source) => Err(LaunchError::File { action: "create", path, source }),
        }
    }
}

impl Drop for ScratchFile {
    fn drop(&mut self) {
        // Whoever removed it first did the same.
        let _ = std::fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_know_leap_years() {
        let at = |seconds| timestamp(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "19700101000000");
        assert_eq!(at(951_782_399), "20000228235959");
        assert_eq!(at(951_782_400), "20000229000000");
        assert_eq!(at(1_709_251_199), "20240229235959");
        assert_eq!(at(1_735_689_600), "20250101000000");
    }

    #[test]
    fn a_scratch_file_does_not_overwrite_and_does_not_stay() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        let file = ScratchFile::write(&path, "x").unwrap();
        assert!(ScratchFile::write(&path, "y").is_err());
        drop(file);
        assert!(!path.exists());
    }
}

//! A run's folder and its fixed layout.
//!
//! | path | content |
//! | --- | --- |
//! | `log.jsonl` | one object per step |
//! | `eval.jsonl` | one object per validation |
//! | `log.jsonl.damaged`, `eval.jsonl.damaged` | what a run that went on could not read all of |
//! | `config/recipe.toml`, `config/ds_config.json` | the resolved recipe and configuration: they reproduce the run |
//! | `config/run.json` | what the run is: sizes, ranks, steps; for `ferrospeed watch` |
//! | `checkpoints/` | what a run goes on from |
//! | `model/` | a Hugging Face directory: the tokenizer's files from the start, the trained weights at the end |
//! | `report.html` | charts and numbers of the run, in one page that needs nothing else |
//! | `events/` | the same for TensorBoard |
//! | `wandb/` | the same for Weights & Biases, to be uploaded later; with `wandb.enabled` in the ds_config |
//! | `sample.txt` | text the trained model wrote |
//! | `data/` | texts as tokens, where the recipe names texts; made once, of no use to a finished run |
//! | `logs/` | each rank's output |
//! | `outcome.json` | how the run ended: `finished`, `stopped` by request, or `failed` and why; not there while it goes |
//! | `.ferrospeed.lock` | held while a run writes here |
//! | `.replaced/` | what an earlier run has left, until the one that replaces it has taken a step |
//!
//! A folder belongs to one run at a time, and a new run never writes over an old one's log and weights unless it is told to. One
//! that is told to and fails before its first step gives them back.

use std::fs::{File, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use ferrospeed_models::directory::NewDirectory;
use ferrospeed_observe::civil_date;
use serde_json::{Value, json};

use crate::checkpoint::Ending;
use crate::error::{Result, TrainError};

/// Who holds a lock on it has the folder.
const LOCK_FILE: &str = ".ferrospeed.lock";

/// Where a run keeps its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunFolder(PathBuf);

impl RunFolder {
    /// The folder at this path; nothing is created yet.
    pub fn at(path: impl Into<PathBuf>) -> RunFolder {
        RunFolder(path.into())
    }

    /// The folder itself.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// `log.jsonl`
    pub fn log(&self) -> PathBuf {
        self.0.join("log.jsonl")
    }

    /// `eval.jsonl`
    pub fn eval(&self) -> PathBuf {
        self.0.join("eval.jsonl")
    }

    /// `config/`
    pub fn config(&self) -> PathBuf {
        self.0.join("config")
    }

    /// `checkpoints/`
    pub fn checkpoints(&self) -> PathBuf {
        self.0.join("checkpoints")
    }

    /// `config/run.json`
    pub fn about(&self) -> PathBuf {
        self.config().join("run.json")
    }

    /// `wandb/`
    pub fn wandb(&self) -> PathBuf {
        self.0.join("wandb")
    }

    /// `model/`
    pub fn model(&self) -> PathBuf {
        self.0.join("model")
    }

    /// `model-best/`, of a run that keeps the weights of its best validation.
    pub fn best_model(&self) -> PathBuf {
        self.0.join("model-best")
    }

    /// `samples.jsonl`, of a run that writes samples on its way.
    pub fn samples(&self) -> PathBuf {
        self.0.join("samples.jsonl")
    }

    /// Whether a run has left its weights.
    pub fn holds_weights(&self) -> bool {
        let named = ["model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"];
        named.iter().any(|name| self.model().join(name).exists())
    }

    /// `sample.txt`
    pub fn sample(&self) -> PathBuf {
        self.0.join("sample.txt")
    }

    /// `report.html`
    pub fn report(&self) -> PathBuf {
        self.0.join("report.html")
    }

    /// `profile.txt`, of a run with a `flops_profiler`.
    pub fn profile(&self) -> PathBuf {
        self.0.join("profile.txt")
    }

    /// `roofline.json`, of a run with a `flops_profiler`.
    pub fn roofline(&self) -> PathBuf {
        self.0.join("roofline.json")
    }

    /// `data/`
    pub fn data(&self) -> PathBuf {
        self.0.join("data")
    }

    /// `logs/`
    pub fn logs(&self) -> PathBuf {
        self.0.join("logs")
    }

    /// `outcome.json`
    pub fn outcome(&self) -> PathBuf {
        self.0.join("outcome.json")
    }

    /// Whether a run has left a log, weights or checkpoints here.
    pub fn holds_run(&self) -> bool {
        let has_entries = |path: &Path| std::fs::read_dir(path).is_ok_and(|mut list| list.next().is_some());
        self.log().exists() || has_entries(&self.model()) || has_entries(&self.checkpoints())
    }

    /// What a run has left here, in words; nothing where there is none.
    fn left_in_words(&self) -> String {
        let has_entries = |path: &Path| std::fs::read_dir(path).is_ok_and(|mut list| list.next().is_some());
        let parts = [
            (self.log().exists(), "log"),
            (has_entries(&self.checkpoints()), "checkpoints"),
            (self.holds_weights(), "weights"),
            (has_entries(&self.model()) && !self.holds_weights(), "tokenizer"),
        ];
        let words: Vec<&str> =
            parts.into_iter().filter_map(|(is_there, word)| is_there.then_some(word)).collect();
        match words.split_last() {
            Some((last, before)) if !before.is_empty() => format!("{} and {last}", before.join(", ")),
            _ => words.concat(),
        }
    }

    /// Refuses a folder that a run has now, or has left something in, to one that starts anew.
    pub fn check_unused(&self) -> Result<()> {
        self.check_free()?;
        match self.holds_run() {
            true => Err(TrainError::Used { dir: self.0.clone(), left: self.left_in_words() }),
            false => Ok(()),
        }
    }

    /// Refuses a folder that a run is writing into.
    pub fn check_free(&self) -> Result<()> {
        let path = self.0.join(LOCK_FILE);
        // Where there is no lock that can be looked at, nobody is known to have it.
        let Ok(file) = ferrospeed_files::open(&path) else { return Ok(()) };
        match file.try_lock_shared() {
            Err(TryLockError::WouldBlock) => Err(self.busy(file)),
            _ => Ok(()),
        }
    }

    fn busy(&self, lock: File) -> TrainError {
        let mut holder = String::new();
        let _ = lock.take(200).read_to_string(&mut holder);
        let holder = holder.chars().filter(|c| !c.is_control()).collect();
        TrainError::Busy { dir: self.0.clone(), holder }
    }

    /// The run in whose own files this folder lies, if it does: what that run removes or replaces would be another's.
    pub fn enclosing_run(&self) -> Option<RunFolder> {
        let inside = std::path::absolute(&self.0).ok()?;
        // Links on the way are followed as far as folders are there.
        let existing = inside.ancestors().find(|part| part.exists())?;
        let inside = existing.canonicalize().ok()?.join(inside.strip_prefix(existing).ok()?);
        let of_run = |part: &Path| {
            let run = RunFolder::at(part.parent()?);
            // A folder of checkpoints has such a lock too.
            let begun = run.log().exists() || run.about().exists() || run.is_being_replaced();
            let own = || {
                let kept = [run.data(), run.replaced(), run.moving()];
                run.left_by_run().into_iter().chain(kept).any(|own| own == part)
            };
            (begun && own()).then_some(run)
        };
        inside.ancestors().find_map(of_run)
    }

    /// This folder, or the first of `NAME-2`, `NAME-3` … that holds no run.
    pub fn or_next_free(&self) -> RunFolder {
        let numbered = |number: u32| {
            let mut name = self.0.file_name().unwrap_or_default().to_owned();
            name.push(format!("-{number}"));
            RunFolder(self.0.with_file_name(name))
        };
        let others = (2..10_000).map(numbered);
        std::iter::once(self.clone()).chain(others).find(|folder| !folder.holds_run()).unwrap_or(self.clone())
    }

    /// What a run leaves here; texts that became tokens are not among it.
    fn left_by_run(&self) -> [PathBuf; 15] {
        [
            self.log(),
            self.eval(),
            self.sample(),
            self.report(),
            self.profile(),
            self.roofline(),
            self.outcome(),
            self.config(),
            self.checkpoints(),
            self.model(),
            self.best_model(),
            self.samples(),
            self.wandb(),
            self.logs(),
            self.0.join("events"),
        ]
    }

    /// Where a run waits that is being replaced: all of it, and what else the folder holds is its successor's.
    fn replaced(&self) -> PathBuf {
        self.0.join(".replaced")
    }

    /// Where parts of a run are on their way there or back: what else the folder holds is the same run's.
    fn moving(&self) -> PathBuf {
        self.0.join(".moving")
    }

    /// Puts away what a run has left here, to be given up when another has taken its first step. Only who holds the lock may.
    pub fn set_aside(&self) -> Result<()> {
        self.settle()?;
        let moving = self.moving();
        std::fs::create_dir_all(&moving).map_err(TrainError::io(&moving))?;
        for path in self.left_by_run() {
            rename(&path, &moving)?;
        }
        // From here on, and not before, what is in the folder may be removed.
        std::fs::rename(&moving, self.replaced()).map_err(TrainError::io(&moving))
    }

    /// A run has taken its first step: the one before it is not needed any more.
    pub fn forget_replaced(&self) {
        let aside = self.replaced();
        if let Err(error) = remove(&aside) {
            tracing::warn!("what the earlier run has left stays behind: {error}");
        }
    }

    /// Whether a run waits for the first step of the one that replaces it.
    pub fn is_being_replaced(&self) -> bool {
        self.replaced().exists() || self.moving().exists()
    }

    /// After a run that replaced another has ended, in whatever way: gives the other back if no step was taken. Only who holds
    /// the lock may.
    pub fn settle(&self) -> Result<()> {
        let (aside, moving) = (self.replaced(), self.moving());
        if aside.exists() {
            if std::fs::metadata(self.log()).is_ok_and(|log| log.len() > 0) {
                return remove(&aside);
            }
            self.left_by_run().iter().try_for_each(|path| remove(path))?;
            std::fs::rename(&aside, &moving).map_err(TrainError::io(&aside))?;
        }
        if !moving.exists() {
            return Ok(());
        }
        for path in self.left_by_run() {
            if let Some(name) = path.file_name() {
                rename(&moving.join(name), &self.0)?;
            }
        }
        remove(&moving)
    }

    /// Takes the folder for one run.
    pub fn lock(&self) -> Result<FolderLock> {
        ferrospeed_files::create_folder(&self.0).map_err(TrainError::io(&self.0))?;
        for folder in self.folders() {
            ferrospeed_files::expect_own_links(&folder).map_err(TrainError::io(&folder))?;
        }
        let path = self.0.join(LOCK_FILE);
        let mut file = ferrospeed_files::open_lock(&path).map_err(TrainError::io(&path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(self.busy(file)),
            Err(TryLockError::Error(error)) => {
                tracing::warn!(
                    "{}: this file system has no locks ({error}); two runs must not share the folder",
                    self.0.display()
                );
            }
        }
        // Who holds it is for people; the lock itself is the system's.
        let written = file.set_len(0).and_then(|()| file.rewind());
        let _ = written.and_then(|()| write!(file, "process {}, since {}", std::process::id(), now()));
        self.remove_unfinished();
        Ok(FolderLock { _file: file })
    }

    /// All that a run may write in.
    fn folders(&self) -> [PathBuf; 7] {
        let events = self.0.join("events");
        [self.config(), self.logs(), self.checkpoints(), self.model(), self.data(), self.wandb(), events]
    }

    /// Removes files and weights that killed runs were writing here.
    fn remove_unfinished(&self) {
        for folder in [self.0.clone(), self.config(), self.model(), self.data()] {
            ferrospeed_files::unfinished::remove_files(&folder);
        }
        NewDirectory::sweep(&self.model());
    }

    /// Removes the folder where nothing is in it but the lock.
    pub fn remove_if_empty(&self, lock: FolderLock) {
        let is_lock = |entry: std::io::Result<std::fs::DirEntry>| {
            entry.is_ok_and(|entry| entry.file_name() == LOCK_FILE)
        };
        if std::fs::read_dir(&self.0).is_ok_and(|mut entries| entries.all(is_lock)) {
            let _ = std::fs::remove_file(self.0.join(LOCK_FILE));
            let _ = std::fs::remove_dir(&self.0);
        }
        drop(lock);
    }

    /// Whether a checkpoint is one of this run's own.
    pub(crate) fn holds_checkpoint(&self, path: &Path) -> bool {
        let own = self.checkpoints().canonicalize();
        own.is_ok_and(|own| path.canonicalize().is_ok_and(|path| path.starts_with(own)))
    }

    /// Writes down why a run failed, for those who watch it.
    pub fn note_failure(&self, why: &str) {
        self.note_outcome(&json!({ "state": "failed", "why": why }));
    }

    /// Writes down how a run ended that did not fail.
    pub(crate) fn note_ending(&self, ending: Ending, steps: u64) {
        let state = if ending == Ending::Finished { "finished" } else { "stopped" };
        self.note_outcome(&json!({ "state": state, "step": steps }));
    }

    fn note_outcome(&self, outcome: &Value) {
        let text = format!("{outcome:#}\n");
        if let Err(error) = ferrospeed_files::write(self.outcome(), text) {
            tracing::warn!("{}: {error}", self.outcome().display());
        }
    }

    /// Makes the folders that every run fills.
    pub fn create(&self) -> Result<()> {
        for folder in [self.config(), self.logs()] {
            std::fs::create_dir_all(&folder).map_err(TrainError::io(&folder))?;
        }
        Ok(())
    }
}

/// The right to write into a run's folder, from a run's start to its end. The system gives it back when the process dies.
#[derive(Debug)]
pub struct FolderLock {
    _file: File,
}

/// The time, for people.
fn now() -> String {
    let now_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let ((year, month, day), second) = (civil_date(now_s / 86_400), now_s % 86_400);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

/// Removes a file or a folder, if it is there.
fn remove(path: &Path) -> Result<()> {
    let outcome = match std::fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => std::fs::remove_dir_all(path),
        Ok(_) => std::fs::remove_file(path),
        Err(error) => Err(error),
    };
    unless_absent(outcome, path)
}

/// Moves a file or a folder, if it is there, into `folder`.
fn rename(path: &Path, folder: &Path) -> Result<()> {
    let name = path.file_name().unwrap_or_default();
    unless_absent(std::fs::rename(path, folder.join(name)), path)
}

fn unless_absent(outcome: std::io::Result<()>, path: &Path) -> Result<()> {
    match outcome {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(TrainError::io(path)(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_one_runs_at_a_time_and_says_whose() {
        let place = tempfile::tempdir().unwrap();
        let folder = RunFolder::at(place.path().join("run"));
        let first = folder.lock().unwrap();
        let error = folder.lock().unwrap_err().to_string();
        assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
        drop(first);
        folder.lock().expect("a lock that nobody holds any more is nobody's");
    }

    #[test]
    fn a_new_run_finds_a_folder_without_an_old_one() {
        let place = tempfile::tempdir().unwrap();
        let folder = RunFolder::at(place.path().join("run"));
        assert_eq!(folder.or_next_free(), folder);
        folder.create().unwrap();
        assert_eq!(folder.or_next_free(), folder, "empty folders are no run");
        std::fs::write(folder.log(), "").unwrap();
        assert!(folder.or_next_free().path().ends_with("run-2"));
        folder.set_aside().unwrap();
        assert_eq!(folder.or_next_free(), folder);
    }

    #[test]
    fn what_lies_among_a_runs_own_files_is_told() {
        let place = tempfile::tempdir().unwrap();
        let run = RunFolder::at(place.path().join("run"));
        let at = |name: &str| RunFolder::at(run.path().join(name));
        assert_eq!(at("checkpoints").enclosing_run(), None, "there is no run yet");
        run.create().unwrap();
        std::fs::write(run.about(), "{}").unwrap();
        for inside in ["checkpoints", "model", "data/deep/er", ".replaced/x", "logs"] {
            assert!(
                at(inside).enclosing_run().is_some_and(|found| found.path().ends_with("run")),
                "{inside}"
            );
        }
        for beside in ["", "another", "another/model", "../checkpoints"] {
            assert_eq!(at(beside).enclosing_run(), None, "{beside}");
        }
    }

    #[test]
    fn a_replaced_run_comes_back_unless_the_other_has_taken_a_step() {
        let place = tempfile::tempdir().unwrap();
        let folder = RunFolder::at(place.path().join("run"));
        let old = |text: &str| {
            folder.create().unwrap();
            std::fs::create_dir_all(folder.data()).unwrap();
            std::fs::create_dir_all(folder.model()).unwrap();
            std::fs::write(folder.log(), text).unwrap();
            std::fs::write(folder.model().join("weights"), text).unwrap();
        };
        let read = || std::fs::read_to_string(folder.model().join("weights")).ok();
        old("old");
        folder.set_aside().unwrap();
        assert!(folder.is_being_replaced() && !folder.holds_run() && folder.data().exists());
        // It fails, with an empty log and a model of its own begun.
        old("");
        folder.settle().unwrap();
        assert_eq!(read().as_deref(), Some("old"));
        assert!(!folder.is_being_replaced());
        // Killed, and replaced by yet another.
        folder.set_aside().unwrap();
        folder.set_aside().unwrap();
        folder.settle().unwrap();
        assert_eq!(read().as_deref(), Some("old"));
        // Killed with a part of it put aside, or back.
        for name in ["log.jsonl", "model"] {
            std::fs::create_dir_all(folder.moving()).unwrap();
            std::fs::rename(folder.path().join(name), folder.moving().join(name)).unwrap();
            assert!(folder.is_being_replaced());
            folder.settle().unwrap();
            assert_eq!(read().as_deref(), Some("old"), "{name} was on its way");
            assert_eq!(std::fs::read_to_string(folder.log()).unwrap(), "old");
        }
        // It takes a step.
        folder.set_aside().unwrap();
        old("new");
        folder.settle().unwrap();
        assert_eq!(read().as_deref(), Some("new"));
        assert!(!folder.is_being_replaced());
        folder.settle().unwrap();
        folder.forget_replaced();
        assert_eq!(read().as_deref(), Some("new"));
    }
}

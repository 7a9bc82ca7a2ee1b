//! Where a run goes on from, and where it may write.
//!
//! It goes on only when it was asked to: a folder that holds checkpoints is never trained over by a run that starts anew. Inside a
//! run's own folder goes on that run alone, from checkpoints of its own, and a finished one from its last step; from a checkpoint
//! of any other folder begins a run with a folder of its own.

use std::path::{Path, PathBuf};

use ferrospeed_checkpoint::deepspeed::Foreign;
use ferrospeed_checkpoint::manifest::MANIFEST_FILE;
use ferrospeed_checkpoint::{
    CheckpointError, Manifest, SetAside, candidates, list, resolve, resolve_any, set_aside,
};
use serde::{Deserialize, Serialize};

use crate::error::{Result, TrainError};
use crate::folder::RunFolder;

/// Where a run starts.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Resume {
    /// At the first step. Refused where the run's folder holds checkpoints.
    #[default]
    No,
    /// At the newest whole checkpoint of the run's folder; at the first step where there has never been one.
    Newest,
    /// At a checkpoint of the run's folder by its name, or at one of another folder.
    Named(String),
}

impl Resume {
    /// What `--resume VALUE` means.
    pub fn parse(text: &str) -> Resume {
        if text == "auto" { Resume::Newest } else { Resume::Named(text.to_owned()) }
    }

    /// Where the run of this name goes on from. Refused where it would write over a finished run, or mix two.
    pub fn find(&self, folder: &RunFolder, name: &str) -> Result<Starts> {
        let starts = self.look(folder)?;
        if *self == Resume::No {
            return Ok(starts);
        }
        if let Some((dir, tag)) = starts.candidates.first().filter(|(dir, _)| !folder.holds_checkpoint(dir)) {
            return match folder.holds_run() {
                true => Err(TrainError::NoFolderOfItsOwn {
                    dir: folder.path().to_path_buf(),
                    checkpoint: dir.join(tag),
                }),
                false => Ok(starts),
            };
        }
        match name_in(folder).filter(|found| folder.holds_run() && found != name) {
            Some(found) => {
                let dir = folder.path().to_path_buf();
                Err(TrainError::AnotherRun { dir, found, name: name.to_owned() })
            }
            None => starts.without_undoing(folder),
        }
    }

    /// Where to start from, wherever that is.
    fn look(&self, folder: &RunFolder) -> Result<Starts> {
        let own = folder.checkpoints();
        match self {
            Resume::No => match present(&own)? {
                Present::Nothing => Ok(Starts::default()),
                _ => Err(TrainError::Occupied { dir: own }),
            },
            Resume::Newest => match present(&own)? {
                Present::Nothing => Ok(Starts::default()),
                Present::Some => Starts::newest(&own),
            },
            Resume::Named(text) => {
                let (dir, tag) = named(text, &own)?;
                let notes = put_away(&dir, |aside| aside.tag == tag);
                Ok(Starts { candidates: vec![(dir, tag)], notes, ..Starts::default() })
            }
        }
    }

    /// The folder of the run of this name that is gone on with, where that or a checkpoint in it is named; `usual` is the folder
    /// in which names of checkpoints are looked for.
    pub fn home(&self, usual: &RunFolder, name: &str) -> Option<RunFolder> {
        let Resume::Named(text) = self else { return None };
        if is_plain_name(text) && usual.checkpoints().join(text).is_dir() {
            return None;
        }
        let given = Path::new(text);
        let runs = given.ancestors().take(3).map(|above| match above.as_os_str().is_empty() {
            true => RunFolder::at("."),
            false => RunFolder::at(above),
        });
        let is_within = |run: &RunFolder| run.path() == given || run.holds_checkpoint(given);
        runs.into_iter()
            .find(|run| is_within(run) && name_in(run).is_some_and(|found| found == name))
            .filter(|run| run.checkpoints().is_dir())
    }

    /// Whether the checkpoint is there and none of this folder's.
    pub fn is_elsewhere(&self, folder: &RunFolder) -> bool {
        let starts = if *self == Resume::No { Ok(Starts::default()) } else { self.look(folder) };
        starts.is_ok_and(|starts| starts.candidates.iter().any(|(dir, _)| !folder.holds_checkpoint(dir)))
    }
}

/// The checkpoints that a run may start from.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Starts {
    /// The folder and the name of each, the best first; none starts at the first step. The others are for when one
    /// turns out to be damaged.
    pub candidates: Vec<(PathBuf, String)>,
    /// What is not whole, with the reason.
    pub passed_over: Vec<String>,
    /// What saves that were cut off had put away.
    pub notes: Vec<String>,
    /// Why earlier checkpoints are no candidates, where that is so.
    pub withheld: Option<String>,
}

impl Starts {
    fn newest(dir: &Path) -> Result<Starts> {
        let (whole, broken) = candidates(dir)?;
        let passed_over: Vec<String> =
            broken.iter().map(|(tag, why)| format!("checkpoint '{tag}' is passed over: {why}")).collect();
        if whole.is_empty() {
            let why = format!("there is no whole checkpoint to go on from\n{}", passed_over.join("\n"));
            return Err(CheckpointError::NotFound { dir: dir.to_path_buf(), why }.into());
        }
        let candidates = whole.into_iter().map(|listed| (dir.to_path_buf(), listed.tag)).collect();
        Ok(Starts { candidates, passed_over, notes: put_away(dir, |_| true), withheld: None })
    }

    /// Leaves out, in a finished run's folder, what lies before its end: its log and its weights would be lost.
    fn without_undoing(mut self, folder: &RunFolder) -> Result<Starts> {
        let Some(finished) = finished_step(folder) else { return Ok(self) };
        let step_of = |(dir, tag): &(PathBuf, String)| {
            let manifest = Manifest::read(&resolve(dir, Some(tag)).ok()?.join(MANIFEST_FILE)).ok()?;
            Some(manifest.training.global_steps)
        };
        let is_before = |start: &(PathBuf, String)| step_of(start).is_some_and(|step| step < finished);
        let Some(earlier) = self.candidates.iter().find(|start| is_before(start)) else { return Ok(self) };
        let why = TrainError::Undoes {
            dir: folder.path().to_path_buf(),
            finished,
            checkpoint: earlier.0.join(&earlier.1),
            step: step_of(earlier).unwrap_or(0),
            damaged: self.passed_over.clone(),
        };
        self.withheld = Some(why.to_string());
        self.candidates.retain(|start| !is_before(start));
        if self.candidates.is_empty() { Err(why) } else { Ok(self) }
    }
}

/// The name of the run that a folder holds, as its recipe says.
fn name_in(folder: &RunFolder) -> Option<String> {
    /// A recipe is a page.
    const MAX_RECIPE_BYTES: u64 = 16 << 20;
    let recipe = ferrospeed_files::read_text(folder.config().join("recipe.toml"), MAX_RECIPE_BYTES).ok()?;
    Some(recipe.parse::<toml::Table>().ok()?.get("name")?.as_str()?.to_owned())
}

/// After which step the run in a folder came to its end, where it did.
pub(crate) fn finished_step(folder: &RunFolder) -> Option<u64> {
    /// A state and a reason.
    const MAX_OUTCOME_BYTES: u64 = 1 << 20;
    let text = ferrospeed_files::read(folder.outcome(), MAX_OUTCOME_BYTES).ok()?;
    let outcome: serde_json::Value = serde_json::from_slice(&text).ok()?;
    outcome["step"].as_u64().filter(|_| outcome["state"] == "finished")
}

/// What is to be said of checkpoints that saves have put away in a folder.
fn put_away(dir: &Path, is_meant: impl Fn(&SetAside) -> bool) -> Vec<String> {
    let found = set_aside(dir).unwrap_or_default();
    found.iter().filter(|aside| is_meant(aside)).map(SetAside::to_string).collect()
}

enum Present {
    Nothing,
    /// Complete or not: somebody saved here.
    Some,
}

/// Whether anybody ever saved into a folder. What a crash left unfinished does not count.
fn present(dir: &Path) -> Result<Present> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Present::Nothing),
        Err(error) => return Err(TrainError::io(dir)(error)),
    };
    for entry in entries {
        let entry = entry.map_err(TrainError::io(dir))?;
        if entry.path().is_dir() && !entry.file_name().as_encoded_bytes().starts_with(b".") {
            return Ok(Present::Some);
        }
    }
    // A crash between two renames leaves a whole one set aside.
    Ok(if list(dir)?.is_empty() { Present::Nothing } else { Present::Some })
}

fn newest(dir: &Path) -> Result<(PathBuf, String)> {
    split(&resolve_any(dir, None)?)
}

/// The folder and the name of a checkpoint; one that was set aside is found again by the name it had.
fn split(checkpoint: &Path) -> Result<(PathBuf, String)> {
    match (checkpoint.parent(), checkpoint.file_name().and_then(|name| name.to_str())) {
        (Some(dir), Some(name)) if name.starts_with('.') => {
            Ok((dir.to_path_buf(), Manifest::read(&checkpoint.join(MANIFEST_FILE))?.tag))
        }
        (Some(dir), Some(tag)) => Ok((dir.to_path_buf(), tag.to_owned())),
        _ => Err(CheckpointError::Request(format!("{} names no checkpoint", checkpoint.display())).into()),
    }
}

/// Whether it may be the name of a checkpoint.
fn is_plain_name(text: &str) -> bool {
    Path::new(text).components().count() == 1 && !text.ends_with('/')
}

/// A name in the run's own folder, the folder of one checkpoint, a folder of checkpoints, or another run's folder.
fn named(text: &str, own: &Path) -> Result<(PathBuf, String)> {
    let given = Path::new(text);
    if is_plain_name(text) && (own.join(text).is_dir() || !given.is_dir()) {
        if !own.is_dir() {
            let why = format!(
                "there is no checkpoint of this run yet, and no folder '{text}' either; --resume takes auto, a checkpoint's name, or a folder"
            );
            return Err(CheckpointError::NotFound { dir: own.to_path_buf(), why }.into());
        }
        return split(&resolve(own, Some(text))?);
    }
    if !given.is_dir() {
        let why = "is no folder; --resume takes auto, a checkpoint's name, or a folder".to_owned();
        return Err(CheckpointError::NotFound { dir: given.to_path_buf(), why }.into());
    }
    let of_run = RunFolder::at(given).checkpoints();
    if given.join(MANIFEST_FILE).is_file() || Foreign::is_one(given) {
        let whole = given.canonicalize().map_err(TrainError::io(given))?;
        split(&whole)
    } else if of_run.is_dir() {
        newest(&of_run)
    } else {
        newest(given)
    }
}

//! Which checkpoint of a folder a command takes.

use std::path::{Path, PathBuf};

use clap::Args;
use ferrospeed_checkpoint::deepspeed::Foreign;
use ferrospeed_checkpoint::manifest::MANIFEST_FILE;
use ferrospeed_checkpoint::{
    Checkpoint, CheckpointError, Kind, Manifest, candidates, list, of_run, resolve, resolve_any,
    resolve_newest, set_aside,
};

use ferrospeed_command::terminal;

/// Which checkpoint of a folder.
#[derive(Debug, Args)]
pub(super) struct Which {
    /// The folder that holds checkpoints, one checkpoint's own, or a run's
    #[arg(value_name = "DIR")]
    pub(super) dir: PathBuf,
    /// The checkpoint's name; without, the one that `latest` names, or the newest (for `verify`, all)
    #[arg(long, short)]
    pub(super) tag: Option<String>,
}

impl Which {
    /// The folder that holds checkpoints, or the checkpoint's own.
    pub(super) fn folder(&self) -> PathBuf {
        of_run(&self.dir)
    }

    pub(super) fn open(&self) -> Result<Checkpoint, CheckpointError> {
        let folder = self.folder();
        let found =
            resolve(&folder, self.tag.as_deref()).map_err(|error| match (error, put_away(&self.dir)) {
                (CheckpointError::NotFound { dir, .. }, _) if self.theirs().is_some() => {
                    CheckpointError::NotFound { dir, why: self.theirs().unwrap_or_default() }
                }
                (CheckpointError::NotFound { dir, why }, Some(more)) => {
                    CheckpointError::NotFound { dir, why: format!("{why}; {more}") }
                }
                (other, _) => other,
            })?;
        Checkpoint::open(&found)
    }

    /// What to say where there is nothing but a checkpoint of DeepSpeed's.
    fn theirs(&self) -> Option<String> {
        let folder = self.folder();
        let tag = self.tag.as_ref().map(|tag| folder.join(tag));
        let among = || candidates(&folder).map_or(Vec::new(), |(_, broken)| broken);
        let path = match tag {
            Some(path) => Some(path).filter(|path| Foreign::is_one(path)),
            None if Foreign::is_one(&folder) => Some(folder),
            None => among().iter().map(|(name, _)| folder.join(name)).rfind(|path| Foreign::is_one(path)),
        }?;
        Some(format!(
            "{} is DeepSpeed's checkpoint, and only ours have the checksums and the index that this command reads; `ferrospeed checkpoint \
             to-fp32` writes its weights, `ferrospeed checkpoint import-deepspeed` makes one of ours of it",
            path.display()
        ))
    }

    /// The one that is to be written elsewhere; says which was taken where the command's own words do not. The newest alone is taken
    /// without its name: where that is damaged, an older one is another result.
    pub(super) fn open_and_say(&self) -> Result<Checkpoint, CheckpointError> {
        let folder = self.folder();
        let opened = resolve_newest(&folder, self.tag.as_deref()).and_then(|found| Checkpoint::open(&found));
        let checkpoint = opened.map_err(|error| self.with_others(error))?;
        if checkpoint.path() != self.dir {
            terminal::print_note(&format!("{} is taken", checkpoint.path().display()));
        }
        Ok(checkpoint)
    }

    /// Says which others there are in place of a newest one that cannot be taken.
    fn with_others(&self, error: CheckpointError) -> CheckpointError {
        let others = list(&self.folder()).unwrap_or_default();
        let others: Vec<String> =
            others.into_iter().rev().map(|listed| format!("--tag {}", listed.tag)).collect();
        // One of DeepSpeed's is for who reads those.
        let is_foreign = resolve_any(&self.folder(), None)
            .is_ok_and(|path| !path.join(MANIFEST_FILE).exists() && Foreign::is_one(&path));
        if self.tag.is_some() || others.is_empty() || is_foreign {
            return match (error, put_away(&self.dir)) {
                (CheckpointError::NotFound { dir, why }, Some(more)) => {
                    CheckpointError::NotFound { dir, why: format!("{why}; {more}") }
                }
                (other, _) => other,
            };
        }
        let more = format!(
            "the newest is not replaced by an older one; to take that, name it: {}",
            others.join(" or ")
        );
        CheckpointError::Export(format!("{error}; {more}"))
    }

    /// The same, to be written as DeepSpeed does; says what has no place there.
    pub(super) fn open_for_deepspeed(&self) -> Result<Checkpoint, CheckpointError> {
        let checkpoint = self.open_and_say()?;
        let Manifest { tensors, training, .. } = checkpoint.manifest();
        let of_ranks = tensors.iter().any(|tensor| matches!(tensor.kind, Kind::Rank(_)));
        if of_ranks || !training.per_parameter.is_empty() {
            terminal::print_note(
                "what ranks hold alone of a 1-bit optimizer, and 1-bit LAMB's ratios, have no place in DeepSpeed's files and are left out",
            );
        }
        Ok(checkpoint)
    }

    /// Says what else is there that is easily overlooked: checkpoints that are not whole, or were put away.
    pub(super) fn tell_of_others(&self, checkpoint: &Checkpoint) {
        let folder = self.folder();
        // A checkpoint that was named says nothing of its neighbours.
        if self.tag.is_none() && checkpoint.path() != folder {
            for (tag, why) in candidates(&folder).map_or(Vec::new(), |(_, broken)| broken) {
                terminal::print_note(&format!("checkpoint '{tag}' is passed over: {why}"));
            }
        }
        let aside = checkpoint.path().parent().and_then(|folder| set_aside(folder).ok());
        aside.iter().flatten().for_each(|aside| terminal::print_note(&aside.to_string()));
        put_away(&self.dir).iter().for_each(|why| terminal::print_note(why));
    }

    /// Says what saves that were cut off have put away in the folder.
    pub(super) fn tell_of_those_put_away(&self) {
        let aside = set_aside(&self.folder()).unwrap_or_default();
        aside.iter().for_each(|aside| terminal::print_note(&aside.to_string()));
        put_away(&self.dir).iter().for_each(|why| terminal::print_note(why));
    }
}

/// What to know of a run that another was to replace when it was killed.
fn put_away(dir: &Path) -> Option<String> {
    let run = if dir.ends_with("checkpoints") { dir.parent()? } else { dir };
    let kept = run.join(".replaced");
    kept.join("checkpoints").is_dir().then(|| {
        format!(
            "{} holds the run that `train --overwrite` was about to replace when it was killed: the next `train` into {} gives it back; `checkpoint` takes {} as it is",
            kept.display(),
            run.display(),
            kept.display()
        )
    })
}

//! `ferrospeed checkpoint verify`: whether a checkpoint, or every one of a folder, is what was written.

use std::path::Path;

use ferrospeed_checkpoint::deepspeed::Foreign;
use ferrospeed_checkpoint::manifest::MANIFEST_FILE;
use ferrospeed_checkpoint::{Checkpoint, CheckpointError, candidates, resolve_newest};

use super::checkpoint_which::Which;
use ferrospeed_command::Failure;
use ferrospeed_command::terminal;

/// Reads all of what is meant. One that is damaged keeps none of the others from being looked at.
pub(super) fn verify(which: &Which) -> Result<(), Failure> {
    let folder = which.folder();
    if which.tag.is_some() || !folder.is_dir() || folder.join(MANIFEST_FILE).exists() {
        let checkpoint = which.open()?;
        which.tell_of_others(&checkpoint);
        return Ok(verify_one(&checkpoint)?);
    }
    let (mut whole, broken) = candidates(&folder)?;
    let (theirs, broken): (Vec<_>, Vec<_>) =
        broken.into_iter().partition(|(name, _)| Foreign::is_one(&folder.join(name)));
    if whole.is_empty() && broken.is_empty() {
        return Err(which.open().err().map_or(Failure::Run(String::new()), Failure::from));
    }
    whole.reverse();
    let mut problems: Vec<String> =
        broken.into_iter().map(|(name, why)| format!("checkpoint '{name}': {why}")).collect();
    for listed in &whole {
        let checked = Checkpoint::open(&listed.path).and_then(|checkpoint| verify_one(&checkpoint));
        problems.extend(checked.err().map(|why| format!("checkpoint '{}': {why}", listed.tag)));
    }
    problems.extend(latest_that_is_gone(&folder));
    for (name, _) in theirs {
        terminal::print_note(&format!(
            "{}: is DeepSpeed's, without checksums of ours; `checkpoint import-deepspeed` compares its own",
            folder.join(name).display()
        ));
    }
    which.tell_of_those_put_away();
    match problems.is_empty() {
        true => Ok(()),
        false => {
            Err(Failure::Run(format!("{}: not all is whole\n{}", folder.display(), problems.join("\n"))))
        }
    }
}

fn verify_one(checkpoint: &Checkpoint) -> Result<(), CheckpointError> {
    let verified = checkpoint.verify()?;
    let path = checkpoint.path().display();
    let said = terminal::print_output(&format!(
        "{path}: whole ({} tensors in {} files, {} bytes)\n",
        verified.tensors, verified.files, verified.bytes
    ));
    said.map_err(|failure| CheckpointError::Request(failure.to_string()))
}

/// What is wrong where `latest` names nothing that is there.
fn latest_that_is_gone(folder: &Path) -> Option<String> {
    match resolve_newest(folder, None) {
        Err(error @ CheckpointError::NotFound { .. }) => Some(format!("'latest': {error}")),
        _ => None,
    }
}

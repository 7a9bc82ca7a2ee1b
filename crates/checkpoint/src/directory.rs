//! The folder that holds checkpoints: which are there, which is the newest, what a crash left behind.
//!
//! Everything unfinished has a name that starts with a dot: `.TAG.partial-…` while a save runs, `.TAG.replaced-…` while
//! it takes the place of another, `.TAG.removed-…` while it is deleted. `latest` is a hint and never the truth.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

use crate::deepspeed::{Foreign, is_universal};
use crate::error::{CheckpointError, Result};
use crate::fs::FileSystem;
use crate::load::Checkpoint;
use crate::manifest::{MANIFEST_FILE, Manifest};

/// The file whose lock a saving job holds.
pub const LOCK_FILE: &str = ".ferrospeed.lock";
/// The hint.
pub const LATEST_FILE: &str = "latest";
/// The hint for universal checkpoints.
pub const LATEST_UNIVERSAL_FILE: &str = "latest_universal";

/// Which checkpoints stay when a new one is complete. The newest always stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Retention {
    /// How many of the newest stay; `None` keeps all.
    pub keep_last: Option<usize>,
    /// Checkpoints whose step is a multiple of this stay too; `None` for no such rule.
    pub keep_every_steps: Option<u64>,
}

/// Refuses names that are no plain folder names.
pub fn check_tag(tag: &str) -> Result<()> {
    let refuse = |why| Err(CheckpointError::Tag { tag: tag.to_owned(), why });
    if tag.is_empty() {
        return refuse("it is empty");
    }
    if tag.starts_with('.') {
        return refuse("names that start with a dot are for what is unfinished");
    }
    if tag.contains(['/', '\\', '\0', '\n']) {
        return refuse("it must be the name of a folder, not a path");
    }
    if tag.len() > 150 {
        return refuse("it is longer than 150 bytes");
    }
    if tag == LATEST_FILE {
        return refuse("that is the name of the hint");
    }
    Ok(())
}

/// A complete checkpoint of a folder.
#[derive(Debug, Clone)]
pub struct Listed {
    /// Its name.
    pub tag: String,
    /// Its folder.
    pub path: PathBuf,
    /// What it holds.
    pub manifest: Manifest,
}

/// The tag of an unfinished folder's name, and what is unfinished.
fn unfinished(name: &str) -> Option<(&str, &str)> {
    let (tag, rest) = name.strip_prefix('.')?.rsplit_once('.')?;
    let what = rest.split_once('-')?.0;
    ["partial", "replaced", "removed"].contains(&what).then_some((tag, what))
}

/// Whether a folder holds a manifest and every file that it names, at full length.
fn complete(path: &Path) -> Option<Manifest> {
    let manifest = Manifest::read(&path.join(MANIFEST_FILE)).ok()?;
    let whole = manifest.files.iter().all(|file| {
        std::fs::metadata(path.join(&file.name))
            .is_ok_and(|found| found.is_file() && found.len() == file.bytes)
    });
    whole.then_some(manifest)
}

fn entries(dir: &Path) -> Result<Vec<(String, PathBuf)>> {
    let listing = std::fs::read_dir(dir).map_err(CheckpointError::io("list", dir))?;
    let mut found = Vec::new();
    for entry in listing {
        let entry = entry.map_err(CheckpointError::io("list", dir))?;
        if let Ok(name) = entry.file_name().into_string() {
            found.push((name, entry.path()));
        }
    }
    found.sort();
    Ok(found)
}

/// Every complete checkpoint, the newest last. One that was set aside for a successor that never came counts.
pub fn list(dir: &Path) -> Result<Vec<Listed>> {
    let mut found: Vec<Listed> = Vec::new();
    for (name, path) in entries(dir)? {
        let tag = match unfinished(&name) {
            Some((tag, "replaced")) if complete(&dir.join(tag)).is_none() => tag,
            Some(_) => continue,
            None if name.starts_with('.') => continue,
            None => &name,
        };
        if let Some(manifest) = path.is_dir().then(|| complete(&path)).flatten() {
            found.push(Listed { tag: tag.to_owned(), path, manifest });
        }
    }
    found.sort_by_key(|listed| (listed.manifest.unix_time_s, listed.manifest.training.global_steps));
    Ok(found)
}

/// A checkpoint that was put away for a successor, and is still there because the save was cut off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetAside {
    /// The name it had.
    pub tag: String,
    /// Its folder.
    pub path: PathBuf,
    /// Whether it stands in for a successor that never came, or is not whole any more.
    pub is_used: bool,
}

impl std::fmt::Display for SetAside {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let SetAside { tag, path, is_used } = self;
        let successor = path.with_file_name(tag);
        write!(f, "{} is an earlier '{tag}', which a save that was cut off had put away: ", path.display())?;
        match is_used {
            true => write!(
                f,
                "it is used as '{tag}', of which nothing whole is there, and the next save gives it its name back where that is free"
            ),
            false => write!(
                f,
                "the new '{tag}' is whole and used, and the next save into the folder removes the earlier one; to keep it, move it out (mv '{}' '{}-earlier')",
                path.display(),
                successor.display()
            ),
        }
    }
}

/// The whole checkpoints that are put away in a folder.
pub fn set_aside(dir: &Path) -> Result<Vec<SetAside>> {
    let mut found = Vec::new();
    for (name, path) in entries(dir)? {
        if let Some((tag, "replaced")) = unfinished(&name)
            && complete(&path).is_some()
        {
            let is_used = complete(&dir.join(tag)).is_none();
            found.push(SetAside { tag: tag.to_owned(), path, is_used });
        }
    }
    Ok(found)
}

/// The folder of checkpoints in a run's folder, or the folder itself where it is no run's.
pub fn of_run(dir: &Path) -> PathBuf {
    let within = dir.join("checkpoints");
    let is_one = |path: &Path| path.join(MANIFEST_FILE).exists() || Foreign::is_one(path);
    let is_run = within.is_dir() && !is_one(dir) && !is_one(&within) && !dir.join(LATEST_FILE).exists();
    if is_run { within } else { dir.to_path_buf() }
}

/// The checkpoints of a folder that a run may go on from, the best first: the one that `latest` names, then the newest; and
/// the folders that look like one and are not whole, each with what is wrong.
pub fn candidates(dir: &Path) -> Result<(Vec<Listed>, Vec<(String, CheckpointError)>)> {
    let mut whole = list(dir)?;
    whole.reverse();
    if let Some(hinted) = latest(dir).and_then(|tag| whole.iter().position(|listed| listed.tag == tag)) {
        whole[..=hinted].rotate_right(1);
    }
    let mut broken = Vec::new();
    for (name, path) in entries(dir)? {
        if name.starts_with('.') || !looks_like_one(&path) || whole.iter().any(|listed| listed.path == path) {
            continue;
        }
        broken.extend(Checkpoint::open(&path).err().map(|error| (name, error)));
    }
    Ok((whole, broken))
}

/// Whether a folder holds a file that only a checkpoint has.
fn looks_like_one(path: &Path) -> bool {
    let is_ours =
        |name: &str| name == MANIFEST_FILE || (name.starts_with("rank_") && name.ends_with(".safetensors"));
    let files = std::fs::read_dir(path).into_iter().flatten().flatten();
    files.filter_map(|file| file.file_name().into_string().ok()).any(|name| is_ours(&name))
        || Foreign::is_one(path)
}

/// What `latest` says, if it says anything.
pub(crate) fn latest(dir: &Path) -> Option<String> {
    hint(dir, LATEST_FILE)
}

/// A tag and a line's end, with room to spare.
const MAX_HINT_BYTES: u64 = 4096;

fn hint(dir: &Path, file: &str) -> Option<String> {
    let tag = ferrospeed_files::read_text(dir.join(file), MAX_HINT_BYTES).ok()?.trim().to_owned();
    check_tag(&tag).ok().map(|()| tag)
}

/// The folder of this tag, or the one that `latest` or, where there is none, `latest_universal` names.
pub(crate) fn named(dir: &Path, tag: Option<&str>) -> Option<PathBuf> {
    let named = tag.map(str::to_owned).or_else(|| latest(dir)).or_else(|| hint(dir, LATEST_UNIVERSAL_FILE));
    named.filter(|tag| check_tag(tag).is_ok()).map(|tag| dir.join(tag))
}

/// The folder of a checkpoint of our format or of DeepSpeed's: of this tag, or the one that `latest` or, where there is none,
/// `latest_universal` names, or our newest.
pub fn resolve_any(dir: &Path, tag: Option<&str>) -> Result<PathBuf> {
    match named(dir, tag).filter(|path| !path.join(MANIFEST_FILE).exists() && Foreign::is_one(path)) {
        Some(foreign) => Ok(foreign),
        None => resolve(dir, tag),
    }
}

/// The folder of a universal checkpoint: of this tag, or the one that `latest_universal` names.
pub fn resolve_universal(dir: &Path, tag: Option<&str>) -> Result<PathBuf> {
    let missing = |why: String| CheckpointError::NotFound { dir: dir.to_path_buf(), why };
    let named = tag.map(str::to_owned).or_else(|| hint(dir, LATEST_UNIVERSAL_FILE));
    let tag = named.ok_or_else(|| {
        missing(format!(
            "checkpoint.load_universal is set, and there is no readable '{LATEST_UNIVERSAL_FILE}'; name the checkpoint's tag"
        ))
    })?;
    check_tag(&tag)?;
    let path = dir.join(&tag);
    if is_universal(&path) {
        return Ok(path);
    }
    Err(missing(format!(
        "checkpoint.load_universal is set, and '{tag}' is no universal checkpoint: convert it, or remove the key (any checkpoint of ours loads on any number of ranks)"
    )))
}

/// The folder of a checkpoint: of this tag, or where none is given the one that `latest` names, or the newest; or `dir`, if
/// that is a checkpoint itself.
pub fn resolve(dir: &Path, tag: Option<&str>) -> Result<PathBuf> {
    expect_folder(dir)?;
    if tag.is_none() && dir.join(MANIFEST_FILE).is_file() {
        return Ok(dir.to_path_buf());
    }
    if let Some(tag) = tag {
        check_tag(tag)?;
        let path = dir.join(tag);
        if complete(&path).is_some() {
            return Ok(path);
        }
        // A crash between two renames leaves the old one set aside.
        if let Some(aside) = list(dir)?.into_iter().rfind(|listed| listed.tag == tag) {
            return Ok(aside.path);
        }
        // Who opens it says what is wrong with it.
        if path.join(MANIFEST_FILE).is_file() {
            return Ok(path);
        }
        let why = if path.is_dir() {
            format!(
                "'{tag}' has no {MANIFEST_FILE}: it is no checkpoint of this format (import DeepSpeed's with `ferrospeed checkpoint import-deepspeed`)"
            )
        } else {
            format!("there is no checkpoint '{tag}'; {}", what_is_there(dir)?)
        };
        return Err(CheckpointError::NotFound { dir: dir.to_path_buf(), why });
    }
    let hinted = latest(dir);
    if let Some(path) = hinted.as_ref().map(|tag| dir.join(tag)).filter(|path| complete(path).is_some()) {
        return Ok(path);
    }
    let newest = list(dir)?.pop();
    let newest = newest.ok_or_else(|| CheckpointError::NotFound {
        dir: dir.to_path_buf(),
        why: "there is no complete checkpoint".to_owned(),
    })?;
    match hinted {
        Some(tag) => tracing::warn!(
            "'latest' names '{tag}', which is not complete; '{}' is the newest that is",
            newest.tag
        ),
        None => tracing::warn!("there is no readable 'latest'; '{}' is the newest checkpoint", newest.tag),
    }
    Ok(newest.path)
}

/// The same, but none takes the place of the newest: where the one that `latest` names is damaged or gone, or where without a
/// `latest` any is damaged, that is an error.
pub fn resolve_newest(dir: &Path, tag: Option<&str>) -> Result<PathBuf> {
    expect_folder(dir)?;
    if tag.is_some() || dir.join(MANIFEST_FILE).is_file() {
        return resolve(dir, tag);
    }
    if let Some(hinted) = latest(dir) {
        return resolve(dir, Some(&hinted));
    }
    let (_, broken) = candidates(dir)?;
    match broken.into_iter().find(|(name, _)| !Foreign::is_one(&dir.join(name))) {
        Some((_, why)) => Err(why),
        None => resolve(dir, None),
    }
}

/// An error where there is no folder to look into.
pub(crate) fn expect_folder(dir: &Path) -> Result<()> {
    let why = match std::fs::metadata(dir) {
        Ok(found) if found.is_dir() => return Ok(()),
        Ok(_) => "is no folder; name one that holds checkpoints, or a checkpoint's own".to_owned(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => "is not there".to_owned(),
        Err(error) => return Err(CheckpointError::io("look at", dir)(error)),
    };
    Err(CheckpointError::NotFound { dir: dir.to_path_buf(), why })
}

fn what_is_there(dir: &Path) -> Result<String> {
    let tags: Vec<String> = list(dir)?.into_iter().map(|listed| listed.tag).collect();
    Ok(if tags.is_empty() {
        "there is none at all".to_owned()
    } else {
        format!("there are: {}", tags.join(", "))
    })
}

/// The right to write into a folder, held by rank 0 while it saves. The system gives it back when a process dies.
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    pub(crate) fn take(dir: &Path) -> Result<Lock> {
        let path = dir.join(LOCK_FILE);
        let file = ferrospeed_files::open_lock(&path).map_err(CheckpointError::io("create", &path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(CheckpointError::Busy { dir: dir.to_path_buf() }),
            Err(TryLockError::Error(error)) => {
                tracing::warn!(
                    "{}: this file system has no locks ({error}); two jobs must not save here",
                    dir.display()
                );
            }
        }
        Ok(Lock { _file: file })
    }
}

/// Brings back what a crash left set aside, and removes what it left unfinished. Needs the lock.
pub(crate) fn sweep(fs: &dyn FileSystem, dir: &Path) -> Result<()> {
    for (name, path) in entries(dir)? {
        match unfinished(&name) {
            Some((tag, "replaced")) if dir.join(tag).exists() && complete(&dir.join(tag)).is_none() => {
                tracing::warn!("'{tag}' is not whole: {}, an earlier one, stays", path.display());
            }
            Some((tag, "replaced")) if !dir.join(tag).exists() => {
                tracing::warn!("bringing back checkpoint '{tag}', which a crash left set aside");
                fs.rename(&path, &dir.join(tag)).map_err(CheckpointError::io("rename", &path))?;
            }
            Some(_) if path.is_dir() => {
                tracing::info!("removing {}, which was never finished", path.display());
                fs.remove_folder(&path).map_err(CheckpointError::io("remove", &path))?;
            }
            Some(_) => std::fs::remove_file(&path).map_err(CheckpointError::io("remove", &path))?,
            None => {}
        }
    }
    Ok(())
}

/// Removes what the rules do not keep. `newest` always stays. Needs the lock.
pub(crate) fn rotate(fs: &dyn FileSystem, dir: &Path, newest: &str, rules: Retention) -> Result<Vec<String>> {
    let Some(keep_last) = rules.keep_last else { return Ok(Vec::new()) };
    let listed = list(dir)?;
    let kept_from = listed.len().saturating_sub(keep_last.max(1));
    let mut removed = Vec::new();
    for old in &listed[..kept_from] {
        let steps = old.manifest.training.global_steps;
        let marked = rules.keep_every_steps.is_some_and(|every| every > 0 && steps.is_multiple_of(every));
        if marked || old.tag == newest {
            continue;
        }
        // Out of sight first: a half removed checkpoint must not look like one.
        let aside = dir.join(format!(".{}.removed-{}", old.tag, ferrospeed_files::unfinished::nonce()));
        fs.rename(&old.path, &aside).map_err(CheckpointError::io("rename", &old.path))?;
        fs.remove_folder(&aside).map_err(CheckpointError::io("remove", &aside))?;
        removed.push(old.tag.clone());
    }
    Ok(removed)
}

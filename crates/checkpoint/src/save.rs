//! Saving: every rank writes its file beside, all agree, rank 0 gives the whole its name.
//!
//! The folder gets its final name by one rename, after every byte and the manifest are on the disk. Before that
//! nothing has its name; after that everything is there. A rank that fails tells the others, and all return an error.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use ferrospeed_comm::Group;
use indexmap::IndexMap;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::directory::{LATEST_FILE, Lock, Retention, check_tag, rotate, sweep};
use crate::error::{CheckpointError, Result};
use crate::fs::FileSystem;
use crate::manifest::{FORMAT, Kind, MANIFEST_FILE, Manifest, Origin, TensorEntry, TrainingState};
use crate::shard::{self, PieceBytes, PieceSpec, Written};

/// Room that a save leaves on the disk besides its own files: the manifest and the file system's own tables.
pub(crate) const SPARE_BYTES: u64 = 1 << 20;

/// What is saved besides tensors. Only rank 0's is written.
#[derive(Debug, Clone)]
pub struct Contents {
    /// The run.
    pub origin: Origin,
    /// Counters, scheduler, loss scaler, positions.
    pub training: TrainingState,
    /// What the caller wants back.
    pub client_state: Value,
    /// The configuration.
    pub config: Value,
    /// Other names of tied parameters: each to the name under which the parameter is stored.
    pub aliases: BTreeMap<String, String>,
}

/// Where and how to save. Only rank 0's tag counts.
pub struct Target<'a> {
    /// The folder of checkpoints; every rank must see the same one.
    pub dir: &'a Path,
    /// The new checkpoint's name.
    pub tag: &'a str,
    /// Whether `latest` shall name it.
    pub update_latest: bool,
    /// Which older ones stay.
    pub retention: Retention,
    /// The disk.
    pub fs: &'a dyn FileSystem,
}

#[derive(Serialize, Deserialize)]
enum Said<T> {
    Done(T),
    Failed(String),
}

/// Tells every rank how this one fared; all succeed or all fail. Returns what each rank said.
pub fn agree<T: Serialize + DeserializeOwned>(group: &Group, own: Result<T>) -> Result<Vec<T>> {
    let (said, own_error) = match own {
        Ok(value) => (Said::Done(value), None),
        Err(error) => (Said::Failed(error.to_string()), Some(error)),
    };
    let text = serde_json::to_vec(&said).map_err(|error| CheckpointError::Request(error.to_string()))?;
    let mut values = Vec::with_capacity(group.size());
    let mut failed = None;
    for (rank, text) in exchange(group, &text)?.into_iter().enumerate() {
        match serde_json::from_slice(&text) {
            Ok(Said::Done(value)) => values.push(value),
            Ok(Said::Failed(why)) => failed = failed.or(Some((rank, why))),
            Err(error) => failed = failed.or(Some((rank, format!("it sent what cannot be read: {error}")))),
        }
    }
    match (own_error, failed) {
        (Some(error), _) => Err(error),
        (None, Some((rank, why))) => {
            let error = CheckpointError::Peer { rank, why };
            ferrospeed_comm::blame::note(&error.to_string());
            Err(error)
        }
        (None, None) => Ok(values),
    }
}

/// As [`agree`], for a value that stays on its rank.
pub fn all_or_none<T>(group: &Group, own: Result<T>) -> Result<T> {
    let (value, status) = match own {
        Ok(value) => (Some(value), Ok(())),
        Err(error) => (None, Err(error)),
    };
    agree(group, status)?;
    value.ok_or_else(|| CheckpointError::Request("ranks disagree about whether they failed".into()))
}

/// Brings every rank's bytes to every rank.
fn exchange(group: &Group, own: &[u8]) -> Result<Vec<Vec<u8>>> {
    let mut counts = vec![0i64; group.size()];
    group.all_gather(&[own.len() as i64], &mut counts)?;
    let counts: Vec<usize> = counts.into_iter().map(|count| count as usize).collect();
    let mut all = vec![0u8; counts.iter().sum()];
    group.all_gather_unequal(own, &mut all, &counts)?;
    let mut parts = Vec::with_capacity(counts.len());
    let mut rest = all.as_slice();
    for count in counts {
        let (part, after) = rest.split_at(count);
        parts.push(part.to_vec());
        rest = after;
    }
    Ok(parts)
}

/// Saves a checkpoint. All ranks of the group call it together; each writes `pieces`, whose bytes it is asked for in
/// order. Returns the checkpoint's folder.
pub fn save(
    group: &Group,
    target: &Target<'_>,
    contents: Contents,
    pieces: &[PieceSpec],
    bytes: &mut PieceBytes<'_>,
) -> Result<PathBuf> {
    let own_bytes = shard::file_bytes(pieces);
    let wishes: Vec<(String, u64)> = agree(group, Ok((target.tag.to_owned(), own_bytes)))?;
    let tag = wishes[0].0.clone();
    let total_bytes = wishes.iter().map(|wish| wish.1).sum::<u64>();

    let leads = group.rank() == 0;
    let mut prepared = None;
    let beside = agree(
        group,
        if leads { prepare(target, &tag, total_bytes, &mut prepared) } else { Ok(String::new()) },
    )?;
    let partial = target.dir.join(&beside[0]);

    let file = partial.join(format!("rank_{:05}.safetensors", group.rank()));
    let written = shard::write(target.fs, &file, pieces, bytes);
    let outcome = agree(group, written.map(|written| (pieces.to_vec(), written))).and_then(|reports| {
        let committed = if leads { commit(target, &tag, &partial, contents, reports) } else { Ok(()) };
        agree(group, committed)
    });
    if outcome.is_err() && leads {
        // What remains is swept by the next save if this fails too.
        if let Err(error) = target.fs.remove_folder(&partial)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::warn!("{}: cannot remove the unfinished checkpoint: {error}", partial.display());
        }
    }
    drop(prepared);
    outcome.map(|_| target.dir.join(&tag))
}

/// Rank 0: the folder, its lock, what a crash left, the space; then the folder that the ranks write into.
fn prepare(target: &Target<'_>, tag: &str, total_bytes: u64, lock: &mut Option<Lock>) -> Result<String> {
    let (dir, fs) = (target.dir, target.fs);
    check_tag(tag)?;
    create_folder_for_good(fs, dir)?;
    *lock = Some(Lock::take(dir)?);
    sweep(fs, dir)?;
    let existing = dir.join(tag);
    if existing.exists() && !existing.join(MANIFEST_FILE).is_file() {
        let why = format!("exists and has no {MANIFEST_FILE}: it will not be replaced; choose another tag");
        return Err(CheckpointError::file(&existing, why));
    }
    let available_bytes =
        fs.available_bytes(dir).map_err(CheckpointError::io("ask for free space of", dir))?;
    if available_bytes < total_bytes.saturating_add(SPARE_BYTES) {
        let (dir, needed_bytes) = (dir.to_path_buf(), total_bytes);
        return Err(CheckpointError::NoSpace { dir, needed_bytes, available_bytes });
    }
    let name = format!(".{tag}.partial-{}", ferrospeed_files::unfinished::nonce());
    let partial = dir.join(&name);
    fs.create_folder(&partial).map_err(CheckpointError::io("create", &partial))?;
    Ok(name)
}

/// Makes a folder and those above it, and brings the name of each new one to the disk: a power failure would take the
/// folder, and every checkpoint in it, along.
fn create_folder_for_good(fs: &dyn FileSystem, dir: &Path) -> Result<()> {
    let new: Vec<&Path> =
        dir.ancestors().take_while(|path| !path.as_os_str().is_empty() && !path.exists()).collect();
    fs.create_folder(dir).map_err(CheckpointError::io("create", dir))?;
    for path in new {
        let above = path.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs.sync_folder(above).map_err(CheckpointError::io("sync", above))?;
    }
    Ok(())
}

/// Rank 0: writes the manifest and gives the checkpoint its name.
fn commit(
    target: &Target<'_>,
    tag: &str,
    partial: &Path,
    contents: Contents,
    reports: Vec<(Vec<PieceSpec>, Written)>,
) -> Result<()> {
    let (dir, fs) = (target.dir, target.fs);
    let manifest = assemble(tag, contents, reports)?;
    let path = partial.join(MANIFEST_FILE);
    let text = manifest.to_text().map_err(|error| CheckpointError::file(&path, error))?;
    write_whole(fs, &path, &text)?;
    fs.sync_folder(partial).map_err(CheckpointError::io("sync", partial))?;

    let named = dir.join(tag);
    let aside = dir.join(format!(".{tag}.replaced-{}", ferrospeed_files::unfinished::nonce()));
    let replaces = named.exists();
    if replaces {
        fs.rename(&named, &aside).map_err(CheckpointError::io("rename", &named))?;
    }
    if let Err(error) = fs.rename(partial, &named) {
        if replaces && let Err(second) = fs.rename(&aside, &named) {
            tracing::error!(
                "{}: cannot bring back the old checkpoint: {second}; it is in {}",
                named.display(),
                aside.display()
            );
        }
        return Err(CheckpointError::io("rename", partial)(error));
    }
    fs.sync_folder(dir).map_err(CheckpointError::io("sync", dir))?;
    if target.update_latest {
        let hint = dir.join(format!(".{LATEST_FILE}.partial-{}", ferrospeed_files::unfinished::nonce()));
        write_whole(fs, &hint, tag.as_bytes())?;
        let latest = dir.join(LATEST_FILE);
        fs.rename(&hint, &latest).map_err(CheckpointError::io("replace", &latest))?;
        fs.sync_folder(dir).map_err(CheckpointError::io("sync", dir))?;
    }
    // The new one is safe: what fails from here on costs space, not state.
    if replaces && let Err(error) = fs.remove_folder(&aside) {
        tracing::warn!("{}: cannot remove the replaced checkpoint: {error}", aside.display());
    }
    match rotate(fs, dir, tag, target.retention) {
        Ok(removed) if removed.is_empty() => {}
        Ok(removed) => tracing::info!("removed old checkpoints: {}", removed.join(", ")),
        Err(error) => tracing::warn!("old checkpoints were not removed: {error}"),
    }
    Ok(())
}

fn write_whole(fs: &dyn FileSystem, path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = fs.create_file(path).map_err(CheckpointError::io("create", path))?;
    fs.write(&mut file, bytes).map_err(CheckpointError::io("write", path))?;
    fs.sync_file(&file).map_err(CheckpointError::io("sync", path))
}

/// Puts the ranks' reports together, and checks that nothing is missing and nothing is there twice.
fn assemble(tag: &str, contents: Contents, reports: Vec<(Vec<PieceSpec>, Written)>) -> Result<Manifest> {
    let mut files = Vec::with_capacity(reports.len());
    let mut tensors: IndexMap<(u64, Kind, String), TensorEntry> = IndexMap::new();
    for (index, (specs, written)) in reports.into_iter().enumerate() {
        files.push(written.file);
        for (spec, mut piece) in specs.into_iter().zip(written.pieces) {
            piece.file = index;
            let PieceSpec { name, kind, shape, dtype, place, .. } = spec;
            let entry = tensors.entry((place, kind.clone(), name.clone()));
            entry.or_insert(TensorEntry { name, kind, shape, dtype, pieces: Vec::new() }).pieces.push(piece);
        }
    }
    tensors.sort_unstable_keys();
    let mut tensors: Vec<TensorEntry> = tensors.into_values().collect();
    for tensor in &mut tensors {
        tensor.pieces.sort_by(|a, b| (&a.part, a.start, a.len).cmp(&(&b.part, b.start, b.len)));
    }
    let Contents { origin, training, client_state, config, aliases } = contents;
    let manifest = Manifest {
        format: FORMAT.to_owned(),
        version: Manifest::version_of(&tensors),
        written_by: env!("CARGO_PKG_VERSION").to_owned(),
        tag: tag.to_owned(),
        unix_time_s: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
        origin,
        training,
        client_state,
        config,
        aliases,
        files,
        tensors,
    };
    manifest.check().map_err(CheckpointError::Request)?;
    Ok(manifest)
}

//! A checkpoint of DeepSpeed's, understood but not read: what it holds, and where in its torch files every element lies.
//!
//! Torch files keep arrays as they are, so a stretch of a parameter is a stretch of a file. [`Foreign::into_checkpoint`]
//! therefore gives a [`Checkpoint`] that reads them in place, rank by rank, without a converted copy; [`Foreign::save`]
//! makes that copy. Blocks of torch files have no checksums, only whole arrays do: [`check_files`] compares those.

use std::path::{Path, PathBuf};

use ferrospeed_comm::World;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::source::Stretch;
use super::{import, plain, universal};
use crate::error::{CheckpointError, Result};
use crate::load::{Checkpoint, FOREIGN};
use crate::manifest::{FORMAT, FileEntry, Manifest, Piece, TensorEntry, VERSION};
use crate::pt::{PtFile, Unknown};
use crate::save::{Contents, Target, save};
use crate::shard::PieceSpec;

/// One tensor and the stretches that make it, in order.
pub(crate) struct Tensor {
    pub(crate) spec: PieceSpec,
    pub(crate) stretches: Vec<Stretch>,
}

/// What a checkpoint holds, its tensors, and the torch files that their stretches count from 0.
pub(crate) type Understood = (Contents, Vec<Tensor>, Vec<PathBuf>);

/// See the module's documentation.
pub struct Foreign {
    path: PathBuf,
    contents: Contents,
    tensors: Vec<Tensor>,
    /// The torch files that stretches count from 0.
    files: Vec<PathBuf>,
    unknown: Unknown,
}

impl Foreign {
    /// Whether a folder looks like one of DeepSpeed's checkpoints, universal ones included.
    pub fn is_one(path: &Path) -> bool {
        universal::is_universal(path)
            || super::source::names_in(path)
                .is_ok_and(|names| names.iter().any(|name| name.ends_with("model_states.pt")))
    }

    /// Understands the checkpoint in the folder `path`.
    pub fn open(path: &Path, unknown: Unknown) -> Result<Foreign> {
        let (mut contents, tensors, files) = if universal::is_universal(path) {
            universal::understand(path, unknown)?
        } else {
            import::understand(path, unknown)?
        };
        contents.origin.optimizer = plain::optimizer(contents.origin.optimizer.take(), &tensors);
        Ok(Foreign { path: path.to_path_buf(), contents, tensors, files, unknown })
    }

    /// Saves it in our format, as `target` says.
    pub fn save(self, target: &Target<'_>) -> Result<PathBuf> {
        let specs: Vec<PieceSpec> = self.tensors.iter().map(|tensor| tensor.spec.clone()).collect();
        let mut open: Option<(usize, PtFile)> = None;
        save(&World::solo().group(), target, self.contents, &specs, &mut |piece, range, out| {
            let stretches = &self.tensors[piece].stretches;
            for stretch in
                super::source::slice(stretches, range.start, range.end - range.start).unwrap_or_default()
            {
                let file = match open.take() {
                    Some((at, file)) if at == stretch.file => file,
                    _ => PtFile::open_with(&self.files[stretch.file], self.unknown)
                        .map_err(|error| error.to_string())?,
                };
                let elements = stretch.start..stretch.start + stretch.len;
                let outcome = file.read(&stretch.tensor, elements, out);
                open = Some((stretch.file, file));
                outcome.map_err(|error| error.to_string())?;
            }
            Ok(())
        })
    }

    /// The checkpoint, to be read where it lies.
    pub fn into_checkpoint(self) -> Result<Checkpoint> {
        allow_open_files(self.files.len() as u64);
        let mut entries = Vec::with_capacity(self.files.len());
        for path in &self.files {
            let bytes = std::fs::metadata(path).map_err(CheckpointError::io("read", path))?.len();
            let name = path.strip_prefix(&self.path).unwrap_or(path).to_string_lossy().into_owned();
            entries.push(FileEntry { name, bytes, crc32: 0 });
        }
        let mut open: Vec<Option<PtFile>> = self.files.iter().map(|_| None).collect();
        let mut tensors: Vec<TensorEntry> = Vec::with_capacity(self.tensors.len());
        for Tensor { spec, stretches } in &self.tensors {
            let mut start = 0;
            let mut pieces = Vec::with_capacity(stretches.len());
            for stretch in stretches.iter().filter(|stretch| stretch.len > 0) {
                let file = match &mut open[stretch.file] {
                    Some(file) => file,
                    closed => closed.insert(PtFile::open_with(&self.files[stretch.file], self.unknown)?),
                };
                let offset = file.start_of(&stretch.tensor)? + stretch.start * spec.dtype.size_bytes();
                let (part, crc32) = (spec.part.clone(), Vec::new());
                pieces.push(Piece { file: stretch.file, offset, part, start, len: stretch.len, crc32 });
                start += stretch.len;
            }
            // Slices of one tensor follow one another.
            if let Some(last) =
                tensors.last_mut().filter(|last| (&last.name, &last.kind) == (&spec.name, &spec.kind))
            {
                last.pieces.append(&mut pieces);
                continue;
            }
            tensors.push(TensorEntry {
                name: spec.name.clone(),
                kind: spec.kind.clone(),
                shape: spec.shape.clone(),
                dtype: spec.dtype,
                pieces,
            });
        }
        let tag = self.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let Contents { origin, training, client_state, config, aliases } = self.contents;
        let manifest = Manifest {
            format: FORMAT.to_owned(),
            version: VERSION,
            written_by: FOREIGN.to_owned(),
            tag,
            unix_time_s: 0,
            origin,
            training,
            client_state,
            config,
            aliases,
            files: entries,
            tensors,
        };
        Ok(Checkpoint::of_manifest(self.path, manifest))
    }
}

/// Compares the checksums of all arrays of every `ranks`-th torch file of a checkpoint, from the `rank`-th on.
pub fn check_files(checkpoint: &Checkpoint, rank: usize, ranks: usize) -> Result<()> {
    let files = checkpoint.manifest().files.iter().skip(rank).step_by(ranks.max(1));
    files.map(|file| checkpoint.path().join(&file.name)).try_for_each(|path| PtFile::check_arrays(&path))
}

/// A universal checkpoint has several files for each parameter, and all may be open at once.
fn allow_open_files(count: u64) {
    let wanted = count + 256;
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft < wanted
    {
        // Where it is not allowed, opening one too many says so.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, wanted.min(hard), hard);
    }
}

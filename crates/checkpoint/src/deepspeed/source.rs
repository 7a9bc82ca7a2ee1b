//! The torch files of one DeepSpeed checkpoint, and where each parameter's elements lie in them.

use std::cmp::Ordering;
use std::path::{Path, PathBuf};

use crate::directory::{check_tag, expect_folder};
use crate::error::{CheckpointError, Result};
use crate::manifest::Dtype;
use crate::pt::{PtFile, StoredTensor, Unknown, Value};

/// Elements of one tensor of one file, as part of a parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stretch {
    /// Index among the checkpoint's open files.
    pub file: usize,
    /// The tensor.
    pub tensor: StoredTensor,
    /// Its first element that counts.
    pub start: u64,
    /// How many count.
    pub len: u64,
}

/// One checkpoint's folder, all files open.
pub struct DeepSpeedFiles {
    /// The folder.
    pub path: PathBuf,
    /// Module files, then optimizer files, each in natural order.
    pub files: Vec<PtFile>,
    /// How many of them are module files.
    pub model_files: usize,
}

/// Orders names as people do: runs of digits by their number.
pub(crate) fn natural(a: &str, b: &str) -> Ordering {
    let parts = |text: &str| -> Vec<(String, u128)> {
        let mut parts = Vec::new();
        let (mut word, mut digits) = (String::new(), String::new());
        for c in text.chars().chain(['\0']) {
            if c.is_ascii_digit() && digits.len() < 30 {
                digits.push(c);
                continue;
            }
            if !digits.is_empty() {
                parts.push((std::mem::take(&mut word), digits.parse().unwrap_or(0)));
                digits.clear();
            }
            word.push(c);
        }
        parts.push((word, 0));
        parts
    };
    parts(a).cmp(&parts(b))
}

/// The folder of a checkpoint: of this tag, or the one that `latest` names.
pub fn find(dir: &Path, tag: Option<&str>) -> Result<PathBuf> {
    expect_folder(dir)?;
    let tag = match tag {
        Some(tag) => tag.to_owned(),
        None => crate::directory::latest(dir).ok_or_else(|| CheckpointError::NotFound {
            dir: dir.to_path_buf(),
            why: "there is no readable 'latest'; name the checkpoint's tag".into(),
        })?,
    };
    check_tag(&tag)?;
    let path = dir.join(&tag);
    if path.is_dir() {
        return Ok(path);
    }
    Err(CheckpointError::NotFound { dir: dir.to_path_buf(), why: format!("there is no folder '{tag}'") })
}

/// The names in a folder, in natural order.
pub(crate) fn names_in(path: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(path).map_err(CheckpointError::io("list", path))? {
        let entry = entry.map_err(CheckpointError::io("list", path))?;
        names.extend(entry.file_name().into_string());
    }
    names.sort_by(|a, b| natural(a, b));
    Ok(names)
}

/// Opens a file of a checkpoint, and refuses one that lies in the place of another: torch writes the name that a file is
/// given into it, and nothing else in the files of two ranks need tell them apart.
pub(crate) fn open_own(path: &Path, unknown: Unknown) -> Result<PtFile> {
    let file = PtFile::open_with(path, unknown)?;
    let own = path.file_stem().unwrap_or_default();
    // A name that no file beside it has says no more than that this one was renamed.
    let other = path.with_file_name(format!("{}.pt", file.written_as()));
    if own != file.written_as() && other.is_file() {
        let why = format!(
            "was written as '{}.pt', and another file has that name: files have changed places, or one was copied over another; \
             give each the name it was written with, or copy the checkpoint anew",
            file.written_as()
        );
        return Err(CheckpointError::file(path, why));
    }
    Ok(file)
}

impl DeepSpeedFiles {
    /// Opens every module and optimizer file of a checkpoint's folder.
    pub fn open(path: &Path, unknown: Unknown) -> Result<DeepSpeedFiles> {
        let names = names_in(path)?;
        let ending = |suffix: &str| names.iter().filter(|name| name.ends_with(suffix)).collect::<Vec<_>>();
        let (models, optimizers) = (ending("_model_states.pt"), ending("optim_states.pt"));
        if models.is_empty() {
            return Err(CheckpointError::NotFound {
                dir: path.to_path_buf(),
                why: "holds no *_model_states.pt: it is no DeepSpeed checkpoint".to_owned(),
            });
        }
        DeepSpeedFiles::open_named(path, &models, &optimizers, unknown)
    }

    /// Opens these module and optimizer files.
    pub(crate) fn open_named(
        path: &Path,
        models: &[&String],
        optimizers: &[&String],
        unknown: Unknown,
    ) -> Result<DeepSpeedFiles> {
        let names = models.iter().chain(optimizers);
        let files = names.map(|name| open_own(&path.join(name), unknown));
        Ok(DeepSpeedFiles {
            path: path.to_path_buf(),
            files: files.collect::<Result<_>>()?,
            model_files: models.len(),
        })
    }

    /// Where all files are.
    pub(crate) fn paths(&self) -> Vec<PathBuf> {
        self.files.iter().map(|file| file.path().to_path_buf()).collect()
    }

    /// The module files.
    pub fn models(&self) -> &[PtFile] {
        &self.files[..self.model_files]
    }

    /// The optimizer files.
    pub fn optimizers(&self) -> &[PtFile] {
        &self.files[self.model_files..]
    }

    pub(crate) fn fail(&self, file: usize, why: impl ToString) -> CheckpointError {
        CheckpointError::file(self.files.get(file).map_or(&self.path, |file| file.path()), why)
    }

    /// A value of a file by the keys that lead to it.
    pub(crate) fn at(&self, file: usize, keys: &[&str]) -> Result<&Value> {
        let mut value = self.files[file].value();
        for key in keys {
            value = value.get(key).ok_or_else(|| self.fail(file, format!("has no '{}'", keys.join("."))))?;
        }
        Ok(value)
    }

    /// `optimizer_state_dict` of the `rank`-th optimizer file.
    pub(crate) fn optimizer(&self, rank: usize, key: &str) -> Result<&Value> {
        self.at(self.model_files + rank, &["optimizer_state_dict", key])
    }

    /// A list of tensors under a key of an optimizer file, as whole stretches.
    pub(crate) fn tensors(&self, rank: usize, key: &str) -> Result<Vec<Stretch>> {
        let file = self.model_files + rank;
        let bad = || self.fail(file, format!("'{key}' is not a list of tensors"));
        let items = self.optimizer(rank, key)?.items().ok_or_else(bad)?;
        items.iter().map(|item| item.as_tensor().map(|tensor| whole(file, tensor)).ok_or_else(bad)).collect()
    }

    /// The shapes of trained parameters: (group or sub-group, name, shape) in the order in which they lie.
    pub(crate) fn param_shapes(&self) -> Result<Vec<Vec<(String, Vec<u64>)>>> {
        let bad = || self.fail(0, "'param_shapes' is not a list of names and shapes");
        let groups = self.at(0, &["param_shapes"])?.items().ok_or_else(bad)?;
        groups.iter().map(|group| shapes(group).ok_or_else(bad)).collect()
    }

    /// Reads stretches one after the other as `f32`.
    pub fn read_f32(&self, stretches: &[Stretch]) -> Result<Vec<f32>> {
        let mut values = Vec::new();
        for stretch in stretches {
            let range = stretch.start..stretch.start + stretch.len;
            values.append(&mut self.files[stretch.file].read_f32(&stretch.tensor, range)?);
        }
        Ok(values)
    }
}

/// Names and shapes of a dictionary.
pub(crate) fn shapes(group: &Value) -> Option<Vec<(String, Vec<u64>)>> {
    let entry = |(name, shape): &(Value, Value)| match shape {
        Value::Size(sizes) => Some((name.as_str()?.to_owned(), sizes.clone())),
        _ => None,
    };
    group.pairs()?.iter().map(entry).collect()
}

/// All of a tensor.
pub(crate) fn whole(file: usize, tensor: &StoredTensor) -> Stretch {
    Stretch { file, tensor: tensor.clone(), start: 0, len: tensor.numel() }
}

/// Elements `start..start + len` of what the stretches make together; `None` when they do not reach that far.
pub(crate) fn slice(stretches: &[Stretch], start: u64, len: u64) -> Option<Vec<Stretch>> {
    let mut found = Vec::new();
    let (mut at, end) = (0, start.checked_add(len)?);
    for stretch in stretches {
        let (from, to) = (start.max(at), end.min(at + stretch.len));
        if from < to {
            found.push(Stretch { start: stretch.start + (from - at), len: to - from, ..stretch.clone() });
        }
        at += stretch.len;
    }
    (at >= end).then_some(found)
}

/// The type that all stretches have.
pub(crate) fn common_type(stretches: &[Stretch]) -> Option<Dtype> {
    let first = stretches.first()?.tensor.dtype;
    stretches.iter().all(|stretch| stretch.tensor.dtype == first).then_some(first)
}

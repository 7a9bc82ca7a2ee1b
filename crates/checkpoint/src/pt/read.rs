//! A torch file: its value at once, its tensors on demand.

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use crate::error::{CheckpointError, Result};
use crate::manifest::Dtype;
use crate::pt::pickle::{self, Limits, Unknown};
use crate::pt::value::{StoredTensor, Value};
use crate::pt::zip::{Entry, ZipFile};

/// A larger pickle is refused: names and shapes of a million tensors take less.
const MAX_PICKLE_BYTES: u64 = 512 << 20;

/// An open torch file.
pub struct PtFile {
    zip: ZipFile,
    folder: String,
    value: Value,
    /// Storages whose checksum was compared.
    checked: Mutex<HashSet<String>>,
}

impl PtFile {
    /// Opens a file, refusing names that mean nothing here.
    pub fn open(path: &Path) -> Result<PtFile> {
        PtFile::open_with(path, Unknown::Refuse)
    }

    /// Opens a file.
    pub fn open_with(path: &Path, unknown: Unknown) -> Result<PtFile> {
        let zip = ZipFile::open(path)?;
        let pickles = zip.entries().iter().filter_map(|entry| entry.name.strip_suffix("data.pkl"));
        let folder =
            pickles.filter(|folder| folder.is_empty() || folder.ends_with('/')).min_by_key(|f| f.len());
        let folder =
            folder.ok_or_else(|| CheckpointError::file(path, "has no data.pkl: it is no torch file"))?;
        let folder = folder.to_owned();
        if let Some(order) = zip.entry(&format!("{folder}byteorder")) {
            let mut bytes = vec![0; order.bytes.min(16) as usize];
            zip.check(order)?;
            zip.read(order, 0, &mut bytes)?;
            if bytes != b"little" {
                return Err(CheckpointError::file(path, "was written on a big-endian machine"));
            }
        }
        let entry = zip.entry(&format!("{folder}data.pkl")).expect("the name was just found");
        if entry.bytes > MAX_PICKLE_BYTES {
            let why = format!("its pickle has {} bytes, too many", entry.bytes);
            return Err(CheckpointError::file(path, why));
        }
        zip.check(entry)?;
        let mut bytes = vec![0; entry.bytes as usize];
        zip.read(entry, 0, &mut bytes)?;
        let value = pickle::read(&bytes, unknown, Limits::default())
            .map_err(|why| CheckpointError::file(path, why))?;
        Ok(PtFile { zip, folder, value, checked: Mutex::default() })
    }

    /// What the file holds.
    pub fn value(&self) -> &Value {
        &self.value
    }

    /// The file.
    pub fn path(&self) -> &Path {
        self.zip.path()
    }

    /// The name, without its ending, under which torch wrote the file; torch calls one that it wrote to no file 'archive'.
    pub fn written_as(&self) -> &str {
        self.folder.trim_end_matches('/')
    }

    /// Appends elements `range` of a tensor, counted in its own order, to `out`.
    pub fn read(&self, tensor: &StoredTensor, range: Range<u64>, out: &mut Vec<u8>) -> Result<()> {
        if range.start > range.end || range.end > tensor.numel() {
            let why = format!("a tensor of {} elements has no {range:?}", tensor.numel());
            return Err(CheckpointError::file(self.path(), why));
        }
        if range.is_empty() {
            return Ok(());
        }
        let (entry, size) = (self.entry_of(tensor)?, tensor.dtype.size_bytes());
        let fresh = !self.checked.lock().unwrap_or_else(PoisonError::into_inner).contains(&tensor.storage);
        if fresh {
            self.zip.check(entry)?;
            self.checked.lock().unwrap_or_else(PoisonError::into_inner).insert(tensor.storage.clone());
        }
        let start = out.len();
        out.resize(start + ((range.end - range.start) * size) as usize, 0);
        let target = &mut out[start..];
        if tensor.is_contiguous() {
            return self.zip.read(entry, (tensor.offset + range.start) * size, target);
        }
        for (index, element) in range.zip(target.chunks_exact_mut(size as usize)) {
            let mut rest = index;
            let mut at = tensor.offset;
            for (length, stride) in tensor.shape.iter().zip(&tensor.stride).rev() {
                at += rest % length * stride;
                rest /= length;
            }
            self.zip.read(entry, at * size, element)?;
        }
        Ok(())
    }

    /// The array that a tensor is a view of.
    pub fn entry_of(&self, tensor: &StoredTensor) -> Result<&Entry> {
        let name = format!("{}data/{}", self.folder, tensor.storage);
        let fail = |why: String| CheckpointError::file(self.path(), why);
        let entry = self.zip.entry(&name).ok_or_else(|| fail(format!("has no entry '{name}'")))?;
        let expected = tensor.storage_numel * tensor.dtype.size_bytes();
        if entry.bytes != expected {
            return Err(fail(format!("'{name}' has {} bytes, expected {expected}", entry.bytes)));
        }
        Ok(entry)
    }

    /// Where in the file a tensor's elements begin, which lie end to end there. One whose elements lie otherwise is refused.
    pub fn start_of(&self, tensor: &StoredTensor) -> Result<u64> {
        let size = tensor.dtype.size_bytes();
        let entry = self.entry_of(tensor)?;
        let end = tensor.offset.checked_add(tensor.numel()).and_then(|end| end.checked_mul(size));
        if !tensor.is_contiguous() || end.is_none_or(|end| end > entry.bytes) {
            let why = format!(
                "a tensor of shape {:?} does not lie end to end in '{}': import the checkpoint with `ferrospeed checkpoint import-deepspeed`",
                tensor.shape, entry.name
            );
            return Err(CheckpointError::file(self.path(), why));
        }
        Ok(entry.start + tensor.offset * size)
    }

    /// Compares the checksums of all arrays of a file.
    pub(crate) fn check_arrays(path: &Path) -> Result<()> {
        let zip = ZipFile::open(path)?;
        zip.entries().iter().try_for_each(|entry| zip.check(entry))
    }

    /// All elements of a tensor.
    pub fn read_all(&self, tensor: &StoredTensor) -> Result<Vec<u8>> {
        let mut out = Vec::new();
        self.read(tensor, 0..tensor.numel(), &mut out)?;
        Ok(out)
    }

    /// Elements of a float tensor as `f32`.
    pub fn read_f32(&self, tensor: &StoredTensor, range: Range<u64>) -> Result<Vec<f32>> {
        let mut bytes = Vec::new();
        self.read(tensor, range, &mut bytes)?;
        let mut values = vec![0.0; bytes.len() / tensor.dtype.size_bytes() as usize];
        let converted = tensor.dtype.to_f32(&bytes, &mut values);
        converted.ok_or_else(|| {
            CheckpointError::file(self.path(), format!("a tensor is {:?}, not of floats", tensor.dtype))
        })?;
        Ok(values)
    }

    /// A counter, which torch keeps as a number or as a tensor of one.
    pub fn read_count(&self, value: &Value) -> Result<u64> {
        let count = match value {
            Value::Tensor(tensor) if tensor.numel() == 1 => match tensor.dtype {
                Dtype::I64 | Dtype::I32 => {
                    let bytes = self.read_all(tensor)?;
                    let mut wide = [0; 8];
                    wide[..bytes.len()].copy_from_slice(&bytes);
                    Some(u64::from_le_bytes(wide))
                }
                _ => {
                    let count = self.read_f32(tensor, 0..1)?[0];
                    (count.fract() == 0.0 && (0.0..1e15).contains(&count)).then_some(count as u64)
                }
            },
            Value::Float(count) if count.fract() == 0.0 && (0.0..1e15).contains(count) => Some(*count as u64),
            other => other.as_u64(),
        };
        // A negative one is beyond all steps, too.
        count
            .filter(|count| *count < 1 << 50)
            .ok_or_else(|| CheckpointError::file(self.path(), "the optimizer's 'step' is no number of steps"))
    }
}

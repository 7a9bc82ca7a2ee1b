//! Writing a torch file as a stream: entries are stored, aligned to 64 bytes, and carry their sizes behind them.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use crc32fast::Hasher;

use crate::error::{CheckpointError, Result};
use crate::manifest::Dtype;
use crate::pt::pickle_write;
use crate::pt::value::{StoredTensor, Value};

const ALIGNMENT: u64 = 64;
/// Elements that are asked for at once.
const CHUNK_BYTES: u64 = 1 << 20;
/// Sizes from here on need the 64-bit extension.
const WIDE: u64 = u32::MAX as u64;

/// An array that a file's tensors lie in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StorageToWrite {
    /// The type of its elements.
    pub dtype: Dtype,
    /// How many there are.
    pub numel: u64,
}

/// Collects the arrays of a file while its value is put together.
#[derive(Debug, Default)]
pub struct TensorTable {
    /// The arrays, in the order in which their bytes will be asked for.
    pub storages: Vec<StorageToWrite>,
}

impl TensorTable {
    /// A tensor with an array of its own.
    pub fn tensor(&mut self, dtype: Dtype, shape: &[u64]) -> Value {
        let numel = shape.iter().product();
        let mut stride = vec![1; shape.len()];
        for dim in (1..shape.len()).rev() {
            stride[dim - 1] = stride[dim] * shape[dim].max(1);
        }
        let tensor = StoredTensor {
            dtype,
            shape: shape.to_vec(),
            stride,
            offset: 0,
            storage: self.storages.len().to_string(),
            storage_numel: numel,
            requires_grad: false,
            is_parameter: false,
        };
        self.storages.push(StorageToWrite { dtype, numel });
        Value::Tensor(tensor)
    }
}

struct Written {
    name: String,
    header_at: u64,
    bytes: u64,
    crc32: u32,
}

struct ZipWriter {
    path: PathBuf,
    out: BufWriter<File>,
    at: u64,
    entries: Vec<Written>,
}

/// Writes a file that torch reads. `bytes(storage, elements, out)` appends the content of each storage, in order.
/// The file has its name only once it is complete; of one that fails nothing stays.
pub fn write_pt(path: &Path, value: &Value, storages: &[StorageToWrite], bytes: Bytes<'_>) -> Result<()> {
    let folder = path.file_stem().map_or("archive".into(), |stem| stem.to_string_lossy());
    let (partial, file) =
        ferrospeed_files::create_beside(path).map_err(CheckpointError::io("create", path))?;
    let zip = ZipWriter {
        path: partial.clone(),
        out: BufWriter::with_capacity(1 << 20, file),
        at: 0,
        entries: Vec::new(),
    };
    let written = write_entries(zip, &folder, value, storages, bytes)
        .and_then(|()| std::fs::rename(&partial, path).map_err(CheckpointError::io("rename", &partial)));
    if written.is_err() {
        // What failed is what is reported.
        let _ = std::fs::remove_file(&partial);
    }
    written
}

type Bytes<'a> = &'a mut dyn FnMut(usize, Range<u64>, &mut Vec<u8>) -> Result<()>;

fn write_entries(
    mut zip: ZipWriter,
    folder: &str,
    value: &Value,
    storages: &[StorageToWrite],
    bytes: Bytes<'_>,
) -> Result<()> {
    let pickle = pickle_write::write(value)?;
    zip.entry(format!("{folder}/data.pkl"), &mut |put| put(&pickle))?;
    zip.entry(format!("{folder}/byteorder"), &mut |put| put(b"little"))?;
    let mut chunk = Vec::new();
    for (index, storage) in storages.iter().enumerate() {
        let step = CHUNK_BYTES / storage.dtype.size_bytes();
        zip.entry(format!("{folder}/data/{index}"), &mut |put| {
            let mut done = 0;
            while done < storage.numel {
                let range = done..(done + step).min(storage.numel);
                chunk.clear();
                bytes(index, range.clone(), &mut chunk)?;
                let expected = (range.end - range.start) * storage.dtype.size_bytes();
                if chunk.len() as u64 != expected {
                    let why = format!("array {index} gave {} bytes, expected {expected}", chunk.len());
                    return Err(CheckpointError::Request(why));
                }
                put(&chunk)?;
                done = range.end;
            }
            Ok(())
        })?;
    }
    zip.entry(format!("{folder}/version"), &mut |put| put(b"3\n"))?;
    zip.finish()
}

type Put<'a> = &'a mut dyn FnMut(&[u8]) -> Result<()>;

impl ZipWriter {
    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).map_err(CheckpointError::io("write", &self.path))?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    fn entry(&mut self, name: String, content: &mut dyn FnMut(Put<'_>) -> Result<()>) -> Result<()> {
        let header_at = self.at;
        let unpadded = header_at + 30 + name.len() as u64 + 4;
        let padding = unpadded.next_multiple_of(ALIGNMENT) - unpadded;
        let mut header = Vec::new();
        header.extend_from_slice(&0x0403_4b50u32.to_le_bytes());
        // Version 0, sizes behind the data, names in UTF-8, stored, no time.
        for field in [0u16, 0x0808, 0, 0, 0] {
            header.extend_from_slice(&field.to_le_bytes());
        }
        header.extend_from_slice(&[0; 12]);
        header.extend_from_slice(&(name.len() as u16).to_le_bytes());
        header.extend_from_slice(&(padding as u16 + 4).to_le_bytes());
        header.extend_from_slice(name.as_bytes());
        header.extend_from_slice(b"FB");
        header.extend_from_slice(&(padding as u16).to_le_bytes());
        header.resize(header.len() + padding as usize, b'Z');
        self.put(&header)?;
        let start = self.at;
        let mut crc = Hasher::new();
        content(&mut |bytes| {
            crc.update(bytes);
            self.put(bytes)
        })?;
        let (bytes, crc32) = (self.at - start, crc.finalize());
        let mut descriptor = b"PK\x07\x08".to_vec();
        descriptor.extend_from_slice(&crc32.to_le_bytes());
        for _ in 0..2 {
            if bytes >= WIDE {
                descriptor.extend_from_slice(&bytes.to_le_bytes());
            } else {
                descriptor.extend_from_slice(&(bytes as u32).to_le_bytes());
            }
        }
        self.put(&descriptor)?;
        self.entries.push(Written { name, header_at, bytes, crc32 });
        Ok(())
    }

    fn finish(mut self) -> Result<()> {
        let directory_at = self.at;
        for entry in std::mem::take(&mut self.entries) {
            let record = directory_record(&entry);
            self.entries.push(entry);
            self.put(&record)?;
        }
        let (count, bytes) = (self.entries.len() as u64, self.at - directory_at);
        let wide = count >= u64::from(u16::MAX) || bytes >= WIDE || directory_at >= WIDE;
        let mut end = Vec::new();
        if wide {
            end.extend_from_slice(&0x0606_4b50u32.to_le_bytes());
            end.extend_from_slice(&44u64.to_le_bytes());
            end.extend_from_slice(&[45, 0, 45, 0]);
            end.extend_from_slice(&[0; 8]);
            for field in [count, count, bytes, directory_at] {
                end.extend_from_slice(&field.to_le_bytes());
            }
            end.extend_from_slice(&0x0706_4b50u32.to_le_bytes());
            end.extend_from_slice(&0u32.to_le_bytes());
            end.extend_from_slice(&self.at.to_le_bytes());
            end.extend_from_slice(&1u32.to_le_bytes());
        }
        end.extend_from_slice(&0x0605_4b50u32.to_le_bytes());
        end.extend_from_slice(&[0; 4]);
        for _ in 0..2 {
            end.extend_from_slice(&(count.min(u64::from(u16::MAX)) as u16).to_le_bytes());
        }
        for field in [bytes, directory_at] {
            end.extend_from_slice(&(field.min(WIDE) as u32).to_le_bytes());
        }
        end.extend_from_slice(&[0; 2]);
        self.put(&end)?;
        let path = self.path.clone();
        let file =
            self.out.into_inner().map_err(|error| CheckpointError::io("write", &path)(error.into_error()))?;
        file.sync_all().map_err(CheckpointError::io("sync", &path))
    }
}

fn directory_record(entry: &Written) -> Vec<u8> {
    let mut wide = Vec::new();
    for field in [entry.bytes, entry.bytes, entry.header_at].into_iter().filter(|field| *field >= WIDE) {
        wide.extend_from_slice(&field.to_le_bytes());
    }
    let mut extra = Vec::new();
    if !wide.is_empty() {
        extra.extend_from_slice(&1u16.to_le_bytes());
        extra.extend_from_slice(&(wide.len() as u16).to_le_bytes());
        extra.append(&mut wide);
    }
    let mut record = 0x0201_4b50u32.to_le_bytes().to_vec();
    for field in [0u16, 0, 0x0808, 0, 0, 0] {
        record.extend_from_slice(&field.to_le_bytes());
    }
    record.extend_from_slice(&entry.crc32.to_le_bytes());
    for _ in 0..2 {
        record.extend_from_slice(&(entry.bytes.min(WIDE) as u32).to_le_bytes());
    }
    record.extend_from_slice(&(entry.name.len() as u16).to_le_bytes());
    record.extend_from_slice(&(extra.len() as u16).to_le_bytes());
    // Comment, disk, attributes.
    record.extend_from_slice(&[0; 10]);
    record.extend_from_slice(&(entry.header_at.min(WIDE) as u32).to_le_bytes());
    record.extend_from_slice(entry.name.as_bytes());
    record.append(&mut extra);
    record
}

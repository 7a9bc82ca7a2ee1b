//! Writing: one tensor in memory at a time, each file complete under its final name or not there.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use ferrospeed_files::create_beside;
use ferrospeed_tensor::DType;
use serde_json::{Map, Value, json};

use crate::error::{ModelError, Result};
use crate::weights::dtype_in_header;

/// A tensor that is about to be written; its bytes are asked for when its turn comes.
#[derive(Debug, Clone)]
pub struct TensorToWrite {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its type.
    pub dtype: DType,
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// Tensors.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: usize,
    /// Files they lie in.
    pub files: usize,
}

impl TensorToWrite {
    fn size_bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size_bytes()
    }
}

/// Writes one safetensors file. `bytes(tensor)` gives the little-endian content of each tensor.
pub fn write_file(
    path: &Path,
    tensors: &[TensorToWrite],
    bytes: &mut dyn FnMut(&TensorToWrite) -> Result<Vec<u8>>,
) -> Result<()> {
    let mut order: Vec<&TensorToWrite> = tensors.iter().collect();
    order.sort_by(|a, b| b.dtype.size_bytes().cmp(&a.dtype.size_bytes()).then_with(|| a.name.cmp(&b.name)));
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut offset = 0;
    for tensor in &order {
        let end = offset + tensor.size_bytes();
        let entry = json!({"dtype": dtype_in_header(tensor.dtype), "shape": tensor.shape, "data_offsets": [offset, end]});
        header.insert(tensor.name.clone(), entry);
        offset = end;
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');

    let (partial, file) = create_beside(path).map_err(ModelError::io(path))?;
    let written = write_content(&partial, file, &header, &order, bytes)
        .and_then(|()| std::fs::rename(&partial, path).map_err(ModelError::io(path)));
    if written.is_err() {
        // What failed is what is reported.
        let _ = std::fs::remove_file(&partial);
    }
    written
}

/// Fills a new file.
fn write_content(
    path: &Path,
    file: File,
    header: &[u8],
    tensors: &[&TensorToWrite],
    bytes: &mut dyn FnMut(&TensorToWrite) -> Result<Vec<u8>>,
) -> Result<()> {
    let failed = |error| ModelError::io(path)(error);
    let mut file = BufWriter::with_capacity(1 << 20, file);
    let mut write = |content: &[u8]| file.write_all(content).map_err(failed);
    write(&(header.len() as u64).to_le_bytes())?;
    write(header)?;
    for tensor in tensors {
        let content = bytes(tensor)?;
        if content.len() != tensor.size_bytes() {
            let why =
                format!("'{}' gave {} bytes, expected {}", tensor.name, content.len(), tensor.size_bytes());
            return Err(ModelError::file(path, why));
        }
        write(&content)?;
    }
    let file = file.into_inner().map_err(|error| failed(error.into_error()))?;
    file.sync_all().map_err(failed)
}

/// Writes a model's weights into a directory: one file, or shards of at most `max_shard_bytes` with an index.
pub fn write_directory(
    directory: &Path,
    tensors: &[TensorToWrite],
    max_shard_bytes: usize,
    bytes: &mut dyn FnMut(&TensorToWrite) -> Result<Vec<u8>>,
) -> Result<()> {
    write_counted(directory, tensors, max_shard_bytes, bytes).map(|_| ())
}

/// The same; says what it wrote.
pub(crate) fn write_counted(
    directory: &Path,
    tensors: &[TensorToWrite],
    max_shard_bytes: usize,
    bytes: &mut dyn FnMut(&TensorToWrite) -> Result<Vec<u8>>,
) -> Result<Written> {
    ferrospeed_files::create_folder(directory).map_err(ModelError::io(directory))?;
    let mut shards: Vec<Vec<TensorToWrite>> = vec![Vec::new()];
    let mut filled = 0;
    for tensor in tensors {
        let current = shards.last_mut().expect("there is always a shard");
        if !current.is_empty() && filled + tensor.size_bytes() > max_shard_bytes {
            shards.push(Vec::new());
            filled = 0;
        }
        filled += tensor.size_bytes();
        shards.last_mut().expect("there is always a shard").push(tensor.clone());
    }
    let count = shards.len();
    let total: usize = tensors.iter().map(TensorToWrite::size_bytes).sum();
    let written = Written { tensors: tensors.len(), bytes: total, files: count };
    if let [only] = shards.as_slice() {
        write_file(&directory.join("model.safetensors"), only, bytes)?;
        return Ok(written);
    }
    let mut weight_map = std::collections::BTreeMap::new();
    for (index, shard) in shards.iter().enumerate() {
        let name = format!("model-{:05}-of-{count:05}.safetensors", index + 1);
        write_file(&directory.join(&name), shard, bytes)?;
        weight_map.extend(shard.iter().map(|tensor| (tensor.name.clone(), name.clone())));
    }
    let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
    let path = directory.join("model.safetensors.index.json");
    let text = serde_json::to_string_pretty(&index).map_err(|error| ModelError::file(&path, error))?;
    ferrospeed_files::write(&path, text + "\n").map_err(ModelError::io(&path))?;
    Ok(written)
}

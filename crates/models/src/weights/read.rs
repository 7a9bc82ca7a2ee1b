//! Reading: files are mapped, a tensor's bytes are touched when somebody asks for them.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::store::ParamSource;
use ferrospeed_tensor::{DType, Param, TensorError};
use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::SafeTensors;

use crate::config::read_json;
use crate::error::{ModelError, Result};
use crate::weights::dtype_from_file;

/// Buffers that older releases stored beside the weights and that nothing needs.
const IGNORED_SUFFIXES: [&str; 4] = ["rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "position_ids"];

/// Where one tensor lies.
#[derive(Debug, Clone)]
pub struct StoredTensor {
    /// Its type.
    pub dtype: DType,
    /// Its shape.
    pub shape: Vec<usize>,
    file: usize,
    bytes: Range<usize>,
}

struct MappedFile {
    path: PathBuf,
    map: Mmap,
}

/// All weights of a model directory (or one file), by name.
pub struct WeightFiles {
    files: Vec<MappedFile>,
    tensors: BTreeMap<String, StoredTensor>,
}

impl WeightFiles {
    /// Opens `model.safetensors`, or the shards that `model.safetensors.index.json` names.
    pub fn open_directory(directory: &Path) -> Result<WeightFiles> {
        let single = directory.join("model.safetensors");
        let index = directory.join("model.safetensors.index.json");
        if single.is_file() {
            return WeightFiles::open(&[single]);
        }
        if !index.is_file() {
            let why = "holds neither model.safetensors nor model.safetensors.index.json; convert other formats to safetensors first";
            return Err(ModelError::file(directory, why));
        }
        let parsed = read_json(&index)?;
        let Some(map) = parsed["weight_map"].as_object() else {
            return Err(ModelError::file(&index, "has no object 'weight_map'"));
        };
        let mut names = std::collections::BTreeSet::new();
        for (tensor, file) in map {
            // A shard lies in the directory itself: a name that leads elsewhere is refused.
            match file.as_str().filter(|name| Path::new(name).file_name().is_some_and(|only| only == *name)) {
                Some(name) => names.insert(name.to_owned()),
                None => {
                    return Err(ModelError::file(
                        &index,
                        format!("weight_map['{tensor}'] is not a file name: {file}"),
                    ));
                }
            };
        }
        let paths: Vec<PathBuf> = names.iter().map(|name| directory.join(name)).collect();
        let opened = WeightFiles::open(&paths)?;
        for (tensor, file) in map {
            let found = opened.tensors.get(tensor).map(|stored| &opened.files[stored.file].path);
            if found.and_then(|path| path.file_name()) != file.as_str().map(std::ffi::OsStr::new) {
                return Err(ModelError::file(
                    &index,
                    format!("'{tensor}' is not in {file}, where the index says it is"),
                ));
            }
        }
        Ok(opened)
    }

    /// Opens these files.
    pub fn open(paths: &[PathBuf]) -> Result<WeightFiles> {
        let mut opened = WeightFiles { files: Vec::new(), tensors: BTreeMap::new() };
        for path in paths {
            opened.add(path)?;
        }
        Ok(opened)
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        let file = File::open(path).map_err(ModelError::io(path))?;
        // SAFETY: the map is read-only. A file that another process cuts short while we read it would raise a
        // signal; weights are not edited in place by anyone who wants to keep them.
        let map = unsafe { Mmap::map(&file) }.map_err(ModelError::io(path))?;
        let (header_bytes, metadata) = SafeTensors::read_metadata(&map).map_err(|error| {
            ModelError::file(path, format!("is not a readable safetensors file: {error}"))
        })?;
        let data_start = header_bytes + 8;
        for (name, info) in metadata.tensors() {
            let Some(dtype) = dtype_from_file(info.dtype) else {
                let why = format!("'{name}' has the type {:?}, which is not supported", info.dtype);
                return Err(ModelError::file(path, why));
            };
            let bytes = data_start + info.data_offsets.0..data_start + info.data_offsets.1;
            if bytes.end > map.len() {
                let why = format!(
                    "'{name}' ends at byte {} of a file of {}: the file is cut short",
                    bytes.end,
                    map.len()
                );
                return Err(ModelError::file(path, why));
            }
            if info.shape.len() > ferrospeed_tensor::shape::MAX_DIMS {
                return Err(ModelError::file(path, format!("'{name}' has {} dimensions", info.shape.len())));
            }
            let stored = StoredTensor { dtype, shape: info.shape.clone(), file: self.files.len(), bytes };
            if let Some(other) = self.tensors.insert(name.clone(), stored) {
                let first = self.files[other.file].path.display();
                return Err(ModelError::file(path, format!("'{name}' is already in {first}")));
            }
        }
        self.files.push(MappedFile { path: path.to_path_buf(), map });
        Ok(())
    }

    /// All tensors in order of name.
    pub fn tensors(&self) -> &BTreeMap<String, StoredTensor> {
        &self.tensors
    }

    /// The raw bytes of a tensor.
    pub fn bytes(&self, stored: &StoredTensor) -> &[u8] {
        &self.files[stored.file].map[stored.bytes.clone()]
    }

    /// The stored tensor for a parameter: by its name, or by its name without the family's `prefix`.
    fn find(&self, name: &str) -> Option<&StoredTensor> {
        self.tensors.get(name).or_else(|| self.tensors.get(name.split_once('.')?.1)).or_else(|| {
            // Old checkpoints call a norm's weight and bias gamma and beta.
            let (path, leaf) = name.rsplit_once('.')?;
            let old = match leaf {
                "weight" => "gamma",
                "bias" => "beta",
                _ => return None,
            };
            self.tensors.get(&format!("{path}.{old}"))
        })
    }

    /// Checks that every parameter is here with its shape, and that nothing else is; lists all that is wrong.
    pub fn check(&self, params: &[Param]) -> Result<()> {
        let mut lines = Vec::new();
        let mut used = std::collections::BTreeSet::new();
        for param in params {
            match self.find(param.name()) {
                None => lines.push(format!("  missing     {} {}", param.name(), param.shape())),
                Some(stored) => {
                    used.insert((stored.file, stored.bytes.start, stored.bytes.end));
                    if stored.shape != param.shape().sizes() {
                        lines.push(format!(
                            "  wrong shape {} is {:?}, expected {}",
                            param.name(),
                            stored.shape,
                            param.shape()
                        ));
                    }
                    if !stored.dtype.is_float() {
                        lines.push(format!(
                            "  wrong type  {} is {}, expected a float type",
                            param.name(),
                            stored.dtype
                        ));
                    }
                }
            }
        }
        for (name, stored) in &self.tensors {
            let known = used.contains(&(stored.file, stored.bytes.start, stored.bytes.end))
                || IGNORED_SUFFIXES.iter().any(|suffix| name.ends_with(suffix))
                // A head stored although it is tied.
                || ["lm_head.weight", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"].contains(&name.as_str());
            if !known {
                lines.push(format!("  unknown     {name} {:?}", stored.shape));
            }
        }
        if lines.is_empty() { Ok(()) } else { Err(ModelError::Weights { table: lines.join("\n") }) }
    }
}

impl ParamSource for WeightFiles {
    fn load(&self, param: &Param, range: Range<usize>, out: &mut [f32]) -> ferrospeed_tensor::Result<()> {
        let fail = |why: String| TensorError::BadArgument {
            op: "load weights",
            what: format!("'{}' {why}", param.name()),
        };
        let stored = self.find(param.name()).ok_or_else(|| fail("is not in the files".into()))?;
        if stored.shape != param.shape().sizes() {
            return Err(fail(format!("is {:?} in the files, expected {}", stored.shape, param.shape())));
        }
        let size = stored.dtype.size_bytes();
        let bytes = &self.bytes(stored)[range.start * size..range.end * size];
        match stored.dtype {
            DType::F32 => copy(bytes, out, f32::from_le_bytes),
            DType::BF16 => copy(bytes, out, |b| bf16::from_le_bytes(b).widen()),
            DType::F16 => copy(bytes, out, |b| f16::from_le_bytes(b).widen()),
            dtype => return Err(fail(format!("is {dtype} in the files, expected a float type"))),
        }
        Ok(())
    }
}

fn copy<const N: usize>(bytes: &[u8], out: &mut [f32], widen: impl Fn([u8; N]) -> f32) {
    for (out, chunk) in out.iter_mut().zip(bytes.chunks_exact(N)) {
        *out = widen(chunk.try_into().expect("chunks_exact gives N bytes"));
    }
}

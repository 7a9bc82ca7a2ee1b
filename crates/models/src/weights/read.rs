//! Reading: all tensors of a model directory by name, their bytes only when somebody asks for them.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::ops::Range;
use std::path::{Path, PathBuf};

use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::packed::{PackedWeight, Packing};
use ferrospeed_tensor::store::ParamSource;
use ferrospeed_tensor::{DType, Param, TensorError};
use half::{bf16, f16};

use crate::adapter::{ADAPTER_CONFIG, AdapterFiles};
use crate::config::read_json;
use crate::error::{ModelError, Result};
use crate::weights::dtype_from_file;
use crate::weights::file::WeightFile;
use crate::weights::rows::RowOrder;
use crate::weights::stacked::{InStack, in_memory};
use crate::weights::torch;

/// Where one tensor lies.
#[derive(Debug, Clone)]
pub struct StoredTensor {
    /// Its type.
    pub dtype: DType,
    /// Its shape.
    pub shape: Vec<usize>,
    pub(super) file: usize,
    /// In the data part of the file.
    pub(super) bytes: Range<usize>,
    /// The order of its rows there.
    pub(super) rows: RowOrder,
}

impl StoredTensor {
    /// How many bytes it has.
    pub fn size_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// How many elements it has.
    pub fn numel(&self) -> usize {
        self.bytes.len() / self.dtype.size_bytes()
    }
}

/// Where a tensor lies in the data part of a file of another kind.
pub(crate) struct Placed {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Range<usize>,
    pub(crate) rows: RowOrder,
}

/// All weights of a model directory (or one file), by name.
#[derive(Debug)]
pub struct WeightFiles {
    pub(super) files: Vec<WeightFile>,
    tensors: BTreeMap<String, StoredTensor>,
}

impl WeightFiles {
    /// Whether a directory holds weights that [`WeightFiles::open_directory`] would open.
    pub fn are_in(directory: &Path) -> bool {
        main_file(directory).is_some()
    }

    /// Opens `model.safetensors`, or the shards that `model.safetensors.index.json` names; where neither is there, torch's
    /// `pytorch_model.bin`, or the shards that its index names.
    ///
    /// A directory that holds an adapter too is refused: which of the two is meant, nobody can tell.
    pub fn open_directory(directory: &Path) -> Result<WeightFiles> {
        if AdapterFiles::are_in(directory) && WeightFiles::are_in(directory) {
            let why = format!(
                "holds the weights of a model and an adapter ({ADAPTER_CONFIG}); move one of the two into a directory of its own"
            );
            return Err(ModelError::file(directory, why));
        }
        let Some(main) = main_file(directory) else {
            let why = match MAIN_FILES.iter().find(|name| directory.join(name).symlink_metadata().is_ok()) {
                Some(name) => format!("holds no weights: '{name}' is no plain file"),
                None => format!("holds no weights: none of {} is there", MAIN_FILES.join(", ")),
            };
            return Err(ModelError::file(directory, why));
        };
        if main.extension() != Some(OsStr::new("json")) {
            return WeightFiles::open(&[main]);
        }
        let index = main;
        let parsed = read_json(&index)?;
        let Some(map) = parsed["weight_map"].as_object() else {
            return Err(ModelError::file(&index, "has no object 'weight_map'"));
        };
        let mut names = BTreeSet::new();
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
            if found.and_then(|path| path.file_name()) != file.as_str().map(OsStr::new) {
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

    /// Tensors of another kind of file, at places that were found to lie inside it.
    pub(crate) fn of_tensors(
        file: WeightFile,
        tensors: impl IntoIterator<Item = (String, Placed)>,
    ) -> WeightFiles {
        let stored = |placed: Placed| {
            let Placed { dtype, shape, bytes, rows } = placed;
            StoredTensor { dtype, shape, file: 0, bytes, rows }
        };
        let tensors = tensors.into_iter().map(|(name, placed)| (name, stored(placed)));
        WeightFiles { files: vec![file], tensors: tensors.collect() }
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        if torch::is_torch(path) {
            let (file, placed) = torch::open(path)?;
            return self.add_placed(path, file, placed);
        }
        let (file, metadata) = WeightFile::open(path)?;
        let mut placed = Vec::new();
        for (name, info) in metadata.tensors() {
            let Some(dtype) = dtype_from_file(info.dtype) else {
                let why = format!("'{name}' has the type {:?}, which is not supported", info.dtype);
                return Err(ModelError::file(path, why));
            };
            if info.shape.len() > ferrospeed_tensor::shape::MAX_DIMS {
                return Err(ModelError::file(path, format!("'{name}' has {} dimensions", info.shape.len())));
            }
            let bytes = info.data_offsets.0..info.data_offsets.1;
            let shape = info.shape.clone();
            placed.push((name.clone(), Placed { dtype, shape, bytes, rows: RowOrder::Same }));
        }
        self.add_placed(path, file, placed)
    }

    fn add_placed(&mut self, path: &Path, file: WeightFile, placed: Vec<(String, Placed)>) -> Result<()> {
        for (name, Placed { dtype, shape, bytes, rows }) in placed {
            let stored = StoredTensor { dtype, shape, file: self.files.len(), bytes, rows };
            if let Some(other) = self.tensors.insert(name.clone(), stored) {
                let first = match self.files.get(other.file) {
                    Some(file) => file.path.display(),
                    None => path.display(),
                };
                return Err(ModelError::file(path, format!("'{name}' is already in {first}")));
            }
        }
        self.files.push(file);
        Ok(())
    }

    /// All tensors in order of name.
    pub fn tensors(&self) -> &BTreeMap<String, StoredTensor> {
        &self.tensors
    }

    /// The files, in order.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|file| file.path.as_path())
    }

    /// The raw bytes of a tensor.
    pub fn bytes(&self, stored: &StoredTensor) -> Result<Vec<u8>> {
        let mut bytes = vec![0; stored.size_bytes()];
        self.files[stored.file].read(stored.bytes.start, &mut bytes)?;
        let rows = stored.shape.first().copied().unwrap_or(1);
        Ok(stored.rows.sorted(bytes, stored.size_bytes() / rows.max(1)))
    }

    /// Some bytes of a tensor.
    pub(super) fn read_bytes(&self, stored: &StoredTensor, start: usize, out: &mut [u8]) -> Result<()> {
        self.files[stored.file].read(stored.bytes.start + start, out)
    }

    /// Elements `range` of a float tensor, widened to f32.
    pub fn floats(&self, stored: &StoredTensor, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        let file = &self.files[stored.file];
        if range.end < range.start || range.end > stored.numel() || range.len() != out.len() {
            let why = format!(
                "elements {range:?} were asked for into {} of a tensor of {}",
                out.len(),
                stored.numel()
            );
            return Err(ModelError::file(&file.path, why));
        }
        let row = stored.shape.iter().skip(1).product();
        stored.rows.each_run(row, range, out, |run, out| self.float_run(stored, run.start, out))
    }

    /// Elements that lie side by side.
    fn float_run(&self, stored: &StoredTensor, first: usize, out: &mut [f32]) -> Result<()> {
        let file = &self.files[stored.file];
        let start = stored.bytes.start + first * stored.dtype.size_bytes();
        match stored.dtype {
            DType::F32 => {
                file.read(start, bytemuck::cast_slice_mut(out))?;
                if cfg!(target_endian = "big") {
                    out.iter_mut().for_each(|value| *value = f32::from_bits(value.to_bits().swap_bytes()));
                }
                Ok(())
            }
            DType::BF16 => file.read_widened(start, out, |bytes| bf16::from_le_bytes(bytes).widen()),
            DType::F16 => file.read_widened(start, out, |bytes| f16::from_le_bytes(bytes).widen()),
            dtype => Err(ModelError::file(&file.path, format!("a tensor of {dtype} was read as floats"))),
        }
    }

    /// The stored tensor for a parameter: by its name, by its name without the family's prefix, by one that another release
    /// gives it, or cut out of a stack of experts.
    pub(super) fn find(&self, name: &str) -> Option<Found<'_>> {
        let named = |name: &str| self.tensors.get(name).or_else(|| self.tensors.get(name.split_once('.')?.1));
        let renamed = || {
            // transformers 5 calls GPT-NeoX's head by this name in memory.
            if name == "embed_out.weight" {
                return self.tensors.get("lm_head.weight");
            }
            if name.contains(".block_sparse_moe.") {
                return named(&in_memory(name));
            }
            // Old checkpoints call a norm's weight and bias gamma and beta.
            let (path, leaf) = name.rsplit_once('.')?;
            let old = match leaf {
                "weight" => "gamma",
                "bias" => "beta",
                _ => return None,
            };
            self.tensors.get(&format!("{path}.{old}"))
        };
        if let Some(whole) = named(name).or_else(renamed) {
            return Some(Found { own: Cow::Borrowed(whole), whole });
        }
        let place = InStack::of(name)?;
        let whole = named(&place.stack)?;
        Some(Found { own: Cow::Owned(place.cut(whole)?), whole })
    }
}

/// A parameter in the files.
pub(super) struct Found<'a> {
    /// What is the parameter's own.
    pub(super) own: Cow<'a, StoredTensor>,
    /// The tensor that holds it.
    pub(super) whole: &'a StoredTensor,
}

/// What a directory's weights begin with, the preferred first.
const MAIN_FILES: [&str; 4] = [
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
];

fn main_file(directory: &Path) -> Option<PathBuf> {
    MAIN_FILES.iter().map(|name| directory.join(name)).find(|path| path.is_file())
}

impl ParamSource for WeightFiles {
    fn load_packed(
        &self,
        param: &Param,
        packing: Packing,
    ) -> ferrospeed_tensor::Result<Option<PackedWeight>> {
        self.as_packed(param, packing).map_err(|error| TensorError::BadArgument {
            op: "load weights",
            what: format!("'{}' {error}", param.name()),
        })
    }

    fn load(&self, param: &Param, range: Range<usize>, out: &mut [f32]) -> ferrospeed_tensor::Result<()> {
        let fail = |why: String| TensorError::BadArgument {
            op: "load weights",
            what: format!("'{}' {why}", param.name()),
        };
        if let (None, Some(packed)) = (self.find(param.name()), self.find_packed(param.name())) {
            if !packed.is_of(param.whole_shape().sizes()) {
                return Err(fail(format!(
                    "is {:?} in the files, which is no packed {}",
                    packed.stored.shape,
                    param.whole_shape()
                )));
            }
            return self.packed_floats(packed, param, range, out).map_err(|error| fail(error.to_string()));
        }
        if let (None, Some(stack)) = (self.find(param.name()), self.find_stack(param.name())) {
            if !stack.is_of(param.whole_shape().sizes()) {
                let (shape, whole) = (&stack.blocks.shape, param.whole_shape());
                return Err(fail(format!("is {shape:?} in MXFP4 in the files, which is no stack {whole}")));
            }
            return self.stack_floats(stack, param, range, out).map_err(|error| fail(error.to_string()));
        }
        let found = self.find(param.name()).ok_or_else(|| fail("is not in the files".into()))?;
        let stored = &*found.own;
        if stored.shape != param.whole_shape().sizes() {
            return Err(fail(format!(
                "is {:?} in the files, expected {}",
                stored.shape,
                param.whole_shape()
            )));
        }
        if !stored.dtype.is_float() {
            return Err(fail(format!("is {} in the files, expected a float type", stored.dtype)));
        }
        let read = |run, out: &mut [f32]| self.floats(stored, run, out);
        param.each_run(range, out, read).map_err(|error| fail(error.to_string()))
    }
}

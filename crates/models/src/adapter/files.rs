//! An adapter in a directory: its configuration, and its tensors by the parameters they are for.

use std::ops::Range;
use std::path::{Path, PathBuf};

use ferrospeed_nn::adapter::Adapters;
use ferrospeed_tensor::store::ParamSource;
use ferrospeed_tensor::{DType, Param, TensorError};

use super::config::{ADAPTER_CONFIG, read};
use super::write::stored_name;
use crate::error::{ModelError, Result};
use crate::weights::{StoredTensor, WeightFiles};

/// What holds the tensors, the preferred first.
const TENSOR_FILES: [&str; 2] = ["adapter_model.safetensors", "adapter_model.bin"];

/// An open adapter.
#[derive(Debug)]
pub struct AdapterFiles {
    path: PathBuf,
    adapters: Adapters,
    base: Option<String>,
    tensors: WeightFiles,
}

impl AdapterFiles {
    /// Whether a directory says that it holds one.
    pub fn are_in(directory: &Path) -> bool {
        let config = directory.join(ADAPTER_CONFIG);
        config.exists() || config.is_symlink()
    }

    /// Opens it; its tensors are looked at by [`AdapterFiles::check`].
    pub fn open(directory: &Path) -> Result<AdapterFiles> {
        let (adapters, base) = read(directory)?;
        let file = TENSOR_FILES.iter().map(|name| directory.join(name)).find(|path| path.is_file());
        let Some(file) = file else {
            let why =
                format!("holds no tensors of the adapter: none of {} is there", TENSOR_FILES.join(", "));
            return Err(ModelError::file(directory, why));
        };
        let tensors = WeightFiles::open(&[file])?;
        Ok(AdapterFiles { path: directory.to_path_buf(), adapters, base, tensors })
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it adapts, and how.
    pub fn adapters(&self) -> &Adapters {
        &self.adapters
    }

    /// The model that it was made for, as it names it.
    pub fn base(&self) -> Option<&str> {
        self.base.as_deref()
    }

    /// The directory of the model that it is of: the one that is named here, else the one that it names itself.
    pub fn base_directory(&self, named: Option<&Path>) -> Result<PathBuf> {
        if let Some(named) = named {
            return Ok(named.to_path_buf());
        }
        let why = match self.base() {
            Some(base) if Path::new(base).is_dir() => return Ok(PathBuf::from(base)),
            Some(base) => format!(
                "is an adapter of the model '{base}', and no directory of that name is here; name the model's with --base"
            ),
            None => "is an adapter and does not say of which model; name the model's directory with --base"
                .to_owned(),
        };
        Err(ModelError::file(&self.path, why))
    }

    /// Its tensors.
    pub fn tensors(&self) -> &WeightFiles {
        &self.tensors
    }

    /// What tells it from others.
    pub fn fingerprint(&self) -> Result<u32> {
        self.tensors.fingerprint()
    }

    /// The tensor for a parameter, if it holds one.
    pub(super) fn find(&self, param: &Param) -> Option<&StoredTensor> {
        let name = stored_name(param.name(), &[]);
        let within = stored_name(param.name(), &[layer_of(param.name())]);
        self.tensors.tensors().get(&name).or_else(|| self.tensors.tensors().get(&within))
    }

    /// Checks that every parameter that it trains is here with its shape, and that nothing else is; lists all that is wrong.
    pub fn check(&self, params: &[Param]) -> Result<()> {
        let mut lines = Vec::new();
        let mut known = Vec::new();
        for param in params.iter().filter(|param| param.is_trainable()) {
            let (name, expected) = (param.name(), param.whole_shape());
            let Some(stored) = self.find(param) else {
                lines.push(format!("  missing     {} {expected}", stored_name(name, &[])));
                continue;
            };
            known.push(stored as *const StoredTensor);
            if stored.shape != expected.sizes() {
                lines.push(format!("  wrong shape {name} is {:?}, expected {expected}", stored.shape));
            }
            if !stored.dtype.is_float() {
                lines.push(format!("  wrong type  {name} is {}, expected a float type", stored.dtype));
            }
        }
        for (name, stored) in self.tensors.tensors() {
            if !known.contains(&(stored as *const StoredTensor)) {
                lines.push(format!("  unknown     {name} {:?}", stored.shape));
            }
        }
        if lines.is_empty() {
            return Ok(());
        }
        let why = format!("does not fit the model as {ADAPTER_CONFIG} adapts it:\n{}", lines.join("\n"));
        Err(ModelError::file(&self.path, why))
    }

    /// The type of its tensors.
    pub fn dtype(&self) -> Option<DType> {
        self.tensors.tensors().values().map(|stored| stored.dtype).find(|dtype| dtype.is_float())
    }
}

/// The layer that a parameter is of.
fn layer_of(name: &str) -> &str {
    name.rsplit_once('.').map_or(name, |(layer, _)| layer)
}

impl ParamSource for AdapterFiles {
    fn load(&self, param: &Param, range: Range<usize>, out: &mut [f32]) -> ferrospeed_tensor::Result<()> {
        let fail = |why: String| TensorError::argument("load adapter", format!("'{}' {why}", param.name()));
        let stored = self.find(param).ok_or_else(|| fail(format!("is not in {}", self.path.display())))?;
        if stored.shape != param.whole_shape().sizes() {
            return Err(fail(format!("is {:?} there, expected {}", stored.shape, param.whole_shape())));
        }
        let read = |run, out: &mut [f32]| self.tensors.floats(stored, run, out);
        param.each_run(range, out, read).map_err(|error| fail(error.to_string()))
    }
}

//! Whole model directories: made afresh, or converted from others. Whole or absent, and one tensor in memory at a time.

use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use ferrospeed_files::unfinished::remove_left;
use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::store::{FromInitializers, ParamSource};
use ferrospeed_tensor::{DType, Param};
use half::{bf16, f16};
use serde_json::Value;

use crate::adapter::ADAPTER_CONFIG;
use crate::config::{ModelConfig, WindowRule, read_json};
use crate::decoder::name_of_dtype;
use crate::error::{ModelError, Result};
use crate::model_files::{ModelFiles, TextFiles};
use crate::pack::write_parameters;
use crate::weights::{BlockForm, TensorToWrite, Written, write_counted};

/// Shards are split at this size unless asked otherwise, as Hugging Face does.
pub const DEFAULT_SHARD_BYTES: usize = 5_000_000_000;

/// What says how text becomes tokens, and how a conversation becomes a text.
pub const TOKENIZER_FILES: [&str; 13] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
];

/// What says how a model is asked to write.
pub const GENERATION_FILES: [&str; 1] = ["generation_config.json"];

/// The tokens with which a model ends its texts: `eos_token_id`, a number or a list, of `generation_config.json`, or of
/// `config.json` where the former is not there or does not say it.
pub fn end_tokens(directory: &Path) -> Result<Vec<i64>> {
    for name in [GENERATION_FILES[0], "config.json"] {
        let path = directory.join(name);
        if !path.exists() {
            continue;
        }
        if let Some(found) = end_tokens_of(&read_json(&path)?, &path)? {
            return Ok(found);
        }
    }
    Ok(Vec::new())
}

/// Those that one of these files names, if it does.
pub(crate) fn end_tokens_of(config: &Value, path: &Path) -> Result<Option<Vec<i64>>> {
    let found = match &config["eos_token_id"] {
        Value::Null => return Ok(None),
        Value::Array(ids) => ids.iter().map(Value::as_i64).collect(),
        id => id.as_i64().map(|id| vec![id]),
    };
    let why = "eos_token_id: must be a token's number or a list of such";
    found.map(Some).ok_or_else(|| ModelError::file(path, why))
}

/// How weights are written.
#[derive(Debug, Clone, Copy)]
pub struct WriteOptions {
    /// The type of all float tensors; `None` keeps what they have (new models: f32).
    pub dtype: Option<DType>,
    /// A file ends before it grows beyond this; a larger tensor has a file of its own.
    pub max_shard_bytes: usize,
}

impl Default for WriteOptions {
    fn default() -> Self {
        WriteOptions { dtype: None, max_shard_bytes: DEFAULT_SHARD_BYTES }
    }
}

/// Copies the model in `source`, a directory or a GGUF file, to the new directory `target`, with another element type or other
/// shards. Files that are no weights, such as the tokenizer, come along. Of a GGUF file all weights are written whole, and so are
/// packed ones where another type is asked for.
///
/// The weights must be those of the model that `config.json` describes. A value that the new type cannot hold is an
/// error: it would silently become infinite.
pub fn convert(source: &Path, target: &Path, options: &WriteOptions) -> Result<Written> {
    let files = ModelFiles::open(source)?;
    if files.adapter().is_some() {
        return write_parameters(&files, target, None, options);
    }
    let is_stacked = files.config()["quantization_config"]["quant_method"] == "mxfp4";
    let is_packed = files.weights().tensors().keys().any(|name| BlockForm::of_tensor(name).is_some());
    if matches!(files.text(), TextFiles::Held { .. })
        || ((is_packed || is_stacked) && options.dtype.is_some())
    {
        let dtype = options.dtype.or(Some(files.dtype()));
        return write_parameters(&files, target, None, &WriteOptions { dtype, ..*options });
    }
    let (mut config, weights) = (files.config().clone(), files.weights());
    weights.check(files.model()?.parameters().as_slice())?;
    let new = NewDirectory::create(target)?;
    files.write_companions(new.path())?;
    let (mut tensors, mut float) = (Vec::new(), None);
    for (name, stored) in weights.tensors() {
        let dtype = options.dtype.filter(|_| stored.dtype.is_float()).unwrap_or(stored.dtype);
        float = float.or(Some(dtype).filter(|dtype| dtype.is_float()));
        tensors.push(TensorToWrite { name: name.clone(), shape: stored.shape.clone(), dtype });
    }
    if let Some(float) = float {
        set_dtype(&mut config, float);
    }
    write_config_as_it_is(new.path(), &config)?;
    let written = write_counted(new.path(), &tensors, options.max_shard_bytes, &mut |tensor| {
        let stored = &weights.tensors()[&tensor.name];
        if tensor.dtype == stored.dtype {
            return weights.bytes(stored);
        }
        let mut values = vec![0.0; stored.numel()];
        weights.floats(stored, 0..stored.numel(), &mut values)?;
        encode(&tensor.name, &values, tensor.dtype)
    })?;
    new.finish()?;
    Ok(written)
}

/// Makes a directory with the model in `base` and the adapter in `adapter` worked into its weights, which keep their type unless
/// another is asked for.
pub fn merge(base: &Path, adapter: &Path, target: &Path, options: &WriteOptions) -> Result<Written> {
    write_parameters(&ModelFiles::open_on(adapter, Some(base))?, target, None, options)
}

/// Makes a directory with a new model: the parsed `config.json` and weights drawn by its initialisers. The same seed
/// gives the weights that a training run of that seed starts with.
pub fn create(target: &Path, config: &Value, seed: u64, options: &WriteOptions) -> Result<Written> {
    let model = ModelConfig::from_value(config, WindowRule::default())?;
    let parameters = model.parameters();
    let dtype = options.dtype.unwrap_or(DType::F32);
    let mut config = config.clone();
    set_dtype(&mut config, dtype);
    let mut params: Vec<&Param> = parameters.as_slice().iter().collect();
    params.sort_by_key(|param| param.name());
    let tensors: Vec<TensorToWrite> = params
        .iter()
        .map(|param| TensorToWrite {
            name: param.name().into(),
            shape: param.shape().sizes().to_vec(),
            dtype,
        })
        .collect();
    let new = NewDirectory::create(target)?;
    write_config(new.path(), &config)?;
    let source = FromInitializers { seed };
    let written = write_counted(new.path(), &tensors, options.max_shard_bytes, &mut |tensor| {
        let place = params.binary_search_by_key(&tensor.name.as_str(), |param| param.name());
        let param = params[place.expect("every tensor to write comes from a parameter")];
        let mut values = zeros(param.name(), param.numel())?;
        source.load(param, 0..param.numel(), &mut values)?;
        encode(&tensor.name, &values, dtype)
    })?;
    new.finish()?;
    Ok(written)
}

/// Room for the values of a tensor, which a `config.json` may have asked for in any size.
fn zeros(name: &str, count: usize) -> Result<Vec<f32>> {
    let mut values = Vec::new();
    // Twice: they are written from a copy in their own type.
    let room = values.try_reserve_exact(count).and_then(|()| Vec::<u8>::new().try_reserve_exact(4 * count));
    room.map_err(|_| {
        ModelError::config(name, format!("{count} weights in one tensor are more than memory has room for"))
    })?;
    values.resize(count, 0.0);
    Ok(values)
}

/// Little-endian bytes of `values` in `dtype`; an error for a value that it cannot hold.
pub fn encode(name: &str, values: &[f32], dtype: DType) -> Result<Vec<u8>> {
    let narrowed = |bits: fn(f32) -> ([u8; 2], bool)| {
        let mut bytes = Vec::with_capacity(2 * values.len());
        for &value in values {
            let (pair, finite) = bits(value);
            if !finite && value.is_finite() {
                return Err(ModelError::TooLargeFor { name: name.into(), value, dtype });
            }
            bytes.extend(pair);
        }
        Ok(bytes)
    };
    match dtype {
        DType::BF16 => narrowed(|value| {
            let value = bf16::narrow(value);
            (value.to_le_bytes(), value.is_finite())
        }),
        DType::F16 => narrowed(|value| {
            let value = f16::narrow(value);
            (value.to_le_bytes(), value.is_finite())
        }),
        _ => Ok(values.iter().flat_map(|value| value.to_le_bytes()).collect()),
    }
}

/// Notes the element type under the keys that the configuration has for it: `dtype` from transformers 5 on, before it
/// `torch_dtype`, which all releases read and which is written where there is neither.
pub fn set_dtype(config: &mut Value, dtype: DType) {
    let newer = config.get("dtype").is_some();
    let keys: &[&str] = match (newer, config.get("torch_dtype").is_some()) {
        (true, true) => &["dtype", "torch_dtype"],
        (true, false) => &["dtype"],
        (false, _) => &["torch_dtype"],
    };
    if let Some(config) = config.as_object_mut() {
        for key in keys {
            config.insert((*key).into(), name_of_dtype(dtype).into());
        }
    }
}

/// Copies those of the files `names` that `source` has; none onto itself. The folder is made where there is something to copy.
pub fn copy_files(source: &Path, target: &Path, names: &[&str]) -> Result<()> {
    let same = |a: &Path, b: &Path| matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b);
    for name in names {
        let (from, to) = (source.join(name), target.join(name));
        if from.is_file() && !same(&from, &to) {
            ferrospeed_files::create_folder(target).map_err(ModelError::io(target))?;
            copy_file(&from, &to)?;
        }
    }
    Ok(())
}

/// Copies a plain file, in place of another: whole, or not at all where the disk is full.
pub fn copy_file(from: &Path, to: &Path) -> Result<()> {
    let mut source = ferrospeed_files::open(from).map_err(ModelError::io(from))?;
    // A link stays one, and what is no plain file is refused: only those that are there need that.
    let is_plain = std::fs::symlink_metadata(to).map_or(true, |about| about.is_file());
    let is_full =
        |error: &std::io::Error| matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded);
    let made = is_plain.then(|| ferrospeed_files::create_beside(to));
    let (beside, mut target) = match made {
        Some(Ok(made)) => made,
        Some(Err(error)) if is_full(&error) => return Err(ModelError::io(to)(error)),
        // A folder that takes no new file may hold one that can be written.
        Some(Err(_)) | None => {
            let options = File::options().create(true).truncate(true).write(true).clone();
            let mut target = ferrospeed_files::open_to_write(to, &options).map_err(ModelError::io(to))?;
            return std::io::copy(&mut source, &mut target).map(drop).map_err(ModelError::io(to));
        }
    };
    let copied = std::io::copy(&mut source, &mut target).and_then(|_| std::fs::rename(&beside, to));
    copied.map_err(|error| {
        let _ = std::fs::remove_file(&beside);
        ModelError::io(to)(error)
    })
}

/// Writes `config.json`.
///
/// What it says of weights in few bits is left out: those that are written beside it are whole, or say so by their names.
pub fn write_config(directory: &Path, config: &Value) -> Result<()> {
    let mut config = config.clone();
    if let Some(config) = config.as_object_mut() {
        config.remove("quantization_config");
    }
    write_config_as_it_is(directory, &config)
}

fn write_config_as_it_is(directory: &Path, config: &Value) -> Result<()> {
    write_json(&directory.join("config.json"), config)
}

pub(crate) fn write_json(path: &Path, value: &Value) -> Result<()> {
    ferrospeed_files::write(path, format!("{value:#}\n")).map_err(ModelError::io(path))
}

/// Copies the plain files of a model directory that are neither weights nor `config.json`.
pub(crate) fn copy_companions(source: &Path, target: &Path) -> Result<()> {
    const WEIGHTS: [&str; 9] = [
        ".safetensors",
        ".safetensors.index.json",
        ".bin",
        ".bin.index.json",
        ".pt",
        ".pth",
        ".h5",
        ".msgpack",
        ".partial",
    ];
    let is_weights = |name: &str| {
        let is_unfinished = name.starts_with('.') && name.contains(".partial-");
        is_unfinished || WEIGHTS.iter().any(|ending| name.ends_with(ending))
    };
    for entry in std::fs::read_dir(source).map_err(ModelError::io(source))? {
        let path = entry.map_err(ModelError::io(source))?.path();
        let Some(name) = path.file_name() else { continue };
        let text = name.to_string_lossy();
        if path.is_file() && text != "config.json" && text != ADAPTER_CONFIG && !is_weights(&text) {
            copy_file(&path, &target.join(name))?;
        }
    }
    Ok(())
}

/// What marks a weight file of ours.
const WEIGHT_ENDINGS: [&str; 2] = [".safetensors", ".safetensors.index.json"];

/// A model directory in the making: written under another name, and moved to its place when it is complete. Dropped before, it is
/// removed with all folders that were made for it.
///
/// A directory that is there, which may be the place of a mounted disk, is not replaced: the files are written into a folder in it,
/// and moved up when all are there.
#[derive(Debug)]
pub struct NewDirectory {
    target: PathBuf,
    partial: PathBuf,
    /// Held as long as it is written, for [`NewDirectory::sweep`].
    _lock: Option<File>,
    /// Folders above it that were not there, the innermost first.
    made: Vec<PathBuf>,
    is_finished: bool,
}

impl NewDirectory {
    /// Refuses a place where something is.
    pub fn create(target: &Path) -> Result<NewDirectory> {
        NewDirectory::sweep(target);
        let occupied = match std::fs::read_dir(target) {
            Ok(mut entries) => entries.next().is_some(),
            Err(error) => error.kind() != std::io::ErrorKind::NotFound,
        };
        match occupied {
            true => Err(ModelError::file(target, "is already there; name a new directory")),
            false => NewDirectory::begin(target),
        }
    }

    /// In a directory that may hold files: weights and `config.json` are replaced, all else stays. Only for who has it alone: what
    /// one that was killed has left there is removed.
    pub fn over(target: &Path) -> Result<NewDirectory> {
        for entry in std::fs::read_dir(target).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let name = name.as_encoded_bytes();
            if name.starts_with(b".") && name.ends_with(b".partial") && entry.path().is_dir() {
                std::fs::remove_dir_all(entry.path()).map_err(ModelError::io(entry.path()))?;
            }
        }
        NewDirectory::begin(target)
    }

    /// Removes what processes that were killed have left of the same directory, in it and beside it.
    pub fn sweep(target: &Path) {
        remove_left(target, Metadata::is_dir, |found| found.strip_prefix('.')?.strip_suffix(".partial"));
        if let Some(name) = target.file_name() {
            let prefix = format!(".{}.", name.to_string_lossy());
            remove_left(parent_of(target), Metadata::is_dir, |found| {
                found.strip_prefix(&prefix)?.strip_suffix(".partial")
            });
        }
    }

    fn begin(target: &Path) -> Result<NewDirectory> {
        let name =
            target.file_name().ok_or_else(|| ModelError::file(target, "names no directory to make"))?;
        ferrospeed_files::expect_own_links(target).map_err(ModelError::io(target))?;
        let process = std::process::id();
        let partial = if target.is_dir() {
            target.join(format!(".{process}.partial"))
        } else {
            let mut beside = OsString::from(".");
            beside.push(name);
            beside.push(format!(".{process}.partial"));
            target.with_file_name(beside)
        };
        let parent = parent_of(target);
        let absent = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
        let made = parent.ancestors().take_while(absent).map(Path::to_path_buf).collect();
        let mut new =
            NewDirectory { target: target.to_path_buf(), partial, _lock: None, made, is_finished: false };
        ferrospeed_files::create_folder(parent).map_err(ModelError::io(parent))?;
        std::fs::create_dir(&new.partial).map_err(ModelError::io(&new.partial))?;
        new._lock = File::open(&new.partial).ok().filter(|folder| folder.try_lock().is_ok());
        Ok(new)
    }

    /// Where its files go.
    pub fn path(&self) -> &Path {
        &self.partial
    }

    /// Gives it its name.
    pub fn finish(mut self) -> Result<()> {
        // The names must be on the disk before the directory that shows them is.
        sync_directory(&self.partial)?;
        if self.partial.parent() == Some(&self.target) {
            move_up(&self.partial, &self.target)?;
            sync_directory(&self.target)?;
        } else {
            std::fs::rename(&self.partial, &self.target).map_err(ModelError::io(&self.target))?;
        }
        self.is_finished = true;
        sync_directory(parent_of(&self.target))
    }
}

impl Drop for NewDirectory {
    fn drop(&mut self) {
        if !self.is_finished {
            // What cannot be removed stays under a name that says what it is.
            let _ = std::fs::remove_dir_all(&self.partial);
            self.made.iter().for_each(|folder| drop(std::fs::remove_dir(folder)));
        }
    }
}

/// Moves complete files into the directory above, in place of an earlier model's; the configuration, which makes it a model or an
/// adapter, is last, and that of the other of the two goes with its weights.
fn move_up(from: &Path, to: &Path) -> Result<()> {
    let names = |folder: &Path| -> Result<Vec<OsString>> {
        let entries = std::fs::read_dir(folder).map_err(ModelError::io(folder))?;
        entries.map(|entry| Ok(entry.map_err(ModelError::io(folder))?.file_name())).collect()
    };
    let move_one = |name: &OsString| {
        std::fs::rename(from.join(name), to.join(name)).map_err(ModelError::io(to.join(name)))
    };
    let makes_it = |name: &OsString| name == "config.json" || name == ADAPTER_CONFIG;
    let (config, new): (Vec<OsString>, Vec<OsString>) = names(from)?.into_iter().partition(makes_it);
    new.iter().try_for_each(move_one)?;
    for old in names(to)?.iter().filter(|old| !new.contains(old) && !config.contains(old)) {
        let path = to.join(old);
        let is_weights = WEIGHT_ENDINGS.iter().any(|ending| old.to_string_lossy().ends_with(ending));
        if (is_weights || !config.is_empty() && makes_it(old)) && path.is_file() {
            std::fs::remove_file(&path).map_err(ModelError::io(&path))?;
        }
    }
    config.iter().try_for_each(move_one)?;
    std::fs::remove_dir(from).map_err(ModelError::io(from))
}

fn parent_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn sync_directory(path: &Path) -> Result<()> {
    File::open(path).and_then(|directory| directory.sync_all()).map_err(ModelError::io(path))
}

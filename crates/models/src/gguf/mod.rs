//! GGUF files: models of llama.cpp in one file, with their configuration and their tokenizer.
//!
//! They are read as if they were a Hugging Face directory: the metadata becomes a `config.json`, tensors get their usual names
//! and the order of rows that goes with them, the vocabulary becomes a `tokenizer.json`. The types F32, F16, BF16, Q8_0, Q4_0,
//! Q4_K and Q6_K are read, and the architectures of our families whose tensors differ in name and order alone. Everything else is
//! refused by name. Nothing in a file is believed before it is checked, and nothing in it is ever run.

mod config;
mod header;
mod metadata;
mod reader;
mod tensors;
mod tokenizer;

use std::io::Read;
use std::path::Path;

use ferrospeed_tensor::DType;
use serde_json::{Value as Json, json};

use crate::error::{ModelError, Result};
use crate::weights::{WeightFile, WeightFiles};
use header::{Header, TensorType};
use metadata::Metadata;
use tensors::ROPE_FACTORS;

/// A file that was opened.
pub(crate) struct Opened {
    /// What would be its `config.json`.
    pub(crate) config: Json,
    pub(crate) weights: WeightFiles,
    /// The type to compute in.
    pub(crate) dtype: DType,
    /// What would be its `tokenizer.json`, or why there is none.
    pub(crate) tokenizer: Result<Json>,
    /// What would be its `tokenizer_config.json`.
    pub(crate) tokenizer_config: Json,
}

/// Whether this is such a file, by its name or its first bytes.
pub fn is_gguf(path: &Path) -> bool {
    let is_named = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf"));
    path.is_file() && (is_named || begins_as_one(path))
}

fn begins_as_one(path: &Path) -> bool {
    let mut first = [0; header::MAGIC.len()];
    ferrospeed_files::open(path).is_ok_and(|mut file| file.read_exact(&mut first).is_ok())
        && first == header::MAGIC
}

/// The weights of such a file.
pub fn weights(path: &Path) -> Result<WeightFiles> {
    Ok(open(path)?.weights)
}

/// Opens a file; its weights are read when somebody asks for them.
pub(crate) fn open(path: &Path) -> Result<Opened> {
    let opened = || ferrospeed_files::open(path).map_err(ModelError::io(path));
    let (file, data) = (opened()?, opened()?);
    let file_bytes = file.metadata().map_err(ModelError::io(path))?.len();
    let header = Header::read(file, file_bytes).map_err(|why| ModelError::file(path, why))?;
    let data = WeightFile::of_data(path, data, header.data_start);
    let metadata = Metadata { path, values: &header.metadata };
    let factors = rope_factors(path, &header, &data)?;
    let (mut config, shape) = config::config(&metadata, &header, factors.as_deref())?;
    let weights = WeightFiles::of_tensors(data, tensors::tensors(path, &header, shape)?);
    let dtype = match header.tensors.get("token_embd.weight").map(|entry| entry.form) {
        Some(TensorType::F32) => DType::F32,
        Some(TensorType::F16) => DType::F16,
        _ => DType::BF16,
    };
    crate::directory::set_dtype(&mut config, dtype);
    let (tokenizer, tokenizer_config) = match tokenizer::tokenizer(&metadata) {
        Ok((tokenizer, config)) => (Ok(tokenizer), config),
        Err(error) => (Err(error), json!({"chat_template": tokenizer::chat_template(&metadata)?})),
    };
    Ok(Opened { config, weights, dtype, tokenizer, tokenizer_config })
}

fn rope_factors(path: &Path, header: &Header, data: &WeightFile) -> Result<Option<Vec<f32>>> {
    const MOST: usize = 1 << 12;
    let Some(entry) = header.tensors.get(ROPE_FACTORS) else { return Ok(None) };
    if entry.form != TensorType::F32 || entry.bytes.len() > MOST {
        return Err(ModelError::file(path, format!("'{ROPE_FACTORS}' holds no factors of frequencies")));
    }
    let mut bytes = vec![0; entry.bytes.len()];
    data.read(entry.bytes.start, &mut bytes)?;
    Ok(Some(bytes.as_chunks().0.iter().map(|four| f32::from_le_bytes(*four)).collect()))
}

//! Loading a sharded model, beside reading the same files and throwing the bytes away: the page cache's own speed.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Instant;

use ferrospeed_comm::private;
use ferrospeed_models::directory::{WriteOptions, create};
use ferrospeed_models::weights::WeightFiles;
use ferrospeed_models::{Decoder, ModelError};
use ferrospeed_tensor::store::PlainStore;
use ferrospeed_tensor::{DType, Device};
use serde_json::{Value, json};

use super::measure::peak_rss_bytes;

const SHARD_BYTES: usize = 500_000_000;

/// A directory for the model, removed in the end.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        // A system that clears its temporary files takes what cannot be removed here.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Best seconds of loading f32 shards as `dtype` and of reading them; `new_model` gives unattached handles.
pub(super) fn measure(
    config: &Value,
    new_model: impl Fn() -> Result<Decoder, ModelError>,
    dtype: DType,
    device: &Device,
    repeats: u64,
) -> Result<Value, ModelError> {
    let own = private::folder().map_err(|source| ModelError::Io { path: std::env::temp_dir(), source })?;
    let scratch = Scratch(own.join(format!("bench-{}", std::process::id())));
    let written =
        create(&scratch.0, config, 42, &WriteOptions { dtype: None, max_shard_bytes: SHARD_BYTES })?;
    let before_bytes = peak_rss_bytes();
    let (mut load_s, mut read_s) = (f64::INFINITY, f64::INFINITY);
    let (mut model_bytes, mut largest_bytes) = (0, 0);
    for _ in 0..repeats {
        let began = Instant::now();
        let weights = WeightFiles::open_directory(&scratch.0)?;
        for path in weights.paths() {
            read_through(path).map_err(|source| ModelError::Io { path: path.to_path_buf(), source })?;
        }
        read_s = read_s.min(began.elapsed().as_secs_f64());
        let model = new_model()?;
        let params = model.parameters().as_slice();
        let began = Instant::now();
        let weights = WeightFiles::open_directory(&scratch.0)?;
        weights.check(params)?;
        let store = PlainStore::attach(params, dtype, device, &weights)?;
        load_s = load_s.min(began.elapsed().as_secs_f64());
        model_bytes = store.flat().numel() * dtype.size_bytes();
        largest_bytes = weights.tensors().values().map(|tensor| tensor.size_bytes()).max().unwrap_or(0);
    }
    Ok(json!({
        "best_s": load_s,
        "file_bytes": written.bytes,
        "files": written.files,
        "gb_per_s": written.bytes as f64 / load_s / 1e9,
        "reading_gb_per_s": written.bytes as f64 / read_s / 1e9,
        "model_bytes": model_bytes,
        "largest_tensor_bytes": largest_bytes,
        "rss_before_bytes": before_bytes,
        "peak_rss_bytes": peak_rss_bytes(),
    }))
}

fn read_through(path: &Path) -> std::io::Result<()> {
    let mut file = ferrospeed_files::open(path)?;
    let mut buffer = vec![0; 1 << 20];
    while file.read(&mut buffer)? > 0 {}
    Ok(())
}

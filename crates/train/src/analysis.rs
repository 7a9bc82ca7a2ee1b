//! Indexes of how hard a recipe's sequences are, for a curriculum by metrics.

use std::path::{Path, PathBuf};

use ferrospeed_data::{Analysis, Metric, Tell, analyze as write_indexes};
use serde_json::{Value, json};

use crate::error::{Result, TrainError};
use crate::prepare::{DataAlone, data_alone};
use crate::recipe::Recipe;

/// Writes an index of each metric for the sequences that a recipe trains on. Text becomes tokens in `out`, unless the recipe
/// says where; `tell_text` hears how far that is, `tell` how many sequences of how many were read.
pub fn analyze(
    recipe: &Recipe,
    path: &Path,
    metrics: &[Metric],
    out: &Path,
    tell_text: Tell<'_>,
    tell: &mut dyn FnMut(u64, u64),
) -> Result<Vec<Analysis>> {
    let cache = recipe.data.cache.clone().unwrap_or_else(|| out.join("tokens"));
    let DataAlone { mut sequences, end_token } = data_alone(recipe, path, &cache, tell_text)?;
    if metrics.contains(&Metric::SequenceLength) && !recipe.data.documents_are_apart() {
        sequences = sequences.by_documents(end_token)?;
    }
    Ok(write_indexes(&sequences, metrics, out, tell)?)
}

/// A recipe of files alone, whose kind their names tell. Only its data means anything.
pub fn recipe_of_files(
    files: &[PathBuf],
    sequence: u64,
    tokenizer: Option<&str>,
    overrides: &[String],
) -> Result<Recipe> {
    let origin = Path::new("--data");
    let refuse =
        |problem: &str| TrainError::Recipe { path: origin.to_path_buf(), problems: vec![problem.to_owned()] };
    let mut kinds: Vec<&str> = files.iter().map(|file| kind_of(file)).collect();
    kinds.dedup();
    let [kind] = kinds[..] else {
        return Err(refuse(
            "the files are of several kinds, by their names; give those of one kind, or a recipe",
        ));
    };
    let mut model = json!({ "preset": "gpt2", "layers": 1, "width": 64, "heads": 1 });
    if ["tokens", "megatron"].contains(&kind) {
        // Files of tokens do not say how many there are: any that a recipe may have will do.
        model["vocabulary"] = (1u64 << 24).into();
    }
    let mut data = json!({ kind: files, "sequence": sequence });
    if let Some(tokenizer) = tokenizer {
        data["tokenizer"] = tokenizer.into();
    }
    let ds_config = json!({ "train_batch_size": 1, "optimizer": { "type": "AdamW" } });
    let value: Value =
        json!({ "name": "data", "steps": 1, "model": model, "data": data, "ds_config": ds_config });
    Recipe::from_value(origin, value, overrides)
}

/// The key of recipes for a file of this name.
fn kind_of(file: &Path) -> &'static str {
    match file.extension().and_then(|extension| extension.to_str()) {
        Some("jsonl" | "json") => "jsonl",
        Some("parquet") => "parquet",
        // Megatron's tokens lie beside an index of that name.
        Some("bin") if file.with_extension("idx").is_file() => "megatron",
        Some("bin") => "tokens",
        Some("idx") => "megatron",
        _ => "text",
    }
}

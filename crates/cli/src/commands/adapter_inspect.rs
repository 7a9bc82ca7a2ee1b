//! `ferrospeed model inspect` of a directory with an adapter: what it changes, of which model, and whether it fits that.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;

use ferrospeed_command::{Failure, terminal};
use ferrospeed_models::adapter::AdapterFiles;
use ferrospeed_models::decoder::{Spread, name_of_dtype};
use ferrospeed_models::{Decoder, ModelConfig, WindowRule};
use ferrospeed_nn::adapter::{Adapters, Scaling, part_of};
use ferrospeed_tune::plan::human;
use serde_json::json;

use super::model_directory::refusal;
use super::model_inspect::grouped;

pub(super) fn run(directory: &Path, base: Option<&Path>, as_json: bool) -> Result<ExitCode, Failure> {
    let files = AdapterFiles::open(directory).map_err(refusal)?;
    // What is known of an adapter without its model is told without it.
    let model = match files.base_directory(base) {
        Ok(base) => Some(fitted(&files, &base)?),
        Err(_) => None,
    };
    let text = if as_json { json_of(&files, model.as_ref()) } else { text_of(&files, model.as_ref()) };
    terminal::print_output(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// The model in `base` with the adapter, which fits it.
fn fitted(files: &AdapterFiles, base: &Path) -> Result<Decoder, Failure> {
    let config = ModelConfig::from_directory(base, WindowRule::default()).map_err(refusal)?;
    let ModelConfig::Decoder(config) = config else {
        return Err(Failure::Usage(format!("{} is not a causal language model", base.display())));
    };
    let model = Decoder::adapted(*config, &Spread::default(), files.adapters()).map_err(refusal)?;
    files.check(model.parameters().as_slice()).map_err(refusal)?;
    Ok(model)
}

fn kind(adapters: &Adapters) -> &'static str {
    match (adapters.magnitudes, adapters.scaling) {
        (true, Scaling::ByRank) => "DoRA",
        (true, Scaling::ByRootOfRank) => "DoRA with the factor of rsLoRA",
        (false, Scaling::ByRank) => "LoRA",
        (false, Scaling::ByRootOfRank) => "rsLoRA",
    }
}

/// How many adapters there are of each kind of layer.
fn layers(files: &AdapterFiles) -> BTreeMap<String, usize> {
    let mut layers = BTreeMap::new();
    for name in files.tensors().tensors().keys().filter(|name| name.ends_with(".lora_A.weight")) {
        let path = part_of(name).map_or(name.as_str(), |(path, _)| path);
        let word = path.rsplit_once('.').map_or(path, |(_, word)| word);
        *layers.entry(word.to_owned()).or_insert(0) += 1;
    }
    layers
}

fn counts(files: &AdapterFiles) -> (u64, u64, &'static str) {
    let tensors = files.tensors().tensors().values();
    let (numel, bytes) = tensors.fold((0, 0), |(numel, bytes), tensor| {
        (numel + tensor.numel() as u64, bytes + tensor.size_bytes() as u64)
    });
    (numel, bytes, files.dtype().map_or("no numbers", name_of_dtype))
}

fn text_of(files: &AdapterFiles, model: Option<&Decoder>) -> String {
    let (adapters, layers) = (files.adapters(), layers(files));
    let (numel, bytes, dtype) = counts(files);
    let of = files.base().unwrap_or("a model that it does not name");
    let mut text = format!(
        "{} of rank {}, alpha {}: an adapter of {of}\n",
        kind(adapters),
        adapters.rank,
        adapters.alpha
    );
    let kinds: Vec<String> = layers.iter().map(|(word, count)| format!("{word} {count}")).collect();
    // Writing to a text cannot fail.
    let _ = writeln!(text, "{} layers: {}", layers.values().sum::<usize>(), kinds.join(", "));
    if !adapters.saved_modules.is_empty() {
        let _ = writeln!(text, "trained whole: {}", adapters.saved_modules.join(", "));
    }
    let _ = writeln!(text, "trained parameters: {}, {} of {dtype}", grouped(numel), human(bytes));
    match model {
        Some(model) => {
            let all = model.parameters().as_slice().iter().filter(|param| part_of(param.name()).is_none());
            let all: u64 = all.map(|param| param.numel() as u64).sum();
            let share = 100.0 * numel as f64 / all.max(1) as f64;
            let _ = writeln!(text, "it fits the model, which has {} parameters ({share:.2} %)", grouped(all));
        }
        None => text
            .push_str("whether it fits is not known: the model is not here (--base names its directory)\n"),
    }
    text
}

fn json_of(files: &AdapterFiles, model: Option<&Decoder>) -> String {
    let (adapters, (numel, bytes, dtype)) = (files.adapters(), counts(files));
    let report = json!({
        "adapter": kind(adapters), "rank": adapters.rank, "alpha": adapters.alpha, "base": files.base(),
        "layers": layers(files), "modules_to_save": adapters.saved_modules, "parameters": numel, "bytes": bytes,
        "dtype": dtype, "fits": model.map(|_| true),
    });
    format!("{report:#}")
}

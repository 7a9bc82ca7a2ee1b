//! Which files of a repository are wanted.

use std::collections::BTreeSet;
use std::path::Path;

use glob::{MatchOptions, Pattern};
use serde_json::Value;

use crate::error::{HubError, Result};
use crate::listing::{Listing, RemoteFile};
use crate::name::{HubName, is_gguf};

/// What is wanted of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    /// A model: its configuration, its weights (an adapter's, or the GGUF file that the name names), tokenizer and
    /// chat template.
    Model,
    /// Its `config.json` alone, or the GGUF file.
    Config,
    /// Its tokenizer alone.
    Tokenizer,
    /// Data to train on: the files that the name's path matches, else those that are named after the training split.
    Data,
}

/// The files that are wanted, as far as is known.
pub(crate) struct Choice<'a> {
    pub(crate) files: Vec<&'a RemoteFile>,
    /// Whether these are all: an index that is not here yet may name more.
    pub(crate) is_final: bool,
}

impl Choice<'_> {
    /// The names of the files, if all are here.
    pub(crate) fn into_complete(self, root: &Path) -> Option<Vec<String>> {
        let are_here = self.is_final && self.files.iter().all(|file| file.is_whole_in(root));
        are_here.then(|| self.files.into_iter().map(|file| file.path.clone()).collect())
    }
}

/// An index of weights is no larger.
const MAX_INDEX_BYTES: u64 = 64 << 20;
/// Weights, in one file or with an index of several; the first that is there is taken. Torch's are read as data.
const WEIGHTS: [&str; 5] = [
    "model.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
];
/// What can be trained on, the first kind that is there before the others.
const DATA_ENDS: [&[&str]; 3] = [
    &[".parquet"],
    &[".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".json.gz", ".json.zst"],
    &[".txt", ".md"],
];
/// What describes data, and is none.
const ABOUT_DATA: [&str; 3] = ["dataset_infos.json", "dataset_info.json", "README.md"];
/// Words in the names of files that are kept for measuring.
const MEASURED: [&str; 5] = ["test", "validation", "valid", "eval", "dev"];

/// Chooses among what the server has; `root`: where the files lie that are here.
pub(crate) fn choose<'a>(
    name: &HubName,
    wanted: &Wanted,
    listing: &'a Listing,
    root: &Path,
) -> Result<Choice<'a>> {
    let unsuitable = |why: String| HubError::Unsuitable { name: name.to_string(), why };
    if let Some(path) = name.path() {
        let files: Vec<&RemoteFile> =
            listing.files.iter().filter(|file| matches_path(path, &file.path)).collect();
        if !files.is_empty() {
            return Ok(Choice { files, is_final: true });
        }
        let within = format!("{}/", path.trim_end_matches('/'));
        let files: Vec<&RemoteFile> =
            listing.files.iter().filter(|file| file.path.starts_with(&within)).collect();
        if files.is_empty() || *wanted != Wanted::Data {
            return Err(unsuitable(format!(
                "holds no file '{path}'; there are {}",
                some_of(listing, |_| true)
            )));
        }
        return data(files).map(|files| Choice { files, is_final: true }).map_err(unsuitable);
    }
    let at_root = |file: &&RemoteFile| !file.path.contains('/');
    let of_text = |file: &&RemoteFile| is_about_text(&file.path);
    match wanted {
        Wanted::Data => data(listing.files.iter().collect())
            .map(|files| Choice { files, is_final: true })
            .map_err(unsuitable),
        Wanted::Tokenizer => {
            let files: Vec<&RemoteFile> = listing.files.iter().filter(at_root).filter(of_text).collect();
            match files.iter().any(|file| file.path == "tokenizer.json") {
                true => Ok(Choice { files, is_final: true }),
                false => Err(unsuitable("holds no tokenizer.json".into())),
            }
        }
        Wanted::Config => match listing.file("config.json") {
            Some(file) => Ok(Choice { files: vec![file], is_final: true }),
            None => Err(unsuitable(format!("holds no config.json; {}", without_weights(listing)))),
        },
        Wanted::Model => {
            let mut files: Vec<&RemoteFile> =
                listing.files.iter().filter(at_root).filter(|file| belongs_to_model(&file.path)).collect();
            let Some(weights) = WEIGHTS.iter().find_map(|weights| listing.file(weights)) else {
                return Err(unsuitable(without_weights(listing)));
            };
            files.push(weights);
            let shards = match is_index(&weights.path) {
                true => shards(&root.join(&weights.path)),
                false => Some(BTreeSet::new()),
            };
            for shard in shards.iter().flatten() {
                let why = || unsuitable(format!("its {} names {shard}, which is not there", weights.path));
                files.push(listing.file(shard).ok_or_else(why)?);
            }
            Ok(Choice { files: in_order(files), is_final: shards.is_some() })
        }
    }
}

fn is_index(path: &str) -> bool {
    path.ends_with(".index.json")
}

fn in_order(mut files: Vec<&RemoteFile>) -> Vec<&RemoteFile> {
    files.sort_by(|one, other| one.path.cmp(&other.path));
    files.dedup_by(|one, other| one.path == other.path);
    files
}

/// What an index names, if it is here and one.
fn shards(index: &Path) -> Option<BTreeSet<String>> {
    let bytes = ferrospeed_files::read(index, MAX_INDEX_BYTES).ok()?;
    let index: Value = serde_json::from_slice(&bytes).ok()?;
    let files = index["weight_map"].as_object()?.values();
    Some(files.filter_map(|file| Some(file.as_str()?.to_owned())).collect())
}

/// Files beside the weights that say what a model is and how text becomes its tokens.
fn belongs_to_model(path: &str) -> bool {
    is_about_text(path) || (path.ends_with(".json") && !is_index(path))
}

fn is_about_text(path: &str) -> bool {
    let known = [
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
    ];
    known.contains(&path)
}

/// What to say of a repository without weights that can be read.
fn without_weights(listing: &Listing) -> String {
    let ggufs = some_of(listing, is_gguf);
    if !ggufs.is_empty() {
        return format!("holds GGUF files, of which the name has to name one (org/name/FILE.gguf): {ggufs}");
    }
    format!(
        "holds no weights that are read (model.safetensors, pytorch_model.bin or an adapter's); there are {}",
        some_of(listing, |_| true)
    )
}

/// Data of the training split: by the names of files, as `datasets` tells them apart.
fn data(all: Vec<&RemoteFile>) -> std::result::Result<Vec<&RemoteFile>, String> {
    let has_word = |file: &RemoteFile, words: &[&str]| {
        let path = file.path.to_ascii_lowercase();
        let mut found = path.split(|letter: char| !letter.is_ascii_alphanumeric());
        found.any(|found| words.contains(&found))
    };
    let is_data =
        |file: &&RemoteFile| !ABOUT_DATA.contains(&file.path.as_str()) && !file.path.starts_with('.');
    let of_kind = |ends: &[&str]| -> Vec<&RemoteFile> {
        let files = all.iter().copied().filter(is_data);
        files.filter(|file| ends.iter().any(|end| file.path.ends_with(end))).collect()
    };
    let there_are = || shown(all.iter().map(|file| file.path.as_str()));
    let Some(files) = DATA_ENDS.into_iter().map(of_kind).find(|files| !files.is_empty()) else {
        return Err(format!(
            "holds no data that is read (Parquet, JSON lines, text); there are {}",
            there_are()
        ));
    };
    let trained: Vec<&RemoteFile> = files.iter().copied().filter(|file| has_word(file, &["train"])).collect();
    let files = match trained.is_empty() {
        false => trained,
        true => files.into_iter().filter(|file| !has_word(file, &MEASURED)).collect(),
    };
    let folders: BTreeSet<&str> =
        files.iter().map(|file| file.path.rsplit_once('/').map_or("", |(folder, _)| folder)).collect();
    match folders.len() {
        0 => Err(format!("holds data to measure alone; name the files (org/name/PATH), of {}", there_are())),
        1 => Ok(files),
        _ => Err(format!(
            "holds data in several folders; name the one that is meant (org/name/FOLDER): {}",
            shown(folders.into_iter())
        )),
    }
}

/// Names are shown up to so many.
const SHOWN: usize = 12;

fn some_of(listing: &Listing, is_meant: impl Fn(&str) -> bool) -> String {
    shown(listing.files.iter().map(|file| file.path.as_str()).filter(|path| is_meant(path)))
}

fn shown<'a>(mut names: impl Iterator<Item = &'a str>) -> String {
    let shown: Vec<&str> = names.by_ref().take(SHOWN).collect();
    let more = names.count();
    shown.join(", ") + &if more > 0 { format!(" and {more} more") } else { String::new() }
}

/// Whether a file is meant by a path: its name, or a pattern.
fn matches_path(path: &str, file: &str) -> bool {
    let options = MatchOptions { require_literal_separator: true, ..MatchOptions::new() };
    path == file || Pattern::new(path).is_ok_and(|pattern| pattern.matches_with(file, options))
}

/// What a snapshot holds that others have brought: of a model its own files tell whether it is whole.
pub(crate) fn found_without_list(name: &HubName, wanted: &Wanted, root: &Path) -> Option<Vec<String>> {
    let is_here = |file: &str| root.join(file).is_file();
    if let Some(path) = name.path() {
        return is_here(path).then(|| vec![path.to_owned()]);
    }
    let are_here = |weights: &str| match is_index(weights) {
        true => shards(&root.join(weights)).is_some_and(|shards| shards.iter().all(|shard| is_here(shard))),
        false => is_here(weights),
    };
    let weights_are_here = || WEIGHTS.iter().any(|weights| are_here(weights));
    let is_whole = match wanted {
        Wanted::Config => is_here("config.json"),
        Wanted::Tokenizer => is_here("tokenizer.json"),
        Wanted::Model => {
            (is_here("config.json") || is_here("adapter_config.json"))
                && is_here("tokenizer.json")
                && weights_are_here()
        }
        Wanted::Data => false,
    };
    is_whole.then(|| files_below(root))
}

/// What a snapshot holds of what is wanted, be it all or not.
pub(crate) fn matching(name: &HubName, wanted: &Wanted, root: &Path) -> Option<Vec<String>> {
    let files: Vec<RemoteFile> =
        files_below(root).into_iter().map(|path| RemoteFile { path, size: None, hash: None }).collect();
    let listing = Listing { commit: String::new(), files };
    let choice = choose(name, wanted, &listing, root).ok()?;
    choice.into_complete(root)
}

/// The names of all files below a folder that lead to one.
fn files_below(root: &Path) -> Vec<String> {
    let (mut found, mut folders) = (Vec::new(), vec![root.to_path_buf()]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            let path = entry.path();
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(path),
                Ok(_) if path.is_file() => {
                    found.extend(path.strip_prefix(root).ok().and_then(Path::to_str).map(str::to_owned));
                }
                _ => {}
            }
        }
    }
    found.sort();
    found
}

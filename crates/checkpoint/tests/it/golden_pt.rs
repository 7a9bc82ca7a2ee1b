//! Torch files that were recorded, read and written again.

use std::path::{Path, PathBuf};

use super::common::{compare, files_below};
use ferrospeed_checkpoint::pt::{PtFile, StorageToWrite, Value, write_pt};
use ferrospeed_testkit::cases::Cases;
use ferrospeed_testkit::golden::{golden, read_json};

/// How many files of the repository's set have a description.
const DESCRIBED: usize = 87;

/// Every recorded torch file that has a description, with it.
fn described() -> Vec<(PathBuf, PathBuf)> {
    let set = golden();
    let mut found = Vec::new();
    for description in set.entries("checkpoint/pt_samples", ".json") {
        found.push((description.with_extension("pt"), description));
    }
    for group in ["checkpoint/runs", "checkpoint/pipeline_moe"] {
        for case in set.entries(group, "") {
            let torch_files =
                if case.join("ckpt").is_dir() { files_below(&case.join("ckpt"), ".pt") } else { Vec::new() };
            for file in torch_files {
                let description =
                    case.join(format!("dump.{}.json", file.file_name().unwrap().to_string_lossy()));
                if description.is_file() {
                    found.push((file, description));
                }
            }
        }
    }
    found
}

/// Compares each of them.
fn each(compare: impl Fn(&Path, &Path)) {
    let mut cases = Cases::of("checkpoint");
    for (file, description) in described() {
        cases.check(file.display(), || compare(&file, &description));
    }
    cases.finish(&golden(), DESCRIBED);
}

fn open(path: &Path) -> PtFile {
    PtFile::open(path).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn golden_torch_files_hold_what_was_recorded() {
    each(|file, description| {
        let opened = open(file);
        compare(&opened, opened.value(), &read_json(description), &file.display().to_string());
    });
}

#[test]
fn golden_torch_files_survive_being_written_again() {
    let folder = tempfile::tempdir().unwrap();
    each(|file, description| {
        let original = open(file);
        let mut storages = Vec::new();
        collect(original.value(), &mut storages);
        let copy = folder.path().join("copy.pt");
        let written: Vec<StorageToWrite> =
            storages.iter().map(|t| StorageToWrite { dtype: t.dtype, numel: t.storage_numel }).collect();
        write_pt(&copy, original.value(), &written, &mut |storage, range, out| {
            original.read(&storages[storage], range, out)
        })
        .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let again = open(&copy);
        assert_eq!(again.value(), original.value(), "{}", file.display());
        compare(&again, again.value(), &read_json(description), &file.display().to_string());
    });
}

/// One tensor that spans each storage, in order of their numbers.
fn collect(value: &Value, storages: &mut Vec<ferrospeed_checkpoint::pt::StoredTensor>) {
    match value {
        Value::Tensor(tensor) => {
            let index: usize = tensor.storage.parse().unwrap();
            if index == storages.len() {
                let mut whole = tensor.clone();
                (whole.offset, whole.shape, whole.stride) = (0, vec![tensor.storage_numel], vec![1]);
                storages.push(whole);
            }
        }
        Value::List(items) | Value::Tuple(items) | Value::Set(items) => {
            items.iter().for_each(|item| collect(item, storages));
        }
        Value::Dict(pairs) | Value::OrderedDict(pairs) => pairs.iter().for_each(|(key, value)| {
            collect(key, storages);
            collect(value, storages);
        }),
        Value::Object { args, state, .. } => {
            args.iter().for_each(|item| collect(item, storages));
            state.iter().for_each(|state| collect(state, storages));
        }
        _ => {}
    }
}

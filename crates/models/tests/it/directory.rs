//! Model directories through the library: what is written is what is read, and damage never panics.

use std::path::{Path, PathBuf};

use ferrospeed_models::directory::{NewDirectory, WriteOptions, convert, copy_file, create, set_dtype};
use ferrospeed_models::presets::{Preset, PresetSizes};
use ferrospeed_models::weights::WeightFiles;
use ferrospeed_models::{ModelConfig, ModelError, WindowRule};
use ferrospeed_tensor::DType;
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_tensor::store::{FromInitializers, PlainStore};
use serde_json::{Value, json};

fn config() -> Value {
    let sizes = PresetSizes {
        layers: Some(2),
        width: Some(64),
        heads: Some(2),
        vocabulary: 100,
        sequence: 16,
        dropout: 0.0,
    };
    Preset::Llama.config(&sizes)
}

fn new_model(options: &WriteOptions) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("model");
    create(&place, &config(), 5, options).unwrap();
    (folder, place)
}

/// All values of the model, from a source, in the order of its parameters.
fn values(config: &Value, dtype: DType, source: &dyn ferrospeed_tensor::store::ParamSource) -> Vec<f32> {
    let params = ModelConfig::from_value(config, WindowRule::default()).unwrap().parameters();
    let store =
        PlainStore::attach(params.as_slice(), dtype, &ferrospeed_cpu::with_threads(1), source).unwrap();
    store.flat().to_vec_f32().unwrap()
}

#[test]
fn a_new_model_has_the_weights_that_training_starts_with() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let (_folder, place) = new_model(&WriteOptions { dtype: Some(dtype), ..Default::default() });
        let weights = WeightFiles::open_directory(&place).unwrap();
        assert_eq!(
            values(&config(), dtype, &weights),
            values(&config(), dtype, &FromInitializers { seed: 5 })
        );
    }
}

#[test]
fn the_element_type_is_named_where_the_configuration_names_it_and_nowhere_wrongly() {
    for (before, after) in [
        (json!({}), json!({"torch_dtype": "bfloat16"})),
        (json!({"torch_dtype": "float32"}), json!({"torch_dtype": "bfloat16"})),
        (json!({"dtype": "float32"}), json!({"dtype": "bfloat16"})),
        (
            json!({"dtype": "float32", "torch_dtype": "float16"}),
            json!({"dtype": "bfloat16", "torch_dtype": "bfloat16"}),
        ),
    ] {
        let mut config = before;
        set_dtype(&mut config, DType::BF16);
        assert_eq!(config, after);
    }
}

#[test]
fn any_part_of_a_tensor_can_be_read_alone() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let (_folder, place) = new_model(&WriteOptions { dtype: Some(dtype), max_shard_bytes: 20_000 });
        let weights = WeightFiles::open_directory(&place).unwrap();
        assert!(weights.paths().count() > 3);
        for stored in weights.tensors().values() {
            let count = stored.numel();
            let mut whole = vec![0.0; count];
            weights.floats(stored, 0..count, &mut whole).unwrap();
            for range in [0..0, 0..1, count / 3..count / 2 + 1, count - 1..count, count..count] {
                let mut part = vec![0.0; range.len()];
                weights.floats(stored, range.clone(), &mut part).unwrap();
                assert_eq!(part, whole[range]);
            }
            assert!(weights.floats(stored, 0..count + 1, &mut vec![0.0; count + 1]).is_err());
            assert!(weights.floats(stored, 0..1, &mut []).is_err());
        }
    }
}

#[test]
fn a_file_that_shrinks_while_it_is_open_gives_an_error() {
    let (_folder, place) = new_model(&WriteOptions::default());
    let weights = WeightFiles::open_directory(&place).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(place.join("model.safetensors")).unwrap();
    file.set_len(4096).unwrap();
    let last = weights.tensors().values().max_by_key(|stored| stored.size_bytes()).unwrap();
    assert!(matches!(weights.bytes(last), Err(ModelError::Io { .. })));
}

#[test]
fn a_disk_that_refuses_leaves_nothing_half_done() {
    let (folder, place) = new_model(&WriteOptions::default());
    // A plain file stands where the parent directory should be.
    std::fs::write(folder.path().join("file"), "").unwrap();
    let target = folder.path().join("file").join("model");
    assert!(convert(&place, &target, &WriteOptions::default()).is_err());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
}

/// Damages one file in one way, many times over; opening and reading may fail but never panic.
fn survive(place: &Path, file: &str, damage: impl Fn(&mut Vec<u8>, &RandomKey)) {
    let path = place.join(file);
    let whole = std::fs::read(&path).unwrap();
    let params = ModelConfig::from_directory(place, WindowRule::default()).unwrap().parameters();
    for round in 0..400 {
        let mut bytes = whole.clone();
        damage(&mut bytes, &RandomKey::new(round, 1));
        std::fs::write(&path, &bytes).unwrap();
        if let Ok(weights) = WeightFiles::open_directory(place)
            && weights.check(params.as_slice()).is_ok()
        {
            for stored in weights.tensors().values().filter(|stored| stored.dtype.is_float()) {
                let _ = weights.floats(stored, 0..stored.numel(), &mut vec![0.0; stored.numel()]);
            }
        }
    }
    std::fs::write(&path, &whole).unwrap();
}

#[test]
fn damaged_headers_and_indices_never_panic() {
    let (_folder, place) = new_model(&WriteOptions { dtype: None, max_shard_bytes: 60_000 });
    let first = |path: &PathBuf| path.to_string_lossy().contains("model-00001-of-");
    let mut files = std::fs::read_dir(&place).unwrap().map(|entry| entry.unwrap().path());
    let shard =
        files.find(first).expect("the model has shards").file_name().unwrap().to_string_lossy().into_owned();
    for file in [shard.as_str(), "model.safetensors.index.json"] {
        // Other bytes in the header (or the index), digits changed, ends cut off.
        survive(&place, file, |bytes, key| {
            for change in 0..3 {
                let at = key.word(2 * change) as usize % bytes.len().min(1500);
                bytes[at] = key.word(2 * change + 1) as u8;
            }
        });
        survive(&place, file, |bytes, key| {
            let digits: Vec<usize> =
                (0..bytes.len().min(1500)).filter(|&i| bytes[i].is_ascii_digit()).collect();
            if !digits.is_empty() {
                bytes[digits[key.word(0) as usize % digits.len()]] = b'0' + (key.word(1) % 10) as u8;
            }
        });
        survive(&place, file, |bytes, key| bytes.truncate(key.word(0) as usize % bytes.len()));
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = entries.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

fn write(new: &NewDirectory, files: &[&str]) {
    files.iter().for_each(|name| std::fs::write(new.path().join(name), "new").unwrap());
}

#[test]
fn a_model_takes_the_place_of_an_earlier_one_when_it_is_complete_and_not_before() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("run/model");
    // Given up, with the folders that were made for it.
    write(&NewDirectory::over(&model).unwrap(), &["config.json"]);
    assert!(!folder.path().join("run").exists());

    let first = NewDirectory::over(&model).unwrap();
    write(&first, &["config.json", "model-1.safetensors", "model.safetensors.index.json"]);
    first.finish().unwrap();
    for other in ["tokenizer.json", "notes.md"] {
        std::fs::write(model.join(other), "mine").unwrap();
    }
    std::fs::write(model.join("config.json"), "old").unwrap();
    let all = names(&model);
    let given_up = NewDirectory::over(&model).unwrap();
    write(&given_up, &["config.json", "model.safetensors"]);
    drop(given_up);
    assert_eq!(names(&model), all);
    assert_eq!(std::fs::read_to_string(model.join("config.json")).unwrap(), "old");

    // What one that was killed has left goes too.
    std::fs::create_dir(model.join(".1.partial")).unwrap();
    let second = NewDirectory::over(&model).unwrap();
    write(&second, &["config.json", "model.safetensors"]);
    second.finish().unwrap();
    assert_eq!(names(&model), ["config.json", "model.safetensors", "notes.md", "tokenizer.json"]);
    assert_eq!(std::fs::read_to_string(model.join("config.json")).unwrap(), "new");
    assert_eq!(names(&folder.path().join("run")), ["model"]);
    let error = NewDirectory::create(&model).unwrap_err().to_string();
    assert!(error.contains("already there"), "{error}");
}

#[test]
fn a_new_directory_removes_what_the_killed_have_left_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    // No process has the first number; the second has ours.
    let (dead, alive) = (4_194_999, std::process::id());
    let stay =
        [format!(".other.{dead}.partial"), format!(".model.{alive}.partial"), ".model.x.partial".into()];
    stay.iter().for_each(|name| std::fs::create_dir(at(name)).unwrap());
    std::fs::write(at(&format!(".model.{dead}.partial")), "a file").unwrap();
    std::os::unix::fs::symlink(at(&stay[0]), at(&format!(".model.{}.partial", dead + 1))).unwrap();
    let expected = names(folder.path());

    std::fs::create_dir_all(at(&format!(".model.{}.partial/deep", dead + 2))).unwrap();
    NewDirectory::sweep(&at("model"));
    assert_eq!(names(folder.path()), expected);

    // In a directory that was empty: it is so again.
    std::fs::create_dir_all(at(&format!("empty/.{dead}.partial"))).unwrap();
    let new = NewDirectory::create(&at("empty")).unwrap();
    write(&new, &["config.json"]);
    new.finish().unwrap();
    assert_eq!(names(&at("empty")), ["config.json"]);
}

#[test]
fn a_file_that_cannot_be_copied_whole_leaves_the_one_before() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("tokenizer.json");
    std::fs::write(&place, "the one before").unwrap();
    // A plain file by its kind, of which the first byte cannot be read.
    copy_file("/proc/self/mem".as_ref(), &place).unwrap_err();
    assert_eq!(std::fs::read_to_string(&place).unwrap(), "the one before");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing lies beside it");
    let other = folder.path().join("other");
    std::fs::write(&other, "another").unwrap();
    copy_file(&other, &place).unwrap();
    assert_eq!(std::fs::read_to_string(&place).unwrap(), "another");
}

//! Models whose weights lie in torch's own files, as `scripts/record-torch-weights` made them.

use std::path::{Path, PathBuf};

use ferrospeed_models::directory::{WriteOptions, convert};
use ferrospeed_models::weights::WeightFiles;
use ferrospeed_models::{ModelConfig, ModelFiles};
use ferrospeed_tensor::DType;
use ferrospeed_tensor::store::{ParamSource, PlainStore};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/torch")
}

/// All values of the model, in the order of its parameters.
fn values(model: &ModelConfig, dtype: DType, source: &dyn ParamSource) -> Vec<f32> {
    let params = model.parameters();
    let store =
        PlainStore::attach(params.as_slice(), dtype, &ferrospeed_cpu::with_threads(1), source).unwrap();
    store.flat().to_vec_f32().unwrap()
}

#[test]
fn a_directory_of_torch_files_holds_the_same_model_as_safetensors() {
    for (name, dtype, count) in [("gpt2", DType::F32, 1), ("llama", DType::BF16, 3)] {
        let files = ModelFiles::open(&folder().join(name)).unwrap();
        assert_eq!((files.dtype(), files.weights().paths().count()), (dtype, count), "{name}");
        let model = files.model().unwrap();
        files.weights().check(model.parameters().as_slice()).unwrap();
        let expected = WeightFiles::open(&[folder().join(name).join("expected.safetensors")]).unwrap();
        assert_eq!(values(&model, dtype, files.weights()), values(&model, dtype, &expected), "{name}");
        // Converted it is a directory of safetensors with the same content.
        let target = tempfile::tempdir().unwrap();
        convert(&folder().join(name), &target.path().join("new"), &WriteOptions::default()).unwrap();
        let converted = ModelFiles::open(&target.path().join("new")).unwrap();
        assert!(converted.weights().paths().all(|path| path.extension().unwrap() == "safetensors"));
        assert_eq!(values(&model, dtype, converted.weights()), values(&model, dtype, &expected), "{name}");
    }
}

#[test]
fn a_checkpoint_of_training_is_read_by_its_module() {
    let model = ModelFiles::open(&folder().join("llama")).unwrap();
    let module = WeightFiles::open(&[folder().join("module.pt")]).unwrap();
    let config = model.model().unwrap();
    let [found, expected] = [&module, model.weights()].map(|source| values(&config, DType::BF16, source));
    assert_eq!(found, expected);
}

#[test]
fn what_is_no_weight_is_refused_by_name() {
    let refusal = |name: &str| WeightFiles::open(&[folder().join(name)]).unwrap_err().to_string();
    assert!(
        refusal("crosswise.bin").contains("'crosswise' do not lie end to end"),
        "{}",
        refusal("crosswise.bin")
    );
    assert!(refusal("no-tensor.bin").contains("'step' is"), "{}", refusal("no-tensor.bin"));
    // What torch would turn over when it reads it, and weights of which there are two.
    assert!(refusal("negated.bin").contains("negated"), "{}", refusal("negated.bin"));
    for name in ["twice.bin", "beside.bin"] {
        assert!(refusal(name).contains("several places"), "{}", refusal(name));
    }
    // Of a file that is cut anywhere nothing is read.
    let whole = std::fs::read(folder().join("gpt2/pytorch_model.bin")).unwrap();
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("pytorch_model.bin");
    for length in (0..whole.len()).step_by(211) {
        std::fs::write(&path, &whole[..length]).unwrap();
        assert!(WeightFiles::open(std::slice::from_ref(&path)).is_err(), "cut after {length} bytes");
    }
    // What its bytes are changed to is refused, or changes nothing.
    let contents = |files: &WeightFiles| -> Vec<Option<Vec<u8>>> {
        files.tensors().values().map(|stored| files.bytes(stored).ok()).collect()
    };
    let expected = contents(&WeightFiles::open(&[folder().join("gpt2/pytorch_model.bin")]).unwrap());
    for at in (0..whole.len()).step_by(97) {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x55;
        std::fs::write(&path, &damaged).unwrap();
        let Ok(files) = WeightFiles::open(std::slice::from_ref(&path)) else { continue };
        if files.tensors().len() != expected.len() {
            continue;
        }
        for (found, expected) in contents(&files).into_iter().zip(&expected) {
            assert!(found.is_none() || found == *expected, "a changed byte {at} became part of the weights");
        }
    }
}

/// Where the bytes of a tensor of floats lie in a file.
fn place_of(whole: &[u8], values: &[f32]) -> usize {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    whole.windows(bytes.len()).position(|window| window == bytes).expect("the values are in the file")
}

#[test]
fn a_bit_that_changed_is_found_when_its_array_is_first_read_and_named() {
    let source = folder().join("gpt2/pytorch_model.bin");
    let whole = std::fs::read(&source).unwrap();
    let files = WeightFiles::open(std::slice::from_ref(&source)).unwrap();
    // No other tensor lies in its array.
    let (name, stored) = files.tensors().iter().find(|(name, _)| name.ends_with("mlp.c_fc.weight")).unwrap();
    let mut values = vec![0.0; stored.numel()];
    files.floats(stored, 0..stored.numel(), &mut values).unwrap();
    let mut damaged = whole.clone();
    damaged[place_of(&whole, &values) + stored.size_bytes() - 3] ^= 1;
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("pytorch_model.bin");
    std::fs::write(&path, &damaged).unwrap();
    let changed = WeightFiles::open(std::slice::from_ref(&path)).unwrap();
    // Others are read, and of this one not even what is as it was: of a part nobody knows which.
    for (other, stored) in changed.tensors() {
        assert_eq!(changed.bytes(stored).is_err(), other == name, "{other}");
    }
    assert!(changed.floats(&changed.tensors()[name], 0..1, &mut [0.0]).is_err());
    let error = changed.bytes(&changed.tensors()[name]).unwrap_err().to_string();
    for part in ["pytorch_model.bin", "/data/", "is damaged (checksum "] {
        assert!(error.contains(part), "{part}: {error}");
    }

    // Torch can be told to take no checksums; it writes 0 then.
    for at in 0..damaged.len() - 4 {
        if damaged[at..].starts_with(b"PK\x01\x02") {
            damaged[at + 16..at + 20].fill(0);
        }
    }
    std::fs::write(&path, &damaged).unwrap();
    let unchecked = WeightFiles::open(std::slice::from_ref(&path)).unwrap();
    let stored = &unchecked.tensors()[name];
    let mut found = vec![0.0; stored.numel()];
    unchecked.floats(stored, 0..stored.numel(), &mut found).unwrap();
    assert_eq!(found[..found.len() - 1], values[..values.len() - 1]);
}

#[test]
fn a_file_of_an_old_torch_is_told_from_one_that_is_none() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("pytorch_model.bin");
    let refusal = |content: &[u8]| {
        std::fs::write(&path, content).unwrap();
        WeightFiles::open(std::slice::from_ref(&path)).unwrap_err().to_string()
    };
    // The pickled magic number, the protocol, and the begin of what follows.
    let old = refusal(
        b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}q\x00(X\x10\x00\x00\x00",
    );
    assert!(old.contains("torch before 1.6") && old.contains("save it anew"), "{old}");
    let other = refusal(b"no file of torch at all");
    assert!(other.contains("not written by torch"), "{other}");
}

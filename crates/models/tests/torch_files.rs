//! Models whose weights lie in torch's own files, as `scripts/record-torch-weights` made them.

use std::path::{Path, PathBuf};

use ferrospeed_models::directory::{WriteOptions, convert};
use ferrospeed_models::weights::WeightFiles;
use ferrospeed_models::{ModelConfig, ModelFiles};
use ferrospeed_tensor::store::{ParamSource, PlainStore};
use ferrospeed_tensor::{DType, Device};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/torch")
}

/// All values of the model, in the order of its parameters.
fn values(model: &ModelConfig, dtype: DType, source: &dyn ParamSource) -> Vec<f32> {
    let params = model.parameters();
    let store = PlainStore::attach(params.as_slice(), dtype, &Device::cpu_with_threads(1), source).unwrap();
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
    // Of a file that is cut anywhere nothing is read, and what its bytes are changed to does no harm.
    let whole = std::fs::read(folder().join("gpt2/pytorch_model.bin")).unwrap();
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("pytorch_model.bin");
    for length in (0..whole.len()).step_by(211) {
        std::fs::write(&path, &whole[..length]).unwrap();
        assert!(WeightFiles::open(std::slice::from_ref(&path)).is_err(), "cut after {length} bytes");
    }
    for at in (0..whole.len()).step_by(97) {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x55;
        std::fs::write(&path, &damaged).unwrap();
        let Ok(files) = WeightFiles::open(std::slice::from_ref(&path)) else { continue };
        for stored in files.tensors().values() {
            // It may be read or refused; it ends.
            let _ = files.bytes(stored);
        }
    }
}

//! Tensors are found under the names that different releases give them.

use std::path::Path;

use ferrospeed_models::weights::{TensorToWrite, WeightFiles, write_file};
use ferrospeed_models::{ModelConfig, WindowRule};
use ferrospeed_tensor::store::PlainStore;
use ferrospeed_tensor::{DType, Device};
use ferrospeed_testkit::golden::repository_root;

/// The weights of a recorded model under other names, in a new directory.
fn renamed(case: &Path, rename: impl Fn(&str) -> Vec<String>) -> tempfile::TempDir {
    let weights = WeightFiles::open_directory(case).unwrap();
    let mut sources = std::collections::BTreeMap::new();
    let mut tensors = Vec::new();
    for (name, stored) in weights.tensors() {
        for new in rename(name) {
            tensors.push(TensorToWrite {
                name: new.clone(),
                shape: stored.shape.clone(),
                dtype: stored.dtype,
            });
            sources.insert(new, stored);
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let mut bytes = |tensor: &TensorToWrite| weights.bytes(sources[&tensor.name]);
    write_file(&folder.path().join("model.safetensors"), &tensors, &mut bytes).unwrap();
    folder
}

/// All values of the model that `case` describes, from the weights in `folder`.
fn values(case: &Path, folder: &Path) -> Vec<f32> {
    let params = ModelConfig::from_directory(case, WindowRule::default()).unwrap().parameters();
    let weights = WeightFiles::open_directory(folder).unwrap();
    weights.check(params.as_slice()).unwrap();
    let device = Device::cpu_with_threads(1);
    let store = PlainStore::attach(params.as_slice(), DType::F32, &device, &weights).unwrap();
    store.flat().to_vec_f32().unwrap()
}

#[test]
fn the_head_of_gpt_neox_is_found_under_both_of_its_names() {
    let case = repository_root().join("tests/golden/transformers/gpt_neox_partial");
    let head = |name: &str| vec![name.replace("embed_out.", "lm_head.")];
    assert_eq!(values(&case, renamed(&case, head).path()), values(&case, &case));
}

#[test]
fn a_masked_language_model_is_found_among_the_heads_of_pre_training() {
    let cases = repository_root().join("tests/golden/transformers");
    let (masked, pretrained) = (cases.join("bert_masked"), cases.join("bert_pretraining"));
    let found = values(&masked, &pretrained);
    let only =
        |name: &str| match name.starts_with("bert.pooler.") || name.starts_with("cls.seq_relationship.") {
            true => vec![],
            false => vec![name.to_owned()],
        };
    assert_eq!(found, values(&masked, renamed(&pretrained, only).path()));
}

//! Tensors are found under the names that different releases give them.

use std::path::Path;

use ferrospeed_models::weights::{TensorToWrite, WeightFiles, write_file};
use ferrospeed_models::{ModelConfig, WindowRule};
use ferrospeed_tensor::DType;
use ferrospeed_tensor::store::PlainStore;
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
    let device = ferrospeed_cpu::with_threads(1);
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

/// The weights of a recorded mixture as transformers 5 has them in memory: stacked, with `more` experts than there are.
fn stacked(case: &Path, more: usize) -> tempfile::TempDir {
    let weights = WeightFiles::open_directory(case).unwrap();
    let mut tensors: std::collections::BTreeMap<String, (Vec<usize>, Vec<u8>)> = Default::default();
    let bytes = |name: &str| weights.bytes(&weights.tensors()[name]).unwrap();
    for (name, stored) in weights.tensors() {
        let in_memory = name.replace(".block_sparse_moe.", ".mlp.");
        let Some((place, _)) = name.split_once(".experts.") else {
            tensors.insert(in_memory, (stored.shape.clone(), bytes(name)));
            continue;
        };
        let layers = if name.contains("block_sparse") {
            ["w1", "w3", "w2"]
        } else {
            ["gate_proj", "up_proj", "down_proj"]
        };
        let of = |expert: usize, layer: &str| format!("{place}.experts.{expert}.{layer}.weight");
        let experts =
            (0..).take_while(|&expert| weights.tensors().contains_key(&of(expert, layers[0]))).count();
        let shape = |layer: &str| weights.tensors()[&of(0, layer)].shape.clone();
        let place = place.replace(".block_sparse_moe", ".mlp");
        for (stack, parts) in [("gate_up_proj", &layers[..2]), ("down_proj", &layers[2..])] {
            let all = (0..experts + more).map(|expert| expert % experts);
            let content = all
                .flat_map(|expert| parts.iter().flat_map(move |layer| bytes(&of(expert, layer))))
                .collect();
            let [rows, columns] = shape(parts[0])[..] else { panic!("a matrix") };
            let shape = vec![experts + more, parts.len() * rows, columns];
            tensors.insert(format!("{place}.experts.{stack}"), (shape, content));
        }
    }
    let listed = |(name, (shape, _)): (&String, &(Vec<usize>, Vec<u8>))| TensorToWrite {
        name: name.clone(),
        shape: shape.clone(),
        dtype: DType::F32,
    };
    let list: Vec<TensorToWrite> = tensors.iter().map(listed).collect();
    let folder = tempfile::tempdir().unwrap();
    let mut bytes = |tensor: &TensorToWrite| Ok(tensors[&tensor.name].1.clone());
    write_file(&folder.path().join("model.safetensors"), &list, &mut bytes).unwrap();
    folder
}

#[test]
fn experts_are_found_one_by_one_and_stacked() {
    for name in ["mixtral", "qwen2_moe", "olmoe", "qwen3_moe"] {
        let case = repository_root().join("tests/golden/transformers").join(name);
        assert_eq!(values(&case, stacked(&case, 0).path()), values(&case, &case), "{name}");
    }
}

#[test]
fn a_stack_of_more_experts_than_the_model_has_is_refused() {
    let case = repository_root().join("tests/golden/transformers/mixtral");
    let params = ModelConfig::from_directory(&case, WindowRule::default()).unwrap().parameters();
    let folder = stacked(&case, 1);
    let error = WeightFiles::open_directory(folder.path()).unwrap().check(params.as_slice()).unwrap_err();
    assert!(error.to_string().contains("more than the model's experts"), "{error}");
}

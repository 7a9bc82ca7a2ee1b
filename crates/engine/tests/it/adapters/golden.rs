//! What PEFT trains, writes and merges (`scripts/record-adapters`).

use std::path::{Path, PathBuf};

use ferrospeed_comm::World;
use ferrospeed_engine::{Options, Setup, StepReport, initialize_model};
use ferrospeed_models::adapter::{AdapterFiles, MergedWeights, stored_name};
use ferrospeed_models::decoder::Spread;
use ferrospeed_models::weights::WeightFiles;
use ferrospeed_models::{Decoder, ModelConfig, ModelFiles, Tokens, WindowRule};
use ferrospeed_nn::Mode;
use ferrospeed_nn::adapter::{Adapters, Start, Targets};
use ferrospeed_tensor::store::{ParamSource, PlainStore};
use ferrospeed_tensor::{DType, Tensor};
use ferrospeed_testkit::close::assert_close;
use ferrospeed_testkit::golden::read_json;
use ferrospeed_testkit::property::{Random, seeds};
use ferrospeed_testkit::tensors;
use ferrospeed_zero::access::Which;
use serde_json::{Value, json};

use super::super::common::{config, device};
use super::decoder_config;

const CASES: [&str; 7] =
    ["llama-lora", "llama-rslora", "llama-dora", "llama-saved", "gpt2-lora", "gpt2-rslora", "gpt2-dora"];

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/adapters").join(name)
}

fn base_of(case: &str) -> PathBuf {
    folder(case.split_once('-').unwrap().0)
}

/// A directory with the same configuration, and the tensors of before the first step.
fn start_of(case: &str) -> tempfile::TempDir {
    let place = tempfile::tempdir().unwrap();
    let copy = |from: &str, to: &str| std::fs::copy(folder(case).join(from), place.path().join(to)).unwrap();
    copy("adapter_config.json", "adapter_config.json");
    copy("start.safetensors", "adapter_model.safetensors");
    place
}

fn batch(facts: &Value, number: usize) -> Tensor {
    let rows = facts["batches"][number].as_array().unwrap();
    let ids: Vec<i64> =
        rows.iter().flat_map(|row| row.as_array().unwrap()).map(|id| id.as_i64().unwrap()).collect();
    Tensor::from_slice(&ids, [rows.len(), ids.len() / rows.len()], &device(1)).unwrap()
}

#[test]
fn golden_adapters_are_trained_as_peft_trains_them() {
    for case in CASES {
        let facts = read_json(&folder(case).join("recorded.json"));
        let place = start_of(case);
        let files = AdapterFiles::open(place.path()).unwrap();
        let model = decoder_config(&read_json(&base_of(case).join("config.json")));
        let decoder = Decoder::adapted(model, &Spread::default(), files.adapters()).unwrap();
        let params = decoder.parameters().as_slice();
        files.check(params).unwrap_or_else(|error| panic!("{case}: {error}"));
        let base = WeightFiles::open_directory(&base_of(case)).unwrap();
        let source = Start::new(&base, Some(&files), 0, params);
        let value = json!({
            "train_batch_size": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
        });
        let setup = Setup::new(config(&value, 1), World::solo(), device(1));
        let options = Options { source: Some(&source), ..Default::default() };
        let mut engine = initialize_model(&setup, decoder.parameters(), options).unwrap();
        let losses = facts["losses"].as_array().unwrap();
        for (number, recorded) in losses.iter().enumerate() {
            let ids = batch(&facts, number);
            let loss = engine.forward(|mode| decoder.loss(&Tokens::new(ids.clone()), &ids, mode)).unwrap();
            let (found, recorded) = (f64::from(loss.item().unwrap()), recorded.as_f64().unwrap());
            assert!(
                (found - recorded).abs() <= 1e-5 * recorded,
                "{case}, step {number}: {found}, not {recorded}"
            );
            engine.backward(&loss).unwrap();
            assert!(matches!(engine.step().unwrap(), StepReport::Applied { .. }));
        }
        let last = AdapterFiles::open(&folder(case)).unwrap();
        for param in params.iter().filter(|param| param.is_trainable()) {
            let found = engine.store().full(param, Which::Weight).unwrap();
            let mut recorded = vec![0.0; param.numel()];
            last.load(param, 0..param.numel(), &mut recorded).unwrap();
            let what = format!("{case}: {}", param.name());
            // The gradient of a key's bias is zero but for rounding, which Adam makes as large as any.
            let is_free = |at: usize| {
                let third = found.len() / 3;
                param.name().ends_with("c_attn.bias") && (third..2 * third).contains(&at)
            };
            let kept = |values: &[f32]| -> Vec<f32> {
                values.iter().enumerate().filter(|(at, _)| !is_free(*at)).map(|(_, value)| *value).collect()
            };
            assert_close(&what, &kept(&found), &kept(&recorded), 1e-4, 0.0);
        }
    }
}

#[test]
fn golden_directories_of_peft_compute_the_same_and_merge_into_the_same_weights() {
    for case in CASES {
        let recorded = tensors::read(&folder(case).join("recorded.safetensors"));
        let facts = read_json(&folder(case).join("recorded.json"));
        let ids = batch(&facts, 20);
        let logits = |model: &Decoder, source: &dyn ParamSource| {
            let _store =
                PlainStore::attach(model.parameters().as_slice(), DType::F32, ids.device(), source).unwrap();
            let hidden = model.hidden(&Tokens::new(ids.clone()), None, Mode::Evaluate).unwrap();
            model.logits(&hidden).unwrap().to_vec_f32().unwrap()
        };
        let files = ModelFiles::open_on(&folder(case), Some(&base_of(case))).unwrap();
        let merged = Decoder::new(decoder_config(files.config()));
        let found = logits(&merged, files.source());
        assert_close(&format!("{case}: merged logits"), &found, recorded["logits"].floats(), 1e-4, 0.0);
        let adapter = AdapterFiles::open(&folder(case)).unwrap();
        let beside =
            Decoder::adapted(decoder_config(files.config()), &Spread::default(), adapter.adapters()).unwrap();
        let source = Start::new(files.weights(), Some(&adapter), 0, beside.parameters().as_slice());
        let found = logits(&beside, &source);
        assert_close(&format!("{case}: logits"), &found, recorded["logits"].floats(), 1e-4, 0.0);
        let mut compared = 0;
        for param in merged.parameters().as_slice() {
            let Some(recorded) = recorded.get(&format!("merged.{}", param.name())) else { continue };
            // In parts, of which none is a row.
            let mut found = vec![0.0; param.numel()];
            for start in (0..param.numel()).step_by(7) {
                let end = (start + 7).min(param.numel());
                files.source().load(param, start..end, &mut found[start..end]).unwrap();
            }
            assert_close(&format!("{case}: {}", param.name()), &found, recorded.floats(), 2e-6, 0.0);
            compared += 1;
        }
        assert!(compared >= 9, "{case}: {compared} weights");
    }
}

#[test]
fn golden_names_are_those_that_are_written() {
    for case in CASES {
        let files = AdapterFiles::open(&folder(case)).unwrap();
        let config = decoder_config(&read_json(&base_of(case).join("config.json")));
        let model = Decoder::adapted(config, &Spread::default(), files.adapters()).unwrap();
        let (adapters, found) = model.adapters().unwrap();
        let adapted: Vec<&str> = found.adapted.iter().map(|layer| layer.path.as_str()).collect();
        let trained = model.parameters().as_slice().iter().filter(|param| param.is_trainable());
        let mut names: Vec<String> = trained.map(|param| stored_name(param.name(), &adapted)).collect();
        names.sort();
        assert_eq!(names, files.tensors().tensors().keys().cloned().collect::<Vec<_>>(), "{case}");
        // The names of layers that are written mean the same ones.
        let named = Adapters { targets: Targets::Names(found.names()), ..adapters.clone() };
        let config = decoder_config(&read_json(&base_of(case).join("config.json")));
        let again = Decoder::adapted(config, &Spread::default(), &named).unwrap();
        assert_eq!(again.adapters().unwrap().1.adapted, found.adapted, "{case}");
    }
}

#[test]
fn directories_that_are_no_adapter_of_the_model_are_refused() {
    let open =
        |place: &Path| ModelFiles::open_on(place, Some(&folder("llama"))).map(drop).unwrap_err().to_string();
    let place = start_of("llama-lora");
    let path = place.path().join("adapter_config.json");
    let original = read_json(&path);
    let with = |key: &str, value: Value| {
        let mut changed = original.clone();
        changed[key] = value;
        std::fs::write(&path, changed.to_string()).unwrap();
        open(place.path())
    };
    assert!(with("peft_type", json!("IA3")).contains("peft_type: 'IA3' is not computed here"));
    let error = with("r", json!(5));
    assert!(
        error.contains(
            "wrong shape model.layers.0.self_attn.q_proj.lora_A.weight is [4, 20], expected [5, 20]"
        ),
        "{error}"
    );
    let error = with("target_modules", json!(["q_proj"]));
    assert!(
        error.contains("unknown     base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight"),
        "{error}"
    );
    let error = with("target_modules", json!(["q_proj", "v_proj", "o_proj"]));
    assert!(
        error.contains("missing     base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight [4, 24]"),
        "{error}"
    );
    let error = with("target_modules", json!(["c_attn"]));
    assert!(error.contains("unknown"), "{error}");
    std::fs::write(&path, original.to_string()).unwrap();
    let named = ModelFiles::open(place.path()).map(drop).unwrap_err().to_string();
    assert!(
        named.contains("is an adapter of the model 'llama', and no directory of that name is here"),
        "{named}"
    );
    // Beside a model nobody can tell which of the two is meant.
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(folder("llama").join(file), place.path().join(file)).unwrap();
    }
    let both = ModelFiles::open(place.path()).map(drop).unwrap_err().to_string();
    assert!(both.contains("holds the weights of a model and an adapter"), "{both}");
    let own = ModelFiles::open_on(&folder("llama"), Some(&folder("gpt2"))).map(drop).unwrap_err().to_string();
    assert!(own.contains("is no directory with an adapter"), "{own}");
    std::fs::remove_file(place.path().join("model.safetensors")).unwrap();
    std::fs::remove_file(place.path().join("adapter_model.safetensors")).unwrap();
    assert!(open(place.path()).contains("holds no tensors of the adapter"));
    let config = ModelConfig::from_directory(&folder("gpt2"), WindowRule::default()).unwrap();
    let weights = WeightFiles::open_directory(&folder("gpt2")).unwrap();
    let adapter = AdapterFiles::open(&folder("llama-lora")).unwrap();
    let error = MergedWeights::new(config, weights, adapter).unwrap_err().to_string();
    assert!(
        error.contains("unknown     base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"),
        "{error}"
    );
}

#[test]
fn damaged_adapters_are_read_or_refused() {
    let place = start_of("llama-rslora");
    let [config, tensors] =
        ["adapter_config.json", "adapter_model.safetensors"].map(|name| place.path().join(name));
    let [whole_config, whole_tensors] = [&config, &tensors].map(|path| std::fs::read(path).unwrap());
    let header = 8 + u64::from_le_bytes(whole_tensors[..8].try_into().unwrap()) as usize;
    let mut opened = 0;
    for seed in seeds(300) {
        let mut random = Random(seed);
        let (mut fields, mut head) = (whole_config.clone(), whole_tensors[..header].to_vec());
        random.damage(if seed % 3 == 0 { &mut head } else { &mut fields });
        std::fs::write(&config, &fields).unwrap();
        std::fs::write(&tensors, [&head, &whole_tensors[header..]].concat()).unwrap();
        let Ok(files) = ModelFiles::open_on(place.path(), Some(&folder("llama"))) else { continue };
        opened += 1;
        let model = Decoder::new(decoder_config(files.config()));
        for param in model.parameters().as_slice() {
            let mut values = vec![0.0; param.numel()];
            let _ = files.source().load(param, 0..param.numel(), &mut values);
        }
    }
    println!("{opened} damaged adapters still made sense");
}

//! Every family that `scripts/record-families` has recorded: logits, padding, training, greedy tokens, pages, export.
//!
//! Logits to 1e-4, losses of five steps to 1e-4, gradients by their norms, texts token by token.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferrospeed_models::directory::{WriteOptions, convert};
use ferrospeed_models::generate::{GenerateOptions, Sampling, generate};
use ferrospeed_models::weights::WeightFiles;
use ferrospeed_models::{Decoder, ModelConfig, Tokens, WindowRule};
use ferrospeed_nn::Mode;
use ferrospeed_tensor::store::{ParamSource, PlainStore};
use ferrospeed_tensor::{DType, Device, Out, PagedRows, PagedSequence, Tensor, autograd, ops};
use ferrospeed_testkit::close::assert_close;
use ferrospeed_testkit::golden::{read_json, repository_root};
use ferrospeed_testkit::tensors::{self, Recorded};
use serde_json::Value;

/// Cases that are recorded.
const KNOWN: usize = 43;

struct Case {
    folder: PathBuf,
    recorded: BTreeMap<String, Recorded>,
    facts: Value,
    device: Device,
}

impl Case {
    fn open(folder: &Path, device: &Device) -> Case {
        Case {
            folder: folder.to_path_buf(),
            recorded: tensors::read(&folder.join("recorded.safetensors")),
            facts: read_json(&folder.join("recorded.json")),
            device: device.clone(),
        }
    }

    fn model(&self) -> (Decoder, Arc<PlainStore>) {
        let ModelConfig::Decoder(config) =
            ModelConfig::from_directory(&self.folder, WindowRule::default()).unwrap()
        else {
            panic!("it is a decoder")
        };
        let model = Decoder::new(*config);
        let weights = WeightFiles::open_directory(&self.folder).unwrap();
        let params = model.parameters().as_slice();
        weights.check(params).unwrap();
        let store = PlainStore::attach(params, DType::F32, &self.device, &weights).unwrap();
        (model, store)
    }

    fn ids(&self) -> Tensor {
        let ids = &self.recorded["ids"];
        Tensor::from_slice(ids.integers(), &ids.shape, &self.device).unwrap()
    }

    fn rows(&self, key: &str) -> Vec<Vec<i64>> {
        let row = |row: &Value| row.as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect();
        self.facts[key].as_array().unwrap().iter().map(row).collect()
    }
}

fn check_logits(case: &Case) {
    let (model, _store) = case.model();
    let tokens = Tokens::new(case.ids());
    let hidden = model.hidden(&tokens, None, Mode::Evaluate).unwrap();
    let logits = model.logits(&hidden).unwrap().to_vec_f32().unwrap();
    assert_close("logits", &logits, case.recorded["logits"].floats(), 1e-4, 0.0);

    let mask = &case.recorded["mask"];
    let mask: Vec<Vec<u8>> =
        mask.integers().chunks(mask.shape[1]).map(|row| row.iter().map(|&m| m as u8).collect()).collect();
    let padded = Tokens { mask: Some(mask.clone()), ..tokens };
    let hidden = model.hidden(&padded, None, Mode::Evaluate).unwrap();
    let found = model.logits(&hidden).unwrap();
    let (width, found) = (found.shape().last(), found.to_vec_f32().unwrap());
    let recorded = case.recorded["logits_padded"].floats();
    for (row, _) in mask.concat().iter().enumerate().filter(|(_, real)| **real != 0) {
        let span = row * width..(row + 1) * width;
        assert_close(&format!("padded logits, row {row}"), &found[span.clone()], &recorded[span], 1e-4, 0.0);
    }
}

/// Five steps of plain gradient descent, as recorded; with blocks recomputed in backward the first loss has the same gradients.
fn check_training(case: &Case) {
    let (mut model, store) = case.model();
    let rate = case.facts["rate"].as_f64().unwrap() as f32;
    let (tokens, labels) = (Tokens::new(case.ids()), case.ids());
    for (step, recorded) in case.facts["losses"].as_array().unwrap().iter().enumerate() {
        let recorded = recorded.as_f64().unwrap() as f32;
        let loss = model.loss(&tokens, &labels, Mode::Train).unwrap();
        let found = loss.item().unwrap();
        assert!((found - recorded).abs() <= 1e-4, "loss of step {step}: {found}, recorded {recorded}");
        autograd::backward(&loss).unwrap();
        let gradients = store.take_gradients();
        if step == 0 {
            check_gradients(case, &model, &gradients);
            model.set_activation_checkpointing(true);
            autograd::backward(&model.loss(&tokens, &labels, Mode::Train).unwrap()).unwrap();
            check_gradients(case, &model, &store.take_gradients());
            model.set_activation_checkpointing(false);
        }
        for (param, gradient) in model.parameters().as_slice().iter().zip(gradients) {
            let Some(gradient) = gradient else { continue };
            let value = param.read().unwrap();
            let stepped = ops::sub(&*value, ops::affine(&gradient, rate, 0.0).unwrap()).unwrap().detach();
            // SAFETY: nothing runs, so nobody else looks at the values.
            case.device.backend().copy(&stepped, unsafe { Out::vouched(&value) }).unwrap();
        }
    }
}

fn check_gradients(case: &Case, model: &Decoder, gradients: &[Option<Tensor>]) {
    let all = case.facts["gradients"].as_object().unwrap();
    let largest = all.values().map(|recorded| recorded[0].as_f64().unwrap()).fold(0.0, f64::max);
    let trained =
        || model.parameters().as_slice().iter().zip(gradients).filter(|(param, _)| param.is_trainable());
    for (param, gradient) in trained() {
        let values = gradient.as_ref().map(|gradient| gradient.to_vec_f32().unwrap()).unwrap_or_default();
        let norm = values.iter().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
        let along =
            values.iter().enumerate().map(|(at, &g)| f64::from(g) * (0.37 * at as f64).cos()).sum::<f64>();
        let recorded = all.get(param.name()).unwrap_or_else(|| panic!("{} was not trained", param.name()));
        let recorded = [0, 1].map(|index| recorded[index].as_f64().unwrap());
        let tolerance = 1e-3 * recorded[0] + 1e-6 * largest;
        assert!(
            (norm - recorded[0]).abs() <= tolerance && (along - recorded[1]).abs() <= tolerance,
            "gradient of {}: {norm} long and {along} in a direction, recorded {recorded:?}",
            param.name()
        );
    }
    assert_eq!(all.len(), trained().count(), "every recorded gradient has its parameter");
}

fn check_texts(case: &Case) {
    let (model, _store) = case.model();
    let options = GenerateOptions {
        max_new_tokens: 32,
        sampling: Sampling::Greedy,
        end_tokens: Vec::new(),
        pad_token: 0,
    };
    let (prompts, recorded) = (case.rows("prompt"), case.rows("greedy"));
    let texts = generate(&model, &prompts, None, &options, &case.device, &mut |_, _| {}).unwrap();
    assert_eq!(texts, recorded, "greedy tokens");
    // Prompts in two pieces, and both texts in one pass, as a server has them.
    let blocks: Vec<Vec<u32>> = vec![vec![5, 0, 3], vec![1, 4, 2]];
    let mut state = model.new_pages(6, 16, &case.device).unwrap();
    let mut texts = prompts.clone();
    let mut known = 0;
    while texts[0].len() < recorded[0].len() {
        let count = if known == 0 { 4 } else { texts[0].len() - known };
        let of_text = |blocks: &Vec<u32>| PagedSequence { first: known, count, blocks: blocks.clone() };
        let rows = Arc::new(PagedRows { sequences: blocks.iter().map(of_text).collect() });
        let ids: Vec<i64> = texts.iter().flat_map(|text| text[known..known + count].to_vec()).collect();
        let hidden = model.run_pages(&ids, &rows, &mut state).unwrap();
        known += count;
        if known < texts[0].len() {
            continue;
        }
        let last = [count as i64 - 1, 2 * count as i64 - 1];
        let last = Tensor::from_slice(&last, [2], &case.device).unwrap();
        let logits = model.page_logits(&ops::index_select(&hidden, 0, &last).unwrap()).unwrap();
        let logits = logits.to_vec_f32().unwrap();
        for (text, logits) in texts.iter_mut().zip(logits.chunks(model.config().vocab)) {
            let best =
                (0..logits.len()).fold(0, |best, at| if logits[at] > logits[best] { at } else { best });
            text.push(best as i64);
        }
    }
    assert_eq!(texts, recorded, "served tokens");
}

fn check_export(case: &Case) {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("exported");
    let options = WriteOptions { dtype: Some(DType::F32), ..WriteOptions::default() };
    convert(&case.folder, &target, &options).unwrap();
    let (model, _store) = case.model();
    let weights = WeightFiles::open_directory(&target).unwrap();
    let ModelConfig::Decoder(config) = ModelConfig::from_directory(&target, WindowRule::default()).unwrap()
    else {
        panic!("it is a decoder")
    };
    assert_eq!(&*config, model.config(), "the configuration that is written means the same");
    for param in model.parameters().as_slice() {
        let mut found = vec![0.0; param.numel()];
        weights.load(param, 0..found.len(), &mut found).unwrap();
        assert_eq!(found, param.read().unwrap().to_vec_f32().unwrap(), "{}", param.name());
    }
}

fn check_all(device: &Device) {
    let root = repository_root().join("crates/models/tests/families");
    let mut folders: Vec<PathBuf> =
        std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    assert_eq!(folders.len(), KNOWN, "recorded cases");
    let checks: [(&str, fn(&Case)); 4] = [
        ("logits", check_logits),
        ("training", check_training),
        ("texts", check_texts),
        ("export", check_export),
    ];
    let mut failed = Vec::new();
    for folder in folders {
        let case = Case::open(&folder, device);
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        for (what, check) in checks {
            if catch_unwind(AssertUnwindSafe(|| check(&case))).is_err() {
                failed.push(format!("{name}: {what}"));
            }
        }
    }
    assert!(failed.is_empty(), "{} failed: {failed:#?}", failed.len());
}

#[test]
fn families_compute_what_transformers_computes() {
    check_all(&ferrospeed_cpu::with_threads(1));
}

#[test]
fn families_compute_what_transformers_computes_on_a_gpu() {
    if ferrospeed_cuda::device_count() == 0 {
        ferrospeed_testkit::skip::skip("no CUDA device");
        return;
    }
    check_all(&ferrospeed_cuda::device(0, &ferrospeed_cpu::device()).unwrap());
}

//! Every recorded model: hidden states, logits, loss, gradients and greedy tokens.
//!
//! Tolerances are the recordings' own: logits 2e-4 absolute, loss 1e-5 relative, gradients 1e-3 of the tensor's norm.

use std::collections::BTreeMap;
use std::path::Path;

use ferrospeed_models::generate::{GenerateOptions, Sampling, generate};
use ferrospeed_models::weights::WeightFiles;
use ferrospeed_models::{Bert, Decoder, ModelConfig, Tokens, WindowRule};
use ferrospeed_nn::Mode;
use ferrospeed_tensor::store::{PlainStore, PoisonStore};
use ferrospeed_tensor::{DType, Device, Param, Tensor, autograd, ops};
use ferrospeed_testkit::close::assert_close;
use ferrospeed_testkit::golden::{golden, read_json};
use ferrospeed_testkit::tensors::{self, Recorded};
use serde_json::Value;

struct Case {
    name: String,
    recorded: BTreeMap<String, Recorded>,
    facts: Value,
    device: Device,
}

impl Case {
    fn ids(&self, name: &str) -> Tensor {
        let recorded = &self.recorded[name];
        Tensor::from_slice(recorded.integers(), &recorded.shape, &self.device).unwrap()
    }

    fn mask(&self) -> Vec<Vec<u8>> {
        let recorded = &self.recorded["attention_mask_padded"];
        recorded
            .integers()
            .chunks(recorded.shape[1])
            .map(|row| row.iter().map(|&m| m as u8).collect())
            .collect()
    }

    fn expect(&self, what: &str, tensor: &Tensor) {
        if let Some(recorded) = self.recorded.get(what) {
            assert_eq!(tensor.sizes(), recorded.shape, "{}: {what}", self.name);
            let values = tensor.to_vec_f32().unwrap();
            assert_close(&format!("{}: {what}", self.name), &values, recorded.floats(), 2e-4, 0.0);
        }
    }

    /// Only where the mask says that a token is real.
    fn expect_padded(&self, what: &str, values: &Tensor) {
        let (actual, recorded) = (values.to_vec_f32().unwrap(), self.recorded[what].floats());
        let width = values.shape().last();
        for (row, &real) in self.mask().concat().iter().enumerate() {
            if real != 0 {
                let span = row * width..(row + 1) * width;
                let what = format!("{}: {what}, row {row}", self.name);
                assert_close(&what, &actual[span.clone()], &recorded[span], 2e-4, 0.0);
            }
        }
    }

    fn expect_loss(&self, key: &str, loss: &Tensor) {
        let (actual, recorded) = (f64::from(loss.item().unwrap()), self.facts[key].as_f64().unwrap());
        assert!(
            (actual - recorded).abs() <= 1e-5 * recorded.abs(),
            "{}: {key} {actual}, recorded {recorded}",
            self.name
        );
    }

    fn expect_gradients(&self, params: &[Param], gradients: &[Option<Tensor>]) {
        let norms = self.facts["grad_norms"].as_object().unwrap();
        let mut total = 0.0;
        // A key's bias moves all scores of a row alike: its true gradient is zero, what is recorded is rounding.
        let rounding = 1e-6 * self.facts["grad_global_norm"].as_f64().unwrap();
        for (param, gradient) in params.iter().zip(gradients) {
            let what = format!("{}: gradient of {}", self.name, param.name());
            let actual =
                gradient.as_ref().unwrap_or_else(|| panic!("{what} is missing")).to_vec_f32().unwrap();
            let norm = actual.iter().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
            total += norm * norm;
            let recorded = norms[param.name()].as_f64().unwrap();
            assert!(
                (norm - recorded).abs() <= 1e-3 * recorded + rounding,
                "{what}: norm {norm}, recorded {recorded}"
            );
            if let Some(recorded) = self.recorded.get(&format!("grad.{}", param.name())) {
                assert_close(&what, &actual, recorded.floats(), (1e-3 * norm + rounding) as f32, 0.0);
            }
        }
        assert_eq!(norms.len(), params.len(), "{}: every recorded gradient has its parameter", self.name);
        let recorded = self.facts["grad_global_norm"].as_f64().unwrap();
        assert!(
            (total.sqrt() - recorded).abs() <= 1e-3 * recorded,
            "{}: global norm {}",
            self.name,
            total.sqrt()
        );
    }
}

fn integers(value: &Value) -> Vec<Vec<i64>> {
    let rows = value.as_array().unwrap().iter();
    rows.map(|row| row.as_array().unwrap().iter().map(|v| v.as_i64().unwrap()).collect()).collect()
}

fn check_decoder(case: &Case, config: ferrospeed_models::DecoderConfig, weights: &WeightFiles) {
    let model = Decoder::new(config);
    let params = model.parameters().as_slice().to_vec();
    weights.check(&params).unwrap();
    let store = PlainStore::attach(&params, DType::F32, &case.device, weights).unwrap();

    let tokens = Tokens::new(case.ids("input_ids"));
    let (hidden, routers) = model
        .run(
            &tokens,
            None,
            Mode::Evaluate,
            Some(&mut |index, value| {
                // The last block's raw result is not recorded: hidden_last is behind the final norm.
                if index < model.config().layers {
                    case.expect(&format!("hidden_{index}"), value);
                }
            }),
        )
        .unwrap();
    case.expect("hidden_last", &hidden);
    case.expect("logits", &model.logits(&hidden).unwrap());
    if let Some(router) = routers.first() {
        case.expect("router_logits_layer0", router);
    }
    let padded = Tokens { mask: Some(case.mask()), ..tokens.clone() };
    let hidden = model.hidden(&padded, None, Mode::Evaluate).unwrap();
    case.expect_padded("logits_padded", &model.logits(&hidden).unwrap());

    let labels = case.ids("labels");
    let loss = model.loss(&tokens, &labels, Mode::Train).unwrap();
    case.expect_loss("loss", &loss);
    autograd::backward(&loss).unwrap();
    let gradients = store.take_gradients();
    if case.facts["grad_norms"].as_object().is_some_and(|norms| !norms.is_empty()) {
        case.expect_gradients(&params, &gradients);
    }

    for dtype in [DType::F32, DType::BF16, DType::F16] {
        check_bits(case, &model, dtype, &tokens, &labels, weights);
    }
    check_generation(case, &model);
}

/// The same again, blocks recomputed in backward, and a store that hides every value nobody borrows: none changes a bit.
fn check_bits(
    case: &Case,
    model: &Decoder,
    dtype: DType,
    tokens: &Tokens,
    labels: &Tensor,
    weights: &WeightFiles,
) {
    let run = |poisoned: bool, recomputed: bool| {
        let mut model = Decoder::new(model.config().clone());
        model.set_activation_checkpointing(recomputed);
        let params = model.parameters().as_slice();
        let (gradients, loss) = if poisoned {
            let store = PoisonStore::attach(params, dtype, &case.device, weights).unwrap();
            let loss = model.loss(tokens, labels, Mode::Train).unwrap();
            autograd::backward(&loss).unwrap();
            assert_eq!(store.borrowed(), 0);
            (store.vault().take_gradients(), loss)
        } else {
            let store = PlainStore::attach(params, dtype, &case.device, weights).unwrap();
            let loss = model.loss(tokens, labels, Mode::Train).unwrap();
            autograd::backward(&loss).unwrap();
            (store.take_gradients(), loss)
        };
        let bits = |tensor: &Tensor| tensor.to_vec_f32().unwrap().into_iter().map(f32::to_bits).collect();
        let gradients: Vec<Vec<u32>> =
            gradients.iter().map(|gradient| gradient.as_ref().map_or(Vec::new(), bits)).collect();
        (loss.item().unwrap().to_bits(), gradients)
    };
    let (loss, gradients) = run(false, false);
    for (poisoned, recomputed) in [(false, false), (false, true), (true, false), (true, true)] {
        let (loss_again, again) = run(poisoned, recomputed);
        let how = format!("{} in {dtype}, poisoned {poisoned}, recomputed {recomputed}", case.name);
        assert_eq!(loss_again, loss, "{how}: loss");
        for (param, (again, first)) in model.parameters().as_slice().iter().zip(again.iter().zip(&gradients))
        {
            assert_eq!(again.len(), first.len(), "{how}: gradient of {}", param.name());
            if let Some(at) = again.iter().zip(first).position(|(a, b)| a != b) {
                let [ours, theirs] = [again[at], first[at]].map(f32::from_bits);
                panic!("{how}: gradient of {}, element {at}: {ours}, plainly {theirs}", param.name());
            }
        }
    }
}

fn check_generation(case: &Case, model: &Decoder) {
    for run in case.facts["generate"].as_array().into_iter().flatten() {
        let options = GenerateOptions {
            max_new_tokens: run["max_new_tokens"].as_u64().unwrap() as usize,
            sampling: Sampling::Greedy,
            end_tokens: Vec::new(),
            pad_token: 0,
        };
        let mask: Vec<Vec<u8>> = integers(&run["attention_mask"])
            .into_iter()
            .map(|row| row.into_iter().map(|m| m as u8).collect())
            .collect();
        let output =
            generate(model, &integers(&run["prompt"]), Some(&mask), &options, &case.device, &mut |_, _| {})
                .unwrap();
        let recorded = integers(&run["output"]);
        assert_eq!(output, recorded, "{}: greedy tokens", case.name);

        // A prompt alone, without its padding, is continued in the same way.
        for ((prompt, mask), recorded) in integers(&run["prompt"]).iter().zip(&mask).zip(&recorded) {
            let real: Vec<i64> = prompt.iter().zip(mask).filter(|(_, m)| **m != 0).map(|(t, _)| *t).collect();
            let alone =
                generate(model, std::slice::from_ref(&real), None, &options, &case.device, &mut |_, _| {})
                    .unwrap();
            assert_eq!(alone[0][real.len()..], recorded[prompt.len()..], "{}: {real:?} alone", case.name);
        }
    }
}

fn check_mixture_loss(case: &Case, folder: &Path, weights: &WeightFiles) {
    if case.facts["loss_with_aux"].is_null() {
        return;
    }
    let mut config = read_json(&folder.join("config.json"));
    config["output_router_logits"] = true.into();
    let ModelConfig::Decoder(config) = ModelConfig::from_value(&config, WindowRule::OneMore).unwrap() else {
        panic!("a mixture is a decoder");
    };
    let model = Decoder::new(*config);
    let _store =
        PlainStore::attach(model.parameters().as_slice(), DType::F32, &case.device, weights).unwrap();
    let loss = model.loss(&Tokens::new(case.ids("input_ids")), &case.ids("labels"), Mode::Train).unwrap();
    case.expect_loss("loss_with_aux", &loss);
}

fn check_bert(case: &Case, model: &Bert, weights: &WeightFiles) {
    let params = model.parameters().as_slice().to_vec();
    weights.check(&params).unwrap();
    let store = PlainStore::attach(&params, DType::F32, &case.device, weights).unwrap();
    let (ids, types) = (case.ids("input_ids"), case.ids("token_type_ids"));
    let output = model
        .forward(&ids, Some(&types), None, Mode::Train, &mut |index, value| {
            case.expect(&format!("hidden_{index}"), value)
        })
        .unwrap();
    case.expect("hidden_last", &output.hidden);
    let of_text = if output.token_logits.is_some() { "seq_relationship_logits" } else { "logits" };
    for (what, found) in
        [("pooled", &output.pooled), ("logits", &output.token_logits), (of_text, &output.text_logits)]
    {
        found.iter().for_each(|found| case.expect(what, found));
    }
    let labels = case.recorded.contains_key("labels").then(|| case.ids("labels"));
    let next = case.recorded.contains_key("next_sentence_label").then(|| case.ids("next_sentence_label"));
    let loss = match (&output.token_logits, &output.text_logits, &output.pooled) {
        (Some(_), _, _) => model.loss(&output, labels.as_ref(), next.as_ref()).unwrap(),
        (None, Some(_), _) => model.loss(&output, None, labels.as_ref()).unwrap(),
        (None, None, pooled) => {
            let pooled = pooled.as_ref().expect("the encoder alone has a pooler");
            ops::add(mean_square(&output.hidden), mean_square(pooled)).unwrap()
        }
    };
    case.expect_loss("loss", &loss);
    autograd::backward(&loss).unwrap();
    case.expect_gradients(&params, &store.take_gradients());
    let mask = Tensor::from_slice(&case.mask().concat(), *ids.shape(), &case.device).unwrap();
    let padded = model.forward(&ids, Some(&types), Some(&mask), Mode::Evaluate, &mut |_, _| {}).unwrap();
    match (&padded.token_logits, &padded.text_logits) {
        (Some(logits), _) => case.expect_padded("logits_padded", logits),
        (None, Some(logits)) => case.expect("logits_padded", logits),
        (None, None) => case.expect_padded("hidden_padded", &padded.hidden),
    }
}

fn mean_square(x: &Tensor) -> Tensor {
    let sum = ops::sum(ops::mul(x, x).unwrap()).unwrap();
    ops::affine(&sum, 1.0 / x.numel() as f32, 0.0).unwrap()
}

#[test]
fn golden_models_match_their_recordings() {
    check_all(&ferrospeed_cpu::with_threads(1));
}

#[test]
fn golden_models_match_their_recordings_on_a_gpu() {
    if ferrospeed_cuda::device_count() == 0 {
        ferrospeed_testkit::skip::skip("no CUDA device");
        return;
    }
    check_all(&ferrospeed_cuda::device(0, &ferrospeed_cpu::device()).unwrap());
}

fn check_all(device: &Device) {
    let folders = golden().models_with("golden.json");
    golden().each_path("models", folders, 42, |folder| {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let case = Case {
            recorded: tensors::read(&folder.join("golden.safetensors")),
            facts: read_json(&folder.join("golden.json")),
            device: device.clone(),
            name,
        };
        let weights = WeightFiles::open_directory(folder).unwrap();
        // What a window of so many tokens is has changed after transformers 4.40.
        let recorded_by = case.facts["transformers"].as_str().expect("the recording names its program");
        let rule = if recorded_by.starts_with("4.40") { WindowRule::OneMore } else { WindowRule::LastTokens };
        match ModelConfig::from_directory(folder, rule).unwrap() {
            ModelConfig::Decoder(config) => {
                if let Some(recorded) = case.facts["inv_freq"].as_array() {
                    check_frequencies(&case, &config, recorded);
                }
                check_decoder(&case, *config, &weights);
                check_mixture_loss(&case, folder, &weights);
            }
            ModelConfig::Bert(config) => check_bert(&case, &Bert::new(config), &weights),
        }
    });
}

fn check_frequencies(case: &Case, config: &ferrospeed_models::DecoderConfig, recorded: &[Value]) {
    let ferrospeed_models::decoder::Positions::Rotary(rotary) = &config.positions else {
        panic!("{}: frequencies were recorded for a model without rotary positions", case.name);
    };
    let recorded: Vec<f32> = recorded.iter().map(|v| v.as_f64().unwrap() as f32).collect();
    let actual: Vec<f32> = rotary.frequencies(config.max_tokens).into_iter().map(|f| f as f32).collect();
    assert_close(&format!("{}: inv_freq", case.name), &actual, &recorded, 0.0, 1e-5);
}

#[test]
fn golden_sharded_weights_equal_the_single_file() {
    let set = golden();
    let (Some(sharded), Some(single)) = (set.path("models/llama_sharded"), set.path("models/llama")) else {
        return;
    };
    let (sharded, single) =
        (WeightFiles::open_directory(&sharded).unwrap(), WeightFiles::open_directory(&single).unwrap());
    assert_eq!(sharded.tensors().len(), single.tensors().len());
    for (name, stored) in single.tensors() {
        let other = &sharded.tensors()[name];
        assert_eq!((&other.shape, other.dtype), (&stored.shape, stored.dtype), "{name}");
        assert_eq!(sharded.bytes(other).unwrap(), single.bytes(stored).unwrap(), "{name}");
    }
}

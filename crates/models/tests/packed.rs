//! Directories with weights of few bits: what they hold, and that they say what the whole ones say, nearly.

use ferrospeed_models::directory::{WriteOptions, create};
use ferrospeed_models::pack::pack;
use ferrospeed_models::weights::WeightFiles;
use ferrospeed_models::{Decoder, ModelConfig, Tokens, WindowRule};
use ferrospeed_nn::Mode;
use ferrospeed_tensor::store::{PackedStore, PlainStore};
use ferrospeed_tensor::{DType, Device, PackedBits, Tensor, autograd};
use serde_json::{Value, json};

fn llama() -> Value {
    json!({
        "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 64, "initializer_range": 0.1,
    })
}

fn decoder(path: &std::path::Path) -> (Decoder, WeightFiles) {
    let ModelConfig::Decoder(config) = ModelConfig::from_directory(path, WindowRule::default()).unwrap()
    else {
        unreachable!("it is a decoder")
    };
    let (model, weights) = (Decoder::new(*config), WeightFiles::open_directory(path).unwrap());
    weights.check(model.parameters().as_slice()).unwrap();
    (model, weights)
}

fn logits(model: &Decoder) -> Vec<f32> {
    let ids: Vec<i64> = (0..24).map(|place| place * 37 % 256).collect();
    let ids = Tensor::from_slice(&ids, [1, 24], &Device::cpu()).unwrap();
    let logits = autograd::no_grad(|| {
        let hidden = model.hidden(&Tokens::new(ids), None, Mode::Evaluate).unwrap();
        model.logits(&hidden).unwrap()
    });
    logits.to_vec_f32().unwrap()
}

/// The root of the mean square of differences, in units of the logits' own.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    let square =
        |values: &mut dyn Iterator<Item = f32>| values.map(|value| f64::from(value).powi(2)).sum::<f64>();
    (square(&mut a.iter().zip(b).map(|(a, b)| a - b)) / square(&mut b.iter().copied())).sqrt()
}

#[test]
fn a_packed_directory_is_small_and_says_nearly_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let whole = folder.path().join("whole");
    create(&whole, &llama(), 5, &WriteOptions::default()).unwrap();
    let (model, weights) = decoder(&whole);
    PlainStore::attach(model.parameters().as_slice(), DType::F32, &Device::cpu(), &weights).unwrap();
    let expected = logits(&model);
    // Rounding a block of normal numbers to 254 or 16 steps errs by 0.5 % or 8 % of their deviation; a dozen products in a row
    // add that up to 2 % or 29 %. Rows, which are rounded to 254 steps too, add 2 %.
    for (bits, band, share) in [(PackedBits::Eight, 0.035, 0.45), (PackedBits::Four, 0.36, 0.33)] {
        let target = folder.path().join(format!("{bits:?}"));
        let written = pack(&whole, &target, bits, &WriteOptions::default()).unwrap();
        let bytes: usize = weights.tensors().values().map(|tensor| tensor.size_bytes()).sum();
        assert!((written.bytes as f64) < share * bytes as f64, "{bits:?}: {} of {bytes}", written.bytes);
        // As any reader gets it: in full.
        let (model, weights) = decoder(&target);
        PlainStore::attach(model.parameters().as_slice(), DType::F32, &Device::cpu(), &weights).unwrap();
        let full = logits(&model);
        // As `serve` holds it: packed.
        let (model, weights) = decoder(&target);
        let of = |param: &ferrospeed_tensor::Param| model.packing(param, weights.packed(param)?);
        PackedStore::attach(model.parameters().as_slice(), DType::F32, &Device::cpu(), &weights, of).unwrap();
        let packed = logits(&model);
        // Products round their rows to 254 steps in each block, which errs as much as rounding weights so.
        assert!(distance(&packed, &full) < 0.025, "{bits:?}: the same weights, {}", distance(&packed, &full));
        let off = distance(&packed, &expected);
        assert!(off < band && off > 1e-4, "{bits:?}: {off}");
        // Packing again what is packed changes nothing.
        let again = folder.path().join(format!("{bits:?} again"));
        pack(&target, &again, bits, &WriteOptions::default()).unwrap();
        let read = |path: &std::path::Path| std::fs::read(path.join("model.safetensors")).unwrap();
        assert_eq!(read(&again), read(&target), "{bits:?}");
    }
}

#[test]
fn what_cannot_be_packed_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let gpt2 = json!({"model_type": "gpt2", "vocab_size": 96, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32});
    let source = folder.path().join("gpt2");
    create(&source, &gpt2, 1, &WriteOptions::default()).unwrap();
    let target = folder.path().join("out");
    let error = pack(&source, &target, PackedBits::Eight, &WriteOptions::default()).unwrap_err().to_string();
    assert!(error.contains("[inputs, outputs]") && !target.exists(), "{error}");
}

#[test]
fn a_packed_weight_of_another_shape_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, packed) = (folder.path().join("whole"), folder.path().join("packed"));
    create(&whole, &llama(), 5, &WriteOptions::default()).unwrap();
    pack(&whole, &packed, PackedBits::Four, &WriteOptions::default()).unwrap();
    let mut wider = llama();
    wider["intermediate_size"] = json!(128);
    let model = ModelConfig::from_value(&wider, WindowRule::default()).unwrap();
    let weights = WeightFiles::open_directory(&packed).unwrap();
    let error = weights.check(model.parameters().as_slice()).unwrap_err().to_string();
    assert!(error.contains("model.layers.0.mlp.down_proj.weight is packed"), "{error}");
}

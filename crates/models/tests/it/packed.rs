//! Directories with weights of few bits: what they hold, and that they say what the whole ones say, nearly.

use ferrospeed_comm::World;
use ferrospeed_models::directory::{WriteOptions, convert, create};
use ferrospeed_models::pack::pack;
use ferrospeed_models::weights::WeightFiles;
use ferrospeed_models::{Decoder, ModelConfig, Tokens, WindowRule};
use ferrospeed_nn::Mode;
use ferrospeed_tensor::store::{PackedStore, ParamSource, PlainStore};
use ferrospeed_tensor::{DType, PackedBits, Param, Tensor, autograd};
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
    let ids = Tensor::from_slice(&ids, [1, 24], &ferrospeed_cpu::device()).unwrap();
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

/// A family whose weights lie as `[inputs, outputs]`, square ones among them.
fn gpt2() -> Value {
    json!({
        "model_type": "gpt2", "vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "initializer_range": 0.1,
    })
}

/// Families with biases, one of which has a projection before and behind its blocks.
fn older() -> [Value; 3] {
    let sizes = |more: Value| {
        let mut config = json!({
            "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "max_position_embeddings": 64,
        });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    };
    [
        json!({"model_type": "bloom", "vocab_size": 256, "hidden_size": 64, "n_head": 4, "n_layer": 2, "initializer_range": 0.1}),
        sizes(json!({"model_type": "opt", "ffn_dim": 128, "word_embed_proj_dim": 32, "init_std": 0.1})),
        sizes(
            json!({"model_type": "gpt_neox", "intermediate_size": 128, "rotary_pct": 0.5, "initializer_range": 0.1}),
        ),
    ]
}

#[test]
fn a_packed_directory_is_small_and_says_nearly_the_same() {
    let folder = tempfile::tempdir().unwrap();
    for config in [llama(), gpt2()].into_iter().chain(older()) {
        let at = |name: &str| folder.path().join(format!("{} {name}", config["model_type"]));
        let whole = at("whole");
        create(&whole, &config, 5, &WriteOptions::default()).unwrap();
        let (model, weights) = decoder(&whole);
        PlainStore::attach(model.parameters().as_slice(), DType::F32, &ferrospeed_cpu::device(), &weights)
            .unwrap();
        let expected = logits(&model);
        // Rounding a block of normal numbers to 254 or 16 steps errs by 0.5 % or 8 % of their deviation; a dozen products in a
        // row add that up to 2 % or 29 %. Rows, which are rounded to 254 steps too, add 2 %. Floats with three bits of fraction
        // err by 2.6 %, which a dozen add up to 9 %.
        for (bits, band, share) in [
            (PackedBits::Eight, 0.035, 0.45),
            (PackedBits::Four, 0.36, 0.33),
            (PackedBits::Float8, 0.11, 0.45),
        ] {
            let target = at(bits.name());
            let written = pack(&whole, &target, bits, &WriteOptions::default()).unwrap();
            let bytes: usize = weights.tensors().values().map(|tensor| tensor.size_bytes()).sum();
            assert!((written.bytes as f64) < share * bytes as f64, "{bits:?}: {} of {bytes}", written.bytes);
            // As any reader gets it: in full.
            let (model, weights) = decoder(&target);
            PlainStore::attach(
                model.parameters().as_slice(),
                DType::F32,
                &ferrospeed_cpu::device(),
                &weights,
            )
            .unwrap();
            let full = logits(&model);
            // As `serve` holds it: packed, where the processor multiplies such.
            let mut packed = full.clone();
            if bits != PackedBits::Float8 {
                let (model, weights) = decoder(&target);
                let of = |param: &Param| model.packing(param, weights.packed(param)?);
                let params = model.parameters().as_slice();
                PackedStore::attach(params, DType::F32, &ferrospeed_cpu::device(), &weights, of).unwrap();
                packed = logits(&model);
            }
            // Products round their rows to 254 steps in each block, which errs as much as rounding weights so.
            let rows = distance(&packed, &full);
            assert!(rows < 0.025, "{} {bits:?}: the same weights, {rows}", config["model_type"]);
            let off = distance(&packed, &expected);
            assert!(off < band && off > 1e-4, "{} {bits:?}: {off}", config["model_type"]);
            // Packing again what is packed changes nothing.
            let again = at(&format!("{} again", bits.name()));
            pack(&target, &again, bits, &WriteOptions::default()).unwrap();
            let read = |path: &std::path::Path| std::fs::read(path.join("model.safetensors")).unwrap();
            assert_eq!(read(&again), read(&target), "{bits:?}");
        }
    }
}

#[test]
fn a_part_of_a_packed_weight_is_that_part_of_the_whole_weight() {
    let folder = tempfile::tempdir().unwrap();
    let loaded = |weights: &WeightFiles, param: &Param, range: std::ops::Range<usize>| {
        let mut values = vec![f32::NAN; range.len()];
        weights.load(param, range, &mut values).unwrap();
        values
    };
    for config in [llama(), gpt2()] {
        let at = |name: &str| folder.path().join(format!("{} {name}", config["model_type"]));
        let (whole, packed, full) = (at("whole"), at("packed"), at("full"));
        create(&whole, &config, 5, &WriteOptions::default()).unwrap();
        pack(&whole, &packed, PackedBits::Eight, &WriteOptions::default()).unwrap();
        let (model, weights) = decoder(&packed);
        let ModelConfig::Decoder(sizes) =
            ModelConfig::from_directory(&packed, WindowRule::default()).unwrap()
        else {
            unreachable!("it is a decoder")
        };
        // The same weights as floats, written in full.
        convert(&packed, &full, &WriteOptions { dtype: Some(DType::F32), ..Default::default() }).unwrap();
        let expected = WeightFiles::open_directory(&full).unwrap();
        for world in World::threads(2) {
            let slices = Decoder::in_slices((*sizes).clone(), &world.group()).unwrap();
            for param in slices.parameters().as_slice().iter().chain(model.parameters().as_slice()) {
                for range in [0..param.numel(), 1..param.numel() / 3, 7..8, 0..0] {
                    let (ours, theirs) =
                        (loaded(&weights, param, range.clone()), loaded(&expected, param, range.clone()));
                    assert_eq!(ours, theirs, "{} {range:?}", param.name());
                }
            }
        }
    }
}

#[test]
fn what_cannot_be_packed_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut narrow = llama();
    (narrow["hidden_size"], narrow["intermediate_size"]) = (json!(48), json!(40));
    let source = folder.path().join("narrow");
    create(&source, &narrow, 1, &WriteOptions::default()).unwrap();
    let target = folder.path().join("out");
    let error = pack(&source, &target, PackedBits::Eight, &WriteOptions::default()).unwrap_err().to_string();
    assert!(error.contains("no multiple of 32") && !target.exists(), "{error}");
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

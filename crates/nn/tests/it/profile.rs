//! Recorded models, built of our layers from what PyTorch printed of them, are counted as DeepSpeed counted them.
//!
//! By rule, a recorded model is left out when it has a class that no layer here is: recurrent layers, transposed and grouped
//! convolutions, batch, group and instance norms. DeepSpeed's estimates for those are compared in `observe`.

use ferrospeed_nn::{
    AttentionConfig, Conv2d, Conv2dOptions, Embedding, HeadProjections, Init, LayerNorm, Linear, Mode,
    Module, MultiHeadAttention, Sequential, Visibility,
};
use ferrospeed_tensor::ops::{self, PackedHeads};
use ferrospeed_tensor::profile::{self, Profile};
use ferrospeed_tensor::store::{FromInitializers, PlainStore};
use ferrospeed_tensor::{Activation, DType, Device, Result, Tensor, Window2d};
use ferrospeed_testkit::golden::golden;
use serde_json::Value;

/// The sizes that PyTorch printed for the module `name` of `class`: `(fc1): Linear(in_features=16, …)`.
fn printed<'a>(case: &'a Value, name: &str, class: &str) -> Vec<&'a str> {
    let wanted = format!("({name}): {class}(");
    let lines = case["repr"].as_str().unwrap().lines();
    let found = lines.filter_map(|line| line.trim().strip_prefix(&wanted)).next();
    found.unwrap_or_else(|| panic!("no {wanted} in {case}")).trim_end_matches(')').split(", ").collect()
}

fn number(text: &str) -> usize {
    let digits: String = text.chars().filter(char::is_ascii_digit).collect();
    digits.parse().unwrap_or_else(|_| panic!("{text} is no number"))
}

fn linear(init: &Init, case: &Value, name: &str, printed_as: &str) -> Linear {
    let sizes = printed(case, printed_as, "Linear");
    Linear::new(&init.at(name), number(sizes[0]), number(sizes[1]), sizes[2] == "bias=True")
}

fn input(case: &Value, device: &Device) -> Tensor {
    let sizes: Vec<usize> = case["input_shapes"][0]
        .as_array()
        .unwrap()
        .iter()
        .map(|size| size.as_u64().unwrap() as usize)
        .collect();
    let dtype = if case["input_dtypes"][0] == "torch.int64" { DType::I64 } else { DType::F32 };
    Tensor::zeros(&sizes, dtype, device).unwrap()
}

fn counted(init: &Init, device: &Device, run: impl FnOnce() -> Result<Tensor>) -> Profile {
    let params = init.parameters();
    let _store =
        PlainStore::attach(params.as_slice(), DType::F32, device, &FromInitializers { seed: 1 }).unwrap();
    let (result, profile) = profile::collect(device, run);
    result.unwrap();
    profile
}

/// Compares every recorded module's own counts.
fn compare(name: &str, tree: &Value, path: &str, profile: &Profile) {
    let own = profile.modules().iter().find(|module| &*module.path == path).map(|module| module.own.forward);
    let own = own.unwrap_or_default();
    let expected = (tree["own_flops"].as_u64().unwrap(), tree["own_macs"].as_u64().unwrap());
    assert_eq!((own.flops, own.macs), expected, "{name}: {path}");
    for child in tree["children"].as_array().unwrap() {
        let child_name = child["name"].as_str().unwrap();
        let path = if path.is_empty() { child_name.to_owned() } else { format!("{path}.{child_name}") };
        compare(name, child, &path, profile);
    }
}

fn check(name: &str, build: impl FnOnce(&Value, &Init, &Device) -> Profile) {
    let Some(profiles) = golden().json("flops/profiles.json") else { return };
    let case = &profiles[name];
    if case.is_null() {
        assert!(!golden().is_default(), "flops/profiles.json has no {name}");
        return eprintln!("golden: flops/profiles.json: {name}: not in this set");
    }
    let device = ferrospeed_cpu::with_threads(1);
    let profile = build(case, &Init::root(), &device);
    compare(name, &case["tree"], "", &profile);
    let total = profile.total().forward;
    assert_eq!(
        (Some(total.flops), Some(total.macs)),
        (case["totals"]["flops"].as_u64(), case["totals"]["macs"].as_u64()),
        "{name}"
    );
}

#[test]
fn golden_perceptron_counts_as_recorded() {
    check("mlp", |case, init, device| {
        let (up, down) = (linear(init, case, "fc1", "fc1"), linear(init, case, "fc2", "fc2"));
        let x = input(case, device);
        counted(init, device, || {
            let hidden = profile::scope_at("act", "ReLU", || up.forward(&x).and_then(ops::relu));
            down.forward(&hidden?)
        })
    });
}

#[test]
fn golden_convolutions_count_as_recorded() {
    check("lenet", |case, init, device| {
        let conv = |init: &Init, name: &str| {
            let sizes = printed(case, name, "Conv2d");
            let square = |key: &str, default: usize| {
                let text = sizes.iter().find_map(|size| size.strip_prefix(&format!("{key}=(")[..]));
                [text.map_or(default, number); 2]
            };
            let options = Conv2dOptions {
                kernel: square("kernel_size", 1),
                stride: square("stride", 1),
                padding: square("padding", 0),
                bias: !sizes.contains(&"bias=False"),
            };
            Conv2d::new(init, number(sizes[0]), number(sizes[1]), options)
        };
        let window = Window2d { kernel: [2, 2], stride: [2, 2], padding: [0, 0] };
        let features = Sequential::new(&init.at("features"))
            .add(|init| conv(init, "0"))
            .add(|_| Activation::Tanh)
            .add(move |_| move |x: &Tensor, _: Mode| ops::avg_pool2d(x, window))
            .add(|init| conv(init, "3"))
            .add(|_| Activation::Relu)
            .add(move |_| move |x: &Tensor, _: Mode| ops::max_pool2d(x, window));
        let classifier = Sequential::new(&init.at("classifier"))
            .add(|init| linear(init, case, "", "0"))
            .add(|_| Activation::Tanh)
            .add(|init| linear(init, case, "", "2"));
        let x = input(case, device);
        counted(init, device, || {
            let seen = features.forward(&x, Mode::Evaluate)?;
            let flat = ops::reshape(&seen, [seen.sizes()[0], seen.numel() / seen.sizes()[0]])?;
            ops::softmax(&classifier.forward(&flat, Mode::Evaluate)?)
        })
    });
}

#[test]
fn golden_transformer_counts_as_recorded() {
    check("gptish", |case, init, device| {
        let table = printed(case, "emb", "Embedding");
        let width = number(table[1]);
        let embedding = Embedding::new(&init.at("emb"), number(table[0]), width, 0.02);
        let blocks = &case["tree"]["children"][1];
        let attention = &blocks["children"][0]["children"][1];
        assert_eq!((&blocks["name"], &attention["name"]), (&"blocks".into(), &"attn".into()));
        let blocks = blocks["children"].as_array().unwrap().len();
        let blocks: Vec<_> = (0..blocks)
            .map(|index| {
                let at = init.at(format!("blocks.{index}"));
                // The number of heads changes no count.
                let config = AttentionConfig {
                    heads: 1,
                    kv_heads: 1,
                    head_dim: width,
                    scale: 1.0,
                    causal: true,
                    window: None,
                    dropout: 0.0,
                };
                let norm = |name: &str| LayerNorm::new(&at.at(name), width, 1e-5, true);
                let qkv = linear(&at, case, "attn.qkv", "qkv");
                let projections = HeadProjections::Packed(qkv, PackedHeads::Thirds);
                let output = linear(&at, case, "attn.o", "o");
                let attention = MultiHeadAttention::new(projections, output, config);
                let mlp = Sequential::new(&at.at("mlp"))
                    .add(|init| linear(init, case, "", "0"))
                    .add(|_| Activation::GeluErf)
                    .add(|init| linear(init, case, "", "2"));
                (norm("ln1"), attention, norm("ln2"), mlp)
            })
            .collect();
        let last = LayerNorm::new(&init.at("lnf"), width, 1e-5, true);
        let head = linear(init, case, "head", "head");
        let ids = input(case, device);
        counted(init, device, || {
            let mut x = embedding.forward(&ids)?;
            for (norm1, attention, norm2, mlp) in &blocks {
                let seen = Visibility::default();
                x = ops::add(&x, &attention.forward(&norm1.forward(&x)?, &seen, None, Mode::Evaluate)?)?;
                x = ops::add(&x, &mlp.forward(&norm2.forward(&x)?, Mode::Evaluate)?)?;
            }
            head.forward(&last.forward(&x)?)
        })
    });
}

#[test]
fn golden_shared_layer_counts_both_its_uses() {
    check("shared_module", |case, init, device| {
        let layer = linear(init, case, "a", "a");
        let x = input(case, device);
        counted(init, device, || layer.forward(&layer.forward(&x)?))
    });
}

#[test]
fn a_layer_of_a_sequence_has_the_name_of_its_class() {
    let device = ferrospeed_cpu::with_threads(1);
    let init = Init::root();
    let layers = Sequential::new(&init.at("net"))
        .add(|init| Linear::new(init, 2, 3, true))
        .add(|_| Activation::Relu)
        .add(|_| |x: &Tensor, _: Mode| Ok(x.clone()));
    let x = Tensor::zeros([1, 2], DType::F32, &device).unwrap();
    let profile = counted(&init, &device, || Module::forward(&layers, &x, Mode::Evaluate));
    let classes: Vec<(&str, Option<&str>)> =
        profile.modules().iter().map(|module| (&*module.path, module.class)).collect();
    let expected = [("net", "Sequential"), ("net.0", "Linear"), ("net.1", "ReLU"), ("net.2", "Function")];
    for (path, class) in expected {
        assert!(classes.contains(&(path, Some(class))), "{path} in {classes:?}");
    }
}

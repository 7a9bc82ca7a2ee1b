//! Behaviour of the layers that have no recording.

use ferrospeed_nn::{
    Conv2d, Conv2dOptions, Dropout, Embedding, Init, KeyVisibility, Linear, Mode, Sequential, TiledLinear,
    Tiling, TransformerLayer, TransformerLayerConfig,
};
use ferrospeed_tensor::ops::WeightLayout;
use ferrospeed_tensor::store::{FromInitializers, PlainStore};
use ferrospeed_tensor::{Activation, DType, Device, Tensor, autograd, ops};

const SEED: FromInitializers = FromInitializers { seed: 7 };

fn ramp(shape: &[usize], device: &Device) -> Tensor {
    let count: usize = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|i| (i % 13) as f32 * 0.1 - 0.5).collect();
    Tensor::from_f32(&values, shape, DType::F32, device).unwrap()
}

#[test]
fn tiles_of_a_linear_layer_give_its_outputs_and_its_gradients() {
    let device = ferrospeed_cpu::device();
    for (in_splits, out_splits, bias) in [(1, 1, true), (3, 2, true), (2, 5, false), (7, 5, true)] {
        let whole_init = Init::root();
        let whole = Linear::new(&whole_init.at("whole"), 7, 5, bias);
        let whole_store =
            PlainStore::attach(whole_init.parameters().as_slice(), DType::F32, &device, &SEED).unwrap();
        let init = Init::root();
        let tiling = Tiling { in_splits, out_splits };
        let tiled = TiledLinear::new(&init.at("tiled"), 7, 5, bias, tiling).unwrap();
        let source = tiled.copy_params_from("whole", &SEED);
        let store = PlainStore::attach(init.parameters().as_slice(), DType::F32, &device, &source).unwrap();
        assert_eq!(init.parameters().numel(), whole_init.parameters().numel());

        let x = ramp(&[2, 3, 7], &device);
        let (one, other) = (x.tracked(), x.tracked());
        let (expected, got) = (whole.forward(&one).unwrap(), tiled.forward(&other).unwrap());
        let close = |a: &Tensor, b: &Tensor| {
            let (a, b) = (a.to_vec_f32().unwrap(), b.to_vec_f32().unwrap());
            assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-5), "{a:?} and {b:?}");
        };
        close(&expected, &got);
        for y in [&expected, &got] {
            autograd::backward(&ops::sum(ops::square(y).unwrap()).unwrap()).unwrap();
        }
        close(&one.grad().unwrap(), &other.grad().unwrap());
        let total = |gradients: Vec<Option<Tensor>>| -> f32 {
            gradients.into_iter().flatten().flat_map(|g| g.to_vec_f32().unwrap()).map(|v| v.abs()).sum()
        };
        let (a, b) = (total(whole_store.take_gradients()), total(store.take_gradients()));
        assert!((a - b).abs() < 1e-3 * a, "{a} and {b}");
    }
}

#[test]
fn tiles_are_named_as_deepspeed_names_them_and_the_last_has_the_bias() {
    let init = Init::root();
    let tiled = TiledLinear::new(&init, 5, 4, true, Tiling { in_splits: 2, out_splits: 2 }).unwrap();
    assert_eq!((tiled.input_parts(), tiled.output_parts()), (&[3, 2][..], &[2, 2][..]));
    let names = ["0.0.weight", "0.1.weight", "0.1.bias", "1.0.weight", "1.1.weight", "1.1.bias"];
    assert_eq!(init.parameters().names(), names.map(|name| format!("linears.{name}")));
}

#[test]
fn impossible_tilings_are_refused() {
    let init = Init::root();
    for tiling in [Tiling { in_splits: 0, out_splits: 1 }, Tiling { in_splits: 1, out_splits: 9 }] {
        let error = TiledLinear::new(&init, 4, 4, false, tiling).unwrap_err().to_string();
        assert!(error.contains("1 to 4 parts"), "{error}");
    }
    let tiled = TiledLinear::new(&init, 4, 4, false, Tiling { in_splits: 2, out_splits: 1 }).unwrap();
    assert!(tiled.forward_parts(&[]).is_err());
}

#[test]
fn layers_in_sequence_run_in_order_and_drop_only_in_training() {
    let (device, init) = (ferrospeed_cpu::device(), Init::root());
    let model = Sequential::new(&init.at("net"))
        .add(|init| Linear::new(init, 4, 8, true))
        .add(|_| Activation::Relu)
        .add(|_| Dropout { probability: 0.5 })
        .add(|_| |x: &Tensor, _: Mode| ops::affine(x, 2.0, 0.0));
    let _store = PlainStore::attach(init.parameters().as_slice(), DType::F32, &device, &SEED).unwrap();
    assert_eq!(init.parameters().names(), ["net.0.weight", "net.0.bias"]);
    let x = ramp(&[3, 4], &device);
    let evaluated = model.forward(&x, Mode::Evaluate).unwrap().to_vec_f32().unwrap();
    assert_eq!(evaluated, model.forward(&x, Mode::Evaluate).unwrap().to_vec_f32().unwrap());
    let trained = model.forward(&x, Mode::Train).unwrap().to_vec_f32().unwrap();
    for (trained, evaluated) in trained.iter().zip(&evaluated) {
        assert!(*trained == 0.0 || (trained - 2.0 * evaluated).abs() < 1e-6);
    }
    assert!(model.forward(&ramp(&[3, 5], &device), Mode::Evaluate).is_err());
}

#[test]
fn a_convolution_slides_its_kernel_over_the_image() {
    let (device, init) = (ferrospeed_cpu::device(), Init::root());
    let options = Conv2dOptions { padding: [1, 1], ..Conv2dOptions::square(3) };
    let layer = Conv2d::new(&init.at("conv"), 2, 3, options);
    let store = PlainStore::attach(init.parameters().as_slice(), DType::F32, &device, &SEED).unwrap();
    let x = ramp(&[1, 2, 4, 5], &device).tracked();
    let y = layer.forward(&x).unwrap();
    assert_eq!(y.sizes(), [1, 3, 4, 5]);
    let (weight, bias, image) = {
        let read = |param: &ferrospeed_tensor::Param| param.read().unwrap().to_vec_f32().unwrap();
        (read(layer.weight()), read(layer.bias().unwrap()), x.to_vec_f32().unwrap())
    };
    let got = y.to_vec_f32().unwrap();
    for (o, row, column) in [(0, 0, 0), (1, 2, 3), (2, 3, 4)] {
        let mut want = bias[o];
        for c in 0..2 {
            for (dy, dx) in (0..3).flat_map(|dy| (0..3).map(move |dx| (dy, dx))) {
                let (r, s) = (row + dy, column + dx);
                if (1..=4).contains(&r) && (1..=5).contains(&s) {
                    want += weight[((o * 2 + c) * 3 + dy) * 3 + dx] * image[(c * 4 + r - 1) * 5 + s - 1];
                }
            }
        }
        assert!((got[(o * 4 + row) * 5 + column] - want).abs() < 1e-5);
    }
    autograd::backward(&ops::sum(&y).unwrap()).unwrap();
    assert!(x.grad().is_some());
    let seen: Vec<bool> = store.take_gradients().iter().map(Option::is_some).collect();
    assert_eq!(seen, [true, true], "gradients of weight and bias");
}

#[test]
fn deepspeeds_layer_configuration_is_read_strictly() {
    let (config, notes) = TransformerLayerConfig::from_json(
        "\u{feff}{\"hidden_size\": 8, \"heads\": 2, \"gelu_checkpoint\": true, \"seed\": 3}",
    )
    .unwrap();
    assert_eq!((config.intermediate_size, config.attn_dropout_ratio, config.pre_layer_norm), (32, 0.0, true));
    assert_eq!(notes.len(), 2);
    for (text, word) in [
        ("{\"hidden_size\": 8, \"heads\": 3}", "divide"),
        ("{\"heads\": 3}", "hidden_size"),
        ("{\"hidden_size\": 8, \"heads\": 2, \"hiden\": 1}", "hiden"),
        ("{\"hidden_size\": 8, \"heads\": 2, \"attn_dropout_ratio\": 1.0}", "0..1"),
        ("[", "cannot read"),
    ] {
        let error = TransformerLayerConfig::from_json(text).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
}

#[test]
fn a_layer_in_training_drops_and_a_layer_in_bf16_stays_near_f32() {
    let text =
        "{\"hidden_size\": 16, \"heads\": 4, \"hidden_dropout_ratio\": 0.5, \"attn_dropout_ratio\": 0.5}";
    let (config, _) = TransformerLayerConfig::from_json(text).unwrap();
    let device = ferrospeed_cpu::device();
    let output = |dtype: DType, mode: Mode| {
        let init = Init::root();
        let layer = TransformerLayer::new(&init, config.clone()).unwrap();
        let _store = PlainStore::attach(init.parameters().as_slice(), dtype, &device, &SEED).unwrap();
        let x = ops::cast(ramp(&[2, 6, 16], &device), dtype).unwrap();
        let added = Tensor::zeros([2, 1, 1, 6], DType::F32, &device).unwrap();
        layer.forward(&x, KeyVisibility::Added(&added), mode).unwrap().to_vec_f32().unwrap()
    };
    let (wide, narrow) = (output(DType::F32, Mode::Evaluate), output(DType::BF16, Mode::Evaluate));
    assert!(wide.iter().zip(&narrow).all(|(a, b)| (a - b).abs() < 0.03), "{wide:?} and {narrow:?}");
    assert_ne!(wide, output(DType::F32, Mode::Train));
}

#[test]
fn lookups_of_padding_give_its_row_no_gradient_and_other_uses_of_the_table_do() {
    let device = ferrospeed_cpu::device();
    let gradient = |padding: Option<usize>, is_tied: bool| -> Vec<Vec<f32>> {
        let init = Init::root();
        let embedding = Embedding::new(&init, 6, 3, 0.5).with_padding(padding);
        let store = PlainStore::attach(init.parameters().as_slice(), DType::F32, &device, &SEED).unwrap();
        let ids = Tensor::from_slice(&[4i64, 1, 2, 4, 0, 1], [2, 3], &device).unwrap();
        let hidden = embedding.forward(&ids).unwrap();
        let out = match is_tied {
            true => ops::linear(&hidden, embedding.table(), None, WeightLayout::OutIn).unwrap(),
            false => hidden,
        };
        autograd::backward(&ops::sum(ops::square(&out).unwrap()).unwrap()).unwrap();
        store.gradient(0).unwrap().to_vec_f32().unwrap().chunks(3).map(<[f32]>::to_vec).collect()
    };
    let (all, but_four) = (gradient(None, false), gradient(Some(4), false));
    assert_ne!(all[4], [0.0; 3]);
    assert_eq!(but_four[4], [0.0; 3]);
    for row in [0, 1, 2, 3, 5] {
        assert_eq!(but_four[row], all[row], "row {row}");
    }
    let (all, but_four) = (gradient(None, true), gradient(Some(4), true));
    assert_ne!(but_four[4], [0.0; 3], "the head trains it");
    assert_ne!(but_four[4], all[4]);
}

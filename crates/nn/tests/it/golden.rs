//! DeepSpeed's transformer layer against its recorded forward and backward passes.

use std::collections::BTreeMap;
use std::ops::Range;

use ferrospeed_nn::{DropoutMasks, Init, KeyVisibility, Mode, TransformerLayer, TransformerLayerConfig};
use ferrospeed_tensor::store::{ParamSource, PlainStore};
use ferrospeed_tensor::{Activation, DType, Device, Param, Result, Tensor, autograd};
use ferrospeed_testkit::close::assert_close;
use ferrospeed_testkit::golden::golden;
use ferrospeed_testkit::tensors::{self, Recorded, Values};
use serde_json::Value;

struct Weights<'a>(&'a BTreeMap<String, Recorded>);

impl ParamSource for Weights<'_> {
    fn load(&self, param: &Param, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        out.copy_from_slice(&self.0[&format!("param.{}", param.name())].floats()[range]);
        Ok(())
    }
}

fn tensor(recorded: &BTreeMap<String, Recorded>, name: &str, device: &Device) -> Option<Tensor> {
    let recorded = recorded.get(name)?;
    let values: Vec<f32> = match &recorded.values {
        Values::Float(values) => values.clone(),
        Values::Integer(values) => values.iter().map(|&value| value as f32).collect(),
    };
    Some(Tensor::from_f32(&values, recorded.shape.as_slice(), DType::F32, device).expect("a recorded tensor"))
}

fn config(facts: &Value) -> TransformerLayerConfig {
    let count = |key: &str| facts[key].as_u64().expect("a count") as usize;
    let number = |key: &str| facts[key].as_f64().expect("a number") as f32;
    TransformerLayerConfig {
        hidden_size: count("hidden_size"),
        intermediate_size: count("intermediate_size"),
        heads: count("heads"),
        attn_dropout_ratio: number("attn_dropout_ratio"),
        hidden_dropout_ratio: number("hidden_dropout_ratio"),
        num_hidden_layers: 1,
        initializer_range: 0.02,
        layer_norm_eps: number("layer_norm_eps"),
        pre_layer_norm: facts["pre_layer_norm"].as_bool().expect("a boolean"),
        adjust_init_range: true,
        activation: match facts["gelu"].as_str() {
            Some("tanh") => Activation::GeluTanh,
            Some("erf") => Activation::GeluErf,
            other => panic!("unknown GELU {other:?}"),
        },
    }
}

#[test]
fn golden_transformer_layer_forward_and_gradients() {
    let set = golden();
    let device = ferrospeed_cpu::device();
    set.each_case("transformer/index.json", 6, |facts| {
        let file = facts["file"].as_str().expect("a name");
        let path = set.path(&format!("transformer/{file}")).expect("the index names files of its set");
        let recorded = tensors::read(&path);
        let init = Init::root();
        let layer = TransformerLayer::new(&init, config(facts)).expect("a valid configuration");
        let parameters = init.parameters();
        let store = PlainStore::attach(parameters.as_slice(), DType::F32, &device, &Weights(&recorded))
            .expect("recorded weights load");
        let x = tensor(&recorded, "input", &device).expect("an input").tracked();
        let mask = tensor(&recorded, "attention_mask", &device).expect("a mask");
        let keys = KeyVisibility::Added(&mask);
        let masks = |name: &str| tensor(&recorded, &format!("dropout_mask.{name}"), &device);
        let y = match (masks("attn_prob"), masks("attn_output"), masks("layer_output")) {
            (Some(attn_prob), Some(attn_output), Some(layer_output)) => {
                let masks = DropoutMasks { attn_prob, attn_output, layer_output };
                layer.forward_with_masks(&x, keys, &masks)
            }
            _ => layer.forward(&x, keys, Mode::Evaluate),
        }
        .expect("a forward pass");
        let close = |what: &str, got: &Tensor, name: &str| {
            let got = got.to_vec_f32().expect("values");
            assert_close(&format!("{file}: {what}"), &got, recorded[name].floats(), 1e-4, 1e-4);
        };
        close("output", &y, "output");
        let seed = tensor(&recorded, "grad_output", &device).expect("a gradient");
        autograd::backward_with(&[(y, seed)]).expect("a backward pass");
        close("gradient of the input", &x.grad().expect("the input is tracked"), "grad_input");
        for (index, param) in parameters.as_slice().iter().enumerate() {
            let gradient =
                store.gradient(index).unwrap_or_else(|| panic!("{file}: none for {}", param.name()));
            close(&format!("gradient of {}", param.name()), &gradient, &format!("grad.{}", param.name()));
        }
        // Masks of zeros and -10000 mean the same to the fused kernel as real tokens do.
        if masks("attn_prob").is_none()
            && mask.to_vec_f32().unwrap().iter().all(|&v| v == 0.0 || v <= -10_000.0)
        {
            let real: Vec<u8> =
                mask.to_vec_f32().unwrap().iter().map(|&value| u8::from(value == 0.0)).collect();
            let shape = [mask.sizes()[0], mask.sizes()[3]];
            let real = Tensor::from_slice(&real, shape, &device).unwrap();
            let fused =
                layer.forward(&x, KeyVisibility::Real(&real), Mode::Evaluate).expect("a forward pass");
            close("output of the fused kernel", &fused, "output");
        }
    });
}

//! What a caller is told when something does not fit: the operation and its operands, and never a panic.

use ferrospeed_tensor::ops::{self, AttentionOptions, CrossEntropyOptions, WeightLayout};
use ferrospeed_tensor::{DType, Initializer, Param, Tensor, autograd};

fn zeros(shape: &[usize], dtype: DType) -> Tensor {
    Tensor::zeros(shape, dtype, &ferrospeed_cpu::device()).unwrap()
}

fn message<T>(result: ferrospeed_tensor::Result<T>) -> String {
    match result {
        Ok(_) => panic!("this must be refused"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn mismatches_name_the_operation_and_both_operands() {
    let (a, b) = (zeros(&[2, 3], DType::F32), zeros(&[4, 5], DType::F32));
    for text in [message(ops::add(&a, &b)), message(ops::matmul(&a, &b))] {
        assert!(text.contains("[2, 3]") && text.contains("[4, 5]"), "{text}");
    }
    let half = zeros(&[2, 3], DType::BF16);
    let text = message(ops::mul(&a, &half));
    assert!(text.contains("mul") && text.contains("bf16") && text.contains("f32"), "{text}");
    let text = message(ops::linear(&a, &b, None, WeightLayout::OutIn));
    assert!(text.contains("linear") && text.contains("[4, 5]"), "{text}");
    let q = zeros(&[1, 2, 3, 4], DType::F32);
    let k = zeros(&[1, 2, 2, 4], DType::F32);
    let text = message(ops::attention(&q, &k, &k, &AttentionOptions::default()));
    assert!(text.contains("3 query heads") && text.contains("2 key heads"), "{text}");
}

#[test]
fn indices_outside_their_dimension_are_named_with_their_place() {
    let table = zeros(&[5, 2], DType::F32);
    for bad in [5i64, -1, i64::MAX] {
        let ids = Tensor::from_slice(&[0, bad], [2], &ferrospeed_cpu::device()).unwrap();
        let text = message(ops::embedding(&table, &ids));
        assert!(text.contains(&format!("index {bad} at position 1")) && text.contains("0..5"), "{text}");
        let options = CrossEntropyOptions::default();
        let text = message(ops::cross_entropy(zeros(&[2, 5], DType::F32), &ids, options));
        assert!(text.contains(&format!("index {bad} at position 1")), "{text}");
    }
}

#[test]
fn backward_refuses_what_it_cannot_do() {
    let x = zeros(&[3], DType::F32).tracked();
    let y = ops::square(&x).unwrap();
    assert!(message(autograd::backward(&y)).contains("[3]"));
    let loss = ops::sum(&y).unwrap();
    autograd::backward(&loss).unwrap();
    let text = message(autograd::backward(&loss));
    assert!(text.contains("already used and freed"), "{text}");
    let text = message(autograd::backward(&ops::sum(zeros(&[3], DType::F32)).unwrap()));
    assert!(text.contains("no_grad"), "{text}");
    let unrecorded = autograd::no_grad(|| ops::sum(&x)).unwrap();
    assert!(message(autograd::backward(&unrecorded)).contains("no_grad"));
}

#[test]
fn a_parameter_without_a_store_says_what_to_do() {
    let param = Param::new("layer.weight", [2, 2], Initializer::Constant(0.0));
    let text = message(ops::square(&param));
    assert!(text.contains("layer.weight") && text.contains("store"), "{text}");
}

#[test]
fn empty_tensors_pass_through_everything() {
    let empty = zeros(&[0, 4], DType::F32).tracked();
    let weight = zeros(&[4, 3], DType::F32).tracked();
    let y = ops::softmax(ops::matmul(&empty, &weight).unwrap()).unwrap();
    assert_eq!(y.sizes(), [0, 3]);
    autograd::backward(&ops::sum(&y).unwrap()).unwrap();
    assert_eq!(weight.grad().unwrap().to_vec::<f32>().unwrap(), [0.0; 12]);
    assert!(message(ops::concat(&[], 0)).contains("nothing to join"));
}

//! Wide norms, and wider copies, are computed again in backward: to the same bits as if they had been kept, and without being kept.

use ferrospeed_tensor::ops::{self, REBUILT_WIDTH, WeightLayout};
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_tensor::{Activation, Category, DType, Device, Operand, Tensor, autograd};

const ROWS: usize = 40;

fn random(shape: &[usize], stream: u32, dtype: DType, device: &Device) -> Tensor {
    let mut values = vec![0.0; shape.iter().product()];
    RandomKey::new(3, stream).fill_normal(0, &mut values);
    Tensor::from_f32(&values, shape, dtype, device).unwrap()
}

/// Gradients of everything behind a norm with a residual, and the activations held between forward and backward.
fn gradients(dtype: DType, keep: bool) -> (Vec<Vec<f32>>, usize) {
    let device = ferrospeed_cpu::with_threads(2);
    let make = |shape: &[usize], stream| random(shape, stream, dtype, &device).tracked();
    let (x, residual) = (make(&[ROWS, REBUILT_WIDTH], 1), make(&[ROWS, REBUILT_WIDTH], 2));
    let (gain, shift) = (make(&[REBUILT_WIDTH], 3), make(&[REBUILT_WIDTH], 4));
    let (one, two) = (make(&[16, REBUILT_WIDTH], 5), make(&[16, REBUILT_WIDTH], 6));
    let (up, down) = (make(&[24, REBUILT_WIDTH], 7), make(&[16, 24], 8));
    let before = device.memory_usage().current(Category::Activations);
    let operand = |tensor: &Tensor| Some(Operand::from(tensor));
    let (sum, mut y) =
        ops::add_layer_norm(&x, operand(&residual), operand(&gain), operand(&shift), 1e-5).unwrap();
    if keep {
        // A view is another result, which whoever saves it keeps.
        y = ops::reshape(&y, [ROWS, REBUILT_WIDTH]).unwrap();
    }
    // Three readers: two products and a perceptron.
    let first = ops::linear(&y, &one, None, WeightLayout::OutIn).unwrap();
    let second = ops::linear(&y, &two, None, WeightLayout::OutIn).unwrap();
    let (up_operand, down_operand) = ((Operand::from(&up), None), (Operand::from(&down), None));
    let third = ops::mlp(&y, up_operand, down_operand, WeightLayout::OutIn, Activation::GeluTanh).unwrap();
    drop(y);
    let held = device.memory_usage().current(Category::Activations) - before;
    let all = ops::add(ops::add(&first, &second).unwrap(), &third).unwrap();
    let loss = ops::add(ops::sum(ops::square(&all).unwrap()).unwrap(), ops::sum(&sum).unwrap()).unwrap();
    autograd::backward(&loss).unwrap();
    let leaves = [x, residual, gain, shift, one, two, up, down];
    (leaves.iter().map(|leaf| leaf.grad().unwrap().to_vec_f32().unwrap()).collect(), held)
}

#[test]
fn the_same_bits_without_keeping_the_result() {
    for dtype in [DType::F32, DType::BF16] {
        let ((kept, kept_bytes), (rebuilt, rebuilt_bytes)) =
            (gradients(dtype, true), gradients(dtype, false));
        assert!(kept == rebuilt, "{dtype}");
        let result_bytes = ROWS * REBUILT_WIDTH * dtype.size_bytes();
        assert_eq!(kept_bytes - rebuilt_bytes, result_bytes, "{dtype}: the norm's result is gone");
    }
}

/// The gradients of a product with a wider copy of what is kept anyway, and the activations held for it.
fn of_wide(convert: fn(&Tensor, DType) -> ferrospeed_tensor::Result<Tensor>) -> (Vec<Vec<f32>>, usize) {
    let device = ferrospeed_cpu::with_threads(2);
    let x = random(&[ROWS, 64], 1, DType::BF16, &device).tracked();
    let weight = random(&[16, 64], 2, DType::F32, &device).tracked();
    let before = device.memory_usage().current(Category::Activations);
    let y = ops::linear(convert(&x, DType::F32).unwrap(), &weight, None, WeightLayout::OutIn).unwrap();
    let held = device.memory_usage().current(Category::Activations) - before;
    autograd::backward(&ops::sum(ops::square(&y).unwrap()).unwrap()).unwrap();
    ([x, weight].iter().map(|leaf| leaf.grad().unwrap().to_vec_f32().unwrap()).collect(), held)
}

#[test]
fn a_wider_copy_of_what_is_kept_is_made_again() {
    let ((kept, kept_bytes), (rebuilt, rebuilt_bytes)) =
        (of_wide(|x, dtype| ops::cast(x, dtype)), of_wide(|x, dtype| ops::cast_of_kept(x, dtype)));
    assert!(kept == rebuilt);
    assert_eq!(kept_bytes - rebuilt_bytes, ROWS * 64 * DType::F32.size_bytes());
}

//! Inputs of linear layers in few bits, for models that are trained to be compressed: each token has levels of its own
//! ([`FakeQuantizer`]), and gradients pass as if nothing had been rounded.
//!
//! An engine says which layers ([`with_activation_bits`]), for forward and for backward, where blocks are computed again; layers
//! ask for their own weight. A fused kernel whose inside would be rounded is taken apart.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use ferrospeed_tensor::fake_quantize::{FakeQuantizer, Levels};
use ferrospeed_tensor::{Operand, Param, Result, Tensor, autograd};

/// The levels of layers' inputs, by the number of the layer's weight.
pub type ActivationBits = Arc<HashMap<u64, Levels>>;

thread_local! {
    static BITS: RefCell<Option<ActivationBits>> = const { RefCell::new(None) };
}

/// Runs a pass in which the inputs of these layers are in few bits.
pub fn with_activation_bits<R>(bits: Option<ActivationBits>, work: impl FnOnce() -> R) -> R {
    struct Restore(Option<ActivationBits>);
    impl Drop for Restore {
        fn drop(&mut self) {
            BITS.replace(self.0.take());
        }
    }
    let _restore = Restore(BITS.replace(bits));
    work()
}

fn levels_of(weight: &Param) -> Option<Levels> {
    BITS.with_borrow(|bits| bits.as_ref()?.get(&weight.id()).copied())
}

/// Whether the input of the layer with this weight is in few bits now.
pub fn is_in_few_bits(weight: &Param) -> bool {
    levels_of(weight).is_some()
}

/// The input of the layer with this weight, as the layer sees it.
pub fn input_of(weight: &Param, x: &Tensor) -> Result<Tensor> {
    let Some(levels) = levels_of(weight) else { return Ok(x.clone()) };
    let seen = FakeQuantizer::new(levels, x.shape().rows()).apply(x)?;
    let operand = Operand::from(x);
    if !autograd::needs_grad(&[&operand]) {
        return Ok(seen);
    }
    Ok(autograd::record("activation in few bits", &[&operand], seen, |gradient| Ok(vec![Some(gradient)])))
}

#[cfg(test)]
mod tests {
    use ferrospeed_tensor::{DType, Initializer, ops};

    use super::*;

    #[test]
    fn tokens_have_levels_of_their_own_and_gradients_pass() {
        let weight = Param::new("weight", [2, 4], Initializer::Constant(1.0));
        let device = ferrospeed_cpu::with_threads(1);
        let x = Tensor::from_slice(&[8.0f32, 0.4, -1.0, 0.6, 0.08, 0.004, -0.01, 0.006], [2, 4], &device)
            .unwrap()
            .tracked();
        assert_eq!(input_of(&weight, &x).unwrap().to_vec::<f32>().unwrap()[1], 0.4, "nobody asked for it");
        let bits = Arc::new(HashMap::from([(weight.id(), Levels::Symmetric { bits: 4 })]));
        let seen = with_activation_bits(Some(bits), || input_of(&weight, &x)).unwrap();
        let values = seen.to_vec::<f32>().unwrap();
        assert_eq!(values[..4], [7.0, 0.0, -1.0, 1.0]);
        assert!((values[6] + 0.01).abs() < 1e-8, "the second token has smaller steps: {values:?}");
        autograd::backward(&ops::sum(&seen).unwrap()).unwrap();
        assert_eq!(x.grad().unwrap().to_vec::<f32>().unwrap(), [1.0; 8]);
        assert_eq!(x.dtype(), DType::F32);
        assert!(!is_in_few_bits(&weight), "it holds for one pass");
    }
}

//! What models call: recorded operations over tensors and parameters.
//!
//! Each function checks its operands, allocates its result, asks the device to compute it and, where a gradient
//! is wanted, records how to go back. Saved values are handles ([`Operand::saved`]), never borrowed weights.

mod attention;
mod attention_cached;
mod attention_documents;
mod attention_paged;
mod attention_part;
mod elementwise;
mod few_rows;
mod grouped;
mod grouped_mlp;
mod image;
mod index;
mod linear;
mod loss;
mod matmul;
mod mlp_chunks;
mod norm;
mod reduce;
mod routes;
mod shape;
mod shared_input;

pub use attention::{
    AttentionOptions, PackedHeads, WeightGrid, attention, attention_packed, rotary, split_heads,
};
pub use attention_cached::{
    attention_cached, attention_packed_cached, attention_packed_step, attention_step,
};
pub use attention_documents::attention_by_sequences;
pub use attention_paged::{Turn, attention_gathered, attention_paged, attention_paged_turned};
pub use attention_part::{AttentionPart, Stretch, attention_part, attention_part_backward};
pub use elementwise::*;
pub use few_rows::{linear_onto, normed_gate, normed_linears};
pub use grouped::{GroupWeights, GroupedLayer, grouped_linear};
pub use grouped_mlp::{grouped_gated_mlp, routed_gated_mlp};
pub use image::{avg_pool2d, conv2d, max_pool2d};
pub use index::{embedding, gather, index_select, one_hot, top_k, without_gradient_of};
pub use linear::{WeightLayout, linear, linear_activation, mlp};
pub use loss::{CrossEntropyOptions, RowLoss, cross_entropy, linear_cross_entropy};
pub use matmul::matmul;
pub use mlp_chunks::{Inwards, LayerOperands, MlpWeights, mlp_in_chunks};
pub use norm::{REBUILT_WIDTH, add_layer_norm, add_rms_norm, layer_norm, rms_norm};
pub use reduce::{cumsum, log_softmax, max, mean, mean_dim, min, softmax, sum, sum_dim};
pub use routes::Routes;
pub use shape::{concat, narrow, permute, reshape, split, transpose};
pub use shared_input::{gated_mlp, linears};

use crate::backend::{Activation, Device, with_category};
use crate::dtype::DType;
use crate::error::{Result, TensorError};
use crate::lent::Lent;
use crate::memory::Category;
use crate::param::Operand;
use crate::profile;
use crate::shape::Shape;
use crate::tensor::Tensor;

fn expect_float(op: &'static str, what: &'static str, dtype: DType) -> Result<()> {
    if dtype.is_float() {
        return Ok(());
    }
    Err(TensorError::BadDType { op, what, dtype, expected: "a float type" })
}

fn expect_same_dtype(op: &'static str, what: &'static str, dtype: DType, wanted: DType) -> Result<()> {
    if dtype == wanted {
        return Ok(());
    }
    Err(TensorError::BadDType { op, what, dtype, expected: wanted.name() })
}

/// Counts an activation of so many elements. DeepSpeed counts neither tanh nor sigmoid.
fn count_activation(activation: Activation, elements: usize) {
    if !matches!(activation, Activation::Tanh | Activation::Sigmoid) {
        profile::count(0, elements);
    }
}

/// Memory of a parameter's store for its gradient, where it lends some.
fn lent_place(operand: &Operand, shape: Shape, dtype: DType) -> Result<Option<Tensor>> {
    let Operand::Param(param) = operand else { return Ok(None) };
    let place = param
        .lend_place()?
        .map(Lent::into_tensor)
        .filter(|place| *place.shape() == shape && place.dtype() == dtype);
    profile::count_bytes(place.as_ref().map_or(0, Tensor::size_bytes));
    Ok(place)
}

/// Memory for the gradient of `operand`, counted as what it is; that of a parameter's store, where it lends some.
fn gradient_like(operand: &Operand, shape: Shape, dtype: DType, device: &Device) -> Result<Tensor> {
    if let Some(place) = lent_place(operand, shape, dtype)? {
        return Ok(place);
    }
    match operand {
        Operand::Param(_) => with_category(Category::Gradients, || Tensor::empty(shape, dtype, device)),
        Operand::Tensor(_) => Tensor::empty(shape, dtype, device),
    }
}

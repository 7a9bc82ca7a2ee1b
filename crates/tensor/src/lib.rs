//! Tensors, devices, the autograd tape, and parameters whose values are borrowed.
//!
//! Reading order: [`tensor`] (what a tensor is), [`param`] (the one idea of this project), [`autograd`] (the
//! tape), [`ops`] (what models call), [`backend`] (what a device must do). The kernels are in `ferrospeed_cpu` and
//! `ferrospeed_cuda`, which make the devices; [`loops`] is what loops over the host's memory are made of.
//!
//! ```
//! use ferrospeed_tensor::{Tensor, autograd, ops};
//!
//! # fn main() -> ferrospeed_tensor::Result<()> {
//! let device = ferrospeed_cpu::device();
//! let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0], [3], &device)?.tracked();
//! let loss = ops::sum(&ops::square(&x)?)?;
//! autograd::backward(&loss)?;
//! assert_eq!(x.grad().unwrap().to_vec::<f32>()?, [2.0, 4.0, 6.0]);
//! # Ok(())
//! # }
//! ```

#![deny(clippy::mut_from_ref)]

pub mod autograd;
pub mod backend;
pub mod beside;
mod block_layout;
pub mod borrow;
pub mod documents;
pub mod dtype;
pub mod error;
pub mod fake_quantize;
pub mod lent;
pub mod loops;
pub mod memory;
pub mod moves;
pub mod ops;
pub mod out;
pub mod packed;
pub mod pages;
pub mod param;
pub mod profile;
pub mod quantize;
pub mod random;
pub mod recording;
pub mod rows;
pub mod rows_alone;
pub mod shape;
pub mod store;
pub mod tensor;

pub use backend::{Activation, Device, NormKind, Window2d, with_category};
pub use block_layout::BlockLayout;
pub use borrow::Borrows;
pub use documents::Documents;
pub use dtype::DType;
pub use error::{Result, TensorError};
pub use lent::{Lent, Loan, Returned};
pub use memory::Category;
pub use out::Out;
pub use packed::{PackedBits, PackedWeight, Packing};
pub use pages::{PageMap, PagedRows, PagedSequence, Pages};
pub use param::{Initializer, Operand, Param, ParamStore, Slice, StoreError, Unit, Value};
pub use recording::Recording;
pub use rows::RowGradient;
pub use rows_alone::rows_alone;
pub use shape::Shape;
pub use tensor::Tensor;

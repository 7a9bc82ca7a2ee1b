//! Rows of tokens to the groups that were chosen for them, and back.
//!
//! ```
//! use ferrospeed_tensor::ops::Routes;
//! use ferrospeed_tensor::Tensor;
//!
//! # fn main() -> ferrospeed_tensor::Result<()> {
//! let device = ferrospeed_cpu::device();
//! // Three tokens with two choices each among three groups; 3 is none of them: that choice goes nowhere.
//! let choices = Tensor::from_slice(&[2i64, 0, 0, 3, 0, 2], [3, 2], &device)?;
//! let routes = Routes::new(&choices, 3)?;
//! assert_eq!(routes.counts().to_vec::<i64>()?, [3, 0, 2]);
//! let sorted = routes.spread(&Tensor::from_slice(&[10.0f32, 20.0, 30.0], [3, 1], &device)?)?;
//! assert_eq!(sorted.to_vec_f32()?, [10.0, 20.0, 30.0, 10.0, 30.0, 0.0]);
//! let weights = Tensor::from_slice(&[0.5f32, 0.5, 1.0, 0.0, 0.25, 0.75], [3, 2], &device)?;
//! assert_eq!(routes.collect(&sorted, &weights)?.to_vec_f32()?, [10.0, 20.0, 30.0]);
//! # Ok(())
//! # }
//! ```
//!
//! Both ways each row is written once, by whoever owns it, so sums have one order. Nothing here waits for the device.

use crate::autograd::{Saved, needs_grad, rebuild_with, record};
use crate::backend::RoutedRows;
use crate::dtype::DType;
use crate::error::{Result, TensorError};
use crate::ops::{expect_float, expect_same_dtype};
use crate::param::Operand;
use crate::shape::Shape;
use crate::tensor::Tensor;

/// Where the rows of tokens lie once they are sorted by group. Cloning copies handles.
#[derive(Debug, Clone)]
pub struct Routes {
    counts: Tensor,
    order: Tensor,
    place: Tensor,
    tokens: usize,
    chosen: usize,
}

impl Routes {
    /// From `choices [tokens, chosen]`: the group of each, or the number of groups for none.
    pub fn new(choices: &Tensor, groups: usize) -> Result<Routes> {
        const OP: &str = "routes";
        let &[tokens, chosen] = choices.sizes() else {
            return Err(TensorError::shape(OP, "the choices", *choices.shape(), "[tokens, chosen]"));
        };
        expect_same_dtype(OP, "the choices", choices.dtype(), DType::I64)?;
        if chosen == 0 || groups == 0 {
            return Err(TensorError::argument(OP, format!("{chosen} choices among {groups} groups")));
        }
        let device = choices.device();
        let numbers = |count: usize| Tensor::empty([count], DType::I64, device);
        let (mut counts, mut order, mut place) =
            (numbers(groups)?, numbers(tokens * chosen)?, numbers(tokens * chosen)?);
        device.backend().sort_groups(choices, counts.out()?, order.out()?, place.out()?)?;
        Ok(Routes { counts, order, place, tokens, chosen })
    }

    /// How many rows each group has, `[groups]` in `I64`.
    pub fn counts(&self) -> &Tensor {
        &self.counts
    }

    /// Of each sorted row its slot, `token · chosen + choice`; -1 behind the last row.
    pub fn order(&self) -> &Tensor {
        &self.order
    }

    /// How many rows there are room for: one per choice.
    pub fn rows(&self) -> usize {
        self.tokens * self.chosen
    }

    pub(super) fn routed(&self) -> RoutedRows<'_> {
        RoutedRows { order: &self.order, place: &self.place, chosen: self.chosen }
    }

    /// The rows of `x [tokens, width]`, sorted by group: `[tokens · chosen, width]`.
    pub fn spread(&self, x: impl Into<Operand>) -> Result<Tensor> {
        const OP: &str = "spread";
        let x = x.into();
        self.expect_tokens(OP, &x)?;
        let y = self.copied(&*x.read()?)?;
        if !needs_grad(&[&x]) {
            return Ok(y);
        }
        let routes = self.clone();
        let y = record(OP, &[&x], y, move |dy| Ok(vec![Some(routes.summed(&dy, None)?)]));
        // Sorted rows are as many times as large as the tokens as each has choices.
        let (routes, saved) = (self.clone(), Saved::of(&x));
        rebuild_with(&y, move || routes.copied(&*saved.read()?));
        Ok(y)
    }

    /// The rows of `x`, sorted.
    pub(super) fn copied(&self, x: &Tensor) -> Result<Tensor> {
        let mut y = Tensor::empty([self.rows(), x.shape().last()], x.dtype(), x.device())?;
        x.device().backend().spread_rows(x, &self.routed(), y.out()?)?;
        Ok(y)
    }

    /// Of sorted rows `x`, each token's own, weighted by `weights [tokens, chosen]` in f32 and summed: `[tokens, width]`.
    pub fn collect(&self, x: impl Into<Operand>, weights: impl Into<Operand>) -> Result<Tensor> {
        const OP: &str = "collect";
        let (x, weights) = (x.into(), weights.into());
        self.width(OP, "the rows", x.shape(), self.rows())?;
        expect_float(OP, "the rows", x.dtype())?;
        self.expect_weights(OP, &weights)?;
        let y = self.summed(&*x.read()?, Some(&*weights.read()?))?;
        if !needs_grad(&[&x, &weights]) {
            return Ok(y);
        }
        let (routes, saved, saved_weights) = (self.clone(), Saved::of(&x), weights.saved());
        Ok(record(OP, &[&x, &weights], y, move |dy| {
            let (x, weights) = (saved.read()?, saved_weights.read()?);
            let mut dx = Tensor::empty(*x.shape(), x.dtype(), x.device())?;
            let mut dweights = Tensor::empty(*weights.shape(), DType::F32, x.device())?;
            let inputs = [&*x, &*weights, &dy];
            x.device().backend().collect_rows_backward(
                inputs,
                &routes.routed(),
                dx.out()?,
                dweights.out()?,
            )?;
            Ok(vec![Some(dx), Some(dweights)])
        }))
    }

    /// Of sorted rows `x`, the weighted sum of each token's own.
    pub(super) fn summed(&self, x: &Tensor, weights: Option<&Tensor>) -> Result<Tensor> {
        let mut y = Tensor::empty([self.tokens, x.shape().last()], x.dtype(), x.device())?;
        x.device().backend().collect_rows(x, &self.routed(), weights, y.out()?)?;
        Ok(y)
    }

    pub(super) fn expect_tokens(&self, op: &'static str, x: &Operand) -> Result<()> {
        self.width(op, "the tokens", x.shape(), self.tokens)?;
        expect_float(op, "the tokens", x.dtype())
    }

    pub(super) fn expect_weights(&self, op: &'static str, weights: &Operand) -> Result<()> {
        expect_same_dtype(op, "the weights", weights.dtype(), DType::F32)?;
        if weights.shape().sizes() == [self.tokens, self.chosen] {
            return Ok(());
        }
        let wanted = format!("[{}, {}]", self.tokens, self.chosen);
        Err(TensorError::shape(op, "the weights", *weights.shape(), wanted))
    }

    fn width(&self, op: &'static str, what: &'static str, shape: &Shape, rows: usize) -> Result<usize> {
        match *shape.sizes() {
            [found, width] if found == rows => Ok(width),
            _ => Err(TensorError::shape(op, what, *shape, format!("[{rows}, width]"))),
        }
    }
}

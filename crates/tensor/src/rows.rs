//! The gradient of a table of which few rows were read: those rows alone.
//!
//! A table of a hundred thousand entries gets a gradient for the few thousand ids of a micro-batch; all other rows are
//! zero. A store that can use this says so ([`crate::ParamStore::wants_rows`]) and is handed rows where a lookup was the
//! only use; everyone else sees whole gradients. Both hold the same values to the last bit. Where a table has another use,
//! whose gradient is whole (a tied head), the rows are added to that.

use crate::backend::with_category;
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::out::Out;
use crate::tensor::Tensor;

/// The rows of a table's gradient that are not zero.
#[derive(Debug, Clone)]
pub struct RowGradient {
    ids: Vec<i64>,
    values: Tensor,
    entries: usize,
}

impl RowGradient {
    /// From the ids of a lookup in a table of `entries` rows, which were checked when it was made, and the gradient
    /// `dout [ids.., width]` of its result.
    pub(crate) fn of_lookup(ids: &Tensor, dout: &Tensor, entries: usize) -> Result<RowGradient> {
        let looked_up: Vec<i64> = match ids.dtype() {
            DType::I32 => ids.to_vec::<i32>()?.into_iter().map(i64::from).collect(),
            _ => ids.to_vec::<i64>()?,
        };
        let mut unique = looked_up.clone();
        unique.sort_unstable();
        unique.dedup();
        let row = |id: &i64| unique.binary_search(id).map_or(0, |row| row as i64);
        let rows: Vec<i64> = looked_up.iter().map(row).collect();
        let rows = Tensor::from_slice(&rows, *ids.shape(), ids.device())?;
        let width = dout.shape().last();
        let mut values = with_category(Category::Gradients, || {
            Tensor::empty([unique.len(), width], dout.dtype(), dout.device())
        })?;
        dout.device().backend().embedding_backward(&rows, dout, values.out()?)?;
        Ok(RowGradient { ids: unique, values, entries })
    }

    /// Which rows, ascending, each once.
    pub fn ids(&self) -> &[i64] {
        &self.ids
    }

    /// Their values, `[ids, width]`.
    pub fn values(&self) -> &Tensor {
        &self.values
    }

    /// Adds the rows to a whole gradient, `[entries, width]`.
    pub(crate) fn add_to(&self, mut whole: Out<'_>) -> Result<()> {
        let (backend, width) = (whole.device().backend(), self.values.shape().last());
        for (row, &id) in self.ids.iter().enumerate() {
            let mut target = whole.again().part(id as usize * width, [width])?;
            backend.add_assign(target.out(), &self.values.slice(row * width, [width])?)?;
        }
        Ok(())
    }

    /// The whole gradient, `[entries, width]`.
    pub fn to_dense(&self) -> Result<Tensor> {
        let device = self.values.device();
        let shape = [self.entries, self.values.shape().last()];
        let mut dense =
            with_category(Category::Gradients, || Tensor::empty(shape, self.values.dtype(), device))?;
        let ids = Tensor::from_slice(&self.ids, [self.ids.len()], device)?;
        device.backend().embedding_backward(&ids, &self.values, dense.out()?)?;
        Ok(dense)
    }
}

//! The embedding table.

use ferrospeed_tensor::{Initializer, Param, Result, Tensor, ops};

use crate::init::Init;
use crate::tensor_parallel::{Cut, Slices, expect_entries};

/// Rows looked up by id. Where its [`Init`] cuts it by entries, each rank looks up what it holds, and the ranks' rows are
/// summed.
#[derive(Debug, Clone)]
pub struct Embedding {
    table: Param,
    summed: Option<Slices>,
    /// The entry that lookups do not train.
    padding: Option<usize>,
}

impl Embedding {
    /// A table `[entries, width]` of normal numbers.
    pub fn new(init: &Init, entries: usize, width: usize, std: f32) -> Embedding {
        init.refuse_adapters("is a table of embeddings, which has no adapters here; name it in modules_to_save to train it whole");
        let (shape, start) = ([entries, width], Initializer::Normal { mean: 0.0, std });
        let (table, summed) = match init.slicing() {
            Some((slices, cut @ Cut::Entries)) => {
                (init.param_part("weight", shape, 0, cut, slices, start), Some(slices.clone()))
            }
            _ => (init.param("weight", shape, start), None),
        };
        Embedding { table: table.as_table(), summed, padding: None }
    }

    /// Lookups of this entry give its row no gradient, as `padding_idx` of torch's layer has it. Another use of the table, such
    /// as a tied head, does.
    pub fn with_padding(self, padding: Option<usize>) -> Embedding {
        Embedding { padding, ..self }
    }

    /// The table's handle: clone it to tie another layer to it.
    pub fn table(&self) -> &Param {
        &self.table
    }

    /// `[ids.., width]`.
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        match (&self.summed, self.table.slice()) {
            (Some(slices), Some(slice)) => {
                let rows = slice.ranges()[0].clone();
                let all = ids.to_vec::<i64>()?;
                expect_entries("embedding", all.iter().copied(), slice.whole()[0])?;
                let here = |id: i64| usize::try_from(id).ok().filter(|id| rows.contains(id));
                let own: Vec<i64> =
                    all.iter().map(|&id| here(id).map_or(0, |id| (id - rows.start) as i64)).collect();
                let is_here: Vec<f32> =
                    all.iter().map(|&id| f32::from(u8::from(here(id).is_some()))).collect();
                let mut sizes = ids.sizes().to_vec();
                let found = ops::embedding(&self.table, &Tensor::from_slice(&own, &sizes, ids.device())?)?;
                let found = self.without_padding(found, ids)?;
                sizes.push(1);
                let is_here = Tensor::from_f32(&is_here, &sizes, found.dtype(), ids.device())?;
                slices.leave(&ops::mul(&found, &is_here)?)
            }
            _ => self.without_padding(ops::embedding(&self.table, ids)?, ids),
        }
    }

    /// The rows of ids, of which those of padding give their entry no gradient.
    fn without_padding(&self, found: Tensor, ids: &Tensor) -> Result<Tensor> {
        match self.padding {
            Some(padding) if found.requires_grad() => ops::without_gradient_of(&found, ids, padding as i64),
            _ => Ok(found),
        }
    }
}

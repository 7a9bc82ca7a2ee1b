//! The embedding table.

use ferrospeed_tensor::{Initializer, Param, Result, Tensor, ops};

use crate::init::Init;

/// Rows looked up by id.
#[derive(Debug, Clone)]
pub struct Embedding {
    table: Param,
}

impl Embedding {
    /// A table `[entries, width]` of normal numbers.
    pub fn new(init: &Init, entries: usize, width: usize, std: f32) -> Embedding {
        let table = init.param("weight", [entries, width], Initializer::Normal { mean: 0.0, std });
        Embedding { table: table.as_table() }
    }

    /// The table's handle: clone it to tie another layer to it.
    pub fn table(&self) -> &Param {
        &self.table
    }

    /// `[ids.., width]`.
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        ops::embedding(&self.table, ids)
    }
}

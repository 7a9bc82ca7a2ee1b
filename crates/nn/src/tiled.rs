//! A linear layer cut into tiles, so that no weight is larger than a tile.
//!
//! The tiles are parameters of their own: a store that gathers weights gathers one tile at a time. Tile `(o, i)` is
//! `linears.o.i`; only the last tile of a row has a bias. The values of a whole linear layer are copied in by loading
//! the tiles through [`TiledLinear::copy_params_from`].

use std::ops::Range;

use ferrospeed_tensor::store::ParamSource;
use ferrospeed_tensor::{Initializer, Param, Result, Tensor, TensorError, ops};

use crate::init::Init;
use crate::linear::Linear;

/// Into how many tiles a layer is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiling {
    /// Parts of the input.
    pub in_splits: usize,
    /// Parts of the output.
    pub out_splits: usize,
}

/// A linear layer of tiles.
#[derive(Debug, Clone)]
pub struct TiledLinear {
    /// `tiles[o][i]` maps input part `i` to a summand of output part `o`.
    tiles: Vec<Vec<Linear>>,
    inputs: Vec<usize>,
    outputs: Vec<usize>,
}

/// Sizes of `parts` parts that differ by one at most, the larger ones first.
fn parts(whole: usize, parts: usize) -> Vec<usize> {
    (0..parts).map(|part| whole / parts + usize::from(part < whole % parts)).collect()
}

impl TiledLinear {
    /// A layer from `inputs` to `outputs`. Refuses no part, and more parts than elements.
    pub fn new(
        init: &Init,
        inputs: usize,
        outputs: usize,
        bias: bool,
        tiling: Tiling,
    ) -> Result<TiledLinear> {
        for (name, splits, size) in
            [("in_splits", tiling.in_splits, inputs), ("out_splits", tiling.out_splits, outputs)]
        {
            if splits == 0 || splits > size {
                return Err(TensorError::argument(
                    "tiled linear",
                    format!("{name} is {splits}; {size} elements can be cut into 1 to {size} parts"),
                ));
            }
        }
        let (inputs, outputs) = (parts(inputs, tiling.in_splits), parts(outputs, tiling.out_splits));
        let tile = |row: usize, column: usize| {
            let last = column + 1 == inputs.len();
            let init = init.at(format!("linears.{row}.{column}"));
            Linear::new(&init, inputs[column], outputs[row], bias && last)
        };
        let tiles = (0..outputs.len()).map(|row| (0..inputs.len()).map(|column| tile(row, column)).collect());
        Ok(TiledLinear { tiles: tiles.collect(), inputs, outputs })
    }

    /// Sizes of the input's parts.
    pub fn input_parts(&self) -> &[usize] {
        &self.inputs
    }

    /// Sizes of the output's parts.
    pub fn output_parts(&self) -> &[usize] {
        &self.outputs
    }

    /// `x·W + b` over the last dimension.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let last = x.shape().dims().saturating_sub(1);
        let parts = match self.inputs.len() {
            1 => vec![x.clone()],
            _ => ops::split(x, last, &self.inputs)?,
        };
        let mut outputs = self.forward_parts(&parts)?;
        match outputs.len() {
            1 => Ok(outputs.remove(0)),
            _ => ops::concat(&outputs, last),
        }
    }

    /// The same for an input that is cut already, with the output left in parts.
    pub fn forward_parts(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        if inputs.len() != self.inputs.len() {
            return Err(TensorError::argument(
                "tiled linear",
                format!("{} parts of the input were given, {} are needed", inputs.len(), self.inputs.len()),
            ));
        }
        self.tiles
            .iter()
            .map(|row| {
                let mut products = row.iter().zip(inputs).map(|(tile, x)| tile.forward(x));
                let first = products
                    .next()
                    .unwrap_or_else(|| Err(TensorError::argument("tiled linear", "no tile")))?;
                products.try_fold(first, |sum, product| ops::add(&sum, &product?))
            })
            .collect()
    }

    /// A source for a model with this layer in it, which cuts the tiles out of the whole linear layer that `source`
    /// knows as `whole` (`<whole>.weight`, `<whole>.bias`) and passes every other parameter on. With initialisers as the
    /// source, the tiled layer starts as the whole one would.
    pub fn copy_params_from<'a>(&self, whole: &str, source: &'a dyn ParamSource) -> TiledSource<'a> {
        let (inputs, outputs) = (self.inputs.iter().sum::<usize>(), self.outputs.iter().sum::<usize>());
        let start = Initializer::Uniform { bound: 1.0 / (inputs.max(1) as f32).sqrt() };
        let weight = Param::new(format!("{whole}.weight"), [outputs, inputs], start);
        let bias = Param::new(format!("{whole}.bias"), [outputs], start);
        let mut cuts = Vec::new();
        let mut first_row = 0;
        for (row, &rows) in self.tiles.iter().zip(&self.outputs) {
            let mut first_column = 0;
            for (tile, &columns) in row.iter().zip(&self.inputs) {
                let origin = first_row * inputs + first_column;
                cuts.push(Cut {
                    tile: tile.weight().clone(),
                    whole: weight.clone(),
                    origin,
                    columns,
                    stride: inputs,
                });
                if let Some(part) = tile.bias() {
                    cuts.push(Cut {
                        tile: part.clone(),
                        whole: bias.clone(),
                        origin: first_row,
                        columns: 1,
                        stride: 1,
                    });
                }
                first_column += columns;
            }
            first_row += rows;
        }
        TiledSource { cuts, source }
    }
}

/// Where one tile lies in the whole: rows of `columns` elements, `stride` apart.
#[derive(Debug)]
struct Cut {
    tile: Param,
    whole: Param,
    origin: usize,
    columns: usize,
    stride: usize,
}

/// Loads tiles from a whole linear layer. See [`TiledLinear::copy_params_from`].
pub struct TiledSource<'a> {
    cuts: Vec<Cut>,
    source: &'a dyn ParamSource,
}

impl ParamSource for TiledSource<'_> {
    fn load(&self, param: &Param, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        let Some(cut) = self.cuts.iter().find(|cut| cut.tile.is_same(param)) else {
            return self.source.load(param, range, out);
        };
        let (mut at, mut rest) = (range.start, out);
        while !rest.is_empty() {
            let (row, column) = (at / cut.columns, at % cut.columns);
            let count = (cut.columns - column).min(rest.len());
            let start = cut.origin + row * cut.stride + column;
            let (piece, others) = rest.split_at_mut(count);
            self.source.load(&cut.whole, start..start + count, piece)?;
            (at, rest) = (at + count, others);
        }
        Ok(())
    }
}

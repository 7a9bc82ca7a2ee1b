//! Passes over tokens of many sequences whose keys and values lie in blocks of one cache: whose tokens the rows are, and where
//! the blocks are.
//!
//! The processor reads that from [`PagedRows`]. A device reads it from a [`PageMap`] in its own memory; one that is made once
//! and filled anew for every pass lets the pass be recorded.

use std::sync::Arc;

use crate::backend::Device;
use crate::dtype::DType;
use crate::error::{Result, TensorError};
use crate::out::Out;
use crate::tensor::Tensor;

/// Rows times heads that a device's kernel computes together.
const TILE: usize = 16;
/// Keys after which a device spreads the work on one row over several blocks of threads.
pub const CHUNK: usize = 128;
/// Up to how many tokens of a text its keys are spread in chunks of which size. Matches the kernel.
const CHUNKS: [(usize, usize); 3] = [(4096, CHUNK), (32768, 256), (usize::MAX, 1024)];

/// The most chunks of keys that a row has which sees at most so many tokens.
pub fn most_chunks(longest: usize) -> usize {
    // A longer text has larger chunks, and may have fewer of them.
    CHUNKS.iter().map(|&(up_to, size)| longest.min(up_to).div_ceil(size)).max().unwrap_or(1).max(1)
}

/// What a tile is told by: its first row, how many tokens it has, the place of the first and the number of its table.
pub const TILE_NUMBERS: usize = 4;

/// Tokens of one sequence that a pass computes, and where its keys and values lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PagedSequence {
    /// The place of the first new token.
    pub first: usize,
    /// How many new tokens there are.
    pub count: usize,
    /// The blocks of the cache that hold its tokens, new ones included, in order.
    pub blocks: Vec<u32>,
}

/// The rows of a pass over many sequences: the new tokens of the first, then those of the second, and so on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PagedRows {
    /// Whose tokens they are.
    pub sequences: Vec<PagedSequence>,
}

impl PagedRows {
    /// The place of every row in its sequence.
    pub fn places(&self) -> Vec<usize> {
        self.sequences.iter().flat_map(|one| one.first..one.first + one.count).collect()
    }

    /// Copies new keys and values `[1, rows, kv_heads, dim]` to their places in `caches`.
    pub fn append(&self, new: [&Tensor; 2], mut caches: [Out<'_>; 2]) -> Result<()> {
        let [tokens, width] = [caches[0].shape()[1], caches[0].shape()[2] * caches[0].shape()[3]];
        let mut row = 0;
        for one in &self.sequences {
            let (mut place, end) = (one.first, one.first + one.count);
            while place < end {
                let run = (tokens - place % tokens).min(end - place);
                let slot = one.blocks[place / tokens] as usize * tokens + place % tokens;
                for (new, cache) in new.iter().zip(&mut caches) {
                    let backend = new.device().backend();
                    backend.copy_blocks(
                        new,
                        row * width,
                        width,
                        cache.again(),
                        slot * width,
                        width,
                        run,
                        width,
                    )?;
                }
                (row, place) = (row + run, place + run);
            }
        }
        Ok(())
    }
}

/// The rows of a pass as a device takes them.
#[derive(Debug, Clone)]
pub struct Pages {
    /// Whose tokens they are; of a recorded pass, those that it was recorded with.
    pub rows: Arc<PagedRows>,
    /// The same in the device's memory, where it is not the host's.
    pub map: Option<Arc<PageMap>>,
}

impl Pages {
    /// For one pass of a layer with `group` query heads to a key head.
    pub fn new(rows: Arc<PagedRows>, group: usize, device: &Device) -> Result<Pages> {
        let map = match device.backend().is_host() {
            true => None,
            false => Some(Arc::new(PageMap::new(&rows, group, 0, device)?)),
        };
        Ok(Pages { rows, map })
    }

    /// The same with at least `least` rows, for a device that has kernels for it: those behind the pass's own are nobody's.
    pub fn padded(rows: Arc<PagedRows>, group: usize, least: usize, device: &Device) -> Result<Pages> {
        let map = Some(Arc::new(PageMap::new(&rows, group, least, device)?));
        Ok(Pages { rows, map })
    }
}

/// Where the rows of a pass and the tokens that they see lie, in a device's memory.
///
/// Rows are computed in tiles: neighbours of one sequence, as many as make sixteen with the query heads of a key head. The
/// tiles of a sequence with few new tokens come first: its keys are spread over the device. Those of the others take all keys
/// one after the other; there are enough of them.
#[derive(Debug)]
pub struct PageMap {
    /// Of i32: a place for every row, a table for every row, [`TILE_NUMBERS`] for every tile, the tables.
    values: Tensor,
    rows: usize,
    tables: usize,
    /// Query heads to a key head.
    group: usize,
    /// How many tiles are spread, and how many are not.
    tiles: [usize; 2],
    /// Blocks of a table.
    width: usize,
    /// The most tokens that a row of a spread tile sees.
    longest: usize,
}

impl PageMap {
    /// For one pass.
    fn new(rows: &PagedRows, group: usize, least: usize, device: &Device) -> Result<PageMap> {
        let each = PageMap::queries(group);
        let own: usize = rows.sequences.iter().map(|one| one.count).sum();
        let spread = |one: &&PagedSequence| one.count <= each;
        let tiles =
            |of: &mut dyn Iterator<Item = &PagedSequence>| of.map(|one| one.count.div_ceil(each)).sum();
        let map = PageMap {
            values: Tensor::empty([0], DType::I32, device)?,
            rows: own.max(least),
            tables: rows.sequences.len(),
            group,
            tiles: [
                tiles(&mut rows.sequences.iter().filter(spread)) + least.saturating_sub(own),
                tiles(&mut rows.sequences.iter().filter(|one| !spread(one))),
            ],
            width: rows.sequences.iter().map(|one| one.blocks.len()).max().unwrap_or(0),
            longest: rows.sequences.iter().filter(spread).map(|one| one.first + one.count).max().unwrap_or(0),
        };
        let values = map.numbers(rows)?;
        Ok(PageMap { values: Tensor::from_slice(&values, [values.len()], device)?, ..map })
    }

    /// For passes of up to `rows` rows, each the only one of its sequence, of which it sees up to `longest` tokens, in blocks of
    /// `block_tokens`.
    pub fn for_single_rows(
        rows: usize,
        group: usize,
        block_tokens: usize,
        longest: usize,
        device: &Device,
    ) -> Result<PageMap> {
        let tiles = [rows, 0];
        let map = PageMap {
            values: Tensor::empty([0], DType::I32, device)?,
            rows,
            tables: rows,
            group,
            tiles,
            width: longest.div_ceil(block_tokens.max(1)),
            longest,
        };
        let size = map.size();
        Ok(PageMap { values: Tensor::zeros([size], DType::I32, device)?, ..map })
    }

    /// Makes it that of another pass. Rows that the pass does not have are nobody's.
    pub fn fill(&self, rows: &PagedRows) -> Result<()> {
        let fits = rows.sequences.len() <= self.tables
            && rows.sequences.iter().all(|one| one.count == 1 && one.first < self.longest);
        if !fits {
            return Err(TensorError::argument(
                "attention_paged",
                "this pass is none that its map was made for",
            ));
        }
        let numbers = self.numbers(rows)?;
        self.values
            .device()
            .backend()
            .copy_from_host(bytemuck::cast_slice(&numbers), Out::of_device(&self.values)?)
    }

    /// Neighbouring tokens of a tile.
    fn queries(group: usize) -> usize {
        TILE / PageMap::part_heads(group).max(1)
    }

    /// Query heads of a tile, of the `group` that share a key head.
    fn part_heads(group: usize) -> usize {
        group.div_ceil(group.div_ceil(TILE).max(1))
    }

    fn size(&self) -> usize {
        2 * self.rows + TILE_NUMBERS * (self.tiles[0] + self.tiles[1]) + self.tables * self.width
    }

    fn numbers(&self, rows: &PagedRows) -> Result<Vec<i32>> {
        let small = |value: usize| {
            i32::try_from(value)
                .map_err(|_| TensorError::argument("attention_paged", format!("{value} is too much")))
        };
        let each = PageMap::queries(self.group);
        let (mut places, mut table_of) = (Vec::with_capacity(self.rows), Vec::with_capacity(self.rows));
        let mut tiles = [Vec::new(), Vec::new()];
        let mut tables = Vec::new();
        for (number, one) in rows.sequences.iter().enumerate() {
            let kind = usize::from(one.count > each);
            for start in (0..one.count).step_by(each) {
                let tile = [places.len() + start, each.min(one.count - start), one.first + start, number];
                for value in tile {
                    tiles[kind].push(small(value)?);
                }
            }
            for place in one.first..one.first + one.count {
                places.push(small(place)?);
                table_of.push(small(number)?);
            }
            // Of blocks that a text has beyond those it fills, this pass knows nothing.
            for &block in one.blocks.iter().take(self.width) {
                tables.push(small(block as usize)?);
            }
            tables.resize((number + 1) * self.width, 0);
        }
        for row in places.len()..self.rows {
            tiles[0].extend([small(row)?, 1, -1, 0]);
            places.push(-1);
            table_of.push(0);
        }
        let mut numbers = places;
        numbers.extend(table_of);
        tiles.iter().for_each(|tiles| numbers.extend(tiles));
        numbers.extend(tables);
        numbers.resize(self.size(), 0);
        Ok(numbers)
    }

    /// Places, tables of rows, tiles of the first and second kind, and tables, as offsets in [`PageMap::values`].
    pub fn parts(&self) -> [usize; 5] {
        let tiles = 2 * self.rows;
        let others = tiles + TILE_NUMBERS * self.tiles[0];
        [0, self.rows, tiles, others, others + TILE_NUMBERS * self.tiles[1]]
    }

    /// Its numbers, `I32`, in the memory of the device.
    pub fn values(&self) -> &Tensor {
        &self.values
    }

    /// Rows that it has room for.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Tiles of the first and second kind.
    pub fn tiles(&self) -> [usize; 2] {
        self.tiles
    }

    /// Blocks of a table.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The most tokens that a row sees.
    pub fn longest(&self) -> usize {
        self.longest
    }

    /// Query heads of a tile.
    pub fn tile_heads(&self) -> usize {
        PageMap::part_heads(self.group)
    }
}

/// One attention call over a cache in blocks: every row sees its sequence up to itself. Shapes: q `[rows, heads, dim]`,
/// caches `[blocks, block_tokens, kv_heads, dim]`.
#[derive(Debug, Clone, Copy)]
pub struct PagedSpec<'a> {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Channels per head.
    pub dim: usize,
    /// Tokens of a block.
    pub block_tokens: usize,
    /// Multiplies the scores.
    pub scale: f32,
    /// With a window `w`, a row at place `p` sees keys `> p - w`.
    pub window: Option<usize>,
    /// ALiBi: `[heads]` slopes; `slope · key place` is added to the scores.
    pub alibi_slopes: Option<&'a Tensor>,
    /// Scores are `cap·tanh(score/cap)` before anything is added to them.
    pub score_cap: Option<f32>,
    /// `[heads]` of f32: a score of nobody's beside those of the keys.
    pub sinks: Option<&'a Tensor>,
    /// Cosines and sines `[1, rows, dim / 2]` by which queries and keys are still to be turned.
    pub turn: Option<[&'a Tensor; 2]>,
    /// The rows.
    pub rows: &'a PagedRows,
    /// Where they lie, on a device that is not the host.
    pub map: Option<&'a PageMap>,
}

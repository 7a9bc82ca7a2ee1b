//! How a dimension is cut for tensor parallelism, and how rows of fused projections are dealt out.
//!
//! As DeepSpeed does it, except that a rest which is no multiple of 64 goes to the last rank instead of being lost.

use std::ops::Range;

/// Wide dimensions are cut in multiples of this.
const GRAIN: usize = 64;

/// How many of `total` each of `ranks` ranks gets. `kv_heads` where the model has attention heads; `name` is the layer's.
pub fn shard_sizes(total: usize, ranks: usize, kv_heads: Option<usize>, name: Option<&str>) -> Vec<usize> {
    let ranks = ranks.max(1);
    let dealt = |count: usize, rank: usize| count / ranks + usize::from(rank < count % ranks);
    let by_heads = name.is_none_or(|name| !name.contains("mlp") && !["lm_head", "embed_out"].contains(&name));
    match kv_heads.filter(|&heads| heads > 0 && total.is_multiple_of(heads) && by_heads) {
        Some(heads) => (0..ranks).map(|rank| total * dealt(heads, rank) / heads).collect(),
        None if total >= GRAIN => {
            let mut sizes: Vec<usize> = (0..ranks).map(|rank| dealt(total / GRAIN, rank) * GRAIN).collect();
            sizes[ranks - 1] += total % GRAIN;
            sizes
        }
        None => (0..ranks).map(|rank| dealt(total, rank)).collect(),
    }
}

/// How queries, keys and values follow each other in one projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FusedQkv {
    /// Head by head, or in a way that nobody told: rows are cut where they stand.
    PerHead,
    /// All queries, all keys, all values.
    Thirds,
    /// Four blocks of query, value, key each.
    CodeGen,
    /// All queries, and keys and values that every rank has.
    SharedKeys {
        /// Rows of queries.
        query_rows: usize,
    },
}

impl FusedQkv {
    /// By the class of the block, of whose name the longest known part counts; `None` where it is not known and rows are cut
    /// where they stand.
    pub fn of_block(class: &str, query_rows: usize) -> Option<FusedQkv> {
        let known = [
            ("BloomBlock", FusedQkv::PerHead),
            ("FalconDecoderLayer", FusedQkv::PerHead),
            ("GLMBlock", FusedQkv::Thirds),
            ("MPTBlock", FusedQkv::Thirds),
            ("MptBlock", FusedQkv::Thirds),
            ("BaichuanLayer", FusedQkv::Thirds),
            ("DecoderLayer", FusedQkv::Thirds),
            ("QWenBlock", FusedQkv::Thirds),
            ("CodeGenBlock", FusedQkv::CodeGen),
            ("GPTBigCodeBlock", FusedQkv::SharedKeys { query_rows }),
        ];
        let found = known.into_iter().filter(|(name, _)| class.contains(name));
        found.max_by_key(|(name, _)| name.len()).map(|(_, kind)| kind)
    }

    /// The rows of a projection of `rows` that each rank keeps, in order. `None` where they cannot be dealt out.
    pub fn rows(self, rows: usize, ranks: usize, kv_heads: Option<usize>) -> Option<Vec<Vec<usize>>> {
        match self {
            FusedQkv::PerHead => {
                Some(cut(0..rows, ranks, kv_heads).into_iter().map(Iterator::collect).collect())
            }
            FusedQkv::Thirds => {
                let third = rows.is_multiple_of(3).then_some(rows / 3)?;
                let parts: Vec<Vec<Range<usize>>> =
                    (0..3).map(|part| cut(part * third..(part + 1) * third, ranks, kv_heads)).collect();
                let of_rank = |rank: usize| parts.iter().flat_map(|part| part[rank].clone()).collect();
                Some((0..ranks).map(of_rank).collect())
            }
            FusedQkv::SharedKeys { query_rows } if query_rows <= rows => {
                let queries = cut(0..query_rows, ranks, kv_heads);
                Some(queries.into_iter().map(|part| part.chain(query_rows..rows).collect()).collect())
            }
            FusedQkv::SharedKeys { .. } => None,
            FusedQkv::CodeGen => {
                const BLOCKS: usize = 4;
                let pieces = BLOCKS * 3 * ranks;
                if !kv_heads?.is_multiple_of(BLOCKS * ranks) || !rows.is_multiple_of(pieces) {
                    return None;
                }
                let (block, part, piece) = (rows / BLOCKS, rows / BLOCKS / 3, rows / pieces);
                let order = (0..BLOCKS).flat_map(|b| {
                    (0..ranks).flat_map(move |p| {
                        (0..3).flat_map(move |third| {
                            let start = b * block + third * part + p * piece;
                            start..start + piece
                        })
                    })
                });
                let order: Vec<usize> = order.collect();
                Some(order.chunks(rows / ranks).map(<[usize]>::to_vec).collect())
            }
        }
    }
}

fn cut(range: Range<usize>, ranks: usize, kv_heads: Option<usize>) -> Vec<Range<usize>> {
    let mut start = range.start;
    shard_sizes(range.len(), ranks, kv_heads, None)
        .into_iter()
        .map(|size| {
            start += size;
            start - size..start
        })
        .collect()
}

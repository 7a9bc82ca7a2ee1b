//! What the tasks of attention have in common: which tokens they attend over, and what is hidden there.

use std::ops::Range;

use crate::backend::{AttentionSpec, Heads, WeightGrid};
use crate::cpu::read;
use crate::random::drop_threshold;

/// Tokens that see each other and nobody else: a sequence, or a document in one.
pub(crate) struct Part<'a> {
    /// With the queries and keys of the part alone.
    pub(crate) spec: AttentionSpec<'a>,
    /// Which sequence.
    pub(crate) batch: usize,
    /// Its first token there.
    first: usize,
    /// Queries and keys of the whole sequence.
    row_queries: usize,
    row_keys: usize,
}

impl<'a> Part<'a> {
    /// All parts of a problem.
    pub(crate) fn all(spec: &AttentionSpec<'a>) -> Vec<Part<'a>> {
        let sequence =
            |batch| Part { spec: *spec, batch, first: 0, row_queries: spec.queries, row_keys: spec.keys };
        let Some(documents) = spec.documents else { return (0..spec.batch).map(sequence).collect() };
        let of_row = |batch| documents.of_row(batch).map(move |document| sequence(batch).document(document));
        (0..spec.batch).flat_map(of_row).collect()
    }

    fn document(mut self, document: Range<usize>) -> Part<'a> {
        let mut grid = self.spec.weight_grid();
        let [_, query, key] = &mut grid.first;
        (*query, *key) = (*query + document.start, *key + document.start);
        (self.spec.queries, self.spec.keys) = (document.len(), document.len());
        (self.spec.weights, self.spec.documents) = (Some(grid), None);
        Part { first: document.start, ..self }
    }

    /// The heads of its tokens.
    pub(crate) fn of<'h>(&self, heads: &Heads<'h>) -> Heads<'h> {
        heads.starting_at(self.first)
    }

    /// Its rows of a head in `[batch, heads, queries]`.
    pub(crate) fn rows(&self, head: usize) -> Range<usize> {
        let start = (self.batch * self.spec.heads + head) * self.row_queries + self.first;
        start..start + self.spec.queries
    }
}

/// What changes scores besides the product: masks, windows and ALiBi, for one part and head.
pub(crate) struct Mask<'a> {
    pub(crate) spec: &'a AttentionSpec<'a>,
    key_allowed: Option<&'a [u8]>,
    /// `slope · position` per key.
    alibi_s: Option<Vec<f32>>,
    head: usize,
    batch: usize,
}

impl<'a> Mask<'a> {
    pub(crate) fn new(part: &'a Part<'a>, head: usize) -> Mask<'a> {
        let spec = &part.spec;
        let first_key = part.batch * part.row_keys + part.first;
        let own_keys = first_key..first_key + spec.keys;
        let key_allowed = spec.key_mask.map(|mask| &read::<u8>(mask)[own_keys.clone()]);
        let alibi_s = spec.alibi_slopes.map(|slopes| {
            let slope = read::<f32>(slopes)[head];
            match spec.alibi_positions {
                Some(positions) => read::<f32>(positions)[own_keys].iter().map(|p| slope * p).collect(),
                None => (0..spec.keys).map(|key| slope * key as f32).collect(),
            }
        });
        Mask { spec, key_allowed, alibi_s, head, batch: part.batch }
    }

    /// What multiplies the products.
    pub(crate) fn scale(&self) -> f32 {
        self.spec.scale
    }

    pub(crate) fn has_dropout(&self) -> bool {
        self.spec.dropout.is_some()
    }

    /// The keys that any query of `t0..t1` may see.
    pub(crate) fn visible(&self, t0: usize, t1: usize) -> Range<usize> {
        let spec = self.spec;
        let shift = spec.shift();
        let end =
            if spec.causal { (t1 as isize + shift).clamp(0, spec.keys as isize) as usize } else { spec.keys };
        let start = match spec.window {
            Some(window) => (t0 as isize + shift + 1 - window as isize).clamp(0, end as isize) as usize,
            None => 0,
        };
        start..end
    }

    /// Turns raw products into scores; hidden keys become minus infinity.
    #[inline(always)]
    pub(crate) fn apply(&self, score_ts: &mut [f32], t0: usize, s0: usize, width: usize) {
        let spec = self.spec;
        let shift = spec.shift();
        for (t, row) in score_ts.chunks_mut(width).enumerate() {
            if let Some(alibi_s) = &self.alibi_s {
                row.iter_mut().zip(&alibi_s[s0..]).for_each(|(score, bias)| *score += bias);
            }
            if let Some(allowed) = self.key_allowed {
                row.iter_mut().zip(&allowed[s0..]).for_each(|(score, &allowed)| {
                    *score = if allowed != 0 { *score } else { f32::NEG_INFINITY }
                });
            }
            let position = (t0 + t) as isize + shift;
            if spec.causal && (s0 + width) as isize > position + 1 {
                let visible = (position + 1 - s0 as isize).clamp(0, width as isize) as usize;
                row[visible..].fill(f32::NEG_INFINITY);
            }
            if let Some(window) = spec.window {
                let hidden = (position + 1 - window as isize - s0 as isize).clamp(0, width as isize) as usize;
                row[..hidden].fill(f32::NEG_INFINITY);
            }
        }
    }

    /// Multiplies a block by its dropout mask.
    #[inline(always)]
    pub(crate) fn dropout(&self, block_ts: &mut [f32], t0: usize, s0: usize, width: usize) {
        let Some((p, key)) = self.spec.dropout else { return };
        let (threshold, scale) = (drop_threshold(p), 1.0 / (1.0 - p));
        let WeightGrid { whole: [heads, queries, keys], first: [head0, query0, key0] } =
            self.spec.weight_grid();
        let head_row = (self.batch * heads + head0 + self.head) * queries + query0;
        for (t, row) in block_ts.chunks_mut(width).enumerate() {
            let first = ((head_row + t0 + t) * keys + key0 + s0) as u64;
            for (s, value) in row.iter_mut().enumerate() {
                *value = if key.word(first + s as u64) >= threshold { *value * scale } else { 0.0 };
            }
        }
    }
}

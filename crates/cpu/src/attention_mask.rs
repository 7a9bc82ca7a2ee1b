//! What the tasks of attention have in common: which tokens they attend over, in which stretches, and what is hidden there.

use std::ops::Range;

use ferrospeed_tensor::backend::{AttentionSpec, HeadPlaces, Heads, HeadsOut, WeightGrid};
use ferrospeed_tensor::random::drop_threshold;

use crate::math::tanh;
use crate::read;

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

    /// The same of heads that are written.
    pub(crate) fn places(&self, heads: &HeadsOut<'_>) -> HeadPlaces {
        heads.places.starting_at(self.first)
    }

    /// Its rows of a head in `[batch, heads, queries]`.
    pub(crate) fn rows(&self, head: usize) -> Range<usize> {
        let start = (self.batch * self.spec.heads + head) * self.row_queries + self.first;
        start..start + self.spec.queries
    }
}

/// What changes scores besides the product: masks, windows, layouts of blocks, biases and ALiBi, for one part and head.
pub(crate) struct Mask<'a> {
    pub(crate) spec: &'a AttentionSpec<'a>,
    key_allowed: Option<&'a [u8]>,
    /// `slope · position` per key.
    alibi_s: Option<Vec<f32>>,
    key_bias_s: Option<&'a [f32]>,
    /// For all queries.
    bias_ts: Option<&'a [f32]>,
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
                Some(positions) => {
                    read::<f32>(positions)[own_keys.clone()].iter().map(|p| slope * p).collect()
                }
                None => (0..spec.keys).map(|key| slope * key as f32).collect(),
            }
        });
        let key_bias_s = spec.key_bias.map(|bias| &read::<f32>(bias)[own_keys]);
        let scores = spec.queries * spec.keys;
        let bias_ts = spec.score_bias.map(|bias| {
            let first = if bias.numel() == scores { 0 } else { head * scores };
            &read::<f32>(bias)[first..first + scores]
        });
        Mask { spec, key_allowed, alibi_s, key_bias_s, bias_ts, head, batch: part.batch }
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

    /// Calls `visit(first key, number of keys)` for stretches of at most `longest` keys, each from a multiple of `align` on, that
    /// hold every key which some query of `t0..t1` sees. What else lies in them is hidden by [`Mask::apply`].
    pub(crate) fn for_key_blocks(
        &self,
        [t0, t1]: [usize; 2],
        [align, longest]: [usize; 2],
        mut visit: impl FnMut(usize, usize),
    ) {
        let visible = self.visible(t0, t1);
        let mut within = |start: usize, end: usize| {
            for s0 in (start / align * align..end).step_by(longest) {
                visit(s0, longest.min(end - s0));
            }
        };
        let Some(blocks) = self.spec.blocks else { return within(visible.start, visible.end) };
        let mut gathered: Option<Range<usize>> = None;
        for keys in blocks.keys_of(self.head, t0..t1) {
            let keys = keys.start.max(visible.start) / align * align..keys.end.min(visible.end);
            match &mut gathered {
                _ if keys.is_empty() => {}
                Some(before) if keys.start <= before.end => before.end = keys.end,
                _ => {
                    if let Some(before) = gathered.replace(keys) {
                        within(before.start, before.end);
                    }
                }
            }
        }
        if let Some(last) = gathered {
            within(last.start, last.end);
        }
    }

    /// The score that no key has.
    pub(crate) fn sink(&self) -> Option<f32> {
        self.spec.sinks.map(|sinks| read::<f32>(sinks)[self.head])
    }

    /// Bounds products, where scores are capped: what [`Mask::apply`] adds is not.
    #[inline(always)]
    pub(crate) fn cap(&self, score_ts: &mut [f32]) {
        let Some(cap) = self.spec.score_cap else { return };
        score_ts.iter_mut().for_each(|score| *score = cap * tanh(*score / cap));
    }

    /// The same, and how much a score grows with its product; nothing where scores are not capped.
    pub(crate) fn cap_with_slopes(&self, score_ts: &mut [f32], slopes: &mut Vec<f32>) {
        let Some(cap) = self.spec.score_cap else { return };
        self.cap(score_ts);
        slopes.clear();
        slopes.extend(score_ts.iter().map(|score| 1.0 - (score / cap) * (score / cap)));
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
            if let Some(key_bias_s) = self.key_bias_s {
                row.iter_mut().zip(&key_bias_s[s0..]).for_each(|(score, bias)| *score += bias);
            }
            if let Some(bias_ts) = self.bias_ts {
                let bias = &bias_ts[(t0 + t) * spec.keys + s0..];
                row.iter_mut().zip(bias).for_each(|(score, bias)| *score += bias);
            }
            if let Some(blocks) = spec.blocks {
                blocks.hide(self.head, t0 + t, s0, row);
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

//! The gradients of attention in parts, so that the memory they take beside their results is bounded.
//!
//! A graph that gives the same bits every time holds the gradients of all scores that it computes. Where those are more
//! than [`SCORES_BYTES`], the problem is cut: first by sequences and key heads, which are independent, then by tokens. A
//! square of queries and keys then gives parts of the gradients, which are added in f32 in an order that is always the
//! same. Squares that no query sees into are left out.

use std::ops::Range;

use ferrospeed_tensor::{DType, Result};

use super::{Call, Mask, Plans};
use crate::{BLOCK, CudaBackend, Kernel, Scratch, Source, launch, real};

/// What one graph may hold for the gradients of scores. It decides how sums are cut, and so their bits.
const SCORES_BYTES: usize = 2 << 30;
/// Tokens of a part's side where it is cut by tokens: fewer are not worth a graph, and with more there is room for too few
/// heads to keep the device busy.
const FEWEST_TOKENS: usize = 1024;
const MOST_TOKENS: usize = 8192;
const BLOCK_TOKENS: usize = 64;

/// How much of a problem one graph computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    sequences: usize,
    kv_heads: usize,
    tokens: usize,
}

/// The largest parts that stay within [`SCORES_BYTES`] and, where tokens are cut, within `most` tokens.
fn part([batch, heads, kv_heads, queries, keys, _]: [usize; 6], window: Option<usize>, most: usize) -> Part {
    let shared = heads / kv_heads;
    let one = |queries: usize, keys: usize| shared * queries * keys * DType::BF16.size_bytes();
    let mut tokens = queries.max(keys);
    // Most of a square far larger than the window would be computed for nothing.
    let is_band = window.is_some_and(|window| tokens > 4 * window.max(FEWEST_TOKENS));
    if one(queries, keys) > SCORES_BYTES || is_band {
        tokens = FEWEST_TOKENS;
        let fits = |tokens: usize| tokens <= most && one(tokens, tokens) <= SCORES_BYTES;
        while fits(2 * tokens) && window.is_none_or(|window| tokens < window) {
            tokens *= 2;
        }
    }
    let units = (SCORES_BYTES / one(queries.min(tokens), keys.min(tokens)).max(1)).max(1);
    Part { sequences: (units / kv_heads).clamp(1, batch), kv_heads: units.min(kv_heads), tokens }
}

/// `0..total` in parts of `step`, the last perhaps smaller.
fn steps(total: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    (0..total.div_ceil(step)).map(move |i| i * step..((i + 1) * step).min(total))
}

/// `0..total` in parts of at most `largest`.
fn ranges(total: usize, largest: usize) -> impl Iterator<Item = Range<usize>> {
    let count = total.div_ceil(largest);
    let even = total.div_ceil(count);
    // Kernels work on blocks of tokens; the last part is not to be a crumb.
    let blocks = even.next_multiple_of(BLOCK_TOKENS);
    let step = if (count - 1) * blocks + BLOCK_TOKENS <= total { blocks } else { even };
    steps(total, step)
}

/// What the queries of a square see of its keys: the mask and the window, or `None` where they see nothing.
fn view(
    queries: &Range<usize>,
    keys: &Range<usize>,
    causal: bool,
    window: Option<usize>,
) -> Option<(Mask, f32)> {
    if causal && keys.start >= queries.end {
        return None;
    }
    // A key is seen that is later than its query's position less this, both counted from where the square begins.
    let reach = window.map(|window| window as i64 - (queries.start as i64 - keys.start as i64));
    if reach.is_some_and(|reach| keys.len() as i64 - 1 + reach <= 0) {
        return None;
    }
    let windowed = reach.filter(|&reach| reach < queries.len() as i64);
    let mask = Mask { causal: causal && keys.start == queries.start, windowed: windowed.is_some() };
    Some((mask, windowed.unwrap_or(0) as f32))
}

/// Computes the gradients of a call in parts; `false` when the library cannot.
pub(super) fn backward(plans: &mut Plans, backend: &CudaBackend, whole: &Call) -> Result<bool> {
    let [batch, _, kv_heads, queries, keys, _] = whole.key.sizes;
    let window = whole.key.mask.windowed.then_some(whole.window as usize);
    // One version is wrong, by its maker's word, about more keys than this where a window has no causal mask beside it, as
    // on the border of a window.
    let most = match window {
        Some(_) if plans.version() == 91_400 => 1024,
        _ => MOST_TOKENS,
    };
    let part = part(whole.key.sizes, window, most);
    for sequences in steps(batch, part.sequences) {
        for group in steps(kv_heads, part.kv_heads) {
            let call = chosen(whole, &sequences, &group);
            let done = if part.tokens < queries.max(keys) {
                Squares::new(backend, &call, part.tokens)?.run(plans, window)?
            } else {
                plans.run(backend, &call)?
            };
            if !done {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// Which tensors of a backward call are of keys.
const OF_KEYS: [bool; 8] = [false, true, true, false, false, false, true, true];

/// The part of a call for some sequences and key heads, with the query heads that share those.
fn chosen(whole: &Call, sequences: &Range<usize>, group: &Range<usize>) -> Call {
    let [_, heads, kv_heads, queries, keys, dim] = whole.key.sizes;
    let shared = heads / kv_heads;
    let bytes = whole.key.dtype.size_bytes();
    let places = whole.heads.iter().zip(&whole.key.strides).zip(OF_KEYS);
    let addresses = places.map(|((&address, strides), of_keys)| {
        let head = if of_keys { group.start } else { group.start * shared };
        address + ((sequences.start * strides[0] + head * strides[1]) * bytes) as u64
    });
    let rows = (sequences.start * heads + group.start * shared) * queries;
    let mut key = whole.key.clone();
    key.sizes = [sequences.len(), group.len() * shared, group.len(), queries, keys, dim];
    Call { key, heads: addresses.collect(), statistics: whole.statistics + (rows * 4) as u64, ..*whole }
}

/// A call that is computed square by square, and the memory for parts of its gradients and for their sums.
struct Squares<'a> {
    backend: &'a CudaBackend,
    call: &'a Call,
    largest: usize,
    _scratch: Scratch<'a>,
    /// The log-sum-exp of some queries, `[heads, queries]` of all sequences.
    rows: u64,
    /// Parts of the gradients of queries, keys and values, and their sums in f32, each `[heads, tokens, dim]`: of some
    /// queries, of all keys.
    parts: [u64; 3],
    sums: [u64; 3],
}

impl<'a> Squares<'a> {
    fn new(backend: &'a CudaBackend, call: &'a Call, largest: usize) -> Result<Squares<'a>> {
        let [batch, heads, kv_heads, queries, keys, dim] = call.key.sizes;
        let (of_queries, of_keys) =
            (batch * heads * largest.min(queries), batch * kv_heads * largest.min(keys));
        let all_keys = batch * kv_heads * keys;
        let half = call.key.dtype.size_bytes();
        let sizes = [
            of_queries * 4,
            of_queries * dim * half,
            of_keys * dim * half,
            of_keys * dim * half,
            of_queries * dim * 4,
            all_keys * dim * 4,
            all_keys * dim * 4,
        ];
        let scratch = backend.scratch(sizes.iter().map(|bytes| bytes.next_multiple_of(256)).sum())?;
        let mut next = scratch.address();
        let [rows, dq, dk, dv, dq_sum, dk_sum, dv_sum] = sizes.map(|bytes| {
            let place = next;
            next += bytes.next_multiple_of(256) as u64;
            place
        });
        Ok(Squares {
            backend,
            call,
            largest,
            _scratch: scratch,
            rows,
            parts: [dq, dk, dv],
            sums: [dq_sum, dk_sum, dv_sum],
        })
    }

    fn run(&self, plans: &mut Plans, window: Option<usize>) -> Result<bool> {
        let [batch, heads, kv_heads, queries, keys, _] = self.call.key.sizes;
        let mut is_new = vec![true; keys.div_ceil(self.largest)];
        for queries in ranges(queries, self.largest) {
            self.take_rows(&queries)?;
            let mut is_first = true;
            for (keys, is_new) in ranges(keys, self.largest).zip(&mut is_new) {
                let Some((mask, reach)) = view(&queries, &keys, self.call.key.mask.causal, window) else {
                    continue;
                };
                if !plans.run(self.backend, &self.square(&queries, &keys, mask, reach))? {
                    return Ok(false);
                }
                self.add(0, batch * heads, &(0..queries.len()), queries.len(), is_first)?;
                for which in [1, 2] {
                    self.add(which, batch * kv_heads, &keys, self.call.key.sizes[4], *is_new)?;
                }
                (is_first, *is_new) = (false, false);
            }
            self.finish(0, heads, &queries)?;
        }
        self.finish(1, kv_heads, &(0..keys))?;
        self.finish(2, kv_heads, &(0..keys))?;
        Ok(true)
    }

    /// The call for some queries and keys, whose gradients go into the parts.
    fn square(&self, queries: &Range<usize>, keys: &Range<usize>, mask: Mask, reach: f32) -> Call {
        let [batch, heads, kv_heads, _, _, dim] = self.call.key.sizes;
        let bytes = self.call.key.dtype.size_bytes();
        let mut key = self.call.key.clone();
        key.sizes = [batch, heads, kv_heads, queries.len(), keys.len(), dim];
        key.mask = mask;
        let mut addresses = self.call.heads.clone();
        let inputs = addresses.iter_mut().zip(&key.strides).zip(OF_KEYS).take(5);
        for ((address, strides), of_keys) in inputs {
            let first = if of_keys { keys.start } else { queries.start };
            *address += (first * strides[2] * bytes) as u64;
        }
        for which in 0..3 {
            addresses[5 + which] = self.parts[which];
            let (heads, tokens) = if which == 0 { (heads, queries.len()) } else { (kv_heads, keys.len()) };
            key.strides[5 + which] = [heads * tokens * dim, tokens * dim, dim];
        }
        Call { key, heads: addresses, statistics: self.rows, window: reach, ..*self.call }
    }

    fn kernel(&self, name: &'static str) -> Result<Kernel> {
        let real = real("attention", self.call.key.dtype)?;
        Ok(Kernel { source: Source::AttentionTiles, defines: [real, "", ""], name })
    }

    /// Brings the log-sum-exp of some queries together.
    fn take_rows(&self, queries: &Range<usize>) -> Result<()> {
        let [batch, heads, _, all, ..] = self.call.key.sizes;
        let count = batch * heads * queries.len();
        launch!(
            self.backend,
            self.kernel("take_rows")?,
            self.backend.grid_single(count),
            [BLOCK, 1, 1],
            0,
            count as u64,
            queries.len() as u64,
            self.call.statistics + (queries.start * 4) as u64,
            all as u64,
            self.rows
        )
    }

    /// Adds the part of a gradient to its sum, of which `tokens` out of `all` are meant, or begins the sum with it.
    fn add(&self, which: usize, heads: usize, tokens: &Range<usize>, all: usize, begins: bool) -> Result<()> {
        let dim = self.call.key.sizes[5];
        let count = heads * tokens.len() * dim;
        launch!(
            self.backend,
            self.kernel("add_tile")?,
            self.backend.grid(count),
            [BLOCK, 1, 1],
            0,
            (count / 8) as u64,
            (tokens.len() * dim / 8) as u64,
            self.parts[which],
            self.sums[which] + (tokens.start * dim * 4) as u64,
            (all * dim / 8) as u64,
            i32::from(begins)
        )
    }

    /// Writes a sum of which the tokens are these to its gradient.
    fn finish(&self, which: usize, heads: usize, tokens: &Range<usize>) -> Result<()> {
        let [batch, .., dim] = self.call.key.sizes;
        let [batch_stride, head_stride, token_stride] = self.call.key.strides[5 + which];
        let first = tokens.start * token_stride * self.call.key.dtype.size_bytes();
        let count = batch * heads * tokens.len() * dim;
        launch!(
            self.backend,
            self.kernel("write_sum")?,
            self.backend.grid(count),
            [BLOCK, 1, 1],
            0,
            (count / 8) as u64,
            heads as u64,
            tokens.len() as u64,
            (dim / 8) as u64,
            self.sums[which],
            self.call.heads[5 + which] + first as u64,
            batch_stride as u64,
            head_stride as u64,
            token_stride as u64
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_within_the_limit_is_not_cut() {
        let whole = part([8, 32, 4, 2048, 2048, 64], None, MOST_TOKENS);
        assert_eq!(whole, Part { sequences: 8, kv_heads: 4, tokens: 2048 });
    }

    #[test]
    fn sequences_are_cut_before_heads_and_heads_before_tokens() {
        let cut = |sizes, window| part(sizes, window, MOST_TOKENS);
        assert_eq!(cut([16, 32, 4, 2048, 2048, 64], None).sequences, 8);
        assert_eq!(cut([8, 32, 4, 8192, 8192, 64], None), Part { sequences: 1, kv_heads: 2, tokens: 8192 });
        let long = [1, 32, 4, 131_072, 131_072, 64];
        assert_eq!(cut(long, None), Part { sequences: 1, kv_heads: 2, tokens: 8192 });
        assert_eq!(cut(long, Some(4096)), Part { sequences: 1, kv_heads: 4, tokens: 4096 });
        assert_eq!(part(long, Some(4096), 1024).tokens, 1024);
        // It would fit, and is a narrow band.
        assert_eq!(cut([1, 32, 32, 32_768, 32_768, 64], Some(4096)).tokens, 4096);
    }

    #[test]
    fn no_part_takes_more_than_the_limit_but_the_smallest() {
        for (heads, kv_heads, tokens) in [(32, 4, 40_000), (71, 1, 9_001), (12, 12, 33_333), (64, 8, 524_288)]
        {
            let part = part([3, heads, kv_heads, tokens, tokens, 64], None, MOST_TOKENS);
            let side = part.tokens.min(tokens);
            let bytes = part.sequences * part.kv_heads * (heads / kv_heads) * side * side * 2;
            assert!(bytes <= SCORES_BYTES || part.tokens == FEWEST_TOKENS, "{part:?}");
        }
    }

    #[test]
    fn ranges_cover_all_and_leave_no_crumb() {
        for total in [1024, 1025, 4097, 8193, 130_049, 131_072, 131_100] {
            for largest in [1024, 4096, 8192] {
                let parts: Vec<_> = ranges(total, largest).collect();
                assert_eq!(parts.iter().map(Range::len).sum::<usize>(), total);
                assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start));
                assert!(
                    parts.iter().all(|part| (BLOCK_TOKENS..=largest).contains(&part.len())),
                    "{total} {largest}"
                );
            }
        }
    }

    #[test]
    fn squares_see_what_the_whole_sees() {
        let total = 37;
        for (causal, window) in
            [(false, None), (true, None), (true, Some(5)), (true, Some(16)), (true, Some(30))]
        {
            for queries in steps(total, 8) {
                for keys in steps(total, 8) {
                    let view = view(&queries, &keys, causal, window);
                    for (row, q) in queries.clone().enumerate() {
                        for (column, k) in keys.clone().enumerate() {
                            let wanted = (!causal || k <= q) && window.is_none_or(|w| k + w > q);
                            let seen = view.is_some_and(|(mask, reach)| {
                                (!mask.causal || column <= row)
                                    && (!mask.windowed || column as f32 + reach > row as f32)
                            });
                            assert_eq!(seen, wanted, "query {q}, key {k}, window {window:?}");
                        }
                    }
                }
            }
        }
    }
}

//! Attention whose scores no kernel of the device knows, composed of products: capped scores, and sinks beside them.
//!
//! It holds the scores of all queries and keys, where kernels hold a block of them. A device that knows such scores
//! ([`shapes_scores`](ferrospeed_tensor::backend::Attention::shapes_scores)) never comes here.
//!
//! Legend: b sequences, h heads, t queries, s keys, d channels.

use ferrospeed_tensor::ops::{self, AttentionOptions};
use ferrospeed_tensor::{DType, Device, Documents, Pages, Result, Tensor, TensorError};

/// What a hidden score is: no infinity, which would leave nothing of a row that sees no key.
const HIDDEN: f32 = -1e30;

/// Attention of `q [b, t, h, d]`, the last tokens of `k` and `v [b, s, key heads, d]`; the result is q's shape.
pub(super) fn attention([q, k, v]: [&Tensor; 3], options: &AttentionOptions) -> Result<Tensor> {
    let (&[batch, queries, heads, dim], &[_, keys, kv_heads, _]) = (q.sizes(), k.sizes()) else {
        return Err(TensorError::shape("attention", "queries", *q.shape(), "[batch, tokens, heads, dim]"));
    };
    let by_key_head = [batch, kv_heads, heads / kv_heads * queries, dim];
    let q_bhtd = ops::reshape(&ops::permute(q, &[0, 2, 1, 3])?, by_key_head)?;
    let products = ops::matmul(&q_bhtd, &ops::permute(k, &[0, 2, 3, 1])?)?;
    let wide = ops::cast(&ops::reshape(&products, [batch, heads, queries, keys])?, DType::F32)?;
    let scale = options.scale.unwrap_or_else(|| 1.0 / (dim as f32).sqrt());
    let mut scores = match options.score_cap {
        Some(cap) => ops::affine(&ops::tanh(&ops::affine(&wide, scale / cap, 0.0)?)?, cap, 0.0)?,
        None => ops::affine(&wide, scale, 0.0)?,
    };
    let hidden = Tensor::full([], HIDDEN, DType::F32, q.device())?;
    scores = ops::select(&visible([queries, keys], options, q.device())?, &scores, &hidden)?;
    if let Some(mask) = &options.key_mask {
        scores = ops::select(&mask.view([batch, 1, 1, keys])?, &scores, &hidden)?;
    }
    let weights = match &options.sinks {
        Some(sinks) => {
            let sinks = ops::reshape(&ops::cast(sinks.clone(), DType::F32)?, [1, heads, 1, 1])?;
            let rows = Tensor::zeros([batch, heads, queries, 1], DType::F32, q.device())?;
            let beside = ops::concat(&[scores, ops::add(&rows, &sinks)?], 3)?;
            ops::narrow(&ops::softmax(&beside)?, 3, 0, keys)?
        }
        None => ops::softmax(&scores)?,
    };
    let weights = ops::cast(&weights, q.dtype())?;
    let weights = if options.dropout > 0.0 { ops::dropout(&weights, options.dropout)? } else { weights };
    let weights = ops::reshape(&weights, [batch, kv_heads, heads / kv_heads * queries, keys])?;
    let mixed = ops::matmul(&weights, &ops::permute(v, &[0, 2, 1, 3])?)?;
    ops::permute(&ops::reshape(&mixed, [batch, heads, queries, dim])?, &[0, 2, 1, 3])
}

/// `[1 or b, 1, t, s]`: who sees whom by causality, windows and documents.
fn visible([queries, keys]: [usize; 2], options: &AttentionOptions, device: &Device) -> Result<Tensor> {
    let shift = keys - queries;
    let sees = |query: usize, key: usize| {
        let place = query + shift;
        (!options.causal || key <= place) && options.window.is_none_or(|window| key + window > place)
    };
    let documents = options.documents.as_ref().map(documents_of);
    let rows = documents.as_ref().map_or(1, Vec::len);
    let mut all = Vec::with_capacity(rows * queries * keys);
    for row in 0..rows {
        let apart = documents.as_ref().map(|documents| &documents[row]);
        for query in 0..queries {
            let together = |key: usize| apart.is_none_or(|of| of[query + shift] == of[key]);
            all.extend((0..keys).map(|key| u8::from(sees(query, key) && together(key))));
        }
    }
    Tensor::from_slice(&all, [rows, 1, queries, keys], device)
}

/// The document of every token of every row.
fn documents_of(documents: &Documents) -> Vec<Vec<usize>> {
    let of_row = |row| {
        let numbered = documents.of_row(row).enumerate();
        numbered.flat_map(|(number, tokens)| std::iter::repeat_n(number, tokens.len())).collect()
    };
    (0..documents.rows()).map(of_row).collect()
}

/// Appends the keys and values of the rows of `pages` to caches in blocks, and attends over those, one sequence after the other.
pub(super) fn paged(
    [q, k, v]: [&Tensor; 3],
    [keys, values]: [&mut Tensor; 2],
    pages: &Pages,
    options: &AttentionOptions,
) -> Result<Tensor> {
    pages.rows.append([k, v], [keys.out()?, values.out()?])?;
    let (tokens, kv_heads, dim) = (keys.sizes()[1], keys.sizes()[2], keys.sizes()[3]);
    let (mut parts, mut row) = (Vec::new(), 0);
    for one in &pages.rows.sequences {
        let known = one.first + one.count;
        let blocks: Vec<i64> =
            one.blocks[..known.div_ceil(tokens)].iter().map(|&block| i64::from(block)).collect();
        let blocks = Tensor::from_slice(&blocks, [blocks.len()], q.device())?;
        let together = |cache: &Tensor| -> Result<Tensor> {
            let all = ops::index_select(cache, 0, &blocks)?;
            let all = ops::reshape(&all, [1, blocks.numel() * tokens, kv_heads, dim])?;
            ops::narrow(&all, 1, 0, known)
        };
        let own = ops::narrow(q, 1, row, one.count)?;
        parts.push(attention([&own, &together(keys)?, &together(values)?], options)?);
        row += one.count;
    }
    ops::concat(&parts, 1)
}

#[cfg(test)]
mod tests {
    use ferrospeed_tensor::store::{ParamSource, PlainStore};
    use ferrospeed_tensor::{Initializer, Operand, Param, autograd};
    use ferrospeed_testkit::close::assert_close;

    use super::*;

    /// Numbers that are no two alike.
    struct Drawn;

    impl ParamSource for Drawn {
        fn load(&self, param: &Param, range: std::ops::Range<usize>, out: &mut [f32]) -> Result<()> {
            let seed = param.name().len() as f32;
            for (out, place) in out.iter_mut().zip(range) {
                *out = ((place as f32 * 12.9898 + seed) * 7.233).sin();
            }
            Ok(())
        }
    }

    /// The result and the gradients of queries, keys, values and sinks.
    fn run(attend: impl Fn([&Tensor; 3], &Operand) -> Result<Tensor>, device: &Device) -> Vec<Vec<f32>> {
        let of = |name: &str, shape: &[usize]| Param::new(name, shape, Initializer::Constant(0.0));
        let params =
            [of("q", &[2, 70, 4, 6]), of("kk", &[2, 70, 2, 6]), of("vvv", &[2, 70, 2, 6]), of("sink", &[4])];
        let store = PlainStore::attach(&params, DType::F32, device, &Drawn).unwrap();
        let [q, k, v] = [0, 1, 2].map(|index: usize| {
            let param = &params[index];
            ops::reshape(param, param.shape().sizes()).unwrap()
        });
        let out = attend([&q, &k, &v], &Operand::from(&params[3])).unwrap();
        let weights: Vec<f32> = (0..out.numel()).map(|place| (place as f32 * 0.37).cos()).collect();
        let weights = Tensor::from_slice(&weights, *out.shape(), device).unwrap();
        autograd::backward(&ops::sum(ops::mul(&out, &weights).unwrap()).unwrap()).unwrap();
        let gradients =
            store.take_gradients().into_iter().map(|gradient| gradient.unwrap().to_vec_f32().unwrap());
        std::iter::once(out.to_vec_f32().unwrap()).chain(gradients).collect()
    }

    #[test]
    fn kernels_give_what_products_give() {
        let device = ferrospeed_cpu::with_threads(1);
        let mut mask = vec![1u8; 140];
        mask[70..75].fill(0);
        let mask = Tensor::from_slice(&mask, [2, 70], &device).unwrap();
        for (cap, window, key_mask) in
            [(None, None, None), (Some(1.5), Some(9), None), (Some(0.7), None, Some(mask))]
        {
            let options = |sinks: &Operand| AttentionOptions {
                scale: Some(0.9),
                causal: true,
                window,
                key_mask: key_mask.clone(),
                score_cap: cap,
                sinks: Some(sinks.clone()),
                ..Default::default()
            };
            let kernels = run(|[q, k, v], sinks| ops::attention(q, k, v, &options(sinks)), &device);
            let products = run(|qkv, sinks| attention(qkv, &options(sinks)), &device);
            for (what, (own, other)) in
                ["out", "q", "k", "v", "sinks"].iter().zip(kernels.iter().zip(&products))
            {
                assert_close(what, own, other, 2e-5, 1e-4);
            }
        }
    }
}

//! How long attention over a sliding window of blocks takes, forward and backward, beside attention over all earlier tokens.
//!
//! `cargo run --release -p ferrospeed-tensor --example block_sparse_speed [TOKENS]...`

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use ferrospeed_tensor::ops::{self, AttentionOptions};
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_tensor::{BlockLayout, DType, Device, Result, Tensor, autograd};

const HEADS: usize = 8;
const DIM: usize = 64;
const ROUNDS: usize = 5;

fn random(tokens: usize, stream: u32, dtype: DType, device: &Device) -> Result<Tensor> {
    let mut values = vec![0.0f32; tokens * HEADS * DIM];
    RandomKey::new(1, stream).fill_normal(0, &mut values);
    ops::cast(&Tensor::from_slice(&values, [1, tokens, HEADS, DIM], device)?, dtype)
}

/// A block sees itself and the one before.
fn window(block: usize, tokens: usize) -> BlockLayout {
    let block = NonZeroUsize::new(block).unwrap_or(NonZeroUsize::MIN);
    BlockLayout::new(block, tokens.div_ceil(block.get()), 1, |_, row, columns| {
        columns[row.saturating_sub(1)..=row].fill(true);
    })
}

/// The shortest of some rounds, forward and with backward behind it.
fn time(tokens: usize, dtype: DType, blocks: Option<BlockLayout>) -> Result<[Duration; 2]> {
    let device = ferrospeed_cpu::device();
    let [q, k, v, dout] = [
        random(tokens, 1, dtype, &device)?,
        random(tokens, 2, dtype, &device)?,
        random(tokens, 3, dtype, &device)?,
        random(tokens, 4, dtype, &device)?,
    ];
    let options = AttentionOptions { causal: true, blocks, ..Default::default() };
    let mut best = [Duration::MAX; 2];
    for _ in 0..ROUNDS {
        let inputs = [&q, &k, &v].map(|x| x.detach().tracked());
        let begin = Instant::now();
        let out = ops::attention(&inputs[0], &inputs[1], &inputs[2], &options)?;
        best[0] = best[0].min(begin.elapsed());
        autograd::backward_with(&[(out, dout.clone())])?;
        best[1] = best[1].min(begin.elapsed());
    }
    Ok(best)
}

fn main() -> Result<()> {
    let mut lengths: Vec<usize> = std::env::args().skip(1).filter_map(|word| word.parse().ok()).collect();
    if lengths.is_empty() {
        lengths = vec![2048, 8192];
    }
    println!("{HEADS} heads of {DIM} channels, causal; milliseconds forward, and with backward");
    for dtype in [DType::F32, DType::BF16] {
        for &tokens in &lengths {
            let dense = time(tokens, dtype, None)?;
            println!("{dtype} {tokens} tokens, all: {:.1?} {:.1?}", dense[0], dense[1]);
            for block in [16, 64, 128] {
                let layout = window(block, tokens);
                let share = layout.share(tokens);
                let sparse = time(tokens, dtype, Some(layout))?;
                let faster = [0, 1].map(|at| dense[at].as_secs_f64() / sparse[at].as_secs_f64());
                println!(
                    "{dtype} {tokens} tokens, two blocks of {block}: {:.1?} {:.1?}, {:.1} and {:.1} times as fast; {:.2} % of all pairs",
                    sparse[0],
                    sparse[1],
                    faster[0],
                    faster[1],
                    100.0 * share
                );
            }
        }
    }
    Ok(())
}

//! Interleaved 1F1B: chunk `c` lies on stage `c mod p`, so a micro-batch goes round all stages several times.
//!
//! Micro-batches pass in groups of as many as there are stages: a group goes through a stage's first chunk, then through
//! its second, and so on. The bubble is that of 1F1B over the number of chunks per stage.

use super::{Instruction, Item, Kind, Schedule};

/// `micro_batches` must be a multiple of `stages`.
pub(super) fn interleaved(stages: usize, chunks: usize, micro_batches: usize) -> Schedule {
    let total = chunks * micro_batches;
    // The n-th turn of a stage, counted in its own chunks.
    let turn = |n: usize, stage: usize, backward: bool| {
        let own = n / stages % chunks;
        let own = if backward { chunks - 1 - own } else { own };
        Item { chunk: own * stages + stage, micro: n / (stages * chunks) * stages + n % stages }
    };
    let order = |stage: usize| {
        let warm_up = (2 * (stages - stage - 1) + (chunks - 1) * stages).min(total);
        let forward = |n| Instruction::Forward(turn(n, stage, false));
        let backward = |n| Instruction::Backward(turn(n, stage, true));
        let mut order: Vec<Instruction> = (0..warm_up).map(forward).collect();
        (warm_up..total).for_each(|n| order.extend([forward(n), backward(n - warm_up)]));
        order.extend((total - warm_up..total).map(backward));
        order
    };
    let kind = Kind::Interleaved { chunks: chunks.try_into().unwrap_or(std::num::NonZeroUsize::MIN) };
    Schedule::from_compute(kind, micro_batches, kind.placement(stages), (0..stages).map(order).collect())
}

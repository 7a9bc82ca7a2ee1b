//! The wire carries what the manual says: see "What crosses the wire" in docs/tensor-parallel.md.

use std::collections::BTreeMap;

use crate::{batch, configuration, families, on_ranks, start};

/// Channels, blocks and tokens of a micro-batch of the models of these tests.
const WIDTH: usize = 16;
const BLOCKS: usize = 2;
const TOKENS: usize = 28;

#[test]
fn ranks_exchange_as_many_bytes_as_the_manual_says() {
    for (index, recompute) in [(0, false), (1, false), (1, true)] {
        for slices in [2, 4] {
            let model = families().swap_remove(index);
            let counted = on_ranks(slices, move |world| {
                let log = world.clone();
                let (mut engine, mut decoder) = start(world, &model, &configuration(0, 1), slices);
                if let crate::Model::Decoder(decoder) = &mut decoder {
                    decoder.set_activation_checkpointing(recompute);
                }
                let ids = batch(&engine, 0);
                log.log().start();
                let loss = engine.forward(|mode| decoder.loss(&ids, mode)).unwrap();
                // A store of one data rank reduces nothing but what several ranks of the tensor group share.
                engine.backward(&loss).unwrap();
                log.log().stop();
                let mut bytes: BTreeMap<(&str, usize), u64> = BTreeMap::new();
                for row in log.log().summary() {
                    *bytes.entry((row.operation, row.bytes)).or_default() += row.count;
                }
                bytes
            });
            let stream = TOKENS * WIDTH * 4;
            // Forward: the embedding, and each half of each block; backward: each half, and the head.
            let again = if recompute { 2 * BLOCKS } else { 0 };
            let sums = 1 + 2 * BLOCKS + again + 2 * BLOCKS + 1;
            for (rank, counted) in counted.iter().enumerate() {
                let what = format!(
                    "model {index}, {slices} slices, recompute {recompute}, rank {rank}: {counted:?}"
                );
                assert_eq!(counted.get(&("all_reduce", stream)), Some(&(sums as u64)), "{what}");
                // Two f32 numbers for each row of logits.
                assert_eq!(counted.get(&("all_gather", TOKENS * 2 * 4)), Some(&1), "{what}");
                // And nothing else, but for gradients of key-value heads that ranks share.
                assert!(counted.len() == 2 || slices == 4 && index == 1, "{what}");
            }
        }
    }
}

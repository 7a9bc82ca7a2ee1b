//! The wire carries what the manual says: see "What crosses the wire" in docs/tensor-parallel.md.

use std::collections::BTreeMap;

use ferrospeed_tensor::Category;
use serde_json::json;

use super::{Model, batch, configuration, families, on_ranks, start};

/// Channels, blocks and tokens of a micro-batch of the models of these tests.
const WIDTH: usize = 16;
const BLOCKS: usize = 2;
const TOKENS: usize = 32;

/// Operations of one forward and backward by kind and bytes, and the most bytes of activations, on each rank.
fn measured(index: usize, slices: usize, recompute: bool, own_tokens: bool) -> Vec<(Counted, usize)> {
    let model = families().swap_remove(index);
    let mut value = configuration(0, 1);
    value["tensor_parallel"] = json!({"sequence_parallel": own_tokens});
    on_ranks(slices, move |world| {
        let counting = world.clone();
        let (mut engine, mut model) = start(world, &model, &value, slices);
        if let Model::Decoder(decoder) = &mut model {
            decoder.set_activation_checkpointing(recompute);
        }
        let ids = batch(&engine, 0);
        engine.device().backend().reset_peak_memory();
        counting.log().start();
        let loss = engine.forward(|mode| model.loss(&ids, mode)).unwrap();
        let activations = engine.device().memory_usage().current(Category::Activations);
        engine.backward(&loss).unwrap();
        counting.log().stop();
        let rows = counting.log().summary();
        (rows.into_iter().map(|row| ((row.operation, row.bytes), row.count)).collect(), activations)
    })
}

/// How often each kind of operation was done with so many bytes.
type Counted = BTreeMap<(String, usize), u64>;

fn of(operation: &str, bytes: usize) -> (String, usize) {
    (operation.to_owned(), bytes)
}

#[test]
fn ranks_exchange_as_many_bytes_as_the_manual_says() {
    let stream = TOKENS * WIDTH * 4;
    // Three f32 numbers for each row of logits.
    let told = of("all_gather", TOKENS * 3 * 4);
    for (index, recompute) in [(0, false), (1, false), (1, true)] {
        for slices in [2, 4] {
            // Key-value heads that ranks share are the second model's, on four ranks.
            let shares = slices == 4 && index == 1;
            // Forward: the embedding, and each half of each block; backward: each half, and the head.
            let again = if recompute { 2 * BLOCKS as u64 } else { 0 };
            let sums = 2 + 4 * BLOCKS as u64;
            for (rank, (counted, _)) in measured(index, slices, recompute, false).iter().enumerate() {
                let what = format!(
                    "model {index}, {slices} slices, recompute {recompute}, rank {rank}: {counted:?}"
                );
                assert_eq!(counted.get(&of("all_reduce", stream)), Some(&(sums + again)), "{what}");
                assert_eq!(counted.get(&told), Some(&1), "{what}");
                assert!(counted.len() == 2 || shares, "{what}");
            }
            // With tokens of their own between layers, each sum is a reduce-scatter and an all-gather of parts.
            for (rank, (counted, _)) in measured(index, slices, recompute, true).iter().enumerate() {
                let what = format!(
                    "model {index}, {slices} slices, recompute {recompute}, rank {rank}: {counted:?}"
                );
                for operation in ["reduce_scatter", "all_gather"] {
                    assert_eq!(counted.get(&of(operation, stream / slices)), Some(&(sums + again)), "{what}");
                }
                assert_eq!(counted.get(&told), Some(&1), "{what}");
                assert_eq!(counted.get(&of("all_reduce", stream)), None, "{what}");
            }
        }
    }
}

#[test]
fn tokens_of_their_own_between_layers_leave_less_to_keep() {
    for slices in [2, 4] {
        let [all, own] = [false, true].map(|own_tokens| measured(1, slices, false, own_tokens)[0].1);
        assert!(own * 10 < all * 9, "{slices} slices keep {own} bytes for backward, not less than {all}");
    }
}

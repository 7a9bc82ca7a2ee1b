//! The order in which ranks see sequences, read from a real stream: one order for any number of ranks, across epochs,
//! and from any position.

use std::sync::Arc;

use ferrospeed_data::{Position, Sampler, Sequences, Split, Synthetic};

const SEQUENCES: u64 = 37;
const BATCH: u64 = 8;

fn sequences() -> Sequences {
    Sequences::split(Arc::new(Synthetic::new(SEQUENCES * 16, 1000, 1)), 16, 0.1).unwrap()
}

/// The sequences of `steps` steps from `position` on, in global order: micro-batch by micro-batch, rank by rank.
fn run(ranks: u64, micro_batches: u64, steps: u64, position: &mut Position) -> Vec<Vec<i64>> {
    let sequences = sequences();
    let sampler = Sampler::new(sequences.count(Split::Train), 42);
    let size = BATCH / ranks / micro_batches;
    let mut seen = Vec::new();
    for _ in 0..steps {
        for (micro, rank) in (0..micro_batches).flat_map(|micro| (0..ranks).map(move |rank| (micro, rank))) {
            for index in sampler.micro_batch(*position, micro, rank, ranks, size) {
                let mut tokens = vec![0; 16];
                sequences.read(Split::Train, index, &mut tokens).unwrap();
                seen.push(tokens);
            }
        }
        position.samples += BATCH;
    }
    seen
}

#[test]
fn one_two_and_four_ranks_see_one_global_order_over_several_epochs() {
    // 15 steps of 8 are more than three epochs of 33.
    let reference = run(1, 1, 15, &mut Position::default());
    for (ranks, micro_batches) in [(1, 2), (2, 1), (2, 2), (4, 1), (4, 2)] {
        assert_eq!(run(ranks, micro_batches, 15, &mut Position::default()), reference, "{ranks} ranks");
    }
    let epoch = sequences().count(Split::Train) as usize;
    let mut first = reference[..epoch].to_vec();
    first.sort();
    first.dedup();
    assert_eq!(first.len(), epoch, "an epoch shows every sequence once");
    assert_ne!(reference[..epoch], reference[epoch..2 * epoch], "each epoch has an order of its own");
}

#[test]
fn a_restored_position_goes_on_as_if_nothing_had_stopped_on_any_number_of_ranks() {
    let whole = run(2, 1, 12, &mut Position::default());
    let mut position = Position::default();
    let before = run(2, 1, 5, &mut position);
    let saved = serde_json::to_string(&position).unwrap();
    for ranks in [1, 2, 4] {
        let mut restored: Position = serde_json::from_str(&saved).unwrap();
        let after = run(ranks, 1, 7, &mut restored);
        assert_eq!([before.clone(), after].concat(), whole, "restored on {ranks} ranks");
    }
}

#[test]
fn a_rank_reads_many_times_faster_than_it_trains() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("text.txt");
    std::fs::write(&file, "some text, as long as a small repository\n".repeat(50_000)).unwrap();
    let source = ferrospeed_data::Source::Text { paths: vec![file], extensions: vec![] };
    let stream = source
        .open(&ferrospeed_data::Codec::Bytes, &folder.path().join("cache"), &mut ferrospeed_data::unheard)
        .unwrap();
    let sequences = Sequences::split(stream, 256, 0.02).unwrap().within(256);
    let sampler = Sampler::new(sequences.count(Split::Train), 1);
    let begin = std::time::Instant::now();
    let mut tokens = vec![0; 256];
    for n in 0..20_000 {
        sequences.read(Split::Train, sampler.sequence(n), &mut tokens).unwrap();
    }
    // Five million tokens, in shuffled order: the quickstart takes minutes for them. It takes well under a second.
    assert!(begin.elapsed() < std::time::Duration::from_secs(20), "{:?}", begin.elapsed());
}

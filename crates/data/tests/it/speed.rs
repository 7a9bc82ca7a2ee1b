//! Data never holds a step up: what a step of the quickstart needs comes in a sliver of the time that a step takes on a
//! machine ten times as fast.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrospeed_data::{
    Codec, Position, Sampler, Sequences, Source, Split, Synthetic, TokenStream, TokenType, unheard,
};

/// The quickstart: sequences of 256 tokens, 6 per rank and step, steps of 235 ms on two cores.
const SEQUENCE: usize = 256;
const MICRO_BATCH: u64 = 6;
const RANKS: u64 = 2;
const STEP_AT_TEN_TIMES_THE_SPEED: Duration = Duration::from_micros(23_500);
const STEPS: u64 = 200;
const TOKENS: u64 = 4_000_000;

/// The time that a rank waits for its micro-batch: the median over steps that jump about in the whole stream.
fn median_wait(stream: Arc<dyn TokenStream>) -> Duration {
    let sequences = Sequences::split(stream, SEQUENCE as u64, 0.02).unwrap().within(1 << 16);
    let sampler = Sampler::new(sequences.count(Split::Train), 42);
    let mut waits = Vec::new();
    for step in 0..STEPS {
        let start = Instant::now();
        let position = Position { samples: step * MICRO_BATCH * RANKS };
        let mut ids = Vec::new();
        for index in sampler.micro_batch(position, 0, 0, RANKS, MICRO_BATCH) {
            let at = ids.len();
            ids.resize(at + SEQUENCE, 0i64);
            sequences.read(Split::Train, index, &mut ids[at..]).unwrap();
        }
        assert_eq!(std::hint::black_box(&ids).len(), MICRO_BATCH as usize * SEQUENCE);
        waits.push(start.elapsed());
    }
    waits.sort();
    waits[waits.len() / 2]
}

fn open(source: &Source, cache: &Path) -> Arc<dyn TokenStream> {
    source.open(&Codec::Bytes, cache, &mut unheard).unwrap()
}

#[test]
fn a_step_at_ten_times_the_quickstarts_speed_does_not_wait_for_data() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text.txt");
    std::fs::write(&text, "some text, a line of it\n".repeat(TOKENS as usize / 24)).unwrap();
    let tokens = folder.path().join("tokens.bin");
    std::fs::write(&tokens, vec![7; 2 * TOKENS as usize]).unwrap();
    let cache = folder.path().join("cache");
    let lines = folder.path().join("lines.jsonl");
    std::fs::write(&lines, "{\"text\": \"some text, a line of it\"}\n".repeat(TOKENS as usize / 24)).unwrap();
    for (what, stream) in [
        ("text", open(&Source::Text { paths: vec![text], extensions: Vec::new() }, &cache)),
        ("JSON lines", open(&Source::JsonLines { paths: vec![lines], field: "text".into() }, &cache)),
        ("token files", open(&Source::Tokens { paths: vec![tokens], kind: TokenType::U16 }, &cache)),
        ("synthetic", Arc::new(Synthetic::new(TOKENS, 50_000, 1)) as Arc<dyn TokenStream>),
    ] {
        let wait = median_wait(stream);
        println!("{what}: a rank waits {wait:?} of a step of {STEP_AT_TEN_TIMES_THE_SPEED:?}");
        assert!(wait * 10 < STEP_AT_TEN_TIMES_THE_SPEED, "{what}: {wait:?}");
    }
}

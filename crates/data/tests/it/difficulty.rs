//! Indexes of difficulty and the order they give: what is measured, when it comes in, and what damaged files are refused with.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferrospeed_data::{
    Admission, Analysis, ByteText, IndexedData, Metric, MetricIndex, MetricSchedule, PoolSampler, Position,
    Scale, Sequences, Split, analyze,
};
use ferrospeed_testkit::property::{Random, seeds};

const LENGTH: usize = 8;

/// Sequences of eight bytes; sequence `n` has `n % 8 + 1` times the letter that is everywhere, and else rare ones, and its
/// documents end with dots.
fn sequences(count: usize) -> Sequences {
    let letter = |sequence: usize, place: usize| match place {
        _ if place <= sequence % 8 => b'a',
        _ => b'b' + (sequence * 7 + place * 3) as u8 % 20,
    };
    let bytes =
        (0..count).flat_map(|sequence| (0..LENGTH).map(move |place| letter(sequence, place))).collect();
    of_bytes(bytes)
}

fn of_bytes(bytes: Vec<u8>) -> Sequences {
    Sequences::split(Arc::new(ByteText::from_bytes(bytes)), LENGTH as u64, 0.0).unwrap()
}

fn analyzed(sequences: &Sequences, metric: Metric, folder: &Path) -> Analysis {
    analyze(sequences, &[metric], folder, &mut |_, _| {}).unwrap().remove(0)
}

fn opened(sequences: &Sequences, files: &[PathBuf; 2]) -> Result<MetricIndex, String> {
    let of = IndexedData::of(sequences).unwrap();
    MetricIndex::open(&files[0], Some(&files[1]), &of).map_err(|error| error.to_string())
}

/// One metric that lets in what is no harder than ten for each step.
fn admission(sequences: &Sequences, files: &[PathBuf; 2], scale: Scale, per_step: u64) -> Admission {
    let index = opened(sequences, files).unwrap();
    let first_step = Box::new(move |difficulty: u64| Some(difficulty.div_ceil(per_step).max(1)));
    Admission::new(&IndexedData::of(sequences).unwrap(), &[MetricSchedule { index, scale, first_step }])
        .unwrap()
}

#[test]
fn the_length_of_the_longest_document_and_the_rarity_of_tokens_are_measured() {
    let folder = tempfile::tempdir().unwrap();
    let text =
        of_bytes(b"aaaaaaa.aaa.aaa.a.a.a.a.aaaaaaaa".to_vec()).by_documents(Some(i64::from(b'.'))).unwrap();
    let found = analyze(&text, &Metric::ALL, folder.path(), &mut |_, _| {}).unwrap();
    let [length, rarity] = &found[..] else { panic!("{found:?}") };
    assert_eq!((length.distinct, length.quantiles), (3, [2, 2, 4, 8, 8]), "8, 4, 2 and 8 tokens");
    // A dot is 7 of 32 tokens, a letter the other 25.
    let cost = |count: f64| -(count / 32.0_f64).ln() * 1000.0;
    let of_dots = |dots: f64| ((dots * cost(7.0) + (8.0 - dots) * cost(25.0)) / 8.0) as u64;
    assert_eq!(rarity.quantiles, [0.0, 0.0, 1.0, 2.0, 4.0].map(of_dots));
    for analysis in &found {
        assert!(opened(&text, &analysis.files).is_ok());
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 4, "and nothing else is left");
    let apart = of_bytes(b"no borders known".to_vec());
    let error = analyze(&apart, &[Metric::SequenceLength], folder.path(), &mut |_, _| {}).unwrap_err();
    assert!(error.to_string().contains("where documents end is not known"), "{error}");
}

#[test]
fn a_sequence_comes_in_when_its_difficulty_is_reached_and_every_one_is_drawn_once_per_pass() {
    let folder = tempfile::tempdir().unwrap();
    let sequences = sequences(100);
    let files = analyzed(&sequences, Metric::VocabularyRarity, folder.path()).files;
    for (scale, per_step) in [(Scale::Value, 700), (Scale::Percentile { last: 100 }, 3)] {
        let admission = admission(&sequences, &files, scale, per_step);
        let mut sampler = PoolSampler::new(admission.clone(), 7);
        let (mut position, mut seen, mut first) = (Position::default(), BTreeMap::new(), BTreeMap::new());
        for step in 1..=60 {
            for sequence in sampler.draw(step, position, 16) {
                *seen.entry(sequence).or_insert(0u64) += 1;
                first.entry(sequence).or_insert(step);
            }
            position.samples += 16;
            assert!(seen.len() as u64 <= admission.pool(step), "{scale:?}: nobody comes before the pool");
        }
        assert_eq!(seen.len(), 100, "{scale:?}: all have come in");
        // Once all are in, passes go on whole.
        let turns: Vec<u64> = (0..5).flat_map(|_| sampler.draw(60, position, 20)).collect();
        let times = |sequence: &u64| turns.iter().filter(|drawn| *drawn == sequence).count();
        assert!(
            (0..100).all(|sequence| times(&sequence) <= 2),
            "{scale:?}: at most once in each of two passes"
        );
    }
}

#[test]
fn no_sequence_is_drawn_again_before_all_that_are_in_were_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let sequences = sequences(64);
    let files = analyzed(&sequences, Metric::VocabularyRarity, folder.path()).files;
    let admission = admission(&sequences, &files, Scale::Percentile { last: 64 }, 4);
    // Four are in at the first step, four more come in with each.
    let mut sampler = PoolSampler::new(admission, 3);
    let (mut drawn, mut passes) = (BTreeMap::new(), 0);
    for step in 1..=40u64 {
        for sequence in sampler.draw(step, Position { samples: (step - 1) * 6 }, 6) {
            let in_pool = 64.min(step * 4) as usize;
            let again = drawn.insert(sequence, step).is_some();
            if again {
                assert!(drawn.len() >= in_pool, "step {step}: {} of {in_pool} were drawn", drawn.len());
                drawn = BTreeMap::from([(sequence, step)]);
                passes += 1;
            }
        }
    }
    assert!(passes > 2, "{passes} passes");
}

#[test]
fn a_saved_pass_goes_on_to_the_same_samples_and_one_of_another_order_begins_anew() {
    let folder = tempfile::tempdir().unwrap();
    let sequences = sequences(50);
    let files = analyzed(&sequences, Metric::VocabularyRarity, folder.path()).files;
    let of = |per_step| admission(&sequences, &files, Scale::Percentile { last: 50 }, per_step);
    let draw = |sampler: &mut PoolSampler, steps: std::ops::Range<u64>| -> Vec<Vec<u64>> {
        steps.map(|step| sampler.draw(step, Position { samples: (step - 1) * 8 }, 8)).collect()
    };
    let whole = draw(&mut PoolSampler::new(of(2), 11), 1..40);
    for stop in [1, 2, 9, 25, 38] {
        let mut before = PoolSampler::new(of(2), 11);
        draw(&mut before, 1..stop + 1);
        let saved = serde_json::to_string(before.pass()).unwrap();
        let mut after = PoolSampler::new(of(2), 11);
        assert!(after.restore(&serde_json::from_str(&saved).unwrap(), stop));
        assert_eq!(draw(&mut after, stop + 1..40), whole[stop as usize..], "after step {stop}");
        for mut other in [PoolSampler::new(of(3), 11), PoolSampler::new(of(2), 12)] {
            assert!(!other.restore(&serde_json::from_str(&saved).unwrap(), stop));
            draw(&mut other, stop + 1..40);
        }
        // More drawn than there are, a stretch that ends before it begins: a checkpoint may say anything.
        let mut hostile: serde_json::Value = serde_json::from_str(&saved).unwrap();
        hostile["number"] = u64::MAX.into();
        let hostile_number = serde_json::from_value(hostile.clone()).unwrap();
        let mut sampler = PoolSampler::new(of(2), 11);
        assert!(sampler.restore(&hostile_number, stop));
        draw(&mut sampler, stop + 1..40);
        for stretches in ["[[5, 6]]", "[[5, 5], [5, 0]]", "[[1000, 0]]", "[[0, 0]]"] {
            hostile["stretches"] = serde_json::from_str(stretches).unwrap();
            assert!(!sampler.restore(&serde_json::from_value(hostile.clone()).unwrap(), stop), "{stretches}");
        }
    }
    assert_ne!(whole, draw(&mut PoolSampler::new(of(2), 12), 1..40), "another seed is another order");
}

#[test]
fn several_metrics_let_in_what_all_of_them_have_reached() {
    let folder = tempfile::tempdir().unwrap();
    let sequences = sequences(40).by_documents(Some(i64::from(b'c'))).unwrap();
    let metrics: Vec<MetricIndex> = analyze(&sequences, &Metric::ALL, folder.path(), &mut |_, _| {})
        .unwrap()
        .iter()
        .map(|found| opened(&sequences, &found.files).unwrap())
        .collect();
    let schedule = |index: &MetricIndex, scale: Scale, first_step: fn(u64) -> u64| MetricSchedule {
        index: index.clone(),
        scale,
        first_step: Box::new(move |difficulty| Some(first_step(difficulty).max(1))),
    };
    let of = IndexedData::of(&sequences).unwrap();
    let both = || {
        let by_length = schedule(&metrics[0], Scale::Value, |length| length.saturating_sub(6));
        vec![by_length, schedule(&metrics[1], Scale::Percentile { last: 40 }, |part| part / 14)]
    };
    let admitted = |schedules: &[MetricSchedule], step: u64| {
        let admission = Admission::new(&of, schedules).unwrap();
        let count = admission.pool(step);
        let drawn = PoolSampler::new(admission, 1).draw(step, Position::default(), count);
        drawn.into_iter().collect::<BTreeSet<u64>>()
    };
    for step in 1..=4 {
        let [by_length, by_rarity] = [0, 1].map(|one| admitted(&[both().swap_remove(one)], step));
        let meeting: BTreeSet<u64> = by_length.intersection(&by_rarity).copied().collect();
        assert_eq!(admitted(&both(), step), meeting, "step {step}");
    }
    let first = [0, 1].map(|one| admitted(&[both().swap_remove(one)], 1).len());
    assert!(admitted(&both(), 1).len() < first[0].min(first[1]), "each keeps some out");
    let never =
        MetricSchedule { index: metrics[0].clone(), scale: Scale::Value, first_step: Box::new(|_| None) };
    let error = Admission::new(&of, &[never]).unwrap_err().to_string();
    assert!(error.contains("none ever is") && error.contains("raise min_difficulty"), "{error}");
    let all = Admission::new(&of, &[]).unwrap();
    assert_eq!((all.pool(1), all.left_out()), (40, 0), "without a metric all are in");
}

#[test]
fn an_index_of_something_else_is_refused_by_what_it_is_of() {
    let folder = tempfile::tempdir().unwrap();
    let sequences = sequences(30);
    let files = analyzed(&sequences, Metric::VocabularyRarity, folder.path()).files;
    let refusal = |other: Sequences| opened(&other, &files).unwrap_err();
    let said = refusal(self::sequences(31));
    assert!(said.contains("vocabularyrarity_index_to_sample.index: is of 30 sequences"), "{said}");
    assert!(said.contains("here there are 31 and 0; make it anew with `ferrospeed data analyze`"), "{said}");
    let mut bytes = vec![b'x'; 30 * LENGTH];
    bytes[5] = b'y';
    let said = refusal(of_bytes(bytes.clone()));
    assert!(said.contains("is of other tokens than these, though as many"), "{said}");
    let longer = Sequences::split(Arc::new(ByteText::from_bytes(bytes)), 10, 0.0).unwrap();
    let said = refusal(longer);
    assert!(said.contains("is of sequences of 8 tokens, and here they have 10"), "{said}");
    let swapped = [files[1].clone(), files[0].clone()];
    let said = opened(&sequences, &swapped).unwrap_err();
    assert!(said.contains("is the index_to_metric, and index_to_sample is wanted here"), "{said}");
    // The twin of another metric.
    let ended = sequences.clone().by_documents(Some(i64::from(b'c'))).unwrap();
    let lengths = analyzed(&ended, Metric::SequenceLength, folder.path()).files;
    let said = opened(&sequences, &[files[0].clone(), lengths[1].clone()]).unwrap_err();
    assert!(said.contains("they are not of one analysis"), "{said}");
    let plain = folder.path().join("plain");
    std::fs::write(&plain, "short").unwrap();
    let said = opened(&sequences, &[plain, files[1].clone()]).unwrap_err();
    assert!(said.contains("does not begin with FSPINDEX"), "{said}");
    std::fs::write(folder.path().join("theirs.idx"), "x").unwrap();
    let said = opened(&sequences, &[folder.path().join("theirs"), files[1].clone()]).unwrap_err();
    assert!(said.contains("is an index of DeepSpeed"), "{said}");
}

#[test]
fn damaged_indexes_are_errors_and_never_others() {
    let folder = tempfile::tempdir().unwrap();
    let sequences = sequences(40);
    let files = analyzed(&sequences, Metric::VocabularyRarity, folder.path()).files;
    let whole = opened(&sequences, &files).unwrap();
    let good = files.clone().map(|file| std::fs::read(file).unwrap());
    for seed in seeds(400) {
        let mut random = Random(seed);
        let which = random.below(2);
        let mut bytes = good[which].clone();
        random.damage(&mut bytes);
        std::fs::write(&files[which], &bytes).unwrap();
        if let Ok(read) = opened(&sequences, &files) {
            assert!(bytes == good[which] && read == whole, "seed {seed}: damage was read");
        }
        std::fs::write(&files[which], &good[which]).unwrap();
    }
}

/// Whoever makes a file may make its checksum too.
#[test]
fn content_that_makes_no_sense_is_refused_though_its_checksum_is_right() {
    let folder = tempfile::tempdir().unwrap();
    let sequences = sequences(10);
    let files = analyzed(&sequences, Metric::VocabularyRarity, folder.path()).files;
    let forge = |which: usize, change: &dyn Fn(&mut Vec<u8>)| {
        let good = std::fs::read(&files[which]).unwrap();
        let mut bytes = good[..good.len() - 4].to_vec();
        change(&mut bytes);
        let sum = crc32fast::hash(&bytes);
        bytes.extend(sum.to_le_bytes());
        std::fs::write(&files[which], bytes).unwrap();
        let said = opened(&sequences, &files).unwrap_err();
        std::fs::write(&files[which], good).unwrap();
        said
    };
    let last = |bytes: &mut Vec<u8>, with: &[u8]| {
        let at = bytes.len() - with.len();
        bytes[at..].copy_from_slice(with);
    };
    let twice = forge(0, &|bytes| {
        let at = bytes.len() - 8;
        let other: Vec<u8> = bytes[at..at + 4].to_vec();
        last(bytes, &other);
    });
    assert!(twice.contains("record 9: names sequence"), "{twice}");
    let beyond = forge(0, &|bytes| last(bytes, &u32::MAX.to_le_bytes()));
    assert!(beyond.contains("record 9: names sequence 4294967295"), "{beyond}");
    let falls = forge(1, &|bytes| last(bytes, &[0; 16]));
    assert!(falls.contains("its difficulties do not rise"), "{falls}");
    let header = forge(0, &|bytes| bytes[12..16].copy_from_slice(&u32::MAX.to_le_bytes()));
    assert!(header.contains("its header alone has 4294967295"), "{header}");
    let version = forge(1, &|bytes| bytes[8] = 9);
    assert!(version.contains("version 9, and only version 1 is known"), "{version}");
    let short = forge(0, &|bytes| bytes.truncate(bytes.len() - 4));
    assert!(short.contains("is not what 10 sequences make"), "{short}");
    // Left as they were, they are read.
    assert!(opened(&sequences, &files).is_ok());
    assert_eq!(IndexedData::of(&sequences).unwrap().samples(), sequences.count(Split::Train));
}

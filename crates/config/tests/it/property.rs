//! The reader on arbitrary input: it never panics, never hangs, and bounds what it keeps.
//!
//! The generator is deterministic; a failure prints the seed of its input.

use std::time::{Duration, Instant};

use ferrospeed_config::{AutoValues, Config, ConfigError, MAX_BYTES};
use ferrospeed_testkit::property::{Random, seeds};

const PIECES: &[&str] = &[
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    "\"",
    "'",
    "'''",
    "\\",
    "\\u",
    "\\ud800",
    "\n",
    " ",
    "#",
    "//",
    "/*",
    "*/",
    "-",
    "0",
    "1e999",
    "5e8",
    "1.5",
    "-1",
    "true",
    "false",
    "null",
    "auto",
    "\"auto\"",
    "\u{feff}",
    "é",
    "\u{10ffff}",
    "\0",
    "_note",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "zero_optimization",
    "stage",
    "offload_optimizer",
    "device",
    "nvme",
    "optimizer",
    "type",
    "Adam",
    "params",
    "lr",
    "betas",
    "scheduler",
    "WarmupDecayLR",
    "fp16",
    "enabled",
    "elasticity",
    "micro_batch_sizes",
    "max_train_batch_size",
    "9223372036854775807",
    "compression_training",
    "different_groups",
    "cpu_offload",
    "bfloat16",
    "sparse_attention",
    "mode",
    "allgather_size",
    "pipeline",
    "stages",
];

fn try_everything(text: &str) {
    for ranks in [1, 3] {
        let ranks = ranks.try_into().expect("a positive number of ranks");
        match Config::from_str("property", text)
            .and_then(|unresolved| unresolved.resolve(ranks, &AutoValues::new()))
        {
            Ok((config, _)) => {
                let written =
                    Config::from_value("written", &config.to_json()).expect("our own text is readable");
                let (again, _) =
                    written.resolve(ranks, &AutoValues::new()).expect("a resolved configuration is valid");
                assert_eq!(config.canonical_hash(), again.canonical_hash());
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
    let _ = Config::from_base64(text);
}

#[test]
fn any_sequence_of_pieces_is_read_or_refused() {
    for seed in seeds(3000) {
        let mut random = Random(seed);
        let length = random.below(60);
        let text: String = (0..length).map(|_| random.pick(PIECES)).collect();
        let caught = std::panic::catch_unwind(|| try_everything(&text));
        assert!(caught.is_ok(), "seed {seed}: {text:?}");
    }
}

#[test]
fn any_damage_to_a_valid_file_is_read_or_refused() {
    let valid = r#"{ "train_batch_size": 8, # comment
      "optimizer": { "type": "Adam", "params": { "lr": 1e-3, "betas": [0.9, 0.999] } },
      "elasticity": { "enabled": false, "micro_batch_sizes": [2, 4] },
      "zero_optimization": { "stage": 3, "offload_param": { "device": "nvme", "nvme_path": "/x" }, },
      "compression_training": { "row_pruning": { "different_groups": { "a": { "params": { "dense_ratio": 0.5 } } } } } }"#;
    let characters: Vec<char> = valid.chars().collect();
    for seed in seeds(3000) {
        let mut random = Random(seed);
        let mut damaged = characters.clone();
        for _ in 0..=random.below(4) {
            let at = random.below(damaged.len().max(1)).min(damaged.len().saturating_sub(1));
            match random.below(3) {
                0 if !damaged.is_empty() => drop(damaged.remove(at)),
                1 => damaged.insert(at, random.pick(PIECES).chars().next().unwrap_or(' ')),
                _ => damaged.truncate(at.max(1)),
            }
        }
        let text: String = damaged.into_iter().collect();
        let caught = std::panic::catch_unwind(|| try_everything(&text));
        assert!(caught.is_ok(), "seed {seed}: {text:?}");
    }
}

/// Inputs that make a careless reader quadratic, recursive or greedy. Each is refused or read within the limit, which is
/// generous: on an idle machine each takes a fraction of a second.
#[test]
fn hostile_shapes_stay_cheap() {
    let size = MAX_BYTES as usize / 4;
    let hostile = [
        "[".repeat(size),
        "{a:".repeat(size / 3),
        format!("{{\"a\": [{}", "1,".repeat(size / 2)),
        format!("{{\"{}\": {{{}}}}}", "k".repeat(size / 2), "a:1,".repeat(size / 8)),
        format!("{{{}}}", "\"train_batch_size\": 1,".repeat(size / 22)),
        (0..size / 16).map(|index| format!("key{index}: 1\n")).collect(),
        format!("{{\"x\": [{}]}}", "'''a'''".repeat(size / 7)),
        format!("{{\"zero_optimization\": {{\"stage\": {}}}}}", "9".repeat(size)),
        "/*".repeat(size / 2),
        format!(
            "{{\"elasticity\": {{\"enabled\": true, \"max_train_batch_size\": 4294967296, \"version\": 0.1, \"micro_batch_sizes\": [{}]}}}}",
            "1,".repeat(64)
        ),
        format!(
            "{{\"elasticity\": {{\"enabled\": true, \"max_train_batch_size\": 4294967296, \"version\": 0.1, \"micro_batch_sizes\": [{}]}}}}",
            "3,".repeat(100_000)
        ),
    ];
    for text in &hostile {
        let start = Instant::now();
        try_everything(text);
        assert!(start.elapsed() < Duration::from_secs(20), "{}…", &text[..60]);
    }
}

#[test]
fn a_file_beyond_the_limit_is_not_read() {
    let text = " ".repeat(MAX_BYTES as usize + 1);
    assert!(matches!(Config::from_str("big", &text), Err(ConfigError::TooLarge { .. })));
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.as_file().set_len(1 << 40).expect("a file of holes");
    assert!(matches!(Config::from_path(file.path()), Err(ConfigError::TooLarge { .. })));
    assert!(matches!(Config::from_path("/dev/zero"), Err(ConfigError::Unreadable { .. })));
}

#[test]
fn a_file_that_is_no_text_is_refused_with_its_place() {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), b"{ \xff }").expect("written");
    assert!(matches!(Config::from_path(file.path()), Err(ConfigError::NotUtf8 { offset: 2, .. })));
    assert!(matches!(Config::from_path("/no/such/file"), Err(ConfigError::Unreadable { .. })));
}

#[test]
fn a_file_of_two_hundred_lines_is_checked_quickly() {
    let notes: String = (0..190).map(|index| format!("  \"_note{index}\": \"text\",\n")).collect();
    let text = format!(
        "{{\n{notes}  \"train_batch_size\": 8,\n  \"zero_optimization\": {{\n    \"stage\": 2\n  }}\n}}\n"
    );
    let start = Instant::now();
    let report = Config::from_str("long", &text).expect("readable").report();
    assert!(report.all().is_empty(), "{report}");
    assert!(start.elapsed() < Duration::from_millis(500));
}

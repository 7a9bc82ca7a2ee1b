//! `ferrospeed profile` on small models.

use super::support;
use std::path::PathBuf;

use super::support::{ferrospeed, stderr, stdout};

fn config(text: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), text).unwrap();
    let path = folder.path().to_owned();
    (folder, path)
}

const GPT2: &str =
    r#"{"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 16, "vocab_size": 50}"#;

#[test]
fn a_model_is_reported_as_deepspeed_does() {
    let (_folder, path) = config(GPT2);
    let output = ferrospeed(&[
        "profile",
        path.to_str().unwrap(),
        "--batch",
        "3",
        "--sequence",
        "10",
        "--detailed",
        "--top",
        "2",
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    // 2 layers of 30 tokens: 12·32² weights, 2·10·32 between tokens; and the head.
    let macs = 2 * 30 * (12 * 32 * 32 + 2 * 10 * 32) + 30 * 32 * 50;
    let line = format!("fwd MACs per GPU: {:>54}{:.2} KMACs", "", f64::from(macs) / 1e3);
    for wanted in [
        line.as_str(),
        "-------------------------- DeepSpeed Flops Profiler --------------------------",
        "Decoder(",
        "  (transformer): Module(",
        "    (h): ModuleList(",
        "      (0): Block(",
        "        (attn): MultiHeadAttention(",
    ] {
        assert!(text.lines().any(|found| found == wanted), "{wanted:?} in {text}");
    }
    // The head is tied to the embedding: both show the table, the model has it once.
    let params = 50 * 32 + 16 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32;
    let line = format!("params per GPU: {:>56}{:.2} K ", "", f64::from(params) / 1e3);
    assert!(text.lines().any(|found| found == line), "{line:?} in {text}");
    assert!(text.contains("  (lm_head): Linear(1.6 K = "), "{text}");
}

#[test]
fn backward_and_what_it_recomputes_are_said_apart() {
    let (_folder, path) = config(GPT2);
    let place = path.join("config.json");
    let report = path.join("reports/profile.txt");
    let arguments =
        ["profile", place.to_str().unwrap(), "--backward", "--activation-checkpointing", "--output"];
    let output = ferrospeed(&[&arguments[..], &[report.to_str().unwrap()]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = std::fs::read_to_string(&report).unwrap();
    let macs = |pass: &str| -> f64 {
        let line =
            text.lines().find(|line| line.starts_with(pass)).unwrap_or_else(|| panic!("{pass}: {text}"));
        let fields: Vec<&str> = line.split_whitespace().collect();
        let at = fields.iter().position(|field| field.ends_with("MACs")).unwrap();
        let unit = if fields[at].starts_with('M') && fields[at] != "MACs" { 1e6 } else { 1e3 };
        fields[at - 1].parse::<f64>().unwrap() * unit
    };
    let (forward, backward) = (macs("forward"), macs("backward"));
    assert!((backward / forward - 2.0).abs() < 0.02, "{text}");
    assert!(macs("recomputation") > 0.9 * forward, "{text}");
}

#[test]
fn what_cannot_be_profiled_is_refused() {
    let (_folder, path) = config(r#"{"model_type": "bert"}"#);
    let output = ferrospeed(&["profile", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("causal language models"), "{}", stderr(&output));
    let (_folder, path) = config(GPT2);
    let output = ferrospeed(&["profile", path.to_str().unwrap(), "--sequence", "17"]);
    assert_ne!(output.status.code(), Some(0));
    assert!(stderr(&output).contains("16"), "{}", stderr(&output));
}

#[test]
fn a_trained_run_leaves_the_report_of_its_step_in_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("text.txt"), "the quick brown fox; ".repeat(400)).unwrap();
    let recipe = r#"
        name = "profiled"
        steps = 3
        [model]
        preset = "gpt2"
        layers = 1
        width = 32
        heads = 2
        activation_checkpointing = true
        [data]
        text = ["text.txt"]
        sequence = 16
        [ds_config]
        train_micro_batch_size_per_gpu = 2
        optimizer = { type = "AdamW", params = { lr = 3e-3 } }
        flops_profiler = { enabled = true, recompute_fwd_factor = 1.0 }
    "#;
    std::fs::write(folder.path().join("recipe.toml"), recipe).unwrap();
    let out = folder.path().join("run");
    let words = ["train", "recipe.toml", "--out", out.to_str().unwrap()];
    let output = support::output_of(support::binary().args(words).current_dir(folder.path()));
    assert!(output.status.success(), "{}{}", stdout(&output), stderr(&output));
    assert!(!stderr(&output).contains("nothing acts on it"), "{}", stderr(&output));
    let text = std::fs::read_to_string(out.join("profile.txt")).unwrap();
    assert!(text.contains("Profile Summary at step 1:"), "{text}");
    // 32 tokens: 12·32² weights, 2·16·32 between tokens, and a head of 256 bytes.
    let macs = 32 * (12 * 32 * 32 + 2 * 16 * 32) + 32 * 32 * 256;
    let line = format!("fwd MACs per GPU: {:>54}{:.2} KMACs", "", f64::from(macs) / 1e3);
    assert!(text.lines().any(|found| found == line), "{line:?} in {text}");
    // Slices: what a rank has, and the whole, of which norms and positions are on both ranks.
    let sliced = folder.path().join("sliced");
    let words = ["train", "recipe.toml", "--tp", "2", "--out", sliced.to_str().unwrap()];
    let output = support::output_of(support::binary().args(words).current_dir(folder.path()));
    assert!(output.status.success(), "{}{}", stdout(&output), stderr(&output));
    let of_slice = std::fs::read_to_string(sliced.join("profile.txt")).unwrap();
    let said = |text: &str, label: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(label));
        line.unwrap_or_else(|| panic!("no {label:?} in {text}")).trim().to_owned()
    };
    let of_model = "params of model = params per GPU * mp_size:";
    assert_eq!(said(&text, of_model), said(&text, "params per GPU:"));
    assert_eq!(said(&of_slice, of_model), said(&text, of_model));
    assert_ne!(said(&of_slice, "params per GPU:"), said(&text, "params per GPU:"));
    assert_eq!(said(&of_slice, "model parallel size:"), "2");
    let report = std::fs::read_to_string(out.join("report.html")).unwrap();
    assert!(report.contains("What holds modules back") && report.contains("transformer.h.*.mlp"), "{report}");
}

#[test]
fn the_roofline_says_of_each_kind_of_module_what_holds_it_back() {
    let (_folder, path) = config(GPT2);
    let output = ferrospeed(&["profile", path.to_str().unwrap(), "--backward", "--roofline"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    assert!(text.contains("measured peaks: "), "{text}");
    // Blocks are one; lookups do no operations, so memory binds.
    let row = |module: &str| text.lines().find(|line| line.starts_with(module)).map(str::to_owned);
    let found = row("transformer.h.*.attn.c_attn ").unwrap_or_else(|| panic!("no such row in {text}"));
    assert!(found.ends_with("cores") || found.ends_with("memory"), "{found}");
    let found = row("transformer.wte ").unwrap_or_else(|| panic!("no such row in {text}"));
    assert!(found.contains(" 0.0 %") && found.ends_with("memory"), "{found}");
    assert!(!text.contains("transformer.h.0"), "{text}");
}

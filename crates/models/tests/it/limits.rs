//! What a `config.json` may ask for, and what a model's folder says about its ends.

use ferrospeed_models::directory::end_tokens;
use ferrospeed_models::{ModelConfig, WindowRule};
use ferrospeed_nn::tensor_parallel::Between;
use serde_json::{Value, json};

fn refusal(model_type: &str, changes: Value) -> String {
    let mut config = json!({ "model_type": model_type, "n_embed": 64, "n_head": 1, "n_layer": 1 });
    if model_type != "bloom" {
        config = json!({ "model_type": model_type });
    }
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    ModelConfig::from_value(&config, WindowRule::default()).unwrap_err().to_string()
}

#[test]
fn absurd_sizes_are_refused_by_key_and_limit_before_anything_is_allocated() {
    const MANY: u64 = 1_000_000_000;
    for (model_type, key) in [
        ("gpt2", "n_layer"),
        ("bloom", "n_layer"),
        ("llama", "num_hidden_layers"),
        ("bert", "num_hidden_layers"),
        ("opt", "num_hidden_layers"),
        ("gpt_neox", "num_hidden_layers"),
        ("mixtral", "num_local_experts"),
    ] {
        let said = refusal(model_type, json!({ key: MANY }));
        assert!(said.contains(key) && said.contains("at most 16384"), "{model_type}: {said}");
    }
    for (model_type, key) in [
        ("gpt2", "n_embd"),
        ("gpt2", "vocab_size"),
        ("gpt2", "n_positions"),
        ("llama", "intermediate_size"),
        ("llama", "num_attention_heads"),
        ("bert", "hidden_size"),
    ] {
        let said = refusal(model_type, json!({ key: MANY }));
        assert!(said.contains(key) && said.contains("at most 16777216"), "{model_type}: {said}");
    }
}

#[test]
fn sizes_that_are_only_together_absurd_are_refused() {
    // Heads divide it.
    let wide = 1 << 20;
    let said = refusal("gpt2", json!({ "n_layer": 16384, "n_embd": 3 * wide }));
    assert!(said.contains("weights: at most"), "{said}");
    let said = refusal("bert", json!({ "num_hidden_layers": 16384, "hidden_size": 3 * wide }));
    assert!(said.contains("weights: at most"), "{said}");
    let said = refusal("mixtral", json!({ "num_local_experts": 16384 }));
    assert!(said.contains("too many: at most"), "{said}");
}

#[test]
fn end_tokens_come_from_the_generation_config_before_the_config() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, content: &str| std::fs::write(folder.path().join(name), content).unwrap();
    assert_eq!(end_tokens(folder.path()).unwrap(), Vec::<i64>::new());
    write("config.json", r#"{ "eos_token_id": 2 }"#);
    assert_eq!(end_tokens(folder.path()).unwrap(), [2]);
    write("generation_config.json", r#"{ "do_sample": true }"#);
    assert_eq!(end_tokens(folder.path()).unwrap(), [2]);
    write("generation_config.json", r#"{ "eos_token_id": [5, 7] }"#);
    assert_eq!(end_tokens(folder.path()).unwrap(), [5, 7]);
    write("generation_config.json", r#"{ "eos_token_id": "x" }"#);
    assert!(end_tokens(folder.path()).unwrap_err().to_string().contains("eos_token_id"));
}

#[test]
fn a_dropout_that_is_no_share_is_refused_by_its_key() {
    let cases = [
        ("gpt2", ["attn_pdrop", "resid_pdrop", "embd_pdrop"].as_slice()),
        ("llama", &["attention_dropout"]),
        ("phi3", &["attention_dropout", "resid_pdrop"]),
        ("opt", &["attention_dropout", "dropout"]),
        ("bloom", &["attention_dropout", "hidden_dropout"]),
        ("gpt_neox", &["attention_dropout", "hidden_dropout"]),
        ("bert", &["attention_probs_dropout_prob", "hidden_dropout_prob"]),
    ];
    for (family, keys) in cases {
        for key in keys {
            for (share, is_one) in [(0.0, true), (0.5, true), (1.0, false), (10.0, false), (-0.1, false)] {
                let mut config = json!({"model_type": family, (*key): share});
                if family == "bloom" {
                    config["hidden_size"] = 64.into();
                    config["n_head"] = 8.into();
                    config["n_layer"] = 2.into();
                }
                let read = ModelConfig::from_value(&config, WindowRule::default());
                assert_eq!(read.is_ok(), is_one, "{family}, {key} = {share}");
                assert!(read.err().is_none_or(|error| error.to_string().contains(key)), "{family}, {key}");
            }
        }
    }
}

#[test]
fn heads_that_lie_in_one_tensor_are_cut_for_ranks_that_divide_them_all() {
    let config = json!({"model_type": "phi3", "num_attention_heads": 24, "num_key_value_heads": 8});
    let ModelConfig::Decoder(config) = ModelConfig::from_value(&config, WindowRule::default()).unwrap()
    else {
        panic!("it is a decoder")
    };
    assert!(config.check_slices(8, Between::AllTokens).is_ok());
    let why = config.check_slices(12, Between::AllTokens).unwrap_err().to_string();
    assert!(why.contains("neither a multiple nor a divisor of 12 ranks"), "{why}");
    let why = config.check_slices(24, Between::AllTokens).unwrap_err().to_string();
    assert!(why.contains("cannot be shared by 24 ranks; 1, 2, 4, 8 ranks fit"), "{why}");
}

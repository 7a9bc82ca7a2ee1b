//! What a `config.json` says is read, or refused by name; nothing of it is left out in silence.

use std::path::PathBuf;

use ferrospeed_models::config::MODEL_TYPES;
use ferrospeed_models::decoder::Positions;
use ferrospeed_models::{DecoderConfig, ModelConfig, WindowRule};
use ferrospeed_nn::{Rotary, RotaryScaling, Turning};
use ferrospeed_testkit::golden::{read_json, repository_root};
use serde_json::{Value, json};

fn parsed(config: &Value) -> Result<ModelConfig, String> {
    ModelConfig::from_value(config, WindowRule::default()).map_err(|error| error.to_string())
}

fn decoder(config: &Value) -> DecoderConfig {
    match parsed(config) {
        Ok(ModelConfig::Decoder(config)) => *config,
        other => panic!("{config} is no decoder: {other:?}"),
    }
}

fn rotary(config: &Value) -> Rotary {
    match decoder(config).positions {
        Positions::Rotary(rotary) => rotary,
        other => panic!("{config} has {other:?}"),
    }
}

/// What `scripts/record-families` wrote of a type.
fn defaults_of(model_type: &str) -> PathBuf {
    repository_root().join(format!("crates/models/tests/defaults/{model_type}.json"))
}

fn small(model_type: &str, more: Value) -> Value {
    let mut config = json!({
        "model_type": model_type, "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    });
    if model_type == "gpt_neox" {
        config.as_object_mut().unwrap().remove("num_key_value_heads");
    }
    let more = more.as_object().expect("an object of more fields");
    config.as_object_mut().unwrap().extend(more.clone());
    config
}

#[test]
fn what_transformers_writes_is_read_and_means_the_same_in_both_versions() {
    let configs = repository_root().join("tests/golden/transformers/configs");
    for model_type in MODEL_TYPES.into_iter().filter(|name| !defaults_of(name).exists()) {
        let of_version = |version: &str| {
            let path = configs.join(version).join(format!("{model_type}.json"));
            let is_there = path.exists();
            is_there.then(|| {
                parsed(&read_json(&path)).unwrap_or_else(|error| panic!("{model_type} of {version}: {error}"))
            })
        };
        let new = of_version("5.22").expect("the newest release has every family");
        // Some families are younger.
        let Some(old) = of_version("4.40") else {
            assert!(
                ["qwen3", "phi3", "smollm3", "olmo2", "olmoe", "qwen3_moe"].contains(&model_type),
                "{model_type} is in 4.40"
            );
            continue;
        };
        assert_eq!(format!("{old:?}"), format!("{new:?}"), "{model_type}");
    }
}

#[test]
fn a_field_that_is_absent_has_the_value_that_transformers_gives_it() {
    let configs = repository_root().join("tests/golden/transformers/configs/5.22");
    for model_type in MODEL_TYPES.into_iter().filter(|name| *name != "bloom") {
        let later = defaults_of(model_type);
        let written = match later.exists() {
            true => read_json(&later),
            false => read_json(&configs.join(format!("{model_type}.json"))),
        };
        let bare = json!({ "model_type": model_type });
        assert_eq!(format!("{:?}", parsed(&bare)), format!("{:?}", parsed(&written)), "{model_type}");
    }
}

#[test]
fn fields_nobody_knows_are_refused_together_by_name() {
    for model_type in
        ["llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "olmo2", "mixtral", "gpt_neox"]
    {
        let error = parsed(&small(
            model_type,
            json!({"quantization_config": {"bits": 4}, "final_logit_softcapping": 30.0, "use_cache": false}),
        ))
        .unwrap_err();
        assert!(error.contains("final_logit_softcapping = 30.0"), "{error}");
        assert!(error.contains("quantization_config = {\"bits\":4}"), "{error}");
        assert!(!error.contains("use_cache"), "{error}");
        let nulls = json!({"quantization_config": null, "final_logit_softcapping": null});
        assert!(parsed(&small(model_type, nulls)).is_ok());
    }
    for (model_type, field, name) in [
        ("gpt2", json!({"layer_scale": 0.5}), "layer_scale"),
        ("opt", json!({"rope_theta": 1e4}), "rope_theta"),
        (
            "bloom",
            json!({"hidden_size": 32, "n_head": 4, "n_layer": 2, "attention_bias": true}),
            "attention_bias",
        ),
        ("bert", json!({"rope_parameters": {"rope_type": "default"}}), "rope_parameters"),
    ] {
        let mut config = json!({ "model_type": model_type });
        config.as_object_mut().unwrap().extend(field.as_object().unwrap().clone());
        let error = parsed(&config).unwrap_err();
        assert!(error.contains(&format!("{name} = ")), "{model_type}: {error}");
    }
}

#[test]
fn values_that_are_not_implemented_are_refused_with_their_field() {
    for (model_type, field, message) in [
        ("mistral", json!({"attention_bias": true}), "attention_bias: true is not supported"),
        ("mixtral", json!({"router_jitter_noise": 0.1}), "router_jitter_noise: 0.1 is not supported"),
        ("llama", json!({"add_cross_attention": true}), "add_cross_attention: true is not supported"),
        ("llama", json!({"pruned_heads": {"0": [1]}}), "pruned_heads"),
        ("llama", json!({"sliding_window": 16}), "sliding_window = 16"),
        ("llama", json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor: 0.5 is not supported"),
        ("qwen2", json!({"use_mrope": true}), "use_mrope: true is not supported"),
        ("gpt_neox", json!({"hidden_dropout_prob": 0.1}), "hidden_dropout_prob: 0.1 is not supported"),
        ("phi3", json!({"attention_bias": true}), "attention_bias: true is not supported"),
        ("phi3", json!({"interpolate_factor": 2}), "interpolate_factor: 2 is not supported"),
        (
            "phi3",
            json!({"rope_scaling": {"type": "yarn", "factor": 2.0}}),
            "rope_scaling: this family has no other scaling than longrope",
        ),
        ("olmo2", json!({"sliding_window": 16}), "sliding_window = 16"),
        ("smollm3", json!({"no_rope_layers": [1, 0]}), "no_rope_layers: lists 2 layers, the model has 3"),
        ("smollm3", json!({"no_rope_layers": [1, 0, 2]}), "no_rope_layers: 2 is neither 0"),
        ("smollm3", json!({"no_rope_layers": true}), "no_rope_layers: true is not a list of numbers"),
        ("smollm3", json!({"no_rope_layer_interval": 0}), "no_rope_layer_interval: 0 is no number of layers"),
        ("llama", json!({"layer_types": ["full_attention"]}), "layer_types: lists 1 layers, the model has 3"),
        (
            "mistral",
            json!({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}),
            "layer_types: 'chunked_attention' is not supported",
        ),
    ] {
        let error = parsed(&small(model_type, field)).unwrap_err();
        assert!(error.contains(message), "{model_type}: {error}");
    }
    assert!(parsed(&small("llama", json!({"use_sliding_window": false, "sliding_window": 16}))).is_ok());
}

#[test]
fn rotary_positions_mean_the_same_in_both_spellings() {
    let llama3 = json!({"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16});
    let yarn = json!({"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0});
    for (kind, numbers) in [
        ("linear", json!({"factor": 4.0})),
        ("dynamic", json!({"factor": 2.0})),
        ("llama3", llama3),
        ("yarn", yarn),
    ] {
        for kind_key in ["type", "rope_type"] {
            let mut scaling = numbers.clone();
            scaling[kind_key] = kind.into();
            let old = small("llama", json!({"rope_theta": 5e5, "rope_scaling": scaling}));
            scaling["rope_theta"] = 5e5.into();
            let new = small("llama", json!({ "rope_parameters": scaling }));
            assert_eq!(rotary(&old), rotary(&new), "{kind}");
            assert_eq!(rotary(&new).theta, 5e5);
            assert_ne!(rotary(&new).scaling, RotaryScaling::None);
        }
    }
    // As Phi-4-mini's file has it: what it adds changes nothing.
    let longrope = json!({"short_factor": [1.0, 1.5, 2.0], "long_factor": [1, 3, 9], "type": "longrope"});
    let old = json!({
        "original_max_position_embeddings": 16, "partial_rotary_factor": 0.75, "rope_scaling": longrope, "lm_head_bias": false,
        "full_attn_mod": 1, "interpolate_factor": 1, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "embd_pdrop": 0.0, "attention_bias": false, "mlp_bias": false,
    });
    let mut first = old.clone();
    first["rope_scaling"]["type"] = "su".into();
    let mut new = longrope.clone();
    new.as_object_mut().unwrap().remove("type");
    let more = json!({"rope_type": "longrope", "partial_rotary_factor": 0.75, "original_max_position_embeddings": 16});
    new.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let new = small("phi3", json!({"rope_parameters": new, "original_max_position_embeddings": 16}));
    let found = rotary(&small("phi3", old));
    assert_eq!([&found, &rotary(&small("phi3", first))], [&rotary(&new); 2]);
    let RotaryScaling::LongRope { trained: 16, amplitude, .. } = found.scaling else { panic!("{found:?}") };
    assert!((amplitude - 1.5f64.sqrt()).abs() < 1e-12, "the root of 1 + ln 4 / ln 16: {amplitude}");
    let old = small("gpt_neox", json!({"rotary_pct": 0.5, "rotary_emb_base": 20000}));
    let within = json!({"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 2e4});
    assert_eq!(rotary(&old), rotary(&small("gpt_neox", json!({ "rope_parameters": within }))));
    assert_eq!(rotary(&old).dims, 4);
}

#[test]
fn rotary_positions_by_type_of_layer_are_read_where_they_agree() {
    let of = |full: f64, sliding: f64| {
        let kind = |theta: f64| json!({"rope_type": "default", "rope_theta": theta});
        small(
            "qwen2",
            json!({"rope_parameters": {"full_attention": kind(full), "sliding_attention": kind(sliding)}}),
        )
    };
    assert_eq!(rotary(&of(3e4, 3e4)).theta, 3e4);
    let error = parsed(&of(3e4, 2e4)).unwrap_err();
    assert!(error.contains("rope_parameters.sliding_attention: differs from full_attention"), "{error}");
}

#[test]
fn a_kind_of_rotary_scaling_that_is_not_implemented_is_refused_by_name() {
    for (field, key) in [("rope_parameters", "rope_type"), ("rope_scaling", "type")] {
        for kind in ["proportional", "mrope"] {
            let error = parsed(&small("llama", json!({ field: {key: kind, "factor": 2.0} }))).unwrap_err();
            let expected = format!(
                "{field}.{key}: '{kind}' is not supported; default, linear, dynamic, llama3, yarn and longrope are"
            );
            assert!(error.contains(&expected), "{error}");
        }
    }
    let error = parsed(&small(
        "llama",
        json!({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale": 1.0}}),
    ));
    assert!(error.unwrap_err().contains("rope_parameters.mscale = 1.0"));
    for (short, message) in [
        (json!([1.0]), "rope_scaling.short_factor: lists 1 pairs, heads have 4"),
        (json!([1.0, 0.0, 1.0, 1.0]), "rope_scaling.short_factor: 0 is not a number above 0"),
        (json!([1.0, "2", 1.0, 1.0]), "is not a list of numbers"),
        (Value::Null, "rope_scaling.short_factor: is missing"),
    ] {
        let scaling = json!({"type": "longrope", "short_factor": short, "long_factor": [1.0, 1.0, 1.0, 1.0]});
        let error = parsed(&small("phi3", json!({ "rope_scaling": scaling }))).unwrap_err();
        assert!(error.contains(message), "{error}");
    }
    let both =
        json!({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "linear", "factor": 2.0}});
    assert!(
        parsed(&small("llama", both)).unwrap_err().contains("rope_scaling: stands beside rope_parameters")
    );
}

#[test]
fn layers_slide_where_the_file_says_so() {
    let windows = |model_type, more| decoder(&small(model_type, more)).windows;
    assert_eq!(windows("mistral", json!({"sliding_window": 4})), [Some(4); 3]);
    assert_eq!(windows("mistral", json!({})), [Some(4096); 3]);
    assert_eq!(windows("mistral", json!({"sliding_window": null})), [None; 3]);
    assert_eq!(windows("qwen2", json!({"sliding_window": 4, "max_window_layers": 1})), [None; 3]);
    let upper = json!({"use_sliding_window": true, "sliding_window": 4, "max_window_layers": 1});
    for model_type in ["qwen2", "qwen3"] {
        assert_eq!(windows(model_type, upper.clone()), [None, Some(4), Some(4)]);
    }
    for model_type in ["mistral", "qwen2", "qwen3"] {
        let types = ["sliding_attention", "full_attention", "sliding_attention"];
        let mixed = json!({"use_sliding_window": true, "sliding_window": 4, "layer_types": types});
        let mixed =
            if model_type != "mistral" { mixed } else { json!({"sliding_window": 4, "layer_types": types}) };
        assert_eq!(windows(model_type, mixed), [Some(4), None, Some(4)]);
    }
    // Layers that do not turn slide: the last of every three here, unless the file lists them.
    let every_third = json!({"use_sliding_window": true, "sliding_window": 4, "no_rope_layer_interval": 3});
    assert_eq!(windows("smollm3", every_third.clone()), [None, None, Some(4)]);
    assert_eq!(
        decoder(&small("smollm3", every_third)).turns,
        [Turning::Usually, Turning::Usually, Turning::Never]
    );
    let listed = json!({"no_rope_layers": [0, 1, 0, 1], "no_rope_layer_interval": 3, "sliding_window": 4});
    assert_eq!(
        decoder(&small("smollm3", listed.clone())).turns,
        [Turning::Never, Turning::Usually, Turning::Never]
    );
    assert_eq!(windows("smollm3", listed), [None; 3]);
    let without = small("qwen2", json!({ "layer_types": vec!["sliding_attention"; 3] }));
    assert!(parsed(&without).unwrap_err().contains("there is no sliding_window"));
}

#[test]
fn the_row_of_padding_is_the_one_that_transformers_leaves_untrained() {
    let padding = |model_type: &str, more: Value| decoder(&small(model_type, more)).padding;
    assert_eq!(padding("llama", json!({})), None);
    assert_eq!(padding("llama", json!({"pad_token_id": 7})), Some(7));
    assert_eq!(padding("llama", json!({"pad_token_id": -1})), Some(99), "counted from the end");
    assert_eq!(padding("llama", json!({"pad_token_id": 100})), None, "there is no such row");
    assert_eq!(padding("olmo2", json!({})), Some(1), "what is not said is the family's");
    assert_eq!(padding("olmo2", json!({"pad_token_id": null})), None);
    assert_eq!(padding("phi3", json!({})), None, "32000 of a hundred");
    assert_eq!(padding("phi3", json!({"vocab_size": 32_064})), Some(32_000));
    assert_eq!(padding("gpt_neox", json!({"pad_token_id": 7})), None, "a family without");
    let error = parsed(&small("llama", json!({"pad_token_id": "x"}))).unwrap_err();
    assert!(error.contains("pad_token_id") && error.contains("is not a token id"), "{error}");
}

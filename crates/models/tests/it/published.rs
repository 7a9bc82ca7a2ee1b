//! What published models say of themselves is read, or refused by a reason that their users accept: fields of their `config.json`, as
//! far as they are more than sizes.

use ferrospeed_models::{ModelConfig, WindowRule};
use ferrospeed_nn::tensor_parallel::Between;
use serde_json::{Value, json};

fn parsed(config: &Value) -> Result<ModelConfig, String> {
    ModelConfig::from_value(config, WindowRule::default()).map_err(|error| error.to_string())
}

/// Each with the sizes of its family, which are not what these are about.
fn published() -> Vec<(&'static str, Value)> {
    vec![
        (
            "SmolLM2-135M",
            json!({
                "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 0,
                "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
                "intermediate_size": 1536, "is_llama_config": true, "max_position_embeddings": 8192, "model_type": "llama",
                "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1,
                "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null, "rope_theta": 100000,
                "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": true,
                "vocab_size": 49152,
            }),
        ),
        (
            "distilgpt2",
            json!({
                "_num_labels": 1, "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
                "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "id2label": {"0": "LABEL_0"},
                "initializer_range": 0.02, "label2id": {"LABEL_0": 0}, "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
                "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 6, "n_positions": 1024, "resid_pdrop": 0.1,
                "summary_activation": null, "summary_first_dropout": 0.1, "summary_proj_to_labels": true,
                "summary_type": "cls_index", "summary_use_proj": true,
                "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}}, "vocab_size": 50257,
            }),
        ),
        (
            "dolly-v2-3b",
            json!({
                "_name_or_path": "EleutherAI/pythia-2.8b", "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0,
                "custom_pipelines": {"text-generation": {"impl": "instruct_pipeline.InstructionTextGenerationPipeline",
                    "pt": "AutoModelForCausalLM", "tf": "TFAutoModelForCausalLM"}},
                "eos_token_id": 0, "hidden_act": "gelu", "hidden_size": 2560, "initializer_range": 0.02,
                "intermediate_size": 10240, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "gpt_neox",
                "num_attention_heads": 32, "num_hidden_layers": 32, "rotary_emb_base": 10000, "rotary_pct": 0.25,
                "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.25.1", "use_cache": false,
                "use_parallel_residual": true, "vocab_size": 50280,
            }),
        ),
        (
            "a model that NEFTune has trained, with YaRN",
            json!({
                "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
                "intermediate_size": 128, "neftune_noise_alpha": 5.0, "auto_map": {"AutoModelForCausalLM": "modeling_x.X"},
                "rope_scaling": {"factor": 4.0, "finetuned": true, "original_max_position_embeddings": 2048, "type": "yarn"},
            }),
        ),
        (
            "gemma-2-2b",
            json!({
                "architectures": ["Gemma2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
                "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
                "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
                "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "initializer_range": 0.02,
                "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8,
                "num_hidden_layers": 26, "num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256,
                "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "float32",
                "transformers_version": "4.42.4", "use_cache": true, "vocab_size": 256000,
            }),
        ),
        (
            "gemma-3-1b-it",
            json!({
                "architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
                "attn_logit_softcapping": null, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
                "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
                "hidden_size": 1152, "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768,
                "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
                "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
                "rope_scaling": null, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
                "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "use_cache": true, "vocab_size": 262144,
            }),
        ),
        (
            "phi-2",
            json!({
                "architectures": ["PhiForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 50256, "embd_pdrop": 0.0,
                "eos_token_id": 50256, "hidden_act": "gelu_new", "hidden_size": 2560, "initializer_range": 0.02,
                "intermediate_size": 10240, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "phi",
                "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "partial_rotary_factor": 0.4,
                "qk_layernorm": false, "resid_pdrop": 0.1, "rope_scaling": null, "rope_theta": 10000.0,
                "tie_word_embeddings": false, "torch_dtype": "float16", "transformers_version": "4.37.0", "use_cache": true,
                "vocab_size": 51200,
            }),
        ),
        (
            "falcon-7b",
            json!({
                "alibi": false, "apply_residual_connection_post_layernorm": false, "architectures": ["FalconForCausalLM"],
                "attention_dropout": 0.0, "auto_map": {"AutoConfig": "configuration_falcon.FalconConfig"}, "bias": false,
                "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0, "hidden_size": 4544, "initializer_range": 0.02,
                "layer_norm_epsilon": 1e-05, "model_type": "falcon", "multi_query": true, "new_decoder_architecture": false,
                "num_attention_heads": 71, "num_hidden_layers": 32, "parallel_attn": true, "torch_dtype": "bfloat16",
                "transformers_version": "4.27.4", "use_cache": true, "vocab_size": 65024,
            }),
        ),
        (
            "mpt-7b",
            json!({
                "architectures": ["MPTForCausalLM"], "attn_config": {"alibi": true, "alibi_bias_max": 8, "attn_impl": "torch",
                    "attn_pdrop": 0, "attn_type": "multihead_attention", "attn_uses_sequence_id": false, "clip_qkv": null,
                    "prefix_lm": false, "qk_ln": false, "softmax_scale": null},
                "auto_map": {"AutoConfig": "configuration_mpt.MPTConfig"}, "d_model": 4096, "emb_pdrop": 0,
                "embedding_fraction": 1.0, "expansion_ratio": 4, "init_config": {"name": "kaiming_normal_"},
                "init_device": "cpu", "learned_pos_emb": true, "logit_scale": null, "max_seq_len": 2048, "model_type": "mpt",
                "n_heads": 32, "n_layers": 32, "no_bias": true, "norm_type": "low_precision_layernorm", "resid_pdrop": 0,
                "tokenizer_name": "EleutherAI/gpt-neox-20b", "torch_dtype": "bfloat16", "transformers_version": "4.28.1",
                "use_cache": false, "verbose": 0, "vocab_size": 50432,
            }),
        ),
        (
            "gpt-oss-20b",
            json!({
                "architectures": ["GptOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.0, "eos_token_id": 200002,
                "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
                "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"],
                "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
                "num_experts_per_tok": 4, "num_hidden_layers": 2, "num_key_value_heads": 8, "num_local_experts": 32,
                "output_router_logits": false, "pad_token_id": 199999,
                "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
                "rms_norm_eps": 1e-05, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
                    "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false},
                "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
                "tie_word_embeddings": false, "transformers_version": "4.55.0.dev0", "use_cache": true, "vocab_size": 201088,
            }),
        ),
        (
            "Qwen3-Next-80B-A3B",
            json!({
                "architectures": ["Qwen3NextForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
                "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4,
                "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
                "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
                "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
                "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_next",
                "moe_intermediate_size": 512, "norm_topk_prob": true, "num_attention_heads": 16, "num_experts": 512,
                "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
                "output_router_logits": false, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": null,
                "rope_theta": 10000000, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
                "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.57.0.dev0",
                "use_cache": true, "use_sliding_window": false, "vocab_size": 151936,
            }),
        ),
    ]
}

#[test]
fn published_configurations_are_read() {
    for (name, config) in published() {
        if let Err(error) = parsed(&config) {
            panic!("{name}: {error}");
        }
    }
}

/// Fields and sizes of more of them, a line each, with the number of parameters that the model has.
#[test]
fn published_models_have_as_many_parameters_as_they_say() {
    let cases: serde_json::Map<String, Value> =
        serde_json::from_str(include_str!("../published.json")).unwrap();
    for (name, case) in &cases {
        let config = ModelConfig::from_value(&case["config"], WindowRule::default());
        let counted = config.unwrap_or_else(|error| panic!("{name}: {error}")).parameters().numel() as u64;
        if let Some(said) = case["parameters"].as_u64() {
            assert_eq!(counted, said, "{name}");
        }
    }
    assert!(cases.len() > 30);
}

#[test]
fn a_model_that_reads_more_than_text_is_refused_with_its_text_tower() {
    let config = json!({
        "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {"model_type": "gemma3_text", "hidden_size": 2560}, "vision_config": {"model_type": "siglip_vision_model"},
    });
    let error = parsed(&config).unwrap_err();
    assert!(
        error.contains("'gemma3' reads more than text (vision_config), which is not supported"),
        "{error}"
    );
    assert!(error.contains("its text tower is a 'gemma3_text', which is"), "{error}");
    let error = parsed(&json!({ "model_type": "x", "audio_config": {} })).unwrap_err();
    assert!(error.contains("(audio_config)") && !error.contains("tower"), "{error}");
}

#[test]
fn what_a_family_cannot_do_is_refused_with_its_field() {
    for (model_type, field, message) in [
        ("gemma2", json!({"attn_logit_softcapping": -1.0}), "attn_logit_softcapping: -1 is no cap"),
        (
            "gemma3_text",
            json!({"use_bidirectional_attention": true}),
            "use_bidirectional_attention: true is not supported",
        ),
        ("cohere", json!({"use_qk_norm": true}), "use_qk_norm: true is not supported"),
        ("falcon", json!({"alibi": true}), "alibi: true is not supported"),
        ("mpt", json!({"n_heads": 12, "d_model": 48}), "n_heads: 12 heads are not supported"),
        ("stablelm", json!({"qk_layernorm": true}), "qk_layernorm: true is not supported"),
        ("qwen2_moe", json!({"decoder_sparse_step": 0}), "decoder_sparse_step: 0 is no number of layers"),
        (
            "qwen3_moe",
            json!({"num_hidden_layers": 2, "mlp_only_layers": [0, 1]}),
            "leaves no layer with experts",
        ),
        ("deepseek_v2", json!({"topk_method": "noaux_tc"}), "topk_method: 'noaux_tc' is not known"),
        ("deepseek_v3", json!({"quantization_config": {"quant_method": "fp8"}}), "quantization_config"),
        (
            "gpt_oss",
            json!({"quantization_config": {"quant_method": "fp8"}}),
            "\"fp8\" is not supported; only \"mxfp4\" is",
        ),
        (
            "gpt_neo",
            json!({"attention_types": [[["global"], 3]]}),
            "attention_types: is of 3 layers, the model has 24",
        ),
        ("llama", json!({"rope_interleaved": true}), "rope_interleaved: true is not supported"),
        (
            "qwen3_5_text",
            json!({"layer_types": ["linear_attention"]}),
            "layer_types: lists 1 layers, the model has 32",
        ),
    ] {
        let mut config = field;
        config["model_type"] = model_type.into();
        let error = parsed(&config).unwrap_err();
        assert!(error.contains(message), "{model_type}: {error}");
    }
}

#[test]
fn layers_without_a_mixture_are_cut_where_their_width_divides() {
    let config = |inner: usize| {
        let config = json!({
            "model_type": "qwen3_moe", "vocab_size": 19, "hidden_size": 16, "intermediate_size": inner, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 12, "mlp_only_layers": [0],
        });
        match parsed(&config).unwrap() {
            ModelConfig::Decoder(config) => *config,
            ModelConfig::Bert(_) => unreachable!("it is a decoder"),
        }
    };
    for between in [Between::AllTokens, Between::OwnTokens] {
        let error = config(23).check_slices(2, between).unwrap_err().to_string();
        assert!(error.contains("23 channels of a feed-forward layer cannot be shared by 2 ranks"), "{error}");
        config(24).check_slices(2, between).unwrap();
    }
}

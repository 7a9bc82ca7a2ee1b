//! What a key of a Hugging Face `config.json` means where it is not given, or null: transformers' defaults, which `models` has too.

/// Sizes of a family: hidden, layers, heads, heads of keys and values, inside, vocabulary, positions.
type Sizes = [u64; 7];

/// The usual size that a key names; `None` where it has to be given.
pub(crate) fn usual(model_type: &str, key: &str) -> Option<u64> {
    let [hidden, layers, heads, kv_heads, inner, vocabulary, positions] = sizes(model_type)?;
    let size = match key {
        "hidden_size" | "n_embd" => hidden,
        "num_hidden_layers" | "n_layer" => layers,
        "num_attention_heads" | "n_head" => heads,
        "num_key_value_heads" => kv_heads,
        "intermediate_size" | "ffn_dim" => inner,
        "vocab_size" => vocabulary,
        "max_position_embeddings" | "n_positions" => positions,
        _ => 0,
    };
    Some(size).filter(|&size| size > 0)
}

/// 0 has to be given, or follows from others.
fn sizes(model_type: &str) -> Option<Sizes> {
    Some(match model_type {
        "gpt2" => [768, 12, 12, 0, 0, 50_257, 1024],
        "llama" => [4096, 32, 32, 0, 11_008, 32_000, 2048],
        "mistral" => [4096, 32, 32, 8, 14_336, 32_000, 131_072],
        "mixtral" => [4096, 32, 32, 8, 14_336, 32_000, 131_072],
        "qwen2" => [4096, 32, 32, 32, 22_016, 151_936, 32_768],
        "qwen3" => [4096, 32, 32, 32, 22_016, 151_936, 32_768],
        "phi3" => [3072, 32, 32, 0, 8192, 32_064, 4096],
        "smollm3" => [2048, 36, 16, 4, 11_008, 128_256, 32_768],
        "olmo2" => [4096, 32, 32, 0, 11_008, 50_304, 2048],
        "qwen2_moe" => [2048, 24, 16, 16, 5632, 151_936, 32_768],
        "olmoe" => [2048, 16, 16, 0, 2048, 50_304, 4096],
        "qwen3_moe" => [2048, 24, 32, 4, 6144, 151_936, 32_768],
        "bert" => [768, 12, 12, 0, 3072, 30_522, 512],
        "opt" => [768, 12, 12, 0, 3072, 50_272, 2048],
        "gpt_neox" => [6144, 44, 64, 0, 24_576, 50_432, 2048],
        "bloom" => [0, 0, 0, 0, 0, 250_880, 0],
        _ => return None,
    })
}

"""Records crates/models/tests/gguf: small GGUF files and what transformers computes with the same weights.

Made with gguf 0.19, sentencepiece 0.2 and tokenizers 0.22 (files and tokens), transformers 5.22 and torch 2.13 (logits).
Names of tensors and the values of quantised blocks are those of the `gguf` package; K-quants, which it only reads, are blocks of
random bits with fitting scales.

    python scripts/peers/gguf_models.py crates/models/tests/gguf
"""

import io
import json
import sys
from pathlib import Path

import gguf
import numpy as np
import sentencepiece
import torch
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

TYPE = gguf.GGMLQuantizationType
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "pack my box with five dozen liquor jugs",
    "how vexingly quick daft zebras jump",
    "a model is data and layers; it holds no training logic",
    "zürich, naïve, 1234 and 56 — all of it!",
]
TEXTS = ["the lazy dog", " jumps  over", "naïve 1234!", "quick\nbrown 漢字", "", "dog's 2nd"]


def k_blocks(kind, rows, columns, random):
    blocks = rows * columns // 256
    scale = lambda: (random.uniform(0.5, 1.5, (blocks, 1)) * 2e-4).astype(np.float16).view(np.uint8)
    bits = lambda count: random.integers(0, 256, (blocks, count), dtype=np.uint8)
    if kind == TYPE.Q4_K:
        parts = [scale() , scale(), bits(12), bits(128)]
    else:
        parts = [bits(128), bits(64), random.integers(-60, 60, (blocks, 16), dtype=np.int8).view(np.uint8), scale()]
    return np.concatenate(parts, axis=1).reshape(rows, -1)


def encoded(weight, kind, random):
    """The bytes of a tensor in this type, and the values that they stand for."""
    if kind in (TYPE.Q4_K, TYPE.Q6_K):
        data = k_blocks(kind, *weight.shape, random)
    else:
        data = quantize(weight, kind)
    return data, dequantize(data, kind).astype(np.float32).reshape(weight.shape)


def pairs_together(weight, heads):
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def pairs_apart(weight, heads):
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def sentence_piece(writer):
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20), model_writer=out, vocab_size=320, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, character_coverage=1.0)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    ids = range(pieces.get_piece_size())
    kinds = [2 if pieces.is_unknown(i) else 3 if pieces.is_control(i) else 6 if pieces.is_byte(i) else 1 for i in ids]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([pieces.id_to_piece(i) for i in ids])
    writer.add_token_scores([pieces.get_score(i) for i in ids])
    writer.add_token_types(kinds)
    for add, special in [(writer.add_unk_token_id, 0), (writer.add_bos_token_id, 1), (writer.add_eos_token_id, 2)]:
        add(special)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    expected = [{"text": text, "ids": [1] + (pieces.encode(text) if text else [])} for text in TEXTS if text]
    return pieces.get_piece_size(), expected


def byte_level(writer, pre):
    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = level
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<|end|>"], initial_alphabet=level.alphabet())
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    tokenizer.decoder = decoders.ByteLevel()
    parts = json.loads(tokenizer.to_str())
    vocabulary = sorted(parts["model"]["vocab"], key=parts["model"]["vocab"].get)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in parts["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token == "<|end|>" else 1 for token in vocabulary])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(0)
    return len(vocabulary), [{"text": text, "ids": tokenizer.encode(text).ids} for text in TEXTS]


def record(folder, name, arch, make, kinds, tokens, permuted=False):
    """`kinds` gives a tensor's type by the end of its GGUF name."""
    torch.manual_seed(7)
    random = np.random.default_rng(7)
    path = folder / f"{name}.gguf"
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    vocabulary, texts = tokens(writer)
    model = make(vocabulary).eval().float()
    config = model.config
    layers, experts = config.num_hidden_layers, getattr(config, "num_local_experts", getattr(config, "num_experts", 0))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if arch == gguf.MODEL_ARCH.QWEN3MOE:
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if arch in (gguf.MODEL_ARCH.QWEN3, gguf.MODEL_ARCH.QWEN3MOE):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    names = gguf.get_tensor_name_map(arch, layers)
    state = model.state_dict()
    with torch.no_grad():
        for ours, tensor in state.items():
            if config.tie_word_embeddings and ours == "lm_head.weight":
                continue
            pieces = [(ours, tensor)]
            if ours.endswith("experts.gate_up_proj"):
                gate, up = tensor.chunk(2, dim=1)
                place = ours.removesuffix("gate_up_proj")
                pieces = [(place + "gate_proj.weight", gate), (place + "up_proj.weight", up)]
            elif ours.endswith("experts.down_proj"):
                pieces = [(ours + ".weight", tensor)]
            for piece, part in pieces:
                theirs = names.get_name(piece, try_suffixes=(".weight", ".bias"))
                kind = next((kind for end, kind in kinds.items() if theirs.endswith(end)), TYPE.F32)
                values = part.numpy().copy()
                heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
                heads = next((count for end, count in heads.items() if permuted and f"{end}." in piece), None)
                if heads:
                    values = pairs_together(values, heads)
                data, meant = encoded(values, kind, random)
                writer.add_tensor(theirs, data, raw_dtype=kind)
                part.copy_(torch.from_numpy(pairs_apart(meant, heads) if heads else meant))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    prompt = [int(token) for token in random.integers(3, vocabulary, 12)]
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1].numpy()
        written = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    expected = {"prompt": prompt, "logits": [float(f"{value:.7g}") for value in logits],
                "greedy": written[0, len(prompt):].tolist(), "texts": texts}
    (folder / f"{name}.json").write_text(json.dumps(expected, ensure_ascii=False) + "\n")


def main():
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    common = {"max_position_embeddings": 128, "initializer_range": 0.1, "num_hidden_layers": 1}
    mixed = {"attn_q.weight": TYPE.Q4_K, "attn_k.weight": TYPE.Q6_K, "attn_v.weight": TYPE.Q8_0,
             "attn_output.weight": TYPE.Q4_0, "ffn_gate.weight": TYPE.F16, "ffn_up.weight": TYPE.BF16,
             "ffn_down.weight": TYPE.Q4_K, "token_embd.weight": TYPE.Q6_K}
    llama = lambda vocabulary: LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2,
        rms_norm_eps=1e-5, tie_word_embeddings=True, **common))
    record(folder, "llama", gguf.MODEL_ARCH.LLAMA, llama, mixed, sentence_piece, permuted=True)
    small = {"attn_q.weight": TYPE.Q8_0, "attn_k.weight": TYPE.Q4_0, "ffn_down.weight": TYPE.Q8_0,
             "token_embd.weight": TYPE.F16, "output.weight": TYPE.Q8_0}
    qwen2 = lambda vocabulary: Qwen2ForCausalLM(Qwen2Config(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=False, rope_parameters={"rope_theta": 1e6, "rope_type": "default"}, **common))
    record(folder, "qwen2", gguf.MODEL_ARCH.QWEN2, qwen2, small, lambda writer: byte_level(writer, "gpt-2"))
    stacked = small | {"ffn_gate_exps.weight": TYPE.Q8_0, "ffn_up_exps.weight": TYPE.Q4_0}
    mixtral = lambda vocabulary: MixtralForCausalLM(MixtralConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, rms_norm_eps=1e-5, tie_word_embeddings=False, **common))
    record(folder, "mixtral", gguf.MODEL_ARCH.LLAMA, mixtral, stacked, lambda writer: byte_level(writer, "gpt-2"),
           permuted=True)
    qwen3 = lambda vocabulary: Qwen3ForCausalLM(Qwen3Config(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, tie_word_embeddings=True, **common))
    record(folder, "qwen3", gguf.MODEL_ARCH.QWEN3, qwen3, small, lambda writer: byte_level(writer, "gpt-2"))
    qwen3_moe = lambda vocabulary: Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
        tie_word_embeddings=False, **common))
    record(folder, "qwen3moe", gguf.MODEL_ARCH.QWEN3MOE, qwen3_moe, stacked, lambda writer: byte_level(writer, "gpt-2"))


main()

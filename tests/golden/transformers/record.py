"""Records what transformers itself writes and computes, for crates/models/tests.

    python record.py configs    # configs/<version>/<model type>.json and parameters/<version>.json
    python record.py cases      # one folder per case: a tiny model and what it computes; behind it, only the cases named

Recorded with torch 2.13.0 and transformers 5.22.0 (both commands) and 4.40.2 (`configs`), on a CPU.
"""

import json
import os
import shutil
import sys
import tempfile

os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
import transformers as tf
from safetensors.torch import load_file, save_file

HERE = os.path.dirname(os.path.abspath(__file__))
VERSION = ".".join(tf.__version__.split(".")[:2])

LLAMA = dict(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64)
NEOX = dict(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=64)
BERT = dict(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
OPT = dict(vocab_size=100, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
           max_position_embeddings=64, word_embed_proj_dim=32, dropout=0.0)
GPT2 = dict(vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0)
BLOOM = dict(vocab_size=100, hidden_size=32, n_layer=2, n_head=4)
MIXTRAL = dict(LLAMA, num_local_experts=4)
QWEN2_MOE = dict(LLAMA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24)
OLMOE = dict(LLAMA, num_experts=4, num_experts_per_tok=2, pad_token_id=None, eos_token_id=None)
QWEN3 = dict(LLAMA, head_dim=16)
PHI3 = dict(LLAMA, pad_token_id=0, bos_token_id=1, eos_token_id=2)
SMOLLM3 = dict(LLAMA, pad_token_id=None, bos_token_id=1, eos_token_id=2, no_rope_layers=[0, 1])
OLMO2 = dict(LLAMA, pad_token_id=None, eos_token_id=None)
QWEN3_MOE = dict(LLAMA, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=16, head_dim=16)

FAMILIES = {
    "gpt2": (tf.GPT2Config, tf.GPT2LMHeadModel, GPT2),
    "llama": (tf.LlamaConfig, tf.LlamaForCausalLM, LLAMA),
    "mistral": (tf.MistralConfig, tf.MistralForCausalLM, LLAMA),
    "qwen2": (tf.Qwen2Config, tf.Qwen2ForCausalLM, LLAMA),
    "mixtral": (tf.MixtralConfig, tf.MixtralForCausalLM, MIXTRAL),
    "opt": (tf.OPTConfig, tf.OPTForCausalLM, OPT),
    "gpt_neox": (tf.GPTNeoXConfig, tf.GPTNeoXForCausalLM, NEOX),
    "bloom": (tf.BloomConfig, tf.BloomForCausalLM, BLOOM),
    "bert": (tf.BertConfig, tf.BertForPreTraining, BERT),
}
# Later releases have these.
for family, name, sizes in [("qwen2_moe", "Qwen2Moe", QWEN2_MOE), ("olmoe", "Olmoe", OLMOE),
                            ("qwen3_moe", "Qwen3Moe", QWEN3_MOE), ("qwen3", "Qwen3", QWEN3),
                            ("phi3", "Phi3", PHI3), ("smollm3", "SmolLM3", SMOLLM3), ("olmo2", "Olmo2", OLMO2)]:
    if hasattr(tf, f"{name}Config"):
        FAMILIES[family] = (getattr(tf, f"{name}Config"), getattr(tf, f"{name}ForCausalLM"), sizes)

# Beyond the family's plain model: its class and what its configuration says.
VARIANTS = {
    "llama_bias": (tf.LlamaConfig, tf.LlamaForCausalLM, dict(LLAMA, attention_bias=True)),
    "opt_narrow": (tf.OPTConfig, tf.OPTForCausalLM, dict(OPT, word_embed_proj_dim=16)),
    "opt_post_norm": (tf.OPTConfig, tf.OPTForCausalLM, dict(OPT, do_layer_norm_before=False)),
    "bert_masked": (tf.BertConfig, tf.BertForMaskedLM, BERT),
    "bert_base": (tf.BertConfig, tf.BertModel, BERT),
    "bert_classifier": (tf.BertConfig, tf.BertForSequenceClassification, dict(BERT, num_labels=3)),
}


def write_json(path, value):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        json.dump(value, file, indent=1)
        file.write("\n")


def saved(model):
    """The tensors and the config.json that `save_pretrained` writes."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, safe_serialization=True)
        with open(os.path.join(folder, "config.json")) as file:
            return load_file(os.path.join(folder, "model.safetensors")), json.load(file)


def record_configs():
    parameters = {}
    for name, (config_class, _, _) in FAMILIES.items():
        with tempfile.TemporaryDirectory() as folder:
            config_class().save_pretrained(folder)
            os.makedirs(f"{HERE}/configs/{VERSION}", exist_ok=True)
            shutil.copy(f"{folder}/config.json", f"{HERE}/configs/{VERSION}/{name}.json")
    for name, (config_class, model_class, sizes) in {**FAMILIES, **VARIANTS}.items():
        for tied in [True, False]:
            if "bert" in name and not tied:
                continue
            model = model_class(config_class(**sizes, tie_word_embeddings=tied))
            tensors, config = saved(model)
            parameters[f"{name}{'' if tied else '_untied'}"] = {
                "config": config,
                "in_order": [[key, list(value.shape)] for key, value in model.named_parameters()],
                "in_file": sorted(tensors),
            }
    write_json(f"{HERE}/parameters/{VERSION}.json", parameters)


def rope(**parameters):
    return dict(rope_parameters=parameters)


LONG = dict(max_position_embeddings=8)
CASES = {
    "llama_theta": ("llama", dict(LLAMA, **rope(rope_type="default", rope_theta=500000.0))),
    "llama_linear": ("llama", dict(LLAMA, **rope(rope_type="linear", rope_theta=500000.0, factor=4.0))),
    "llama_dynamic": ("llama", dict(LLAMA, **LONG, **rope(rope_type="dynamic", rope_theta=20000.0, factor=2.0))),
    "llama_llama3": ("llama", dict(LLAMA, **rope(
        rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=16))),
    "llama_yarn": ("llama", dict(LLAMA, **rope(
        rope_type="yarn", rope_theta=50000.0, factor=4.0, original_max_position_embeddings=16))),
    "llama_yarn_options": ("llama", dict(LLAMA, **rope(
        rope_type="yarn", rope_theta=50000.0, factor=4.0, original_max_position_embeddings=16, beta_fast=16.0,
        beta_slow=2.0, mscale=0.7, mscale_all_dim=0.9, truncate=False))),
    "mistral_window": ("mistral", dict(LLAMA, sliding_window=4, **rope(rope_type="default", rope_theta=500000.0))),
    "qwen2_layer_types": ("qwen2", dict(
        LLAMA, use_sliding_window=True, sliding_window=4, layer_types=["sliding_attention", "full_attention"],
        **rope(rope_type="default", rope_theta=1000000.0))),
    "gpt_neox_partial": ("gpt_neox", dict(
        NEOX, **rope(rope_type="default", rope_theta=20000.0, partial_rotary_factor=0.5))),
    "mixtral": ("mixtral", dict(MIXTRAL, **rope(rope_type="default", rope_theta=500000.0))),
    "qwen2_moe": ("qwen2_moe", dict(QWEN2_MOE, output_router_logits=True, router_aux_loss_coef=0.1)),
    "olmoe": ("olmoe", dict(OLMOE, output_router_logits=True, router_aux_loss_coef=0.1)),
    "qwen3_moe": ("qwen3_moe", dict(QWEN3_MOE, norm_topk_prob=True)),
    "qwen3": ("qwen3", dict(QWEN3, tie_word_embeddings=True, attention_bias=True)),
    "qwen3_window": ("qwen3", dict(QWEN3, use_sliding_window=True, sliding_window=4, max_window_layers=1)),
    "phi3": ("phi3", dict(PHI3, sliding_window=5, **rope(
        rope_type="default", rope_theta=20000.0, partial_rotary_factor=0.75))),
    # Twelve tokens take the long divisors, and generation crosses the border.
    "phi3_longrope": ("phi3", dict(PHI3, tie_word_embeddings=True, original_max_position_embeddings=9, **rope(
        rope_type="longrope", rope_theta=10000.0, short_factor=[1.0, 1.1, 1.25, 1.5],
        long_factor=[1.0, 2.0, 4.5, 9.0]))),
    "smollm3": ("smollm3", dict(SMOLLM3, use_sliding_window=True, sliding_window=4)),
    "olmo2": ("olmo2", dict(OLMO2, **rope(rope_type="default", rope_theta=500000.0))),
    "gpt2": ("gpt2", GPT2),
    "opt": ("opt", OPT),
    "bloom": ("bloom", BLOOM),
    "bert_pretraining": ("bert", BERT),
    "bert_masked": ("bert_masked", BERT),
    "bert_base": ("bert_base", BERT),
    "bert_classifier": ("bert_classifier", dict(BERT, num_labels=3)),
}


def randomised(model):
    """Every weight, bias and norm has a value of its own."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            is_norm = value.dim() == 1 and ("norm" in name.lower() or "ln_" in name) and name.endswith("weight")
            value.copy_(1.0 + 0.1 * noise if is_norm else 0.15 * noise)
    model.tie_weights()
    return model


def in_file_names(family, name, value):
    """A parameter's gradient under the names that files use."""
    is_mixtral = family == "mixtral"
    gate_name, up_name, down_name = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    if is_mixtral:
        name = name.replace(".mlp.", ".block_sparse_moe.")
    if name.endswith(".experts.gate_up_proj"):
        place = name.removesuffix("gate_up_proj")
        for expert, both in enumerate(value):
            gate, up = both.chunk(2)
            yield f"{place}{expert}.{gate_name}.weight", gate
            yield f"{place}{expert}.{up_name}.weight", up
    elif name.endswith(".experts.down_proj"):
        place = name.removesuffix("down_proj")
        for expert, down in enumerate(value):
            yield f"{place}{expert}.{down_name}.weight", down
    elif family == "gpt_neox" and name == "lm_head.weight":
        yield "embed_out.weight", value
    else:
        yield name, value


def record_case(name, family, sizes):
    config_class, model_class, _ = {**FAMILIES, **VARIANTS}[family]
    torch.manual_seed(1)
    model = randomised(model_class(config_class(**sizes, attn_implementation="eager"))).float().train()
    folder = f"{HERE}/{name}"
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(3, 100, (2, 12), generator=generator)
    labels = ids.clone()
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    tensors = {"input_ids": ids, "attention_mask_padded": mask}
    inputs = {}
    if "bert" in family:
        inputs["token_type_ids"] = tensors["token_type_ids"] = (torch.arange(12) > 5).long().repeat(2, 1)
        labels[:, ::3] = -100
    if family == "bert_classifier":
        labels = torch.tensor([2, 0])
    if family == "bert":
        tensors["next_sentence_label"] = inputs["next_sentence_label"] = torch.tensor([1, 0])
    output = model(input_ids=ids, output_hidden_states=True,
                   **({} if family == "bert_base" else {"labels": labels}), **inputs)
    facts = {"name": name, "model_class": model_class.__name__, "transformers": tf.__version__,
             "torch": torch.__version__, "dtype": "float32", "attn": "eager"}
    logits = lambda out: out.prediction_logits if family == "bert" else out.logits
    hidden = output.hidden_states
    tensors["hidden_0"], tensors["hidden_1"] = hidden[0], hidden[1]
    if family == "bert_base":
        tensors["hidden_last"], tensors["pooled"] = output.last_hidden_state, output.pooler_output
        loss = output.last_hidden_state.square().mean() + output.pooler_output.square().mean()
    else:
        tensors["labels"], tensors["logits"] = labels, logits(output)
        loss = output.loss
    if family == "bert":
        tensors["seq_relationship_logits"] = output.seq_relationship_logits
    loss.backward()
    facts["loss"] = loss.item()
    norms = {}
    for parameter, value in model.named_parameters():
        if value.grad is None:
            continue
        for key, gradient in in_file_names(family, parameter, value.grad):
            norms[key] = gradient.norm().item()
    facts["grad_norms"] = norms
    facts["grad_global_norm"] = sum(norm * norm for norm in norms.values()) ** 0.5
    inputs.pop("next_sentence_label", None)
    with torch.no_grad():
        model.eval()
        if family == "bert_base":
            tensors["hidden_padded"] = model(input_ids=ids, attention_mask=mask, **inputs).last_hidden_state
        else:
            tensors["logits_padded"] = logits(model(input_ids=ids, attention_mask=mask, **inputs))
        if "bert" not in family:
            facts["generate"] = [greedy(model, ids[:, :6], torch.ones_like(ids[:, :6]))]
    save_file({key: value.detach().contiguous() for key, value in tensors.items()}, f"{folder}/golden.safetensors")
    write_json(f"{folder}/golden.json", facts)


def greedy(model, prompt, mask):
    output = model.generate(prompt, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=None,
                            pad_token_id=0)
    return {"prompt": prompt.tolist(), "attention_mask": mask.tolist(), "max_new_tokens": 12,
            "output": output.tolist()}


if __name__ == "__main__":
    if sys.argv[1:] == ["configs"]:
        record_configs()
    elif sys.argv[1:2] == ["cases"]:
        for name, (family, sizes) in CASES.items():
            if name in sys.argv[2:] or not sys.argv[2:]:
                record_case(name, family, sizes)
    else:
        sys.exit(__doc__)

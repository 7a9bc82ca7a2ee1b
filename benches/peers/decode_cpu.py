#!/usr/bin/env python3
"""llama.cpp on the CPU beside `ferrospeed bench serve`, with the same weights, in turns.

    python3 decode_cpu.py DIR [--ferrospeed PATH] [--threads 2] [--rounds 3] [--types int8,int4,f16]

DIR is a LLaMA of `ferrospeed model init` in float16 (see below); ours computes in bfloat16. Wants `llama-cpp-python` (built from source on this machine: one that was built on another may end by an illegal instruction; GCC 12
takes away what ggml writes into a tile configuration, which ends it at its first product in AMX: build with CXXFLAGS=-fno-tree-dse), `gguf`,
`numpy` and `safetensors`. Leave the machine alone meanwhile: threads of either side that wait for a core stand for seconds. Per type of weights and side: tokens/s of decoding one text, of decoding eight at once, and of reading a prompt of
512 tokens; the best of the rounds. llama.cpp's `print_system_info` is printed, which says what it was built for.

    ferrospeed model init --preset llama --layers 22 --width 2048 --heads 32 --vocabulary 32000 --dtype float16 DIR
"""
import argparse
import ctypes
import json
import os
import subprocess
import time
from pathlib import Path

import gguf
import llama_cpp
import numpy
from safetensors import safe_open

PROMPT, NEW, BATCH = 512, 64, 8
# Our name of a type, llama.cpp's.
TYPES = {"int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "int4": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, "f16": None}


def write_tokenizer(directory):
    """A word per token, since `bench serve` wants a tokenizer and `model init` writes none."""
    tokens = json.loads((directory / "config.json").read_text())["vocab_size"]
    model = {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(tokens)}, "unk_token": "t0"}
    (directory / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))


def turned(weight, heads):
    """Rows of a projection in the order in which llama.cpp turns them: pairs of neighbours."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def write_gguf(directory, path):
    config = json.loads((directory / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("llama")
    tokens = [b"<unk>", b"<s>", b"</s>"] + [f"t{i}".encode() for i in range(3, config["vocab_size"])]
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([2, 3, 3] + [1] * (len(tokens) - 3))
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "numpy") as tensors:
            for name in tensors.keys():
                value = tensors.get_tensor(name)
                if name == "model.embed_tokens.weight":
                    new = "token_embd.weight"
                elif name == "model.norm.weight":
                    new = "output_norm.weight"
                elif name == "lm_head.weight":
                    new = "output.weight"
                else:
                    layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
                    new = f"blk.{layer}.{names[part]}.weight"
                    if part in ("self_attn.q_proj", "self_attn.k_proj"):
                        value = turned(value, heads if "q_proj" in part else kv_heads)
                writer.add_tensor(new, value.astype(numpy.float32 if value.ndim == 1 else numpy.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Peer:
    def __init__(self, path, threads):
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = BATCH * 1024, PROMPT, PROMPT
        options.n_seq_max = BATCH
        options.n_threads = options.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        self.batch = llama_cpp.llama_batch_init(PROMPT, 0, 1)

    def decode(self, rows):
        """Rows are (token, place, sequence, whether logits are wanted)."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, place, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, place, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        assert llama_cpp.llama_decode(self.context, batch) == 0
        llama_cpp.llama_synchronize(self.context)

    def forget(self):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def speeds(self):
        found = {}
        for texts in (1, BATCH):
            self.forget()
            for sequence in range(texts):
                self.decode([(5 + i, i, sequence, i == 7) for i in range(8)])
            begun = time.perf_counter()
            for step in range(NEW):
                self.decode([(9 + step, 8 + step, sequence, True) for sequence in range(texts)])
            found[f"decode {texts}"] = texts * NEW / (time.perf_counter() - begun)
        self.forget()
        begun = time.perf_counter()
        self.decode([(3 + i % 1000, i, 0, i == PROMPT - 1) for i in range(PROMPT)])
        found[f"prompt {PROMPT}"] = PROMPT / (time.perf_counter() - begun)
        return found


def ours(program, directory, kind, threads):
    found = {}
    shared = [program, "bench", "serve", str(directory), "--json", "--cache-mib", "512", "--pass-tokens", str(PROMPT), "--device", "cpu"]
    shared += ["--dtype", "bfloat16"] + ([] if kind == "f16" else ["--quantize", kind])
    environment = {**os.environ, "FERROSPEED_THREADS": str(threads)}

    def run(*more):
        text = subprocess.run([*shared, *more], check=True, capture_output=True, env=environment).stdout
        return json.loads(text)

    for texts in (1, BATCH):
        report = run("--requests", str(texts), "--prompt-tokens", "8", "--new-tokens", str(NEW))
        found[f"decode {texts}"] = texts / (report["between_tokens_ms"]["p50"] / 1e3)
    report = run("--requests", "1", "--prompt-tokens", str(PROMPT), "--new-tokens", "1")
    found[f"prompt {PROMPT}"] = PROMPT / (report["first_token_ms"]["p50"] / 1e3)
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ferrospeed", default="ferrospeed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--types", default="int8,int4,f16")
    arguments = parser.parse_args()
    llama_cpp.llama_backend_init()
    print(llama_cpp.llama_print_system_info().decode())
    quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    llama_cpp.llama_log_set(quiet, None)
    if not (arguments.directory / "tokenizer.json").exists():
        write_tokenizer(arguments.directory)
    base = arguments.directory / "f16.gguf"
    if not base.exists():
        write_gguf(arguments.directory, base)
    for kind in arguments.types.split(","):
        path = base
        if TYPES[kind] is not None:
            path = arguments.directory / f"{kind}.gguf"
            if not path.exists():
                options = llama_cpp.llama_model_quantize_default_params()
                options.ftype, options.nthread = TYPES[kind], arguments.threads
                # Ours stay whole too: tables are looked up, and heads are packed on both sides.
                assert llama_cpp.llama_model_quantize(str(base).encode(), str(path).encode(), options) == 0
        best = {"ours": {}, "theirs": {}}
        for _ in range(arguments.rounds):
            peer = Peer(path, arguments.threads)
            for side, speeds in (("theirs", peer.speeds()), ("ours", ours(arguments.ferrospeed, arguments.directory, kind, arguments.threads))):
                for case, speed in speeds.items():
                    best[side][case] = max(best[side].get(case, 0.0), speed)
            del peer
        for case, speed in best["ours"].items():
            other = best["theirs"][case]
            print(f"{kind:5} {case:11} ferrospeed {speed:8.1f} tokens/s  llama.cpp {other:8.1f}  {speed / other:.2f} x")


main()

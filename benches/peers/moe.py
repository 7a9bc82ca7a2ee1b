#!/usr/bin/env python3
"""Mixtures of experts in PyTorch, beside `ferrospeed bench gpu --model mixtral-8x2,mixtral-64x8` and `ferrospeed bench model --only
mixtral`. Prints one JSON object per case.

    python3 moe.py [--model mixtral-8x2,mixtral-64x8] [--mode eager,compile]      on a GPU: sorted tokens and grouped products
    python3 moe.py --cpu [--threads 2] [--dtype f32,bf16] [--repeats 5]           on the CPU: transformers' Mixtral, and a dense
                                                                                 model of the same active size

On a GPU the experts of a layer are three stacks of bf16 weights with f32 master weights in AdamW (fused), tokens are sorted by
expert and multiplied by torch._grouped_mm, and no token is dropped: the fastest way that plain PyTorch has. Attention is SDPA's.
"""

import argparse
import json
import resource
import time

import torch
import torch.nn.functional as F
from torch import nn

# layers, width, heads, experts, chosen, inner, vocabulary, batch, tokens
GPU_CASES = {
    "mixtral-8x2": (12, 1024, 16, 8, 2, 2816, 32000, 4, 2048),
    "mixtral-64x8": (12, 1024, 16, 64, 8, 704, 32000, 4, 2048),
}
# The cases of `ferrospeed bench model`: the dense one has as many active channels as two experts.
CPU_CASES = {
    "train mixtral-6x512 4x256": dict(layers=6, width=512, experts=8, chosen=2, inner=704, vocabulary=8192, batch=4, tokens=256),
    "train llama-6x512 4x256": dict(layers=6, width=512, inner=1408, vocabulary=8192, batch=4, tokens=256),
}


def rotated(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Experts(nn.Module):
    def __init__(self, width, experts, chosen, inner):
        super().__init__()
        self.experts, self.chosen = experts, chosen
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, 2 * inner))
        self.down = nn.Parameter(torch.empty(experts, inner, width))

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        logits = F.linear(x.float(), self.gate.weight.float())
        weights, chosen = logits.softmax(-1).topk(self.chosen, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        experts, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(experts, torch.arange(1, self.experts + 1, device=x.device)).to(torch.int32)
        tokens = order // self.chosen
        rows = x[tokens]
        gate, up = torch._grouped_mm(rows, self.up, offs=ends).chunk(2, -1)
        made = torch._grouped_mm(F.silu(gate) * up, self.down, offs=ends)
        made = made * weights.flatten()[order].unsqueeze(-1).to(made.dtype)
        return torch.zeros_like(x).index_add(0, tokens, made).view(shape)


class Block(nn.Module):
    def __init__(self, width, heads, experts, chosen, inner):
        super().__init__()
        self.heads, self.dim = heads, width // heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.moe = Experts(width, experts, chosen, inner)

    def forward(self, x, cos, sin):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, self.dim).transpose(1, 2) for y in self.qkv(self.norm_1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, c))
        return x + self.moe(self.norm_2(x))


class Model(nn.Module):
    def __init__(self, layers, width, heads, experts, chosen, inner, vocabulary, tokens):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, experts, chosen, inner) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, vocabulary, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
        dim = width // heads
        angles = torch.outer(torch.arange(tokens), 10000.0 ** (-torch.arange(0, dim, 2) / dim))
        angles = torch.cat((angles, angles), -1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids):
        x = self.embedding(ids)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def on_gpu(name, mode, steps):
    layers, width, heads, experts, chosen, inner, vocabulary, batch, tokens = GPU_CASES[name]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(1)
    model = Model(layers, width, heads, experts, chosen, inner, vocabulary, tokens).cuda().bfloat16()
    weights = list(model.parameters())
    masters = [p.detach().float() for p in weights]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    run = torch.compile(model) if mode == "compile" else model
    ids = torch.randint(0, vocabulary, (batch, tokens), device="cuda")

    def step():
        loss = run(ids)
        loss.backward()
        for master, weight in zip(masters, weights):
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        for master in masters:
            master.grad = None
        return loss

    for _ in range(5):
        loss = step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        loss = step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / steps
    return dict(case=name, mode=mode, tokens_per_s=batch * tokens / seconds, step_ms=1e3 * seconds,
                peak_bytes=torch.cuda.max_memory_allocated(), loss=loss.item())


def on_cpu(name, dtype, threads, repeats):
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    case = CPU_CASES[name]
    common = dict(vocab_size=case["vocabulary"], hidden_size=case["width"], num_hidden_layers=case["layers"],
                  num_attention_heads=case["width"] // 64, num_key_value_heads=case["width"] // 64,
                  intermediate_size=case["inner"], max_position_embeddings=1024, tie_word_embeddings=False)
    if "experts" in case:
        config = MixtralConfig(**common, num_local_experts=case["experts"], num_experts_per_tok=case["chosen"], sliding_window=None)
        model = MixtralForCausalLM(config)
    else:
        model = LlamaForCausalLM(LlamaConfig(**common))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    count = case["batch"] * case["tokens"]
    ids = ((torch.arange(count) * 7919 + 13) % case["vocabulary"]).view(case["batch"], case["tokens"])

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    seconds = []
    for repeat in range(repeats + 2):
        began = time.perf_counter()
        step()
        if repeat >= 2:
            seconds.append(time.perf_counter() - began)
    return dict(case=name, dtype=dtype, threads=threads, tokens_per_s=count / min(seconds), best_s=min(seconds),
                median_s=sorted(seconds)[len(seconds) // 2],
                peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=",".join(GPU_CASES))
    parser.add_argument("--mode", default="eager,compile")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="f32")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.cpu:
        for name in CPU_CASES:
            for dtype in args.dtype.split(","):
                print(json.dumps(on_cpu(name, dtype, args.threads, args.repeats)), flush=True)
        return
    for name in args.model.split(","):
        for mode in args.mode.split(","):
            print(json.dumps(on_gpu(name, mode, args.steps)), flush=True)


if __name__ == "__main__":
    main()

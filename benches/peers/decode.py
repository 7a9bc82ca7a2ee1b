#!/usr/bin/env python3
"""Greedy decoding of a LLaMA shape in plain PyTorch, for comparison with `ferrospeed bench serve --device cuda`.

Random bf16 weights, projections of queries, keys and values and of gate and up fused, a static cache, and a step compiled with
mode="reduce-overhead" (CUDA graphs). Prints tokens per second of all sequences together, and the bound that reading weights
and cache sets.

    python benches/peers/decode.py [--shape 1.1b|8b] [--batch 1,64] [--context 1024] [--tokens 64]
"""
import argparse
import time

import torch
import torch.nn.functional as F

SHAPES = {
    "1.1b": dict(layers=22, width=2048, heads=32, kv_heads=4, inner=5632, vocabulary=32000),
    "8b": dict(layers=32, width=4096, heads=32, kv_heads=8, inner=14336, vocabulary=128256),
}


class Block(torch.nn.Module):
    def __init__(self, width, heads, kv_heads, inner, batch, room):
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, width // heads
        self.qkv = torch.nn.Linear(width, (heads + 2 * kv_heads) * self.dim, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.gate_up = torch.nn.Linear(width, 2 * inner, bias=False)
        self.down = torch.nn.Linear(inner, width, bias=False)
        self.norms = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(width)) for _ in range(2)])
        shape = (batch, kv_heads, room, self.dim)
        self.register_buffer("keys", torch.randn(shape))
        self.register_buffer("values", torch.randn(shape))

    def forward(self, x, cos, sin, place, mask):
        batch = x.shape[0]
        h = F.rms_norm(x, (x.shape[-1],), self.norms[0], 1e-5)
        q, k, v = self.qkv(h).view(batch, 1, -1, self.dim).transpose(1, 2).split(
            [self.heads, self.kv_heads, self.kv_heads], dim=1)
        turn = lambda t: t * cos + torch.cat([-t[..., self.dim // 2:], t[..., :self.dim // 2]], -1) * sin  # noqa: E731
        q, k = turn(q), turn(k)
        self.keys.index_copy_(2, place, k)
        self.values.index_copy_(2, place, v)
        mixed = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, 1, -1))
        h = F.rms_norm(x, (x.shape[-1],), self.norms[1], 1e-5)
        gate, up = self.gate_up(h).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Model(torch.nn.Module):
    def __init__(self, layers, width, heads, kv_heads, inner, vocabulary, batch, room):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.blocks = torch.nn.ModuleList([Block(width, heads, kv_heads, inner, batch, room) for _ in range(layers)])
        self.norm = torch.nn.Parameter(torch.ones(width))
        self.head = torch.nn.Linear(width, vocabulary, bias=False)
        dim = width // heads
        angles = torch.outer(torch.arange(room), 10000 ** (-torch.arange(0, dim, 2) / dim))
        self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1))
        self.register_buffer("sin", torch.cat([angles.sin()] * 2, -1))
        self.register_buffer("places", torch.arange(room))

    def forward(self, ids, place):
        x = self.embedding(ids)
        cos, sin = self.cos[place], self.sin[place]
        mask = (self.places <= place)[None, None, None, :]
        for block in self.blocks:
            x = block(x, cos, sin, place, mask)
        x = F.rms_norm(x, (x.shape[-1],), self.norm, 1e-5)
        return self.head(x).argmax(-1)


@torch.inference_mode()
def measure(shape, batch, context, tokens):
    torch.manual_seed(0)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = Model(**SHAPES[shape], batch=batch, room=context + tokens + 16)
    model.cos, model.sin = model.cos.bfloat16(), model.sin.bfloat16()
    step = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    ids = torch.zeros(batch, 1, dtype=torch.long, device="cuda")
    place = torch.tensor([context], device="cuda")
    for _ in range(8):
        ids = step(ids, place).clone()
        place += 1
    best = float("inf")
    for _ in range(3):
        place.fill_(context)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(tokens):
            ids = step(ids, place).clone()
            place += 1
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - begun) / tokens)
    weights = sum(p.numel() * 2 for name, p in model.named_parameters() if "embedding" not in name)
    cache = sum(2 * b.keys.numel() * 2 for b in model.blocks) * context / (context + tokens + 16)
    print(f"{shape} batch {batch} context {context}: {batch / best:.0f} tokens/s, {best * 1e3:.3f} ms a step; "
          f"reads {(weights + cache) / 1e9:.2f} GB, {(weights + cache) / best / 1e12:.2f} TB/s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1.1b", choices=SHAPES)
    parser.add_argument("--batch", default="1,64")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    for batch in args.batch.split(","):
        measure(args.shape, int(batch), args.context, args.tokens)


if __name__ == "__main__":
    main()

"""The models of `ferrospeed bench gpu` in PyTorch: GPT-2 shapes, 1,024 tokens, AdamW, clipping, bf16 autocast over f32
weights. Prints one JSON object per case.

    python3 gpu.py [--model 124m,350m,1.3b] [--mode eager,compile] [--steps 20]
"""

import argparse
import json
import time

import torch
import torch.nn.functional as F
from torch import nn

CASES = {"124m": (12, 768, 12, 32), "350m": (24, 1024, 16, 16), "1.3b": (24, 2048, 16, 8)}
VOCABULARY, TOKENS = 50304, 1024


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, layers, width, heads):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def run(name, mode, steps):
    layers, width, heads, batch = CASES[name]
    torch.manual_seed(1)
    model = Gpt(layers, width, heads).cuda()
    loss_of = torch.compile(model) if mode == "compile" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    ids = torch.randint(0, VOCABULARY, (batch, TOKENS), device="cuda")

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of(ids)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    median = sorted(times)[len(times) // 2]
    print(json.dumps({
        "case": f"train {name}", "peer": f"torch {torch.__version__} {mode}", "tokens_per_s": batch * TOKENS / median,
        "median_ms": median * 1e3, "peak_bytes": torch.cuda.max_memory_allocated(),
    }), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="124m,350m,1.3b")
    parser.add_argument("--mode", default="eager,compile")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    for name in args.model.split(","):
        for mode in args.mode.split(","):
            run(name, mode, args.steps)
            torch.cuda.empty_cache()

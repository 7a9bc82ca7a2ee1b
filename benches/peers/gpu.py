"""The models of `ferrospeed bench gpu` in PyTorch: AdamW, clipping, bf16 autocast over f32 weights, or with
`--weights bf16` bf16 weights and f32 master weights as Ferrospeed has them. Prints one JSON object per case. Attention is
the fastest of SDPA's backends for the shape, and the line names it.

    python3 gpu.py [--model 124m,llama-1.1b] [--mode eager,compile,max] [--tokens 2048] [--batch 4] [--checkpointing]
    python3 gpu.py --attention 2048,8192
"""

import argparse
import contextlib
import json
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

# family, layers, width, heads, key heads, inner, vocabulary, batch, tokens
CASES = {
    "124m": ("gpt2", 12, 768, 12, 12, 3072, 50304, 32, 1024),
    "350m": ("gpt2", 24, 1024, 16, 16, 4096, 50304, 16, 1024),
    "1.3b": ("gpt2", 24, 2048, 16, 16, 8192, 50304, 8, 1024),
    "llama-350m": ("llama", 24, 1024, 16, 16, 2752, 32000, 8, 2048),
    "llama-1.1b": ("llama", 22, 2048, 32, 4, 5632, 32000, 4, 2048),
    "llama-3b": ("llama", 28, 3072, 24, 8, 8192, 32000, 2, 2048),
    "qwen2-1.5b": ("qwen2", 28, 1536, 12, 2, 8960, 32000, 4, 2048),
    "neox-1.4b": ("neox", 24, 2048, 16, 16, 8192, 50304, 4, 2048),
}
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def rotated(x, cos, sin):
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    a, b = turned.chunk(2, -1)
    return torch.cat((turned * cos + torch.cat((-b, a), -1) * sin, rest), -1)


class Block(nn.Module):
    def __init__(self, family, width, heads, kv_heads, inner):
        super().__init__()
        self.family, self.heads, self.kv_heads, self.dim = family, heads, kv_heads, width // heads
        plain = family in ("gpt2", "neox")
        norm = nn.LayerNorm if plain else (lambda w: nn.RMSNorm(w, eps=1e-5))
        self.ln_1, self.ln_2 = norm(width), norm(width)
        bias = family != "llama"
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.dim, bias=bias)
        self.proj = nn.Linear(width, width, bias=plain)
        self.up = nn.Linear(width, inner if plain else 2 * inner, bias=plain)
        self.down = nn.Linear(inner, width, bias=plain)

    def attend(self, x, cos, sin):
        b, t, c = x.shape
        sizes = [self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim]
        q, k, v = (y.view(b, t, -1, self.dim).transpose(1, 2) for y in self.qkv(x).split(sizes, -1))
        if cos is not None:
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return self.proj(mixed.transpose(1, 2).reshape(b, t, c))

    def feed(self, x):
        if self.family in ("gpt2", "neox"):
            return self.down(F.gelu(self.up(x), approximate="tanh" if self.family == "gpt2" else "none"))
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)

    def forward(self, x, cos, sin):
        if self.family == "neox":
            return x + self.attend(self.ln_1(x), cos, sin) + self.feed(self.ln_2(x))
        x = x + self.attend(self.ln_1(x), cos, sin)
        return x + self.feed(self.ln_2(x))


class Model(nn.Module):
    def __init__(self, family, layers, width, heads, kv_heads, inner, vocabulary, tokens, checkpointing):
        super().__init__()
        self.family, self.checkpointing = family, checkpointing
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(tokens, width) if family == "gpt2" else None
        self.blocks = nn.ModuleList(Block(family, width, heads, kv_heads, inner) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width) if family in ("gpt2", "neox") else nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if family == "gpt2":
            self.head.weight = self.wte.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
        turned = width // heads // (4 if family == "neox" else 1)
        angles = torch.outer(torch.arange(tokens), 10000.0 ** (-torch.arange(0, turned, 2) / turned))
        angles = torch.cat((angles, angles), -1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids):
        x = self.wte(ids)
        cos, sin = (None, None) if self.family == "gpt2" else (self.cos.to(torch.bfloat16), self.sin.to(torch.bfloat16))
        if self.wpe is not None:
            x = x + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False) if self.checkpointing else block(x, cos, sin)
        logits = self.head(self.ln_f(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def seconds_of(work, repeats):
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def attention(batch, tokens, heads, kv_heads, dim, causal=True):
    """Forward and backward of every backend that takes the shape: {name: (forward seconds, both)}."""
    make = lambda h: torch.randn(batch, h, tokens, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    q, k, v = make(heads), make(kv_heads), make(kv_heads)
    gradient = torch.randn_like(q)
    found = {}
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                forward = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)
                alone = seconds_of(forward, 5)
                both = seconds_of(lambda: torch.autograd.grad(forward(), (q, k, v), gradient), 5)
            found[name] = (alone, both)
        except RuntimeError:
            pass
    return found


def run(name, mode, args):
    family, layers, width, heads, kv_heads, inner, vocabulary, batch, tokens = CASES[name]
    batch, tokens = args.batch or batch, args.tokens or tokens
    timed = attention(batch, tokens, heads, kv_heads, width // heads)
    best = min(timed, key=lambda backend: timed[backend][1])
    torch.cuda.empty_cache()
    torch.manual_seed(1)
    model = Model(family, layers, width, heads, kv_heads, inner, vocabulary, tokens, args.checkpointing).cuda()
    if args.weights == "bf16":
        model = model.to(torch.bfloat16)
        masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    else:
        masters = list(model.parameters())
    modes = {"eager": lambda m: m, "compile": torch.compile}
    modes["max"] = lambda m: torch.compile(m, mode="max-autotune-no-cudagraphs")
    loss_of = modes[mode](model)
    optimizer = torch.optim.AdamW(masters, lr=1e-4, weight_decay=0.01, fused=True)
    ids = torch.randint(0, vocabulary, (batch, tokens), device="cuda")

    def step():
        cast = torch.autocast("cuda", dtype=torch.bfloat16) if args.weights == "f32" else contextlib.nullcontext()
        with cast, sdpa_kernel(BACKENDS[best]):
            loss = loss_of(ids)
            loss.backward()
        if args.weights == "bf16":
            for master, p in zip(masters, model.parameters()):
                master.grad, p.grad = p.grad.float(), None
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if args.weights == "bf16":
            with torch.no_grad():
                torch._foreach_copy_(list(model.parameters()), masters)

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    median = seconds_of(step, args.steps)
    print(json.dumps({
        "case": f"train {name}", "peer": f"torch {torch.__version__} {mode}, {args.weights} weights, {best} attention",
        "batch": batch, "tokens": tokens, "checkpointing": args.checkpointing, "tokens_per_s": batch * tokens / median,
        "median_ms": median * 1e3, "peak_bytes": torch.cuda.max_memory_allocated(),
    }), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="124m,350m,1.3b")
    parser.add_argument("--mode", default="eager,compile")
    parser.add_argument("--weights", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--attention", help="time attention alone at these numbers of tokens")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    if args.attention:
        for tokens in map(int, args.attention.split(",")):
            for heads, kv_heads, dim in ((32, 32, 64), (32, 8, 64), (32, 8, 128)):
                for backend, (forward, both) in attention(1, tokens, heads, kv_heads, dim).items():
                    print(json.dumps({
                        "case": f"attention {heads}/{kv_heads} x {dim}", "peer": f"torch {torch.__version__} {backend}",
                        "tokens": tokens, "forward_ms": forward * 1e3, "both_ms": both * 1e3,
                    }), flush=True)
        raise SystemExit
    for name in args.model.split(","):
        for mode in args.mode.split(","):
            run(name, mode, args)
            torch.cuda.empty_cache()

#!/usr/bin/env python3
"""Fused operations, forward and backward, in PyTorch eager: the cases of `ferrospeed bench ops --json`."""

import kernels_common as common
import torch
import torch.nn.functional as F

HEADS, DIM, WIDTH, VOCABULARY, TOKENS = 12, 64, 768, 50257, 4096


def there_and_back(inputs, op):
    held = {}

    def run():
        leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
        y = op(*leaves)
        if y.numel() == 1:
            y.backward()
            return
        if "gradient" not in held:
            held["gradient"] = torch.randn(y.shape).to(y.dtype)
        y.backward(held["gradient"])

    return run


def ids(count, limit):
    return (torch.arange(count) * 7919 + 13) % limit


def cases(dtype, only):
    def random(*shape):
        return torch.randn(*shape).to(dtype)

    def attention(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    def rms_norm(x, weight):
        return F.rms_norm(x, (WIDTH,), weight, 1e-5)

    def loss(x, weight, targets):
        return F.cross_entropy(F.linear(x, weight).float(), targets)

    rows = 1024
    table = []
    for length in (256, 512, 1024, 2048):
        batch = 2048 // length
        flops = 7.0 * batch * HEADS * length * length * DIM
        part = lambda batch=batch, length=length: random(batch, length, HEADS, DIM)
        table.append((f"attention {batch}x{length}", flops, lambda part=part: [part(), part(), part()], attention))
    table += [
        ("layer_norm 4096x768", 0.0, lambda: [random(TOKENS, WIDTH), random(WIDTH), random(WIDTH)],
         lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b, 1e-5)),
        ("rms_norm 4096x768", 0.0, lambda: [random(TOKENS, WIDTH), random(WIDTH)], rms_norm),
        ("gelu 4096x3072", 0.0, lambda: [random(TOKENS, 4 * WIDTH)], lambda x: F.gelu(x, approximate="tanh")),
        ("swiglu 4096x2048", 0.0, lambda: [random(TOKENS, 2048), random(TOKENS, 2048)], lambda g, u: F.silu(g) * u),
        ("embedding 50257x768", 0.0, lambda: [random(VOCABULARY, WIDTH), ids(TOKENS, VOCABULARY)],
         lambda table, index: F.embedding(index, table)),
        ("linear_cross_entropy 1024x50257", 6.0 * rows * WIDTH * VOCABULARY,
         lambda: [random(rows, WIDTH), random(VOCABULARY, WIDTH) * 0.02, ids(rows, VOCABULARY)], loss),
    ]
    for name, flops, inputs, op in table:
        if only in name:
            yield name, flops, there_and_back(inputs(), op)


if __name__ == "__main__":
    common.main(cases)

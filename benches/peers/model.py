#!/usr/bin/env python3
"""Whole training steps and generation in PyTorch: the cases of `ferrospeed bench model`, one JSON object per line.

Training is eager PyTorch on the GPT-2 of transformers (scaled-dot-product attention, no dropout), AdamW (fused) and
clipping; bf16 is autocast over f32 weights, as PyTorch trains on CPUs. Generation is transformers' `generate`, greedy,
with its cache; bf16 casts the weights. Every case runs in a process of its own, so that its peak memory is its own.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

CASES = {
    "train gpt2-124m 2x512": dict(layers=12, width=768, vocabulary=50257, batch=2, tokens=512),
    "train gpt2-6x512 4x256": dict(layers=6, width=512, vocabulary=8192, batch=4, tokens=256),
    "generate gpt2-124m 64 tokens": dict(layers=12, width=768, vocabulary=50257, prompt=32, tokens=64),
}


def build(case):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(42)
    config = GPT2Config(
        vocab_size=case["vocabulary"], n_embd=case["width"], n_layer=case["layers"], n_head=case["width"] // 64,
        n_positions=1024, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=None,
        attn_implementation="sdpa",
    )
    return GPT2LMHeadModel(config)


def train(case, dtype):
    import torch

    model = build(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    count = case["batch"] * case["tokens"]
    ids = (torch.arange(count) * 7919 + 13) % case["vocabulary"]
    ids = ids.view(case["batch"], case["tokens"])

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step, count


def generate(case, dtype):
    import torch

    model = build(case).eval()
    if dtype == "bf16":
        model = model.bfloat16()
    ids = (torch.arange(case["prompt"]) * 31 % 256).view(1, -1)

    def speak():
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=case["tokens"],
                           min_new_tokens=case["tokens"], do_sample=False, use_cache=True, pad_token_id=0)

    return speak, case["tokens"]


def measure(name, dtype, threads, repeats):
    import torch

    torch.set_num_threads(threads)
    case = CASES[name]
    run, tokens = (train if "batch" in case else generate)(case, dtype)
    for _ in range(2):
        run()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    seconds.sort()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    row = dict(case=name, dtype=dtype, threads=threads, tokens_per_s=tokens / seconds[0], best_s=seconds[0],
               median_s=seconds[len(seconds) // 2], peak_rss_bytes=peak)
    print(json.dumps(row), flush=True)


def compare(ours_path, peer_path):
    """Prints our tokens per second over the peer's, and our peak memory over the peer's, for every case of both."""

    def read(path):
        best = {}
        for row in (json.loads(line) for line in open(path) if line.strip()):
            key = (row["case"], row["dtype"], row["threads"])
            if "tokens_per_s" in row and (key not in best or row["best_s"] < best[key]["best_s"]):
                best[key] = row
        return best

    ours, peer = read(ours_path), read(peer_path)
    print("tokens/s of the best run, Ferrospeed and PyTorch; above 1, Ferrospeed is faster. Peak memory: below 1, it needs less")
    for key, row in ours.items():
        if key not in peer:
            continue
        other = peer[key]
        share = f"  {100 * row['share_of_gemm_peak']:.0f} % of the peak" if "share_of_gemm_peak" in row else ""
        print(f"  {key[0]:<30} {key[1]:<5} {key[2]} threads  {row['tokens_per_s']:8.1f} {other['tokens_per_s']:8.1f}  "
              f"ratio {row['tokens_per_s'] / other['tokens_per_s']:5.2f}   {row['peak_rss_bytes'] / 2**20:6.0f} and "
              f"{other['peak_rss_bytes'] / 2**20:6.0f} MiB  ratio {row['peak_rss_bytes'] / other['peak_rss_bytes']:4.2f}{share}")
        for cost in row.get("costs", [])[:3]:
            print(f"      {cost['part']:<28} {1e3 * cost['seconds']:8.1f} ms  {100 * cost['share']:3.0f} % of the step")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", default="2")
    parser.add_argument("--dtype", default="f32,bf16")
    parser.add_argument("--only", default="")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compare", nargs=2, metavar=("OURS", "PEER"))
    args = parser.parse_args()
    if args.compare:
        return compare(*args.compare)
    for name in CASES:
        if args.only not in name:
            continue
        for dtype in args.dtype.split(","):
            for threads in map(int, args.threads.split(",")):
                if args.here:
                    measure(name, dtype, threads, args.repeats)
                else:
                    command = [sys.executable, __file__, "--here", "--only", name, "--dtype", dtype]
                    command += ["--threads", str(threads), "--repeats", str(args.repeats)]
                    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()

"""What gemm.py and ops.py share: the command line, the clock, and the comparison with `ferrospeed bench`."""

import argparse
import json
import math
import sys
import time


def measure(run, budget_s):
    """Best and median seconds of a run, as `ferrospeed bench` takes them."""
    run()
    run()
    seconds = []
    start = time.perf_counter()
    while len(seconds) < 3 or time.perf_counter() - start < budget_s:
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    seconds.sort()
    return seconds[0], seconds[len(seconds) // 2]


def main(cases):
    import torch

    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--dtype", default="f32,bf16")
    parser.add_argument("--only", default="")
    parser.add_argument("--case_ms", type=int, default=300)
    args = parser.parse_args()
    types = {"f32": torch.float32, "bf16": torch.bfloat16}
    for threads in map(int, args.threads.split(",")):
        torch.set_num_threads(threads)
        for dtype in args.dtype.split(","):
            for name, flops, run in cases(types[dtype], args.only):
                best_s, median_s = measure(run, args.case_ms / 1e3)
                row = {"case": name, "dtype": dtype, "threads": threads, "best_s": best_s, "median_s": median_s,
                       "gflops": flops / best_s / 1e9}
                print(json.dumps(row), flush=True)


def compare(ours_path, peer_path, label):
    """Prints peer's time over ours for every case both measured, and geometric means: above 1, Ferrospeed is faster."""

    def read(path):
        rows = (json.loads(line) for line in open(path) if line.strip())
        best = {}
        for row in rows:
            key = (row["case"], row["dtype"], row["threads"])
            if key not in best or row["best_s"] < best[key]["best_s"]:
                best[key] = row
        return best

    ours, peer = read(ours_path), read(peer_path)
    groups = {}
    print(f"{label}: times of the best run; ratio above 1 means Ferrospeed is faster than PyTorch")
    for key, row in ours.items():
        if key not in peer:
            continue
        ratio = peer[key]["best_s"] / row["best_s"]
        kind = "decoding " if key[0].startswith("decode ") else ""
        groups.setdefault((kind, *key[1:]), []).append(ratio)
        rate = f"{row['gflops']:8.0f} and {peer[key]['gflops']:8.0f} GFLOP/s" if row["gflops"] else ""
        print(f"  {key[0]:<34} {key[1]:<5} {key[2]} threads  {row['best_s'] * 1e3:9.3f} ms  "
              f"{peer[key]['best_s'] * 1e3:9.3f} ms  ratio {ratio:5.2f}  {rate}")
    for (kind, dtype, threads), ratios in sorted(groups.items()):
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"  geometric mean {kind}{dtype} on {threads} threads: {mean:.2f} (worst {min(ratios):.2f})")


if __name__ == "__main__":
    compare(*sys.argv[1:4])

#!/usr/bin/env python3
"""Training steps of several ranks in Ferrospeed and DeepSpeed, side by side, as ratios.

    cargo build --release -p ferrospeed-cli
    /path/to/python benches/peers/engine.py [--rounds N] [--repeats N] [--dtype f32,bf16]

The interpreter needs DeepSpeed and PyTorch; FERROSPEED names the binary (default target/release/ferrospeed). Both
sides train the GPT-2 of 6 blocks of width 512 with a vocabulary of 8192 on 4 sequences of 256 tokens per rank: 2 ranks
on this host, one thread each, AdamW, clipping, no dropout. DeepSpeed talks over Gloo and keeps its default knobs; its
model is that of transformers with scaled-dot-product attention. The two take turns, in stage 0 too, which has no goal:
a processor that has just worked hard may be slower for a while, so each case of one side follows one of the other. For
each case the fastest step of all rounds counts, which is the one that the machine's other work disturbed least; the
ratio of the medians of the better rounds is printed beside it. Every case is a launch of its own: its memory (the most
resident memory of a rank) and its time from the launch to the first step are its own.
"""

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time

RANKS, LAYERS, WIDTH, VOCABULARY, BATCH, TOKENS = 2, 6, 512, 8192, 4, 256
GOALS = {"f32": 1.4, "bf16": 3.0}
RSS_GOAL, LAUNCH_GOAL_S = 0.3, 1.0
OVERHEAD_GOALS = {2: 0.05, 3: 0.15}


def peer_rank(args):
    """One rank of DeepSpeed."""
    import torch

    torch.set_num_threads(1)
    import deepspeed
    from transformers import GPT2Config, GPT2LMHeadModel

    stage, dtype = args.stage, args.dtype
    deepspeed.init_distributed("gloo")
    torch.manual_seed(42)
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=WIDTH // 64, n_positions=1024, embd_pdrop=0.0,
        attn_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=None, attn_implementation="sdpa",
    ))
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        # Its own Adam is compiled at the first run, which would count as the launch, so torch's is used.
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01, "torch_adam": True}},
        "steps_per_print": 1 << 30,
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    ids = ((torch.arange(BATCH * TOKENS) * 7919 + 13) % VOCABULARY).view(BATCH, TOKENS)

    def step():
        began = time.perf_counter()
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return time.perf_counter() - began

    launched_s = time.time() - args.launched
    first_s = step()
    step()
    seconds = sorted(step() for _ in range(args.repeats))
    peak = torch.tensor([float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)])
    torch.distributed.all_reduce(peak, torch.distributed.ReduceOp.MAX)
    if torch.distributed.get_rank() == 0:
        median_s = seconds[len(seconds) // 2]
        row = dict(dtype=dtype, stage=stage, ranks=RANKS, threads=1, best_s=seconds[0], median_s=median_s,
                   tokens_per_s=RANKS * BATCH * TOKENS / median_s, launch_to_first_step_s=launched_s,
                   first_step_s=first_s, peak_rss_bytes=peak.item())
        with open(args.out, "w") as file:
            json.dump(row, file)


def run_peer(stage, dtype, repeats):
    """Launches the ranks as DeepSpeed's launcher does on one host, and waits."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = os.path.join(folder, "row.json"), os.path.join(folder, "log")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        launched = time.time()
        command = [sys.executable, __file__, "--rank", "--stage", str(stage), "--dtype", dtype]
        command += ["--repeats", str(repeats), "--launched", str(launched), "--out", out]
        # What DeepSpeed compiles (once; later launches find it) needs ninja, which lies beside the interpreter.
        path = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")
        ranks = []
        with open(log, "w") as sink:
            for rank in range(RANKS):
                env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS),
                           MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DS_ACCELERATOR="cpu",
                           PATH=path, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
                ranks.append(subprocess.Popen(command, env=env, stdout=sink, stderr=sink))
            codes = [rank.wait() for rank in ranks]
        # Its threads sometimes abort a rank that is ending, after all was measured.
        if any(codes) and not os.path.exists(out):
            sys.exit(f"DeepSpeed stage {stage} {dtype} failed ({codes}):\n" + open(log).read()[-4000:])
        return json.load(open(out))


def run_ours(binary, stage, dtype, repeats):
    command = [binary, "bench", "engine", "--json", "--stage", str(stage), "--dtype", dtype, "--ranks", str(RANKS)]
    command += ["--layers", str(LAYERS), "--width", str(WIDTH), "--vocabulary", str(VOCABULARY)]
    command += ["--batch", str(BATCH), "--tokens", str(TOKENS), "--repeats", str(repeats)]
    command += ["--launched_unix_s", str(time.time())]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def load():
    return open("/proc/loadavg").read().split()[0] if os.path.exists("/proc/loadavg") else "unknown"


def verdict(good):
    return "met" if good else "missed"


def rate(row):
    return RANKS * BATCH * TOKENS / row["best_s"]


def report(ours, peer):
    """Prints every ratio beside its goal."""
    mib = 2.0**20
    print("\ntokens/s of the fastest step, memory of a rank, and seconds from launch to first step: Ferrospeed, DeepSpeed, ratio")
    for (dtype, stage), row in sorted(ours.items(), key=lambda item: (item[0][0] != "f32", item[0][1])):
        base = ours.get((dtype, 0))
        line = f"  {dtype:<4} stage {stage}  {rate(row):8.1f}"
        other = peer.get((dtype, stage))
        if other:
            speed, usual = rate(row) / rate(other), other["median_s"] / row["median_s"]
            memory = row["peak_rss_bytes"] / other["peak_rss_bytes"]
            goal = f"goal {GOALS[dtype]}: {verdict(speed >= GOALS[dtype])}" if stage else "no goal"
            line += f" {rate(other):8.1f}  {speed:5.2f} ({goal}; medians {usual:.2f})"
            line += f"   {row['peak_rss_bytes'] / mib:5.0f} {other['peak_rss_bytes'] / mib:5.0f} MiB  {memory:4.2f}"
            line += f" (goal {RSS_GOAL}: {verdict(memory <= RSS_GOAL)})" if stage else " (no goal)"
            line += f"   {row['launch_to_first_step_s']:4.2f} {other['launch_to_first_step_s']:5.2f} s"
        else:
            line += f"{'':51}{row['peak_rss_bytes'] / mib:5.0f} MiB{'':26}{row['launch_to_first_step_s']:4.2f} s"
        launch = row["launch_to_first_step_s"]
        line += f" (goal {LAUNCH_GOAL_S}: {verdict(launch <= LAUNCH_GOAL_S)})"
        print(line)
        if base and stage in OVERHEAD_GOALS:
            over, goal = row["best_s"] / base["best_s"] - 1, OVERHEAD_GOALS[stage]
            print(f"{'':16}{100 * over:+.1f} % over stage 0 (goal {100 * goal:.0f} %: {verdict(over <= goal)})")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="f32,bf16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ours-only", action="store_true", help="leave DeepSpeed out")
    parser.add_argument("--out", help="where the measurements are kept, one JSON object per line")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--stage", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--launched", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        return peer_rank(args)
    here = os.path.dirname(os.path.abspath(__file__))
    binary = os.environ.get("FERROSPEED", os.path.join(here, "../../target/release/ferrospeed"))
    print(f"load {load()} on {os.cpu_count()} cores at the start", flush=True)
    ours, peer = {}, {}

    def keep(side, rows, row):
        key = (row["dtype"], row["stage"])
        known = rows.setdefault(key, dict(row))
        for figure in ("best_s", "median_s", "launch_to_first_step_s"):
            known[figure] = min(known[figure], row[figure])
        known["peak_rss_bytes"] = max(known["peak_rss_bytes"], row["peak_rss_bytes"])
        print(f"  {side:<10} {key[0]:<4} stage {key[1]}  median {1e3 * row['median_s']:7.1f} ms  load {load()}", flush=True)
        if args.out:
            with open(args.out, "a") as file:
                file.write(json.dumps(dict(side=side, **row)) + "\n")

    for _ in range(args.rounds):
        for dtype in args.dtype.split(","):
            for stage in range(4):
                keep("Ferrospeed", ours, run_ours(binary, stage, dtype, args.repeats))
                if not args.ours_only:
                    keep("DeepSpeed", peer, run_peer(stage, dtype, args.repeats))
    report(ours, peer)
    print(f"load {load()} at the end")


if __name__ == "__main__":
    main()

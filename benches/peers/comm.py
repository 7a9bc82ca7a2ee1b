#!/usr/bin/env python3
"""Collectives side by side: Ferrospeed, Gloo (torch.distributed) and OpenMPI (mpi4py), as ratios.

Runs the same operations on the same sizes, types and numbers of ranks, one after the other on this machine, and prints
each peer's median time over Ferrospeed's: above 1, Ferrospeed is faster. Sizes are those of the whole buffer. The last
column is the roof: the time in which all ranks at once copy as many bytes inside their own memory, over Ferrospeed's.

    cargo build --release -p ferrospeed-cli
    python3 benches/peers/comm.py --ranks 2 4 --json comm.json

A peer whose package is missing is left out, and said so.
"""

import argparse
import importlib.util
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time

OPERATIONS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
SIZES = [4 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20]
DTYPES = ["f32", "bf16"]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def measure(run, barrier, slowest, seconds):
    """Median time in µs of the slowest rank: the way `ferrospeed bench comm` measures."""

    def times(count):
        found = []
        for _ in range(count):
            barrier()
            begin = time.perf_counter()
            run()
            found.append((time.perf_counter() - begin) * 1e6)
        return slowest(found)

    estimate = max(min(times(3)), 0.1)
    return statistics.median(times(min(max(int(seconds * 1e6 / estimate), 5), 2000)))


def gloo_rank(options):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()

    def slowest(found):
        tensor = torch.tensor(found, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()

    for size, dtype, operation in matrix(options):
        kind = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
        part = torch.zeros(max(size // kind.itemsize // ranks, 1), dtype=kind)
        whole = torch.zeros(part.numel() * ranks, dtype=kind)
        other = torch.zeros_like(whole)
        calls = {
            "all_reduce": lambda: dist.all_reduce(whole),
            "all_gather": lambda: dist.all_gather(list(whole.chunk(ranks)), part),
            "reduce_scatter": lambda: dist.reduce_scatter(part, list(whole.chunk(ranks))),
            "all_to_all": lambda: dist.all_to_all_single(other, whole),
        }
        try:
            median = measure(calls[operation], dist.barrier, slowest, options.seconds)
        except (RuntimeError, ValueError) as refusal:
            median = None
            if dist.get_rank() == 0:
                print(f"gloo: {operation} {dtype}: {str(refusal).splitlines()[0]}", file=sys.stderr)
        if dist.get_rank() == 0:
            report(operation, size, dtype, median)
    dist.destroy_process_group()


def mpi_rank(options):
    import numpy
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    ranks = world.Get_size()

    def slowest(found):
        sent, received = numpy.array(found), numpy.zeros(len(found))
        world.Allreduce(sent, received, op=MPI.MAX)
        return received.tolist()

    for size, dtype, operation in matrix(options):
        if dtype != "f32":
            continue  # MPI has no bf16.
        part = numpy.zeros(max(size // 4 // ranks, 1), dtype=numpy.float32)
        whole = numpy.zeros(part.size * ranks, dtype=numpy.float32)
        other = numpy.zeros_like(whole)
        calls = {
            "all_reduce": lambda: world.Allreduce(MPI.IN_PLACE, whole),
            "all_gather": lambda: world.Allgather(part, whole),
            "reduce_scatter": lambda: world.Reduce_scatter_block(whole, part),
            "all_to_all": lambda: world.Alltoall(whole, other),
        }
        median = measure(calls[operation], world.Barrier, slowest, options.seconds)
        if world.Get_rank() == 0:
            report(operation, size, dtype, median)


def report(operation, size, dtype, median):
    print(json.dumps({"operation": operation, "size": size, "dtype": dtype, "median_us": median}), flush=True)


def matrix(options):
    return [(size, dtype, operation) for size in options.sizes for dtype in DTYPES for operation in options.operations]


def start_ranks(command, ranks, environment=None):
    """Starts one process per rank and returns rank 0's output."""
    port = free_port()
    processes = []
    for rank in range(ranks):
        variables = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        variables.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), FERROSPEED_JOB_TOKEN=f"bench-{os.getpid()}-{port}")
        variables.update(environment or {})
        output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        processes.append(subprocess.Popen(command, env=variables, stdout=output, text=True))
    text = processes[0].communicate()[0]
    if any(process.wait() != 0 for process in processes):
        sys.exit(f"{command} failed")
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def ferrospeed(options, ranks, backend):
    sizes = ",".join(map(str, options.sizes))
    milliseconds = str(int(options.seconds * 1000))
    memory = "registered,in-place,shared,staged" if backend == "auto" else "staged"
    command = [options.program, "bench", "comm", "--json", "--op", ",".join(options.operations), "--size", sizes]
    command += ["--dtype", ",".join(DTYPES), "--memory", memory, "--case_ms", milliseconds]
    rows = start_ranks(command, ranks, {"FERROSPEED_COMM_BACKEND": backend})
    ordered = {}
    for row in rows:
        # A size that does not divide is rounded down by all sides; name it as asked for.
        asked = min(options.sizes, key=lambda size: abs(size - row["bytes"]))
        ordered[row["operation"], asked, row["dtype"], row["memory"]] = row["median_us"], row["copy_us"]
    return ordered


def peer(rows):
    return {(row["operation"], row["size"], row["dtype"]): row["median_us"] for row in rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--operations", nargs="+", default=OPERATIONS, choices=OPERATIONS)
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each measurement")
    parser.add_argument("--program", default="target/release/ferrospeed")
    parser.add_argument("--json", help="write all rows to this file")
    parser.add_argument("--as-rank", choices=["gloo", "mpi"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        return gloo_rank(options) if options.as_rank == "gloo" else mpi_rank(options)

    itself = [sys.executable, __file__, "--sizes", *map(str, options.sizes), "--seconds", str(options.seconds)]
    itself += ["--operations", *options.operations]
    has_gloo = importlib.util.find_spec("torch") is not None
    has_mpi = importlib.util.find_spec("mpi4py") is not None and shutil.which("mpirun")
    for present, name in [(has_gloo, "Gloo (package torch)"), (has_mpi, "OpenMPI (package mpi4py and mpirun)")]:
        if not present:
            print(f"left out: {name}", file=sys.stderr)
    everything = []
    print(f"{'ranks':>5} {'operation':<15}{'size':>10} {'type':<5}{'memory':<12}{'µs':>10} {'× Gloo':>8} {'× MPI':>8} {'× copy':>8}")
    for ranks in options.ranks:
        ours = ferrospeed(options, ranks, "auto")
        over_tcp = ferrospeed(options, ranks, "tcp")
        ours.update({(*key[:3], "tcp"): value for key, value in over_tcp.items()})
        gloo = peer(start_ranks([*itself, "--as-rank", "gloo"], ranks)) if has_gloo else {}
        mpi = {}
        if has_mpi:
            command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks), *itself, "--as-rank", "mpi"]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            mpi = peer([json.loads(line) for line in output.splitlines() if line.startswith("{")])
        for (operation, size, dtype, memory), (median, copy) in ours.items():
            ratios = [other.get((operation, size, dtype)) for other in (gloo, mpi)]
            ratios = [theirs / median if theirs else None for theirs in ratios]
            shown = ["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
            print(f"{ranks:>5} {operation:<15}{size:>10} {dtype:<5}{memory:<12}{median:>10.1f} {shown[0]:>8} {shown[1]:>8} {copy / median:>8.2f}")
            row = dict(ranks=ranks, operation=operation, size=size, dtype=dtype, memory=memory, median_us=median)
            everything.append(row | dict(over_gloo=ratios[0], over_mpi=ratios[1], over_copy=copy / median))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(everything, file, indent=1)


if __name__ == "__main__":
    main()

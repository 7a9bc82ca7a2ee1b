"""Ranks of DeepSpeed on this machine's CPU, for the scripts beside: a script starts itself once per rank, with a job."""
import json
import os
import socket
import subprocess
import sys

JOB = "INTEROP_JOB"


def own_job():
    """What this process shall do, where it was started as a rank."""
    return json.loads(os.environ[JOB]) if JOB in os.environ else None


def make_way_for_old_deepspeed():
    """DeepSpeed 0.14 imports, for what is not used here, names that later versions of torch and numpy do not have."""
    import numpy
    from torch.distributed.elastic.agent.server import api

    for place, name, value in [(api, "_get_socket_with_port", None), (numpy, "BUFSIZE", 8192)]:
        if not hasattr(place, name):
            setattr(place, name, value)


def start(program, count, job, folder):
    """Runs a job on `count` ranks of a program; what rank 0 wrote to job["told"], or None."""
    job = dict(job, told=os.path.join(folder, "told.json"))
    if os.path.exists(job["told"]):
        os.remove(job["told"])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    ranks = []
    for rank in range(count):
        env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_SIZE=str(count),
                   MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1",
                   TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1")
        env[JOB] = json.dumps(job)
        log = open(os.path.join(folder, f"rank-{rank}.log"), "w")
        ranks.append(subprocess.Popen([sys.executable, os.path.abspath(program)], env=env, stdout=log, stderr=log))
    codes = [rank.wait(timeout=900) for rank in ranks]
    if any(codes) or not os.path.exists(job["told"]):
        for rank in range(count):
            with open(os.path.join(folder, f"rank-{rank}.log")) as file:
                print(f"rank {rank}: {file.read()[-2000:]}", file=sys.stderr)
        return None
    with open(job["told"]) as file:
        return json.load(file)

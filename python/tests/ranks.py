"""Real processes, one for each rank."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

HERE = Path(__file__).parent
DEADLINE_SECONDS = int(os.environ.get("FERROSPEED_TEST_DEADLINE", "240"))


def need_torch() -> None:
    """Skips a file of tests where there is no torch."""
    if importlib.util.find_spec("torch") is None:
        raise unittest.SkipTest("no torch")


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(command: list[str], count: int, **environment: str) -> list[subprocess.Popen]:
    """Starts `python COMMAND` on so many ranks of this host."""
    port = str(free_port())
    started = []
    for rank in range(count):
        env = dict(os.environ, OMP_NUM_THREADS="1", **environment)
        if count > 1:
            env.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
            env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen([sys.executable, *command], env=env, cwd=HERE, **pipes))
    return started


def finish(started: list[subprocess.Popen]) -> list[tuple[int, str]]:
    """Waits for them: exit status and output of each. Who is there after the deadline is killed, and what it said is kept."""
    ends = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    for process in started:
        try:
            output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            for other in started:
                other.kill()
            output, _ = process.communicate()
            output += f"\nkilled after {DEADLINE_SECONDS} s"
        ends.append((process.returncode, output))
    return ends


def run(cases: list[dict], count: int = 1, framework: str = "ferrospeed") -> list[list[dict]]:
    """Runs cases on so many ranks. The result of every case, of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        asked, told = Path(folder, "cases.json"), Path(folder, "results.json")
        asked.write_text(json.dumps(cases))
        ends = finish(start([str(HERE / "program.py"), framework, str(asked), str(told)], count))
        for rank, (status, output) in enumerate(ends):
            if status != 0:
                raise AssertionError(f"rank {rank} of {count} ended with {status}:\n{output}")
        of_ranks = [json.loads(Path(f"{told}.{rank}").read_text()) for rank in range(count)]
    return [list(of_case) for of_case in zip(*of_ranks)]

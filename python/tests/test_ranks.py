"""Ranks: collectives in place, and what happens when one dies. What needs no torch runs without."""

from __future__ import annotations

import importlib.util
import signal
import time
import unittest

import ranks

HAS_TORCH = importlib.util.find_spec("torch") is not None

COLLECTIVES = """
import torch, ferrospeed
from ferrospeed import comm
ferrospeed.init_distributed("gloo")
rank, size = comm.get_rank(), comm.get_world_size()
for dtype in (torch.float32, torch.bfloat16, torch.int64):
    x = torch.full((5,), rank + 1, dtype=dtype)
    comm.all_reduce(x)
    assert x.tolist() == [3] * 5, x
x = torch.tensor([float(rank)])
comm.all_reduce(x, op=comm.ReduceOp.MAX)
assert x.item() == 1.0
x = torch.arange(4) + 10 * rank
comm.broadcast(x, src=1)
assert x.tolist() == [10, 11, 12, 13]
parts = [torch.zeros(2), torch.zeros(2)]
comm.all_gather(parts, torch.full((2,), float(rank)))
assert [part.tolist() for part in parts] == [[0.0, 0.0], [1.0, 1.0]]
out = torch.zeros(1)
comm.reduce_scatter_tensor(out, torch.tensor([1.0, 2.0]))
assert out.item() == [2.0, 4.0][rank]
out = torch.zeros(2)
comm.all_to_all_single(out, torch.tensor([10.0 * rank, 10.0 * rank + 1]))
assert out.tolist() == [[0.0, 10.0], [1.0, 11.0]][rank]
if rank == 0:
    comm.send(torch.tensor([7.0]), dst=1)
else:
    got = torch.zeros(1)
    comm.recv(got, src=0)
    assert got.item() == 7.0
told = [None, None]
comm.all_gather_object(told, {"rank": rank})
assert told == [{"rank": 0}, {"rank": 1}]
alone = comm.new_group([1])
assert (alone is None) == (rank == 0)
try:
    comm.all_reduce(torch.zeros(4, 4).t()[:, :2])
except ferrospeed.FerrospeedError as error:
    assert "contiguous" in str(error)
try:
    comm.all_reduce(torch.zeros(3 + rank))
except ferrospeed.CommError as error:
    print("MISMATCH", error)
print("DONE")
"""

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import ferrospeed
from ferrospeed import comm
ferrospeed.init_distributed()
comm.barrier()
told = [None] * comm.get_world_size()
comm.all_gather_object(told, comm.get_rank())
assert told == list(range(comm.get_world_size())), told
for name in ("nothing", "init_inference"):
    try:
        getattr(ferrospeed, name)
    except AttributeError as error:
        assert name in str(error)
print("DONE", comm.get_world_size())
"""

TRAINS_FOR_EVER = """
import torch, modules, ferrospeed, program
from ferrospeed import comm
case = {"module": "mlp", "stage": STAGE}
engine, *_ = ferrospeed.initialize(model=modules.make("mlp"), config=program.config_of(case))
number = 0
while True:
    engine.backward(engine(modules.batch("mlp", 4, comm.get_rank(), number)))
    engine.step()
    if number == 0:
        print("TRAINING", flush=True)
    number += 1
"""


class Ranks(unittest.TestCase):
    def test_the_package_needs_no_torch_until_something_does(self) -> None:
        for count in (1, 2):
            for status, output in ranks.finish(ranks.start(["-c", WITHOUT_TORCH], count)):
                self.assertEqual(status, 0, output)
                self.assertIn(f"DONE {count}", output)

    @unittest.skipUnless(HAS_TORCH, "no torch")
    def test_collectives_work_on_tensors_in_place(self) -> None:
        for status, output in ranks.finish(ranks.start(["-c", COLLECTIVES], 2)):
            self.assertEqual(status, 0, output)
            self.assertIn("DONE", output)
            self.assertIn("MISMATCH", output)

    @unittest.skipUnless(HAS_TORCH, "no torch")
    def test_a_killed_rank_ends_the_others_and_is_named(self) -> None:
        for stage in (0, 3):
            started = ranks.start(["-c", TRAINS_FOR_EVER.replace("STAGE", str(stage))], 2)
            try:
                for process in started:
                    self.assertIn("TRAINING", process.stdout.readline())
                started[1].send_signal(signal.SIGKILL)
                began = time.monotonic()
                (status, output), _ = ranks.finish(started)
            finally:
                for process in started:
                    process.kill()
            self.assertLess(time.monotonic() - began, 60, "the deadline of a collective is half an hour")
            self.assertNotEqual(status, 0)
            self.assertRegex(output, r"(?s)CommError: .*rank 1")

    @unittest.skipUnless(HAS_TORCH, "no torch")
    def test_an_interrupt_ends_a_rank_that_waits(self) -> None:
        script = "import ferrospeed, sys\nfrom ferrospeed import comm\nferrospeed.init_distributed()\nprint('MET', flush=True)\n"
        waits = script + "comm.barrier() if comm.get_rank() == 0 else sys.stdin.readline()\nimport time; time.sleep(600)\n"
        started = ranks.start(["-c", waits], 2)
        try:
            for process in started:
                self.assertIn("MET", process.stdout.readline())
            started[0].send_signal(signal.SIGINT)
            self.assertNotEqual(started[0].wait(timeout=30), 0)
        finally:
            started[1].kill()
            for process in started:
                process.communicate()


if __name__ == "__main__":
    unittest.main()

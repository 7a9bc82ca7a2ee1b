"""Training: equal to plain torch on one rank, to DeepSpeed on two, and one stage to another."""

from __future__ import annotations

import json
import unittest
from pathlib import Path

import ranks

ranks.need_torch()

import torch  # noqa: E402

import cases  # noqa: E402
import modules  # noqa: E402

GOLDEN = Path(__file__).parent / "golden" / "deepspeed.json"
STAGES = (0, 1, 2, 3)
# In f32 as near as sums in another order allow; in 16 bits a rounding of a weight or a gradient moves a loss by as much as
# its type has digits for, and 40 micro-batches add up.
TOLERANCE = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 1e-3}


def plain(kind: str, steps: int) -> tuple[list[float], torch.nn.Module]:
    """The same training without any framework: losses, and the module."""
    module = modules.make(kind)
    options = {"lr": 3e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}
    optimizer = torch.optim.AdamW(module.parameters(), **options)
    losses = []
    for number in range(steps):
        loss = module(modules.batch(kind, 4, 0, number))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, module


class Training(unittest.TestCase):
    def near(self, left: list[float], right: list[float], tolerance: float, what: str) -> None:
        self.assertEqual(len(left), len(right), what)
        worst = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(left, right))
        self.assertLessEqual(worst, tolerance, f"{what}: {left} beside {right}")

    def test_one_rank_learns_what_torch_alone_learns_in_every_stage(self) -> None:
        torch.set_num_threads(1)
        every = [(kind, stage) for kind in modules.KINDS for stage in STAGES]
        asked = [{"module": kind, "stage": stage, "steps": 8} for kind, stage in every]
        told = ranks.run(asked)
        for kind in modules.KINDS:
            losses, _ = plain(kind, 8)
            of_kind = [result[0] for (other, _), result in zip(every, told) if other == kind]
            for stage, result in zip(STAGES, of_kind):
                self.near(result["losses"], losses, 1e-6, f"{kind} in stage {stage}")
                self.assertEqual(result["losses"], of_kind[0]["losses"], f"{kind}: stage {stage} and stage 0")
                self.assertEqual(result["digest"], of_kind[0]["digest"], f"{kind}: stage {stage} and stage 0")

    def test_two_ranks_have_the_same_bits_in_every_stage(self) -> None:
        every = [(kind, dtype, stage) for kind in modules.KINDS for dtype in TOLERANCE for stage in STAGES]
        asked = [
            cases.full(kind, stage, dtype, steps=6, set={"zero_optimization.reduce_each_micro_batch": True})
            for kind, dtype, stage in every
        ]
        told = ranks.run(asked, 2)
        first = {(kind, dtype): result for (kind, dtype, stage), result in zip(every, told) if stage == 0}
        for (kind, dtype, stage), of_ranks in zip(every, told):
            for rank, result in enumerate(of_ranks):
                there = first[kind, dtype][rank]
                what = f"{kind} {dtype}: stage {stage} and stage 0 on rank {rank}"
                for name in ("losses", "norms", "rates", "digest"):
                    self.assertEqual(result[name], there[name], f"{what}: {name}")
            self.assertEqual(of_ranks[0]["digest"], of_ranks[1]["digest"], f"{kind} {dtype} stage {stage}: both ranks")

    def test_two_ranks_learn_what_deepspeed_learns(self) -> None:
        golden = json.loads(GOLDEN.read_text())
        named = cases.recorded()
        self.assertEqual(set(golden), set(named), "record anew: scripts/record-deepspeed-torch")
        told = dict(zip(named, ranks.run(list(named.values()), 2)))
        for name, case in named.items():
            for rank, (ours, theirs) in enumerate(zip(told[name], golden[name])):
                tolerance = TOLERANCE[case["dtype"]]
                self.near(ours["losses"], theirs["losses"], tolerance, f"{name}: losses of rank {rank}")
                self.near(ours["rates"], theirs["rates"], 1e-8, f"{name}: rates of rank {rank}")

    def test_a_plain_backward_of_the_loss_is_a_backward_of_the_engine(self) -> None:
        for stage in (0, 2, 3):
            case = {"module": "gpt", "stage": stage, "steps": 3, "accumulation": 2}
            ours, plainly, scaled = ranks.run([case, case | {"plain": "loss"}, case | {"plain": "scale"}], 2)
            for rank in (0, 1):
                self.assertEqual(ours[rank]["losses"], plainly[rank]["losses"], f"stage {stage}")
                self.assertEqual(ours[rank]["losses"], scaled[rank]["losses"], f"stage {stage}")
                self.assertEqual(ours[rank]["digest"], scaled[rank]["digest"], f"stage {stage}")

    def test_stage_3_has_few_weights_whole_at_once(self) -> None:
        case = {"module": "gpt", "stage": 3, "steps": 3}
        limits = {"zero_optimization.stage3_max_live_parameters": 6000, "zero_optimization.stage3_prefetch_bucket_size": 0}
        result = ranks.run([case | {"set": limits | {"zero_optimization.stage3_max_reuse_distance": 0}}], 2)[0][0]
        total = sum(param.numel() for param in modules.make("gpt").parameters())
        self.assertLess(result["peak_live"], total // 2)


if __name__ == "__main__":
    unittest.main()

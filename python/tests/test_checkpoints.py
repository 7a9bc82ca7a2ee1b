"""Checkpoints: a resumed run is the run that never stopped, on any number of ranks and in any stage."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path

import ranks

ranks.need_torch()

CASE = {"module": "gpt", "stage": 2, "accumulation": 2, "clipping": 0.5, "schedule": True, "groups": True}


class Checkpoints(unittest.TestCase):
    def test_a_resumed_run_is_the_run_that_never_stopped(self) -> None:
        for stage in (0, 3):
            with tempfile.TemporaryDirectory() as folder:
                case = CASE | {"stage": stage}
                whole, first, rest = ranks.run(
                    [case | {"steps": 6}, case | {"steps": 3, "save": folder}, case | {"steps": 3, "load": folder}], 2
                )
                for rank in (0, 1):
                    self.assertEqual(first[rank]["losses"] + rest[rank]["losses"], whole[rank]["losses"], f"stage {stage}")
                    self.assertEqual(rest[rank]["digest"], whole[rank]["digest"], f"stage {stage}")

    def test_other_ranks_other_stages_and_deepspeeds_files(self) -> None:
        for options in ({}, {"format": "deepspeed"}):
            with tempfile.TemporaryDirectory() as folder:
                saved = ranks.run([CASE | {"steps": 2, "save": folder, "save_options": options}], 2)[0][0]
                self.assertTrue(Path(folder, "latest").exists())
                alone = ranks.run([CASE | {"steps": 0, "load": folder, "stage": stage} for stage in (0, 3)])
                for result in alone:
                    self.assertEqual(result[0]["digest"], saved["digest"], f"{options}")

    def test_what_the_engine_cannot_keep_is_refused_by_its_name(self) -> None:
        script = (
            "import torch, modules, ferrospeed, program\n"
            "case = {'module': 'mlp', 'stage': 1}\n"
            "engine, *_ = ferrospeed.initialize(model=modules.make('mlp'), config=program.config_of(case))\n"
            "try:\n"
            "    engine.save_checkpoint('/nowhere', client_state={'loss': torch.ones(1)})\n"
            "except ferrospeed.FerrospeedError as error:\n"
            "    print('REFUSED', error)\n"
            "try:\n"
            "    engine.load_checkpoint('/nowhere')\n"
            "except ferrospeed.CheckpointError as error:\n"
            "    print('ABSENT', error)\n"
        )
        (status, output), = ranks.finish(ranks.start(["-c", script], 1))
        self.assertEqual(status, 0, output)
        self.assertRegex(output, "REFUSED save_checkpoint: client_state holds what JSON cannot say")
        self.assertRegex(output, "ABSENT .*/nowhere")


if __name__ == "__main__":
    unittest.main()

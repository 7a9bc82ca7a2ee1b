"""The stand-in for `deepspeed`: a Trainer's script runs unchanged, resumes, and its model loads."""

from __future__ import annotations

import ast
import importlib.util
import json
import tempfile
import unittest
from pathlib import Path

import ranks

ranks.need_torch()
if any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate")):
    raise unittest.SkipTest("no transformers and accelerate")


def ds_config(stage: int, offload: bool) -> dict:
    """A configuration as the Trainer's manual has it: all that the Trainer knows is left to it."""
    zero = {"stage": stage, "overlap_comm": True, "reduce_bucket_size": "auto"}
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
        zero |= {"stage3_gather_16bit_weights_on_model_save": True}
    if offload:
        zero |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    return {
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
        "zero_optimization": zero,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }


class StandIn(unittest.TestCase):
    def trained(
        self, folder: str, config: dict, steps: int, count: int, *more: str, script: str = "trainer_script.py", before: list[str] = []
    ) -> list[float]:
        path = Path(folder, "ds_config.json")
        path.write_text(json.dumps(config))
        command = ["-m", "ferrospeed.as_deepspeed", script, *before, folder, str(path), str(steps), *more]
        ends = ranks.finish(ranks.start(command, count))
        for status, output in ends:
            self.assertEqual(status, 0, output)
        line = next(line for line in ends[0][1].splitlines() if line.startswith("LOSSES"))
        return [float(loss) for loss in ast.literal_eval(line.removeprefix("LOSSES "))]

    def test_the_trainer_trains_resumes_and_saves(self) -> None:
        losses = {}
        for stage, offload in ((2, False), (3, False), (3, True)):
            config = ds_config(stage, offload)
            with tempfile.TemporaryDirectory() as folder:
                whole = self.trained(folder, config, 4, 2)
                self.assertEqual(len(whole), 4)
                self.assertLess(whole[-1], whole[0])
                losses[stage, offload] = whole
                self.assertTrue(Path(folder, "model", "model.safetensors").exists())
                from transformers import LlamaForCausalLM

                model = LlamaForCausalLM.from_pretrained(Path(folder, "model"))
                self.assertTrue(all(param.isfinite().all() for param in model.parameters()))
            if stage == 3 and not offload:
                with tempfile.TemporaryDirectory() as folder:
                    self.trained(folder, config, 2, 2)
                    again = self.trained(folder, config, 4, 2, "resume")
                    self.assertEqual(again[2:], whole[2:])
        for other in losses.values():
            self.assertEqual(other, losses[2, False])

    @unittest.skipIf(any(importlib.util.find_spec(name) is None for name in ("trl", "peft", "datasets")), "no trl and peft")
    def test_trl_trains_an_adapter(self) -> None:
        for kind in ("sft", "dpo"):
            with tempfile.TemporaryDirectory() as folder:
                losses = self.trained(folder, ds_config(3, False), 6, 2, script="trl_script.py", before=[kind])
                self.assertEqual(len(losses), 6)
                # The first rates of the Trainer's warm-up are zero.
                self.assertLess(min(losses), losses[0], kind)
                self.assertTrue(Path(folder, "adapter", "adapter_model.safetensors").exists())

    def test_what_is_not_there_is_named(self) -> None:
        script = (
            "import ferrospeed\nferrospeed.install_as_deepspeed()\nimport deepspeed\n"
            "for what in ('deepspeed.tp_model_init', 'deepspeed.moe.layer', 'deepspeed.utils.groups', 'deepspeed.pipe'):\n"
            "    try:\n"
            "        exec('import deepspeed.moe.layer' if 'layer' in what else what)\n"
            "    except (AttributeError, ImportError) as error:\n"
            "        print('NAMED', error)\n"
            "import importlib.metadata\nprint('VERSION', importlib.metadata.version('deepspeed'), deepspeed.__version__)\n"
        )
        (status, output), = ranks.finish(ranks.start(["-c", script], 1))
        self.assertEqual(status, 0, output)
        self.assertEqual(output.count("NAMED"), 4, output)
        for name in ("deepspeed.tp_model_init", "deepspeed.moe", "deepspeed.utils.groups", "deepspeed.pipe"):
            self.assertIn(name, output)


if __name__ == "__main__":
    unittest.main()

"""Runs cases on this rank, with ferrospeed or with DeepSpeed: `program.py FRAMEWORK CASES.json RESULTS.json`.

Both are driven by the same lines, so what differs is the framework. A case is a dictionary: see `run`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys

import torch

import modules

torch.set_num_threads(1)


def config_of(case: dict) -> dict:
    """The ds_config of a case."""
    accumulation = case.get("accumulation", 1)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": case.get("clipping", 0.0),
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.01}},
        "zero_optimization": {"stage": case["stage"], "stage3_param_persistence_threshold": 40},
    }
    if case.get("schedule"):
        config["scheduler"] = {
            "type": "WarmupDecayLR",
            "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 3e-3, "warmup_num_steps": 4, "total_num_steps": 40, "warmup_type": "linear"},
        }
    if case.get("dtype") == "bf16":
        config["bf16"] = {"enabled": True}
    if case.get("dtype") == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8}
    for path, value in case.get("set", {}).items():
        place = config
        *sections, last = path.split(".")
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return config


def digest(module: torch.nn.Module, gather) -> str:
    """One number of all weights."""
    sum_of_all = hashlib.sha256()
    for _, param in module.named_parameters():
        with gather(param):
            sum_of_all.update(param.detach().float().numpy().tobytes())
    return sum_of_all.hexdigest()[:16]


def run(framework, case: dict, rank: int) -> dict:
    """Trains, and tells losses of every micro-batch of this rank, norms and rates of every step, and a digest of the weights."""
    module = modules.make(case["module"])
    params = modules.groups(module) if case.get("groups") else module.parameters()
    config = config_of(case)
    if framework.__name__ == "deepspeed":
        # Its own is compiled when it is first used, which takes minutes.
        config["optimizer"]["params"]["torch_adam"] = True
    engine, optimizer, _, schedule = framework.initialize(model=module, model_parameters=params, config=config)
    told: dict = {"losses": [], "norms": [], "rates": []}
    micro = 0
    if case.get("load"):
        _, kept = engine.load_checkpoint(case["load"])
        micro = kept["micro"]
    accumulation = case.get("accumulation", 1)
    until = micro + case["steps"] * accumulation
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    while micro < until:
        loss = engine(modules.batch(case["module"], 4, rank, micro))
        if case.get("plain"):
            (engine.scale(loss) if case["plain"] == "scale" else loss / accumulation).backward()
        else:
            engine.backward(loss)
        engine.step()
        told["losses"].append(loss.item())
        micro += 1
        if micro % accumulation == 0:
            norm = engine.get_global_grad_norm()
            told["norms"].append(None if norm is None else float(norm))
            told["rates"].append(optimizer.param_groups[0]["lr"])
    if case.get("save"):
        engine.save_checkpoint(case["save"], client_state={"micro": micro}, **case.get("save_options", {}))
    if case.get("digest", True) and framework.__name__ == "ferrospeed":
        told["digest"] = digest(engine.module, framework.zero.GatheredParameters)
        told["peak_live"] = engine._core.peak_live_numel()
    told["ranks"] = ranks
    return told


def main() -> None:
    name, cases, results = sys.argv[1:4]
    framework = __import__(name)
    if name == "deepspeed":
        # Its operations in C++ are compiled when they are first used; nothing here needs them.
        framework.ops.__compatible_ops__.clear()
        # torch computes in fp16 on any processor, if slowly; DeepSpeed wants one that does it fast.
        framework.accelerator.get_accelerator().is_fp16_supported = lambda: True
    framework.init_distributed(**({"dist_backend": "gloo"} if name == "deepspeed" else {}))
    rank = int(os.environ.get("RANK", "0"))
    told = []
    with open(cases) as file:
        for case in json.load(file):
            told.append(run(framework, case, rank))
    with open(f"{results}.{rank}", "w") as file:
        json.dump(told, file)


if __name__ == "__main__":
    main()

"""What is trained in the tests, and recorded from DeepSpeed."""

from __future__ import annotations

STEPS = 20


def full(module: str, stage: int, dtype: str = "fp32", **more) -> dict:
    """Accumulation, clipping, a schedule and two groups, all at once."""
    case = {"module": module, "stage": stage, "dtype": dtype, "steps": STEPS, "accumulation": 2}
    return case | {"clipping": 0.5, "schedule": True, "groups": True} | more


def recorded() -> dict[str, dict]:
    """The cases that DeepSpeed has run. Its stages agree in f32, so that one of them stands for all; in 16 bits stage 2 does."""
    named = {f"{module} fp32": full(module, 1) for module in ("mlp", "gpt", "llama")}
    named |= {f"mlp fp32 stage {stage}": full("mlp", stage) for stage in (0, 2, 3)}
    named |= {f"{module} {dtype}": full(module, 2, dtype) for module in ("mlp", "gpt", "llama") for dtype in ("bf16", "fp16")}
    return named

"""Checkpoints between Ferrospeed and DeepSpeed, both ways, on one rank.

Takes a Hugging Face directory, the `checkpoints` folder of a Ferrospeed run on it, and the ZeRO stage; exports with the
binary, loads the result with DeepSpeed (as its own layout and as a universal one), takes steps on fixed batches, and
compares with what DeepSpeed does when it goes on from the weights and states that Ferrospeed saved. Prints one JSON line.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29541")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
import deepspeed  # noqa: E402
import transformers  # noqa: E402


def config(stage, universal):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "adam_w_mode": True}},
        "zero_optimization": {"stage": stage},
        # Said, because DeepSpeed's default differs between stages once a checkpoint is loaded.
        "gradient_clipping": 1.0,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": universal},
    }


def engine_for(directory, stage, universal):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(directory))
    # Fresh weights on purpose: whatever is right afterwards came from the checkpoint.
    engine, *_ = deepspeed.initialize(model=model, config=config(stage, universal), model_parameters=model.parameters())
    return engine


def steps(engine, count=3):
    losses = []
    vocabulary = engine.module.config.vocab_size
    for step in range(count):
        ids = (torch.arange(2 * 16).reshape(2, 16) * (7 + step)) % vocabulary
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--checkpoints", required=True)
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--layout", choices=["deepspeed", "universal"], required=True)
    args = parser.parse_args()
    universal = args.layout == "universal"
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "out")
        command = [args.binary, "checkpoint", "to-universal" if universal else "export-deepspeed", args.checkpoints, out]
        if not universal:
            command += ["--stage", str(args.stage), "--ranks", "1"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        engine = engine_for(args.model, args.stage, universal)
        path, _ = engine.load_checkpoint(out)
        assert path is not None, "DeepSpeed found nothing to load"
        loaded = steps(engine)
        # And back: what DeepSpeed saves now is what Ferrospeed reads where it lies.
        back = os.path.join(folder, "back")
        engine.save_checkpoint(back)
        next_losses = steps(engine)
        fp32 = os.path.join(folder, "ours.safetensors")
        subprocess.run([args.binary, "checkpoint", "to-fp32", back, fp32], check=True, stdout=subprocess.DEVNULL)
        keep = os.environ.get("FERROSPEED_KEEP")
        if keep:
            shutil.copytree(back, keep, dirs_exist_ok=True)
        print(json.dumps({
            "deepspeed": deepspeed.__version__, "transformers": transformers.__version__, "stage": args.stage,
            "layout": args.layout, "losses": loaded, "then": next_losses,
        }))


if __name__ == "__main__":
    sys.exit(main())

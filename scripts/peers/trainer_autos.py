"""What Hugging Face's Trainer fills into a ds_config, for training arguments and a model's width.

Made with transformers 5.22.0 and accelerate beside it: `python scripts/peers/trainer_autos.py > crates/train/tests/hugging-face/filled.json`.
Each case is a file beside the output, training arguments, steps and a hidden size; `filled` is the whole file afterwards.
"""
import json, pathlib, sys, types

stdout, sys.stdout = sys.stdout, sys.stderr
import transformers
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

folder = pathlib.Path(__file__).parents[2] / "crates/train/tests/hugging-face"
DEFAULTS = dict(
    per_device_train_batch_size=8, gradient_accumulation_steps=1, learning_rate=5e-5, adam_beta1=0.9, adam_beta2=0.999,
    adam_epsilon=1e-8, weight_decay=0.0, max_grad_norm=1.0, warmup_steps=0, fp16=False, bf16=False,
)
ARGUMENTS = [
    {},
    dict(learning_rate=3e-4, warmup_steps=0.1, bf16=True, weight_decay=0.1, adam_beta2=0.95, max_grad_norm=0.5),
    dict(per_device_train_batch_size=2, gradient_accumulation_steps=3, warmup_steps=7, adam_epsilon=1e-6, fp16=True),
]
cases = []
for file in ("zero2.json", "zero3.json"):
    for given in ARGUMENTS:
        for ranks, steps, hidden in ((1, 25, 48), (2, 100, 77)):
            arguments = types.SimpleNamespace(**(DEFAULTS | given), world_size=ranks, fp16_full_eval=False,
                                              bf16_full_eval=False, save_on_each_node=False)
            arguments.get_warmup_steps = lambda total: transformers.TrainingArguments.get_warmup_steps(arguments, total)
            config = HfTrainerDeepSpeedConfig(json.loads((folder / file).read_text()))
            config.trainer_config_process(arguments)
            model = types.SimpleNamespace(config=types.SimpleNamespace(hidden_size=hidden))
            config.trainer_config_finalize(arguments, model, steps)
            cases.append(dict(file=file, training=given, ranks=ranks, steps=steps, hidden_size=hidden, filled=config.config))
json.dump(dict(made_with=dict(transformers=transformers.__version__), cases=cases), stdout, indent=1)
stdout.write("\n")

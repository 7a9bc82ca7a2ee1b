"""Scripts of TRL's as its users write them, with a LoRA of PEFT's: `trl_script.py sft|dpo FOLDER DS_CONFIG STEPS`."""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.set_num_threads(1)
kind, folder, ds_config, steps = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])

words = ["<pad>", "<eos>"] + [f"w{number}" for number in range(62)]
tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
torch.manual_seed(3)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=32, pad_token_id=0, eos_token_id=1, bos_token_id=1,
)
model = LlamaForCausalLM(config)
common = dict(
    output_dir=folder, deepspeed=None if ds_config == "none" else ds_config, max_steps=steps, per_device_train_batch_size=2, learning_rate=1e-2,
    logging_steps=1, save_strategy="no", report_to=[], bf16=False, gradient_checkpointing=False,
)
lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def text(start: int, step: int) -> str:
    return " ".join(f"w{(start + step * place) % 62}" for place in range(8))


if kind == "sft":
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_list([{"text": text(number, 3)} for number in range(32)])
    arguments = SFTConfig(**common, max_length=16)
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer, peft_config=lora)
else:
    from trl import DPOConfig, DPOTrainer

    rows = [{"prompt": text(number, 3), "chosen": " " + text(number, 3), "rejected": " " + text(number, 5)} for number in range(32)]
    arguments = DPOConfig(**common, max_length=32)
    trainer = DPOTrainer(model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, peft_config=lora)
trainer.train()
trainer.save_model(folder + "/adapter")
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
if trainer.args.process_index == 0:
    print("NORMS", [float(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry])
    print("LOSSES", losses)

"""A script of the Trainer's as its users write it: nothing in it knows of ferrospeed. `trainer_script.py FOLDER DS_CONFIG STEPS [resume]`."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.set_num_threads(1)
folder, ds_config, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = (index + 3 * torch.arange(12)) % 64
        return {"input_ids": tokens, "labels": tokens}


arguments = TrainingArguments(
    output_dir=folder,
    deepspeed=ds_config,
    max_steps=steps,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    warmup_steps=2,
    max_grad_norm=1.0,
    weight_decay=0.01,
    logging_steps=1,
    save_steps=2,
    report_to=[],
    seed=3,
    bf16="--bf16" in sys.argv,
)
torch.manual_seed(3)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=12,
)
trainer = Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=Tokens())
trainer.train(resume_from_checkpoint="resume" in sys.argv)
trainer.save_model(folder + "/model")
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
if arguments.process_index == 0:
    print("LOSSES", losses)

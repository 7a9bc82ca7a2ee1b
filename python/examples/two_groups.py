"""Trains a small module on any number of ranks: `ferrospeed launch -n 2 --python two_groups.py`."""

import torch

import ferrospeed
from ferrospeed import comm

torch.manual_seed(0)
torch.set_num_threads(1)
module = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 4))
matrices = [param for param in module.parameters() if param.dim() > 1]
vectors = [param for param in module.parameters() if param.dim() <= 1]
config = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3},
}
engine, optimizer, _, _ = ferrospeed.initialize(
    model=module,
    model_parameters=[{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
    config=config,
)

first = last = None
for step in range(60):
    generator = torch.Generator().manual_seed(1000 * comm.get_rank() + step)
    x = torch.randn(8, 16, generator=generator)
    loss = torch.nn.functional.cross_entropy(engine(x), x[:, :4].argmax(dim=1))
    engine.backward(loss)
    engine.step()
    last = loss.item()
    first = last if first is None else first
if comm.get_rank() == 0:
    print(f"loss {first:.3f} -> {last:.3f} on {comm.get_world_size()} ranks")
assert last < first

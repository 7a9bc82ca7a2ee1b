"""The three kinds of torch modules that are trained: plain layers, tied and shared ones, and Hugging Face's."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, VOCABULARY, LENGTH = 32, 64, 12


class Mlp(nn.Module):
    """Layers one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, 8)
        # Nothing uses it: its gradient is zero.
        self.unused = nn.Linear(3, 3)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = self.head(self.layers(batch["x"].to(self.head.weight.dtype)))
        return F.cross_entropy(logits.float(), batch["y"])


class Block(nn.Module):
    """A transformer's layer with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    """A small GPT: a block that is used twice, and a head that is the table's weight, read from outside of the table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.block, self.last = Block(), Block()
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.table.weight, std=0.1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        tokens = batch["tokens"]
        x = self.table(tokens) + self.places
        x = self.last(self.block(self.block(x)))
        logits = F.linear(self.norm(x), self.table.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class Llama(nn.Module):
    """Hugging Face's LLaMA, tiny."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=LENGTH,
        )
        self.model = LlamaForCausalLM(config)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(input_ids=batch["tokens"], labels=batch["tokens"]).loss


KINDS = {"mlp": Mlp, "gpt": Gpt, "llama": Llama}


def make(kind: str) -> nn.Module:
    """The same module in every process."""
    torch.manual_seed(7)
    return KINDS[kind]()


def batch(kind: str, size: int, rank: int, number: int) -> dict[str, torch.Tensor]:
    """Micro-batch `number` of a rank. What is predicted follows from what is given, so that losses fall."""
    generator = torch.Generator().manual_seed(1000 * rank + number)
    if kind == "mlp":
        x = torch.randn(size, 16, generator=generator)
        return {"x": x, "y": x[:, :8].argmax(dim=1)}
    start = torch.randint(VOCABULARY, (size, 1), generator=generator)
    return {"tokens": (start + 3 * torch.arange(LENGTH)) % VOCABULARY}


def groups(module: nn.Module) -> list[dict]:
    """Two groups: matrices decay, vectors do not."""
    matrices = [param for param in module.parameters() if param.dim() > 1]
    vectors = [param for param in module.parameters() if param.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]

"""nanoGPT's loop on Python's manual, one token per character: validation every few steps, best state, warm-up + cosine.

python examples/ports/nanogpt.py --max-steps 200
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import treadle
from treadle.optim.optimizer import decay_groups
from treadle.text.corpus import load_manual


class Windows(Dataset):
    """Data set of all windows of a text, each with the window one character later as its target."""

    def __init__(self, tokens, block):
        self.tokens, self.block = tokens, block

    def __len__(self):
        return len(self.tokens) - self.block

    def __getitem__(self, start):
        window = self.tokens[start : start + self.block + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x):
        parts = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(*parts, dropout_p=dropout, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary, block, *, layers=2, heads=4, width=64, dropout=0.1):
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(block, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class NanoGPT(treadle.BaseTrainer):
    def __init__(self, max_steps, args):
        super().__init__(
            max_steps, grad_clip=1.0, gradient_accumulation_steps=args.accumulation, workspace=args.out, device="cpu"
        )
        self.block, self.batch = args.block, args.batch_size
        text = "\n".join(load_manual().values())[:100_000]
        characters = sorted(set(text))
        tokens = torch.tensor([characters.index(character) for character in text])
        self.vocabulary, self.split = len(characters), tokens.split([90_000, 10_000])

    def build_data_loader(self):
        return DataLoader(Windows(self.split[0], self.block), self.batch, shuffle=True)

    def build_model(self):
        return GPT(self.vocabulary, self.block).to(self.device)

    def build_optimizer(self):
        return torch.optim.AdamW(decay_groups(self.model, 0.1), lr=1e-3, betas=(0.9, 0.99))

    def build_lr_scheduler(self):
        return treadle.build_schedule(self.optimizer, "cosine", total_steps=200, warmup_steps=20, min_scale=0.1)

    def build_hooks(self):
        held_out = DataLoader(Windows(self.split[1][: self.block + 256], self.block), 64)
        validation = treadle.ValidationHook(held_out, interval=50, best="best_model.pt")
        return [treadle.ProgressHook(10), validation, treadle.CheckpointingHook(50, exit_signals=[2, 15])]

    def forward(self, batch):
        tokens, targets = (part.to(self.device) for part in batch)
        return nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten()), {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--out", default="runs/nanogpt")
    args = parser.parse_args()
    treadle.set_seed(1337)
    NanoGPT(args.max_steps, args).train()


if __name__ == "__main__":
    main()

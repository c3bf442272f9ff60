"""Train a small GPT-2 on Python's own manual, then fine-tune it with LoRA on the topics about statements.

    python examples/text_lora.py --out runs/text_lora --epochs 8

Everything is created locally: text (a module of the standard library), tokenizer and weights; nothing is downloaded.
Kill it at any moment and run the same command again: it resumes from the last epoch and ends with the same weights to
the bit. ``treadle train text`` is the full version, with settings, baselines and plots.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from treadle import Trainer, set_seed
from treadle.text import (
    TokenBlocks,
    add_lora,
    build_gpt2,
    is_statement,
    load_manual,
    sample_texts,
    split_topics,
    token_stream,
    train_tokenizer,
    without_repeats,
)

CONTEXT = 64
CONFIG = {"training": {"max_grad_norm": 1.0, "log_interval": 50}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/text_lora"))
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lora-epochs", type=int, default=4)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    manual = load_manual()
    topics = without_repeats(manual)
    statements = {name: text for name, text in topics.items() if is_statement(manual[name])}
    others = {name: text for name, text in topics.items() if name not in statements}
    train, val = split_topics(others, val_fraction=0.1, seed=0)
    tokenizer = train_tokenizer(train.values(), vocab_size=512)

    def loader(part: dict[str, str], **settings) -> DataLoader:
        return DataLoader(TokenBlocks(token_stream(tokenizer, part.values()), CONTEXT), **settings)

    def fit(model, lr: float, parts, epochs: int, folder: Path) -> Trainer:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
        trainer = Trainer(model, optimizer, None, CONFIG, device="cpu")  # no loss function: the model has its own
        train_loader, val_loader = loader(parts[0], batch_size=16, shuffle=True), loader(parts[1], batch_size=64)
        trainer.train(train_loader, epochs, val_loader, folder, resume_from="auto")
        return trainer

    set_seed(0)
    fit(build_gpt2(512, n_positions=CONTEXT, n_embd=64, n_layer=2), 3e-3, (train, val), args.epochs, args.out)

    set_seed(1)  # so that the fine-tuning is the same whether or not the first training ran in this process
    base = AutoModelForCausalLM.from_pretrained(args.out / "pretrained")  # the weights of the best epoch
    parts = split_topics(statements, val_fraction=0.25, seed=0)
    before = Trainer(base, None, None, device="cpu").evaluate(loader(parts[1], batch_size=64))["loss"]
    tuned = fit(add_lora(base, r=8), 2e-3, parts, args.lora_epochs, args.out / "lora")
    print(f"loss on unseen statements: {before:.3f} before LoRA, {tuned.best_metric:.3f} after")
    generator = torch.Generator().manual_seed(0)
    settings = {"num_tokens": 80, "context": CONTEXT, "temperature": 0.7, "top_k": 40, "generator": generator}
    print(sample_texts(tuned.model, tokenizer, prompt='The "', count=1, **settings)[0])


if __name__ == "__main__":
    main()

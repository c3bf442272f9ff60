"""Train on images, spectra and scalars of three surveys, with a loss on the values behind the tokens.

    python examples/train_with_meaningful_loss.py --out runs/astro --epochs 5

Kill it at any moment and run the same command again: it resumes from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from treadle.astro import (
    AstroTrainer,
    CausalTransformerLM,
    MeaningfulLossConfig,
    ScalarDropout,
    TrainingConfig,
    build_loader,
    cross_predict,
    fit_tokenizers,
    initialise_from_codebooks,
    load_surveys,
    save_tokenizers,
    set_seed,
)
from treadle.datasets.splits import split_by_group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/astro"))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rows", type=int, default=900, help="the most objects of each survey")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    set_seed(0)
    train, val, test = {}, {}, {}
    for name, survey in load_surveys().items():
        rows = split_by_group(survey.objects, val_fraction=0.15, test_fraction=0.2)
        train[name], val[name], test[name] = (survey.take(part[: arguments.rows]) for part in rows)
    tokenizers = fit_tokenizers(list(train.values()), v_image=64)
    save_tokenizers(arguments.out / "tokenizers.safetensors", tokenizers)
    vocab = tokenizers.vocab()
    sequences = [sequence for survey in train.values() for sequence in tokenizers.encode(survey)]
    val_sequences = [sequence for survey in val.values() for sequence in tokenizers.encode(survey)]

    training = TrainingConfig(
        batch_size=32, epochs=arguments.epochs, learning_rate=5e-3, warmup_steps=20, num_workers=0, save_every_steps=50,
        meaningful_loss=MeaningfulLossConfig(weight_image=0.1, weight_scalar=1.0, weight_spectrum=0.1),
    )  # fmt: skip
    model = CausalTransformerLM(vocab.vocab_size, vocab.n_types, 64, 2, 4, 128, 0.1, 128)
    books = {"image_codebook": tokenizers.image.codebook, "spectrum_codebook": tokenizers.spectrum.codebooks}
    initialise_from_codebooks(model, vocab, **books)
    trainer = AstroTrainer(
        model,
        vocab,
        build_loader(ScalarDropout(sequences, vocab, share=0.5, scalars_last=0.5), training),
        training,
        **books,
        scalar_centers=tokenizers.scalar.codebook,
        output_dir=arguments.out,
    )
    val_loader = build_loader(val_sequences, training, shuffle=False)
    history = trainer.train(val_loader=val_loader, resume_from="auto")

    print(f"validation cross-entropy {history[-1]['val_loss_ce']:.3f} after {len(history)} epochs")
    for result in cross_predict(model, tokenizers, train, test, scalars_last=True):
        scores = result.scores()
        explained = ", ".join(f"{method} {scores[method]['explained']:.2f}" for method in ("model", "ridge"))
        given = result.question.given if isinstance(result.question.given, str) else "scalars"
        print(f"{result.question.target} from {given}: variance explained {explained}")


if __name__ == "__main__":
    main()

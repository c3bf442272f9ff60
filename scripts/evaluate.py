"""Evaluate a checkpoint of scripts/train.py or `treadle train graphs`.

python scripts/evaluate.py checkpoint=logs/experiment/checkpoints/best.pt
"""

from __future__ import annotations

from typing import Any

import hydra

from treadle.cli.scripts import evaluate


@hydra.main(version_base="1.3", config_path="../configs", config_name="evaluate")
def main(cfg: Any) -> None:
    evaluate(cfg)


if __name__ == "__main__":
    main()

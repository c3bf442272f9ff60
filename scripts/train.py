"""Train a graph transformer.

python scripts/train.py dataset=nci model=graph_transformer pe=default
python scripts/train.py -m seed=0,1,2 dataset=nci model=light train=light    # a sweep
"""

from __future__ import annotations

import sys
from typing import Any

import hydra

from treadle.cli.scripts import for_hydra, train


@hydra.main(version_base="1.3", config_path="../configs", config_name="config")
def main(cfg: Any) -> float | None:
    return train(cfg)


if __name__ == "__main__":
    sys.argv[1:] = for_hydra(sys.argv[1:])
    main()

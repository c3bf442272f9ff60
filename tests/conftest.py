"""What holds for the whole suite."""

from __future__ import annotations

import torch

# Many tests fork a child that trains and is killed. OpenMP's threads do not survive a fork: a child of a process that
# has run a parallel region waits for ever in its first one. One thread also makes the suite faster on small tensors.
torch.set_num_threads(1)

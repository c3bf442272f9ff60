"""``torchrun`` whose ranks are forked from it: all is as it is else, but a rank's start costs no import of torch."""

from __future__ import annotations

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.run import main

from processes import Forked

if __name__ == "__main__":
    subprocess_handler.Popen = Forked
    main()

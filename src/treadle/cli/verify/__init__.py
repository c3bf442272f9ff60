"""``treadle verify``: runs a target straight and again with kills, and compares the two step by step.

``command`` is the command line, ``runs`` what is run in which order, ``server`` and ``child`` run the target in
processes of their own, ``recorder`` and ``evidence`` write down what happened in them, ``compare`` finds the first
difference, ``causes`` explains it and ``report`` prints it.
"""

from __future__ import annotations

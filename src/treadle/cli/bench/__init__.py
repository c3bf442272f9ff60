"""``treadle bench``: where the time of a step goes, its lower bound, and settings that would make it faster.

``command`` is the command line, ``target`` runs the target, ``session`` is the hook that measures it. ``watch`` wraps
the parts of a step and ``timing`` times them, ``counting`` counts calls and reads, ``floor`` measures the machine,
``trials`` and ``loaders`` try settings, ``advice`` interprets the figures, ``result`` holds them and ``report`` prints
them.
"""

from __future__ import annotations

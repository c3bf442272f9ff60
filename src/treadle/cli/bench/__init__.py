"""``treadle bench``: where the time of a step goes, what the floor would be, and what to switch on.

``command`` is the command line, ``target`` runs the target, ``session`` is the hook that measures in it. ``watch``
wraps the parts of a step and ``timing`` times them, ``counting`` counts calls and reads, ``floor`` measures the
machine, ``trials`` and ``loaders`` try settings, ``advice`` judges the figures, ``result`` holds and ``report``
prints them.
"""

from __future__ import annotations

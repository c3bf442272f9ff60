"""Verification: a target run without a stop and again with kills, compared step by step.

``runs`` plans and starts the runs, ``server`` and ``child`` run the target in separate processes, ``recorder`` and
``evidence`` record them, ``compare`` finds the first difference, ``causes`` explains it and ``describe`` formats it.
The public function is in :mod:`treadle.runs.exact`.
"""

from __future__ import annotations

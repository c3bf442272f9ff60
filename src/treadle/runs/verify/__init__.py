"""A target run straight and again with kills, compared step by step.

``runs`` plans and starts the runs, ``server`` and ``child`` run the target in separate processes, ``recorder`` and
``evidence`` record what happened in them, ``compare`` finds the first difference, ``causes`` explains it and
``describe`` puts it into words. :mod:`treadle.runs.exact` has the function.
"""

from __future__ import annotations

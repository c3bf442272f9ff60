"""Pytest fixture ``treadle_exact``, which fails a test whose training does not resume to the bit.

Enabled by ``pytest_plugins = ["treadle.runs.pytest_plugin"]`` in ``conftest.py``. It is not an entry point, since
pytest would then rewrite the assertions of every module of the package.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from treadle.runs.verify.runs import Verification


class ExactCheck(Protocol):
    """Value of the fixture ``treadle_exact``: a callable check."""

    def __call__(
        self,
        target: str | os.PathLike[str] | Callable[[], Any],
        arguments: Sequence[str] = ...,
        *,
        steps: int | None = ...,
        kills: int = ...,
        seed: int = ...,
    ) -> Verification:
        """Verify a target with :func:`treadle.verify` and fail the test unless it is exact."""
        ...


@pytest.fixture
def treadle_exact() -> ExactCheck:
    """Return a function that fails the test unless a training resumes to the bit after kills.

    Example:
        >>> # def test_my_training_resumes_exactly(treadle_exact):
        >>> #     treadle_exact("train.py", steps=12)
    """

    def check(*args: Any, **kwargs: Any) -> Verification:
        from treadle.runs.exact import verify

        result = verify(*args, **kwargs)
        if result.verdict != "EXACT":
            pytest.fail(str(result), pytrace=False)
        return result

    return check

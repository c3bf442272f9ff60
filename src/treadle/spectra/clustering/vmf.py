"""Mixtures of von Mises-Fisher distributions, fitted by expectation-maximisation.

Density of one component on the unit sphere in R^d: C(d, kappa) exp(kappa mu . x). Method: Banerjee, Dhillon,
Ghosh and Sra, JMLR 2005. Shape suffixes: N rows, D columns (d), K components, B rows of one block, n draws.
"""

from __future__ import annotations

import math
import os
from typing import Any, Literal

import torch
from torch import Tensor

from treadle.errors import ConfigError
from treadle.errors.arguments import check_argument, check_least

from ._directions import Directions
from ._em import Parameters, Scorer, expect, maximise, start
from ._rows import (
    DeviceLike,
    RowsLike,
    UnitRows,
    check_count,
    compute_dtype,
    make_generator,
    normalised,
)
from ._store import load_plain, save_atomic
from .bessel import bessel_ratio, log_normalizer

_KIND = "treadle.spectra.VMFMixture"


def vmf_log_normalizer(d: int, kappa: float | Tensor) -> Tensor:
    """Return log C(d, kappa) = nu log kappa - (nu + 1) log 2 pi - log I_nu(kappa), nu = d/2 - 1.

    At kappa = 0 this is log Gamma(d/2) - log 2 - (d/2) log pi. Relative error below 1e-5 (in practice near rounding)
    for 2 <= d <= 512 and 0 <= kappa <= 1e4. Bessel functions: DLMF 10.41 and 10.33 (see `bessel`).

    Args:
        d: dimension of the space around the sphere, at least 2.
        kappa: concentration, finite and >= 0; any shape.

    Returns:
        float64 tensor with the shape (0-d for a number) and device of `kappa` (float32 on MPS).

    Raises:
        ValueError: d < 2, or kappa is negative or not finite.

    Example:
        >>> round(float(vmf_log_normalizer(64, 12.0)), 6)
        39.661098
    """
    check_count("d", d, least=2)
    kappa64, home = _check_kappa(kappa)
    return log_normalizer(d, kappa64).to(compute_dtype(home)).to(home)


def vmf_bessel_ratio(d: int, kappa: float | Tensor) -> Tensor:
    """Return I_{nu+1}(kappa) / I_nu(kappa), nu = d/2 - 1: the mean cosine of samples to their mean direction.

    Gauss continued fraction with the Debye expansion as its tail (DLMF 10.33.1, 10.41.3): accurate to rounding.
    Arguments, result and errors are as for `vmf_log_normalizer`; values in [0, 1].

    Example:
        >>> round(float(vmf_bessel_ratio(3, 12.0)), 6)
        0.916667
    """
    check_count("d", d, least=2)
    kappa64, home = _check_kappa(kappa)
    return bessel_ratio(d / 2 - 1, kappa64).to(compute_dtype(home)).to(home)


def _check_kappa(kappa: float | Tensor) -> tuple[Tensor, torch.device]:
    """Return kappa as float64 on the CPU (MPS has no float64), and its original device."""
    given = torch.as_tensor(kappa, dtype=None if isinstance(kappa, Tensor) else torch.float64).detach()
    kappa64 = given.to("cpu").to(torch.float64)
    bad = ~(torch.isfinite(kappa64) & (kappa64 >= 0))
    if bool(bad.any()):
        value = float(kappa64[bad].flatten()[0])
        raise ConfigError(
            f"={value} must be finite and >= 0; clamp it, for example kappa.clamp(min=0).", argument="kappa"
        )
    return kappa64, given.device


class VMFMixture(Directions):
    """Mixture of K von Mises-Fisher distributions on unit rows, fitted by EM.

    The log-likelihood never decreases by more than rounding. kappa solves ratio(kappa) = R, the mean length of the rows
    of a component, by Newton steps (to 1e-6 and beyond). A component with fewer than two rows keeps its kappa, since
    one row has no spread; one that loses all rows keeps its direction, with weight 0.

    Args:
        n_components: number of components K, at least 1 and at most N.
        d: number of columns, at least 2; None infers it from the first `fit`.
        device: device for blocks of rows; None selects CUDA, then MPS, then CPU.
        random_state: seed of a private generator; the global generators are not touched.
        tol: stop when the mean log-likelihood per row improves by less than this, >= 0.
        max_iter: maximum number of EM iterations, at least 1.
        init: "kmeans++" (by cosine distance) or "random" (distinct rows).

    Attributes:
        mus: (K, D) unit mean directions.
        kappas: (K,) concentrations, >= 0.
        logpi: (K,) logarithms of the weights. All three are on the device in the dtype of X, or float32.
        loglik_history_: log-likelihood of the rows at each iteration; set by `fit`.
        n_iter_: number of iterations; set by `fit`.

    Raises:
        ValueError: a setting is out of range, a row is zero or not finite, d differs, or K > N.

    Example:
        >>> noise = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
        >>> rows = torch.eye(3).repeat(20, 1) + 0.1 * noise
        >>> VMFMixture(3, device="cpu").fit(rows).predict_proba(rows).shape
        torch.Size([60, 3])
    """

    def __init__(
        self,
        n_components: int,
        d: int | None = None,
        device: DeviceLike = None,
        random_state: int | None = 42,
        tol: float = 1e-4,
        max_iter: int = 200,
        init: Literal["kmeans++", "random"] = "kmeans++",
    ) -> None:
        self.n_components = check_count("n_components", n_components)
        self.d = None if d is None else check_count("d", d, least=2)
        check_argument("tol", tol, float)
        check_least(0, tol=tol)
        check_argument("init", init, Literal["kmeans++", "random"])
        self.tol = float(tol)
        self.max_iter = check_count("max_iter", max_iter)
        self.init = init
        self.device = device
        self.random_state = random_state

    @property
    def mus(self) -> Tensor:
        """(K, D) unit mean directions; raises RuntimeError before `fit`."""
        return self._fitted().mus_KD

    @property
    def kappas(self) -> Tensor:
        """(K,) concentrations, >= 0; raises RuntimeError before `fit`."""
        return self._fitted().kappas_K

    @property
    def logpi(self) -> Tensor:
        """(K,) logarithms of the weights, which sum to 1; raises RuntimeError before `fit`."""
        return self._fitted().logpi_K

    def fit(self, X: RowsLike, y: object = None, *, chunk: int | None = None) -> VMFMixture:
        """Fit the mixture to X (N, D), with at most `chunk` rows on the device at once; return self."""
        rows = UnitRows(X, device=self.device, chunk=chunk)
        if self.d is not None and rows.d != self.d:
            raise ConfigError(f"X has D={rows.d} columns, but d={self.d}; build a new mixture for other rows.")
        if self.n_components > rows.n:
            raise ConfigError(
                f"={self.n_components} must be at most the number of rows, N={rows.n}; "
                "ask for fewer components or pass more rows.",
                argument="n_components",
            )
        if rows.d < 2:
            raise ConfigError("has 1 feature(s) (n_features = 1), must have 2 or more", argument="X")
        parameters = start(rows, self.n_components, init=self.init, generator=make_generator(self.random_state))
        self.loglik_history_: list[float] = []
        for iteration in range(1, self.max_iter + 1):
            loglik, counts_K, sums_KD = expect(rows, parameters)
            self.loglik_history_.append(loglik)
            self.n_iter_ = iteration
            if iteration > 1 and loglik - self.loglik_history_[-2] < self.tol * rows.n:
                break
            parameters = maximise(parameters, counts_K, sums_KD, rows.n)
        self._keep(Parameters(*(t.to(rows.out_dtype).to(self.device) for t in parameters)))
        return self

    def fit_predict(self, X: RowsLike, y: object = None, *, chunk: int | None = None) -> Tensor:
        """Fit X (N, D) and return its labels (N,), like `fit` followed by `predict`."""
        return self.fit(X, chunk=chunk).predict(X, chunk=chunk)

    def predict(self, X: RowsLike, *, chunk: int | None = None) -> Tensor:
        """Return the most probable component of each row: (N,) int64, on the device of X."""
        rows, scorer = self._fitted_rows(X, chunk), self._scorer()
        labels = [scorer(block_BD).argmax(dim=1).to(rows.home) for _, block_BD in rows.blocks()]
        return torch.cat(labels)

    def predict_proba(self, X: RowsLike, *, chunk: int | None = None) -> Tensor:
        """Return the probability of each component for each row: (N, K), rows sum to 1, on the device of X."""
        rows, scorer = self._fitted_rows(X, chunk), self._scorer()
        blocks = (torch.softmax(scorer(block_BD), dim=1) for _, block_BD in rows.blocks())
        return torch.cat([block_BK.to(rows.out_dtype).to(rows.home) for block_BK in blocks])

    def loglik(self, X: RowsLike, *, chunk: int | None = None, average: bool = False) -> float:
        """Return the log-likelihood of X in nats: the sum over rows, or the mean with `average`."""
        rows, scorer = self._fitted_rows(X, chunk), self._scorer()
        total = 0.0
        for _, block_BD in rows.blocks():
            total += float(torch.logsumexp(scorer(block_BD), dim=1).sum())
        return total / rows.n if average else total

    def score(self, X: RowsLike, y: object = None) -> float:
        """Return the mean log-likelihood of the rows of X (N, D); higher is better."""
        return self.loglik(X, average=True)

    def bic(self, X: RowsLike, *, chunk: int | None = None) -> float:
        """Return -2 loglik + (K d + K - 1) ln N (Schwarz 1978); lower is better."""
        return -2.0 * self.loglik(X, chunk=chunk) + self.num_params() * math.log(len(X))

    def num_params(self) -> int:
        """Return the number of free parameters, K d + K - 1; raise RuntimeError before `fit`."""
        return self.n_components * self.mus.shape[1] + self.n_components - 1

    def sample(self, n: int) -> Tensor:
        """Draw n samples (n, D) of unit length on the device; with a fixed seed, every call returns the same samples.

        Source: Wood, Communications in Statistics 1994. Raises ValueError if n < 1.
        """
        count = check_count("n", n)
        generator = make_generator(self.random_state)
        fitted = self._fitted()
        mus_KD = normalised(fitted.mus_KD.cpu().double())
        weights_K = torch.softmax(fitted.logpi_K.cpu().double(), dim=0)
        which_n = torch.multinomial(weights_K, count, replacement=True, generator=generator)
        kappas_n = fitted.kappas_K.cpu().double()[which_n]
        draws_nD = sample_directions(mus_KD[which_n], kappas_n, generator=generator)
        return draws_nD.to(fitted.mus_KD.dtype).to(self.device)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the settings and parameters to `path` atomically."""
        names = ("n_components", "d", "random_state", "tol", "max_iter", "init")
        payload: dict[str, Any] = {"kind": _KIND, **{name: getattr(self, name) for name in names}}
        for name in ("mus", "kappas", "logpi"):
            payload[name] = getattr(self, name).cpu().contiguous()
        save_atomic(payload, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], map_location: DeviceLike = None) -> VMFMixture:
        """Load the mixture saved at `path`, here or in chemomae, on `map_location` (None: CUDA, then MPS, then CPU).

        Raises:
            ValueError: the file is of another kind, or lacks an entry.
        """
        names = ("n_components", "d", "random_state", "tol", "max_iter", "init")
        keys = (*names, "mus", "kappas", "logpi")
        payload = load_plain(path, kind=_KIND, keys=keys, chemomae={"n_components": "K"})
        model = cls(**{name: payload[name] for name in names}, device=map_location)
        tensors = [payload[name] for name in ("mus", "kappas", "logpi")]
        if compute_dtype(model.device) == torch.float32:
            tensors = [tensor.float() for tensor in tensors]
        model._keep(Parameters(*(tensor.to(model.device) for tensor in tensors)))
        return model

    def _keep(self, parameters: Parameters) -> None:
        self._parameters, self._directions_KD = parameters, parameters.mus_KD

    def _fitted(self) -> Parameters:
        self._fitted_directions()
        return self._parameters

    def _scorer(self) -> Scorer:
        mus_KD, kappas_K, logpi_K = (tensor.cpu().double() for tensor in self._fitted())
        # The stored directions are rounded to the dtype of X; kappa would amplify the error of their length.
        return Scorer(Parameters(normalised(mus_KD), kappas_K, logpi_K), self.device)


def sample_directions(mus_nD: Tensor, kappas_n: Tensor, *, generator: torch.Generator) -> Tensor:
    """Draw one sample (n, D) per mean direction and concentration; kappa = 0 gives uniform directions."""
    cosine_n1 = _sample_cosines(kappas_n, mus_nD.shape[1], generator=generator)[:, None]
    tangent_nD = torch.randn(mus_nD.shape, generator=generator, dtype=torch.float64, device="cpu")
    tangent_nD = tangent_nD - (tangent_nD * mus_nD).sum(dim=1, keepdim=True) * mus_nD
    sine_n1 = (1 - cosine_n1**2).clamp(min=0.0).sqrt()
    return normalised(cosine_n1 * mus_nD + sine_n1 * normalised(tangent_nD))


def _sample_cosines(kappas_n: Tensor, d: int, *, generator: torch.Generator) -> Tensor:
    """Draw the cosine of each sample to its mean direction, by rejection from Wood's envelope."""
    b_n = (d - 1) / (2 * kappas_n + torch.sqrt(4 * kappas_n**2 + (d - 1) ** 2))
    centre_n = (1 - b_n) / (1 + b_n)
    limit_n = kappas_n * centre_n + (d - 1) * torch.log(4 * b_n / (1 + b_n) ** 2)  # 1 - centre^2
    cosine_n = torch.empty_like(kappas_n)
    waiting_M = torch.arange(len(kappas_n), device="cpu")
    while len(waiting_M) > 0:
        b_M, centre_M, kappa_M = b_n[waiting_M], centre_n[waiting_M], kappas_n[waiting_M]
        # (1 + first coordinate of a uniform direction in R^d) / 2 follows Beta((d-1)/2, (d-1)/2).
        normal_MD = torch.randn(len(waiting_M), d, generator=generator, dtype=torch.float64, device="cpu")
        beta_M = (1 + normal_MD[:, 0] / torch.linalg.vector_norm(normal_MD, dim=1)) / 2
        value_M = (1 - (1 + b_M) * beta_M) / (1 - (1 - b_M) * beta_M)
        uniform_M = torch.rand(len(waiting_M), generator=generator, dtype=torch.float64, device="cpu")
        log_density_M = kappa_M * value_M + (d - 1) * torch.log1p(-centre_M * value_M)
        accepted_M = log_density_M - limit_n[waiting_M] >= torch.log(uniform_M)
        cosine_n[waiting_M[accepted_M]] = value_M[accepted_M]
        waiting_M = waiting_M[~accepted_M]
    return cosine_n

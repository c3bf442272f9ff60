"""Data set of precomputed tokens in files: one table and up to three token files per field.

The files are astromodal's: ``tokens_flat``, ``scalar_tokens``, and ``tokens_{group}_flat`` with ``_indptr``, each
together with ``ids``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from treadle.astro.fields import norm_gaia_id, norm_splus_id
from treadle.astro.survey_files import read_columns
from treadle.astro.vocab import FIRST_SPECTRUM_TYPE, IMAGE_TYPE, VocabSpec
from treadle.checkpoint.store import write_bytes
from treadle.errors import ConfigError
from treadle.errors.arguments import check_least, checked

_log = logging.getLogger("treadle.astro")

_BOS_TYPE, _EOS_TYPE, _SEP_TYPE, _SCALAR_TYPE = 1, 2, 3, 6


class FieldIndex:
    """Index of the objects of one field and their tokens.

    Args:
        field: name of the field.
        templates: paths with ``{field}`` for ``datacube``, ``image``, ``scalar`` and ``spectrum``; a token file may be
            missing.
        spectrum_groups: group name -> keys of its tokens and of the start offsets of each object.
        filters: ``mag_col``, ``magerr_col``, ``mag_min``, ``mag_max``, ``magerr_max``.
        allow_pickle: allow unpickling of ids in token files. This **runs code** from the file.

    Raises:
        FileNotFoundError: the table does not exist.
        ConfigError: a file has pickled ids and ``allow_pickle`` is False.
    """

    def __init__(
        self,
        field: str,
        templates: Mapping[str, str],
        spectrum_groups: Mapping[str, tuple[str, str]],
        filters: Mapping[str, Any],
        *,
        allow_pickle: bool = False,
    ):
        self.field = field
        table = read_columns(
            templates["datacube"].format(field=field),
            ["id", "gaia_source_id", filters["mag_col"], filters["magerr_col"]],
        )
        self.rows = np.flatnonzero(_kept(table, filters))
        self._ids = [norm_splus_id(value) for value in table["id"]]
        self._gaia_ids = [norm_gaia_id(value) for value in table["gaia_source_id"]]
        keys = {
            "image": ["tokens_flat"], "scalar": ["scalar_tokens", "N_BINS"],
            "spectrum": [key for pair in spectrum_groups.values() for key in pair],
        }  # fmt: skip
        files = {
            kind: _read(templates[kind].format(field=field), ["ids", *names], allow_pickle)
            for kind, names in keys.items()
        }
        self._images = files["image"].get("tokens_flat")
        self._image_rows = _places(files["image"], norm_gaia_id) if self._images is not None else {}
        self._scalars = files["scalar"].get("scalar_tokens")
        self._bins = int(files["scalar"].get("N_BINS", 1024))
        self._scalar_rows = _places(files["scalar"], norm_splus_id) if self._scalars is not None else {}
        spectra = files["spectrum"]
        self._spectrum_rows = _places(spectra, norm_splus_id)
        self._spectra = {
            group: (spectra[flat], spectra[places])
            for group, (flat, places) in spectrum_groups.items()
            if flat in spectra and places in spectra
        }

    def __len__(self) -> int:
        """Return the number of objects that pass the filters."""
        return len(self.rows)

    def get_row(self, idx: int) -> dict[str, Any]:
        """Return the tokens of a table row; None for absent modalities."""
        image_row = self._image_rows.get(self._gaia_ids[idx])
        scalar_row = self._scalar_rows.get(self._ids[idx])
        spectrum_row = self._spectrum_rows.get(self._ids[idx])
        spectra = {}
        if spectrum_row is not None:
            for group, (flat, places) in self._spectra.items():
                spectra[group] = flat[int(places[spectrum_row]) : int(places[spectrum_row + 1])]
        return {
            "image_tokens": None if image_row is None or self._images is None else self._images[image_row],
            "scalar_tokens": None if scalar_row is None or self._scalars is None else self._scalars[scalar_row],
            "scalar_n_bins": self._bins,
            "spectrum_tokens": spectra,
        }


def _kept(table: Mapping[str, NDArray[Any]], filters: Mapping[str, Any]) -> NDArray[np.bool_]:
    mag, error = (np.asarray(table[filters[name]], dtype=float) for name in ("mag_col", "magerr_col"))
    kept: NDArray[np.bool_] = (mag > filters["mag_min"]) & (mag < filters["mag_max"]) & (error < filters["magerr_max"])
    return kept


def _read(path: str, names: Sequence[str], allow_pickle: bool) -> dict[str, Any]:
    """Read the arrays of these names that a file has; pickled ones under other names do not matter."""
    if not os.path.exists(path):
        return {}
    with np.load(path, allow_pickle=allow_pickle) as opened:
        try:
            return {name: opened[name] for name in names if name in opened.files}
        except ValueError as error:
            raise ConfigError(
                f"{path!r} holds pickled values ({error}); write its ids as text or whole numbers, or pass "
                "allow_pickle=True for files that you trust"
            ) from error


def _places(file: Mapping[str, Any], norm: Any) -> dict[Any, int]:
    found = {norm(value): row for row, value in enumerate(file["ids"])} if "ids" in file else {}
    return {key: row for key, row in found.items() if key not in (None, "")}


class MultiFieldTokenDataset(Dataset[dict[str, Tensor]]):
    """Data set of sequences over many fields: BOS, image, SEP, scalars, SEP, each spectrum group and SEP, EOS.

    A modality that an object lacks is omitted with its SEP, as in astromodal; `encode_sequence` puts MISS in its place.
    An item has ``token_ids`` and ``type_ids``, long (L,), which `collate_sequences` pads. A field's files are read when
    one of its objects is first requested, and the most recently used fields are cached.

    Args:
        fields: field names.
        vocab: the vocabulary.
        datacube_template: path of a field's table with ``{field}``, in a format that `read_columns` reads; it has
            ``id``, ``gaia_source_id`` and the columns of the filters. Fields without a table are skipped.
        image_tokens_template: path of a field's image tokens, ``.npz``.
        scalar_tokens_template: path of its scalar bins.
        spectrum_tokens_template: path of its spectrum tokens.
        spectrum_groups: group name -> keys of its tokens and of the start offsets of each object.
        mag_col: column of the magnitude, filtered to between ``mag_min`` and ``mag_max``.
        magerr_col: column of its error, filtered to below ``magerr_max``.
        mag_min: exclusive.
        mag_max: exclusive.
        magerr_max: exclusive.
        index_cache: ``.npz`` file that caches the list of objects; None disables caching. A cache made with other
            settings is rebuilt.
        lru_fields: number of fields kept in memory.
        seed: seed for shuffling the objects; None keeps the order of the files.
        max_image_tokens: maximum per object; the rest is truncated.
        max_scalar_tokens: the same for scalars.
        max_spec_tokens_per_group: the same for each group.
        allow_pickle: allow unpickling of ids in token files. This **runs code** from the file.

    Attributes:
        index_field, index_row: field and table row of each object.

    Raises:
        ConfigError: a group or token is not in the vocabulary, or a number is out of range.

    Example:
        >>> # loader = DataLoader(MultiFieldTokenDataset(fields, vocab, ...), collate_fn=collate_sequences)
    """

    @checked
    def __init__(
        self,
        fields: Sequence[str],
        vocab: VocabSpec,
        datacube_template: str,
        image_tokens_template: str,
        scalar_tokens_template: str,
        spectrum_tokens_template: str,
        spectrum_groups: Mapping[str, tuple[str, str]],
        mag_col: str = "mag_pstotal_r",
        magerr_col: str = "err_mag_pstotal_r",
        mag_min: float = 14.0,
        mag_max: float = 22.0,
        magerr_max: float = 2.0,
        index_cache: str | os.PathLike[str] | None = None,
        lru_fields: int = 8,
        *,
        seed: int | None = 0,
        max_image_tokens: int = 576,
        max_scalar_tokens: int = 512,
        max_spec_tokens_per_group: int = 512,
        allow_pickle: bool = False,
    ):
        check_least(1, lru_fields=lru_fields)
        if strange := [group for group in spectrum_groups if group not in vocab.spectrum_groups]:
            raise ConfigError(
                f"has {', '.join(strange)}, the vocabulary {', '.join(vocab.spectrum_groups)}",
                argument="spectrum_groups",
            )
        self.fields, self.vocab, self.lru_fields = list(fields), vocab, lru_fields
        self._templates = {
            "datacube": str(datacube_template), "image": str(image_tokens_template),
            "scalar": str(scalar_tokens_template), "spectrum": str(spectrum_tokens_template),
        }  # fmt: skip
        self._groups = {name: (keys[0], keys[1]) for name, keys in spectrum_groups.items()}
        self._filters: dict[str, Any] = {
            "mag_col": mag_col, "magerr_col": magerr_col, "mag_min": mag_min, "mag_max": mag_max,
            "magerr_max": magerr_max,
        }  # fmt: skip
        self._limits = (max_image_tokens, max_scalar_tokens, max_spec_tokens_per_group)
        self._seed, self._allow_pickle = seed, allow_pickle
        self._open: OrderedDict[str, FieldIndex] = OrderedDict()
        self.index_field, self.index_row = self._index(None if index_cache is None else Path(index_cache))

    def _index(self, cache: Path | None) -> tuple[list[str], NDArray[np.int32]]:
        settings = json.dumps([self.fields, self._templates["datacube"], self._filters, self._seed])
        mark = hashlib.sha256(settings.encode()).hexdigest()
        if cache is not None and cache.exists():
            stored = _read(str(cache), ("settings", "field", "row"), False)
            if str(stored.get("settings")) == mark:
                return [str(name) for name in stored["field"]], stored["row"]
            _log.warning("%s was made with other fields or filters and is made again", cache)
        names, rows = [], []
        for field in self.fields:
            path = self._templates["datacube"].format(field=field)
            if not os.path.exists(path):
                continue
            table = read_columns(path, [self._filters["mag_col"], self._filters["magerr_col"]])
            kept = np.flatnonzero(_kept(table, self._filters)).astype(np.int32)
            names += [field] * len(kept)
            rows.append(kept)
        row = np.concatenate(rows) if rows else np.empty(0, dtype=np.int32)
        if self._seed is not None:
            order = np.random.default_rng(self._seed).permutation(len(row))
            row, names = row[order], [names[place] for place in order]
        if cache is not None:
            content: dict[str, Any] = {"field": np.array(names, dtype=str), "row": row, "settings": np.array(mark)}
            write_bytes(lambda file: np.savez_compressed(file, **content), cache)
        return names, row

    def __len__(self) -> int:
        """Return the number of objects."""
        return len(self.index_row)

    def field_index(self, field: str) -> FieldIndex:
        """Return the index of a field, read from its files unless cached."""
        if field not in self._open:
            self._open[field] = FieldIndex(
                field,
                self._templates,
                self._groups,
                self._filters,
                allow_pickle=self._allow_pickle,
            )
            while len(self._open) > self.lru_fields:
                self._open.popitem(last=False)
        self._open.move_to_end(field)
        return self._open[field]

    def __getitem__(self, idx: int) -> dict[str, Tensor]:
        """Return the sequence of an object."""
        found = self.field_index(self.index_field[idx]).get_row(int(self.index_row[idx]))
        vocab = self.vocab
        parts = [(found["image_tokens"], vocab.base_image, IMAGE_TYPE, self._limits[0], vocab.v_image)]
        scalars = found["scalar_tokens"]
        if scalars is not None:  # each column has its own bins
            scalars = np.asarray(scalars, dtype=np.int64) + found["scalar_n_bins"] * np.arange(len(scalars))
        parts.append((scalars, vocab.base_scalar, _SCALAR_TYPE, self._limits[1], vocab.v_scalar))
        for group, tokens in found["spectrum_tokens"].items():
            kind = FIRST_SPECTRUM_TYPE + vocab.spectrum_groups.index(group)
            parts.append((tokens, vocab.base_spectrum[group], kind, self._limits[2], vocab.v_spectra))
        ids, types = [vocab.bos_id], [_BOS_TYPE]
        for tokens, base, kind, limit, size in parts:
            if tokens is None or not np.size(tokens):
                continue
            numbers = np.asarray(tokens, dtype=np.int64).reshape(-1)[:limit]
            if numbers.min() < 0 or numbers.max() >= size:
                raise ConfigError(
                    f"object {idx}, row {self.index_row[idx]} of {self.index_field[idx]}, has a token of type {kind} "
                    f"outside 0 to {size - 1}: the vocabulary is not that of the files"
                )
            ids += [*(numbers + base).tolist(), vocab.sep_id]
            types += [kind] * len(numbers) + [_SEP_TYPE]
        return {"token_ids": torch.tensor([*ids, vocab.eos_id]), "type_ids": torch.tensor([*types, _EOS_TYPE])}

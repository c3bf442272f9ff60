"""Registry of packs by name: treadle's own, and those of other packages by the entry point ``treadle.packs``."""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.errors import ConfigError, nearest
from treadle.runs.folder import read_record

if TYPE_CHECKING:
    from treadle.runs.pack import Pack

PACKS = {
    "spectra": "treadle.spectra.runs:PACK",
    "text": "treadle.text.runs:PACK",
    "graphs": "treadle.graphs.runs:PACK",
    "astro": "treadle.astro.runs:PACK",
}
SUMMARIES = {
    "spectra": "A masked autoencoder on near-infrared spectra of stars.",
    "text": "A small GPT-2 on Python's manual, then LoRA.",
    "graphs": "A graph transformer on molecules.",
    "astro": "A transformer on tokens of pictures, spectra and tables.",
}  # of treadle's own packs, listed without importing them
GROUP = "treadle.packs"


def _places() -> dict[str, EntryPoint]:
    own = {name: EntryPoint(name, place, GROUP) for name, place in PACKS.items()}
    return {entry.name: entry for entry in entry_points(group=GROUP)} | own  # no package can replace a pack of treadle


def pack_names() -> list[str]:
    """Return the names of all packs, treadle's own first, without importing them.

    Example:
        >>> pack_names()[:4]
        ['spectra', 'text', 'graphs', 'astro']
    """
    return [*PACKS, *(name for name in _places() if name not in PACKS)]


def module_of(name: str) -> str:
    """Return the module name of a pack.

    Example:
        >>> module_of("spectra")
        'treadle.spectra.runs'
    """
    return _places()[name].module


def find_pack(name: str) -> Pack[Any, Any, Any]:
    """Import and return a pack.

    Raises:
        ConfigError: there is no such pack, its module cannot be imported, or its entry point is not a pack.

    Example:
        >>> find_pack("spectra").name
        'spectra'
    """
    places = _places()
    if name not in places:
        raise ConfigError(f"there is no such pack; {nearest(str(name), pack_names())}", argument="face", value=name)
    entry = places[name]
    if name in PACKS:
        return getattr(importlib.import_module(entry.module), entry.attr)  # type: ignore[no-any-return]
    try:
        found = entry.load()
    except Exception as error:  # code of another package
        raise ConfigError(
            f"the entry point {entry.value!r} cannot be loaded ({type(error).__name__}: {error}); fix or uninstall "
            "its package",
            argument="face",
            value=name,
        ) from error
    from treadle.runs.pack import Pack

    if not isinstance(found, Pack) or found.name != name:
        what = f"a pack called {found.name!r}" if isinstance(found, Pack) else f"a {type(found).__name__}"
        raise ConfigError(
            f"the entry point {entry.value!r} is {what}, but must be a treadle.runs.pack.Pack with name = {name!r}",
            argument="face",
            value=name,
        )
    return found


def pack_of_folder(run: Path) -> Pack[Any, Any, Any] | None:
    """Return the pack of a run folder or of the folder of a part of the run; None if there is none.

    Raises:
        ConfigError: its pack is not installed.

    Example:
        >>> pack_of_folder(Path("no_such_run")) is None
        True
    """
    record, place = read_record(run), run.absolute()
    if record is not None:
        return find_pack(record.face) if record.entries is None else None
    record = read_record(place.parent)
    if record is None or record.entries is not None:
        return None
    pack = find_pack(record.face)
    return pack if place.name in pack.parts else None

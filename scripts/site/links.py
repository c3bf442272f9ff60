"""Makes the site of the pages in `docs`: what they link to in the rest of the repository becomes a page of the site.

mkdocs calls these functions, see `hooks` in mkdocs.yml. A link such as `../examples/mini_digits.py` is right in the
repository; on the site it leads to a page that shows the file. So one text serves both, and the site needs no network.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"(\]\()([^)#:\s]+)(#[^)\s]*)?(\))")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sbatch": "bash", ".json": "json", ".toml": "toml"}
LOADS = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^\"'>\s]+")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add a page for every file and folder outside `docs` that a page, or a page so added, links to."""
    pages = [(file.content_string, source_of(file, config)) for file in files.documentation_pages()]
    while pages:
        text, source = pages.pop()
        for target in outside(text, source.parent, config):
            uri = site_uri(target, config)
            if files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, content=as_page(target, root(config))))
                if target.suffix == ".md":
                    pages.append((target.read_text(encoding="utf-8"), target))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page that lead out of `docs`, or back into it, to their pages of the site."""
    source = source_of(page.file, config)
    is_added = page.file.abs_src_path is None
    if is_added and not source.exists():
        return markdown  # the page of a file of code

    def replaced(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(source.parent / match[2]))
        if resolved(match[2], source.parent, config) is not None:
            uri = site_uri(target, config)
        elif is_added and target.is_relative_to(config.docs_dir) and target.exists():
            uri = target.relative_to(config.docs_dir).as_posix()
        else:
            return match[0]
        here = posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")
        return f"{match[1]}{here}{match[3] or ''}{match[4]}"

    return LINK.sub(replaced, markdown)


def on_post_build(*, config: MkDocsConfig) -> None:
    """Refuse a site that would load anything from another machine."""
    for path in Path(config.site_dir).rglob("*.html"):
        loads = [found for found in LOADS.findall(path.read_text(encoding="utf-8")) if 'rel="canonical"' not in found]
        if loads:
            raise PluginError(f"{path.name} loads {loads[0]}: the site must work without a network")


def outside(text: str, folder: Path, config: MkDocsConfig) -> Iterator[Path]:
    """Yield what the links of a text lead to outside `docs`."""
    for match in LINK.finditer(text):
        target = resolved(match[2], folder, config)
        if target is not None:
            yield target


def resolved(link: str, folder: Path, config: MkDocsConfig) -> Path | None:
    """Return the file or folder that a link leads to, or None if it stays in `docs` or leads nowhere."""
    target = Path(os.path.normpath(folder / link))
    inside = target.is_relative_to(config.docs_dir) or not target.is_relative_to(root(config))
    return None if inside or not target.exists() else target


def source_of(file: File, config: MkDocsConfig) -> Path:
    """Return the Markdown file in the repository that a page is made from; of a file of code it does not exist."""
    return Path(file.abs_src_path or root(config) / file.src_uri.removeprefix("repository/"))


def root(config: MkDocsConfig) -> Path:
    """Return the folder of the repository."""
    return Path(config.config_file_path).parent


def site_uri(target: Path, config: MkDocsConfig) -> str:
    """Return where the page of a file outside `docs` lies."""
    name = target.relative_to(root(config)).as_posix()
    return f"repository/{name.removesuffix('.md')}.md"


def as_page(target: Path, top: Path) -> str:
    """Return the text of the page for a file or folder."""
    if target.suffix == ".md":
        return target.read_text(encoding="utf-8")
    if target.suffix == ".ipynb":
        return notebook_page(target)
    paths = sorted(path for path in target.rglob("*") if is_shown(path, target)) if target.is_dir() else [target]
    parts = [f"# {target.relative_to(top).as_posix()}"]
    for path in paths:
        title = f' title="{path.relative_to(target).as_posix()}"' if target.is_dir() else ""
        text = path.read_text(encoding="utf-8").rstrip()
        parts.append(f"````{LANGUAGES.get(path.suffix, 'text')}{title}\n{text}\n````")
    return "\n\n".join(parts) + "\n"


def is_shown(path: Path, folder: Path) -> bool:
    """Return whether a file belongs on the page of its folder: no cache, no output of a run."""
    parts = path.relative_to(folder).parts
    return path.suffix in (".md", *LANGUAGES) and not any(part.startswith((".", "__pyc", "runs")) for part in parts)


def notebook_page(target: Path) -> str:
    """Return the cells of a notebook one below another."""
    parts = []
    for cell in json.loads(target.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"````python\n{text}\n````")
    return "\n\n".join(parts) + "\n"

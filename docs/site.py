"""Hooks of mkdocs: README and its neighbours become pages, files that pages link to are copied, and every folder of the
library gets a page of its docstrings.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from griffe import Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[1]
FROM_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)#\s]+)")


class Examples(Extension):
    """``Example:`` is what griffe calls ``Examples:``: code and what it prints."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)


def on_config(config: MkDocsConfig) -> None:
    """Anchors as GitHub makes them."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Pages of the root, the page of docstrings, and whatever pages link to in the repository."""
    for name, page in FROM_ROOT.items():
        files.append(File.generated(config, page, content=_relinked((ROOT / name).read_text(), ROOT)))
    for name, modules in reference().items():
        lines = [f"# {name}", *(f"::: {module}" for module in modules)]
        files.append(File.generated(config, f"reference/{name}.md", content="\n\n".join(lines)))
    for page in [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in FROM_ROOT)]:
        for target in _outside(page):
            if files.get_file_from_path(target.as_posix()) is None:
                place = File.generated(config, target.as_posix(), abs_src_path=str(ROOT / target))
                place.inclusion = InclusionLevel.NOT_IN_NAV
                files.append(place)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The links of a page, as the site has their targets."""
    return markdown if page.file.generated_by else _relinked(markdown, ROOT / "docs")


def _relinked(text: str, folder: Path) -> str:
    """The text with its links changed to the site's paths."""

    def target(link: re.Match[str]) -> str:
        place = _in_repository(folder, link[1])
        if place in FROM_ROOT:
            return FROM_ROOT[place]
        return place.removeprefix("docs/") if place else link[1]

    return LINK.sub(target, text)


def _outside(page: Path) -> list[Path]:
    """Files outside of docs/ that a page links to."""
    places = [_in_repository(page.parent, link) for link in LINK.findall(page.read_text())]
    return [Path(place) for place in dict.fromkeys(places) if place and _is_file(place)]


def _is_file(place: str) -> bool:
    return place not in FROM_ROOT and not place.startswith("docs/") and (ROOT / place).is_file()


def _in_repository(folder: Path, link: str) -> str | None:
    """Where a relative link leads, from the root; None outside of the repository."""
    place = posixpath.normpath(posixpath.join(folder.relative_to(ROOT).as_posix(), link))
    return None if place.startswith("..") else place


def reference() -> dict[str, list[str]]:
    """The modules of each folder of the library, and as ``logitless`` those that are in none."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "src" / "logitless").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        folder = path.relative_to(ROOT / "src").parts[1]
        if not path.name.startswith("__main__"):
            found.setdefault("logitless" if folder.endswith(".py") else folder, []).append(name)
    return found

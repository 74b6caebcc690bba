"""The site has every page of docs/ and every folder of the library; `make site` builds it and checks its links."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
FROM_ROOT = {"index.md", "contributing.md", "changes.md"}


def listed(entry):
    """The pages below an entry of the navigation."""
    if isinstance(entry, str):
        return [entry]
    return [page for each in (entry.values() if isinstance(entry, dict) else entry) for page in listed(each)]


def test_the_navigation_lists_every_page_once():
    pages = [page for page in listed(SITE["nav"]) if not page.startswith("reference/")]
    assert sorted(pages) == sorted({*(path.name for path in (ROOT / "docs").glob("*.md")), *FROM_ROOT})


def test_the_reference_has_a_page_for_every_folder_of_the_library():
    pages = {page for page in listed(SITE["nav"]) if page.startswith("reference/")}
    folders = {path.parent.name for path in (ROOT / "src" / "logitless").glob("*/__init__.py")}
    assert pages == {f"reference/{name}.md" for name in {*folders, "logitless"}}


def test_links_of_pages_lead_to_files_and_headings_never_to_folders():
    missing = []
    for path in [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md"))]:
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = path.parent / name if name else path
            if not target.is_file() or (anchor and anchor not in anchors(target)):
                missing.append(f"{path.name}: {link}")
    assert missing == []


def anchors(page):
    """What GitHub, and the site, call the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", each)).strip() for each in headings]
    return {each.lower().replace(" ", "-") for each in words}

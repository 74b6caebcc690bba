"""Pages that are made from the code are current, and `make docs` changes nothing else of them."""

import pytest

from docs.generate.__main__ import DOCS, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_the_committed_page_is_current(name):
    text = (DOCS / name).read_text(encoding="utf-8")
    assert text == PAGES[name](text), "run make docs"


@pytest.mark.parametrize("name", PAGES)
def test_the_words_around_what_is_made_stay(name):
    title, rest = (DOCS / name).read_text(encoding="utf-8").split("\n", 1)
    assert PAGES[name](f"{title} of ours\n{rest}") == f"{title} of ours\n{rest}"


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("configuration.md", "- `rank: 16`: "),
        ("metrics.md", "- `step`"),
        ("models.md", "|`qwen3_moe`|"),
        ("models.md", "(`qwen3_vl`)"),
        ("objectives.md", "DAPO: clip-higher"),
        ("rewards.md", "`punctuation:no_comma`"),
        ("rollout_data.md", "| `prompt_id` |"),
        ("tinker.md", "| `RestClient` |"),
    ],
)
def test_what_is_edited_by_hand_in_what_is_made_does_not_stay(name, made):
    text = (DOCS / name).read_text(encoding="utf-8")
    edited = text.replace(made, made + "edited")
    assert edited != text == PAGES[name](edited)

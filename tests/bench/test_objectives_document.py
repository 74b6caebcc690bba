"""docs/objectives.md: current, complete, and drawn from gradients worked out by hand."""

import json
import math
import shutil
from pathlib import Path

import pytest

from logitless.bench import objectives_document as document
from logitless.errors import ConfigurationError
from logitless.objective.presets import PRESETS

DOCS = Path(__file__).parents[2] / "docs"


def at(name, ratio, label):
    """The drawn gradient nearest to a ratio, and the ratio that it is drawn at."""
    points = document.ratios(document.WORDS[name]).tolist()
    nearest = min(range(len(points)), key=lambda i: abs(points[i] - ratio))
    return document.curves(name)[label][nearest], points[nearest]


def test_the_committed_page_numbers_and_pictures_are_current():
    assert document.outdated(DOCS) == [], f"run {document.MODULE}"


def test_what_is_stale_is_named(tmp_path):
    shutil.copytree(DOCS / "objectives", tmp_path / "objectives")
    shutil.copy(DOCS / "objectives.md", tmp_path)
    assert document.outdated(tmp_path) == []
    path = tmp_path / "objectives/gradients.json"
    numbers = json.loads(path.read_text())
    numbers["grpo"]["A = +1"][60] += 3e-6
    path.write_text(json.dumps(numbers))
    (tmp_path / "objectives/dapo.svg").unlink()
    page = tmp_path / "objectives.md"
    page.write_text(page.read_text().replace("ratio_max=1.28", "ratio_max=1.2"))
    stale = ["objectives.md", "objectives/dapo.svg", "objectives/gradients.json: grpo", "objectives/grpo.svg"]
    assert document.outdated(tmp_path) == stale


def test_a_picture_is_the_same_bytes_every_time():
    drawn = document.curves("sapo")
    assert document.picture("sapo", drawn) == document.picture("sapo", drawn)
    assert (DOCS / "objectives/sapo.svg").read_text().count("<dc:date>") == 0


def test_a_preset_without_words_is_an_error(monkeypatch):
    monkeypatch.delitem(document.WORDS, "dapo")
    with pytest.raises(ConfigurationError, match="words on the preset 'dapo'"):
        document.page()


def test_no_words_are_of_a_preset_that_does_not_exist():
    assert document.WORDS.keys() == PRESETS.keys()


@pytest.mark.parametrize(
    ("name", "ratio", "label", "expected"),
    [
        ("grpo", 1.1, "A = +1", lambda r: -r),
        ("grpo", 1.3, "A = +1", lambda r: 0),
        ("grpo", 1.3, "A = -1", lambda r: r),
        ("grpo", 0.7, "A = -1", lambda r: 0),
        ("dapo", 1.25, "A = +1", lambda r: -r),
        ("gspo", 1.0005, "A = +1", lambda r: 0),
        ("gspo", 1.0003, "A = +1", lambda r: -r),
        ("cispo", 3, "A = +1", lambda r: -r),
        ("cispo", 7, "A = -1", lambda r: 5),
        ("sapo", 2, "A = +1", lambda r: -4 * r * math.exp(r - 1) / (1 + math.exp(r - 1)) ** 2),
        ("vespo", 2, "A = +1", lambda r: -(r**2) * math.exp(3 - 3 * r)),
        ("vespo", 2, "A = -1", lambda r: r**3 * math.exp(2 - 2 * r)),
        ("gmpo", 1.4, "A = +1", lambda r: -r),
        ("gmpo", 1.6, "A = +1", lambda r: 0),
        ("dppo", 1.4, "A = +1", lambda r: -r),  # 0.3 to 0.42
        ("dppo", 1.6, "A = +1", lambda r: 0),  # 0.3 to 0.48: more than 0.15 away
        ("dppo", 0.4, "A = -1", lambda r: 0),  # 0.3 to 0.12
        ("clip_cov", 1.1, "A = +1, chosen", lambda r: 0),
        ("kl_cov", 1.5, "A = +1, chosen", lambda r: -r + 1),
        ("kl_cov", 0.5, "A = -1, chosen", lambda r: r - 1),
        ("dro", 3, "A = +1", lambda r: -(1 - 0.1 * math.log(r))),
        ("rloo", 1.5, "A = -1", lambda r: 1),
        ("nll", 1.5, "A = -1", lambda r: -1),
    ],
)
def test_the_drawn_gradients_are_those_worked_out_by_hand(name, ratio, label, expected):
    gradient, drawn_at = at(name, ratio, label)
    assert gradient == pytest.approx(expected(drawn_at), abs=3e-7)  # drawn with 7 decimals


@pytest.mark.parametrize(
    "row",
    [
        "| surrogate | `clip(ratio_min=0.9997, ratio_max=1.0004)` |",
        "| advantage | `gae(gamma=1, lambda_=0.95, action=token, whiten=True)` |",
        "| value loss | `coefficient=0.5, clip=0.2` |",
        "| weighting | `micro_batch_token_mean` |",
        "| surrogate | `dppo(divergence=tv, max_low=0.15, max_high=0.15, ratio_cap=20)` |",
    ],
)
def test_compositions_are_those_of_the_presets(row):
    assert row in document.page().splitlines()

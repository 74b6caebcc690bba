"""docs/objectives.md: complete, and drawn from gradients worked out by hand."""

import json
import math
import shutil
from pathlib import Path
from typing import get_args

import pytest

from docs.generate import objectives
from logitless.errors import ConfigurationError
from logitless.objective.advantage import Advantage
from logitless.objective.presets import PRESETS
from logitless.objective.surrogate import Surrogate

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "objectives.md").read_text()


def at(name, ratio, label):
    """The drawn gradient nearest to a ratio, and the ratio that it is drawn at."""
    points = objectives.ratios(name).tolist()
    nearest = min(range(len(points)), key=lambda i: abs(points[i] - ratio))
    return objectives.curves(name)[label][nearest], points[nearest]


def test_the_committed_numbers_and_pictures_are_current():
    assert objectives.outdated(DOCS / "objectives") == [], "run make docs"


def test_what_is_stale_is_named(tmp_path):
    shutil.copytree(DOCS / "objectives", tmp_path, dirs_exist_ok=True)
    assert objectives.outdated(tmp_path) == []
    path = tmp_path / "gradients.json"
    numbers = json.loads(path.read_text())
    numbers["grpo"]["A = +1"][60] += 3e-6
    path.write_text(json.dumps(numbers))
    (tmp_path / "dapo.svg").unlink()
    assert objectives.outdated(tmp_path) == ["dapo.svg", "gradients.json: grpo", "grpo.svg"]


def test_a_picture_is_the_same_bytes_every_time():
    drawn = objectives.curves("sapo")
    assert objectives.picture("sapo", drawn) == objectives.picture("sapo", drawn)
    assert (DOCS / "objectives/sapo.svg").read_text().count("<dc:date>") == 0


def test_a_preset_that_does_not_say_where_it_comes_from_is_an_error(monkeypatch):
    monkeypatch.setattr(PRESETS["dapo"], "__doc__", "DAPO: clip-higher and the token mean.")
    with pytest.raises(ConfigurationError, match="where the preset 'dapo' comes from"):
        objectives.page(PAGE)


@pytest.mark.parametrize("part", [*get_args(Surrogate), *get_args(Advantage)])
def test_every_surrogate_and_advantage_has_its_equation(part):
    _, equation, *_ = PAGE.split(f"\n`{part.name}`:\n\n")[1].split("    ", 2)
    assert equation.startswith("l = " if part in get_args(Surrogate) else ("A", "G_"))


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
        ("ipo", 1.2, "A = +1", lambda r: -r + 2e-3 * math.log(r)),  # 0.3 to 0.36
        ("ipo", 0.6, "A = +1", lambda r: 2e-3 * math.log(r)),  # 0.3 to 0.18: more than 0.1 away, whatever A is
        ("ipo", 0.7, "A = -1", lambda r: r + 2e-3 * math.log(r)),
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
    ("preset", "parts"),
    [
        ("gspo", ["`clip(ratio_min=0.9997, ratio_max=1.0004)` of the `sequence` ratio"]),
        ("ppo", ["`clip`", "`gae`"]),
        ("bnpo", ["`micro_batch_token_mean`"]),
        ("dppo", ["`dppo(max_low=0.15, max_high=0.15)`"]),
    ],
)
def test_compositions_are_those_of_the_presets(preset, parts):
    [row] = [line for line in PAGE.splitlines() if line.startswith(f"| [`{preset}`]")]
    assert all(f"| {part} |" in row for part in parts)


def test_the_value_loss_stands_with_its_preset():
    assert "[Value loss](#advantages): `coefficient=0.5, clip=0.2`." in PAGE

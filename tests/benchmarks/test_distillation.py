"""Students of a teacher beside GRPO alone: what the committed result and its table show."""

import json
import statistics

import distillation
from script import RESULTS, ROOT, begin

FOUND = json.loads((RESULTS / distillation.RESULT).read_text())


def _after(way: str) -> list[float]:
    return [run["points"][-1]["accuracy"] for run in FOUND["runs"] if run["way"] == way]


def test_at_three_seeds_the_teachers_distribution_teaches_more_than_grpo_from_as_many_blocks() -> None:
    grpo, divergence, advantage = (_after(way) for way in distillation.WAYS)
    assert len(grpo) == len(divergence) == len(advantage) == 3
    assert all(taught > alone for taught, alone in zip(divergence, grpo, strict=True))
    assert statistics.fmean(divergence) > statistics.fmean(advantage) > statistics.fmean(grpo)
    assert FOUND["teacher"]["accuracy"] > max(divergence)


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "distillation.md").read_text()
    assert begin("distillation", "") in page
    assert distillation.tables(RESULTS)[""] in page

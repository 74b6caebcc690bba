"""The worked example of a new objective, as the page has it."""

import pytest

from tests.extending.diffs import ROOT, extended, run_in, run_tests

pytestmark = pytest.mark.slow

CHECKS = """
from pathlib import Path
import logitless
from docs.generate.objectives import curves, page
from logitless.train.recipe.loading import load_recipe
from logitless.train.assembly.algorithm import algorithm_of

assert Path(logitless.__file__).is_relative_to(Path.cwd()), logitless.__file__
quickstart = Path({quickstart!r})
of_preset = algorithm_of(load_recipe(quickstart, ["algorithm.preset=topr"]))
by_name = algorithm_of(load_recipe(quickstart, ["algorithm.surrogate={{name: topr, ratio_max: 2.0}}"]))
assert (of_preset.objective.surrogate.ratio_max, by_name.objective.surrogate.ratio_max) == (1.0, 2.0)
shown = page(Path({page!r}).read_text())
assert "\\n### topr\\n" in shown and curves("topr")
assert "`topr`:\\n\\n    l = -w A logp\\n    w = 1 where A >= 0, else sg(min(r, ratio_max))" in shown
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("objective")
    extended("A new objective", folder)
    return folder


def test_the_test_of_the_new_objective_and_its_doctests_pass(copy):
    assert "2 passed" in run_tests(copy, "tests/objective/test_topr.py", "src/logitless/objective/surrogate/topr.py")


def test_recipes_can_name_it_and_the_page_of_objectives_shows_it(copy):
    run_in(
        copy,
        "-c",
        CHECKS.format(quickstart=str(ROOT / "recipes" / "quickstart.yaml"), page=str(ROOT / "docs" / "objectives.md")),
        also=[ROOT],
    )

"""The worked example of a new reward, as the page has it."""

import pytest

from tests.extending.diffs import ROOT, extended, run_in, run_tests

pytestmark = pytest.mark.slow

CHECKS = """
from pathlib import Path
import pytest
import logitless
from docs.generate.configuration import sections
from logitless.errors import DataError
from logitless.rewards.statistics import reward_statistics
from logitless.train.recipe.loading import load_recipe
from logitless.train.assembly.data import rewards_of
from logitless.types import Prompt
from tests.rewards.scored import scored
from tests.rewards.test_purity import check_one_verdict_a_text

assert Path(logitless.__file__).is_relative_to(Path.cwd() / "src"), logitless.__file__
recipe = load_recipe(Path({quickstart!r}), ["rewards=[{{name: choice, letters: ABC}}, {{name: length, unit: words}}]"])
rewards = rewards_of(recipe, [Prompt("7", "?", (4,), {{"answer": "C"}})])
with pytest.raises(DataError, match="'D' in row 0"):
    rewards_of(recipe, [Prompt("7", "?", (4,), {{"answer": "D"}})])
verdicts = scored(rewards, ["It is (C)", "It is C"], {{"answer": ["C"] * 2}})
assert [row["choice"].score for row in verdicts] == [1, 0]
assert reward_statistics(verdicts)["choice"]["constraints"]["choice:chosen"]["pass_rate"] == 0.5
check_one_verdict_a_text(rewards[0].reward, ["", "(C)", "((C)", "\\ud800(A)", "(" * 10_000 + ")" * 10_000])
assert "choice" in sections()
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    extended("A new reward", folder)
    return folder


def test_the_tests_of_the_new_reward_and_its_doctest_pass(copy):
    assert "4 passed" in run_tests(copy, "tests/rewards/test_choice.py", "src/logitless/rewards/choice.py")


def test_recipes_can_name_it_check_its_rows_and_count_its_detail_and_no_text_makes_it_raise(copy):
    run_in(copy, "-c", CHECKS.format(quickstart=str(ROOT / "recipes" / "quickstart.yaml")), also=[ROOT])

"""The worked example of a new engine, as the page has it."""

import pytest

from tests.extending.diffs import ROOT, extended, run_in, run_tests

pytestmark = pytest.mark.slow

RUNS = """
from pathlib import Path
import logitless
from docs.generate.configuration import sections
from logitless.train.record.metrics import repeatable
from tests.train.tiny import start_without_report, tiny_recipe

assert Path(logitless.__file__).is_relative_to(Path.cwd() / "src"), logitless.__file__
SHORT = {"kl": None, "train__epochs_per_block": 1, "train__tokens_per_step": 1000, "evaluation": {"every_blocks": 1}}


def lines(run, **engine):
    folder, complete = start_without_report(tiny_recipe(Path.cwd(), name=run, **SHORT, rollout__engine=engine))
    assert complete
    return [repeatable(record) for record in folder.read_metrics()]


def but_for_rounding(records):  # a copy of the weights lies elsewhere, where a product may differ in its last digit
    rounded = ("sampler/logp_diff", "parity/")
    return [{k: v for k, v in record.items() if not k.startswith(rounded)} for record in records]


here, at_once = lines("here", name="transformers"), lines("at_once", name="lagging", every=1)
assert but_for_rounding(here) == but_for_rounding(at_once)
behind = lines("behind", name="lagging", every=2)[1:]
assert [line["rollout/lag_max"] for line in behind] == [0, 1, 0]  # one step a block, a copy every second block
drift = [line["sampler/logp_difference_max"] for line in behind]
assert drift[1] > 100 * max(drift[0], drift[2]), drift
assert "lagging" in sections()
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    extended("A new engine", folder)
    return folder


def test_the_test_of_the_new_engine_passes(copy):
    assert "1 passed" in run_tests(copy, "tests/rollout/test_lagging.py", "src/logitless/rollout/lagging.py")


def test_a_run_that_names_it_trains_without_a_lag_as_the_policy_itself_and_with_one_on_older_weights(copy):
    run_in(copy, "-c", RUNS, also=[ROOT])

"""The gate between sampler and trainer: its numbers by hand, what it warns of, and what ends a run."""

import math
from dataclasses import replace

import pytest
import torch

from logitless.errors import TrainingError
from logitless.objective.ranges import Ranges
from logitless.rollout.transformers import TransformersEngine
from logitless.train.assembly.engines import Engines
from logitless.train.learn.parity_gate import check_parity, parity
from logitless.train.recipe.rollout import ParitySection
from logitless.train.run import start
from tests.train.tiny import blocks_of, tiny_recipe


def test_the_numbers_by_hand():
    # Two completions: differences 0.1, -0.3 (sum -0.2) and 0.2, 0.2 (sum 0.4); the last token does not count.
    log_ratio = torch.tensor([0.1, -0.3, 0.2, 0.2, 9.0])
    counted = torch.tensor([True, True, True, True, False])
    found = parity(log_ratio, Ranges(torch.tensor([0, 0, 1, 1, 1]), 2, counted))
    assert found == pytest.approx(
        {
            "parity/difference_mean": 0.2,
            "parity/difference_p95": 0.285,  # of 0.1, 0.2, 0.2, 0.3 at place 2.85
            "parity/difference_max": 0.3,
            "parity/sequence_difference_max": 0.4,
            "parity/sequence_ratio_min": math.exp(-0.2),
            "parity/sequence_ratio_max": math.exp(0.4),
        },
        abs=1e-6,
    )


FOUND = parity(torch.tensor([0.5, -0.1]), Ranges(torch.tensor([0, 1]), 2, torch.tensor([True, True])))


@pytest.mark.parametrize(("name", "value"), [("mean", 0.3), ("p95", 0.48), ("max", 0.5), ("sequence", 0.5)])
def test_each_threshold_warns_and_stops(name, value):
    said = []
    check_parity(FOUND, ParitySection(warn={name: value + 0.01}), said.append)
    assert not said
    check_parity(FOUND, ParitySection(warn={name: value - 0.01}), said.append)
    assert name in said[0]
    with pytest.raises(TrainingError, match=f"given {name}"):
        check_parity(FOUND, ParitySection(stop={name: value - 0.01}), said.append)


def test_a_difference_that_is_not_a_number_passes_every_threshold():
    found = dict(FOUND, **{"parity/difference_mean": math.nan})
    with pytest.raises(TrainingError, match="mean nan"):
        check_parity(found, ParitySection(stop={"mean": 100.0}), print)


class _Off(TransformersEngine):
    """Says log-probs that are a little wrong."""

    def sample(self, *arguments, **options):
        groups = super().sample(*arguments, **options)
        return [[replace(c, logp_sampler=c.logp_sampler + 0.25) for c in group] for group in groups]


def _off(recipe, model, tokenizer):
    engine = _Off(model, tokenizer)
    return Engines(engine, engine)


ONE_STEP = {"train__epochs_per_block": 1, "train__tokens_per_step": 10_000}
"""A block that one step uses once, whose own pass says ``logp_old`` (train.reuse_logp)."""


@pytest.mark.parametrize("changes", [{}, ONE_STEP], ids=["scored", "scores itself"])
def test_every_block_has_its_numbers_and_equal_engines_agree(tmp_path, changes):
    stop = {"mean": 1e-4, "p95": 1e-4, "max": 1e-4, "sequence": 1e-3}
    run, complete = start(tiny_recipe(tmp_path, train__blocks=2, rollout__parity={"stop": stop}, **changes))
    assert complete
    assert len(blocks_of(run)) == 2
    for line in blocks_of(run):
        assert (line["saving/scored_tokens"] > 0) == bool(changes)  # what the scoring pass left to the step
        assert 0 <= line["parity/difference_mean"] <= line["parity/difference_max"] < 1e-4


def test_a_block_that_scores_itself_has_the_numbers_of_one_that_is_scored(tmp_path):
    found = {}
    for reuse in (True, False):
        recipe = tiny_recipe(tmp_path, name=f"reuse-{reuse}", train__blocks=1, train__reuse_logp=reuse, **ONE_STEP)
        run, _ = start(recipe, open_engines=_off)
        [line] = blocks_of(run)
        found[reuse] = {name: value for name, value in line.items() if name.startswith("parity/")}
    assert len(found[True]) == 6
    assert found[True] == pytest.approx(found[False], rel=1e-4)


@pytest.mark.parametrize("changes", [{}, ONE_STEP], ids=["scored", "scores itself"])
def test_a_run_whose_sampler_disagrees_stops(tmp_path, changes):
    recipe = tiny_recipe(tmp_path, rollout__parity={"stop": {"mean": 0.2}}, **changes)
    with pytest.raises(TrainingError, match=r"within rollout.parity.stop; given mean 0.25 nats over 0.2"):
        start(recipe, open_engines=_off)


class _Silent(TransformersEngine):
    """Gives no log-probs."""

    def sample(self, *arguments, **options):
        groups = super().sample(*arguments, **options)
        return [[replace(c, logp_sampler=None) for c in group] for group in groups]


@pytest.mark.parametrize("changes", [{}, ONE_STEP])
def test_a_threshold_over_a_sampler_without_log_probs_ends_the_run(tmp_path, changes):
    def silent(recipe, model, tokenizer):
        engine = _Silent(model, tokenizer)
        return Engines(engine, engine)

    with pytest.raises(TrainingError, match=r"log-probs by the sampler.*given none in this block"):
        start(tiny_recipe(tmp_path, rollout__parity={"warn": {"mean": 0.2}}, **changes), open_engines=silent)
    run, complete = start(tiny_recipe(tmp_path, name="without", train__blocks=1, **changes), open_engines=silent)
    assert complete
    assert not any(name.startswith("parity/") for line in run.read_metrics() for name in line)


def test_filtered_sampling_is_of_another_distribution_and_not_compared(tmp_path):
    recipe = tiny_recipe(tmp_path, train__blocks=1, rollout__sampling={"max_new_tokens": 6, "top_k": 2})
    run, _ = start(recipe)
    assert not any(name.startswith("parity/") for line in run.read_metrics() for name in line)

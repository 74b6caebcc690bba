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
from tests.train.tiny import blocks_of, finished_run


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


ONE_STEP = {"train__epochs_per_block": 1, "train__tokens_per_step": 10_000}
"""A block that one step uses once, whose own pass says ``logp_old`` (train.reuse_logp)."""


def _run(tmp_path, change=None, **changes):
    """A run whose sampler says log-probs that this changes."""

    class Engine(TransformersEngine):
        def sample(self, *arguments, **options):
            groups = super().sample(*arguments, **options)
            if change is None:
                return groups
            return [[replace(c, logp_sampler=change(c.logp_sampler)) for c in group] for group in groups]

    def opening(recipe, model, tokenizer):
        engine = Engine(model, tokenizer)
        return Engines(engine, engine)

    return finished_run(tmp_path, open_engines=opening, **changes)


def off(logp):
    return logp + 0.25


def test_each_threshold_warns_and_stops_also_over_what_is_no_number():
    for name, value in (("mean", 0.3), ("p95", 0.48), ("max", 0.5), ("sequence", 0.5)):
        said = []
        check_parity(FOUND, ParitySection(warn={name: value + 0.01}), said.append)
        assert not said
        check_parity(FOUND, ParitySection(warn={name: value - 0.01}), said.append)
        assert name in said[0]
        with pytest.raises(TrainingError, match=f"given {name}"):
            check_parity(FOUND, ParitySection(stop={name: value - 0.01}), said.append)
    with pytest.raises(TrainingError, match="mean nan"):
        check_parity(FOUND | {"parity/difference_mean": math.nan}, ParitySection(stop={"mean": 100.0}), print)


@pytest.mark.parametrize("changes", [{}, ONE_STEP], ids=["scored", "scores itself"])
def test_every_block_has_its_numbers_and_equal_engines_agree(tmp_path, changes):
    stop = {"mean": 1e-4, "p95": 1e-4, "max": 1e-4, "sequence": 1e-3}
    lines = blocks_of(_run(tmp_path, train__blocks=2, rollout__parity={"stop": stop}, **changes))
    assert len(lines) == 2
    for line in lines:
        assert (line["saving/scored_tokens"] > 0) == bool(changes)  # what the scoring pass left to the step
        assert 0 <= line["parity/difference_mean"] <= line["parity/difference_max"] < 1e-4


def test_a_block_that_scores_itself_has_the_numbers_of_one_that_is_scored(tmp_path):
    found = []
    for reuse in (True, False):
        run = _run(tmp_path, off, name=f"reuse-{reuse}", train__blocks=1, train__reuse_logp=reuse, **ONE_STEP)
        found.append({name: value for name, value in blocks_of(run)[0].items() if name.startswith("parity/")})
    assert len(found[0]) == 6
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.parametrize("changes", [{}, ONE_STEP], ids=["scored", "scores itself"])
def test_a_run_whose_sampler_disagrees_stops(tmp_path, changes):
    with pytest.raises(TrainingError, match=r"within rollout.parity.stop; given mean 0.25 nats over 0.2"):
        _run(tmp_path, off, rollout__parity={"stop": {"mean": 0.2}}, **changes)


def _compared(run):
    return any(name.startswith("parity/") for line in run.read_metrics() for name in line)


@pytest.mark.parametrize("changes", [{}, ONE_STEP])
def test_a_threshold_over_a_sampler_without_log_probs_ends_the_run(tmp_path, changes):
    with pytest.raises(TrainingError, match=r"log-probs by the sampler.*given none in this block"):
        _run(tmp_path, lambda logp: None, rollout__parity={"warn": {"mean": 0.2}}, **changes)
    assert not _compared(_run(tmp_path, lambda logp: None, name="without", train__blocks=1, **changes))


def test_filtered_sampling_is_of_another_distribution_and_not_compared(tmp_path):
    assert not _compared(_run(tmp_path, train__blocks=1, rollout__sampling={"max_new_tokens": 6, "top_k": 2}))

"""Weights that arrive while completions are under way: log-probs bitwise those of the version that drew a token.

Under Triton's interpreter and without graphs; on a GPU where there is one.
"""

import pytest

from logitless.rollout.engine import Weights
from logitless.rollout.gpu import steps
from logitless.rollout.in_flight import DrawnVersions, RepeatingEngine
from logitless.rollout.sampling import SamplingOptions
from logitless.train.learn.policy import Policy
from tests.rollout.arriving import Versions, in_flight
from tests.rollout.gpu.test_engine import PROMPTS, engine_of, flat, interpreted_head, model_of
from tests.rollout.plain_forward import trainers_scores

pytest.importorskip("triton")
__all__ = ["interpreted_head"]  # a fixture of every test here

ASKED = [PROMPTS[2], PROMPTS[0]]
ARRIVE = {3: 1, 8: 2}
SLOW = [("qwen3", False), ("qwen3_5", False), ("qwen3_5", True)]


def mismatched(versions, groups):
    """Tokens whose log-prob is not bitwise that of training's pass with the weights that drew them."""
    wrong, drawn = 0, [v for each in flat(groups) for v in versions_of(each)]
    sampled = [x for each in flat(groups) for x in each.logp_sampler]
    for version in sorted(set(drawn)):
        versions.put(version)
        scores = trainers_scores(Policy(versions.model), ASKED, groups, temperature=0.8)
        wrong += sum(a != b for a, b, v in zip(sampled, scores.logp.tolist(), drawn, strict=True) if v == version)
    return wrong


def versions_of(completion):
    return completion.length * [completion.weights_version] if (v := completion.token_versions) is None else v.tolist()


@pytest.mark.parametrize(
    ("name", "recompute"),
    [("qwen3", True), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)],
)
def test_recomputed_keys_give_training_s_bits_kept_ones_do_not_and_a_record_draws_both_again(name, recompute):
    options = SamplingOptions(max_new_tokens=2 * steps.STEPS + 2, temperature=0.8)
    versions = Versions(model_of(name, end_bias=-2.0))
    engine = engine_of(versions.model, max_rows=2, prefill_tokens=64)
    groups = in_flight(engine, versions, ARRIVE, ASKED, 3, options, seed=1, recompute=recompute)
    first = [versions_of(each)[0] for each in groups[0]]
    assert len(set(first)) > 1, "no prompt was read again"
    assert any(each.token_versions is not None for each in flat(groups))
    assert (mismatched(versions, groups) == 0) == recompute
    drawn = DrawnVersions()
    drawn.add(groups)
    engine.max_rows = 512
    again = RepeatingEngine(engine, recompute=recompute, copies=3)
    for version in (0, 1, 2):
        versions.put(version)
        again.load(Weights.of(versions.model), version)
    again.repeat(drawn)
    assert again.sample(ASKED, 3, options, seed=1) == groups

"""Runs whose score function is centred: as by hand with the weights that sampled, and as without the key on-policy."""

import pytest
import torch

from logitless.errors import ConfigurationError
from logitless.train.collect.block_log import BlockLog
from logitless.train.plan.run_plan import dry_run
from logitless.train.store.checkpoint import checkpoints, read_checkpoint
from logitless.types import Prompt
from tests.rounding import of_roundings
from tests.train.tiny import (
    ONE_STEP,
    SHORT,
    TINY_GPT2,
    assert_equal,
    finished_run,
    repeated,
    start,
    steps_of,
    stored,
    tiny_model,
    tiny_recipe,
)

CENTRED = {"surrogate": {"name": "reinforce"}, "score_centering": "device"}
TEMPERATURE, STALENESS = 0.7, 2
BY_HAND = SHORT | ONE_STEP | {
    "algorithm": CENTRED | {"score_centering": "host", "advantage": {"name": "raw"}},
    "model__source": TINY_GPT2,
    "rollout__staleness": STALENESS,
    "rollout__sampling": {"max_new_tokens": 6, "temperature": TEMPERATURE},
    "train__blocks": 5,
    "train__max_grad_norm": 1e9,
    "train__optimizer": {"learning_rate": 1e-2, "betas": [0.0, 0.99]},  # so that the first moment is the gradient
}  # fmt: skip


def with_weights(model, saved):
    """The model in float64 with the trained weights of a checkpoint."""
    weights = {name.partition("/")[2]: t for name, t in saved.tensors.items() if name.startswith("parameter/")}
    named = dict(model.named_parameters())
    assert weights.keys() == named.keys()
    for name, weight in weights.items():
        named[name].data = weight.double()
    return model.eval()


def terms(model, sampler, group):
    """The loss of each completion of a group, before its weight, and the sampler's log-probs beside the logged ones."""
    for completion, reward in zip(group.completions, group.rewards, strict=True):
        ids = torch.tensor([[*group.prompt.token_ids, *completion.token_ids]])
        rows = slice(len(group.prompt.token_ids) - 1, -1)
        log_p, log_q = ((each(ids).logits[0, rows] / TEMPERATURE).log_softmax(1) for each in (model, sampler))
        tokens = ids[0, -completion.length :, None]
        centering = ((log_q.detach().exp() - log_p.detach().exp()) * log_p).sum(1)
        loss = reward * (centering - log_p.gather(1, tokens)[:, 0])
        yield loss.mean(), log_q.gather(1, tokens)[:, 0].detach(), torch.tensor(completion.logp_sampler)


def test_each_step_of_a_run_two_blocks_behind_has_the_gradient_of_the_formula_by_hand(tmp_path):
    run = finished_run(tmp_path, **BY_HAND)
    log = BlockLog(run.collected, [Prompt(str(n), "", (0,)) for n in range(8)])
    saved = [read_checkpoint(folder) for folder in checkpoints(run.checkpoints)]
    sampler, model = (tiny_model(tiny_recipe(tmp_path, **BY_HAND)).double() for _ in range(2))
    parameters = dict(model.named_parameters())
    # A gradient passes two layers of four products, whose sums have at most 64 terms; those of sequences are added up.
    rounding = of_roundings(torch.float32, 2 * 4 * 64)
    for block in range(5):
        with_weights(model, saved[block]), with_weights(sampler, saved[max(0, block - STALENESS)])
        whole = {name: torch.zeros_like(p) for name, p in parameters.items()}
        size = dict.fromkeys(parameters, 0.0)
        for group in log.read(block)[0].sampled:
            for loss, logp, logged in terms(model, sampler, group):
                torch.testing.assert_close(logp.float(), logged, rtol=0, atol=rounding)  # sampled in float32
                gradients = torch.autograd.grad(loss / 16, list(parameters.values()))
                for name, gradient in zip(parameters, gradients, strict=True):
                    whole[name] += gradient
                    size[name] += float(gradient.abs().max())
        assert min(size.values()) > 0
        for name, gradient in whole.items():
            found = saved[block + 1].tensors[f"optimizer/{name}/exp_avg"].double()
            assert float((found - gradient).abs().max()) <= rounding * size[name], (block, name)
    kl = [step["kl_sampler/mean"] for step in steps_of(run)]
    assert kl[0] == 0
    assert min(kl[1:]) > 1e-3
    held = {int(name.split("/")[1]) for name in saved[-1].tensors if name.startswith("sampler/")}
    assert held == {2, 3, 4}


def test_on_policy_with_one_step_a_block_the_run_is_bitwise_that_without_the_key(tmp_path):
    changes = SHORT | ONE_STEP | {"train__blocks": 2}
    plain, centred = (
        finished_run(tmp_path, **changes, algorithm=algorithm, name=name)
        for name, algorithm in (("plain", {"surrogate": {"name": "reinforce"}}), ("centred", CENTRED))
    )
    assert_equal(stored(plain)[1], stored(centred)[1])  # and nothing is held
    lines = repeated(centred)
    assert [line.pop("kl_sampler/mean") for line in lines if "loss/total" in line] == [0, 0]
    assert lines == repeated(plain)


@pytest.mark.parametrize(("place", "versions"), [("device", 3), ("host", 3)])
def test_a_dry_run_says_what_is_held_and_where(tmp_path, place, versions):
    changes = {"algorithm": CENTRED | {"score_centering": place}, "rollout__staleness": 2}
    with_it, without = (dry_run(tiny_recipe(tmp_path, **SHORT, **each)) for each in (changes, {}))
    assert f"score centering: the last {versions} versions of the weights, on the {place}" in with_it
    kib = {
        line.split("  ")[2].strip(): float(line.split()[-2])
        for line in with_it.splitlines()
        if line.endswith("KiB") and line.startswith("    ")
    }
    at_once = versions if place == "device" else 1
    assert kib["weights that sampled"] == pytest.approx(at_once * kib["trained weights"], abs=0.2)
    assert "weights that sampled" not in without


def test_a_loss_of_the_ratio_and_a_correction_are_refused(tmp_path):
    for algorithm in ({"score_centering": "device"}, CENTRED | {"correction": {"max": 2.0}}):
        with pytest.raises(ConfigurationError, match="the surrogate 'reinforce' without a correction"):
            start(tiny_recipe(tmp_path, **SHORT, algorithm=algorithm))

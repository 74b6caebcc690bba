"""Faults through a whole start: a clear error before anything is lost, or a status that is counted."""

import json
import math

import pytest
import torch

from logitless.errors import ConfigurationError, DataError, LogitlessError, TrainingError, UnavailableError
from logitless.models.char_tokenizer import character_tokenizer
from logitless.rollout.transformers import TransformersEngine
from logitless.train.learn.policy import Policy
from logitless.train.loop import Loop
from logitless.train.plan.run_plan import dry_run
from logitless.train.record.run_folder import RunFolder
from logitless.train.store.checkpoint import checkpoints
from logitless.types import Completion
from tests.train.tiny import ALPHABET, ONE_STEP, SHORT, blocks_of, finished_run, start, steps_of, tiny_recipe

MIXTURE = {
    "model__source__model_type": "mixtral",
    "model__source__num_local_experts": 2,
    "model__source__num_experts_per_tok": 1,
    "model__source__router_aux_loss_coef": 0.01,
}


# 1 missing files, 7 a model and a tokenizer that do not fit, 9 a router loss that the model does not have


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"data__train__path": "absent/train.jsonl"}, DataError, "absent/train.jsonl"),
        ({"model__tokenizer": "./absent/tokenizer"}, ConfigurationError, "absent/tokenizer"),
        ({"rewards": [{"name": "function", "path": "tests.absent:reward"}]}, ConfigurationError, "tests.absent"),
        ({"rewards": [{"name": "exact", "column": "absent"}]}, ConfigurationError, "'absent'"),
        ({"model__source": "./absent/model", "model__random_weights": False}, ConfigurationError, "absent/model"),
        ({"model__source__vocab_size": 10}, ConfigurationError, r"10 embedding rows.*ids up to 10"),
        (
            {"model__drop_router_loss": True},
            ConfigurationError,
            r"'model.drop_router_loss' is called 'model.router' now",
        ),
        ({"model__router__loss": 0.01}, ConfigurationError, r"a mixture of experts for model.router.loss: 0.01"),
        ({"model__router__frozen": True}, ConfigurationError, r"a mixture of experts for model.router.frozen"),
        (
            {**MIXTURE, "model__router__loss": 0.01, "model__lora": {"dropout": 0.1, "targets": ["q_proj"]}},
            ConfigurationError,
            "a load-balancing loss: no model.lora.dropout",
        ),
        (
            {"algorithm": {"preset": "ppo"}, "value_head": {"source": "none.safetensors"}},
            LogitlessError,
            "none.safeten",
        ),
        ({"rollout__engine": {"name": "recorded", "path": "nowhere.jsonl"}}, LogitlessError, "nowhere.jsonl"),
        ({"writers": ["wandb"]}, UnavailableError, "wandb"),
        ({"model__source__max_position_embeddings": 6}, ConfigurationError, "max_new_tokens=6, of which 5 fit"),
        ({"model__source__hidden_size": 0}, LogitlessError, "needed"),
        ({"model__source__hidden_size": "wide"}, LogitlessError, "needed"),
        ({"model__source__hidden_act": "nonsense"}, LogitlessError, "needed"),
        ({"model__device": "banana"}, LogitlessError, "banana"),
        ({"model__device": "cuda:77"}, LogitlessError, "cuda:77"),
    ],
    ids=str,
)
def test_what_is_missing_or_does_not_fit_is_named_by_a_dry_run_and_a_start_which_leaves_no_folder(
    tmp_path, changes, error, match
):
    for begin in (dry_run, start):
        with pytest.raises(error, match=match) as caught:
            begin(tiny_recipe(tmp_path, **{**SHORT, **changes}))
        assert caught.value.remedy
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").iterdir())


# 4: completions without a token


def test_completions_that_are_all_empty_take_no_step_and_lose_no_block(tmp_path, monkeypatch):
    def sample(self, prompts, num_samples, options, *, seed):
        return [[Completion(p.id, (), "", "stop")] * num_samples for p in prompts]

    monkeypatch.setattr(TransformersEngine, "sample", sample)
    run = finished_run(tmp_path, **{**SHORT, "train__blocks": 2})
    assert [(r["step"], r["length/empty"]) for r in blocks_of(run)] == [(0, 16), (0, 16)]
    assert json.loads(run.summary.read_text())["steps"] == 0
    assert [path.name for path in checkpoints(run.checkpoints)] == [f"block-{n:06d}-step-000000" for n in range(3)]


# 5: no group with a signal

NEVER_RIGHT = {"kl": None, "rewards": [{"name": "exact"}], "rollout__zero_signal": "drop"}


def test_blocks_without_a_signal_are_written_and_end_the_run_after_the_configured_number(tmp_path):
    limits = {"train__blocks": 9, "train__max_blocks_without_signal": 3, "evaluation__every_blocks": 2}
    with pytest.raises(TrainingError, match=r"none in 3 blocks.*max_blocks_without_signal"):
        start(tiny_recipe(tmp_path, **NEVER_RIGHT, **limits))
    run = RunFolder(tmp_path / "runs" / "tiny")
    assert [(r["block"], r["step"]) for r in blocks_of(run)] == [(1, 0), (2, 0), (3, 0)]
    assert all(r["group/zero_signal_fraction"] == 1 and r["group/dropped"] == 4 for r in blocks_of(run))
    assert [r["block"] for r in run.read_metrics() if "evaluation/accuracy" in r] == [1, 2]
    assert len(list(run.read_rollouts())) == 3


def test_a_run_resumed_after_blocks_without_a_signal_writes_their_lines_once(tmp_path, monkeypatch):
    recipe, plain = tiny_recipe(tmp_path, **{**SHORT, **NEVER_RIGHT, "train__blocks": 3}), Loop._skip_block

    def interrupted(self):
        plain(self)
        self.interrupt.requested = self.learner.progress.block == 1

    with monkeypatch.context() as patched:
        patched.setattr(Loop, "_skip_block", interrupted)
        folder, complete = start(recipe)
    assert not complete
    start(recipe, resume=True)
    assert [r["block"] for r in blocks_of(folder)] == [1, 2, 3]


# 6: rewards that raise, hang or answer nonsense


# 8: tokens that are absent


def test_a_tokenizer_without_an_end_token_is_refused_and_one_without_a_pad_token_is_not_needed(tmp_path):
    tiny_recipe(tmp_path)
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(str(tmp_path / "no_pad"))
    finished_run(tmp_path, **SHORT, name="padless", model__tokenizer=str(tmp_path / "no_pad"))
    tokenizer.eos_token = None
    tokenizer.save_pretrained(str(tmp_path / "no_eos"))
    with pytest.raises(ConfigurationError, match="EOS token"):
        start(tiny_recipe(tmp_path, **SHORT, model__tokenizer=str(tmp_path / "no_eos")))


def _break_steps(monkeypatch, broken) -> None:
    """Make the loss of these training passes NaN, counted from 1."""
    plain, passes = Policy.scores, [0]

    def scores(self, batch, **options):
        found = plain(self, batch, **options)
        if not torch.is_grad_enabled():
            return found
        passes[0] += 1
        factor = math.nan if passes[0] in broken else 1.0
        return type(found)(logp=found.logp * factor, entropy=found.entropy)

    monkeypatch.setattr(Policy, "scores", scores)


def test_too_many_skipped_steps_in_a_row_stop_the_run(tmp_path, monkeypatch):
    _break_steps(monkeypatch, {1, 3, 4})
    with pytest.raises(TrainingError, match=r"2 steps in a row.*max_skipped_in_a_row"):
        start(tiny_recipe(tmp_path, **{**SHORT, **ONE_STEP, "train__blocks": 9}, train__max_skipped_in_a_row=2))
    lines = steps_of(RunFolder(tmp_path / "runs" / "tiny"))
    assert [line["optimizer/skipped_steps"] for line in lines] == [1, 1, 2, 3]

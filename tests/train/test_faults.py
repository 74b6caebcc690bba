"""Ten kinds of fault, each through a whole start: a clear error before anything is lost, or a status that is counted.

A full disk while saving, the tenth, is in ``test_resume``.
"""

import json
import math

import pytest
import torch

from logitless.errors import ConfigurationError, DataError, TrainingError
from logitless.models.char_tokenizer import character_tokenizer
from logitless.train import checkpoint as checkpoints
from logitless.train.policy import Policy
from logitless.train.run import start
from logitless.train.run_folder import RunFolder
from tests.train.tiny import ALPHABET, tiny_recipe

SHORT = {"train__blocks": 1, "train__epochs_per_block": 1, "kl": None, "data__held_out": None}


def _add_row(folder, row: str) -> None:
    with (folder / "train.jsonl").open("a") as file:
        file.write(row + "\n")


def _run(recipe) -> RunFolder:
    folder, complete = start(recipe)
    assert complete
    return folder


def _blocks(run: RunFolder) -> list[dict]:
    return [record for record in run.read_metrics() if "reward/mean" in record]


def _refused(folder, error, match: str, **changes) -> None:
    """The recipe is refused by an error that says how to repair it, and no run folder is left behind."""
    with pytest.raises(error, match=match) as caught:
        start(tiny_recipe(folder, **{**SHORT, **changes}))
    assert caught.value.remedy
    assert not (folder / "runs").exists() or not any((folder / "runs").iterdir())


# 1: missing files


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"data__train__path": "absent/train.jsonl"}, DataError, "absent/train.jsonl"),
        ({"model__tokenizer": "./absent/tokenizer"}, ConfigurationError, "absent/tokenizer"),
        (
            {"rewards": [{"name": "function", "path": "tests.absent:reward"}]},
            ConfigurationError,
            "tests.absent",
        ),
    ],
)
def test_a_missing_file_is_named(tmp_path, changes, error, match):
    _refused(tmp_path, error, match, **changes)


def test_a_missing_model_is_named(tmp_path):
    _refused(
        tmp_path, ConfigurationError, "absent/model", model__source=str(tmp_path / "absent" / "model"),
        model__random_weights=False,
    )  # fmt: skip


# 2: malformed data


def test_a_malformed_row_is_named_by_its_line(tmp_path):
    tiny_recipe(tmp_path)
    _add_row(tmp_path, '{"prompt": "ab", ')
    _refused(tmp_path, DataError, r"train\.jsonl, line 9")


# 3: prompts that are empty or too long


def test_an_empty_prompt_is_left_out_and_counted(tmp_path):
    from logitless.train.plan import plan_of

    recipe = tiny_recipe(tmp_path, **SHORT)
    _add_row(tmp_path, json.dumps({"id": "empty", "prompt": " ", "answer": ""}))
    counts = plan_of(recipe).counts["train"]
    assert (counts["rows"], counts["empty"], counts["prompts"]) == (9, 1, 8)
    assert _blocks(_run(recipe))[0]["length/prompt_mean"] == 2


def test_a_prompt_over_the_limit_is_dropped_and_counted_or_an_error_as_the_recipe_says(tmp_path):
    from logitless.train.plan import plan_of

    tiny_recipe(tmp_path)
    _add_row(tmp_path, json.dumps({"id": "long", "prompt": "a" * 9, "answer": "a"}))
    counts = plan_of(tiny_recipe(tmp_path)).counts["train"]
    assert (counts["too_long"], counts["prompts"]) == (1, 8)
    _refused(tmp_path, DataError, r"at most 8 tokens.*given 9 tokens.*'long'", data__too_long="error")


# 4: completions without a token


def test_completions_that_are_all_empty_take_no_step_and_lose_no_block(tmp_path, monkeypatch):
    from logitless.rollout.transformers import TransformersEngine
    from logitless.types import Completion

    def sample(self, prompts, num_samples, options, *, seed):
        return [[Completion(p.id, (), "", "stop")] * num_samples for p in prompts]

    monkeypatch.setattr(TransformersEngine, "sample", sample)
    run = _run(tiny_recipe(tmp_path, **{**SHORT, "train__blocks": 2}))
    assert [(r["step"], r["length/empty"]) for r in _blocks(run)] == [(0, 16), (0, 16)]
    assert json.loads(run.summary.read_text())["steps"] == 0


# 5: no group with a signal


def test_blocks_without_a_signal_are_written_and_end_the_run_after_the_configured_number(tmp_path):
    recipe = tiny_recipe(
        tmp_path,
        kl=None,
        rewards=[{"name": "exact"}],  # never right
        rollout__zero_signal="drop",
        train__blocks=9,
        train__max_blocks_without_signal=3,
        evaluation__every_blocks=2,
    )
    with pytest.raises(TrainingError, match=r"none in 3 blocks.*max_blocks_without_signal"):
        start(recipe)
    run = RunFolder(tmp_path / "runs" / "tiny")
    assert [(r["block"], r["step"]) for r in _blocks(run)] == [(1, 0), (2, 0), (3, 0)]
    assert all(r["group/zero_signal_fraction"] == 1 and r["group/dropped"] == 4 for r in _blocks(run))
    assert [r["block"] for r in run.read_metrics() if "evaluation/accuracy" in r] == [1, 2]
    assert len(list(run.read_rollouts())) == 3


def test_a_run_resumed_after_blocks_without_a_signal_writes_their_lines_once(tmp_path, monkeypatch):
    from logitless.train.loop import Loop

    def recipe():
        return tiny_recipe(
            tmp_path, **{**SHORT, "train__blocks": 3}, rewards=[{"name": "exact"}], rollout__zero_signal="drop"
        )

    plain = Loop._pass_over

    def interrupted(self):
        plain(self)
        self.interrupt.requested = self.learner.progress.block == 1

    with monkeypatch.context() as patched:
        patched.setattr(Loop, "_pass_over", interrupted)
        folder, complete = start(recipe())
    assert not complete
    start(recipe(), resume=True)
    assert [r["block"] for r in _blocks(folder)] == [1, 2, 3]


# 6: rewards that raise, hang or answer nonsense


@pytest.mark.parametrize(
    ("function", "status", "options"),
    [
        ("raising", "error", {}),
        ("hanging", "timeout", {"deadline_seconds": 0.5}),
        ("not_a_number", "error", {}),
        ("too_many", "error", {}),
        ("nothing", "missing", {}),
    ],
)
def test_a_reward_that_fails_has_a_status_and_the_others_go_on(tmp_path, function, status, options):
    few = {"rollout__prompts_per_block": 1, "rollout__completions_per_prompt": 2}
    faulty = {"name": "function", "path": f"tests.train.faulty_rewards:{function}", **options}
    rewards = [faulty, {"name": "length", "cap": 6}]
    run = _run(tiny_recipe(tmp_path / "both", **SHORT, **few, rewards=rewards))
    (block,) = _blocks(run)
    assert block[f"verdict/{function}/{status}"] == 2
    assert block[f"verdict/{function}/graded"] == 0
    assert block["reward/mean"] == block["reward/length/mean"] > 0
    assert block["reward/unscored"] == 0


def test_completions_that_nothing_could_score_are_counted_and_not_trained_on(tmp_path):
    faulty = {"name": "function", "path": "tests.train.faulty_rewards:raising"}
    run = _run(tiny_recipe(tmp_path, **SHORT, rewards=[faulty], rollout__zero_signal="drop"))
    (record,) = [r for r in run.read_metrics() if "reward/unscored" in r]
    assert (record["reward/unscored"], record["reward/mean"], record["group/trained"]) == (16, None, 0)


# 7: a model and a tokenizer that do not fit


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(tmp_path):
    _refused(tmp_path, ConfigurationError, r"10 embedding rows.*ids up to 10", model__source__vocab_size=10)


# 8: tokens that are absent


def test_a_tokenizer_without_an_end_token_is_refused_and_one_without_a_pad_token_is_not_needed(tmp_path):
    tiny_recipe(tmp_path)
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(str(tmp_path / "no_pad"))
    _run(tiny_recipe(tmp_path, **SHORT, name="padless", model__tokenizer=str(tmp_path / "no_pad")))
    tokenizer.eos_token = None
    tokenizer.save_pretrained(str(tmp_path / "no_eos"))
    with pytest.raises(ConfigurationError, match="EOS token"):
        start(tiny_recipe(tmp_path, **SHORT, model__tokenizer=str(tmp_path / "no_eos")))


# 9: a router loss that would be dropped


def test_a_mixture_of_experts_is_refused_unless_its_router_loss_is_given_up_by_name(tmp_path):
    mixture = {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1, "router_aux_loss_coef": 0.01}
    source = {f"model__source__{key}": value for key, value in mixture.items()}
    with pytest.raises(ConfigurationError, match=r"router loss.*drop_router_loss"):
        start(tiny_recipe(tmp_path, **SHORT, **source))
    _run(tiny_recipe(tmp_path, **SHORT, **source, name="allowed", model__drop_router_loss=True))


# and: gradients that are not finite


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


ONE_PASS = {"train__tokens_per_step": 1000, "train__tokens_per_micro_batch": 1000}


def test_a_step_without_a_finite_gradient_changes_nothing_and_is_counted(tmp_path, monkeypatch):
    options = {
        "data__held_out": None,
        "train__blocks": 1,
        **ONE_PASS,
        "kl": {"placement": "loss", "control": {"name": "linear", "beta": 1.0, "target": 0.5, "guardrail": None}},
    }
    one = _run(tiny_recipe(tmp_path / "one", **options, train__epochs_per_block=1))
    _break_steps(monkeypatch, {2})
    run = _run(tiny_recipe(tmp_path / "two", **options, train__epochs_per_block=2))
    first, second = run.read_metrics()[1:]
    assert (first["optimizer/skipped_steps"], second["optimizer/skipped_steps"]) == (0, 1)
    assert second["optimizer/grad_norm"] is None
    ends = [checkpoints.load_checkpoint(r.checkpoints) for r in (one, run)]
    assert ends[0].tensors.keys() == ends[1].tensors.keys()
    for name, tensor in ends[0].tensors.items():
        assert torch.equal(tensor, ends[1].tensors[name]), name
    assert ends[0].state["controllers"] == ends[1].state["controllers"]


def test_too_many_skipped_steps_in_a_row_stop_the_run(tmp_path, monkeypatch):
    _break_steps(monkeypatch, {1, 3, 4})
    recipe = tiny_recipe(
        tmp_path,
        kl=None,
        data__held_out=None,
        **ONE_PASS,
        train__blocks=9,
        train__epochs_per_block=1,
        train__max_skipped_in_a_row=2,
    )
    with pytest.raises(TrainingError, match=r"2 steps in a row.*max_skipped_in_a_row"):
        start(recipe)
    lines = RunFolder(tmp_path / "runs" / "tiny").read_metrics()
    assert [line["optimizer/skipped_steps"] for line in lines if "loss/total" in line] == [1, 1, 2, 3]

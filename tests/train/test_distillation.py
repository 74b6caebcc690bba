"""Runs that learn from a teacher, in the loss and in the advantage; and teachers that are refused."""

import json
import math
import shutil

import pytest
import torch

from logitless.errors import ConfigurationError, DataError, InputError, UnavailableError
from logitless.models.char_tokenizer import character_tokenizer
from logitless.train.assembly import teacher as assembly
from logitless.train.plan.run_plan import dry_run
from logitless.types import Completion
from tests.train.tiny import (
    ALPHABET,
    SHORT,
    TINY_LLAMA,
    assert_same_run,
    finished_run,
    recorded_engine,
    start,
    steps_of,
    tiny_model,
    tiny_raw,
    tiny_recipe,
)

ALONE = {"kl": None, "rewards": [], "data__held_out": None, "train__epochs_per_block": 1}
LONGER = {**ALONE, "train__blocks": 10, "train__tokens_per_step": 100, "train__optimizer": {"learning_rate": 3e-2}}


def teacher_in(folder, alphabet=ALPHABET, **config):
    """The folder of a random model that has opinions."""
    tiny_raw(folder)
    source = TINY_LLAMA | {"initializer_range": 0.5, "hidden_size": 24} | config
    model = tiny_model(tiny_recipe(folder, model__source=source), seed=5)
    model.save_pretrained(folder / "teacher")
    character_tokenizer(alphabet).save_pretrained(folder / "teacher")
    return str(folder / "teacher")


@pytest.mark.parametrize(
    "kind", ["jensen_shannon", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("forward_kl", "reverse_kl"))]
)
def test_a_run_without_rewards_comes_near_its_teacher(tmp_path, kind):
    teacher = {"source": teacher_in(tmp_path), "divergence": kind}
    steps = steps_of(finished_run(tmp_path, **LONGER, teacher=teacher))
    divergence = [step["teacher/divergence"] for step in steps]
    assert divergence[0] > 0.1
    assert sum(divergence[-3:]) / 3 < 0.85 * divergence[0]
    assert all("teacher/log_ratio" not in step for step in steps)
    assert all(step["saving/zero_advantage_sequences"] == 0 for step in steps)


def test_on_policy_distillation_by_advantages_alone_raises_the_teachers_log_probs_of_what_is_sampled(tmp_path):
    changes = {
        "rollout__completions_per_prompt": 16,
        "algorithm": {"advantage": {"name": "raw"}},
        "train__tokens_per_step": 1000,
        "train__blocks": 14,
    }
    teacher = {"source": teacher_in(tmp_path, initializer_range=0.3), "advantage": True}
    steps = steps_of(finished_run(tmp_path, **LONGER | changes, teacher=teacher))
    ratio = [step["teacher/log_ratio"] for step in steps if "teacher/log_ratio" in step]
    assert len(ratio) == 14
    assert sum(ratio[:3]) < -0.3  # minus estimates of KL(policy || teacher)
    assert sum(ratio[-3:]) > 0.7 * sum(ratio[:3])
    assert all("teacher/divergence" not in step for step in steps)


def test_the_teachers_advantage_is_added_to_that_of_the_rewards(tmp_path):
    once = {"train__blocks": 1, "kl": None, "data__held_out": None}
    source = teacher_in(tmp_path)
    rewarded = finished_run(tmp_path, **once, name="rewarded")
    plain, measured, half, whole = (
        [
            row["advantage"]
            for _, rows in finished_run(tmp_path, **once, name=f"taught-{n}", **changes).read_rollouts()
            for row in rows
        ]
        for n, changes in enumerate(
            [
                {"rewards": [], "teacher": {"source": source, "advantage": 1}},
                {"teacher": {"source": source, "advantage": 1, "alone": True}},
                {"teacher": {"source": source, "advantage": 0.5}},
                {"teacher": {"source": source, "advantage": 1}},
            ]
        )
    )
    of_rewards = [row["advantage"] for _, rows in rewarded.read_rollouts() for row in rows]
    expected = [[r + c * t for r, t in zip(of_rewards, plain, strict=True)] for c in (0.5, 1)]
    assert measured == plain
    assert half == pytest.approx(expected[0], abs=1e-5)
    assert whole == pytest.approx(expected[1], abs=1e-5)


def test_a_run_with_a_teacher_is_resumed_bitwise_and_its_checkpoints_hold_nothing_of_the_teacher(tmp_path):
    source = teacher_in(tmp_path)
    changes = {**ALONE, "rewards": [{"name": "length", "cap": 6}]}
    changes["teacher"] = {"source": source, "divergence": "jensen_shannon", "beta": 0.3, "advantage": 0.5}
    whole = finished_run(tmp_path, **changes, train__blocks=2, name="whole")
    finished_run(tmp_path, **changes, train__blocks=1)
    resumed = finished_run(tmp_path, **changes, train__blocks=2, resume=True)
    assert_same_run(whole, resumed)
    plain = finished_run(tmp_path, **SHORT, name="plain")
    names = [
        sorted(json.loads(next(run.checkpoints.glob("*/index.json")).read_text())["tensors"]) for run in (plain, whole)
    ]
    assert names[0] == names[1]


def test_another_teacher_in_the_same_folder_is_noticed_and_the_same_in_another_is_none(tmp_path):
    teacher = {"source": teacher_in(tmp_path), "divergence": "reverse_kl"}
    finished_run(tmp_path, **ALONE | {"train__blocks": 1}, teacher=teacher)
    shutil.move(teacher["source"], tmp_path / "moved")
    moved = teacher | {"source": str(tmp_path / "moved")}
    finished_run(tmp_path, **ALONE | {"train__blocks": 2}, teacher=moved, resume=True)
    shutil.rmtree(tmp_path / "moved")
    teacher_in(tmp_path, initializer_range=0.4)
    with pytest.raises(ConfigurationError, match="other rows in teacher"):
        start(tiny_recipe(tmp_path, **ALONE | {"train__blocks": 3}, teacher=teacher), resume=True)


def test_a_teacher_with_another_tokenizer_is_refused_before_the_model_is_loaded(tmp_path):
    source = teacher_in(tmp_path, alphabet="abcdefgi")
    recipe = tiny_recipe(tmp_path, **ALONE, teacher={"source": source, "divergence": "reverse_kl"})
    for refused in (start, dry_run):
        with pytest.raises(ConfigurationError, match="2 tokens have another id or none, the first 'h'"):
            refused(recipe)


def test_a_vocabulary_that_is_padded_further_teaches_in_a_dtype_of_its_own(tmp_path):
    teacher = {"source": teacher_in(tmp_path, vocab_size=16), "divergence": "reverse_kl", "dtype": "bfloat16"}
    steps = steps_of(finished_run(tmp_path, **ALONE, teacher=teacher))
    assert all(0 < step["teacher/divergence"] < 10 for step in steps)


def test_which_layers_a_teacher_has_is_said_with_the_reason_and_refused_by_name(tmp_path, monkeypatch):
    source = teacher_in(tmp_path, head_dim=16)

    def said(**teacher):
        teacher = {"source": source, "divergence": "reverse_kl"} | teacher
        text = dry_run(tiny_recipe(tmp_path, **ALONE, teacher=teacher))
        return next(line.split("layers ")[1] for line in text.splitlines() if f"teacher {source}: layers" in line)

    assert said() == "transformers' own, for a model on the CPU"
    assert said(layers="transformers") == "transformers' own, for teacher.layers: transformers"
    monkeypatch.setattr(assembly, "teacher_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert said() == "transformers' own, for compute capability 7.5 is older than 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert said(dtype="bfloat16") == "row-invariant: bitwise identical in any batch"
    assert said() == "transformers' own, for float32 weights (teacher.dtype: bfloat16 would serve)"
    teacher_in(tmp_path, model_type="gpt2")
    assert said(dtype="bfloat16") == "transformers' own, for the architecture gpt2"
    monkeypatch.undo()
    teacher = {"source": source, "divergence": "reverse_kl", "layers": "row_invariant"}
    with pytest.raises(UnavailableError, match=r"architecture gpt2.*Set teacher.layers: transformers"):
        start(tiny_recipe(tmp_path, **ALONE, teacher=teacher))


def test_a_teacher_may_run_on_a_device_of_its_own_and_one_that_is_not_there_is_refused(tmp_path):
    changes = {**ALONE, "train__blocks": 1}
    teacher = {"source": teacher_in(tmp_path), "divergence": "reverse_kl", "advantage": 1}
    here, there = (
        finished_run(tmp_path, **changes, teacher=teacher | {"place": place}, name=place) for place in ("device", "cpu")
    )
    assert_same_run(here, there)
    for place, words in (("cuda:99", "given cuda:99, and .* on this machine"), ("gpu", "device, cpu, cuda or cuda:<n")):
        recipe = tiny_recipe(tmp_path, **changes, teacher=teacher | {"place": place}, name="refused")
        for refused in (start, dry_run):
            with pytest.raises(ConfigurationError, match=f"{words}.*teacher.place"):
                refused(recipe)


@pytest.mark.multi_gpu
def test_a_teacher_on_the_second_gpu_teaches_what_it_teaches_on_the_first(tmp_path):
    teacher = {"source": teacher_in(tmp_path), "divergence": "reverse_kl", "advantage": 1}
    here, there = (
        finished_run(tmp_path, **ALONE, model__device="cuda", teacher=teacher | {"place": place}, name=place[-1])
        for place in ("device", "cuda:1")
    )
    assert_same_run(here, there)


def test_a_dry_run_names_the_teacher_and_counts_its_weights(tmp_path):
    source = teacher_in(tmp_path)
    teacher = {"source": source, "divergence": "reverse_kl", "weight": 0.5}
    text = dry_run(tiny_recipe(tmp_path, **ALONE, teacher=teacher))
    assert f"teacher {source}: 0.5 * reverse_kl in the loss" in text
    assert any(line.split()[0] == "teacher" and "KiB" in line for line in text.splitlines())
    elsewhere = dry_run(tiny_recipe(tmp_path, **ALONE, teacher=teacher | {"place": "cpu"}))
    assert not any(line.split()[:1] == ["teacher"] and "KiB" in line for line in elsewhere.splitlines())
    assert "heads of teachers on another device      1.0 KiB" in elsewhere  # 11 tokens of 24 numbers


def test_the_base_of_an_adapter_holds_it_back(tmp_path):
    """With rewards alone the adapter leaves its base; under a heavy divergence from the base it stays near."""
    pytest.importorskip("peft")
    changes = {"kl": None, "data__held_out": None, "model__lora": {"rank": 2}, "train__blocks": 4}
    distances = []
    for weight in (1e-6, 10.0):
        teacher = {"source": "base", "divergence": "reverse_kl", "weight": weight}
        run = finished_run(tmp_path, **changes, teacher=teacher, name=f"weight-{weight:g}")
        distances.append([step["teacher/divergence"] for step in steps_of(run)])
        assert json.loads(run.provenance.read_text())["data"]["teacher"] == "base"
    free, held = distances
    assert free[0] == held[0] == 0
    assert held[-1] < 0.5 * free[-1]


def test_recorded_completions_are_learnt_from_a_teacher_without_rewards(tmp_path):
    recorded = [Completion(str(n), (3 + n % 8, 4, 2), "", "stop") for n in range(8)]
    changes = {
        "rollout__engine": recorded_engine(tmp_path, recorded),
        "rollout__completions_per_prompt": 1,
        "algorithm": {"advantage": {"name": "raw"}},
    }
    teacher = {"source": teacher_in(tmp_path), "divergence": "forward_kl"}
    steps = steps_of(finished_run(tmp_path, **LONGER | changes, teacher=teacher))
    divergence = [step["teacher/divergence"] for step in steps]
    assert divergence[-1] < 0.7 * divergence[0]
    with pytest.raises(InputError, match="logp_sampler of each token"):
        finished_run(tmp_path, **LONGER | changes, teacher={"source": teacher["source"], "advantage": 1}, name="again")


def test_recorded_completions_are_imitated_without_rewards_or_a_teacher_and_evaluated(tmp_path):
    recorded = [Completion(str(n), (3 + n % 8, 4, 2), "", "stop") for n in range(8)]
    changes = {"rollout__engine": recorded_engine(tmp_path, recorded), "rollout__completions_per_prompt": 1}
    held_out = {"name": "file", "path": str(tmp_path / "held_out.jsonl")}
    changes |= LONGER | {"algorithm": {"preset": "nll"}, "data__held_out": held_out}
    run = finished_run(tmp_path, **changes)
    steps = steps_of(run)
    assert steps[0]["loss/total"] == pytest.approx(math.log(TINY_LLAMA["vocab_size"]), rel=0.05)  # random weights
    assert steps[-1]["loss/total"] < 0.8 * steps[0]["loss/total"]
    assert {"evaluation/length_mean", "loss/total"} <= steps[-1].keys()
    assert len(list(run.checkpoints.iterdir())) == len(steps) + 1


def test_a_supervised_stage_imitates_the_texts_of_a_column_and_its_rewards_are_only_measured(tmp_path):
    changes = LONGER | {
        "rollout__engine": {"name": "recorded", "column": "answer"},
        "rollout__completions_per_prompt": 1,
        "algorithm": {"preset": "nll"},
        "rewards": [{"name": "exact", "column": "answer"}],
    }
    steps = steps_of(finished_run(tmp_path, **changes))
    assert steps[-1]["loss/total"] < 0.8 * steps[0]["loss/total"]
    assert {step["reward/mean"] for step in steps if "reward/mean" in step} == {1}


KNOWS_MORE = "{% if answer != 'ah' %}{{ answer }}{{ prompt }}{% endif %}"
"""The teacher reads the answer first; on the prompt whose answer is `ah` there is no teacher."""


def test_the_policy_learns_from_itself_after_a_prompt_that_knows_the_answer_and_is_resumed_bitwise(tmp_path):
    changes = {
        **ALONE,
        "rewards": [{"name": "length", "cap": 6}],
        "model__source": TINY_LLAMA | {"initializer_range": 0.5},
    }
    changes["teacher"] = {"source": "self", "template": KNOWS_MORE, "divergence": "reverse_kl", "advantage": 0.5}
    whole = finished_run(tmp_path, **changes, train__blocks=2, name="whole")
    finished_run(tmp_path, **changes, train__blocks=1)
    assert_same_run(whole, finished_run(tmp_path, **changes, train__blocks=2, resume=True))
    steps = steps_of(whole)
    assert all(step["teacher/divergence"] > 1e-3 for step in steps)
    graded = [step["teacher/graded_fraction"] for step in steps if "teacher/graded_fraction" in step]
    assert len(graded) == 2
    assert 0 < min(graded) < 1


def test_each_source_of_prompts_has_its_teacher_and_one_without_is_refused(tmp_path):
    model = teacher_in(tmp_path)
    sources = {
        pair[::-1]: model if pair < "d" else "start" for pair in ["ah", "bg", "cf", "de", "ed", "fc", "gb", "ha"]
    }
    changes = {**LONGER, "rollout__prompts_per_block": 8, "train__tokens_per_step": 1000}
    teacher = {"source": sources, "column": "answer", "divergence": "reverse_kl", "advantage": 1}
    run = finished_run(tmp_path, **changes, teacher=teacher)
    divergence = [step["teacher/divergence"] for step in steps_of(run)]
    assert divergence[-1] < 0.9 * divergence[0]
    assert json.loads(run.provenance.read_text())["data"]["teacher.ah"] == "start"
    del sources["ah"]
    with pytest.raises(DataError, match="'ah' at prompt"):
        start(tiny_recipe(tmp_path, **changes, teacher=teacher, name="refused"))

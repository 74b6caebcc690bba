"""The comparison of pretrained weights: its rows, its tables, and toy runs of both trainers from the same weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import evidence_smollm2 as evidence
from logitless.data.prompts import PromptOrder
from logitless.seeds import derived_seed
from logitless.train.assembly.engines import open_engines
from logitless.train.record.run_folder import RunFolder
from tests.models.tiny_gguf import write_gguf


def row(trainer: str, seed: int, after: float, **changed: Any) -> dict[str, Any]:
    made = {"task": "addition", "trainer": trainer, "variant": "full", "seed": seed, "held_out_before": 0.01}
    made |= {
        "held_out_after": after,
        "seconds": 40.0,
        "run_seconds": 50.0,
        "blocks": 3,
        "at_once": 1,
        "learning_rate": 1e-5,
    }
    return made | {"block_seconds": [10.0, 10.0, 20.0], "curve": [[0, 0.01], [3, after]], "base": "w"} | changed


def test_the_table_has_the_interval_of_the_difference_and_the_seconds_of_seeds_that_were_alone_in_both() -> None:
    """Three seeds each, all 0.1 apart: the pooled spread is 0.1, sqrt(2/3) of it times 2.776 is 0.227."""
    rows = [row("logitless", seed, 0.7 + seed / 10, at_once=1 + 2 * (seed > 0)) for seed in range(3)]
    rows += [
        row(
            "trl",
            s,
            0.7 + s / 10,
            seconds=120.0 + s,
            run_seconds=125.0,
            block_seconds=[40.0 + s] * 3,
            at_once=1 + s // 2,
        )
        for s in range(3)
    ]
    (line,) = evidence.compared(rows).splitlines()[2:]
    assert line == (
        "| addition | full | 3 | 0.010 | 0.800 ± 0.100 | 0.800 ± 0.100 | +0.000 ± 0.227 | 40 s | 120 s | 3.0 | 2.5 |"
    )


def test_three_seeds_here_are_drawn_beside_those_of_trl_and_full_fine_tuning_apart_from_lora() -> None:
    rows = [row("logitless", seed, 0.7, variant=variant) for seed in range(3) for variant in ("full", "lora")]
    rows += [row("trl", 0, 0.7, variant="lora")]
    drawn = evidence.drawn(rows)
    assert {name: list(runs) for name, runs in drawn.items()} == {
        "addition": ["logitless"],
        "addition-lora": ["logitless", "trl"],
    }
    assert evidence.drawn([each for each in rows if each["seed"] < 2]) == {}


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """A folder with tiny weights to begin with, and the task's data."""
    folder = tmp_path_factory.mktemp("toy")
    evidence.base(folder, str(write_gguf(folder / "tiny.gguf", quantized=True)))
    for name, numbers in (("train", range(8)), ("held_out", range(8, 12))):
        rows = ({"prompt": f"{n}+{n}?", "answer": str(2 * n), "solution": f"It is {2 * n}."} for n in numbers)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    return folder


def changes(folder: Path) -> list[str]:
    """Of the recipe, for the toy."""
    return [
        *("train.blocks=2", "rollout.prompts_per_block=2", "rollout.completions_per_prompt=2"),
        *("rollout.sampling.max_new_tokens=4", "evaluation.every_blocks=1", "model.trained_dtype=float32"),
        *(f"data.{name}.path={folder / name}.jsonl" for name in ("train", "held_out")),
    ]


@pytest.mark.parametrize("variant", ["full", "lora"])
def test_saved_weights_of_trl_are_evaluated_in_the_recipes_own_model_by_its_own_engine(
    toy, tmp_path, monkeypatch, variant
) -> None:
    inputs = evidence.read(evidence.recipe_of(evidence.Run("addition", "trl", variant, 0), toy, changes(toy)))
    trained = evidence.load(inputs).model
    for parameter in trained.parameters():
        parameter.data += 0.5
    trained.save_pretrained(tmp_path)
    opened = []

    def seen(recipe: Any, model: Any, tokenizer: Any) -> Any:
        opened.append((recipe.rollout.engine.name, type(model), model.state_dict()))
        return open_engines(recipe, model, tokenizer)

    monkeypatch.setattr(evidence, "open_engines", seen)
    _, engine = evidence.held_out(inputs, tmp_path)
    assert opened[0][:2] == (engine, type(trained))
    adapter = {name: value for name, value in trained.state_dict().items() if variant == "full" or "lora" in name}
    assert adapter
    for name, value in adapter.items():
        assert torch.equal(opened[0][2][name], value)


def test_both_trainers_begin_where_a_recipes_warm_start_ends(toy) -> None:
    warm = [*changes(toy), f"warm_start.data.path={toy / 'train'}.jsonl", "warm_start.steps=2"]
    evidence.warm(toy, "addition", changes(toy))  # has none
    evidence.warm(toy, "gsm8k-easy", warm)
    assert {path.name for path in toy.glob("base*")} == {"base", "base-gsm8k-easy"}
    before, *after = (
        evidence.load(evidence.read(evidence.recipe_of(evidence.Run(task, trainer, "full", 0), toy, changes(toy))))
        for task, trainer in (("addition", "trl"), ("gsm8k-easy", "logitless"), ("gsm8k-easy", "trl"))
    )
    weights, *others = ([parameter.detach() for parameter in each.model.parameters()] for each in (before, *after))
    assert all(torch.equal(a, b) for a, b in zip(*others, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(weights, others[0], strict=True))


@pytest.mark.parametrize("variant", ["full", "lora"])
def test_trl_is_given_the_recipes_weights_prompts_rewards_and_settings(toy, monkeypatch, variant) -> None:
    class Given(Exception):
        """What the trainer was made with."""

    def recorded(**arguments: Any) -> None:
        raise Given(arguments)

    monkeypatch.setattr("trl.GRPOTrainer", recorded)
    inputs = evidence.read(evidence.recipe_of(evidence.Run("addition", "trl", variant, 3), toy, changes(toy)))
    with pytest.raises(Given) as raised:
        evidence.trl_run(inputs, toy, micro_batches=2)
    (given,) = raised.value.args
    assert evidence.digest(dict(given["model"].named_parameters())) == (toy / "base" / "digest").read_text()
    order = PromptOrder(8, derived_seed(3, "order")).next(4)
    assert given["train_dataset"]["prompt"] == [inputs.data.train[number].text for number in order]
    prompts, answers = given["train_dataset"]["prompt"][:2], given["train_dataset"]["answer"][:2]
    assert given["reward_funcs"](prompts, [answers[0], "no"], answer=answers) == [1.0, 0.0]
    recipe, arguments = inputs.recipe, given["args"]
    assert recipe.rollout.zero_signal == "keep"
    assert recipe.train.optimizer.betas == (arguments.adam_beta1, arguments.adam_beta2) == (0.9, 0.999)
    assert arguments.learning_rate == recipe.train.optimizer.learning_rate
    assert arguments.temperature == recipe.rollout.sampling.temperature == 1.0
    assert arguments.max_completion_length == recipe.rollout.sampling.max_new_tokens == 4
    assert (arguments.num_generations, arguments.max_steps, arguments.loss_type) == (2, 2, "grpo")
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (2, 2)
    lora = given["peft_config"]
    assert (None if lora is None else (lora.r, lora.lora_alpha)) == (None if variant == "full" else (16, 32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "variant", "micro_batches"),
    [
        ("logitless", "full", 1),
        ("logitless", "staleness 1 centred", 1),
        ("trl", "full", 1),
        ("trl", "full", 2),
        ("trl", "lora", 1),
    ],
)
def test_a_toy_run_of_each_trainer_leaves_a_row_with_its_curve(
    toy, monkeypatch, trainer, variant, micro_batches
) -> None:
    monkeypatch.setitem(evidence.TRL_MICRO_BATCHES, "addition", micro_batches)
    run = evidence.Run("addition", trainer, variant, 0)
    evidence.work(run, toy, changes(toy), at_once=1)
    evidence.gather(toy, toy / "out.json")
    found = [each for each in json.loads((toy / "out.json").read_text())["rows"] if run.is_of(each)]
    assert len(found) == 1
    assert (found[0]["blocks"], len(found[0]["block_seconds"]), len(found[0]["reward"])) == (2, 2, 2)
    assert [block for block, _ in found[0]["curve"]] == [0, 1, 2]
    assert found[0]["seconds"] == pytest.approx(sum(found[0]["block_seconds"]))
    assert min(found[0]["block_seconds"]) > 0
    assert found[0].get("micro_batches", 1) == micro_batches
    rate = 2e-5 * (10 if variant == "lora" else 1)
    assert found[0]["learning_rate"] == pytest.approx(rate)
    assert found[0]["start"] == found[0]["base"]
    if trainer == "logitless":
        first, *lines = RunFolder(toy / "runs" / run.name).read_metrics()
        judged = sum(line.get("time/evaluation_seconds", 0.0) for line in lines)
        assert judged > 0
        elapsed = lines[-1]["time/elapsed_seconds"] - first["time/elapsed_seconds"]
        assert found[0]["seconds"] == pytest.approx(elapsed - judged)

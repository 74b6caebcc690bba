"""What a batch costs and what each saving takes off, against counts by hand."""

import pytest
import torch

from logitless.cli.main import main
from logitless.models.loading import load_model
from logitless.models.lora import LoraOptions, add_lora
from logitless.train.plan.explain import Operations, explain
from logitless.train.recipe.loading import dump_recipe
from tests.train.tiny import TINY_LLAMA, tiny_recipe

LLAMA = TINY_LLAMA | {"num_hidden_layers": 2, "num_attention_heads": 2}


def test_operations_are_two_a_weight_and_token_and_four_a_width_and_pair():
    found = Operations.of(load_model(LLAMA, random_weights=True, device="meta"))
    layer = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 32  # query; key and value of 8 each; output; the MLP's three
    assert found == Operations(2.0 * 2 * layer, 4.0 * 2 * 16, 2.0 * 11 * 16)
    assert found.step(5, 7.0, 3) == 3 * found.forward(5, 7.0, 3)


def test_recomputation_is_a_forward_pass_more_and_frozen_weights_get_no_gradient():
    model = load_model(LLAMA, random_weights=True, device="meta")
    model.gradient_checkpointing_enable()
    plain = Operations.of(model)
    assert plain.step(5, 0.0, 0) == 4 * plain.forward(5, 0.0, 0)
    model = load_model(LLAMA, random_weights=True)
    adapted = Operations.of(add_lora(model, LoraOptions(rank=1)))
    assert adapted.backward == 1.0


def _numbers(text: str, part: int) -> dict[str, list[float]]:
    """The columns of each line of the first or second table."""
    found = {}
    for line in text.split("\n\n")[1 + part].splitlines()[2:]:
        name, numbers = line[:48].strip(), line[48:].replace(",", "").split("(")[0].split()
        found[name] = [float(n.strip("-%")) for n in numbers]
    return found


def test_each_saving_takes_off_what_it_says(tmp_path):
    recipe = tiny_recipe(tmp_path, kl=None, train__epochs_per_block=1, train__tokens_per_step=1000)
    text = explain(recipe)
    live, half = (_numbers(text, part) for part in (0, 1))
    whole = "training, every sequence in full"
    scored = live[whole][2]
    assert half[whole] == live[whole]
    assert live["with each prompt once"][1] < live["without zero-advantage sequences"][1] == live[whole][1]
    assert half["without zero-advantage sequences"][2] < scored
    assert half["without zero-advantage sequences"][3] < 0.8 * half[whole][3]
    assert live["with each prompt once"][3] < live[whole][3]
    # 4 prompts of 4 tokens (bos, two letters and so on) are read once instead of four times
    assert live["as it is done"][2] == 0  # the step says logp_old itself
    assert half["as it is done"][2] == scored - half["in rows by cost"][2]


def test_the_command_prints_it_and_trains_nothing(tmp_path, capsys):
    raw = tmp_path / "tiny.yaml"
    raw.write_text(dump_recipe(tiny_recipe(tmp_path)))
    assert main(["train", str(raw), "--explain"]) == 0
    assert "every second group has none" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


def test_a_saving_that_is_off_or_cannot_be_had_says_so_and_the_batch_is_the_same_every_time(tmp_path):
    recipe = tiny_recipe(tmp_path, train__share_prompts=False, train__skip_zero_advantage=True)
    text = explain(recipe)
    assert "train.share_prompts: false" in text
    assert "not under this algorithm" in text  # its KL speaks of every token
    live = _numbers(text, 0)
    assert live["with each prompt once"][1] == live["training, every sequence in full"][1]
    assert live["as it is done"][2] == pytest.approx(live["training, every sequence in full"][2])
    torch.manual_seed(2)
    assert explain(recipe) == text

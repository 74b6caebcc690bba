"""A reward model gives what its classifier gives, whatever it is read beside."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from logitless.errors import ConfigurationError, UnavailableError
from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.reward_model import RewardModel
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.loading import parse_recipe
from tests.train.tiny import tiny_raw

CHAT = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}<eos>{% endfor %}"
TEXTS = ["ab", "a", "bbbaaab", "", "ba", "abab"]
PROMPTS = ["a", "bb", "a", "ab", "b", "a"]


def classifier(folder, num_labels=1, chat=True, pad=True):
    tokenizer = character_tokenizer("abu \n")
    tokenizer.chat_template = CHAT if chat else None
    if not pad:
        tokenizer.pad_token = tokenizer.eos_token
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        num_labels=num_labels,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.5,
    )
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval(), tokenizer


def one_by_one(model, tokenizer, prompts=PROMPTS, texts=TEXTS):
    found = []
    for prompt, text in zip(prompts, texts, strict=True):
        ids = tokenizer(f"u{prompt}<eos>a{text}<eos>", add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            found.append(model(ids).logits[0])
    return torch.stack(found)


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("budget", [1, 20, 16384])
def test_a_batch_gives_what_each_gives_alone(tmp_path, pad, budget):
    model, tokenizer = classifier(tmp_path, pad=pad)
    reward = RewardModel(source=str(tmp_path), device="cpu", tokens_per_batch=budget)
    reward.check({})
    found = [verdict.score for verdict in reward.verdicts(PROMPTS, TEXTS, {})]
    torch.testing.assert_close(torch.tensor(found), one_by_one(model, tokenizer)[:, 0], atol=1e-5, rtol=1e-4)
    assert len(set(found)) > 3


def test_a_class_gives_its_probability_and_a_sigmoid_that_of_the_logit(tmp_path):
    model, tokenizer = classifier(tmp_path / "three", num_labels=3)
    reward = RewardModel(source=str(tmp_path / "three"), device="cpu", output="class", index=2)
    reward.check({})
    wanted = one_by_one(model, tokenizer).softmax(-1)[:, 2]
    torch.testing.assert_close(torch.tensor(reward(PROMPTS, TEXTS)), wanted, atol=1e-5, rtol=1e-4)
    model, tokenizer = classifier(tmp_path / "one")
    reward = RewardModel(source=str(tmp_path / "one"), device="cpu", output="sigmoid")
    wanted = one_by_one(model, tokenizer)[:, 0].sigmoid()
    torch.testing.assert_close(torch.tensor(reward(PROMPTS, TEXTS)), wanted, atol=1e-5, rtol=1e-4)


def test_messages_and_a_template_are_what_it_reads(tmp_path):
    model, tokenizer = classifier(tmp_path)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "b"}]
    reward = RewardModel(source=str(tmp_path), device="cpu")
    plain = RewardModel(source=str(tmp_path), device="cpu", template="{prompt}u{completion}")
    for given, text in ((reward, "ua<eos>ab<eos>ub<eos>aab<eos>"), (plain, "a\nb\nbuab")):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        [score] = given([talk], ["ab"])
        assert score == pytest.approx(float(model(ids).logits[0, 0].detach()), abs=1e-5)


def test_what_does_not_fit_is_ungradable_and_what_is_not_finite_an_error(tmp_path, monkeypatch):
    classifier(tmp_path)
    reward = RewardModel(source=str(tmp_path), device="cpu", ungradable_score=-9.0)
    long, fitting = reward.verdicts(["a", "a"], ["ab" * 20, "b"], {})
    assert (long.score, long.status) == (-9.0, "ungradable")
    assert fitting.status == "graded"
    monkeypatch.setattr(RewardModel, "_scores", lambda self, loaded, rows: [float("nan")] * len(rows))
    [broken] = reward.verdicts(["a"], ["b"], {})
    assert (broken.score, broken.status) == (None, "error")


def test_a_model_that_does_not_serve_is_refused_before_the_first_rollout(tmp_path):
    with pytest.raises(UnavailableError, match="sequence classifier"):
        RewardModel(source=str(tmp_path / "nothing"), device="cpu").check({})
    classifier(tmp_path / "three", num_labels=3, chat=False)
    with pytest.raises(ConfigurationError, match=r"3 class"):
        RewardModel(source=str(tmp_path / "three"), device="cpu").check({})
    with pytest.raises(ConfigurationError, match="class 3"):
        RewardModel(source=str(tmp_path / "three"), device="cpu", output="class", index=3).check({})
    with pytest.raises(ConfigurationError, match="chat template"):
        RewardModel(source=str(tmp_path / "three"), device="cpu", output="class").check({})
    with pytest.raises(ConfigurationError, match=r"\{completion\}"):
        RewardModel(source="x", template="{prompt}")
    with pytest.raises(ConfigurationError, match="positive"):
        RewardModel(source="x", tokens_per_batch=0)


def test_recipes_name_it_beside_the_others(tmp_path):
    raw = tiny_raw(tmp_path)
    raw["rewards"] = [{"name": "reward_model", "source": "x", "weight": 0.5}, {"name": "length"}]
    recipe = parse_recipe(raw)
    assert isinstance(recipe, Recipe)
    assert [type(reward).__name__ for reward in recipe.rewards] == ["RewardModel", "Length"]

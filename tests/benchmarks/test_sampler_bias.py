"""Rollouts in bfloat16 bias the gradient of a float32 policy, training strays, and a sampler correction cures it."""

import pytest

import sampler_bias


@pytest.mark.parametrize("seed", [0, 1])
def test_uncorrected_gradients_are_biased_and_sequence_weights_take_the_bias_away(seed):
    found = sampler_bias.relative_bias(seed, 2)
    # bfloat16 keeps 8 bits of a logit of several nats: probabilities are off by about 1%, and so is the gradient.
    # With sequence weights float32 is left: 2^-24 beside sums of 36 completions.
    assert found["none"] > 1e-3
    assert found["sequence"] < 1e-5
    assert found["sequence"] < found["token"] < found["none"]


def test_training_strays_from_exact_gradients_without_correction_and_not_with_it():
    curves = sampler_bias.trained(0, 2, steps=6, learning_rate=0.05)
    gaps = {
        name: max(abs(a - b) for a, b in zip(curves[name], curves["exact"], strict=True))
        for name in ("none", "token", "sequence")
    }
    assert curves["exact"][-1] > curves["exact"][0] + 0.05
    assert gaps["sequence"] < 1e-4
    assert gaps["none"] > 20 * gaps["sequence"]

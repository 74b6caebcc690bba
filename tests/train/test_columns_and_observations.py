"""Runs of the presets that need more than rewards: a reference without a KL, a column of the data, an environment."""

import json

import pytest

from logitless.errors import ConfigurationError, DataError
from logitless.rollout.environment import Reply
from logitless.train.assembly.algorithm import algorithm_of
from tests.train.interrupting import stopped_at
from tests.train.tiny import (
    ONE_STEP,
    SHORT,
    assert_same_run,
    finished_run,
    give_chat_template,
    start,
    tiny_raw,
    tiny_recipe,
)


class Hums:
    """Says ``ab`` once, and then that it is over."""

    def start(self, prompt, *, seed):
        return []

    def reply(self, state, turn):
        state.append(turn)
        return Reply(messages=({"role": "tool", "content": "ab"},)) if len(state) == 1 else Reply()


ECHO = {
    "kl": None,
    "data__held_out": None,
    "algorithm__preset": "echo",
    "rollout__environment": {"name": "own", "factory": f"{__name__}:Hums"},
    "rollout__limits": {"max_turns": 2, "max_tokens": 20},
    "train__tokens_per_step": 60,
    "train__blocks": 2,
}


def test_what_an_environment_said_is_learnt_and_is_in_the_checkpoint_of_a_block_in_training(tmp_path):
    give_chat_template(tmp_path)
    whole = finished_run(tmp_path, name="whole", **ECHO)
    losses = [record["loss/observations"] for record in whole.read_metrics() if record["step"]]
    assert losses[-1] < losses[0]  # the same two letters each time
    stopped_at(1, tiny_recipe(tmp_path, name="stopped", **ECHO))
    assert_same_run(whole, finished_run(tmp_path, resume=True, name="stopped", **ECHO))


def test_echo_without_an_environment_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"preset echo: rollout\.environment"):
        algorithm_of(tiny_recipe(tmp_path, algorithm__preset="echo"))


def test_a2po_compares_with_a_reference_of_its_own_and_with_rewards_of_the_data(tmp_path):
    changes = {**SHORT, **ONE_STEP, "algorithm__preset": "a2po"}
    with pytest.raises(DataError, match=r"column 'reference_rewards' in each row.*prompt '0' with"):
        start(tiny_recipe(tmp_path, **changes))
    tiny_raw(tmp_path)
    path = tmp_path / "train.jsonl"
    rows = [json.loads(line) | {"reference_rewards": [0.0, 0.5, 1.0]} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = finished_run(tmp_path, **changes).read_metrics()[-1]
    count = record["optimizer/sequences"]
    squares = record["advantage/mean"] ** 2 + record["advantage/std"] ** 2 * (count - 1) / count
    assert record["loss/total"] == pytest.approx(squares, rel=1e-5)  # the log ratio to the reference is 0
    assert record["advantage/mean"] != 0


@pytest.mark.parametrize("name", ["rae", "hierarchical", "optimal_value"])
def test_equal_rewards_are_kept_where_they_are_compared_with_others(tmp_path, name):
    with pytest.raises(ConfigurationError, match=r"zero_signal=drop.*Set rollout\.zero_signal: keep"):
        algorithm_of(tiny_recipe(tmp_path, algorithm__advantage={"name": name}, rollout__zero_signal="drop"))

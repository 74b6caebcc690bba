"""Runs whose weights change while completions are under way: their log repeats them in every bit on any processes."""

import json
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from logitless.distributed import Ranks
from logitless.errors import ConfigurationError, TrainingError
from logitless.rollout.sampling_ranks import _Arriving
from logitless.train.learn.learner import Learner
from logitless.train.record.run_folder import RunFolder
from logitless.train.run import run_recipe
from logitless.train.store.checkpoint import BackgroundSaver, checkpoints
from tests.ranks import DEVICES, run_on_ranks
from tests.train.test_sampling_ranks import CENTRED, ON
from tests.train.tiny import completed, start, tiny_raw, tiny_recipe

STALENESS = 2
CHANGES = {"train__blocks": 4, "rollout__staleness": STALENESS}
ON = {
    "cpu": ON["cpu"] | CHANGES | {"rollout__max_rows": 1},  # transformers rounds rows of other batches otherwise
    "cuda": ON["cuda"] | CHANGES | {"rollout__max_rows": 6, "rollout__sampling": {"max_new_tokens": 24}},
}
BEGUN = "test/second block begun"


class Meeting(ExitStack):
    """Inside, the first block is trained on when the second is under way, whose second look waits for new weights."""

    def __init__(self, rank, ranks):
        super().__init__()
        calls, looks = [], []
        step, between, due = Learner.step, _Arriving.between_steps, _Arriving.due

        def late_step(self):
            while ranks.count(BEGUN) < 1:
                time.sleep(0.002)
            return step(self)

        def counted(self, announced):
            calls.append(1)
            ranks.count(BEGUN, int(len(calls) == 2))
            return between(self, announced)

        def waiting(self, needed):
            looks.extend([1] * (len(calls) == 2))
            while not (is_due := due(self, needed)) and len(looks) == 2 and rank == 1:
                time.sleep(0.002)
            return is_due

        for kind, name, other in (
            (Learner, "step", late_step), (_Arriving, "between_steps", counted), (_Arriving, "due", waiting),
        ):  # fmt: skip
            self.enter_context(mock.patch.object(kind, name, other))


def _run(rank, folder, changes, meets, options):
    ranks = Ranks(data=dist.group.WORLD)
    with Meeting(rank, ranks) if meets else ExitStack(), mock.patch("logitless.train.run.write_report"):
        return str(run_recipe(tiny_recipe(folder, **changes), ranks=ranks, **options).folder.path)


def beside(folder, changes, *, training=1, sampling=1, meets=False, **options):
    """A run on several ranks."""
    tiny_raw(folder)
    device, changes = changes.get("model__device", "cpu"), {**changes, "parallel__sampling": sampling}
    found = run_on_ranks(training + sampling, _run, folder, changes, meets, options, device=device)
    return RunFolder(Path(found[0]))


def again(folder, changes, run, *, training=1, sampling=0, name="again"):
    """The same run from the log of another."""
    changes = {**changes, "name": name}
    if training + sampling > 1:
        return beside(folder, changes, training=training, sampling=sampling, replay=run.path)
    write = BackgroundSaver._write

    def slow(*arguments):
        time.sleep(0.2)  # longer than a block's older weights are in the model
        return write(*arguments)

    with mock.patch.object(BackgroundSaver, "_write", slow):
        return completed(tiny_recipe(folder, **changes), replay=run.path)


def logged(run):
    return [json.loads(file.read_bytes()) for file in sorted(run.collected.glob("*.json"))]


def drawn(run):
    """By block and prompt, the runs of versions of each sample."""
    return [row["in_flight"] for row in logged(run)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("in_flight", "sampling", "other"), [pytest.param("keep", 1, 0, marks=pytest.mark.slow), ("recompute", 2, 1)]
)
def test_what_was_drawn_by_several_versions_is_drawn_again_on_other_processes(
    tmp_path, in_flight, sampling, other, device
):
    changes = {**ON[device], "rollout__in_flight": in_flight} | (CENTRED if in_flight == "recompute" else {})
    run = beside(tmp_path, changes, sampling=sampling, meets=True)
    assert any(len(runs) > 1 for calls in drawn(run)[1].values() for call in calls for runs in call)
    repeated = again(tmp_path, changes, run, sampling=other)
    assert drawn(repeated) == drawn(run)
    assert [row["begun_after"] for row in logged(repeated)] == [row["begun_after"] for row in logged(run)]
    ends = {0: 0} | {line["block"]: line["step"] for line in run.read_metrics()}
    for line in run.read_metrics():
        if "rollout/lag_max" in line:
            block, of_ages = line["block"], "rollout/lag_fraction/"
            assert line["rollout/lag_max"] <= ends[block - 1] - ends[max(0, block - 1 - STALENESS)]
            ages = {int(name.removeprefix(of_ages)): value for name, value in line.items() if of_ages in name}
            assert sum(ages.values()) == pytest.approx(1)
            assert max(ages) == line["rollout/lag_max"]
            assert line["rollout/token_lag_mean"] == pytest.approx(sum(age * share for age, share in ages.items()))


@pytest.mark.slow
def test_what_was_killed_goes_on_and_is_repeated_as_one_run_unless_a_decision_was_another(tmp_path):
    changes = {**ON["cpu"], "rollout__in_flight": "keep", "parallel__deterministic": True}
    run = beside(tmp_path, changes, meets=True)
    before = drawn(run)
    for path in checkpoints(run.checkpoints):
        if int(path.name.split("-")[1]) > 1:
            shutil.rmtree(path)
    for file in run.collected.glob("block-000004.*"):
        file.unlink()
    resumed = beside(tmp_path, changes, resume=True)
    assert drawn(resumed)[:3] == before[:3]
    assert drawn(again(tmp_path, changes, resumed, training=2)) == drawn(resumed)
    file = run.collected / "block-000002.json"
    row = json.loads(file.read_bytes())
    prompt, sample, runs = next(
        (p, g, runs) for p, [call] in row["in_flight"].items() for g, runs in enumerate(call) if len(runs) > 1
    )
    runs[0][1], runs[1][1] = runs[0][1] - 1, runs[1][1] + 1  # the second version comes a token earlier
    file.write_text(json.dumps(row))
    token = f"token {runs[0][1] + 1}: id .* by version {runs[0][0]}"
    with pytest.raises(TrainingError, match=f"block 2, prompt '{prompt}', completion {sample + 1}, {token}"):
        again(tmp_path, changes, run, name="other")


def test_weights_do_not_arrive_in_turns(tmp_path):
    with pytest.raises(ConfigurationError, match=r"for rollout.in_flight: parallel.sampling"):
        start(tiny_recipe(tmp_path, rollout__in_flight="keep", rollout__staleness=1))

"""A writer gets the finite numbers of each record at their step; an absent package stops it before it starts."""

import json
import math
import os
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
from pydantic import TypeAdapter

from logitless.errors import ConfigurationError, UnavailableError
from logitless.train.recipe.writers import TensorBoardSection, WriterSection
from logitless.train.record.run_folder import RunFolder
from logitless.train.record.writers import ServiceWriter, open_writers
from tests.train.interrupting import stopped_at
from tests.train.tiny import completed, start, tiny_recipe

RECORD = {"step": 3, "reward/mean": 0.5, "kl_ref/k3_mean": None, "optimizer/grad_norm": math.inf}


def opened(folder, *sections, config=None, first_step=0):
    """The writers of sections that are written as in a recipe."""
    made = [TypeAdapter(WriterSection).validate_python(section) for section in sections]
    return open_writers(made, folder=RunFolder(folder), config=config or {}, first_step=first_step)


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_back_what_was_written(tmp_path):
    (writer,) = opened(tmp_path, {"name": "tensorboard"})
    writer.write(RECORD)
    writer.close()
    assert scalars(tmp_path / "tensorboard") == {"reward/mean": [(3, 0.5)]}


def test_what_tensorboard_gets_before_a_step_is_done_is_written_with_the_first_one_or_at_the_end(tmp_path):
    (writer,) = opened(tmp_path, {"name": "tensorboard"})
    writer.write({"step": 0, "reward/mean": 0.25})
    assert not (tmp_path / "tensorboard").exists()
    writer.write({"step": 1, "reward/mean": 0.5})
    assert (tmp_path / "tensorboard").exists()
    writer.close()
    assert scalars(tmp_path / "tensorboard") == {"reward/mean": [(0, 0.25), (1, 0.5)]}
    (writer,) = opened(tmp_path / "stopped", {"name": "tensorboard"})
    writer.write({"step": 0, "reward/mean": 0.25})
    writer.close()
    assert scalars(tmp_path / "stopped" / "tensorboard") == {"reward/mean": [(0, 0.25)]}


def test_a_resumed_run_hides_what_the_interrupted_one_wrote_after_the_checkpoint(tmp_path):
    for first_step, steps, value in [(0, range(1, 6), 0.25), (3, range(4, 6), 0.75)]:
        (writer,) = opened(tmp_path, {"name": "tensorboard"}, first_step=first_step)
        for step in steps:
            writer.write({"step": step, "reward/mean": value})
        writer.close()
    points = scalars(tmp_path / "tensorboard")["reward/mean"]
    assert sorted(points) == [(1, 0.25), (2, 0.25), (3, 0.25), (4, 0.75), (5, 0.75)]


@pytest.fixture
def calls(monkeypatch):
    """What was called of packages that stand in for wandb, trackio and MLflow."""
    called = []

    def noted(name, result=None):
        def call(*arguments, **options):
            called.append((name, *arguments, options) if options else (name, *arguments))
            return result and result(options)

        return call

    wandb, trackio, mlflow = ModuleType("wandb"), ModuleType("trackio"), ModuleType("mlflow")
    wandb.init = noted("init", lambda o: SimpleNamespace(id=o.get("id", "made-by-wandb")))
    trackio.init = noted("init", lambda o: SimpleNamespace(name=o["name"]))
    for module in (wandb, trackio):
        module.log, module.finish = noted("log"), noted("finish")
    info = lambda o: SimpleNamespace(info=SimpleNamespace(run_id=o["run_id"] or "made-by-mlflow"))  # noqa: E731
    mlflow.start_run = noted("start_run", info)
    for name in ("set_tracking_uri", "set_experiment", "log_params", "log_dict", "log_metrics", "end_run"):
        setattr(mlflow, name, noted(name))
    for module in (wandb, trackio, mlflow):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return called


@pytest.mark.parametrize("service", ["wandb", "trackio"])
def test_a_service_gets_the_name_the_recipe_and_each_step(calls, tmp_path, service):
    (writer,) = opened(tmp_path / "toy", {"name": service}, config={"seed": 1})
    writer.write(RECORD)
    writer.close()
    init = calls[0][1]
    assert (init["project"], init["name"], init["config"]) == ("logitless", "toy", {"seed": 1})
    assert calls[1:] == [("log", {"reward/mean": 0.5}, {"step": 3}), ("finish",)]


def test_wandb_gets_what_the_recipe_says_of_its_run(calls, tmp_path):
    options = {"project": "sums", "entity": "team", "group": "a", "tags": ["x", "y"], "notes": "n", "mode": "offline"}
    opened(tmp_path / "toy", {"name": "wandb", "run_name": "mine", "run_id": "abc", **options})
    options |= {"name": "mine", "id": "abc", "resume": "allow", "config": {}, "dir": str(tmp_path / "toy")}
    assert calls == [("init", options)]


def test_trackio_gets_what_the_recipe_says_of_its_run(calls, tmp_path):
    options = {"project": "sums", "group": "a", "space_id": "me/space", "private": True}
    opened(tmp_path / "toy", {"name": "trackio", **options})
    assert calls == [("init", {**options, "name": "toy", "config": {}, "resume": "never"})]


def test_mlflow_gets_the_recipe_as_parameters_and_as_a_file_and_each_step(calls, tmp_path):
    config = {"train": {"blocks": 3, "text": "x" * 300}, **{f"key{i}": i for i in range(150)}}
    section = {"name": "mlflow", "tracking_uri": "http://here", "experiment": "sums", "tags": {"a": "b"}}
    (writer,) = opened(tmp_path / "toy", section, config=config)
    writer.write({"step": 3, "reward/mean": 0.5, "constraint/a:b (c)/pass_rate": 1.0})
    writer.close()
    uri, experiment, run, some, others, file, *rest = calls
    assert (uri, experiment) == (("set_tracking_uri", "http://here"), ("set_experiment", "sums"))
    assert run == ("start_run", {"run_id": None, "run_name": "toy", "tags": {"a": "b"}})
    assert len(some[1]) == 100
    assert {**some[1], **others[1]} == {
        "train.blocks": "3",
        "train.text": "x" * 250,
        **{f"key{i}": str(i) for i in range(150)},
    }
    assert file == ("log_dict", config, "recipe.json")
    assert rest == [
        ("log_metrics", {"reward/mean": 0.5, "constraint/a:b _c_/pass_rate": 1.0}, {"step": 3}),
        ("end_run",),
    ]


@pytest.fixture
def mlflow(monkeypatch, tmp_path):
    """The real package, which notes in files below ``tmp_path``."""
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.chdir(tmp_path)
    yield mlflow
    mlflow.end_run()
    mlflow.set_tracking_uri(None)


def test_mlflow_itself_has_the_recipe_and_the_metrics_also_of_a_run_that_goes_on(mlflow, tmp_path):
    section = {"name": "mlflow", "tracking_uri": (tmp_path / "kept").as_uri(), "tags": {"a": "b"}}
    config = {"train": {"blocks": 3}, "prompts": "x" * 300, "none": None}
    for step in (1, 2):
        (writer,) = opened(tmp_path / "toy", section, config=config)
        writer.write({"step": step, "constraint/a:b (c)/pass_rate": step / 4, "kl_ref/k3_mean": None})
        writer.close()
    [run] = mlflow.search_runs(search_all_experiments=True, output_format="list")
    assert run.data.params == {"train.blocks": "3", "prompts": "x" * 250, "none": "None"}
    assert run.data.tags["a"] == "b"
    assert run.info.run_name == "toy"
    [name] = run.data.metrics
    assert name == "constraint/a:b _c_/pass_rate"
    measured = mlflow.MlflowClient().get_metric_history(run.info.run_id, name)
    assert [(each.step, each.value) for each in measured] == [(1, 0.25), (2, 0.5)]
    assert mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/recipe.json") == config


def test_mlflow_goes_on_in_the_run_that_the_recipe_names(calls, tmp_path):
    (writer,) = opened(tmp_path, {"name": "mlflow", "run_id": "of-a-sweep"})
    assert calls[0] == ("start_run", {"run_id": "of-a-sweep", "run_name": tmp_path.name, "tags": None})
    assert writer.run_id == "of-a-sweep"


@pytest.mark.parametrize(
    ("uri", "said"),
    [("http://127.0.0.1:9", "127.0.0.1"), ("sqlite:///kept.db", "needs the whole package: pip install")],
)
def test_mlflow_that_begins_no_run_is_an_error_that_says_what_to_do(mlflow, tmp_path, uri, said):
    with pytest.raises(UnavailableError, match=said) as refused:
        opened(tmp_path, {"name": "mlflow", "tracking_uri": uri})
    assert "Name a server that runs in `tracking_uri`" in str(refused.value)
    assert mlflow.active_run() is None


def test_mlflow_tries_as_often_as_it_is_set_to_once_a_run_has_begun(mlflow, tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES")
    tried, start = [], mlflow.start_run
    noting = lambda **o: (tried.append(os.environ.get("MLFLOW_HTTP_REQUEST_MAX_RETRIES")), start(**o))[1]  # noqa: E731
    monkeypatch.setattr(mlflow, "start_run", noting)
    opened(tmp_path, {"name": "mlflow", "tracking_uri": (tmp_path / "kept").as_uri()})
    assert tried == ["2"]
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ


def test_a_run_of_mlflow_that_cannot_be_noted_down_is_ended_there(mlflow, tmp_path, monkeypatch):
    section = {"name": "mlflow", "tracking_uri": (tmp_path / "kept").as_uri()}
    with monkeypatch.context() as patched:
        patched.setattr(mlflow, "log_dict", mock.Mock(side_effect=OSError("full")))
        with pytest.raises(UnavailableError, match="OSError: full"):
            opened(tmp_path, section)
    assert mlflow.active_run() is None
    assert opened(tmp_path, section)


@pytest.mark.parametrize(("service", "remedy"), [("wandb", "Run `wandb login`"), ("trackio", "Check `space_id`")])
def test_a_service_that_begins_no_run_is_an_error_that_says_what_to_do(calls, tmp_path, monkeypatch, service, remedy):
    monkeypatch.setattr(sys.modules[service], "init", mock.Mock(side_effect=RuntimeError("No API key configured.")))
    with pytest.raises(UnavailableError, match=f"RuntimeError: No API key configured.*{remedy}"):
        opened(tmp_path, {"name": service})


def test_a_run_that_is_resumed_goes_on_in_the_same_run_of_every_service(calls, tmp_path):
    services = [{"name": "wandb"}, {"name": "trackio"}, {"name": "mlflow"}]
    recipe = tiny_recipe(tmp_path, writers=services, train__blocks=2)
    ids = {"wandb": "made-by-wandb", "trackio": "tiny", "mlflow": "made-by-mlflow"}
    folder = stopped_at(1, recipe)
    assert json.loads(folder.writers.read_text()) == ids
    calls.clear()
    completed(recipe, resume=True)
    wandb, trackio = (call[1] for call in calls if call[0] == "init")
    assert (wandb["id"], wandb["resume"]) == (ids["wandb"], "allow")
    assert (trackio["name"], trackio["resume"]) == (ids["trackio"], "allow")
    [mlflow] = (call[1] for call in calls if call[0] == "start_run")
    assert mlflow["run_id"] == ids["mlflow"]
    assert not [call for call in calls if call[0] in ("set_experiment", "log_params")]


def test_a_run_that_begins_anew_is_a_new_run_of_every_service(calls, tmp_path):
    recipe = tiny_recipe(tmp_path, writers=["wandb"], train__blocks=1)
    folder = RunFolder(tmp_path / "runs" / "tiny")
    folder.rollouts.mkdir(parents=True)
    folder.write_config("name: tiny")
    folder.writers.write_text('{"wandb": "of a failed start"}')
    start(recipe)
    assert "id" not in next(call[1] for call in calls if call[0] == "init")


def test_writers_are_closed_before_the_folder_of_a_failed_start_is_removed(calls, tmp_path, monkeypatch):
    folder, there = tmp_path / "runs" / "tiny", []
    monkeypatch.setattr(ServiceWriter, "close", lambda self: there.append(folder.exists()))
    monkeypatch.setattr("logitless.train.assembly.stages.Learner", mock.Mock(side_effect=RuntimeError("no learner")))
    with pytest.raises(RuntimeError, match="no learner"):
        start(tiny_recipe(tmp_path, writers=["wandb"]))
    assert there == [True]
    assert not folder.exists()


def test_a_name_alone_is_a_writer_with_its_defaults(tmp_path):
    named = tiny_recipe(tmp_path, writers=["tensorboard", {"name": "wandb", "project": "sums"}]).writers
    assert named[0] == TensorBoardSection()
    assert (named[1].name, named[1].project) == ("wandb", "sums")
    with pytest.raises(ConfigurationError, match=r"'writers.0.entiti' \(nearest: 'writers.0.entity'\)"):
        tiny_recipe(tmp_path, writers=[{"name": "wandb", "entiti": "team"}])


@pytest.mark.parametrize(
    ("service", "said"), [("wandb", "wandb"), ("trackio", "trackio"), ("mlflow", r"'logitless\[mlflow\]'")]
)
def test_an_absent_package_is_named_before_any_writer_starts(monkeypatch, tmp_path, service, said):
    monkeypatch.setitem(sys.modules, service, None)
    with pytest.raises(UnavailableError, match=f"pip install {said}"):
        opened(tmp_path, {"name": "tensorboard"}, {"name": service})
    assert not list(tmp_path.iterdir())

"""``serve-engine`` offers a recipe's engine to a client in another process, and says where."""

import signal
import socket
import subprocess
import sys

import pytest
import yaml

from logitless.cli.main import main
from tests.rollout.test_serving import post
from tests.train.tiny import give_chat_template, tiny_raw


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.yaml"
    give_chat_template(tmp_path)
    raw = tiny_raw(tmp_path)
    raw["model"]["chat_template_kwargs"] = {"mood": "good"}
    path.write_text(yaml.safe_dump(raw))
    return path


@pytest.mark.slow
def test_a_client_in_another_process_gets_tokens_log_probs_and_the_version(recipe):
    command = [sys.executable, "-m", "logitless.cli.main", "serve-engine", str(recipe), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().strip()
            _, said = post(f"{url}/completions", prompt="ab", n=2, max_tokens=4)
            _, chat = post(f"{url}/chat/completions", messages=[{"role": "user", "content": "ab"}], max_tokens=4)
            server.terminate()
            assert server.wait(300) == 128 + signal.SIGTERM
        finally:
            server.kill()
    assert said["prompt_token_ids"] == [3, 4]
    assert chat["prompt_token_ids"] == [3, 4, 9, 6]  # and "gd", as the recipe's variables say
    assert said["weights_version"] == 0
    for choice in said["choices"]:
        assert 1 <= len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) <= 4


def test_a_port_that_is_taken_is_refused_in_words(recipe, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve-engine", str(recipe), "--port", str(taken.getsockname()[1])]) == 2
    assert "--port" in capsys.readouterr().err


def test_a_run_is_served_as_it_was_trained_and_a_replaced_value_refused(tmp_path, capsys):
    assert main(["serve-engine", str(tmp_path), "--port", "0", "--set", "rollout.sampling.max_new_tokens=50"]) == 2
    assert "--set; given" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["serve-engine", "recipe.yaml"], ["serve-tinker", "model"]])
def test_without_starlette_a_server_names_the_extra_that_brings_it(command, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "starlette.routing", None)
    monkeypatch.delitem(sys.modules, "logitless.http_server", raising=False)
    assert main(command) == 1
    assert "pip install 'logitless[serve]'" in capsys.readouterr().err

"""What cannot be reached is known at once, and said in one line."""

import os
import socket
import subprocess
import sys
import time

import pytest

SCRIPT = """
import sys
from logitless.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def closed_port():
    """A port of this machine at which nothing listens: it is taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.mark.slow
def test_a_hub_name_without_a_network_costs_one_line_and_no_wait(tmp_path, closed_port):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "name: a\nmodel: {source: nobody/nothing}\nrewards: [{name: length, cap: 3}]\n"
        "data: {train: {name: file, path: a.jsonl}}\nrollout: {sampling: {max_new_tokens: 8}}\n"
    )
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment |= {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": f"http://127.0.0.1:{closed_port}", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT, "train", str(recipe), "--dry-run"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "nobody/nothing" in done.stderr
    assert "the hub cannot be reached" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_a_refused_connection_is_known_at_once(monkeypatch, closed_port):
    from logitless import hub

    monkeypatch.setattr(hub, "_TIMEOUT_SECONDS", 300.0)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    start = time.monotonic()
    assert not hub._accepts_connections(f"http://127.0.0.1:{closed_port}")
    assert time.monotonic() - start < 100
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert hub._accepts_connections(f"http://127.0.0.1:{server.getsockname()[1]}")

"""A server that ends while it starts is named with its log, and ending one ends what it started."""

import socket
import sys
import time
from pathlib import Path

import pytest

from logitless.bench.vllm_process import VllmProcess, _first_port_of_the_system, free_port, vllm_server
from logitless.errors import UnavailableError


def _executable(folder: Path, text: str) -> Path:
    path = folder / "vllm"
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return path


def test_a_server_that_ends_is_named_with_the_end_of_its_log(tmp_path):
    executable = _executable(tmp_path, "print('no such model'); raise SystemExit(1)")
    process = VllmProcess(tmp_path, executable, tmp_path / "log")
    process.start()
    with pytest.raises(UnavailableError, match="no such model"):
        process.wait(300)
    process.kill()


SERVER = """
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_a_server_is_waited_for_and_ended_with_its_workers(tmp_path):
    with vllm_server(tmp_path, _executable(tmp_path, SERVER), tmp_path / "log"):
        child = int((tmp_path / "log").read_text().split()[1])
        assert Path(f"/proc/{child}").exists()
    deadline = time.monotonic() + 300
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child)


def test_a_port_that_a_server_will_take_later_is_given_to_nobody_meanwhile():
    if _first_port_of_the_system() <= 20_000:
        pytest.skip("the system gives away all ports")
    given = []
    for _ in range(50):
        with socket.create_server(("127.0.0.1", 0)) as listening:
            place = listening.getsockname()
            with socket.create_connection(place) as one:
                given += [place[1], one.getsockname()[1]]
    assert max(free_port() for _ in range(50)) < min(given)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

"""A server that ends while it starts is named with its log, and ending one ends what it started."""

import sys
import time
from pathlib import Path

from vllm_process import vllm_server


def _executable(folder: Path, text: str) -> Path:
    path = folder / "vllm"
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return path


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


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

"""A vLLM server as a process of its own, for benchmarks and tests: started, waited for, and ended with its workers."""

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

from logitless.errors import UnavailableError
from logitless.http_client import Fault, HttpClient

FLAGS = (
    *("--logprobs-mode", "processed_logprobs"),
    *("--generation-config", "vllm"),
    "--enable-scale-out",
    *("--worker-extension-cls", "logitless.rollout.vllm.worker.FolderWeights"),
)
"""What every server for logitless is started with; docs/servers.md says why."""

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


class VllmProcess:
    """A server on loopback.

    Args:
        model: folder with a configuration and a tokenizer, and weights unless ``flags`` ask for dummies.
        executable: ``vllm`` of the environment that it is installed in.
        log: file that its output is added to.
        port: None: a free one.
        flags: besides ``FLAGS``.
        environment: besides ``ENVIRONMENT``.
        served: its name of the model.
    """

    def __init__(
        self,
        model: Path,
        executable: Path,
        log: Path,
        *,
        port: int | None = None,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] = ON_CPU,
        served: str = "policy",
    ) -> None:
        self.port = free_port() if port is None else port
        self.url, self.log = f"http://127.0.0.1:{self.port}", log
        self._command = [str(executable), "serve", str(model), "--host", "127.0.0.1", "--port", str(self.port)]
        self._command += ["--served-model-name", served, *FLAGS, *flags]
        source = Path(__file__).parents[1] / "src"
        self._environment = {**os.environ, **ENVIRONMENT, **environment, "PYTHONPATH": str(source)}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin; ``wait`` says when it answers."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, env=self._environment, start_new_session=True
            )

    def wait(self, seconds: float = 600.0) -> None:
        """Until it answers.

        Raises:
            UnavailableError: it ended, or did not answer in time.
        """
        client, deadline = HttpClient(self.url, seconds=10.0), time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self._process is not None, "not started"
            if self._process.poll() is not None:
                break
            try:
                client.get("/health")
                return
            except Fault:
                time.sleep(0.5)
        end = self.log.read_text(errors="replace")[-3000:]
        raise UnavailableError(
            needed=f"a vLLM server that answers at {self.url} within {seconds:.0f} s", given=end, remedy="Read its log."
        )

    def kill(self) -> None:
        """End it and its workers at once, as ``kill -9`` does."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None


@contextmanager
def vllm_server(
    model: Path, executable: Path, log: Path, flags: Sequence[str] = (), environment: Mapping[str, str] = ON_CPU
) -> Iterator[VllmProcess]:
    """A server that answers, until the block ends."""
    process = VllmProcess(model, executable, log, flags=flags, environment=environment)
    process.start()
    try:
        process.wait()
        yield process
    finally:
        process.kill()


def free_port() -> int:
    """A port of loopback that nobody listens on, and that the system gives to nobody who does not ask for it.

    A server listens on it seconds later: till then any connection or listener of another process would be given one of
    the system's own range.
    """
    below = _first_port_of_the_system()
    for port in random.SystemRandom().sample(range(10_000, below), 100) if below > 20_000 else [0]:
        with socket.socket() as one, suppress(OSError):  # else it is taken
            one.bind(("127.0.0.1", port))
            free: int = one.getsockname()[1]
            return free
    raise UnavailableError(needed="a free port of 127.0.0.1", given="a hundred that are taken", remedy="End servers.")


def _first_port_of_the_system() -> int:
    """From here on Linux gives ports to those who ask for any; 0 where it does not say."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return 0


def name_distribution() -> None:
    """Let vLLM's command line find a distribution called ``vllm`` where it was installed as ``vllm-cpu``."""
    found = metadata.distribution("vllm-cpu")
    folder = Path(str(found.locate_file(""))) / f"vllm-{found.version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {found.version}+cpu\n")


if __name__ == "__main__":
    name_distribution()

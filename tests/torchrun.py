"""torchrun in miniature: its ranks are forks of the process that starts them, and need not import torch again.

``warm.run("-m", "tests.torchrun", RESTARTS, SCRIPT, ...)`` runs a script on two ranks. They find the variables that
torchrun sets and a store that outlives them; when one fails the other is ended, and both are started again. One that
SIGTERM does not end is killed after a while.
"""

import os
import runpy
import signal
import sys
import threading
import traceback

import torch.distributed as dist

import logitless.cli.train
import logitless.train.entry  # noqa: F401 - what ranks need is imported once

SHUTDOWN_SECONDS = 20.0
"""As ``--shutdown-timeout`` of torchrun."""


def _rank(rank: int, start: int, port: int) -> None:
    """Be a rank; the exit is at once, for the store's thread stayed in the process that forked this one."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    numbers |= {"TORCHELASTIC_RESTART_COUNT": start, "TORCHELASTIC_RUN_ID": port}
    os.environ |= {name: str(number) for name, number in numbers.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    status = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> int:
    """0 if both ranks ended well in some start, else 1."""
    restarts = int(sys.argv[1])
    sys.argv[:2] = []
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for start in range(restarts + 1):
        ranks = []
        for rank in range(2):
            ranks.append(os.fork())
            if not ranks[-1]:
                _rank(rank, start, store.port)
        first, status = os.wait()
        [other] = {*ranks} - {first}
        if status:
            os.kill(other, signal.SIGTERM)
            kill = threading.Timer(SHUTDOWN_SECONDS, os.kill, (other, signal.SIGKILL))
            kill.start()
            os.waitpid(other, 0)
            kill.cancel()
        elif os.waitpid(other, 0)[1] == 0:
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())

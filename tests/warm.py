"""Python processes that need not import torch: forks of one that has.

``run`` is ``subprocess.run([sys.executable, *arguments])`` but for that. Importing torch and transformers takes
seconds, and a test that starts a process of its own would pay for them each time. Each fork has memory, environment,
folder and output of its own. What the first process has imported is all that they have in common, and what Python reads
when it starts (``PYTHONWARNINGS``, ``PYTHONHASHSEED``).
"""

import atexit
import functools
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TORCH = ("torch._dynamo", "transformers.modeling_utils", "peft")
"""And torch and transformers: what every run imports, and takes seconds for."""


def run(
    *arguments: str, environment: Mapping[str, str], folder: Path | None = None, imported: tuple[str, ...] = TORCH
) -> subprocess.CompletedProcess[str]:
    """What ``python -m module arguments`` or ``python -c program`` printed, and its exit status.

    Args:
        arguments: of Python: ``-m`` and a module or ``-c`` and a program, then the arguments of either.
        environment: of the process; folders of ``PYTHONPATH`` come first where modules are looked for.
        folder: that it runs in; the current one if it is not said.
        imported: modules that it finds imported, under the environment that their first process was started with.
    """
    folder = Path.cwd() if folder is None else folder
    first = _first_process(imported, environment.get("TRITON_INTERPRET"))
    with tempfile.TemporaryDirectory() as output:
        order = {"arguments": arguments, "environment": dict(environment), "folder": str(folder), "output": output}
        try:
            first.stdin.write(json.dumps(order) + "\n")
            first.stdin.flush()
            status = int(first.stdout.readline())
        except BaseException:  # as when a test takes too long, or the first process ended: the next one starts another
            os.killpg(first.pid, signal.SIGKILL)
            first.wait()
            _first_process.cache_clear()
            raise
        printed, complained = (Path(output, name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(arguments, status, printed, complained)


@functools.cache
def _first_process(imported: tuple[str, ...], interpret: str | None) -> Any:
    """One that has these modules imported, with kernels interpreted or not; it ends with its standard input."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if interpret is not None:
        environment["TRITON_INTERPRET"] = interpret
    process = subprocess.Popen(
        [sys.executable, "-P", __file__, *imported],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    atexit.register(process.communicate)
    return process


def _become(order: dict[str, Any]) -> int:
    """Run what was ordered in this process; its exit status."""
    for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
        file = os.open(Path(order["output"], name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, stream.fileno())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [order["folder"], *paths]
    kind, what, *rest = order["arguments"]
    sys.argv = [what if kind == "-m" else "-c", *rest]
    try:
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    """Imports the modules named, then forks for each line of standard input and answers with the exit status."""
    for module in sys.argv[1:]:
        importlib.import_module(module)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            sys.exit(_become(json.loads(line)))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()

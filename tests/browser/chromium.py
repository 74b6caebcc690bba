"""Headless Chromium, driven over two pipes by its own protocol; no package is needed beside it."""

import base64
import json
import os
import shutil
import subprocess
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)


class Chromium:
    """One page of a browser.

    Args:
        process: started with ``--remote-debugging-pipe``.
        to, of: file descriptors that are written and read.
    """

    def __init__(self, process: subprocess.Popen[bytes], to: int, of: int) -> None:
        self.process, self._to, self._of = process, to, of
        self._rest, self._number, self.events = b"", 0, []  # type: ignore[var-annotated]
        self._session: str | None = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a command; events that come before it are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self._of, 1 << 16)
            assert read, "the browser is gone"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, address: str) -> float:
        """Go to an address; the seconds until its load event."""
        self._load("about:blank")  # from one address of a page to another nothing would be loaded
        return self._load(address)

    def _load(self, address: str) -> float:
        self.events.clear()
        began = time.perf_counter()
        self.ask("Page.navigate", url=address)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())
        return time.perf_counter() - began

    def value(self, expression: str) -> Any:
        """What JavaScript says; the tests' own, a report has none."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def size(self, width: int, height: int = 900) -> None:
        """The window's."""
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def media(self, kind: str = "", scheme: str = "light") -> None:
        """``print`` or the screen, light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", media=kind, features=features)

    def picture(self, path: Path) -> None:
        """The whole page as a PNG."""
        found = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def complaints(self) -> list[str]:
        """Errors of the console, exceptions, and requests for anything but the page itself."""
        found = []
        for event in self.events:
            method, parameters = event.get("method"), event.get("params", {})
            if method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                found.append(parameters["entry"]["text"])
            elif method == "Runtime.exceptionThrown" or (
                method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert")
            ):
                found.append(json.dumps(parameters))
            elif method == "Network.requestWillBeSent":
                url = parameters["request"]["url"]
                found += [] if url.startswith(("data:", "file:", "about:")) else [f"request for {url}"]
        return found


@contextmanager
def chromium(profile: Path) -> Iterator[Chromium]:
    """A browser with a new profile; it is gone afterwards."""
    assert PROGRAM is not None
    read_by_it, to = os.pipe()
    of, written_by_it = os.pipe()
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]

    def join_pipes() -> None:
        os.dup2(read_by_it, 63)
        os.dup2(written_by_it, 64)
        os.dup2(63, 3)
        os.dup2(64, 4)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on forks beside threads; this one only dups
        process = subprocess.Popen(
            [PROGRAM, *options, f"--user-data-dir={profile}"],
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=join_pipes,
        )
    os.close(read_by_it)
    os.close(written_by_it)
    try:
        yield Chromium(process, to, of)
    finally:
        process.kill()
        process.wait()
        os.close(to)
        os.close(of)

"""Weight transfer to servers through files, and detection of the weights that a server holds.

    folder     all weights, or what changed of them, in a folder that the server reads: any server on this file system
    adapter    a LoRA adapter alone, in PEFT's format; each version is served under a name of its own

All weights have names, so that a server is recognised that was restarted or got weights from another client.
"""

import shutil
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from logitless.errors import EngineError
from logitless.http_client import PassingFault, Patience
from logitless.models.lm_head import causal_lm
from logitless.rollout.engine import Weights
from logitless.rollout.vllm.api import FRESH, VllmServer
from logitless.rollout.vllm.weight_folder import WeightFolders, private_folder

Held = Literal["current", "fresh", "other"]
"""What a server holds: the weights of the last push, those that it was started with, or another client's."""


@dataclass(frozen=True)
class Push:
    """Numbers of a push.

    Args:
        num_bytes: sent to each server.
        changed_fraction: share of weights that differ in any bit from the push before; None if not counted.
        seconds: until the last server had loaded them.
    """

    num_bytes: int
    changed_fraction: float | None
    seconds: float


class WeightSync(ABC):
    """Transfers the policy's weights to servers through a folder.

    Args:
        root: parent of the folders; None for a private one, removed on ``close``.
    """

    def __init__(self, root: Path | None) -> None:
        self._remove: Callable[[], object] | None = None
        if root is None:
            root, self._remove = private_folder(self)
        root.mkdir(parents=True, exist_ok=True)
        self._root = root

    @abstractmethod
    def model(self) -> str:
        """The model's name in requests."""

    @abstractmethod
    def push(self, servers: Sequence[VllmServer], weights: Weights, version: int) -> Push:
        """Transfer weights; all servers hold them when it returns."""

    @abstractmethod
    def again(self, server: VllmServer) -> None:
        """Transfer the last weights again, to a server that was restarted."""

    @abstractmethod
    def held(self, server: VllmServer) -> Held:
        """What the server holds now."""

    @abstractmethod
    def versions(self, server: VllmServer, model: str, names: Sequence[str]) -> tuple[int, ...]:
        """The version of the weights that sampled each token of a sample.

        Args:
            server: that sampled it.
            model: of the request.
            names: the server's name of the weights of each token.

        Raises:
            PassingFault: weights that the server was started with.
            EngineError: another client's weights.
        """

    def keep_apart(self, client: int) -> None:
        """Write into a folder for this client alone, one of the run's several; a private folder is that already."""
        if self._remove is None:
            self._root = self._root / f"client-{client}"
            self._root.mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        """Remove a private folder."""
        if self._remove is not None:
            self._remove()


_LOADING = "-loading"


class Names:
    """Names of weights, made of a unique part of this process and the version."""

    def __init__(self) -> None:
        self._mine = f"logitless-{uuid.uuid4().hex[:12]}"
        self.current: str | None = None

    def of(self, version: int) -> str:
        return f"{self._mine}-{version}"

    @staticmethod
    def while_loading(name: str) -> str:
        """The name of weights that are being loaded."""
        return f"{name}{_LOADING}"

    def held(self, name: str) -> Held:
        if name == self.current:
            return "current"
        return "fresh" if name == FRESH else "other"

    def version_of(self, name: str, server: VllmServer) -> int:
        """The version in a name.

        Raises:
            PassingFault, EngineError: see ``WeightSync.versions``.
        """
        if name == FRESH:
            raise PassingFault("a sample of weights that the server was started with")
        mine, _, version = name.removesuffix(_LOADING).rpartition("-")
        if mine != self._mine or not version.isdecimal():
            raise others_weights(name, server)
        if name.endswith(_LOADING):
            raise PassingFault("a sample that was sampled while weights were being loaded")
        return int(version)


class FolderSync(WeightSync):
    """Weights through a folder that trainer and servers both see.

    Args:
        served: the server's name of the model.
        patience: with a server that does not respond.
        root: parent of the folders; None for a private one, removed on ``close``.
        dtype: of the server, that weights are rounded to; None keeps each tensor's own.
        differences_in_a_row: see ``WeightFolders``.
        loader: ``worker``: ``FolderWeights``, which the server must be started with; ``reload``: vLLM's own
            ``reload_weights``, which reads whole folders only, and on CPUs leaves a tied LM head stale.
        seconds: time limit of a server for loading.
        in_flight: push while completions are under way, which continue with the new weights.
    """

    def __init__(
        self,
        served: str,
        patience: Patience,
        *,
        root: Path | None = None,
        dtype: torch.dtype | None = None,
        differences_in_a_row: int = 0,
        loader: Literal["worker", "reload"] = "worker",
        seconds: float = 600.0,
        in_flight: bool = False,
    ) -> None:
        self._served, self._patience, self._loader, self._seconds = served, patience, loader, seconds
        self._mode: Literal["wait", "keep"] = "keep" if in_flight else "wait"
        super().__init__(root)
        self._folders = WeightFolders(self._root, dtype=dtype, differences_in_a_row=differences_in_a_row)
        self._names, self._folder = Names(), Path()

    def model(self) -> str:
        return self._served

    def push(self, servers: Sequence[VllmServer], weights: Weights, version: int) -> Push:
        """Write the folder once, then have each server load it.

        Raises:
            EngineError: a full disk, a server that fails to load, or one that got another client's weights since.
        """
        start = time.perf_counter()
        if self._names.current is not None:
            for server in servers:
                refuse_others(self.held_patiently(server), server)
        config: Any = causal_lm(weights.module).config
        with _written_to(self._root):
            written = self._folders.write(weights.tensors(), version, config.save_pretrained)
        self._folder, self._names.current = written.folder, self._names.of(version)
        for server in servers:
            self.again(server)
        fraction = None if written.num_changed is None else written.num_changed / written.num_weights
        return Push(written.num_bytes, fraction, time.perf_counter() - start)

    def again(self, server: VllmServer) -> None:
        """Have a server load the folder of the last push; until it has, the name of its weights is no version."""
        name = self._names.current
        assert name is not None, "no weights were pushed yet"

        def load() -> None:
            server.pause(self._mode)
            server.name_weights(Names.while_loading(name))
            of_worker = self._loader == "worker"
            method, argument = ("load_weight_folder", "folder") if of_worker else ("reload_weights", "weights_path")
            server.call_workers(method, {argument: str(self._folder)}, seconds=self._seconds)
            server.forget_prefixes()
            server.name_weights(name)
            server.resume()

        self._patience.until_done(load, what="the policy's weights loaded", where=server.url)

    def held(self, server: VllmServer) -> Held:
        return self._names.held(server.weights_name())

    def versions(self, server: VllmServer, model: str, names: Sequence[str]) -> tuple[int, ...]:  # noqa: ARG002
        return tuple(self._names.version_of(name, server) for name in names)

    def held_patiently(self, server: VllmServer) -> Held:
        """``held`` of a server that may not respond for a while."""
        return self._patience.until_done(lambda: self.held(server), what="the name of its weights", where=server.url)

    def keep_apart(self, client: int) -> None:
        super().keep_apart(client)
        self._folders.root = self._root


class AdapterSync(WeightSync):
    """A LoRA adapter alone, each version under a name of its own, so that a cache of one is never used for another.

    The server must hold the base model that the adapter is trained on; the probe checks that.

    Args:
        patience: with a server that does not respond.
        root: parent of the folders; None for a private one, removed on ``close``.
    """

    def __init__(self, patience: Patience, *, root: Path | None = None) -> None:
        self._patience, self._names = patience, Names()
        super().__init__(root)
        self._bases: dict[str, str] = {}
        self._before: str | None = None

    def model(self) -> str:
        """The adapter's name, which includes its version."""
        assert self._names.current is not None, "no adapter was pushed yet"
        return self._names.current

    def push(self, servers: Sequence[VllmServer], weights: Weights, version: int) -> Push:
        """Write the adapter once, have each server load it and unload the one before.

        Raises:
            EngineError: weights without an adapter, or with one of experts; a server that fails to load it, one whose
                base model got another client's weights since the first push, or a full disk.
        """
        start = time.perf_counter()
        if weights.adapter is None:
            raise EngineError(
                needed="a LoRA adapter to push alone",
                given="a policy without one",
                remedy="Set model.lora, or rollout.engine.weights: {name: folder}.",
            )
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.adapter()}
        if fused := [name for name in tensors if ".experts." in name]:
            raise EngineError(
                needed="an adapter of linear modules alone, for servers know experts by other names than PEFT",
                given=f"{fused[0]} and {len(fused) - 1} more",
                remedy="Set rollout.engine.weights: {name: folder}, which merges it, or leave experts out of "
                "model.lora.targets.",
            )
        self._before, self._names.current = self._names.current, self._names.of(version)
        self._folder = self._root / f"{version:09d}"
        shutil.rmtree(self._folder, ignore_errors=True)
        with _written_to(self._root):
            self._folder.mkdir(parents=True)
            save_file(tensors, self._folder / "adapter_model.safetensors")
            _save_adapter_config(weights.module, self._folder)
        for server in servers:
            self.again(server)
        if self._before is not None:
            shutil.rmtree(self._root / self._before.rpartition("-")[2].zfill(9), ignore_errors=True)
        return Push(sum(t.nbytes for t in tensors.values()), None, time.perf_counter() - start)

    def again(self, server: VllmServer) -> None:
        """Have a server load the adapter of the last push."""

        def load() -> None:
            base = server.weights_name()
            if self._bases.setdefault(server.url, base) != base:
                raise others_weights(base, server)
            server.load_adapter(self.model(), str(self._folder))
            if self._before is not None and self._before != self.model():
                server.unload_adapter(self._before)

        self._patience.until_done(load, what="the policy's adapter loaded", where=server.url)

    def held(self, server: VllmServer) -> Held:
        """What the server holds, by its list of adapters and the name of the base model's weights."""
        if server.weights_name() != self._bases[server.url]:
            return "other"
        return "current" if self.model() in server.models() else "fresh"

    def versions(self, server: VllmServer, model: str, names: Sequence[str]) -> tuple[int, ...]:
        """The version in the adapter's name; the base model's weights must not have changed."""
        for name in names:
            if name != self._bases[server.url]:
                raise others_weights(name, server)
        return (self._names.version_of(model, server),) * len(names)


def refuse_others(held: Held, server: VllmServer) -> None:
    """Raises EngineError if the server holds another client's weights."""
    if held == "other":
        raise others_weights(server.weights_name(), server)


def others_weights(name: str, server: VllmServer) -> EngineError:
    """The error for a server that holds another client's weights."""
    return EngineError(
        needed=f"the policy's weights on {server.url}, which this run pushed",
        given=f"weights that somebody else pushed, called {name!r}",
        remedy="Give each run servers of its own; nothing that was sampled since is used. Go on with --resume.",
    )


@contextmanager
def _written_to(root: Path) -> Iterator[None]:
    """Turn a failure to write files into an engine's error, at which the run saves its state.

    Raises:
        EngineError: a file could not be written.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise EngineError(
            needed=f"the policy's weights written to {root}, for the servers to read",
            given=f"{type(error).__name__}: {error}",
            remedy="Free disk space there, or name another folder in rollout.engine.weights.path; then go on with"
            " --resume.",
        ) from error


def _save_adapter_config(module: nn.Module, folder: Path) -> None:
    configs: Any = module.peft_config
    for config in configs.values():
        config.save_pretrained(str(folder))

"""Weight transfer from this process's GPU to those of vLLM servers over NCCL, with vLLM's own implementation.

The steps are pause, start, update, finish with a version, resume. Written for vLLM 0.32 from its documentation; vLLM's
trainer side (``vllm.distributed.weight_transfer``) must be installed here too. **Not run yet**: it needs two GPUs. The
interface changes between releases; nothing outside of this file knows it.

Servers are started with ``--weight-transfer-config '{"backend": "nccl"}'``.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from torch import Tensor

from logitless.errors import EngineError, LostRankError, UnavailableError
from logitless.http_client import Patience
from logitless.rollout.engine import Weights
from logitless.rollout.vllm.api import VllmServer
from logitless.rollout.vllm.weight_sync import Held, Names, Push, refuse_others


class _Control:
    """The five calls of vLLM's trainer side to a server."""

    def __init__(self, server: VllmServer) -> None:
        self._client = server.client

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._client.post("/init_weight_transfer_engine", {"init_info": init_info})

    def shutdown_weight_transfer_engine(self) -> None:
        self._client.post("/shutdown_weight_transfer_engine")

    def start_weight_update(self) -> None:
        self._client.post("/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._client.post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._client.post("/finish_weight_update", {} if weight_version is None else {"weight_version": weight_version})


class NcclSync:
    """One communicator for each server, opened at the first push and again after a restart of the server.

    Args:
        served: the server's name of the model.
        patience: with a server that does not respond.
        address: of this machine, for the servers.
        port: of the first server's rendezvous; each further server uses the next.
        in_flight: push while completions are under way, which continue with the new weights.
        trains_meanwhile: whether the policy is trained while servers sample. There is then no copy of the weights
            pushed last, so that a restarted server ends the run.
    """

    def __init__(
        self,
        served: str,
        patience: Patience,
        *,
        address: str,
        port: int,
        in_flight: bool = False,
        trains_meanwhile: bool = False,
    ) -> None:
        self._trains_meanwhile = trains_meanwhile or in_flight
        self._mode: Literal["wait", "keep"] = "keep" if in_flight else "wait"
        self._served, self._patience, self._address, self._port = served, patience, address, port
        self._names = Names()
        self._weights: Weights | None = None
        self._ports: dict[str, int] = {}
        self._trainers: dict[str, Any] = {}

    def model(self) -> str:
        """The server's name of the model."""
        return self._served

    def push(self, servers: Sequence[VllmServer], weights: Weights, version: int) -> Push:
        """Send every weight to one server after the other.

        Raises:
            UnavailableError: vLLM is not installed here.
            EngineError: a server that fails, or that somebody else gave weights to since the last push.
        """
        start = time.perf_counter()
        for number, server in enumerate(servers):
            self._ports.setdefault(server.url, self._port + number)
            if self._names.current is not None:
                held = self.held(server)
                refuse_others(held, server)
                if held == "fresh":  # restarted since, so that the communicator is closed
                    self._trainers.pop(server.url, None)
        self._weights, self._names.current = weights, self._names.of(version)
        for server in servers:
            self._send(server)
        num_bytes = sum(tensor.nbytes for _, tensor in weights.tensors())
        return Push(num_bytes, None, time.perf_counter() - start)

    def again(self, server: VllmServer) -> None:
        """Send the last weights again, to a server that was restarted.

        Raises:
            EngineError: the policy may have been trained since.
        """
        self._trainers.pop(server.url, None)
        if self._trains_meanwhile:
            raise EngineError(
                needed=f"the weights of the last push again, for {server.url}, which was restarted",
                given="a policy that is trained while servers sample, whose weights go over NCCL as they are now",
                remedy="Go on with --resume, or set rollout.engine.weights: {name: folder}, where they are kept.",
            )
        self._send(server)

    def _send(self, server: VllmServer) -> None:
        name = self._names.current
        assert name is not None
        if server.url not in self._trainers:
            self._trainers[server.url] = self._opened(server)
        try:
            server.pause(self._mode)
            self._trainers[server.url].send_weights()
            server.forget_prefixes()
            server.name_weights(name)
            server.resume()
        except Exception as error:  # after an incomplete broadcast the communicator cannot be used again
            self._trainers.pop(server.url, None)
            if isinstance(error, LostRankError):  # another rank of the trainer failed, not the server
                raise
            raise EngineError(
                needed=f"weights sent to {server.url} over NCCL",
                given=f"{type(error).__name__}: {error}",
                remedy="Restart the server and go on with --resume, or set rollout.engine.weights: {name: folder}.",
            ) from error

    def _opened(self, server: VllmServer) -> Any:
        try:
            from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
            from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        except ImportError as error:
            raise UnavailableError(
                needed="vLLM beside the trainer, for weights over NCCL",
                given=str(error),
                remedy="Install logitless[vllm], or set rollout.engine.weights: {name: folder}.",
            ) from error
        sync = self

        class Source(WeightSource):  # type: ignore[misc]
            """The policy's current tensors."""

            def metadata(self) -> list[Any]:
                return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self]

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                assert sync._weights is not None
                return sync._weights.tensors()

        answer = server.client.get("/get_world_size")
        info = NCCLTrainerInitInfo(
            rank=0,
            master_address=self._address,
            master_port=self._ports[server.url],
            world_size=1 + int(answer["world_size"]),
        )
        return WeightTransferTrainerFactory.trainer_init(info, client=_Control(server), source=Source())

    def held(self, server: VllmServer) -> Held:
        """What the server holds, by the name of its weights."""
        return self._patience.until_done(
            lambda: self._names.held(server.weights_name()), what="the name of its weights", where=server.url
        )

    def keep_apart(self, client: int) -> None:
        """Refuse: servers connect to the address of one process.

        Raises:
            UnavailableError: always.
        """
        raise UnavailableError(
            needed="one node of trainer processes for rollout.engine.weights: {name: nccl}",
            given=f"a client of number {client} on another",
            remedy="Set rollout.engine.weights: {name: folder}, or train on one node.",
        )

    def versions(self, server: VllmServer, model: str, names: Sequence[str]) -> tuple[int, ...]:  # noqa: ARG002
        """The versions in the names of weights."""
        return tuple(self._names.version_of(name, server) for name in names)

    def close(self) -> None:
        """Close the communicators."""
        for trainer in self._trainers.values():
            trainer.shutdown()

"""``logitless serve-tinker MODEL``: the service of the Tinker SDK on loopback."""

import argparse
import logging
import secrets
import socket
import sys
from pathlib import Path

from logitless.cli.arguments import check_at_least
from logitless.errors import ConfigurationError, UnavailableError
from logitless.models.loading import load_tokenizer
from logitless.train.assembly.process import device_of, set_process
from logitless.train.recipe.model import ModelSection


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to serve, and where."""
    parser.add_argument("model", help="the base model: a hub name or a folder")
    parser.add_argument("--name", action="append", default=[], help="what clients call it (repeatable; default MODEL)")
    parser.add_argument("--tokenizer", help="hub name or folder (default MODEL)")
    parser.add_argument("--folder", type=Path, default=Path("tinker"), help="of checkpoints (default tinker)")
    parser.add_argument("--port", type=int, default=8787, help="on 127.0.0.1; 0 takes a free one (default 8787)")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:NUMBER")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--layers", choices=("auto", "row_invariant", "transformers"), default="auto")
    parser.add_argument("--memory", type=int, help="bytes for adapters, keys and values (default half of the GPU)")
    parser.add_argument("--tokens-per-row", type=int, default=8192, help="of a training pass (default 8192)")
    parser.add_argument("--seed", type=int, default=0, help="of adapters and samples without a seed (default 0)")


def run(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    try:
        import uvicorn

        from logitless.tinker.app import app
        from logitless.tinker.wire import messages
    except ImportError as error:
        raise UnavailableError(
            needed="the packages of the Tinker service", given=str(error), remedy="pip install 'logitless[tinker]'"
        ) from error
    from logitless.tinker.service import Service
    from logitless.tinker.store import Store
    from logitless.tinker.trainer import open_trainer

    messages()
    check_at_least("--tokens-per-row", options.tokens_per_row, 1)
    with _bound(options.port) as bound:
        section = ModelSection(source=options.model, device=options.device)
        device = device_of(section)
        set_process(section, seed=options.seed)
        tokenizer = load_tokenizer(options.tokenizer or options.model)
        trainer, layers = open_trainer(
            options.model,
            tokenizer,
            device=device,
            dtype=options.dtype or ("float32" if device.type == "cpu" else "bfloat16"),
            layers=options.layers,
            memory=options.memory,
            tokens_per_row=options.tokens_per_row,
        )
        source = options.tokenizer or options.model
        service = Service(
            trainer,
            Store(options.folder),
            names=options.name or [options.model],
            tokenizer_name=str(Path(source).absolute()) if Path(source).exists() else source,
            seed=options.seed,
        )
        for noisy in ("uvicorn.error", "uvicorn.access"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        server = uvicorn.Server(uvicorn.Config(app(service, secret=secrets.token_bytes(32)), log_config=None))
        print(f"http://127.0.0.1:{bound.getsockname()[1]}", flush=True)
        print(f"{', '.join(service.names)} on {device}; layers {layers}; Ctrl-C ends it", file=sys.stderr)
        try:
            server.run(sockets=[bound])
        finally:
            service.close()
    return 0


def _bound(port: int) -> socket.socket:
    """A socket on loopback, taken before the model is loaded."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(("127.0.0.1", port))
        found.listen(128)
    except OSError as error:
        found.close()
        raise ConfigurationError(
            needed=f"port {port} on 127.0.0.1", given=str(error), remedy="Name another --port; 0 takes a free one."
        ) from error
    return found

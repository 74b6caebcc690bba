"""``logitless serve-tinker MODEL``: the service of the Tinker SDK on loopback."""

import argparse
import secrets
import sys
from contextlib import closing
from pathlib import Path

from logitless.cli.arguments import check_at_least
from logitless.cli.loading import loading
from logitless.cli.serving import add_port, wait_for_end


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to serve, and where."""
    parser.add_argument("model", help="the base model: a hub name or a folder")
    parser.add_argument("--name", action="append", default=[], help="what clients call it (repeatable; default MODEL)")
    parser.add_argument("--tokenizer", help="hub name or folder (default MODEL)")
    parser.add_argument("--folder", type=Path, default=Path("tinker"), help="of checkpoints (default tinker)")
    add_port(parser, 8787)
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:NUMBER")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--layers", choices=("auto", "row_invariant", "transformers"), default="auto")
    parser.add_argument(
        "--memory", type=int, help="bytes for adapters, keys and values (default: half of the free GPU memory)"
    )
    parser.add_argument("--tokens-per-row", type=int, default=8192, help="of a training pass (default 8192)")
    parser.add_argument("--seed", type=int, default=0, help="of adapters and samples without a seed (default 0)")


def run(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C; a second one does not wait for the call under way."""
    check_at_least("--tokens-per-row", options.tokens_per_row, 1)
    check_at_least("--memory", 1 if options.memory is None else options.memory, 1)
    check_at_least("letters of --name", min(map(len, options.name), default=1), 1)
    with loading("serve-tinker"):
        from logitless.http_server import HttpServer, listening
        from logitless.models.loading import load_tokenizer
        from logitless.tinker.app import app
        from logitless.tinker.service import Service
        from logitless.tinker.store import opened
        from logitless.tinker.trainer import open_trainer
        from logitless.tinker.wire import messages
        from logitless.train.assembly.process import device_of, set_process
        from logitless.train.recipe.model import ModelSection

    messages()
    with opened(options.folder) as store, listening(options.port) as connection:
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
            store,
            names=options.name or [options.model],
            tokenizer_name=str(Path(source).absolute()) if Path(source).exists() else source,
            seed=options.seed,
        )
        with closing(HttpServer(app(service, secret=secrets.token_bytes(32)), connection)) as server:
            print(server.url, flush=True)
            print(f"{', '.join(service.names)} on {device}; layers {layers}; Ctrl-C ends it", file=sys.stderr)
            try:
                wait_for_end(then_at_once=True)
            finally:
                print("ends when the call under way is answered; Ctrl-C again ends it at once", file=sys.stderr)
                service.close()
    return 0

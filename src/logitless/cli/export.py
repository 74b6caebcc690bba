"""``logitless export RUN``: a checkpoint as a folder that transformers, PEFT and inference servers load."""

import argparse
from pathlib import Path

from logitless.cli.arguments import add_checkpoint, add_run
from logitless.cli.loading import loading
from logitless.errors import ConfigurationError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, where to, and in which form."""
    add_run(parser)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: export/ in the run folder")
    add_checkpoint(parser)
    parser.add_argument(
        "--form", choices=("merged", "adapter"), default="merged", help="whole model (default), or LoRA's factors alone"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: bfloat16")
    parser.add_argument(
        "--push-to-hub", metavar="REPO", help="upload the folder to OWNER/NAME, private unless --public"
    )
    parser.add_argument("--public", action="store_true", help="with --push-to-hub: for everybody to read")
    parser.add_argument("--device", default="cpu", help="where weights are merged (default: cpu)")


def run(options: argparse.Namespace) -> int:
    """Write the folder and say where it is."""
    with loading("export"):
        import torch

        from logitless.train.export import check_form, check_target, export_policy
        from logitless.train.push import check_push, push_folder
        from logitless.train.recipe.loading import load_recipe
        from logitless.train.record.run_folder import open_run_folder
        from logitless.train.saved_policy import load_policy
    folder = open_run_folder(options.run)
    target: Path = options.out or folder.path / "export"
    check_form(load_recipe(folder.config), options.form, has_warm_start=folder.warm_start.is_dir())
    check_target(target)
    repo, private = options.push_to_hub, not options.public
    if repo is not None:
        check_push(repo, private=private)
    elif options.public:
        raise ConfigurationError(needed="--push-to-hub beside --public", given="none", remedy="Name a repository.")
    saved = load_policy(folder, options.checkpoint, device=options.device, exact=True)
    export_policy(saved, folder, target, form=options.form, dtype=getattr(torch, options.dtype))
    after = f"after {saved.block} blocks and {saved.step} steps"
    print(f"{target}: {options.form}, {options.dtype}, {after}")
    if repo is not None:
        print(push_folder(target, repo, private=private, message=f"{folder.path.name} {after}"))
    return 0

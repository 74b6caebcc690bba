"""``logitless sample RUN``: completions of a prompt or a file of prompts, from any checkpoint of a run."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from logitless.cli.arguments import add_checkpoint, add_run, check_at_least, check_output_file
from logitless.cli.loading import loading
from logitless.cli.output import visible
from logitless.errors import ConfigurationError

if TYPE_CHECKING:
    from logitless.data.sources import Rendered, TrainingData
    from logitless.rollout.sampling import SamplingOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, the prompts, how to sample, and where to."""
    add_run(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT", help="system prompt and template are those of the recipe's data")
    what.add_argument("--file", type=Path, help="JSON Lines or Parquet with a column of prompts")
    parser.add_argument("--column", default="prompt", help="of the file (default: prompt)")
    parser.add_argument("--source", metavar="NAME", help="of a mixture, whose system prompt and template are taken")
    add_checkpoint(parser)
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="completions a prompt (default 1)")
    parser.add_argument("--temperature", type=float, help="default: the recipe's; 0 takes the most likely token")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="default: the recipe's")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same completions (default 0)")
    parser.add_argument("--device", help="default: the recipe's")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write .jsonl or .parquet that an engine can replay and `logitless score` reads",
    )


def run(options: argparse.Namespace) -> int:
    """Sample and print, or write."""
    with loading("sample"):
        from logitless.data.prompts import prompts_of_rows
        from logitless.data.sources import FileData, Row, read_rows
        from logitless.rollout.recorded import write_completions
        from logitless.train.record.run_folder import open_run_folder
        from logitless.train.saved_policy import load_policy
    folder = open_run_folder(options.run)
    check_at_least("--samples", options.samples, 1)
    check_at_least("--seed", options.seed, 0)
    check_output_file("--out", options.out, "a .jsonl or .parquet file", (".jsonl", ".parquet"))
    given = None if options.file is None else read_rows(FileData(path=options.file, columns={"prompt": options.column}))
    saved = load_policy(folder, options.checkpoint, device=options.device)
    rows = given or [Row("the command line", {"prompt": options.prompt})]
    prompts = prompts_of_rows(
        rows,
        _rendered(saved.recipe.data.train, options.source),
        saved.tokenizer,
        max_prompt_tokens=saved.recipe.data.max_prompt_tokens,
        too_long="error",
        chat_template_kwargs=saved.recipe.model.chat_template_kwargs,
    ).prompts
    sampling = _sampling(saved.recipe.rollout.sampling, options.temperature, options.max_new_tokens)
    groups = saved.engine().sample(prompts, options.samples, sampling, seed=options.seed)
    print(f"from {saved.source}, after {saved.block} blocks and {saved.step} steps", file=sys.stderr, flush=True)
    if options.out is not None:
        asked = {str(row.values.get("id", number)): row.values["prompt"] for number, row in enumerate(rows)}
        texts = {each.id: raw if isinstance(raw := asked[each.id], str) else each.text for each in prompts}
        write_completions(options.out, [completion for group in groups for completion in group], texts)
        print(options.out)
        return 0
    for prompt, group in zip(prompts, groups, strict=True):
        if len(prompts) > 1:
            print(f"=== {visible(prompt.id)}: {visible(prompt.text)}")
        for number, completion in enumerate(group, start=1):
            if len(group) > 1:
                print(f"--- {number}: {completion.length} tokens, {completion.finish_reason}")
            print(visible(completion.text))
    return 0


def _rendered(data: "TrainingData", source: str | None) -> "Rendered":
    """System prompt and template of the run's data; of the named source, if those of several sources differ."""
    from logitless.data.sources import Rendered, sources_of

    of_sources = {name: each.data for name, each in sources_of(data).items()}
    ways = {(each.system, each.template) for name, each in of_sources.items() if source in (None, name)}
    if len(ways) != 1:
        raise ConfigurationError(
            needed=f"--source with one of {', '.join(of_sources)}, whose prompts differ in system prompt or template",
            given=source or "none",
            remedy=f"Add --source {next(iter(of_sources))}.",
        )
    system, template = ways.pop()
    return Rendered(system=system, template=template)


def _sampling(options: "SamplingOptions", temperature: float | None, max_new_tokens: int | None) -> "SamplingOptions":
    """The recipe's settings with those that the command line replaces."""
    if temperature == 0:
        options = options.greedy()
    elif temperature is not None:
        options = replace(options, temperature=temperature)
    return options if max_new_tokens is None else replace(options, max_new_tokens=max_new_tokens)

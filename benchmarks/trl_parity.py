"""TRL's trainer and the drop-in side by side: whole runs from one seed, and every configuration of the parity command.

python benchmarks/trl_parity.py            # measures, writes benchmarks/results/trl-parity.json
python benchmarks/trl_parity.py --table    # writes the result into docs/trl.md
"""

import json
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from script import command_line, parsed, record

RESULT = "trl-parity.json"
STEPS = 8
CASES: dict[str, dict[str, Any]] = {
    "TRL's defaults (`dapo`)": {},
    "`grpo` with a KL": {"loss_type": "grpo", "beta": 0.04},
    "`grpo`, sequence ratio (GSPO)": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "`dr_grpo`, delta 2": {"loss_type": "dr_grpo", "delta": 2.0},
    "`cispo`, ceiling 5": {"loss_type": "cispo", "epsilon_high": 5.0},
    "`sapo`, temperature 0.7": {"loss_type": "sapo", "temperature": 0.7},
}


def model_folder(folder: Path) -> str:
    """A small Llama of random weights, and a tokenizer of characters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from logitless.models.char_tokenizer import character_tokenizer

    torch.manual_seed(0)
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz ")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def run(trainer_class: type, path: str, output: Path, options: dict[str, Any]) -> dict[str, list[float]]:
    """Losses of every micro-batch and gradient norms of every step; each trainer samples with its own weights."""
    import trl
    from datasets import Dataset

    losses: list[float] = []

    class Noted(trainer_class):  # type: ignore[misc]
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            loss = super()._compute_loss(model, inputs)
            losses.append(loss.item())
            return loss

    def vowels(completions: list[str], **_: Any) -> list[float]:
        return [sum(text.count(letter) for letter in "aeiou") / 8 for text in completions]

    arguments = trl.GRPOConfig(
        str(output),
        seed=1,
        use_cpu=True,
        bf16=False,
        learning_rate=1e-3,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_generations=8,
        num_iterations=2,
        max_completion_length=16,
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    prompts = Dataset.from_list([{"prompt": word} for word in ("say", "tell", "sing", "ask")] * 4)
    trainer = Noted(path, reward_funcs=vowels, args=arguments, train_dataset=prompts)
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return {"losses": losses, "grad_norms": norms}


def whole_runs(folder: Path) -> list[dict[str, Any]]:
    """Both trainers under every configuration."""
    import trl

    from logitless.integrations.trl import GRPOTrainer

    path, found = model_folder(folder / "model"), []
    for case, options in CASES.items():
        theirs, ours = (run(each, path, folder / "out", options) for each in (trl.GRPOTrainer, GRPOTrainer))
        found.append({"case": case, "options": options, "trl": theirs, "logitless": ours})
    return found


def parity_rows() -> list[dict[str, Any]]:
    """Largest differences over the configurations of ``logitless parity --against trl --against liger``."""
    from logitless.bench.parity_liger import against_liger
    from logitless.bench.parity_trl import against_trl
    from logitless.integrations.liger import LigerFusedLinearGRPOLoss

    found = []
    for package, rows in (("trl", list(against_trl())), ("liger", list(against_liger(LigerFusedLinearGRPOLoss)))):
        found.append(
            {
                "against": package,
                "configurations": len(rows),
                "beyond_tolerance": sum(not each.ok for each in rows),
                "tolerance": rows[0].tolerance,
                "loss_rel": max(each.loss_rel for each in rows),
                "grad_rel": max(each.grad_rel for each in rows),
            }
        )
    return found


def largest(one: Iterable[float], other: Iterable[float], *, relative: bool = False) -> float:
    """The largest difference of two sequences, of each to the first one's size where it is relative."""
    return max(abs(a - b) / (abs(a) if relative else 1.0) for a, b in zip(one, other, strict=True))


def tables(results: Path) -> dict[str, str]:
    """Whole runs, then single steps."""
    result = json.loads((results / RESULT).read_text())
    lines = [
        "| Configuration | micro-batches | largest loss | largest loss difference | gradient norm, relative |",
        "|---|--:|--:|--:|--:|",
    ]
    for each in result["runs"]:
        theirs, ours = each["trl"], each["logitless"]
        size = max(map(abs, theirs["losses"]))
        losses = largest(theirs["losses"], ours["losses"])
        norms = largest(theirs["grad_norms"], ours["grad_norms"], relative=True)
        lines.append(f"| {each['case']} | {len(ours['losses'])} | {size:.3f} | {losses:.1e} | {norms:.1e} |")
    packages = {"trl": "TRL's `_compute_loss`, float64", "liger": "Liger's module, float32"}
    lines += ["", "| One step against | configurations | beyond tolerance | loss | gradient |", "|---|--:|--:|--:|--:|"]
    for each in result["parity"]:
        lines.append(
            f"| {packages[each['against']]} | {each['configurations']} | {each['beyond_tolerance']} of "
            f"{each['tolerance']:.0e} | {each['loss_rel']:.1e} | {each['grad_rel']:.1e} |"
        )
    machine, versions = result["machine"], result["versions"]
    named = ", ".join(f"{name} {number}" for name, number in versions.items())
    lines += [
        "",
        f"{machine['processor']}, torch {machine['torch']}, {named}; "
        "[trl-parity.json](../benchmarks/results/trl-parity.json), by `benchmarks/trl_parity.py`. Relative differences "
        "are to the sum of the absolute weighted token losses, and to the gradient's norm.",
    ]
    return {"": "\n".join(lines)}


def main() -> None:
    """Measure, or write the page."""
    options = parsed(command_line(__doc__), tables)
    with tempfile.TemporaryDirectory() as folder:
        runs = whole_runs(Path(folder))
    versions = {name: version(name) for name in ("trl", "liger_kernel", "peft")}
    record(runs, options.output / RESULT, versions=versions, parity=parity_rows())


if __name__ == "__main__":
    main()

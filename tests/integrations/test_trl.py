"""The trainer against TRL's own, over whole short runs on the same rollouts."""

import dataclasses

import pytest
import torch

trl = pytest.importorskip("trl")

from datasets import Dataset  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from logitless.errors import ConfigurationError  # noqa: E402
from logitless.integrations.trl import GRPOConfig, GRPOTrainer, algorithm_of  # noqa: E402
from logitless.models.char_tokenizer import character_tokenizer  # noqa: E402
from logitless.objective.divergence import KLPenalty  # noqa: E402
from logitless.objective.kl_control import ProportionalKL  # noqa: E402
from logitless.objective.ratio import SequenceTokenRatio  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # of transformers, accelerate and TRL

TINY = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 23,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {"llama": (LlamaForCausalLM, LlamaConfig(**TINY)), "qwen2": (Qwen2ForCausalLM, Qwen2Config(**TINY))}


@pytest.fixture(scope="module", params=MODELS)
def model_path(request, tmp_path_factory):
    return saved_model(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def llama_path(tmp_path_factory):
    return saved_model("llama", tmp_path_factory)


def saved_model(name, tmp_path_factory):
    kind, config = MODELS[name]
    torch.manual_seed(5)
    path = tmp_path_factory.mktemp(name)
    kind(config).save_pretrained(path)
    character_tokenizer("abcdefghijklmnopqrst").save_pretrained(path)
    return str(path)


def reward(completion_ids, **_):
    return [float(sum(ids) % 7) for ids in completion_ids]


def replayed(trainer_class):
    """The trainer with recorded completions in place of generation, and its step losses on record."""

    class Replayed(trainer_class):
        def _generate(self, prompts):
            generator = torch.Generator().manual_seed(100 + self._step)
            lengths = torch.randint(1, 9, (len(prompts),), generator=generator).tolist()
            ids = [torch.randint(3, 23, (n,), generator=generator).tolist() for n in lengths]
            tools = [[int(t % 3 != 1) for t in range(n)] for n in lengths] if self.with_tools else None
            sampler = None
            if self.use_vllm:
                sampler = [(-3 + 0.3 * torch.randn(n, generator=generator)).tolist() for n in lengths]
            texts = ["c"] * len(prompts)
            return [[3, 4 + i % 5] for i in range(len(prompts))], ids, tools, texts, sampler, {}, None, None

        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            self.losses.append(loss.item())
            return loss

    return Replayed


def run(trainer_class, path, folder, *, config=trl.GRPOConfig, with_tools=False, **options):
    """Losses of every micro-batch, and the gradient norm, entropy and clip fraction of every step."""
    options = {"num_iterations": 2, "max_steps": 6, "learning_rate": 1e-3, **options}
    use_vllm = options.pop("use_vllm", False)
    args = config(
        str(folder),
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=4,
        num_generations=4,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        max_completion_length=9,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    dataset = Dataset.from_list([{"prompt": "ab"}, {"prompt": "cde"}, {"prompt": "f"}, {"prompt": "gh"}] * 4)
    trainer = replayed(trainer_class)(path, reward_funcs=reward, args=args, train_dataset=dataset)
    trainer.losses, trainer.with_tools = [], with_tools
    if use_vllm:  # what the engine would set; the sampler's numbers are recorded
        trainer.use_vllm = True
        if hasattr(trainer, "algorithm"):
            trainer.algorithm = algorithm_of(_with(args, use_vllm=True))
    trainer.train()
    return trainer, [entry for entry in trainer.state.log_history if "grad_norm" in entry]


def _with(args, **fields):
    for name, value in fields.items():
        setattr(args, name, value)
    return args


CASES = {
    "defaults": {},
    "grpo, sequence ratio, kl": {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "vespo with the sampler": {
        "loss_type": "vespo",
        "use_vllm": True,
        "vllm_importance_sampling_mode": "token_truncate",
    },
    "sampler correction": {"loss_type": "dr_grpo", "use_vllm": True, "vllm_importance_sampling_clip_max": 9.0},
    "entropy": {"top_entropy_quantile": 0.5, "use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 9.0},
    "tools": {"loss_type": "bnpo", "with_tools": True, "off_policy_mask_threshold": 0.1, "delta": 1.5},
    "temperature": {"temperature": 0.6, "beta": 0.1, "use_bias_correction_kl": False, "loss_type": "sapo"},
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_follows_trls(case, llama_path, tmp_path):
    theirs, their_log = run(trl.GRPOTrainer, llama_path, tmp_path / "theirs", **CASES[case])
    ours, our_log = run(GRPOTrainer, llama_path, tmp_path / "ours", **CASES[case])
    assert len(ours.losses) == 12
    assert ours.losses == pytest.approx(theirs.losses, rel=0, abs=1e-6)
    norms = [entry["grad_norm"] for entry in their_log]
    assert min(norms) > 1e-3
    assert [entry["grad_norm"] for entry in our_log] == pytest.approx(norms, rel=1e-5)

"""The trainer against TRL's own, over whole short runs on the same rollouts."""

import json
from types import SimpleNamespace

import pytest
import torch

trl = pytest.importorskip("trl")

from datasets import Dataset  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from peft import LoraConfig  # noqa: E402
from torch.torch_version import TorchVersion  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: E402

from logitless.errors import ConfigurationError  # noqa: E402
from logitless.head.api import token_scores  # noqa: E402
from logitless.integrations.trl import GRPOConfig, GRPOTrainer, algorithm_of, attention_may_be_nan  # noqa: E402
from logitless.models.char_tokenizer import character_tokenizer  # noqa: E402
from logitless.objective.divergence import KLPenalty  # noqa: E402
from logitless.objective.kl_control import ProportionalKL  # noqa: E402
from logitless.objective.ratio import SequenceTokenRatio  # noqa: E402
from tests.rounding import of_sum  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # of transformers, accelerate and TRL

TINY = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 23, "max_position_embeddings": 64, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def saved(path, model_class, config):
    """A tiny model with a tokenizer of its characters."""
    torch.manual_seed(5)
    model_class(config).save_pretrained(path)
    character_tokenizer("abcdefghijklmnopqrst").save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def llama_path(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("llama"), LlamaForCausalLM, LlamaConfig(**TINY))


@pytest.fixture(scope="module")
def experts_path(tmp_path_factory):
    """A mixture of four experts; its own router coefficient is 0.001."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
    return saved(tmp_path_factory.mktemp("experts"), Qwen3MoeForCausalLM, Qwen3MoeConfig(**TINY, **sizes))


def reward(completion_ids, **_):
    return [float(sum(ids) % 7) for ids in completion_ids]


def replayed(trainer_class):
    """The trainer with recorded completions in place of generation, and its step losses on record."""

    class Replayed(trainer_class):
        with_tools = False

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.losses = []

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


def trainer_of(trainer_class, path, folder, *, config=trl.GRPOConfig, lora=None, **options):
    """A trainer on four prompts: two micro-batches a step, two steps a generation batch, each taken twice."""
    args = config(
        str(folder),
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=4,
        num_generations=4,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        num_iterations=2,
        max_completion_length=9,
        logging_steps=1,
        disable_tqdm=True,
        **{"learning_rate": 1e-3, "max_steps": 6, "save_strategy": "no", **options},
    )
    dataset = Dataset.from_list([{"prompt": "ab"}, {"prompt": "cde"}, {"prompt": "f"}, {"prompt": "gh"}] * 4)
    return trainer_class(path, reward_funcs=reward, args=args, train_dataset=dataset, peft_config=lora)


def run(trainer_class, path, folder, *, with_tools=False, use_vllm=False, resume=None, **options):
    """The trainer after a run on recorded completions, and what it logged of each step."""
    trainer = trainer_of(replayed(trainer_class), path, folder, **options)
    trainer.with_tools = with_tools
    if use_vllm:  # as if an engine had sampled; there is none here
        trainer.use_vllm = trainer.args.use_vllm = True
        if isinstance(trainer, GRPOTrainer):
            trainer.algorithm = algorithm_of(trainer.args)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, [entry for entry in trainer.state.log_history if "grad_norm" in entry]


LOSS = of_sum(torch.float32, 36, 8.0)
"""Of a mean over 4 completions of up to 9 tokens, advantages of up to 1.5 times log-probabilities of up to 5 nats."""

NOT_COMPARED = {"step_time", "vespo/phi_seq_mean"}
CASES = {
    "defaults": {},
    "grpo, sequence ratio, kl": {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1},
    "vespo with the sampler": {
        "loss_type": "vespo",
        "use_vllm": True,
        "vllm_importance_sampling_mode": "token_truncate",
    },
    "sampler correction": {"loss_type": "dr_grpo", "use_vllm": True, "vllm_importance_sampling_clip_max": 9.0},
    "entropy": {"top_entropy_quantile": 0.5, "use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 9.0},
    "tools": {"loss_type": "bnpo", "with_tools": True, "off_policy_mask_threshold": 0.1, "delta": 1.5},
    "lora": {"loss_type": "grpo", "beta": 0.1, "lora": LoraConfig(r=2, target_modules=["q_proj", "v_proj"])},
    "float32 head on a bfloat16 model": {
        "cast_lm_head_to_fp32": True,
        "model_init_kwargs": {"dtype": "bfloat16"},
        "max_steps": 3,
    },
    "temperature": {"temperature": 0.6, "beta": 0.1, "use_bias_correction_kl": False, "loss_type": "sapo"},
}


FEW = ("vespo with the sampler", "entropy", "tools")


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in FEW else pytest.mark.slow) for case in CASES])
def test_a_run_follows_trls(case, llama_path, tmp_path):
    theirs, their_log = run(trl.GRPOTrainer, llama_path, tmp_path / "theirs", **CASES[case])
    ours, our_log = run(GRPOTrainer, llama_path, tmp_path / "ours", **CASES[case])
    follow(ours, our_log, theirs, their_log)


def follow(ours, our_log, theirs, their_log):
    """Losses of every micro-batch, gradient norms and metrics of every step."""
    assert len(ours.losses) == 2 * len(our_log) >= 6
    assert ours.losses == pytest.approx(theirs.losses, rel=0, abs=LOSS)
    assert min(entry["grad_norm"] for entry in their_log) > 1e-3
    for mine, other in zip(our_log, their_log, strict=True):
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
        assert {name: mine.get(name) for name in other if name not in NOT_COMPARED} == pytest.approx(
            {name: value for name, value in other.items() if name not in NOT_COMPARED}, rel=1e-4, abs=1e-6
        )


@pytest.mark.parametrize(
    "options",
    [
        {"router_aux_loss_coef": 0.5, "loss_type": "grpo", "beta": 0.1},
        *(pytest.param(options, marks=pytest.mark.slow) for options in ({}, {"router_aux_loss_coef": 0.0})),
    ],
)
def test_a_mixture_of_experts_follows_trl_with_its_router_loss(options, experts_path, tmp_path):
    theirs, their_log = run(trl.GRPOTrainer, experts_path, tmp_path / "theirs", max_steps=4, **options)
    ours, our_log = run(GRPOTrainer, experts_path, tmp_path / "ours", max_steps=4, **options)
    follow(ours, our_log, theirs, their_log)
    assert all(("aux_loss" in entry) == (options.get("router_aux_loss_coef") != 0.0) for entry in our_log)


def test_evaluation_follows_trls(llama_path, tmp_path):
    losses = []
    for trainer_class in (trl.GRPOTrainer, GRPOTrainer):
        trainer = trainer_of(replayed(trainer_class), llama_path, tmp_path, beta=0.1, per_device_eval_batch_size=8)
        losses.append(trainer.evaluate(trainer.train_dataset)["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=0, abs=LOSS)


def test_the_logits_of_completions_are_never_made(llama_path, tmp_path, monkeypatch):
    trainer = trainer_of(replayed(GRPOTrainer), llama_path, tmp_path, max_steps=2)
    monkeypatch.setattr(torch.nn.Linear, "forward", refusing(torch.nn.Linear.forward, trainer.model.lm_head))
    trainer.train()
    assert len(trainer.losses) == 4


def refusing(forward, layer):
    def guarded(self, value):
        assert self is not layer, "the LM head ran"
        return forward(self, value)

    return guarded


def test_generation_still_goes_through_the_model(llama_path, tmp_path):
    trainer = trainer_of(GRPOTrainer, llama_path, tmp_path, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["completions/mean_length"] > 0


def test_skipped_rows_are_those_without_advantage_and_change_nothing(llama_path, tmp_path, monkeypatch):
    options = {"config": GRPOConfig, "max_steps": 2, "loss_type": "grpo"}
    plain, _ = run(GRPOTrainer, llama_path, tmp_path / "plain", **options)
    announced = []

    def recorded(*args, nonzero, **more):
        announced.append(nonzero)
        return token_scores(*args, nonzero=nonzero, **more)

    monkeypatch.setattr("logitless.integrations.trl.token_scores", recorded)
    monkeypatch.setattr(f"{__name__}.reward", lambda completion_ids, **_: [0.0] * len(completion_ids))
    skipped, _ = run(GRPOTrainer, llama_path, tmp_path / "none", skip_rows=True, **options)
    assert len(skipped.losses) == 4
    live = [each for each in announced if each is not None]
    assert len(live) == 4  # the training calls; scoring announces nothing
    assert not torch.cat(live).any()
    monkeypatch.undo()
    again, _ = run(GRPOTrainer, llama_path, tmp_path / "skipped", skip_rows=True, **options)
    assert again.losses == plain.losses


def test_beta_follows_the_kl_and_is_kept_in_checkpoints(llama_path, tmp_path):
    options = {"config": GRPOConfig, "beta": 0.1, "kl_control": "proportional", "kl_target": 5.0, "kl_estimator": "k2"}
    _, log = run(GRPOTrainer, llama_path, tmp_path, max_steps=2, save_strategy="steps", save_steps=2, **options)
    # The KL stays below a fifth of its target: beta falls by exp(-0.1 * 0.2) a step.
    betas = [0.1 * 0.980198673, 0.1 * 0.980198673**2]
    assert [entry["beta"] for entry in log] == pytest.approx(betas)
    saved = json.loads((tmp_path / "checkpoint-2" / "kl_control_state.json").read_text())
    assert saved["beta"] == pytest.approx(betas[1])
    _, log = run(
        GRPOTrainer, llama_path, tmp_path / "on", max_steps=3, resume=str(tmp_path / "checkpoint-2"), **options
    )
    assert log[-1]["beta"] == pytest.approx(betas[1] * 0.980198673)


def config(**fields):
    return GRPOConfig("out", use_cpu=True, bf16=False, report_to="none", **fields)


def test_additions_are_read_by_name():
    found = algorithm_of(config(importance_sampling_level="sequence_token", beta=0.1, kl_estimator="k1"))
    assert found.objective.ratio == SequenceTokenRatio()
    assert found.objective.kl == KLPenalty("k1", ratio_corrected="surrogate", clamp=None)
    found = algorithm_of(config(beta=0.1, kl_control="proportional", kl_target=0.03))
    assert found.kl_control == ProportionalKL(beta=0.1, target=0.03)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kl_estimator": "k2"}, "a KL term"),
        ({"kl_control": "proportional"}, "a KL term"),
        ({"beta": 0.1, "kl_control": "steady"}, "a kl_control"),
        ({"beta": 0.1, "kl_estimator": "k1", "use_bias_correction_kl": False}, "gradient is 0"),
        ({"beta": 0.1, "skip_rows": True}, "skip_rows=False"),
        ({"entropy_coef": 0.1, "skip_rows": True}, "skip_rows=False"),
        ({"loss_type": "sapo", "importance_sampling_level": "sequences"}, "an importance_sampling_level"),
        ({"importance_sampling_level": "turn"}, "Choose from token, sequence, sequence_token"),
        ({"loss_type": "gspo"}, "loss_type='grpo' and importance_sampling_level='sequence'"),
    ],
)
def test_what_nothing_would_read_is_an_error(fields, message):
    with pytest.raises(ConfigurationError, match=message):
        algorithm_of(config(**fields))


@pytest.mark.parametrize(
    ("implementation", "capability", "version", "enabled", "expected"),
    [
        ("sdpa", (9, 0), "2.11.0+cu130", True, True),
        ("flash_attention_2", (9, 0), "2.11.0+cu130", True, False),
        ("sdpa", (8, 0), "2.11.0+cu130", True, False),
        ("sdpa", (9, 0), "2.9.1", True, False),
        ("sdpa", (9, 0), "2.11.0+cu130", False, False),
    ],
)
def test_attention_whose_gradients_may_be_nan_is_known_by_gpu_torch_and_kernels(
    implementation, capability, version, enabled, expected, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: enabled)
    config = SimpleNamespace(_attn_implementation=implementation)
    assert attention_may_be_nan(SimpleNamespace(device=torch.device("cuda"), config=config)) is expected
    assert not attention_may_be_nan(SimpleNamespace(device=torch.device("cpu"), config=config))


def test_an_unknown_backend_is_an_error_before_the_first_step(llama_path, tmp_path):
    with pytest.raises(ConfigurationError, match="head_backend"):
        trainer_of(GRPOTrainer, llama_path, tmp_path, config=GRPOConfig, head_backend="triton")


def test_a_script_that_sets_up_no_logging_sees_which_settings_have_no_effect(llama_path, tmp_path, caplog):
    trainer_of(GRPOTrainer, llama_path, tmp_path, loss_type="sapo", delta=2.0)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "delta=2.0 has no effect with loss_type='sapo'" in said


def test_presets_that_nobody_changed_say_nothing_and_a_warning_points_to_the_line_that_makes_the_trainer(
    llama_path, tmp_path, caplog
):
    for loss in ("sapo", "vespo"):
        trainer_of(GRPOTrainer, llama_path, tmp_path, loss_type=loss)
        assert [record for record in caplog.records if record.name == "logitless"] == []
    with pytest.warns(UserWarning, match="takes epsilon_high for the ceiling itself") as warned:
        trainer_of(GRPOTrainer, llama_path, tmp_path, loss_type="cispo")
    assert [warning.filename for warning in warned if "ceiling" in str(warning.message)] == [__file__]


def test_trl_refuses_lora_on_the_lm_head_when_the_trainer_is_made(llama_path, tmp_path):
    with pytest.raises(ValueError, match="Remove `'lm_head'` from your `target_modules`"):
        trainer_of(GRPOTrainer, llama_path, tmp_path, lora=LoraConfig(r=2, target_modules=["lm_head"]))


METRIC_CASES = {
    "token ratio": {"loss_type": "dapo", "beta": 0.1},
    "sequence ratio": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "delta below the clip": {"loss_type": "bnpo", "delta": 1.05, "top_entropy_quantile": 0.5},
    "delta above the clip": {"loss_type": "dr_grpo", "delta": 1.5, "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "cispo at TRL's own ceiling": {"loss_type": "cispo"},
    "cispo of sequences": {"loss_type": "cispo", "epsilon_high": 1.2, "importance_sampling_level": "sequence"},
    "luspo with an entropy bonus": {"loss_type": "luspo", "entropy_coef": 0.1, "use_bias_correction_kl": True},
}


@pytest.fixture(scope="module")
def both_trainers(llama_path, tmp_path_factory):
    """TRL's trainer and the drop-in under one configuration, made once."""
    made = {}

    def of(case):
        if case not in made:
            folder = tmp_path_factory.mktemp("metrics")
            made[case] = [
                trainer_of(each, llama_path, folder, **METRIC_CASES[case]) for each in (trl.GRPOTrainer, GRPOTrainer)
            ]
        return made[case]

    return of


def random_micro_batch(seed, *, empty, per_token):
    """Four completions of up to five tokens, each token trained or not; those of ``empty`` have none."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.randint(0, 2, (4, 5), generator=generator)
    mask[empty] = 0
    old = -3.1 + 0.6 * torch.randn(4, 5, generator=generator)
    advantages = torch.randn(4, 5, generator=generator)
    return {
        "prompt_ids": torch.randint(3, 23, (4, 2), generator=generator),
        "prompt_mask": torch.ones(4, 2, dtype=torch.long),
        "completion_ids": torch.randint(3, 23, (4, 5), generator=generator),
        "completion_mask": torch.ones(4, 5, dtype=torch.long),
        "tool_mask": mask,
        "advantages": advantages if per_token else advantages[:, 0],
        "old_per_token_logps": old,
        "ref_per_token_logps": old + 0.2 * torch.randn(4, 5, generator=generator),
        "num_items_in_batch": 3 * mask.sum(),
    }


@pytest.mark.parametrize("case", METRIC_CASES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**16),
    empty=st.lists(st.sampled_from(range(4)), unique=True) | st.just([0, 1, 2, 3]),
    per_token=st.booleans(),
)
def test_loss_and_every_metric_of_a_micro_batch_are_trls_whatever_is_masked(
    case, seed, empty, per_token, both_trainers
):
    inputs = random_micro_batch(seed, empty=empty, per_token=per_token)
    logged, losses = [], []
    for trainer in both_trainers(case):
        trainer.current_gradient_accumulation_steps = 2
        trainer.model.train()
        trainer._metrics["train"].clear()
        losses.append(trainer._compute_loss(trainer.model, inputs).item())
        logged.append({name: values[0] for name, values in trainer._metrics["train"].items()})
    theirs, ours = logged
    assert ours.keys() == theirs.keys() >= {"entropy"}
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6, nan_ok=True)
    assert losses[1] == pytest.approx(losses[0], rel=0, abs=LOSS)


def test_a_micro_batch_without_a_trained_token_leaves_the_windows_metrics_as_they_are(both_trainers):
    trainer = both_trainers("token ratio")[1]
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 2
    trainer._metrics["train"].clear()
    for empty in ([0, 1, 2, 3], [0]):
        trainer._compute_loss(trainer.model, random_micro_batch(7, empty=empty, per_token=False))
    alone, both = trainer._metrics["train"]["clip_ratio/low_min"][1], {}
    trainer.log(both)
    assert both["clip_ratio/low_min"] == alone

"""Reading someone's training code: each rule finds its mistake and leaves the right form alone; nothing is run."""

import json
import textwrap
from pathlib import Path

import pytest

from logitless.doctor.source_audit import audit_source
from logitless.errors import DataError

WRONG_AND_RIGHT = {
    "centred over the batch": (
        "a = (rewards - rewards.mean()) / (rewards.std() + 1e-4)",
        "g = rewards.view(-1, 8)\na = (rewards - g.mean(dim=1).repeat_interleave(8))",
    ),
    "groups shuffled": (
        "def f(rewards):\n    order = torch.randperm(64)\n    rewards = rewards[order]\n"
        "    return rewards.view(-1, num_generations).mean(1)",
        "def f(rewards):\n    mean = rewards.view(-1, num_generations).mean(1)\n    order = torch.randperm(64)\n"
        "    return order, mean",
    ),
    "KL estimator under another name": (
        'def kl(logp, ref, kind):\n    d = logp - ref\n    if kind == "k2":\n        return torch.exp(-d) - 1 + d',
        'def kl(logp, ref, kind):\n    d = logp - ref\n    if kind == "k3":\n        return torch.exp(-d) - 1 + d',
    ),
    "k3 the wrong way round": (
        "def kl(logp, ref_logp):\n    d = logp - ref_logp\n    d = torch.clamp(d, max=10)\n    return d.exp() - d - 1",
        "def kl(logp, ref_logp):\n    d = ref_logp - logp\n    d = torch.clamp(d, max=10)\n    return d.exp() - d - 1",
    ),
    "reference left trainable": (
        "ref_model = copy.deepcopy(model).to('cuda')\nlogp = score(ref_model, ids)",
        "ref_model = copy.deepcopy(model).to('cuda').eval()\nwith torch.no_grad():\n    logp = score(ref_model, ids)",
    ),
    "prompt tokens in the loss": (
        "def f(input_ids):\n    labels = input_ids.clone()\n    return model(input_ids, labels=labels).loss",
        "def f(input_ids, n):\n    labels = input_ids.clone()\n    labels[:, :n] = -100\n"
        "    return model(input_ids, labels=labels).loss",
    ),
    "use_reentrant unset": (
        "model.gradient_checkpointing_enable()",
        "model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})",
    ),
    "float16 alone": (
        "with torch.autocast('cuda', dtype=torch.float16):\n    pass",
        "with torch.autocast('cuda', dtype=torch.bfloat16):\n    pass",
    ),
    "xFormers required": (
        "import xformers.ops",
        "try:\n    import xformers.ops\nexcept ImportError:\n    xformers = None",
    ),
    "low-precision master weights": (
        "model = AutoModel.from_pretrained(n, torch_dtype=torch.bfloat16)\n"
        "o = torch.optim.AdamW(model.parameters(), lr=1e-6)",
        "model = AutoModel.from_pretrained(n)\no = torch.optim.AdamW(model.parameters(), lr=1e-6)",
    ),
    "what a GRPOConfig trains": (
        "import trl\nloss = 'cispo'\nargs = trl.GRPOConfig('out', loss_type=loss, epsilon=0.1)",
        "import trl\nargs = trl.GRPOConfig('out', loss_type='grpo', epsilon=0.1, learning_rate=rate())",
    ),
    "peer-to-peer switched off everywhere": (
        "os.environ['NCCL_P2P_DISABLE'] = '1'",
        "if 'RTX 40' in name:\n    os.environ['NCCL_P2P_DISABLE'] = '1'",
    ),
    "temperature forgotten in the loss": (
        "p = SamplingParams(n=8, temperature=0.9)\nlogp = logits.log_softmax(-1)",
        "p = SamplingParams(n=8, temperature=0.9)\nlogp = (logits / temperature).log_softmax(-1)",
    ),
    "TF32 at its default": ("loss.backward()", "torch.set_float32_matmul_precision('high')\nloss.backward()"),
    "allocator at its default": (
        "loss.backward()",
        "os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'\nloss.backward()",
    ),
    "NCCL on consumer cards": (
        "torch.distributed.init_process_group('nccl')\nloss.backward()",
        "torch.distributed.init_process_group('gloo')\nloss.backward()",
    ),
}


def rules_found(folder: Path, code: str) -> set[str]:
    (folder / "train.py").write_text(code)
    return {finding.rule for finding in audit_source(folder)[0]}


@pytest.mark.parametrize("rule", WRONG_AND_RIGHT)
def test_a_rule_finds_its_mistake_and_leaves_the_right_form_alone(rule: str, tmp_path: Path) -> None:
    wrong, right = WRONG_AND_RIGHT[rule]
    assert rule in rules_found(tmp_path, wrong)
    assert rule not in rules_found(tmp_path, right)


LOADED = "model = AutoModel.from_pretrained(n, torch_dtype=torch.bfloat16)"
IN_FLOAT16 = "with torch.autocast('cuda', dtype=torch.float16):\n    loss = f(x)"
STEP = "o = torch.optim.AdamW(model.parameters(), lr=1e-6)"


@pytest.mark.parametrize(
    "code",
    [
        f"{LOADED}.cuda()\n{STEP}",
        f"{LOADED}.to(device).train()\n{STEP}",
        f"{LOADED}\nmodel = model.to('cuda')\n{STEP}",
        f"{LOADED}\nmodel.cuda()\n{STEP}",
        f"model = AutoModel.from_pretrained(n).to(device, torch.bfloat16)\n{STEP}",
        f"model = AutoModel.from_pretrained(n).half()\n{STEP}",
        f"model = AutoModel.from_pretrained(n)\nmodel.bfloat16()\n{STEP}",
        f"{LOADED.replace('model', 'base', 1)}\nmodel = base.cuda()\n{STEP}",
        f"self.{LOADED}.cuda()\no = SGD(self.model.parameters(), lr=1.0)",
        f"{LOADED}.cuda()\no = AdamW(params=model.parameters(), lr=1e-6)",
        f"{LOADED}.cuda()\no = AdamW([{{'params': list(model.parameters()), 'lr': 1e-6}}])",
        f"{LOADED}.cuda()\np = [p for p in model.parameters() if p.requires_grad]\no = AdamW(p, lr=1e-6)",
        f"{LOADED}.cuda()\no = AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-6)",
        f"dtype = torch.bfloat16\nmodel = AutoModel.from_pretrained(n, torch_dtype=dtype).to('cuda')\n{STEP}",
        f"model: nn.Module = AutoModel.from_pretrained(n, dtype=torch.bfloat16)\n{STEP}",
        f"def make():\n    {LOADED}\n    return model.cuda()\n\nmodel = make()\n{STEP}",
        f"def make():\n    return AutoModel.from_pretrained(n).half()\n\nmodel = make()\n{STEP}",
    ],
)
def test_a_model_in_16_bits_is_followed_to_its_optimizer(code: str, tmp_path: Path) -> None:
    assert rules_found(tmp_path, code) == {"low-precision master weights"}


def test_a_scaler_that_is_switched_off_holds_nothing(tmp_path: Path) -> None:
    code = (
        "scaler = GradScaler(enabled=False)\nwith torch.autocast('cuda', dtype=torch.float16):\n    scaler.scale(f(x))"
    )
    assert rules_found(tmp_path, code) == {"float16 alone"}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("loss_type='cispo'", "takes epsilon_high for the ceiling itself: 0.2"),
        ("loss_type='dapp'", "Did you mean 'dapo'?"),
        ("loss_type='sapo', epsilon=0.3", "epsilon=0.3 has no effect with loss_type='sapo'"),
        ("importance_sampling_level='sequence'", "GSPO is 'grpo' at this level"),
        ("delta=0.5", "a delta above 0.8"),
        ("top_entropy_quantile=None", "a setting of another type than TRL's"),
        ("loss_type='sapo', epsilon=0.3, max_completion_length=4 * 1024", "epsilon=0.3 has no effect"),
    ],
)
def test_a_literal_grpo_config_is_read_as_the_loss_that_trl_makes_of_it(call: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(f"from trl import GRPOConfig\nargs = GRPOConfig('out', {call}, bf16=True)")
    (finding,), _ = audit_source(tmp_path)
    assert (finding.rule, finding.place) == ("what a GRPOConfig trains", "a.py:2")
    assert said in finding.said


def test_every_mistake_in_a_grpo_config_is_said(tmp_path: Path) -> None:
    fields = "loss_type='cispo', delta=0.5, top_entropy_quantile=1.5"
    (tmp_path / "a.py").write_text(
        f"from trl import GRPOConfig\na = GRPOConfig({fields})\n"
        "b = GRPOConfig(delta=0.5, top_entropy_quantile=1.5)\n"
        "c = GRPOConfig(loss_type='vespo', use_vllm=True)"
    )
    found = [(finding.place, finding.said) for finding in audit_source(tmp_path)[0]]
    for line, *parts in (
        (2, "at most 1, as top_entropy_quantile", "delta=0.5 has no effect", "epsilon_high for the ceiling"),
        (3, "a delta above 0.8", "at most 1, as top_entropy_quantile"),
        (4, "a token-level sampler correction"),
    ):
        said = [each for place, each in found if place == f"a.py:{line}"]
        assert len(said) == len(parts)
        assert all(part in each for part, each in zip(parts, said, strict=True))


@pytest.mark.parametrize(
    "code",
    [
        "some = {'loss_type': 'sapo', 'epsilon': 0.3}\nargs = GRPOConfig('out', **some)",
        "args = GRPOConfig('out', **{'loss_type': 'sapo'}, **dict(epsilon=0.3))",
        "LOSS = 'sapo'\ndef f():\n    some = dict(loss_type=LOSS)\n    return GRPOConfig('out', epsilon=0.3, **some)",
        "LOSS = 'sapo'\ndef f():\n    return GRPOConfig('out', epsilon=0.3, loss_type=LOSS)",
        "from trl import GRPOConfig as C\nargs = C('out', epsilon=0.3, loss_type='sapo')",
    ],
)
def test_a_grpo_config_may_be_written_as_dicts_and_as_constants_of_the_file(code: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(f"from trl import GRPOConfig\n{code}")
    (finding,), _ = audit_source(tmp_path)
    assert "epsilon=0.3 has no effect with loss_type='sapo'" in finding.said


@pytest.mark.parametrize(
    "code",
    [
        "some = {'loss_type': 'sapo'}\nsome['loss_type'] = args.loss\nargs = GRPOConfig('out', epsilon=0.3, **some)",
        "some = {'loss_type': 'sapo'}\nsome.update(read())\nargs = GRPOConfig('out', epsilon=0.3, **some)",
        "LOSS = 'sapo'\nLOSS = args.loss\ndef f():\n    return GRPOConfig('out', epsilon=0.3, loss_type=LOSS)",
        "LOSS = 'sapo'\nif short:\n    LOSS = 'grpo'\nargs = GRPOConfig('out', epsilon=0.3, loss_type=LOSS)",
        "LOSS = 'sapo'\ndef f(LOSS):\n    return GRPOConfig('out', epsilon=0.3, loss_type=LOSS)",
        "loss = 'sapo'\nfor loss in some:\n    args = GRPOConfig('out', epsilon=0.3, loss_type=loss)",
        "some = {'loss_type': 'sapo'}\nsome |= read()\nargs = GRPOConfig('out', epsilon=0.3, **some)",
        "some = {'loss_type': 'sapo'}\nsome.pop('loss_type')\nargs = GRPOConfig('out', epsilon=0.3, **some)",
        "some = {'loss_type': 'sapo'}\ndel some['loss_type']\nargs = GRPOConfig('out', epsilon=0.3, **some)",
        "from defaults import some\nsome = dict(**some, loss_type='sapo')\nargs = GRPOConfig(epsilon=0.3, **some)",
        "a = dict(**b)\nb = dict(**a, loss_type='sapo')\nargs = GRPOConfig('out', epsilon=0.3, **b)",
        "def f():\n    return GRPOConfig('out', epsilon=0.3, **a)\na = dict(**a, loss_type='sapo')",
    ],
)
def test_a_grpo_config_of_what_is_changed_later_is_left_alone(code: str, tmp_path: Path) -> None:
    assert rules_found(tmp_path, f"from trl import GRPOConfig\n{code}") == set()


@pytest.mark.parametrize(
    "code", [IN_FLOAT16, f"TrainingArguments('out', fp16=False)\n{IN_FLOAT16}", f"torch.no_grad()\n{IN_FLOAT16}"]
)
def test_what_does_not_scale_gradients_changes_nothing(code: str, tmp_path: Path) -> None:
    assert rules_found(tmp_path, code) == {"float16 alone"}


@pytest.mark.parametrize("more", ["loss_type=args.loss", "**options", "beta=0.04, learning_rate=1e-6"])
def test_a_grpo_config_that_is_not_written_out_or_says_nothing_odd_is_left_alone(more: str, tmp_path: Path) -> None:
    assert rules_found(tmp_path, f"from trl import GRPOConfig\nargs = GRPOConfig('out', epsilon=0.3, {more})") == set()


@pytest.mark.parametrize(
    "code",
    [
        f"{LOADED}.float()\n{STEP}",
        f"{LOADED}\nmodel.to(torch.float32)\n{STEP}",
        f"{LOADED}\nmodel = AutoModel.from_pretrained(n).cuda()\n{STEP}",
        f"{LOADED.replace('model', 'other', 1)}.cuda()\n{STEP}",
        "scaler = torch.amp.GradScaler()\nwith torch.autocast('cuda', dtype=torch.float16):\n    pass",
        "scaler = torch.cuda.amp.GradScaler(enabled=fp16)\nwith torch.cuda.amp.autocast():\n    pass",
        "with torch.autocast('cuda', dtype=torch.float16):\n    loss = f(x)\nself.scaler.scale(loss)",  # made elsewhere
        "with self.accelerator.autocast():\n    pass",
        f"args = TrainingArguments('out', fp16=True)\n{IN_FLOAT16}",  # transformers' trainers scale gradients then
        f"accelerator = Accelerator(mixed_precision='fp16')\n{IN_FLOAT16}",
        "with self.acc.autocast():\n    loss = f(x)",
        f"@torch.no_grad()\ndef score(x):\n{textwrap.indent(IN_FLOAT16, '    ')}",
        f"with torch.inference_mode():\n{textwrap.indent(IN_FLOAT16, '    ')}",
        f"def make():\n    return AutoModel.from_pretrained(n, dtype=torch.bfloat16).float()\n\nmodel = make()\n{STEP}",
        f"def make():\n    return make()\n\nmodel: nn.Module\nmodel = make()\n{STEP}",
        f"dtype = torch.bfloat16\ndef load(dtype):\n    model = AutoModel.from_pretrained(n, dtype=dtype)\n    {STEP}",
        f"dtype = torch.float32\nif cuda:\n    dtype = torch.half\nmodel = M.from_pretrained(n, dtype=dtype)\n{STEP}",
        f"class A:\n    def make(self):\n        return AutoModel.from_pretrained(n).half()\n\nmodel = make()\n{STEP}",
        "per_token_kl = torch.exp(ref - logp) - (ref - logp) - 1",
        "def group_advantages(returns):\n    return (returns - returns.mean()) / returns.std()",
        "for i in range(n):\n    r = rewards[i * 8 : (i + 1) * 8]\n    a = (r - r.mean()) / r.std()",
        "for sample, group in zip(samples, groups):\n    rewards = f(group)\n    a = rewards - rewards.mean()",
        "cov = (adv - adv.mean()) * (logp - logp.mean())",
        "def f(logp, ref_logp, kind):\n    if kind in ('mse', 'k2'):\n        return 0.5 * (logp - ref_logp).square()",
        "ratio = torch.exp(kl)\nkld = (ratio - kl - 1).contiguous()",
        "model.checkpoint(path)",
        "logits, labels = outputs.logits, inputs['input_ids']",
    ],
)
def test_right_forms_are_left_alone(code: str, tmp_path: Path) -> None:
    assert rules_found(tmp_path, code) == set()


def test_a_square_without_its_half_is_not_k2(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def k2(logp, ref):\n    return (logp - ref) ** 2")
    (finding,), _ = audit_source(tmp_path)
    assert finding.place == "a.py:2"
    assert "without its half" in finding.said


def test_nothing_of_the_code_is_run(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').write('x')\nraise SystemExit(3)")
    (tmp_path / "setup.py").write_text("import conftest")
    audit_source(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_notebook_is_read_by_its_code_cells(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["import xformers"]},
        {"cell_type": "code", "source": ["!pip install xformers\n", "%cd x\n", "import xformers"]},
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    (finding,), _ = audit_source(tmp_path)
    assert (finding.rule, finding.place) == ("xFormers required", "a.ipynb:3")


def test_a_file_that_is_not_python_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print 'old'")
    (tmp_path / "b.py").write_text("import xformers")
    findings, unread = audit_source(tmp_path)
    assert [finding.place for finding in findings] == ["b.py:1"]
    assert len(unread) == 1
    assert unread[0].startswith("a.py: ")


def test_links_and_installed_packages_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "b.py").write_text("import xformers")
    (tmp_path / "c.py").symlink_to(tmp_path / ".venv" / "b.py")
    assert audit_source(tmp_path) == ([], [])


def test_a_folder_without_python_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Python files"):
        audit_source(tmp_path)


def test_every_finding_has_its_reason_remedy_and_source(tmp_path: Path) -> None:
    for wrong, _ in WRONG_AND_RIGHT.values():
        (tmp_path / "train.py").write_text(wrong)
        for finding in audit_source(tmp_path)[0]:
            assert finding.reason.endswith((".", "?"))
            assert finding.remedy.endswith(".")
            assert len(finding.source) > 10

"""The rules of ``audit_source``: each reads one file, or all of them, and points at places."""

import ast
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from logitless.doctor.finding import Finding, Places, rule
from logitless.doctor.source_code import (
    Function,
    Module,
    Terms,
    argument_of,
    called,
    keyword,
    terms_of,
    without_conversions,
    words_of,
)
from logitless.errors import ConfigurationError
from logitless.objective.presets import trl
from logitless.objective.trl_configuration import DEFAULTS as TRL_DEFAULTS
from logitless.objective.trl_configuration import refusals

_REWARD_WORDS = {"reward", "rewards", "return", "returns", "advantage", "advantages", "score", "scores", "adv"}


@rule("centred over the batch")
def centred_over_batch(module: Module) -> Places:
    """``rewards - rewards.mean()`` over all dimensions, unless names or loops around show that it is one group.

    Reason: A mean over everything compares completions of different prompts, so that completions of easy prompts are
        rewarded. GRPO's baseline is the mean of one prompt's completions.
    Remedy: Give the mean the group's dimension, or say in a name that this is one group.
    Source: arXiv:2402.03300, sec. 4.1; over the batch on purpose: REINFORCE++, arXiv:2501.03262
    """
    if "mean" not in module.text:
        return
    for node in module.every(ast.BinOp):
        if not isinstance(node.op, ast.Sub):
            continue
        mean: ast.expr | None = node.right
        if isinstance(mean, ast.Name):
            mean = next(iter(module.assigned(mean.id, node)), None)
        averaged = None if mean is None else argument_of(mean, "mean")
        if averaged is None or not words_of(node.left) & words_of(averaged) & _REWARD_WORDS:
            continue
        around = module.parents.get(node)
        covariance = (
            isinstance(around, ast.BinOp) and isinstance(around.op, ast.Mult) and "mean" in words_of(around.right)
        )
        if not covariance and not _one_group(module, node, averaged):
            yield module.at(node)


def _one_group(module: Module, node: ast.AST, averaged: ast.expr) -> bool:
    """Whether names or loops around say that the values are those of one group, or they are a slice."""
    latest = module.assigned(averaged.id, node)[:1] if isinstance(averaged, ast.Name) else []
    if any(isinstance(value, ast.Subscript) or _mentions_group(value) for value in (averaged, *latest)):
        return True
    return any(
        (isinstance(above, Function) and "group" in above.name.lower())
        or (isinstance(above, ast.For) and (_mentions_group(above.iter) or _mentions_group(above.target)))
        for above in module.above(node)
    )


def _mentions_group(node: ast.AST) -> bool:
    return any(word.startswith("group") for word in words_of(node))


_GROUP_COUNTS = re.compile(
    r"num_generations|group_size|n_samples|num_samples|num_rollouts|rollout_n|samples_per|num_pre"
)


@rule("groups shuffled")
def groups_shuffled(module: Module) -> Places:
    """A shuffle in a function that later reshapes rows to (groups, completions).

    Reason: Rows are grouped by their position after a shuffle: if the rows were shuffled, completions of different
        prompts are compared.
    Remedy: Shuffle whole groups, or after advantages are known.
    Source: arXiv:2402.03300, sec. 4.1
    """
    for call in module.calls("shuffle", "randperm", "permutation"):
        scope = module.function_of(call)
        read = [
            later
            for later in (() if scope is None else ast.walk(scope))
            if isinstance(later, ast.Call)
            and called(later) in ("view", "reshape")
            and later.lineno > call.lineno
            and _GROUP_COUNTS.search(ast.unparse(later))
            and words_of(later) & _REWARD_WORDS
        ]
        if read:
            yield module.place(call), f"{module.line(call)}, and below {module.line(read[0])}"


@rule("KL estimator under another name")
def estimator_named(module: Module) -> Places:
    """Code of k1, k2 or k3 in a branch, a function or a variable with the name of another one.

    Reason: k1, k2 and k3 differ in bias, sign and, in a loss, in the gradient that they give.
    Remedy: Rename it, or write the other formula.
    Source: Schulman 2020, Approximating KL Divergence; gradients: arXiv:2506.09477
    """
    for where, claimed, expressions in _claims(module):
        found = {kind: each for each in expressions if (kind := _estimator(module, each)) is not None}
        if len(found) > 1:
            found.pop("k1", None)  # the difference that the other ones are made of
        for kind, expression in found.items():
            if kind not in claimed:
                wanted = " or ".join(sorted(claimed))
                said = f"{module.line(expression)} is {_SAID[kind]}, and {where} says {wanted}"
                yield module.place(expression), said


_SAID = {"k1": "k1", "k2": "k2", "k3": "k3", "2 k2": "a square without its half, twice k2"}
_NAMES = {"k1": {"k1"}, "kl": {"k1"}, "k2": {"k2"}, "mse": {"k2"}, "k3": {"k3"}, "low_var_kl": {"k3"}}
_Claim = tuple[str, set[str], list[ast.expr]]


def _claims(module: Module) -> Iterator[_Claim]:
    """(where an estimator is named, which ones, the expressions that should compute it)."""
    for node in module.nodes:
        if isinstance(node, ast.If) and (names := _compared(node.test)):
            values = [each for statement in node.body for each in _values(statement)]
            claimed = {kind for name in names for kind in _NAMES[name]}
            yield f"the branch of {' or '.join(map(repr, sorted(names)))}", claimed, values
        elif isinstance(node, Function) and (named := re.findall(r"(?:^|_)(k[123])(?:$|_)", node.name)):
            yield f"{node.name}()", set(named), [each for s in node.body for each in _values(s)]
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                name = target.id if isinstance(target, ast.Name) else ""
                if named := re.findall(r"(?:^|_)(k[123])(?:$|_)", name):
                    yield f"the name {name}", set(named), [node.value]


def _compared(test: ast.expr) -> set[str]:
    """Estimators that a condition compares with: of ``x == "k1"`` and ``x in ("kl", "k1")``."""
    if not (isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq | ast.In)):
        return set()
    constants = [n.value for n in ast.walk(test.comparators[0]) if isinstance(n, ast.Constant)]
    names = {value for value in constants if isinstance(value, str) and value in _NAMES}
    return names if len(names) == len(constants) else set()


def _values(statement: ast.stmt) -> Iterator[ast.expr]:
    """What is assigned and returned, branches left out: they may name another estimator."""
    if isinstance(statement, ast.Assign | ast.Return) and statement.value is not None:
        yield statement.value
    elif isinstance(statement, ast.With):
        for inner in statement.body:
            yield from _values(inner)


def _estimator(module: Module, expression: ast.expr) -> str | None:
    """k1, k2, k3 or ``2 k2``, or None where it is none of them."""
    expression = without_conversions(expression)
    if _k3_argument(module, expression) is not None:
        return "k3"
    square, half = _square(expression)
    if square is not None and _is_log_ratio(module, square):
        return "k2" if half else "2 k2"
    return "k1" if _is_difference(terms_of(expression)) and _is_log_ratio(module, expression) else None


def _k3_argument(module: Module, expression: ast.expr) -> Terms | None:
    """``d`` of ``exp(d) - d - 1``."""
    if not isinstance(expression, ast.BinOp):
        return None
    for each in ast.walk(expression):
        if not isinstance(each, ast.expr):
            continue
        value = next(iter(module.assigned(each.id, expression)), None) if isinstance(each, ast.Name) else each
        for name, one in (("exp", Counter({"1": -1})), ("expm1", Counter())):
            inner = None if value is None else argument_of(without_conversions(value), name)
            if inner is None:
                continue
            d = terms_of(inner)
            rest = Counter(terms_of(expression))
            if rest.pop(ast.unparse(each), 0) != 1:
                continue
            wanted = Counter({key: -n for key, n in d.items()})
            wanted.update(one)
            if {k: n for k, n in wanted.items() if n} == dict(rest):
                return d
    return None


def _square(expression: ast.expr) -> tuple[ast.expr | None, bool]:
    """What is squared, and whether the square is halved."""
    half = False
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Mult | ast.Div):
        parts = [(expression.left, expression.right), (expression.right, expression.left)]
        for part, factor in parts[: 1 if isinstance(expression.op, ast.Div) else 2]:
            wanted = 2.0 if isinstance(expression.op, ast.Div) else 0.5
            if isinstance(factor, ast.Constant) and factor.value == wanted:
                expression, half = without_conversions(part), True
                break
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Pow):
        two = isinstance(expression.right, ast.Constant) and expression.right.value == 2
        return (expression.left if two else None), half
    return argument_of(expression, "square"), half


def _is_difference(terms: Terms) -> bool:
    return sorted(terms.values()) == [-1, 1]


def _is_log_ratio(module: Module, expression: ast.expr) -> bool:
    words = words_of(expression)
    if isinstance(expression, ast.Name):
        words |= {word for value in module.assigned(expression.id, expression) for word in words_of(value)}
    return bool(words & {"log", "logp", "logps", "logprob", "logprobs", "logr", "ratio", "kl", "logpi"})


@rule("k3 the wrong way round")
def k3_reversed(module: Module) -> Places:
    """``exp(d) - d - 1`` with ``d = logp - logp_ref``; for samples of the policy it is ``logp_ref - logp``.

    Reason: With tokens sampled from the policy, exp(d) - d - 1 estimates KL(policy || reference) for d = logp_ref -
        logp; with the other sign it does not, and it explodes where the policy moved.
    Remedy: Reverse the difference.
    Source: Schulman 2020, Approximating KL Divergence
    """
    if "exp" not in module.text:
        return
    for node in module.every(ast.BinOp):
        d = None if isinstance(module.parents.get(node), ast.BinOp) else _k3_argument(module, node)
        if d is None:
            continue
        if len(d) == 1:  # a name: the difference that it was made of
            (name, sign), *_ = d.items()
            made = [terms for value in module.assigned(name, node) if _is_difference(terms := terms_of(value))]
            d = Counter({term: sign * n for term, n in made[0].items()}) if made else Counter()
        reference = [n for term, n in d.items() if words_of(ast.parse(term)) & {"ref", "reference", "base"}]
        if len(d) == 2 and len(reference) == 1 and reference[0] < 0:
            yield module.at(node)


_REFERENCE = re.compile(r"(^|_)(ref|reference)(_|$)|^(ref|reference)_?(model|policy)|(model|policy)_?ref$")


@rule("reference left trainable")
def reference_left_trainable(module: Module) -> Places:
    """A reference model that is created in a file and not frozen, or not put into evaluation mode, in this file.

    Reason: A reference with gradients costs their memory, and an optimizer may change it; with dropout on, its
        log-probs are random.
    Remedy: Freeze it and call eval() where it is created.
    Source: torch documentation, Module.requires_grad_ and Module.eval
    """
    for node in module.every(ast.Assign):
        made = _made_by(node.value) if isinstance(node.value, ast.Call) else None
        if made is None or called(made) not in ("from_pretrained", "deepcopy", "from_config"):
            continue
        target = node.targets[0]
        name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
        if not _REFERENCE.search(name.lower()):
            continue
        settings = [call for call in module.calls("eval", "requires_grad_") if name in ast.unparse(call.func)]
        done = {called(call) for call in settings} | set(re.findall("eval|requires_grad_", ast.unparse(node.value)))
        frozen = "requires_grad_" in done or _frozen_in_loop(module, name) or _only_without_gradient(module, name)
        evaluates = "eval" in done or called(made) == "from_pretrained"
        lacks = [] if frozen else [f"{name}.requires_grad_(False)"]
        lacks += [] if evaluates else [f"{name}.eval()"]
        if lacks:
            yield module.place(node), f"{module.line(node)}, without {' and '.join(lacks)}"


def _made_by(call: ast.Call) -> ast.Call:
    """``f(...)`` of ``f(...).to(device).eval()``."""
    while called(call) in ("to", "cuda", "eval", "requires_grad_", "half", "bfloat16"):
        inner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if not isinstance(inner, ast.Call):
            break
        call = inner
    return call


def _frozen_in_loop(module: Module, name: str) -> bool:
    """``for p in ref.parameters(): p.requires_grad = False``, or the like by ``get_parameter``."""
    loops = map(ast.unparse, module.every(ast.For))
    return any(name in loop and "requires_grad = False" in loop for loop in loops)


_SET_UP = (
    *("eval", "requires_grad_", "to", "cpu", "cuda", "prepare", "disable", "initialize", "isinstance", "print"),
    *("from_pretrained", "deepcopy", "parameters", "named_parameters", "get_parameter", "generate"),
)
"""Calls on a model, or with one, that record no gradient."""

_NO_GRADIENT = ("no_grad", "inference_mode")


def _only_without_gradient(module: Module, name: str) -> bool:
    """Whether every call of a model, or with it as an argument, records no gradient."""
    uses = [
        call
        for call in module.every(ast.Call)
        if not called(call).startswith(_SET_UP)
        and name in {ast.unparse(each).rpartition(".")[2] for each in (call.func, *_given(call))}
    ]
    given_to_trainer = any(called(use).endswith("Trainer") for use in uses)  # which should freeze it
    return bool(uses) and (given_to_trainer or all(_without_gradient(module, use) for use in uses))


def _given(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(each.value for each in call.keywords)]


def _without_gradient(module: Module, node: ast.AST) -> bool:
    around: list[ast.AST] = []
    for above in module.above(node):
        if isinstance(above, ast.With):
            around += above.items
        elif isinstance(above, Function):
            around += above.decorator_list
    return any(name in ast.unparse(each) for each in around for name in _NO_GRADIENT)


@rule("prompt tokens in the loss")
def prompt_in_loss(module: Module) -> Places:
    """Labels that are the whole input, or a loss that is masked by the attention mask alone.

    Reason: Every token of the input is trained on, also the prompt, which the policy did not write.
    Remedy: Give prompt and padding the label -100, or multiply by a mask of the completion.
    Source: arXiv:2203.02155, sec. 3.5: the loss is of the policy's own tokens; transformers, ignore_index
    """
    if "labels" not in module.text and "attention_mask" not in module.text:
        return
    for node in module.nodes:
        if isinstance(node, ast.Assign) and _is_whole_input(node.value):
            name = ast.unparse(node.targets[0])
            whole = isinstance(node.targets[0], ast.Name | ast.Attribute | ast.Subscript)
            if whole and re.search(r"\blabels\b", name) and not _masked_later(module, node, name):
                yield module.at(node)
        elif isinstance(node, ast.Call) and (labels := keyword(node, "labels")) is not None:
            masked = any("completion_mask" in (each.arg or "") for each in node.keywords)
            if _is_whole_input(labels) and not masked:
                yield module.at(node)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            one, other = words_of(node.left), words_of(node.right)
            if "loss" in one | other and {"attention", "mask"} <= (other if "loss" in one else one):
                yield module.at(node)


def _is_whole_input(value: ast.expr) -> bool:
    return re.fullmatch(r"[\w.\[\]'\"]*\binput_ids\b['\"\]]*(\.clone\(\)|\.copy\(\))?", ast.unparse(value)) is not None


def _masked_later(module: Module, node: ast.Assign, name: str) -> bool:
    def masks(later: ast.AST) -> bool:
        if isinstance(later, ast.Call):
            return called(later) in ("masked_fill", "masked_fill_") and name in ast.unparse(later)
        if not isinstance(later, ast.Assign) or later is node or later.lineno < node.lineno:
            return False
        return ast.unparse(later.targets[0]).startswith(name) and "-100" in ast.unparse(later)

    return any(map(masks, ast.walk(module.scope_of(node))))


@rule("use_reentrant unset")
def reentrant_unset(module: Module) -> Places:
    """Gradient checkpointing without ``use_reentrant``.

    Reason: torch then takes the reentrant form (transformers before 5 did, too), which needs an input that requires a
        gradient: under LoRA, whose embedding is frozen, gradients are silently missing.
    Remedy: Set use_reentrant=False.
    Source: torch documentation, torch.utils.checkpoint
    """
    for call in module.calls("gradient_checkpointing_enable", "checkpoint"):
        is_torch = called(call) == "checkpoint" and re.search(
            r"checkpoint\.checkpoint$|^checkpoint$", ast.unparse(call.func)
        )
        if called(call) == "checkpoint":
            if not (is_torch and len(call.args) >= 2 and "torch.utils" in module.text):
                continue  # a method of that name
        elif call.args or isinstance(keyword(call, "gradient_checkpointing_kwargs"), ast.Name | ast.Attribute):
            continue  # settings come from elsewhere
        if "use_reentrant" not in ast.unparse(call) and all(each.arg is not None for each in call.keywords):
            yield module.at(call)
    for call in module.every(ast.Call):
        on = keyword(call, "gradient_checkpointing")
        is_config = called(call).endswith(("Config", "Arguments"))
        if is_config and isinstance(on, ast.Constant) and on.value is True and "use_reentrant" not in module.text:
            yield module.at(call)


@rule("float16 alone")
def float16_alone(module: Module) -> Places:
    """Autocast to float16, by its default or by name, in a file that knows no bfloat16 and no gradient scaler.

    A file that calls ``scaler.scale(loss)`` is left alone: its gradient scaler may be made in another file. So is one
    with ``fp16=True`` or ``mixed_precision="fp16"``, and every ``autocast`` of another object than torch:
    transformers' trainers and accelerate scale gradients then. Under ``no_grad`` there are none.

    Reason: Small gradients of log-probs become 0 below 6e-8 and large ones infinite above 65,504, unless a scaler
        holds them between.
    Remedy: Use bfloat16 where the card has it, or a GradScaler and a look at skipped steps; float16 has more
        digits, and for agreement with the sampler some prefer it.
    Source: torch documentation, automatic mixed precision; for float16: arXiv:2510.26788
    """
    made = [*module.calls("GradScaler", "ShardedGradScaler")]
    if any("enabled=False" not in ast.unparse(call) for call in made):
        return
    if not made and any("scaler" in words_of(call.func) for call in module.calls("scale")):  # one from elsewhere
        return
    of_trainer = {"fp16=True", "mixed_precision='fp16'"}
    if any(ast.unparse(each) in of_trainer for each in module.every(ast.keyword)):
        return
    knows_bfloat16 = re.search(r"bfloat16|bf16", module.text) is not None
    for call in module.calls("autocast"):
        of = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else "torch"
        if re.match(r"torch\b|amp$", of) is None or _without_gradient(module, call):
            continue
        dtype = keyword(call, "dtype")
        text = ast.unparse(call)
        named = dtype is not None and ast.unparse(dtype).endswith("float16") and "bfloat16" not in ast.unparse(dtype)
        by_default = dtype is None and "enabled=False" not in text and "cpu" not in text and "bfloat16" not in text
        if (named or by_default) and not (knows_bfloat16 and not by_default):
            how = "float16 by name" if named else "float16, autocast's default on CUDA"
            yield module.place(call), f"{module.line(call)}: {how}, and no GradScaler in this file"


@rule("xFormers required")
def xformers_required(module: Module) -> Places:
    """xFormers imported unconditionally, or enabled by name.

    Reason: Its wheels are built for one version of torch each; on another one the whole program does not start, and
        torch has had the same kernels since 2.0.
    Remedy: Use scaled_dot_product_attention (attn_implementation='sdpa'), or import it in a try.
    Source: torch documentation, scaled_dot_product_attention
    """
    for node in module.nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        imported = any(name.split(".")[0] == "xformers" for name in names)
        guarded = any(isinstance(above, ast.Try | ast.If | Function) for above in module.above(node))
        asked = isinstance(node, ast.Call) and called(node) == "enable_xformers_memory_efficient_attention"
        if (imported and not guarded) or asked:
            yield module.at(node)


@rule("low-precision master weights")
def low_precision_masters(module: Module) -> Places:
    """torch's optimizer over a model that this file loads in bfloat16 or float16, or converts to it.

    Reason: bfloat16 has 8 bits, float16 has 11: at a learning rate of 1e-6 almost every step is smaller than half a
        unit in the last place of its weight, and is lost.
    Remedy: Keep float32 weights and autocast, or an optimizer with float32 masters or stochastic rounding.
    Source: arXiv:1710.03740, sec. 3.1; docs/numerics.md
    """
    if re.search(r"deepspeed|FSDP|fully_shard|get_peft_model|LoraConfig", module.text):
        return
    lowered: dict[str, ast.stmt] = {}
    statements = [node for node in module.nodes if isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr)]
    for node in sorted(statements, key=lambda each: each.lineno):
        for call in (each for each in ast.walk(node) if isinstance(each, ast.Call)):
            owner = _parameters_of(module, call) if called(call) in ("Adam", "AdamW", "SGD") else None
            if owner in lowered:
                yield module.place(call), f"{module.line(call)}, of {module.line(lowered[owner])}"
        if node.value is None:  # an annotation alone
            continue
        model, calls = _chain(node.value)
        loaded = _loaded_in_16_bits(module, model) or _made_in_16_bits(module, model)
        half = _after(calls, loaded or ast.unparse(model) in lowered)
        # Conversions of a module change it in place: model.half() alone does, too.
        targets: list[ast.expr] = [model] if calls else []
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for name in (ast.unparse(target) for target in targets):
            if half:
                lowered.setdefault(name, node)
            else:
                lowered.pop(name, None)


def _parameters_of(module: Module, call: ast.Call) -> str | None:
    """``model`` of ``AdamW(model.parameters())``, in groups, lists, filters and a variable of them too."""
    given = call.args[0] if call.args else keyword(call, "params")
    if isinstance(given, ast.Name):
        given = next(iter(module.assigned(given.id, call)), given)
    every = () if given is None else ast.walk(given)
    owners = (
        ast.unparse(each.func.value)
        for each in every
        if isinstance(each, ast.Call)
        and isinstance(each.func, ast.Attribute)
        and called(each) in ("parameters", "named_parameters")
    )
    return next(owners, None)


_MODULE_CALLS = ("to", "cuda", "cpu", "eval", "train", "half", "bfloat16", "float", "double", "requires_grad_")


def _chain(expression: ast.expr) -> tuple[ast.expr, list[ast.Call]]:
    """``model`` of ``model.to(device).half()``, and the two calls in their order."""
    calls: list[ast.Call] = []
    while isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute):
        if called(expression) not in _MODULE_CALLS:
            break
        calls.insert(0, expression)
        expression = expression.func.value
    return expression, calls


def _loaded_in_16_bits(module: Module, expression: ast.expr) -> bool:
    if not (isinstance(expression, ast.Call) and called(expression) == "from_pretrained"):
        return False
    dtype = keyword(expression, "torch_dtype") or keyword(expression, "dtype")
    return dtype is not None and re.search("float16|half", ast.unparse(module.written(dtype, expression))) is not None


def _made_in_16_bits(module: Module, expression: ast.expr) -> bool:
    """Whether an expression calls a function of the file whose only result is a model in 16 bits."""
    if not isinstance(expression, ast.Call):
        return False
    name = ast.unparse(module.written(expression.func, expression))
    makers = [each for each in module.tree.body if isinstance(each, ast.FunctionDef) and each.name == name]
    returned = [each for maker in makers for each in ast.walk(maker) if isinstance(each, ast.Return)]
    if len(makers) != 1 or len(returned) != 1 or returned[0].value is None:
        return False
    model, calls = _chain(returned[0].value)
    model, earlier = _chain(module.written(model, returned[0]))
    return _after([*earlier, *calls], _loaded_in_16_bits(module, model))


def _after(calls: Iterable[ast.Call], half: bool) -> bool:
    """Whether weights are in 16 bits after some calls of ``_MODULE_CALLS``."""
    for call in calls:
        half = _converted(call, half)
    return half


def _converted(call: ast.Call, half: bool) -> bool:
    """Whether weights are in 16 bits after one call of ``_MODULE_CALLS``."""
    given = called(call) if called(call) != "to" else " ".join(ast.unparse(each) for each in _given(call))
    if re.search(r"float16|\bhalf\b", given):
        return True
    return half and re.search(r"\b(float|float32|float64|double)\b", given) is None


@rule("what a GRPOConfig trains")
def trl_configuration(module: Module) -> Places:
    """A ``GRPOConfig(...)`` of literal values, read as the algorithm that TRL makes of it.

    Reason: TRL accepts settings that its loss ignores, or that mean something else under another loss_type, without a
        warning.
    Remedy: Leave out what has no effect, and write down what is meant.
    Source: TRL's GRPOTrainer._compute_loss, as presets.trl reads it
    """
    if "trl" not in module.text:
        return
    for call in module.calls("GRPOConfig", *module.named("GRPOConfig")):
        fields = _literals(module, call)
        if fields is None:
            continue
        # TRL's trainer has both; rewards are no part of the loss.
        fields |= {"sync_ref_model": False, "router_aux_loss_coef": None, "reward_weights": None}
        said: list[str] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                refused = refusals(fields)
                said += [str(each) for each in refused.values()]
                said += trl(**{name: value for name, value in fields.items() if name not in refused}).notes
            except ConfigurationError as error:
                said += [str(error)] if str(error) not in said else []
            except TypeError as error:  # of a value that TRL refuses, too
                said.append(f"a setting of another type than TRL's: {error}")
        said += [str(each.message) for each in caught]
        for each in said:
            yield module.place(call), f"{module.line(call)}: {each}"


def _literals(module: Module, call: ast.Call) -> dict[str, Any] | None:
    """The settings of the loss in a call, or None where one of them is not written out in the file."""
    fields = {}
    for name, value in _arguments(module, call):
        if name is None:
            return None
        if name in TRL_DEFAULTS:
            try:
                fields[name] = _literal(module.written(value, call))
            except ValueError:
                return None
    return fields


def _arguments(module: Module, call: ast.Call) -> Iterator[tuple[str | None, ast.expr]]:
    """Names and values of a call's keywords, those of a dict after ``**`` too; None for a name that is not written out.

    Example:
        >>> module = Module.parse("a.py", "some = {'a': 1} | {}\\nf(**{'b': 2}, **dict(c=3), **some)")
        >>> [(name, ast.unparse(value)) for name, value in _arguments(module, next(module.calls("f")))]
        [('b', '2'), ('c', '3'), (None, "{'a': 1} | {}")]
    """
    for each in call.keywords:
        given = each.value if each.arg is not None else module.written(each.value, call)
        if each.arg is not None:
            yield each.arg, given
        elif ast.unparse(each.value) in module.changed_in_place:
            yield None, given
        elif isinstance(given, ast.Dict):
            for key, value in zip(given.keys, given.values, strict=True):
                yield (key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else None), value
        elif isinstance(given, ast.Call) and called(given) == "dict" and not given.args:
            yield from _arguments(module, given)
        else:
            yield None, given


def _literal(value: ast.expr) -> Any:
    """A value that is written out, products such as ``4 * 1024`` included.

    Raises:
        ValueError: it is none.

    Example:
        >>> _literal(ast.parse("-4 * 1024", mode="eval").body)
        -4096
    """
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
        factors = _literal(value.left), _literal(value.right)
        if all(isinstance(factor, int | float) for factor in factors):
            return math.prod(factors)
    return ast.literal_eval(value)


@rule("temperature forgotten in the loss")
def temperature_forgotten(modules: Sequence[Module]) -> Places:
    """Sampling at a temperature that no log-prob of the whole tree is divided by.

    Reason: Tokens are sampled from softmax(logits / temperature), and no logits of this tree are divided by it: the
        trained log-probs belong to another policy than the one that sampled.
    Remedy: Divide the logits by the same temperature, or sample at 1.
    Source: TRL's and verl's trainers divide
    """
    divided = re.compile(
        r"logits[\w\[\]:, .()-]*\s*/\s*[\w.]*temp|\.div_?\([\w.]*temp|/=\s*[\w.]*temp|temperature=[\w.]*temperature"
    )
    if any(divided.search(module.text) for module in modules):
        return
    for module in modules:
        if not re.search(r"log_?softmax|log_?probs?|logps", module.text):
            continue
        for call in module.calls("SamplingParams", "GenerationConfig", "generate"):
            value = keyword(call, "temperature")
            if isinstance(value, ast.Constant) and isinstance(value.value, int | float) and value.value not in (0, 1):
                yield module.at(call)


@rule("TF32 at its default")
def tf32_at_default(modules: Sequence[Module]) -> Places:
    """A tree that trains and never sets the precision of float32 products.

    Reason: torch's default is full float32: on an Ampere card or later, float32 products run several times slower than
        under TF32, with 10 bits instead of 23.
    Remedy: Decide: torch.set_float32_matmul_precision('high'), or 'highest' written down.
    Source: torch documentation, CUDA semantics, TF32
    """
    for place in _trains_without(modules, r"allow_tf32|set_float32_matmul_precision|fp32_precision|\btf32\b"):
        yield place, "this tree trains and never sets the precision of float32 products"


@rule("allocator at its default")
def allocator_at_default(modules: Sequence[Module]) -> Places:
    """A tree that trains and never mentions the allocator's settings.

    Reason: Lengths differ from batch to batch, and on a small card the allocator's cache fragments long before memory
        is full.
    Remedy: Set expandable_segments:True before the first CUDA call, or say in the README who does.
    Source: torch documentation, CUDA memory management
    """
    for place in _trains_without(modules, "PYTORCH_(CUDA_)?ALLOC_CONF"):
        yield place, "this tree trains and never mentions PYTORCH_CUDA_ALLOC_CONF"


@rule("NCCL on consumer cards")
def nccl_at_default(modules: Sequence[Module]) -> Places:
    """A tree that trains over NCCL and never mentions peer-to-peer transfers.

    Reason: GeForce cards of the 4000 series have no peer-to-peer transfers: with some drivers the first collective
        hangs instead of falling back.
    Remedy: Say so in the README, or set NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 on such cards, and nowhere else.
    Source: NCCL documentation, NCCL_P2P_DISABLE; accelerate sets both on these cards
    """
    over_nccl = r"""init_process_group\(.{0,40}nccl|backend=["']nccl|deepspeed\.init_distributed"""
    if any(re.search(over_nccl, module.text) for module in modules):
        for place in _trains_without(modules, "NCCL_P2P_DISABLE"):
            yield place, "this tree trains over NCCL and never mentions NCCL_P2P_DISABLE"


def _trains_without(modules: Sequence[Module], pattern: str) -> Sequence[str]:
    """Where a tree that never mentions something calls ``backward`` first; nowhere if it does not."""
    if any(re.search(pattern, module.text) for module in modules):
        return []
    return [module.place(call) for module in modules for call in module.calls("backward")][:1]


@rule("peer-to-peer switched off everywhere")
def peer_to_peer_off(module: Module) -> Places:
    """Peer-to-peer transfers switched off for every card.

    Reason: Right on cards without peer-to-peer; on cards with NVLink it sends every gradient through the host.
    Remedy: Set it only where the card has none, or from outside.
    Source: NCCL documentation, NCCL_P2P_DISABLE
    """
    for node in module.every(ast.Assign):
        sets = any("NCCL_P2P_DISABLE" in ast.unparse(target) for target in node.targets)
        if sets and not any(isinstance(above, ast.If) for above in module.above(node)):
            yield module.at(node)


RULES: tuple[Callable[[Module], list[Finding]], ...] = (
    centred_over_batch,
    groups_shuffled,
    estimator_named,
    k3_reversed,
    reference_left_trainable,
    prompt_in_loss,
    reentrant_unset,
    float16_alone,
    xformers_required,
    low_precision_masters,
    trl_configuration,
    peer_to_peer_off,
)
TREE_RULES: tuple[Callable[[Sequence[Module]], list[Finding]], ...] = (
    temperature_forgotten,
    tf32_at_default,
    allocator_at_default,
    nccl_at_default,
)

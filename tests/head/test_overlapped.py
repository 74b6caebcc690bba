"""The scoring pass whose halves overlap, its own source on the CPU: any order of its groups, and who gets it."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
import triton

from logitless.head import passes
from logitless.head.kernels import forward, launch, overlapped, variants
from tests.head import scoring_pass
from tests.head.cases import Case, error, gradient_error, plain, problem, score_error, truth
from tests.head.gluon_on_cpu import OnCpu
from tests.head.head_ahead import variant_of
from tests.head.interpreter import interpreted
from tests.head.scoring_pass import EDGES, Shape
from tests.head.test_fused import run

pytestmark = [
    pytest.mark.skipif(
        not triton.__version__.startswith(variants.GLUON), reason="written in the Gluon of another Triton"
    ),
    pytest.mark.skipif(not interpreted(), reason="other kernels need Triton's interpreter"),
]

HOPPER = replace(variants.hopper(896, 2), overlaps=True)
"""With two multiprocessors, so that a program has several tiles."""


def on_cpu(monkeypatch, seed=0, instead=None):
    kernel = OnCpu(overlapped, "overlapped_exp_product", seed, instead)
    monkeypatch.setattr(overlapped, "overlapped_exp_product", kernel)
    return kernel


@pytest.mark.parametrize("shape", EDGES, ids=str)
def test_exponentials_and_their_sums_are_right_at_every_edge_and_in_every_order(shape, monkeypatch):
    given = scoring_pass.drawn(shape, HOPPER)
    found = []
    for seed in range(3):
        kernel = on_cpu(monkeypatch, seed)
        found.append(scoring_pass.scored(given, shape.num_kept, overlaps=True))
        assert kernel.launches == 1
    assert scoring_pass.wrong(found[0], given, shape.num_kept) == []
    for other in found[1:]:
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


FENCED = "    fence_async_shared()\n    gl.thread_barrier()\n"
SUMS = "mask=row < N)\n        gl.store(part_t"
LOW_STEPS = "gl.static_range(0, RANK, DEPTH):\n            acc"
LAST_GIVEN_BACK = "        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))\n"
FAULTS = {
    "a stage is given back by one half": ("(empty.index(i), count=2)", "(empty.index(i), count=1)"),
    "a load waits for what is not there yet": ("((step // STAGES) & 1) ^ 1)", "(step // STAGES) & 1)"),
    "a load waits for nothing": ("    mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)\n", ""),
    "products wait for nothing": ("    mbarrier.wait(full.index(stage), (step // STAGES) & 1)\n", ""),
    "products wait for another phase": ("full.index(stage), (step // STAGES) & 1)", "full.index(stage), step & 1)"),
    "fewer bytes are expected": ("(2 * HALF + COLUMNS) * DEPTH * 2", "(HALF + COLUMNS) * DEPTH * 2"),
    "a stage is given back while it is multiplied": ("    acc = warpgroup_mma_wait(1, deps=[acc])\n", ""),
    "the stage at hand is given back": ("(step + STAGES - 1) % STAGES), pred", "step % STAGES), pred"),
    "a stage is given back twice": ("pred=inside", "pred=True"),
    "the last stage is not given back": (LAST_GIVEN_BACK, ""),
    "products are used before they are there": ("        acc = warpgroup_mma_wait(0, deps=[acc])\n", ""),
    "the last tile's products stay": ("use_acc=inside", "use_acc=True"),
    "both halves take the upper rows": ("2 * stage + PART", "2 * stage"),
    "staging is filled while it is stored": ("    tma.store_wait(0)\n    staging", "    staging"),
    "the copy engine sees no stores": (FENCED, "    gl.thread_barrier()\n"),
    "a store runs ahead of some threads": (FENCED, "    fence_async_shared()\n"),
    "the target counts in the right half": ("own - COLUMNS // 2", "own"),
    "columns beyond the vocabulary count": ("if width < z.shape[1]", "if width < 0"),
    "rows beyond the last are written": (SUMS, SUMS.replace("row < N", "row >= 0")),
    "a step of LoRA is left out": (LOW_STEPS, LOW_STEPS.replace("0, RANK", "DEPTH, RANK")),
}


@pytest.mark.parametrize("instead", FAULTS.values(), ids=FAULTS)
def test_a_fault_in_the_kernel_is_found(instead, monkeypatch):
    given = scoring_pass.drawn(shape := Shape(200, 384, 600, 16, 200), HOPPER)
    for seed in range(8):
        on_cpu(monkeypatch, seed, instead)
        try:
            found = scoring_pass.scored(given, shape.num_kept, overlaps=True)
        except (AssertionError, AttributeError):
            return
        if scoring_pass.wrong(found, given, shape.num_kept):
            return
    raise AssertionError("nothing noticed it")


@pytest.mark.parametrize("shape", EDGES[2:5], ids=str)
def test_the_plain_kernel_gives_the_same(shape, monkeypatch):
    on_cpu(monkeypatch)
    given = scoring_pass.drawn(shape, HOPPER)
    ours, plainly = (scoring_pass.scored(given, shape.num_kept, overlaps=overlaps) for overlaps in (True, False))
    assert scoring_pass.wrong(plainly, given, shape.num_kept) == []
    torch.testing.assert_close(ours, plainly, rtol=2**-7, atol=0)
    assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(ours[1:], plainly[1:], strict=True))


@pytest.mark.parametrize("budget", [None, 304 * 2 * 24, 0])
@pytest.mark.parametrize("lora", [0, 3])
def test_scores_and_gradients_made_of_it_are_as_near_to_the_truth_as_ever(lora, budget, monkeypatch):
    kernel = on_cpu(monkeypatch)
    found = passes.variant
    score = HOPPER.score
    monkeypatch.setattr(passes, "variant", lambda hidden: replace(found(hidden), score=score, overlaps=True))
    case = Case(rows=70, vocabulary=301, width=24, dtype=torch.bfloat16, lora=lora, temperature="per token")
    inputs = problem(case)
    given, wanted, common = run(inputs, memory_budget=budget), truth(inputs), plain(inputs)
    assert kernel.launches == 1
    assert given.keys() == wanted.keys()
    for name in ("logp", "entropy"):
        assert float((given[name] - wanted[name]).abs().max()) < score_error(inputs)
    for name in (n for n in wanted if n.startswith("grad")):
        floor = gradient_error(inputs)
        assert error(given[name], wanted[name]) <= 1.5 * error(common[name], wanted[name]) + floor, name


@pytest.mark.parametrize("width", [896, 4096])
def test_its_tiles_are_those_that_the_variant_counts(width):
    tile = variants.hopper(width, 2).score
    half, columns, depth = (overlapped.HALF.value, overlapped.COLUMNS.value, overlapped.DEPTH.value)
    assert (tile.rows, tile.columns, tile.depth) == (2 * half, columns, depth)


@pytest.mark.parametrize(
    ("capability", "release", "dtype", "width", "overlaps"),
    [
        (90, "3.6.0", torch.bfloat16, 896, True),
        (90, "3.5.1", torch.bfloat16, 896, False),
        (90, "3.7.0", torch.bfloat16, 896, False),
        (100, "3.6.0", torch.bfloat16, 896, False),
        (120, "3.6.0", torch.bfloat16, 896, False),
        (80, "3.6.0", torch.bfloat16, 896, False),
        (90, "3.6.0", torch.float16, 896, False),
        (90, "3.6.0", torch.float32, 896, False),
        (90, "3.6.0", torch.bfloat16, 897, False),
    ],
)
def test_it_is_for_bfloat16_on_hopper_with_the_triton_that_it_is_written_for(
    capability, release, dtype, width, overlaps, monkeypatch
):
    monkeypatch.setattr(triton, "__version__", release)
    assert variant_of(capability, torch.zeros(3, width, dtype=dtype)).overlaps == overlaps


class Launched(Exception):
    """Says which kernel it was."""


class Named:
    def __init__(self, name):
        self.name = name

    def __getitem__(self, grid):
        def launched(*positional, **named):
            raise Launched(self.name)

        return launched


@pytest.mark.parametrize(
    ("head", "call", "takes"),
    [
        ({}, {}, "overlapped"),
        ({"rank": 16}, {}, "overlapped"),
        ({"width": variants.OVERLAPPED}, {}, "overlapped"),
        ({"width": variants.OVERLAPPED + 8}, {}, "plain"),
        ({"width": variants.OVERLAPPED + 8, "rank": 16}, {}, "overlapped"),
        ({"bias": torch.zeros(300)}, {}, "plain"),
        ({"softcap": True}, {}, "plain"),
        ({"variant": replace(HOPPER, overlaps=False)}, {}, "plain"),
        ({}, {"maximum": True}, "plain"),
        ({}, {"chosen": launch.listed(torch.ones(70, dtype=torch.bool))}, "plain"),
    ],
)
def test_what_it_does_not_do_and_where_it_does_not_pay_the_plain_kernel_does(head, call, takes, monkeypatch):
    monkeypatch.setattr(overlapped, "overlapped_exp_product", Named("overlapped"))
    monkeypatch.setattr(forward, "anchored_exp_product", Named("plain"))
    width, rank = head.pop("width", 64), head.pop("rank", 0)
    given = scoring_pass.drawn(Shape(70, width, 300, rank), head.pop("variant", HOPPER))
    sums = launch.TileSums.of(given.operands, given.rows)
    options = {"chosen": None, "maximum": False} | call
    with pytest.raises(Launched, match=takes):
        launch.exp_product(replace(given.operands, **head), given.rows, given.anchor, None, 0, sums, **options)

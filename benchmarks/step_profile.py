"""Where a step's time goes on the device: its kernels in classes, by their names.

What this library launches has names of its own; a library's matrix products and torch's elementwise kernels are told
apart by what their authors call them. ``idle`` is the rest of the step: the device had nothing to do.
"""

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

CLASSES: tuple[tuple[str, str], ...] = (
    (
        "head",
        r"^(anchored_exp_product|target_logits|partial_sums|rescale_rows|row_scores|"
        r"logit_gradient_product|add_entropy_gradient|move_rows|clear_rows|gather_rows|row_product|sum_parts|"
        r"column_product|low_rows|tile_sums|tile_gradient|pair_(sums|terms|gradient))$",
    ),
    (
        "attention",
        r"attention_forward|query_gradient|key_gradient|sum_key_parts|^decode_(own|shared)$|^merge_splits$|^sinks_|"
        r"flash|fmha|sdpa|cudnn.*attention|varlen",
    ),
    ("norms", r"^norm_kernel|^norm_backward|sum_parts_kernel|rms_?norm"),
    ("rotary positions", r"^rotary"),
    ("gate", r"^gate_(backward_)?kernel|silu"),
    ("experts", r"^(grouped|gated|gated_backward|outer|combine|by_expert|route|route_backward)_kernel$"),
    (
        "gated delta nets",
        r"^(unit|decay|inverse|solve|scan|step|advance|reverse|gradient|gated_norm|convolution|decay_and_beta)"
        r"(_step|_backward)?_kernel$",
    ),
    ("optimizer", r"adamw|multi_tensor_apply|squares_kernel|[Aa]dam"),
    ("products", r"^(add_)?low_rank_kernel|nvjet|gemm|cutlass|xmma|product_kernel|cublas|splitK|gemv"),
    ("embedding", r"embedding|index_select|indexSelect|gather|scatter|index_elementwise|radix|sort|Sort|unique"),
    ("copies and casts", r"copy|Memcpy|direct_copy|cast|CatArray|Memset|fill|FillFunctor"),
    ("reductions", r"reduce|softmax|SoftMax|scan"),
    ("elementwise", r"elementwise|vectorized|triton_"),
)
OTHER = "other"


def kernel_class(name: str) -> str:
    """Which class a kernel belongs to.

    Example:
        >>> kernel_class("norm_kernel"), kernel_class("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN")
        ('norms', 'products')
    """
    return next((kind for kind, pattern in CLASSES if re.search(pattern, name)), OTHER)


def summed(kernels: Sequence[tuple[str, float]], wall_ms: float) -> list[dict[str, Any]]:
    """Classes with their time, the longest first, ``idle`` at the end, and the longest kernels of each.

    Args:
        kernels: name and milliseconds of each launch.
        wall_ms: of the step.

    Example:
        >>> [(row["class"], row["ms"]) for row in summed([("norm_kernel", 1.0), ("norm_kernel", 2.0)], 4.0)]
        [('norms', 3.0), ('idle', 1.0)]
    """
    classes: dict[str, dict[str, list[float]]] = {}
    for name, milliseconds in kernels:
        classes.setdefault(kernel_class(name), {}).setdefault(name, []).append(milliseconds)
    rows = []
    for kind, by_name in classes.items():
        longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:6]
        rows.append(
            {
                "class": kind,
                "ms": sum(sum(times) for times in by_name.values()),
                "launches": sum(len(times) for times in by_name.values()),
                "kernels": {name[:160]: round(sum(times), 3) for name, times in longest},
            }
        )
    rows.sort(key=lambda row: -float(str(row["ms"])))
    busy = sum(milliseconds for _, milliseconds in kernels)
    return [*rows, {"class": "idle", "ms": max(0.0, wall_ms - busy), "launches": 0, "kernels": {}}]


def kernel_times(step: Callable[[], object], *, before: Callable[[], object]) -> list[dict[str, Any]]:
    """The classes of a step's kernels; the wall time is that of a step without the profiler.

    Args:
        step: to take.
        before: what makes it possible to take it again, outside the clock.
    """
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    wall = 1000 * (time.perf_counter() - start)
    before()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    before()
    kernels = [
        (event.name, event.device_time_total / 1000)
        for event in recorded.events() or ()
        if event.device_type.name == "CUDA"
    ]
    return summed(kernels, wall)

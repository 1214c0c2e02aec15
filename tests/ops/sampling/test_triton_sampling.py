"""The CUDA sampler without a device: its kernels compile for four kinds of card, and draw right in the interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from tests.ops.without_card import run_interpreted

INTERPRETED = Path(__file__).with_name("interpreted_sampling.py")
TYPES = {
    "*fp32": ("logits", "adjusted", "part_tops", "part_moments", "levels"),
    "*i32": ("slots", "part_ids", "lists", "list_sizes", "floors"),
    "*i64": ("records", "part_counts", "part_masses", "part_sums", "totals", "part_kept", "tokens"),
    "*u8": ("never",),
    "i32": ("stride", "vocab"),
}
TYPE_OF = {name: kind for kind, names in TYPES.items() for name in names}
KERNELS = (
    ("adjust", False),
    ("measure_levels", False),
    ("collect", False),
    ("collect", True),
    ("settle", False),
    ("settle", True),
    ("weigh", False),
    ("pick", False),
)


@pytest.mark.slow
def test_the_kernels_draw_right_in_the_interpreter() -> None:
    run_interpreted(INTERPRETED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "kernels"), [(80, KERNELS), (90, KERNELS), *((card, KERNELS[3:6]) for card in (100, 120))]
)
def test_the_kernels_compile_without_a_gpu(capability: int, kernels: tuple[tuple[str, bool], ...]) -> None:
    """All for the oldest card and the one that has most; the largest for the others."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kittiwake.ops.sampling import triton_kernels

    for name, by_mass in kernels:
        kernel = getattr(triton_kernels, name)
        settings = {"BLOCK": 4096, "PARTS": 16, "CHUNK": 8192, "BY_MASS": by_mass}
        signature = {argument: TYPE_OF.get(argument, "constexpr") for argument in kernel.arg_names}
        aligned = {
            (place,): [["tt.divisibility", 16]]
            for place, kind in enumerate(signature.values())
            if kind.startswith("*") or kind == "i32"
        }
        fixed = {argument: settings[argument] for argument, kind in signature.items() if kind == "constexpr"}
        source = ASTSource(kernel, signature, fixed, aligned)
        options = {"num_warps": 16 if name == "settle" else 8, "enable_fp_fusion": False}
        built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert len(built.asm["cubin"]) > 0, name

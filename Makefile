# Everything a developer runs; `make` alone lists it. Each target makes what it needs.
#   make test PYTHON=python3.12 VENV=/tmp/venv               another interpreter, another place
#   make demo PIP_ARGS="--extra-index-url URL"               more arguments for pip
#   make test PYTEST_ARGS="-k scheduler -x"                  more arguments for pytest

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
PYTEST_ARGS ?=
WRITE ?=
CONTINUE ?=
ROUNDS ?= 5
MINUTES ?= 60
QUICK ?=

BIN := $(VENV)/bin
# -P: the working directory must not make a bare `core` or `kernels` importable
PIP := $(BIN)/python -P -m pip install --quiet --disable-pip-version-check -c constraints.txt
RUNTIME := $(VENV)/.mainspring
DEV := $(VENV)/.mainspring-dev
GPU_LIBRARIES := $(VENV)/gpu
RAY_LIBRARIES := $(VENV)/ray
VIDEO_LIBRARIES := $(VENV)/video
# Compiled test files are stored also where Python is told not to: without, each worker compiles all of them (6 s).
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n 2 --dist worksteal
RANDOM_TESTS = $(shell grep -l 'from tiers import .*examples' tests/test_*.py)
SHELL := bash
.SHELLFLAGS := -euo pipefail -c

.PHONY: help demo test test-slow test-random test-main test-gpu-libraries test-ray test-video test-node test-all lint format bench bench-cpu bench-ipc chaos fuzz attacks soak flashinfer-newest surface-check gpu-kernels gpu-check sanitize size architectures architectures-media architectures-ranks demo-model demo-vision docs package clean

help:
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 16

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Mainspring needs Python 3.11 or newer; set PYTHON=...") if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV)

$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) $(PIP_ARGS) -e .
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) $(PIP_ARGS) -e '.[dev]'
	@touch $(RUNTIME) $@

# Beside the environment, not in it: nothing else is to see them.
$(GPU_LIBRARIES): constraints.txt | $(DEV)
	$(PIP) $(PIP_ARGS) --no-deps --upgrade --target $@ flashinfer-python apache-tvm-ffi nvidia-ml-py requests urllib3 certifi einops \
		tabulate ninja triton cuda-python cuda-bindings cuda-pathfinder
	@touch $@

$(RAY_LIBRARIES): constraints.txt | $(DEV)
	$(PIP) $(PIP_ARGS) --no-deps --upgrade --target $@ ray msgpack
	@touch $@

$(VIDEO_LIBRARIES): constraints.txt | $(DEV)
	$(PIP) $(PIP_ARGS) --no-deps --upgrade --target $@ num2words torchvision
	@touch $@

demo: $(RUNTIME) ## install, then generate with the embedded model
	@$(BIN)/mainspring demo

test: $(DEV) ## the fast tier of the tests: some of every room, in 5 to 8 minutes
	$(PYTEST) -m "not slow and not gpu_kernels" --hypothesis-profile quick $(PYTEST_ARGS)

test-slow: $(DEV) ## the tests that are not in the fast tier
	$(PYTEST) -m slow $(PYTEST_ARGS)

test-random: $(DEV) ## the random tests with ten times as many examples as in test-all (about 15 minutes)
	$(PYTEST) --hypothesis-profile thorough --timeout 1200 $(RANDOM_TESTS) $(PYTEST_ARGS)

test-gpu-libraries: $(GPU_LIBRARIES) ## tests of what FlashInfer and Triton are to us; they need both, but no GPU
	PYTHONPATH="$(GPU_LIBRARIES)" $(BIN)/pytest tests/test_flashinfer_contract.py tests/test_prebuilt.py $(PYTEST_ARGS)
	PYTHONPATH="$(GPU_LIBRARIES)" $(BIN)/pytest tests/test_triton_kernels.py tests/test_triton_experts.py tests/test_triton_scans.py tests/test_triton_compile.py $(PYTEST_ARGS)

test-ray: $(RAY_LIBRARIES) ## tests of engines, cores and ranks in a Ray of several nodes on this machine (about 3 minutes; Ray takes 240 MB)
	PYTHONPATH="$(RAY_LIBRARIES)" $(BIN)/pytest tests/test_ray.py $(PYTEST_ARGS)

test-video: $(VIDEO_LIBRARIES) ## tests of images and videos with processors of transformers that need torchvision
	PYTHONPATH="$(abspath $(VIDEO_LIBRARIES)):$(CURDIR)/tests/torchvision_ops" $(BIN)/pytest tests/test_processors.py $(PYTEST_ARGS)

test-node: $(DEV) ## tests of the server with OpenAI's client for Node.js, which npm installs beside the environment
	npm install --prefix $(VENV)/node --ignore-scripts --no-audit --no-fund openai@6
	MAINSPRING_NODE_MODULES="$(VENV)/node/node_modules" $(BIN)/pytest tests/test_http_node.py $(PYTEST_ARGS)

flashinfer-newest: | $(DEV) ## which of our assumptions the newest FlashInfer still meets; what fails is to be read before moving to it
	$(BIN)/python -P -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps --upgrade \
		--target $(GPU_LIBRARIES)-newest flashinfer-python apache-tvm-ffi nvidia-ml-py requests urllib3 certifi einops tabulate
	PYTHONPATH="$(GPU_LIBRARIES)-newest" $(BIN)/pytest tests/test_flashinfer_contract.py $(PYTEST_ARGS)

test-main: $(DEV) ## both tiers in one run, the random tests with ten times as many examples as in the fast tier
	$(PYTEST) $(PYTEST_ARGS)

test-all: test-gpu-libraries test-ray test-video test-main ## all tests

lint: $(DEV) ## ruff, mypy, and the length of the latest commit subjects
	@git log --no-merges -n 50 --format=%s | awk 'length > 72 { print "a commit subject above 72 characters: " $$0; bad = 1 } END { exit bad }'
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p $(VENV)/src && ln -sfn "$(CURDIR)" $(VENV)/src/mainspring # mypy finds the package by its folder's name
	MYPYPATH=$(VENV)/src $(BIN)/mypy -p mainspring

format: $(DEV) ## let ruff format and mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEV) ## speed against transformers, readiness, imports; WRITE=--write puts them into docs/performance.md
	$(BIN)/python benchmarks/make_models.py llama-110m
	$(BIN)/python benchmarks/compare.py --engines mainspring,transformers --workloads batch-110m --rounds 3 $(WRITE)
	$(BIN)/python benchmarks/frontend.py $(WRITE)

bench-cpu: $(DEV) ## all bars of the CPU path, against other engines (benchmarks/peers.py), in about an hour; goes on where it stopped (QUICK=--quick: some minutes)
	$(BIN)/python benchmarks/cpu.py --rounds $(ROUNDS) --vllm-rounds $(ROUNDS) --minutes $(MINUTES) $(QUICK) $(WRITE)

bench-ipc: $(DEV) ## what the wire costs, how thin a frontend is, a flood; WRITE=--write puts it into docs/reliability.md
	$(BIN)/python benchmarks/ipc.py $(WRITE)

chaos: $(DEV) ## kill cores, daemons and frontends under streams (about 20 minutes); WRITE=--write as above
	$(BIN)/python benchmarks/chaos.py --kills 100 $(WRITE)

fuzz: $(DEV) ## a million bad frames beside streams; WRITE=--write as above
	$(BIN)/python benchmarks/fuzz.py --frames 1000000 $(WRITE)

attacks: $(DEV) ## floods of connections and of large requests beside a stream; WRITE=--write as above
	$(BIN)/python benchmarks/attacks.py $(WRITE)

soak: $(DEV) ## half an hour of mixed load and a crash a minute; WRITE=--write as above
	$(BIN)/python benchmarks/soak.py --minutes 30 $(WRITE)

architectures-ranks: $(DEV) ## every causal LM class on 2 ranks, compared with generate (some 10 minutes); writes docs/scaling.md
	$(BIN)/python benchmarks/architectures_ranks.py --write

surface-check: $(DEV) ## the test of every public member in each mode, and that it can fail; writes docs/surface.md
	$(BIN)/python -P benchmarks/surface_check.py

gpu-kernels: $(GPU_LIBRARIES) ## compile CUDA kernels with nvcc, which takes no GPU, and look into them (a few minutes)
	PYTHONPATH="$(GPU_LIBRARIES)" $(BIN)/pytest -m gpu_kernels tests/test_gpu_kernels.py $(PYTEST_ARGS)

gpu-check: $(DEV) ## what needs an NVIDIA GPU, for 9 minutes; CONTINUE=FILE goes on from earlier runs, WRITE=--write puts it into docs/gpu.md
	$(BIN)/python benchmarks/gpu_check.py $(if $(CONTINUE),--continue "$(CONTINUE)") $(WRITE)

sanitize: $(DEV) ## the native kernels under AddressSanitizer, UBSan and ThreadSanitizer
	$(BIN)/pytest -m slow -k sanitizers tests/test_native_build.py $(PYTEST_ARGS)

size: $(DEV) ## lines of the package, room by room; fails past the limit
	$(BIN)/python benchmarks/size.py

architectures: $(DEV) ## a tiny checkpoint of every causal-LM class against transformers; writes docs/models.md
	$(BIN)/python benchmarks/architectures.py

architectures-media: $(DEV) ## every class that takes media in prompts, compared with generate (5 minutes); writes docs/models.md
	$(BIN)/python benchmarks/architectures_media.py --write

demo-model: $(DEV) ## train the embedded model again
	$(BIN)/python demo/training/train.py

demo-vision: $(DEV) ## train the embedded vision model again
	$(BIN)/python demo/training/train_vision.py

docs: $(DEV) ## write the generated pages
	$(BIN)/python benchmarks/reference_docs.py

package: $(DEV) ## build sdist and wheel, with compiled kernels; install the wheel into an empty folder and run the demo there
	rm -rf build dist mainspring.egg-info
	$(BIN)/python -P -m build --sdist --outdir dist . > /dev/null
	rm -rf build mainspring.egg-info
	place=$$(mktemp -d); trap 'rm -rf "$$place"' EXIT; set -e; \
	tar xf dist/*.tar.gz -C "$$place"; source=$$(echo "$$place"/mainspring-*); \
	$(BIN)/python -P -m mainspring.kernels.native.build "$$source/kernels/native/shipped"; \
	platform=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_platform())'); \
	$(BIN)/python -P -m build --wheel --outdir "$$place/wheel" "-C--build-option=--plat-name=$$platform" "$$source" > /dev/null; \
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -P -m auditwheel repair --wheel-dir dist "$$place"/wheel/*.whl; \
	$(BIN)/python -P -m venv "$$place/venv"; \
	"$$place/venv/bin/pip" install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS) dist/*.whl; \
	cd "$$place"; CXX=none MAINSPRING_CACHE="$$place/cache" venv/bin/mainspring demo --attention-backend native

clean: ## remove what the targets above made, but for the virtual environment and .bench/
	rm -rf build dist mainspring.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# make demo    the main job: vLLM with local ducks and the bundled model
# make test    the tests, in two processes
# make check   formatting, lint, types
# make check-gpu  the GPU host's kernels compile for five generations, without a GPU
# make fresh   the first two on a new Debian in a folder, as root (README, CI)
# make chaos   faults at random for 20 minutes; the last line is the verdict
# make soak    a server under load for 10 minutes, its ducks killed
# make fuzz     a million damaged inputs to everything that reads
# make bench   every benchmark, ours beside its peers, as a table
# make proto   regenerate the wire code from protos/
# The first of them makes .venv (3 to 8 minutes); later ones start at once.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BENCH_FLAGS ?= --quick
CXX_FOLDERS := vllm_duck/csrc tests testing benchmarks
# Each of them takes whole files, in random order, and up to 4 GB with its engines.
TEST_PROCESSES ?= 2

export FRESH ?= absent unreachable present
export FRESH_TESTS ?= 1

export HF_HUB_OFFLINE ?= 1

# Where it is set, each process compiles PyTorch and vLLM anew: 10 seconds a start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check check-gpu fresh chaos soak fuzz bench proto venv clean

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile \
		--no-loadscope-reorder $(TEST_FLAGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	find $(CXX_FOLDERS) -name '*.h' -o -name '*.cpp' -o -name '*.c' | \
		xargs $(BIN)/clang-format --dry-run -Werror

check-gpu: $(READY)
	VLLM_DUCK_GPU_ARCHS="80 86 89 90 120" $(BIN)/python -m pytest \
		tests/models/cuda/test_triton_aot.py

fresh:
	scripts/fresh.sh

bench: $(READY)
	$(BIN)/python -m benchmarks $(BENCH_FLAGS)

chaos: $(READY)
	VLLM_LOGGING_LEVEL=ERROR $(BIN)/python -m testing.chaos $(CHAOS_FLAGS)

fuzz: $(READY)
	$(BIN)/python -m testing.fuzz $(FUZZ_FLAGS)

soak: $(READY)
	$(BIN)/python -m testing.soak $(SOAK_FLAGS)

proto: $(READY)
	BIN=$(BIN) scripts/make_proto.sh

venv: $(READY)

$(READY): setup.py scripts/setup_venv.sh $(wildcard vllm_duck/csrc/*/* vllm_duck/csrc/*/*/*)
	PYTHON=$(PYTHON) scripts/setup_venv.sh $(VENV)
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
	find vllm_duck -name "*.so*" -delete

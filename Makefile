# Every target sets itself up: it makes .venv, installs the project into it, and runs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: help demo explore test browser lint format bench sanitize arm clean

help:
	@echo "make demo    train a small ViT on digits, make it sparse, print the table (about 2 minutes)"
	@echo "make explore  look at it in a browser: what every patch attends to"
	@echo "make test    run all tests"
	@echo "make lint    ruff and pyright"
	@echo "make format  let ruff rewrite the sources"
	@echo "make sanitize  the kernels' tests under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer"
	@echo "make arm     the kernels for AArch64, cross-compiled and tested in an emulator (Debian's cross-compiler and qemu-user)"
	@echo "make bench   remake benchmarks/results, times in a folder of this machine's name (needs the real weights and images)"

# The stamp is written last, so an interrupted install is repeated and never half used.
$(READY): pyproject.toml CMakeLists.txt $(wildcard src/sparsifiner/csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/sparsifiner demo

explore: $(READY)
	$(BIN)/sparsifiner explore

# The page is tested in a real browser: the system's, for nothing here downloads one. Where it cannot be installed its
# tests fail and say so.
ROOT := $(shell test "$$(id -u)" = 0 || echo "sudo -n")
browser:
	@command -v chromium >/dev/null || ! command -v apt-get >/dev/null \
	|| { $(ROOT) apt-get update -qq && DEBIAN_FRONTEND=noninteractive $(ROOT) apt-get install -y -qq chromium >/dev/null; } \
	|| echo "chromium is not here and cannot be installed: the page's tests will fail" >&2

# Two worker processes of one thread each use two cores better than one process of two threads.
test: $(READY) browser
	$(BIN)/python -m pytest --numprocesses 2

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/accuracy.py

# The interpreter is not built with the sanitizers, so their libraries are loaded before everything else. The second build
# shares work among plain threads (csrc/parallel.hpp): ThreadSanitizer does not know OpenMP.
SANITIZED := build/sanitize
KERNEL_TESTS := tests/ops/test_cpu.py tests/ops/test_cells.py tests/nn/test_attention.py -k "not compiles"
sanitize: $(READY)
	for kind in address thread; do \
	  cmake -S . -B $(SANITIZED)-$$kind -DPython_EXECUTABLE=$(abspath $(BIN))/python -DSPARSIFINER_SANITIZE=$$kind \
	    -DCMAKE_BUILD_TYPE=RelWithDebInfo && cmake --build $(SANITIZED)-$$kind --parallel 2 || exit 1; \
	done
	SPARSIFINER_NATIVE="$$(ls $(abspath $(SANITIZED))-address/_native*.so)" ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	$(BIN)/python -m pytest -q --capture=sys $(KERNEL_TESTS)
	SPARSIFINER_NATIVE="$$(ls $(abspath $(SANITIZED))-thread/_native*.so)" \
	TSAN_OPTIONS="halt_on_error=1 suppressions=$(abspath tests/thread-sanitizer.supp)" \
	LD_PRELOAD="$$($(CXX) -print-file-name=libtsan.so)" \
	$(BIN)/python -m pytest -q --capture=sys $(KERNEL_TESTS)

# The baseline's kernels for AArch64: compiled with NEON, and tested in an emulator. Right, not timed.
ARM := aarch64-linux-gnu
arm: $(READY)
	@command -v $(ARM)-g++ >/dev/null && command -v qemu-aarch64 >/dev/null || ! command -v apt-get >/dev/null \
	|| { $(ROOT) apt-get update -qq && DEBIAN_FRONTEND=noninteractive $(ROOT) apt-get install -y -qq g++-$(ARM) qemu-user >/dev/null; }
	$(BIN)/python tests/native/build.py --compiler $(ARM)-g++ --emulator "qemu-aarch64 -L /usr/$(ARM)" --objdump $(ARM)-objdump

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis

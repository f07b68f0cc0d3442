# Every target prepares the environment it needs (tools/env.sh) the first time.
# PYTHON=/path/to/python uses that one instead.

export OMP_NUM_THREADS ?= 1
# Tests start hundreds of processes, which would each compile all the modules that they import.
export PYTHONDONTWRITEBYTECODE =

# Processes that run tests: many tests wait for their ranks.  WORKERS=1 is pytest without xdist.
WORKERS ?= 3
PYTEST = -m pytest -q --durations=20 $(if $(filter-out 1,$(WORKERS)),-n $(WORKERS) --dist worksteal)

# Kernels of other CPUs: torch, oneDNN and MKL take them where these variables are set.
OTHER_CPUS = ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 \
	ONEDNN_MAX_CPU_ISA=AVX2 ONEDNN_MAX_CPU_ISA=AVX512_CORE MKL_CBWR=COMPATIBLE

.PHONY: help check format test test-unit test-cpus test-dist test-slow test-all test-host-gpu fuzz \
	fuzz-reshard fuzz-files kill soak bench docs site quickstart

help:
	@echo "make check       ruff, mypy, the laws of the repository"
	@echo "make test        all tests but the slow ones; WORKERS=3 processes run them"
	@echo "make test-unit   the fast half of them: laws of the repository, units, golden files"
	@echo "make test-cpus   units and golden files with the kernels of each of several kinds of CPU"
	@echo "make test-dist   the multi-process tests only"
	@echo "make test-slow   more random layouts, and layouts that each show few more pairs"
	@echo "make test-all    test, test-slow, then fuzzing, kills and the soak"
	@echo "make test-host-gpu  whole runs on a device that computes on the host: the ways of a GPU"
	@echo "make fuzz N=200  random layouts against one process; FIRST=0 is the first seed, OF=t5 in all"
	@echo "make fuzz-reshard N=50  random pairs of layouts: saved in one, loaded in the other"
	@echo "make fuzz-files N=2000  damaged and forged files of every kind; OF=yaml is one of them"
	@echo "make kill N=200  kill -9 around saves: the newest checkpoint is whole, the numbers the same; OF=fewer-bits"
	@echo "make soak N=5000 thousands of steps with saves: memory, descriptors and threads stay flat"
	@echo "make bench       every benchmark, one after the other"
	@echo "make docs        write docs/{tree,flags,matrix,features}.md, which are not committed, and architecture.md"
	@echo "make site        the guide and a reference as a web site, in build/site"
	@echo "make format      ruff format and ruff's own fixes"
	@echo "make quickstart  from a corpus to a trained model that writes text"

check:
	@python=$$(tools/env.sh) && \
	$$python -m ruff check . && \
	$$python -m mypy && \
	$$python -m pytest -q tests/repo

format:
	@python=$$(tools/env.sh) && $$python -m ruff check --fix . && $$python -m ruff format .

test:
	@python=$$(tools/env.sh) && $$python $(PYTEST) tests

test-unit:
	@python=$$(tools/env.sh) && $$python $(PYTEST) tests/repo tests/unit tests/golden

test-cpus:
	@python=$$(tools/env.sh) && failed= && for setting in $(OTHER_CPUS); do \
		echo $$setting; env $$setting $$python $(PYTEST) tests/unit tests/golden || failed="$$failed $$setting"; \
	done; test -z "$$failed" || { echo "tests failed with$$failed"; exit 1; }

test-dist:
	@python=$$(tools/env.sh) && $$python $(PYTEST) tests/distributed tests/functional

test-slow:
	@python=$$(tools/env.sh) && $$python $(PYTEST) -m slow tests

test-all:
	@python=$$(tools/env.sh) && $$python $(PYTEST) -m "slow or not slow" tests
	@$(MAKE) -s fuzz N=30 FIRST=20
	@$(MAKE) -s fuzz-reshard N=10
	@$(MAKE) -s fuzz-files N=500
	@$(MAKE) -s kill N=30
	@$(MAKE) -s soak

test-host-gpu:
	@python=$$(tools/env.sh) && $$python -m tests.support.host_gpu pytest -q tests/functional

fuzz:
	@python=$$(tools/env.sh) && \
	$$python -m tests.support.draws --draws $(or $(N),200) --first $(or $(FIRST),0) \
	$(if $(OF),--of $(OF))

fuzz-reshard:
	@python=$$(tools/env.sh) && \
	$$python -m tests.support.reshard --pairs $(or $(N),50) --first $(or $(FIRST),0)

fuzz-files:
	@python=$$(tools/env.sh) && \
	$$python -m tests.support.file_fuzz.files --cases $(or $(N),2000) --first $(or $(FIRST),0) \
	$(if $(OF),--of "$(OF)")

kill:
	@python=$$(tools/env.sh) && \
	$$python -m tests.support.kills --kills $(or $(N),200) --first $(or $(FIRST),0) \
	$(if $(OF),--of $(OF))

soak:
	@python=$$(tools/env.sh) && $$python -m tests.support.soak --iterations $(or $(N),5000)

bench:
	@python=$$(tools/env.sh) && \
	for file in $$(grep -l __main__ benchmarks/*.py); do \
		echo $$file; $$python -m benchmarks.$$(basename $$file .py) || exit 1; done

docs:
	@python=$$(tools/env.sh) && for page in tree features flags matrix architecture; do $$python tools/dev/$$page.py || exit 1; done

site: docs
	@python=$$(tools/env.sh) && $$python -c "import sphinx, myst_parser, furo" || { \
		echo "make site: $$python -m pip install -e '.[docs]' first"; exit 1; }
	@python=$$(tools/env.sh) && $$python -m sphinx -q -j auto docs build/site && echo build/site/index.html

quickstart:
	@bash examples/quickstart.sh

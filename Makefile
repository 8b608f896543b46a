# Owns how this checkout is set up, run, tested and measured. `make help` lists the targets.
# The rule: each target works on a fresh clone, and sets up no more than it needs.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PY     := $(BIN)/python
# How many test processes at once; 0 runs them in one.
JOBS   ?= auto
# The same for Spark's tests: each process has a Java of its own beside it, of up to a GiB.
SPARK_JOBS ?= 2
# Passed on to the program that the target starts.
ARGS   ?=
# One run of the simulator is one number; empty lets the simulator pick and print one.
SEED   ?=

RUN_STAMP  := $(VENV)/.installed-run
DEMO_STAMP := $(VENV)/.installed-demo
DEV_STAMP  := $(VENV)/.installed-dev
DOCS_STAMP := $(VENV)/.installed-docs
NODE       := tests/interop/node
NODE_STAMP := $(NODE)/node_modules/.installed

# Programs that run over the compiled modules: a copy of the packages, made anew when a source has
# changed, in front of the sources and of the current directory. FORM=compiled measures over them;
# what is started with MALAMUTE_FORM ends in failure where it finds itself in another form.
COMPILED := $(CURDIR)/build/compiled
OVER_COMPILED := MALAMUTE_FORM=compiled PYTHONSAFEPATH=1 PYTHONPATH=$(COMPILED):$(CURDIR)

FLOORS := .venv-floors

FAST := not slow and not system and not spark and not alone
FASTER := $(FAST) and not moderate
# Few examples of each property here, all of them in `make test` (tests/conftest.py).
QUICKLY := --hypothesis-profile quick

# Python keeps what it compiled, and pytest the asserts that it rewrote: without that each process
# does it anew, and collecting the tests takes three times as long.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup run compile sync-client spark-options metrics-page man docs dist try-dist check lint test test-compiled test-floors test-needs demo simulate fuzz perf micro clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

setup: $(DEV_STAMP) ## make .venv with everything for development

run: $(RUN_STAMP) ## start a broker on this machine (ARGS="--help" for its options)
	$(BIN)/malamute broker $(ARGS)

compile: $(DEV_STAMP) ## compile the hot modules into build/compiled (pyproject.toml lists them)
	@$(PY) hatch_build.py

sync-client: $(DEV_STAMP) ## write malamute_py/client/sync from client/aio; make check compares them
	$(PY) -m tools.sync_client

spark-options: $(DEV_STAMP) ## write the options into spark_connector/README.md; make check compares them
	$(PY) -m tools.spark_options

metrics-page: $(DEV_STAMP) ## write the tables of deploy/metrics.md from malamute_py/http/table.py and events.py
	$(PY) -m tools.metrics_page

man: $(DEV_STAMP) ## write docs/man/malamute.1 from the commands; make check compares them
	$(PY) -m tools.man_page

docs: $(DOCS_STAMP) ## build the documents into build/docs; a warning is an error
	$(PY) -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "build/docs/index.html"

dist: $(DEV_STAMP) ## build wheel and source distribution into dist/, and check them
	rm -rf dist
	$(PY) -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

try-dist: $(DEV_STAMP) ## install the wheel of dist/ alone and with extras, on each Python that is here
	$(PY) -m tools.try_dist $(ARGS)

check: lint ## lint, types, import contracts and the fast tests, in about a minute
	$(PY) -m pytest -q -n $(JOBS) --dist worksteal -m "$(FASTER)" $(QUICKLY)

lint: $(DEV_STAMP) ## lint, types and import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/mypy -n auto

test: test-needs ## all tests: in parallel, then those that must be alone, then Spark's, a file to a process
	$(PY) -m pytest -q -n $(JOBS) --dist worksteal -m "not spark and not alone" $(ARGS)
	$(PY) -m pytest -q -m "alone and not spark" $(ARGS)
	$(PY) -m pytest -q -n $(SPARK_JOBS) --dist loadfile -m "spark" $(ARGS)

# They replace a constant, which is compiled in, or look into an object's __dict__, which is none;
# the planted bugs, and who watches what is gathered, replace methods.
LOOK_INSIDE := tests/broker/test_hostile_batches.py::test_batches_with_reserved_bytes_that_an_earlier_broker_took_are_delivered \
    tests/broker/log/test_steps.py::test_a_step_that_is_too_large_is_refused_alone_and_leaves_its_numbers_to_the_next \
    tests/broker/log/test_steps.py::test_a_mailbox_that_one_bundle_created_stays_when_the_next_is_refused \
    tests/broker/services/test_administration.py::test_what_lies_in_memory_is_removed_a_portion_a_step \
    tests/broker/services/test_administration.py::test_a_service_that_is_removed_leaves_its_dead_letters_where_they_are \
    tests/broker/services/test_deadlines.py::test_an_error_over_deadlines_of_one_service_is_tried_again_and_holds_up_no_other \
    tests/broker/services/test_deadlines.py::test_an_error_over_leases_of_one_service_is_tried_again_and_holds_up_no_other \
    tests/broker/groups/test_dead_letters.py::test_a_requeue_looks_at_one_portion_a_turn_where_nothing_is_to_be_put_back \
    tests/broker/groups/test_dead_letters.py::test_a_requeue_during_which_the_group_is_reset_or_removed_says_which \
    tests/broker/mail/test_inboxes.py::test_an_acknowledgement_of_many_ranges_looks_for_a_batch_once \
    tests/broker/groups/test_many_members.py::test_members_that_leave_together_are_divided_once \
    tests/matcher/test_numbers_and_memo.py::test_nothing_is_left_of_conjunctions_once_they_are_all_discarded \
    tests/protocol/test_tables_in_steps.py::test_a_table_that_is_wrong_is_free_when_it_was_refused \
    tests/protocol/test_tables_in_steps.py::test_a_table_whose_reading_is_given_up_is_free_at_once
REPLACES := tests/simulation/test_plants.py tests/broker/subscriptions/test_gathering.py \
    tests/broker/subscriptions/test_large_tables.py \
    tests/broker/subscriptions/test_matching.py tests/broker/test_containment.py \
    tests/broker/test_proportion.py tests/broker/test_random_crowd.py tests/broker/test_shares.py \
    tests/client/test_internal_ends.py tests/broker/groups/test_random_dead_letters.py

test-compiled: $(DEV_STAMP) ## the tests of what is compiled, over the compiled modules
	@$(PY) hatch_build.py --required
	$(OVER_COMPILED) $(PY) -m pytest -q -n $(JOBS) --dist worksteal \
	    -o "pythonpath=build/compiled ." -m "not system and not spark and not alone" \
	    tests/broker tests/matcher tests/protocol tests/client tests/simulation \
	    tests/house/test_form.py $(addprefix --deselect ,$(LOOK_INSIDE)) \
	    $(addprefix --ignore ,$(REPLACES)) $(ARGS)

# In CI without those that take more than a twentieth of a second, which are ours more than a library's.
test-floors: | $(PY) ## the fast tests over the lowest versions that pyproject.toml admits
	$(PYTHON) -m venv --clear $(FLOORS)
	$(PY) tests/floors.py > $(FLOORS)/requirements.txt
	$(FLOORS)/bin/python -m pip install -q -r $(FLOORS)/requirements.txt -e .
	$(FLOORS)/bin/python -m pytest -q -n $(JOBS) --dist worksteal -m "$(if $(CI),$(FASTER),$(FAST))" $(QUICKLY) \
	    --ignore tests/demo --ignore tests/examples --ignore tests/house --ignore tests/spark \
	    --ignore tests/cli/test_spark.py $(ARGS)

test-needs: $(DEV_STAMP) $(NODE_STAMP)
	@tests/need java
	@tests/need prometheus
	-@tests/need chromium  # its tests are skipped without it

demo: $(DEMO_STAMP) ## a year of real flights through the broker, checked against independent figures
	@tests/need java
	$(PY) -m malamute_py.demo $(ARGS)

simulate: $(DEV_STAMP) ## run the deterministic simulator: SEED=7, or none for a new one
	$(PY) -m tests.simulation $(if $(SEED),--seed $(SEED)) $(ARGS)

fuzz: $(DEV_STAMP) ## hostile messages through the core (ARGS="--messages 3000000 --jobs 2"), or PROGRAM=live, contents or guided
	$(PY) -m tests.fuzz$(if $(PROGRAM),.$(PROGRAM)) $(ARGS)

perf: $(DEV_STAMP) ## measure beside the other brokers installed here (ARGS="--quick"), or Spark with PROGRAM=spark
	@$(MAKE) -s -C perf/peers || echo "the native clients that did not build are left out"
	$(if $(FORM),@$(PY) hatch_build.py --required)
	$(if $(FORM),$(OVER_COMPILED)) $(PY) -m perf$(if $(PROGRAM),.$(PROGRAM)) $(ARGS)

micro: $(DEV_STAMP) ## micro-benchmarks, compared with the last recorded ones; FORM=compiled as in perf
	$(if $(FORM),@$(PY) hatch_build.py --required)
	$(if $(FORM),$(OVER_COMPILED)) $(PY) -m perf.micro $(ARGS)

clean: ## remove what these targets made, the broker's data excepted
	rm -rf $(VENV) $(FLOORS) $(NODE)/node_modules .mypy_cache .pytest_cache .ruff_cache .import_linter_cache \
	    .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "malamute-py needs Python 3.11 or later; name one with: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	    { echo "no venv module: on Debian, apt-get install -y python3-venv"; exit 1; }

$(RUN_STAMP): pyproject.toml | $(PY)
	@echo "installing the broker into $(VENV): about a minute"
	$(PY) -m pip install -q -e '.[server]'
	@touch $@

$(DEMO_STAMP): pyproject.toml | $(PY)
	@echo "installing the demo's needs, Spark among them, into $(VENV): a few minutes"
	$(PY) -m pip install -q -e '.[demo,spark]'
	@touch $@ $(RUN_STAMP)

$(DOCS_STAMP): pyproject.toml | $(PY)
	@echo "installing what the documents need into $(VENV): a minute"
	$(PY) -m pip install -q -e '.[docs]'
	@touch $@

$(DEV_STAMP): pyproject.toml | $(PY)
	@echo "installing everything for development into $(VENV): a few minutes"
	$(PY) -m pip install -q -e '.[dev]'
	@touch $@ $(RUN_STAMP) $(DEMO_STAMP)
	@echo "everything is in $(VENV); next: . $(BIN)/activate, or make check"

$(NODE_STAMP): $(wildcard $(NODE)/package*.json)
	@tests/need node
	cd $(NODE) && npm ci --no-audit --no-fund
	@touch $@

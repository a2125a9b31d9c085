# The tasks of this project. Each sets up what it needs: Python 3.11 or newer and make are enough.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo serve bench prove test test-outside check format docs coverage lock clean

BIN := .venv/bin
UV := $(shell command -v uv)
PYTHON := $(shell for candidate in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$candidate" && break; done)

ARGS :=
JOBS := 3
PYTEST := $(BIN)/pytest --numprocesses $(JOBS) --dist worksteal --durations 15
# Where SQL runs: once more on the oldest PostgreSQL that is promised. Without what is about the embedded one, and without what kills
# processes or connections: those are minutes of the very statements that the others run.
SQL_SUITES = $(wildcard tests/use_cases tests/web tests/properties tests/concurrency tests/migrations tests/idempotency)

help: ## Show the tasks
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo '  ARGS="…" goes to the command or to pytest: make test ARGS="-k refund -x"'

demo: .venv/.installed ## Watch payments arrive twice, late and forged, and each one count once
	$(BIN)/ipn-gateway demo --payments 20 $(ARGS)

serve: .venv/.installed ## Run the gateway on its embedded PostgreSQL
	$(BIN)/ipn-gateway serve $(ARGS)

bench: .venv/.installed ## Measure its speed by ratios, 30 minutes (ARGS=--quick: 5), and write bench.json
	$(BIN)/ipn-gateway bench --json $(ARGS) > bench.json

prove: .venv/.installed ## Kill gateways 300 times under 10,000 notifications, and count what is lost or doubled; about five minutes
	$(BIN)/ipn-gateway prove --notifications 10000 --kills 300 $(ARGS)

test: check ## Run the checks and every test that needs Python alone
	$(PYTEST) $(ARGS)

test-outside: .venv/.installed ## Run what needs Debian packages and Node, and the SQL suites on PostgreSQL 15
	tests/outside/with-node tests/outside/with-postgresql-15 $(PYTEST) tests/outside $(SQL_SUITES) \
		--ignore tests/use_cases/test_postgres.py --ignore-glob '*/test_*kill*.py' $(ARGS)

check: .venv/.installed ## Lint, formatting, types and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: .venv/.installed ## Put the code into its one format, and mend what the linter can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: .venv/.installed ## Write the generated pages of docs/reference again
	$(BIN)/python -m docs.generate

coverage: .venv/.installed ## Run the tests of make test under branch coverage, and refuse less than is promised
	rm -f .coverage .coverage.*
	$(BIN)/coverage run -m pytest --numprocesses $(JOBS) --dist worksteal $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report
	$(BIN)/coverage report --fail-under 95 \
		--include '*/inbox.py,*/effects.py,*/orders.py,*/idempotency*.py,*/refund*.py,*/event_claims.py,*/event_deliveries.py,*/attempts.py'

lock: ## Resolve requirements.lock again with uv (ARGS=--upgrade: to newer releases, none in its first week)
	$(if $(UV),,$(error make lock needs uv: pip install uv))
	$(UV) pip compile --quiet --universal --python-version 3.11 --extra bench --extra dev --generate-hashes --no-emit-index-url --no-header --no-annotate \
		--exclude-newer "$$($(PYTHON) -c 'from datetime import *; print(date.today() - timedelta(days=7))')T00:00:00Z" \
		$(ARGS) pyproject.toml --output-file requirements.lock

clean: ## Remove the virtual environment and every cache
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage .coverage.* dist build
	find ipn_gateway tests alembic -name __pycache__ -prune -exec rm -rf {} +

# Names, versions and hashes come from the lock, for uv and for pip; where from is the machine's own setting.
.venv/.installed: requirements.lock pyproject.toml
	$(if $(PYTHON),,$(error Python 3.11 or newer is needed as python3 on PATH, or name one: make PYTHON=/path/to/python))
ifneq ($(UV),)
	@test -x $(BIN)/python || $(UV) venv --quiet --python "$(PYTHON)" .venv
	$(UV) pip install --quiet --python $(BIN)/python --require-hashes --requirement requirements.lock
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
else
	@test -x $(BIN)/pip || "$(PYTHON)" -m venv .venv || { rm -rf .venv; \
		echo 'This Python cannot make virtual environments: install its venv package (on Debian python3-venv), or uv.'; exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
endif
	touch $@

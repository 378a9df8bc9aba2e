# Everything is set up by the target that needs it: `make run`, `make demo`, `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DIR ?= tests/vectors/data
JOBS ?= 2

.PHONY: run demo test unit lint fleet envoy vectors bench fuzz mutation proto gateways stubs docs buf clean

PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

$(VENV)/.service: pyproject.toml constraints.txt
	@echo "installing the service into $(VENV) (once, about half a minute)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(VENV)/.ready: $(VENV)/.service adapters/python_client/pyproject.toml
	@echo "installing what the tests need (once, about a minute)"
	$(PIP) -e '.[dev]' -e adapters/python_client
	touch $@

run: $(VENV)/.service ## start the service with an embedded Postgres and no configuration
	$(BIN)/policy-service serve

demo: $(VENV)/.service ## misbehaving upstreams, a small gateway and a live table of decisions
	$(BIN)/policy-service demo

test: lint $(VENV)/.ready ## everything that must pass before a change lands
	$(BIN)/pytest -n $(JOBS) --dist loadgroup -m 'not long and not alone'
	$(BIN)/pytest -m 'alone and not long'

unit: $(VENV)/.ready ## the pure core only, under a minute
	$(BIN)/pytest tests/unit tests/property tests/vectors

lint: $(VENV)/.ready ## ruff, mypy --strict, import rules, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python proto/generate.py --check
	$(BIN)/python adapters/python_client/carry.py --check

fleet: $(VENV)/.ready ## the long forms of the fleet and fault suites
	POLICY_FLEET_LONG=1 $(BIN)/pytest tests/fleet tests/fault -s -m "long or not long" --timeout 1800

envoy: $(VENV)/.ready ## the Envoy suite with its long forms
	$(BIN)/pytest tests/envoy -m "long or not long" --timeout 600

vectors: $(VENV)/.ready ## run every vector file below DIR
	$(BIN)/python -m tests.vectors $(DIR)

bench: $(VENV)/.service ## throughput and latency against a bare echo server, as ratios
	$(BIN)/policy-service bench

fuzz: $(VENV)/.ready ## a million mutated bodies and headers
	POLICY_FUZZ_EXAMPLES=1000000 $(BIN)/pytest tests/property -k fuzz --timeout 7200

mutation: $(VENV)/.ready ## mutation score of the pure core: every mutant, two to three hours; MUTATION='--sample 30' for a sample
	$(BIN)/python tests/mutation/run.py --jobs $(JOBS) $(MUTATION)

proto: $(VENV)/.ready ## regenerate the Python stubs
	$(BIN)/python proto/generate.py
	$(BIN)/python adapters/python_client/carry.py

buf: ## lint the contract and look for breaking changes (needs Node)
	cd proto && npm ci --no-audit --no-fund --silent && npm run --silent lint && npm run --silent breaking

gateways: ## install and build what the example gateways in Go and Node need
	cd docs/examples/node && npm ci --no-audit --no-fund --silent
	cd docs/examples/go && PATH="$$PATH:/usr/local/go/bin" go build -o /dev/null ./...

stubs: gateways ## regenerate the stubs of the example gateways
	cd docs/examples/node && npm run --silent generate
	cd docs/examples/go && PATH="$$PATH:/usr/local/go/bin:$(CURDIR)/docs/examples/node/node_modules/.bin" go generate ./...

docs: $(VENV)/.ready ## regenerate reference documentation
	$(BIN)/policy-service config docs

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .hypothesis

# Two commands are enough for a newcomer: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
DEMO   := .venv-demo
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip

.PHONY: demo test check docs soak soak-short matrix clean

demo: $(DEMO)/.installed  ## train a masked autoencoder on 1,939 real near-infrared spectra
	$(DEMO)/bin/treadle train spectra --out runs/demo

$(DEMO)/.installed: pyproject.toml constraints.txt  # what a user installs, and not what a developer needs
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/python -m pip install --quiet --upgrade -c constraints.txt pip
	$(DEMO)/bin/python -m pip install --quiet -c constraints.txt -e '.[cli]'
	@touch $@

test: $(VENV)/.installed check  ## all that CI runs on the CPU
	$(BIN)/python -m pytest -n 3 --dist worksteal  # on two cores: many tests wait for other processes

check: $(VENV)/.installed  ## style, types, and the documentation, which is left in site
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs: $(VENV)/.installed  ## the documentation, to be read in a browser while it is written
	$(BIN)/mkdocs serve

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade -c constraints.txt pip
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

soak: $(VENV)/.installed  ## 1,000 random kills over the faces, and the long tests
	$(BIN)/python benchmarks/soak.py --kills 1000 --jobs $$(nproc) --write
	$(BIN)/python -m pytest -m slow --deselect tests/resume/test_matrix.py

soak-short: $(VENV)/.installed  ## three minutes of random kills over the faces
	$(BIN)/python benchmarks/soak.py --minutes 3 --jobs $$(nproc)

matrix: $(VENV)/.installed  ## every case of the exactness matrix, every stop
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/resume/test_matrix.py -m slow

clean:
	rm -rf $(VENV) $(DEMO) runs

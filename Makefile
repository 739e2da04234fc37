# The two commands: `make serve` and `make test`. Each sets up all it needs.
#   PYTHON=python3.12       which Python makes the environment (3.11 or newer)
#   VENV=.venv              where the environment lives
#   TORCH_INDEX=URL         take torch from this index instead
#   KERNELS=1               with `test`: prove the GPU kernels on the CPU too (g++ and the extra 'kernels')
#   ARGS="--port 9000"      passed on to `headrace serve` or to pytest

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
KERNELS ?=
EXTRAS := dev$(if $(KERNELS),$(shell printf ',kernels'))

.PHONY: serve test test-slow check environment clean

serve:
	@PYTHON="$(PYTHON)" VENV="$(VENV)" scripts/setup-environment
	@exec "$(VENV)/bin/headrace" serve $(ARGS)

test:
	@PYTHON="$(PYTHON)" VENV="$(VENV)" scripts/setup-environment "$(EXTRAS)"
	@HEADRACE_KERNELS="$(KERNELS)" "$(VENV)/bin/python" -m pytest $(ARGS)

test-slow:
	@PYTHON="$(PYTHON)" VENV="$(VENV)" scripts/setup-environment dev
	@"$(VENV)/bin/python" -m pytest -m slow $(ARGS)

check:
	@PYTHON="$(PYTHON)" VENV="$(VENV)" scripts/setup-environment dev
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/check

environment:
	@PYTHON="$(PYTHON)" VENV="$(VENV)" scripts/setup-environment dev

clean:
	rm -rf "$(VENV)" .typecheck build dist headrace.egg-info

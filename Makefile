# Verbs only; what they do is in the programs they call.
PYTHON ?= python3
INVENTORY ?= inventory/lab

.PHONY: help venv site smoke test lint unit integration test-thorough dashboard dashboard-shot bench timings lab-up lab-down lab-status

help: ## List the verbs
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

venv: ## Make .venv with Ansible; make site does it too
	PYTHONPATH=tools $(PYTHON) -c 'import steps; steps.make_venv("requirements.txt")'

site: ## Converge a host to a serving, monitored, proven state (the lab; INVENTORY=... for another)
	$(PYTHON) tools/site $(INVENTORY)

smoke: ## Prove the running service again
	.venv/bin/ansible-playbook --inventory $(INVENTORY) smoke.yml

test: ## Run everything that CI runs
	$(PYTHON) tools/test

lint: ## Linters only
	$(PYTHON) tools/test lint

unit: ## Unit, template, policy and kernel tests only
	$(PYTHON) tools/test unit

integration: ## Tests on lab hosts only
	$(PYTHON) tools/test integration

test-thorough: ## Tests on lab hosts, with every fault of docs/reliability.md (an hour more)
	$(PYTHON) tools/test thorough

dashboard: ## Show the dashboard as a live page (npm fetches 500 MB of packages at first, Node 22 is a wheel where there is none)
	dashboard/run

dashboard-shot: ## Draw the dashboard of the lab and check every panel (as make dashboard; needs Chromium)
	dashboard/run docs/dashboard.png

bench: ## Measure how fast the running service is (playbooks/bench.yml)
	.venv/bin/ansible-playbook --inventory $(INVENTORY) playbooks/bench.yml

timings: ## Time the converge and write docs/performance.md
	$(PYTHON) tests/bench/converge

lab-up: ## Boot the lab's host without converging it
	$(PYTHON) lab/lab up --bind-ro $${XDG_CACHE_HOME:-$$HOME/.cache}/sglang-lab/wheelhouse:/srv/wheelhouse

lab-down: ## Remove the lab and everything of it
	$(PYTHON) lab/lab down

lab-status: ## Show the lab's hosts
	$(PYTHON) lab/lab status

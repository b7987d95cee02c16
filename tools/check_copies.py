#!/usr/bin/env python3
"""Counts the machine code of the crates of a release build, and how much of it is the kernels' compiled again.

    tools/check_copies.py [target/release/deps]

The functions of convoke-kernels that other crates call take operands whose type is known at run time, so they are compiled
once, there. This fails if more than a twentieth of another crate's code is the kernels': then it calls a generic function. What
frees a value of the kernels, or converts one into a crate's own type, is not their code. Needs nm.
"""

import pathlib
import re
import subprocess
import sys

CRATES = ["convoke_kernels", "convoke_autograd", "convoke_data", "convoke_graph", "convoke_nn", "convoke"]
MOST = 0.05


def functions(library):
    """The size and the name of each function in a library."""
    listed = subprocess.run(["nm", "-CS", "--defined-only", library], capture_output=True, text=True, check=True)
    for line in listed.stdout.splitlines():
        match = re.match(r"[0-9a-f]+ ([0-9a-f]+) [TtWw] (.*)", line)
        if match:
            yield int(match[1], 16), match[2]


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "target/release/deps")
    failed = False
    print(f"{'crate':18} {'MB':>6} {'functions':>10} {'of kernels':>11} {'functions':>10}")
    for crate in CRATES:
        built = sorted(folder.glob(f"lib{crate}-*.rlib"), key=lambda file: file.stat().st_mtime)
        if not built:
            sys.exit(f"{folder} holds no build of {crate}: run `cargo build --release` first")
        all = list(functions(built[-1]))
        copies = [function for function in all if re.match(r"<?convoke_kernels::", function[1])]
        total, copied = (sum(size for size, _ in some) / 1e6 for some in (all, copies))
        print(f"{crate:18} {total:6.2f} {len(all):10} {copied:11.2f} {len(copies):10}")
        if crate != "convoke_kernels" and copied > MOST * total:
            failed = True
            for size, name in sorted(copies, reverse=True)[:10]:
                print(f"    {size:8} bytes: {name}")
    if failed:
        sys.exit("kernels are compiled again: take operands (Slice, SliceMut) in place of a generic type")


main()

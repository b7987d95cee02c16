"""Checks ONNX files that convoke wrote, with ONNX's checker and with onnxruntime.

    mkdir folder && CONVOKE_ONNX_WRITE="$PWD/folder" cargo test --test it -- are_written_for
    python tools/check_onnx.py folder

Beside NAME.onnx lies NAME.safetensors with inputs `input.B` and convoke's outputs `output.B` for batches of B images. onnxruntime must
give the same to 1e-4 of the largest value. Needs onnx, onnxruntime, safetensors and numpy.
"""

import argparse
import pathlib
import sys

import numpy as np
import onnx
import onnxruntime
from safetensors.numpy import load_file

TOLERANCE = 1e-4


def distance(found, expected):
    """The largest difference over the largest expected value; over 1 where only zeros are expected."""
    return float(np.abs(found - expected).max() / (np.abs(expected).max() or 1.0))


def check(path):
    """The largest distance of a file's outputs."""
    onnx.checker.check_model(str(path), full_check=True)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    tensors = load_file(path.with_suffix(".safetensors"))
    name = session.get_inputs()[0].name
    distances = []
    for key in sorted(tensors):
        if key.startswith("input."):
            output = session.run(None, {name: tensors[key]})[0]
            distances.append(distance(output, tensors[key.replace("input.", "output.")]))
    return max(distances)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    files = sorted(parser.parse_args().folder.glob("*.onnx"))
    if not files:
        sys.exit("there are no *.onnx files in this folder")
    failed = 0
    for path in files:
        try:
            found = check(path)
        except Exception as error:
            failed += 1
            print(f"{path.stem}: FAILED: {error}")
            continue
        good = found <= TOLERANCE
        failed += not good
        print(f"{path.stem}: {found:.1e}{'' if good else ' FAILED'}")
    sys.exit(f"{failed} of {len(files)} differ" if failed else 0)


if __name__ == "__main__":
    main()

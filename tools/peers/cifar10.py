"""CIFAR-10 in its binary layout: a record is a label and the three planes of an image of 32 x 32."""

import tarfile
from pathlib import Path

NAMES = "airplane automobile bird cat deer dog frog horse ship truck".split()
RECORD = 1 + 3 * 32 * 32


def read(folder, prefix):
    """The records of the files whose names begin with `prefix`, one after the other: the .bin files of a folder, or those packed in it."""
    packed = folder / "cifar-10-binary.tar.gz"
    if files := sorted(folder.glob("*.bin")):
        return b"".join(path.read_bytes() for path in files if path.name.startswith(prefix))
    with tarfile.open(packed) as archive:
        members = sorted((m for m in archive if Path(m.name).name.startswith(prefix)), key=lambda m: Path(m.name).name)
        return b"".join(archive.extractfile(member).read() for member in members)

#!/usr/bin/env python3
"""Write a folder of JPEGs, train/CLASS/IMAGE and val/CLASS/IMAGE, from CIFAR-10 in its binary layout, to try `--data folder` on.

    python tools/peers/make_photographs.py CIFAR_DIR OUT [--train 1600] [--val 400] [--varied] [--classes cat,dog]

CIFAR_DIR holds cifar-10-binary.tar.gz or its .bin files. Without --varied an image is 32 x 32, as it is. With it, images have five
sizes, every tenth is grey, every eighth lies on its side and says so in its Exif data, every sixth is progressive, and one in train
is cut off in the middle: --skip-broken leaves it out.

Needs Python 3.9 with Pillow.
"""

import argparse
from pathlib import Path

from PIL import Image

from cifar10 import NAMES, RECORD, read

SIDES = [(32, 32), (48, 40), (64, 96), (120, 90), (200, 150)]
ORIENTATION = 274


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cifar", type=Path, metavar="CIFAR_DIR")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--train", type=int, default=1600, help="images for training")
    parser.add_argument("--val", type=int, default=400, help="images for validation")
    parser.add_argument("--varied", action="store_true")
    parser.add_argument("--classes", default=",".join(NAMES), help="only images of these")
    args = parser.parse_args()
    wanted = args.classes.split(",")
    if unknown := set(wanted) - set(NAMES):
        parser.error(f"no such classes: {', '.join(sorted(unknown))}; CIFAR-10 has {', '.join(NAMES)}")
    for part, prefix, count in [("train", "data_batch", args.train), ("val", "test_batch", args.val)]:
        content = read(args.cifar, prefix)
        records = (content[start:start + RECORD] for start in range(0, len(content), RECORD))
        records = [record for record in records if NAMES[record[0]] in wanted]
        if len(records) < count:
            parser.error(f"{args.cifar} has {len(records)} images for {part}, not {count}")
        for index, record in enumerate(records[:count]):
            path = args.out / part / NAMES[record[0]] / f"{index:05}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, record, index if args.varied else None)
            if args.varied and part == "train" and index == count // 2:
                path.write_bytes(path.read_bytes()[:-400])


def write(path, record, index):
    """Writes an image; `index` chooses its variation."""
    planes = [Image.frombytes("L", (32, 32), record[start:start + 1024]) for start in (1, 1025, 2049)]
    image = Image.merge("RGB", planes)
    options = {"quality": 92}
    if index is not None:
        image = image.resize(SIDES[index % len(SIDES)], Image.Resampling.BICUBIC)
        if index % 10 == 3:
            image = image.convert("L")
        if index % 8 == 5:
            # Stored on its side; 6 says: turn it clockwise to show it.
            exif = Image.Exif()
            exif[ORIENTATION] = 6
            image, options["exif"] = image.transpose(Image.Transpose.ROTATE_90), exif
        options["progressive"] = index % 6 == 1
    image.save(path, "JPEG", **options)


if __name__ == "__main__":
    main()

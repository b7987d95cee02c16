"""Writes tests/photos: small made-up photographs of each kind, and what Pillow and torchvision make of them for evaluation.

NAME.bin holds 32 x 32 x 3 bytes: the photograph upright, in RGB, its shorter side resized to 37, the centre cut out. colours.bin
holds changes of colours. Needs Pillow, torchvision and numpy: `python crates/data/tests/make_photos.py`.
"""

from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance, ImageOps
from torchvision.transforms import CenterCrop, Compose, Resize

FOLDER = Path(__file__).parent / "photos"
PREPARE = Compose([Resize(round(32 / 0.875)), CenterCrop(32)])


def scene(height: int, width: int, seed: int) -> Image.Image:
    """Slopes, waves, an edge and a little noise."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    red = 255 * x / width
    green = 127 + 90 * np.sin(y / 5 + seed) * np.cos(x / 9)
    blue = np.where((x - width / 2) ** 2 + (y - height / 2) ** 2 < (min(height, width) / 3) ** 2, 220, 40)
    image = np.stack([red, green, blue], axis=-1) + random.normal(0, 3, (height, width, 3))
    return Image.fromarray(image.clip(0, 255).astype(np.uint8))


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    photo = scene(72, 96, 1)
    photo.save(FOLDER / "baseline.jpg", quality=90, subsampling=0)
    photo.save(FOLDER / "subsampled.jpg", quality=85, subsampling=2)
    photo.save(FOLDER / "progressive.jpg", quality=85, progressive=True)
    photo.save(FOLDER / "rotated.jpg", quality=90, exif=exif(6))
    photo.save(FOLDER / "mirrored.jpg", quality=90, exif=exif(5))
    photo.convert("L").save(FOLDER / "grey.jpg", quality=90)
    photo.convert("CMYK").save(FOLDER / "cmyk.jpg", quality=90)
    photo.save(FOLDER / "lossy.webp", quality=85)
    scene(30, 40, 7).save(FOLDER / "packed.tif", compression="tiff_lzw")
    scene(30, 150, 2).save(FOLDER / "wide.png", optimize=True)
    scene(23, 17, 3).save(FOLDER / "small.png", optimize=True)
    scene(40, 36, 4).save(FOLDER / "plain.bmp")
    scene(48, 60, 5).quantize(24).save(FOLDER / "palette.png", optimize=True)
    transparent = scene(40, 50, 6)
    transparent.putalpha(Image.fromarray(np.arange(2000, dtype=np.uint32).reshape(40, 50).astype(np.uint8)))
    transparent.save(FOLDER / "transparent.png", optimize=True)
    for file in sorted(FOLDER.iterdir()):
        if file.suffix != ".bin":  # What an earlier run wrote.
            image = ImageOps.exif_transpose(Image.open(file)).convert("RGB")
            file.with_suffix(".bin").write_bytes(PREPARE(image).tobytes())
    colours()


def colours() -> None:
    """A photograph of 12 x 14, then what Pillow's changes of colours make of it."""
    photo = scene(12, 14, 8)
    images = [photo]
    for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color, ImageEnhance.Sharpness):
        images += [enhance(photo).enhance(factor) for factor in (0.6, 1.7)]
    images += [ImageOps.posterize(photo, 3), ImageOps.solarize(photo, 100)]
    images += [ImageOps.autocontrast(photo), ImageOps.equalize(photo)]
    (FOLDER / "colours.bin").write_bytes(b"".join(image.tobytes() for image in images))


if __name__ == "__main__":
    main()

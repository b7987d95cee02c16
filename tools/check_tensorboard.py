"""Reads what `convoke train --tensorboard FOLDER` wrote with TensorBoard's own reader, and checks it against `--json FILE` of the run.

    convoke train --steps 20 --tensorboard folder --json run.json
    python tools/check_tensorboard.py folder run.json

Needs tensorboard.
"""

import argparse
import json
import pathlib

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("json", type=pathlib.Path)
    options = parser.parse_args()
    run = json.loads(options.json.read_text())["runs"][0]
    # 0 keeps all events.
    events = EventAccumulator(options.folder, size_guidance={"scalars": 0, "images": 0})
    events.Reload()

    losses = [event.value for event in events.Scalars("train/loss")]
    steps = [event.step for event in events.Scalars("train/loss")]
    expected = run["train_loss"]
    assert steps == list(range(1, len(expected) + 1)), steps
    assert all(abs(found - loss) <= 1e-6 * abs(loss) for found, loss in zip(losses, expected)), losses
    rates = events.Scalars("train/learning_rate")
    assert len(rates) == len(expected) and all(rate.value > 0 for rate in rates)
    validated = [event.value for event in events.Scalars("validation/loss")]
    assert len(validated) == len(run["validation"]), validated
    assert all(abs(found - epoch["loss"]) <= 1e-6 * epoch["loss"] for found, epoch in zip(validated, run["validation"]))

    tags = events.Tags()["images"]
    for tag in tags:
        image = events.Images(tag)[-1]
        assert image.width > 0 and image.height > 0 and image.encoded_image_string[:2] == b"\xff\xd8", tag
    assert tags, "no images"
    print(f"{len(steps)} steps, {len(validated)} validations, {len(tags)} images: as the run's JSON has them")


if __name__ == "__main__":
    main()

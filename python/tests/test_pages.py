"""The Python programs that README and the book show run as they are, those of a page one after the other."""

from pathlib import Path

import pytest
import torch
import torchvision

ROOT = Path(__file__).parents[2]


def blocks(page):
    return [block.split("\n```")[0] for block in page.read_text().split("\n```python\n")[1:]]


PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if blocks(page)]


def test_there_are_pages():
    assert {"README.md", "pytorch.md"} <= {page.name for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_programs_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # What a page's reader has: a model and images of their own.
    names = {"torch": torch, "model": torchvision.models.resnet18(num_classes=10), "images": torch.randn(2, 3, 64, 64)}
    for block in blocks(page):
        exec(compile(block, page.name, "exec"), names)

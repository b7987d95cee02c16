"""Random programs: the source of a `forward` with operations, views, writes in place, indices, branches and shared parameters."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn

#: Batch, height and width of all images; channels differ.
BATCH, SIZE = 2, 6


class Writer:
    """Writes a program line by line. It knows the shapes of variables."""

    def __init__(self, seed: int, modes: bool):
        self.random = random.Random(seed)
        #: Whether regions without gradients and branches may be written.
        self.modes = modes
        self.lines: list[str] = []
        self.shapes: dict[str, tuple[int, ...]] = {"x": (BATCH, 4, SIZE, SIZE), "y": (BATCH, 6, SIZE, SIZE)}
        self.count = 0

    def images(self, channels: int | None = None) -> str:
        """A variable that holds images."""
        found = [name for name, shape in self.shapes.items() if len(shape) == 4 and channels in (None, shape[1])]
        return self.random.choice(found[-6:]) if found else self.new(f"x[:, :1].repeat(1, {channels}, 1, 1)", (BATCH, channels, SIZE, SIZE))

    def new(self, expression: str, shape: tuple[int, ...]) -> str:
        self.count += 1
        name = f"v{self.count}"
        self.lines.append(f"{name} = {expression}")
        self.shapes[name] = shape
        return name

    def line(self) -> None:
        """One more line, or a few."""
        kinds = [
            self.convolution, self.convolution, self.norm, self.activation, self.arithmetic, self.write, self.write_part,
            self.view, self.index, self.unsupported, self.pool, self.reduction, self.dropout, self.join,
        ]
        if self.modes:
            kinds += [self.without_gradients, self.branch]
        self.random.choice(kinds)()

    def convolution(self) -> None:
        x = self.images()
        channels = self.shapes[x][1]
        if channels not in (4, 6):
            return
        out = self.random.choice([4, 6])
        kind = self.random.choice(["same", "pointwise", "grouped", "dilated"])
        options = {"same": "padding=1", "pointwise": "", "grouped": "padding=1, groups=2", "dilated": "padding=2, dilation=2"}[kind]
        bias = self.random.choice(["None", f"self.bias{out}"])
        self.new(f"F.conv2d({x}, self.{kind}{channels}to{out}, {bias}, {options})".replace(", )", ")"), (BATCH, out, SIZE, SIZE))

    def norm(self) -> None:
        channels = self.random.choice([4, 6])
        x = self.images(channels)
        self.new(f"self.bn{channels}({x})", self.shapes[x])

    def activation(self) -> None:
        x = self.images()
        function = self.random.choice(["F.relu({})", "F.silu({})", "torch.sigmoid({})", "F.leaky_relu({}, 0.1)", "F.relu({}, inplace=True)", "F.relu_({})", "F.hardswish({})", "{}.tanh()"])
        self.new(function.format(x), self.shapes[x])

    def arithmetic(self) -> None:
        x = self.images()
        y = self.images(self.shapes[x][1])
        self.new(f"{x} {self.random.choice(['+', '-', '*'])} {self.random.choice([y, y, '0.5'])}", self.shapes[x])

    def write(self) -> None:
        x = self.images()
        y = self.images(self.shapes[x][1])
        self.lines.append(self.random.choice([f"{x} += {y}", f"{x}.mul_(0.7)", f"{x}.add_({y}, alpha=0.3)", f"{x} *= 0.5", f"{x}.clamp_(-2, 2)", f"{x}.copy_({y} * 0.5)", f"{x}.zero_()", f"{x}.sigmoid_()", f"{x} -= 0.1"]))

    def write_part(self) -> None:
        x = self.images()
        part = self.random.choice(["[:, 1]", "[:, :2]", "[..., 0]", "[0]", "[:, 1:, ::2]", ".narrow(1, 0, 2)", ".transpose(2, 3)", ".flatten(2)"])
        change = self.random.choice([".mul_(0.5)", ".add_(0.1)", ".relu_()", ".zero_()"])
        kind = self.random.randrange(3)
        if kind == 0:
            self.lines.append(f"{x}{part}{change}")
        elif kind == 1 and part.startswith("["):
            self.lines.append(f"{x}{part} = {self.random.choice(['0.25', f'{x}{part} * 0.5'])}")
        else:
            self.count += 1
            self.lines += [f"part{self.count} = {x}{part}", f"part{self.count}{change}"]

    def view(self) -> None:
        x = self.images()
        batch, channels, height, width = self.shapes[x]
        same = [
            f"{x}.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)",
            f"{x}.flatten(2).view({batch}, {channels}, {height}, {width})",
            f"{x}.view({batch}, 2, {channels // 2}, {height}, {width}).transpose(1, 2).reshape({batch}, {channels}, {height}, {width})",
            f"{x}.unsqueeze(1).squeeze(1)",
            f"{x}.transpose(2, 3)",
            f"{x}.clone()",
            f"{x}.detach()",
            f"{x}.expand({batch}, {channels}, {height}, {width})",
            f"{x}.contiguous(memory_format=torch.channels_last)",
        ]
        if channels % 2:
            del same[2]
        self.new(self.random.choice(same), self.shapes[x])

    def index(self) -> None:
        x = self.images()
        channels = self.shapes[x][1]
        expression, count = self.random.choice(
            [("[:, [0, 2, 1]]", 3), ("[:, None][:, 0]", channels), ("[..., None].squeeze(-1)", channels), ("[:, 1:]", channels - 1),
             ("[:, torch.tensor([0, 1])]", 2), ("[:, ::2]", (channels + 1) // 2), ("[[1, 0]]", channels)]
        )
        if count >= 1 and (count >= 3 or channels >= 3):
            self.new(f"{x}{expression}" if channels >= 3 else x, (BATCH, count if channels >= 3 else channels, SIZE, SIZE))

    def unsupported(self) -> None:
        x = self.images()
        self.new(self.random.choice(["torch.roll({}, 1, 2)", "{}.flip(3)", "torch.special.i0({} * 0.1)", "{}.cumsum(2) * 0.2", "torch.sort({}, 3)[0]", "torch.atan({})", "torch.where({0} > 0, {0}, {0} * 0.1)"]).format(x), self.shapes[x])

    def pool(self) -> None:
        x = self.images()
        self.new(self.random.choice(["F.max_pool2d({}, 3, 1, 1)", "F.avg_pool2d({}, 3, 1, 1)", "F.interpolate(F.avg_pool2d({}, 2), scale_factor=2)", "F.pad({}, (1, 1, 1, 1))[:, :, 1:-1, 1:-1]"]).format(x), self.shapes[x])

    def reduction(self) -> None:
        x = self.images()
        self.new(self.random.choice(["{0} - {0}.mean((2, 3), keepdim=True)", "{0} * torch.sigmoid({0}.mean((1, 2, 3)))[:, None, None, None]", "{0} / (1 + {0}.square().sum(1, keepdim=True))", "{0} - {0}.amax(1, keepdim=True)"]).format(x), self.shapes[x])

    def dropout(self) -> None:
        x = self.images()
        self.new(f"F.dropout({x}, 0.2{self.random.choice(['', ', inplace=True'])})", self.shapes[x])

    def join(self) -> None:
        x, y = self.images(4), self.images(4)
        self.new(f"torch.cat([{x}.chunk(2, 1)[1], {y}], 1)", (BATCH, 6, SIZE, SIZE))

    def without_gradients(self) -> None:
        before, shapes = len(self.lines), dict(self.shapes)
        for _ in range(self.random.randint(1, 3)):
            self.random.choice([self.convolution, self.norm, self.activation, self.arithmetic, self.unsupported])()
        self.lines[before:] = ["with torch.no_grad():", *("    " + line for line in self.lines[before:]), "    pass"]
        self.shapes = shapes | self.shapes

    def branch(self) -> None:
        x = self.images()
        before, shapes = len(self.lines), dict(self.shapes)
        self.convolution()
        self.write()
        self.lines[before:] = [f"if {x}.sum() > {self.random.choice([-5, 0, 5])}:", *("    " + line for line in self.lines[before:]), "    pass"]
        self.shapes = shapes


def program(seed: int, modes: bool = False) -> str:
    """The source of a forward."""
    writer = Writer(seed, modes)
    for _ in range(writer.random.randint(4, 16)):
        writer.line()
    names = [name for name in writer.shapes if name not in "xy"] or ["x"]
    results = writer.random.sample(names[-8:], min(len(names), writer.random.randint(1, 3)))
    body = "\n".join("    " + line for line in writer.lines)
    return f"def forward(self, x, y):\n{body}\n    return [{', '.join(dict.fromkeys([*results, names[-1]]))}]\n"


class Program(nn.Module):
    """A module with the parameters that programs share."""

    def __init__(self, source: str):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        for channels in (4, 6):
            for out in (4, 6):
                for kind, shape in (("same", (channels, 3, 3)), ("pointwise", (channels, 1, 1)), ("grouped", (channels // 2, 3, 3)), ("dilated", (channels, 3, 3))):
                    weight = torch.randn(out, *shape, generator=generator, dtype=torch.float64) * (shape[0] * shape[1] * shape[2]) ** -0.5
                    self.register_parameter(f"{kind}{channels}to{out}", nn.Parameter(weight))
            self.register_parameter(f"bias{channels}", nn.Parameter(torch.randn(channels, generator=generator, dtype=torch.float64) * 0.1))
            self.add_module(f"bn{channels}", nn.BatchNorm2d(channels).double())
        self.source = source
        scope: dict = {"torch": torch, "F": F}
        # With a name of a file of its own, each program is code of its own to TorchDynamo.
        exec(compile(source, f"<program {hash(source)}>", "exec"), scope)
        self.run = scope["forward"]

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return self.run(self, x, y)

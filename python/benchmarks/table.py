#!/usr/bin/env python3
"""The table of what training costs on CPUs: whole steps of some thirty networks in PyTorch's fastest settings and with torch_convoke.

    python benchmarks/table.py run table.json [NETWORK ...] [--threads N] [--rounds N] [--precision f32|bf16|both]
    python benchmarks/table.py page table.json [MORE.json ...] --markdown docs/table.md --svg docs/images/table.svg [--html table.html]

`run` takes an hour or two, on a machine without other work, and writes what it has after each network: started again, it goes on where
it was, and another --precision adds to what is there. `page` makes a page of it. NETWORK is a name as in the list below; without any, all of them run. Networks of timm and
segmentation_models_pytorch need these packages.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import sys
import tempfile
import time
from html import escape
from pathlib import Path

from torch_convoke import benchmark
from torch_convoke.benchmark import Failure, Mistake, Result, Setting, Task

OWN = Path(__file__).resolve().parents[2] / "tools" / "peers" / "models.py"
#: What kind a network is, its name for readers, and what is trained: residual, plain, dense, mobile, modern, and for each pixel.
NETWORKS = [
    ("residual", "resnet20", Task(f"{OWN}:resnet20", 64, (32,))),
    ("residual", "resnet18", Task("resnet18", 64, (64,))),
    ("residual", "resnet50", Task("resnet50", 16, (224,))),
    ("residual", "resnext50_32x4d", Task("resnext50_32x4d", 8, (128,))),
    ("residual", "regnet_y_400mf", Task("regnet_y_400mf", 16, (224,))),
    ("residual", "seresnet50", Task("timm:seresnet50", 8, (128,))),
    ("residual", "res2net50", Task("timm:res2net50_26w_4s", 8, (128,))),
    ("residual", "darknet53", Task("timm:darknet53", 8, (128,))),
    ("plain", "vgg11_bn", Task("vgg11_bn", 8, (128,))),
    ("plain", "alexnet", Task("alexnet", 64, (224,))),
    ("plain", "squeezenet1_1", Task("squeezenet1_1", 16, (224,))),
    ("plain", "repvgg_a0", Task("timm:repvgg_a0", 16, (128,))),
    ("dense", "densenet121", Task("densenet121", 8, (224,))),
    ("dense", "googlenet", Task("googlenet", 16, (128,))),
    ("dense", "vovnet39a", Task("timm:vovnet39a", 8, (128,))),
    ("dense", "dla34", Task("timm:dla34", 16, (128,))),
    ("mobile", "mobilenet_v2", Task("mobilenet_v2", 16, (224,))),
    ("mobile", "mobilenet_v3_large", Task("mobilenet_v3_large", 16, (128,))),
    ("mobile", "mobilenetv4_conv_small", Task("timm:mobilenetv4_conv_small", 64, (64,))),
    ("mobile", "efficientnet_b0", Task("efficientnet_b0", 16, (128,))),
    ("mobile", "mnasnet1_0", Task("mnasnet1_0", 16, (128,))),
    ("mobile", "shufflenet_v2_x1_0", Task("shufflenet_v2_x1_0", 16, (224,))),
    ("mobile", "ghostnet_100", Task("timm:ghostnet_100", 16, (128,))),
    ("modern", "convnext_tiny", Task("convnext_tiny", 4, (224,))),
    ("modern", "convnextv2_atto", Task("timm:convnextv2_atto", 16, (128,))),
    ("modern", "hrnet_w18_small", Task("timm:hrnet_w18_small", 4, (224,))),
    ("modern", "efficientvit_b0", Task("timm:efficientvit_b0", 16, (128,))),
    ("pixels", "U-Net (resnet18)", Task("smp:Unet/resnet18", 4, (224,))),
    ("pixels", "DeepLabV3+ (mobilenet_v2)", Task("smp:DeepLabV3Plus/mobilenet_v2", 4, (224,))),
    ("pixels", "FPN (resnet18)", Task("smp:FPN/resnet18", 4, (224,))),
    ("pixels", "fcn_resnet50", Task("fcn_resnet50", 4, (128,))),
    ("pixels", "lraspp_mobilenet_v3_large", Task("lraspp_mobilenet_v3_large", 4, (224,))),
]
COLUMNS = ["batch", "pixels", "peer", "its step", "convoke", "ratio", "memory, peer", "convoke", "first, peer", "convoke"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="run|page")
    run = commands.add_parser("run", help="measure")
    run.add_argument("file", type=Path)
    run.add_argument("networks", nargs="*", metavar="NETWORK")
    run.add_argument("--threads", type=int)
    run.add_argument("--rounds", type=int, default=3)
    run.add_argument("--precision", choices=["f32", "bf16", "both"], default="both")
    run.set_defaults(command=run_all)
    page = commands.add_parser("page", help="make a page")
    page.add_argument("files", type=Path, nargs="+")
    page.add_argument("--markdown", type=Path)
    page.add_argument("--svg", type=Path)
    page.add_argument("--html", type=Path)
    page.set_defaults(command=make_page)
    arguments = parser.parse_args()
    arguments.command(arguments)


def run_all(arguments):
    names = {name for _, name, _ in NETWORKS}
    if unknown := set(arguments.networks) - names:
        sys.exit(f"error: no network {', '.join(sorted(unknown))}; there are {', '.join(sorted(names))}")
    precisions = benchmark.PRECISIONS if arguments.precision == "both" else (arguments.precision,)
    threads = arguments.threads or benchmark.available_threads()
    machine = benchmark.machine()
    table = json.loads(arguments.file.read_text()) if arguments.file.exists() else {"machine": machine, "threads": threads, "results": {}}
    if (table["machine"], table["threads"]) != (machine, threads):
        sys.exit(f"error: {arguments.file} is of {table['machine']} and {table['threads']} threads: name another file")
    chosen = [entry for entry in NETWORKS if not arguments.networks or entry[1] in arguments.networks]
    missing = [(name, task, left) for _, name, task in chosen if (left := precisions_left(table, name, precisions))]
    start = time.monotonic()
    for count, (name, task, wanted) in enumerate(missing):
        spent = time.monotonic() - start
        left = f", about {math.ceil(spent / count * (len(missing) - count) / 60)} minutes left" if count else ""
        print(f"{len(chosen) - len(missing) + count + 1} of {len(chosen)}: {name}{left}", file=sys.stderr, flush=True)
        task = Task(task.model, task.batch, task.size, threads)
        try:
            result = benchmark.measure(task, wanted, rounds=arguments.rounds)
        except (Mistake, Failure) as error:
            print(f"  {name} is left out: {error}", file=sys.stderr, flush=True)
            continue
        values = result.as_json()
        # A model of this repository has a path of this machine in its name.
        values["task"]["model"] = values["task"]["model"].rpartition("/")[2] if str(OWN) in task.model else task.model
        known = table["results"].setdefault(name, values)
        known["settings"].update(values["settings"])
        table["date"] = datetime.date.today().isoformat()
        write(arguments.file, json.dumps(table, indent=1) + "\n")
        for precision in wanted:
            peer = result.best_peer(precision)
            print(f"  {precision}: {result.ratio(ours_in(precision), peer):.2f} of {peer}", file=sys.stderr, flush=True)


def precisions_left(table, name, precisions):
    """The precisions in which a network has not been measured."""
    settings = table["results"].get(name, {}).get("settings", {})
    return tuple(precision for precision in precisions if ours_in(precision) not in settings)


def make_page(arguments):
    tables = [json.loads(file.read_text()) for file in arguments.files]
    if arguments.markdown:
        write(arguments.markdown, markdown(tables, arguments.svg))
    if arguments.svg:
        write(arguments.svg, picture(tables[0]))
    if arguments.html:
        write(arguments.html, html(tables))
    print("\n\n".join(sentence(table) for table in tables))


def rows_of(table, precision):
    """What a table shows of each network that has this precision: its kind, name, result, best peer, and ratios of time and memory."""
    rows = []
    for kind, name, _ in NETWORKS:
        if name not in table["results"]:
            continue
        result = Result.from_json(table["results"][name])
        ours = ours_in(precision)
        peer = result.best_peer(precision)
        if peer is None or ours not in result.settings:
            continue
        rows.append((kind, name, result, peer, result.ratio(ours, peer), training_bytes(result, ours) / training_bytes(result, peer)))
    return rows


def training_bytes(result, name):
    """What a process has resident beyond PyTorch's libraries, which take half a gigabyte."""
    found = result.settings[name]
    return found["bytes"] - found["idle"]


def ours_in(precision):
    """The name of convoke's setting."""
    return Setting("convoke", precision).name


def threads_of(table):
    return f"{table['threads']} thread{'s' if table['threads'] > 1 else ''}"


def sentence(table):
    """The geometric means."""
    parts = []
    for precision in benchmark.PRECISIONS:
        if rows := rows_of(table, precision):
            times, memory = (statistics.geometric_mean(row[place] for row in rows) for place in (4, 5))
            slower = [row[1] for row in rows if row[4] > 1]
            text = f"In {precision}, {len(rows)} networks take {times:.2f} of the time and {memory:.2f} of the memory of PyTorch's fastest setting, in the geometric mean"
            parts.append(f"{text}; {', '.join(slower) + ' took longer' if slower else 'none took longer'}.")
    return f"{table['machine']}, {threads_of(table)}, {table['date']}. " + " ".join(parts)


INTRODUCTION = """\
# What training costs on CPUs

Whole training steps of networks of torchvision, timm and segmentation_models_pytorch: forward, loss, backward, and SGD with momentum, on
noise in memory. Each network runs in eager PyTorch and through `torch.compile`, in the faster of its two memory formats and with malloc
told to keep memory, in single precision and under autocast to bfloat16, and with `torch_convoke.optimize(model)`. Each setting is a
process of its own; they take turns. The peer is PyTorch's fastest setting of the same precision. The ratio is the median over rounds of
convoke's time in the peer's, below 1 is faster. Memory is what the process had resident while it trained, beyond PyTorch's libraries.
"First" is the first step, compilation included; convoke begins in PyTorch, and measures in later steps. convoke asks Linux for large pages
by itself; PyTorch is not told to, with which (`GLIBC_TUNABLES=glibc.malloc.hugetlb=1`) an eager step of resnet18 takes 0.94 of its time.

`make table` makes this page anew; `python -m torch_convoke.benchmark model.py:make_model` does the same with a model of yours.
"""


def markdown(tables, svg):
    parts = [INTRODUCTION]
    if svg:
        parts.append(f"![The time of a training step in that of PyTorch's fastest setting](images/{svg.name})\n")
    for table in tables:
        parts.append(f"## {table['machine']}, {threads_of(table)}\n\n{sentence(table)}\n")
        for precision in benchmark.PRECISIONS:
            if rows := rows_of(table, precision):
                lines = ["| " + " | ".join([precision, *COLUMNS]) + " |", "|---|---:|---:|---|" + "---:|" * 7]
                lines += ["| " + " | ".join(cells) + " |" for cells in map(lambda row: cells_of(row, precision), rows)]
                parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def cells_of(row, precision):
    _, name, result, peer, ratio, _ = row
    ours = ours_in(precision)
    size = result.model["inputs"][0]
    gigabytes = [f"{training_bytes(result, setting) / 1e9:.2f} GB" for setting in (peer, ours)]
    first = [f"{result.settings[setting]['first']:.1f} s" for setting in (peer, ours)]
    times = [f"{1e3 * result.seconds(setting):.0f} ms" for setting in (peer, ours)]
    return [name, str(size[0]), str(size[-1]), peer.partition("-")[0], *times, f"{ratio:.2f}", *gigabytes, *first]


WIDTH, NAME, ROW, TOP = 760, 196, 19, 52
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f; } .name { font-weight: 600; } .small { fill: #57606a; }
.f32 { fill: #0969da; } .bf16 { fill: #8250df; } .rule { stroke: #d0d7de; } .one { stroke: #6e7781; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .small { fill: #9198a1; } .f32 { fill: #388bfd; } .bf16 { fill: #a371f7; } .rule { stroke: #3d444d; }
}
"""


def picture(table):
    """A bar for each network: convoke's time in the best peer's."""
    rows = {precision: {row[1]: row for row in rows_of(table, precision)} for precision in benchmark.PRECISIONS}
    names = [(kind, name) for kind, name, _ in NETWORKS if any(name in found for found in rows.values())]
    scale = (WIDTH - NAME - 50) / max([1.0, *(row[4] for found in rows.values() for row in found.values())])
    one = NAME + scale
    height = TOP + ROW * len(names) + 26
    label = "The time of a training step with convoke in that of PyTorch's fastest setting: shorter is better"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">',
        f"<style>{STYLE}</style>",
        f'<text class="name" x="0" y="14">{escape(label)}</text>',
        f'<rect class="f32" x="{NAME}" y="26" width="11" height="11" rx="2"/><text class="small" x="{NAME + 17}" y="36">f32</text>',
        f'<rect class="bf16" x="{NAME + 60}" y="26" width="11" height="11" rx="2"/><text class="small" x="{NAME + 77}" y="36">bf16, each against PyTorch in the same precision</text>',
    ]
    before = None
    for index, (kind, name) in enumerate(names):
        y = TOP + ROW * index
        if kind != before and before is not None:
            parts.append(f'<path class="rule" d="M0 {y - 2}H{WIDTH}"/>')
        before = kind
        parts.append(f'<text x="0" y="{y + 11}">{escape(name)}</text>')
        for place, precision in enumerate(benchmark.PRECISIONS):
            if row := rows[precision].get(name):
                width, top = scale * row[4], y + 8 * place
                parts.append(f'<rect class="{precision}" x="{NAME}" y="{top}" width="{width:.1f}" height="6" rx="2"/>')
        ratios = " ".join(f"{rows[precision][name][4]:.2f}" for precision in benchmark.PRECISIONS if name in rows[precision])
        most = max(rows[precision][name][4] for precision in benchmark.PRECISIONS if name in rows[precision])
        parts.append(f'<text class="small" x="{NAME + scale * most + 6:.1f}" y="{y + 11}">{ratios}</text>')
    parts += [
        f'<path class="one" d="M{one:.1f} {TOP - 6}V{TOP + ROW * len(names)}" stroke-dasharray="3 3"/>',
        f'<text class="small" x="0" y="{height - 6}">{escape(table["machine"])}, {threads_of(table)}, {table["date"]}</text>',
        "</svg>\n",
    ]
    return "\n".join(parts)


def html(tables):
    """The same as a page that needs no other file."""
    parts = [
        '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>What training costs on CPUs</title>',
        "<style>body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; color-scheme: light dark; }",
        "table { border-collapse: collapse; display: block; overflow-x: auto; } td, th { padding: 3px 9px; text-align: right; border-bottom: 1px solid #8884; }",
        "td:first-child, th:first-child { text-align: left; } svg { width: 100%; }</style>",
        "<h1>What training costs on CPUs</h1>",
    ]
    for table in tables:
        parts.append(f"<h2>{escape(table['machine'])}, {threads_of(table)}</h2><p>{escape(sentence(table))}</p>{picture(table)}")
        for precision in benchmark.PRECISIONS:
            if rows := rows_of(table, precision):
                lines = ["".join(f"<th>{escape(cell)}</th>" for cell in [precision, *COLUMNS])]
                lines += ["".join(f"<td>{escape(cell)}</td>" for cell in cells_of(row, precision)) for row in rows]
                parts.append("<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>")
    return "\n".join(parts) + "\n"


def write(file, text):
    """Replaces a file whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
    with os.fdopen(handle, "w") as out:
        out.write(text)
    os.chmod(name, 0o644)
    os.replace(name, file)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)

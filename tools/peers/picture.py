#!/usr/bin/env python3
"""Draw README's picture from what steps.py measured: time and memory of a step, the best peer and convoke. Print README's table.

    python tools/peers/picture.py steps.json docs/images/steps.svg

The bars of a model are relative to the longer one; beside them are the numbers. The picture suits light and dark pages.
"""

import json
import sys
from html import escape

WIDTH, ROW, TOP, BAR = 760, 62, 62, 17
NAME, PANEL, GAP = 128, 292, 24
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f; } .small { font-size: 12px; fill: #57606a; }
.name { font-weight: 600; } .peer { fill: #6e7781; } .convoke { fill: #0969da; }
.on { fill: #fff; } .rule { stroke: #d0d7de; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .small { fill: #9198a1; } .peer { fill: #59636e; } .convoke { fill: #388bfd; } .rule { stroke: #3d444d; }
}
"""


def main():
    source, target = sys.argv[1:]
    with open(source) as file:
        results = json.load(file)
    height = TOP + ROW * len(results) + 24
    machine, threads = results[0]["machine"], results[0]["threads"]
    label = "Time and memory of a training step, relative to the best peer: shorter is better"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">',
        f"<style>{STYLE}</style>",
        f'<text class="name" x="{NAME}" y="20">Time of a training step</text>',
        f'<text class="name" x="{NAME + PANEL + GAP}" y="20">Memory of the process</text>',
        f'<rect class="peer" x="{NAME}" y="32" width="11" height="11" rx="2"/>',
        f'<text class="small" x="{NAME + 17}" y="42">the best peer</text>',
        f'<rect class="convoke" x="{NAME + 110}" y="32" width="11" height="11" rx="2"/>',
        f'<text class="small" x="{NAME + 127}" y="42">convoke</text>',
        f'<text class="small" x="{NAME}" y="{height - 8}">{escape(machine)}, {threads} threads</text>',
    ]
    for index, result in enumerate(results):
        y = TOP + ROW * index
        rows = result["contenders"]
        peer, theirs = best_peer(rows)
        ours = rows["convoke, fused"]
        parts += [
            f'<path class="rule" d="M0 {y - 8}H{WIDTH}"/>',
            f'<text class="name" x="0" y="{y + 15}">{result["model"]}</text>',
            f'<text class="small" x="0" y="{y + 33}">batch {result["batch"]}</text>',
        ]
        peer = peer.replace("kept", "memory kept")
        time = [f"{row['seconds'] * 1e3:.0f} ms" for row in (theirs, ours)]
        memory = [f"{row['bytes'] / 1e9:.2f} GB" for row in (theirs, ours)]
        ratio = ours["seconds"] / theirs["seconds"]
        parts += panel(NAME, y, [theirs["seconds"], ours["seconds"]], [f"{time[0]}, {peer}", f"{time[1]}: {ratio:.2f}"])
        parts += panel(NAME + PANEL + GAP, y, [theirs["bytes"], ours["bytes"]], [memory[0], memory[1]])
    parts.append("</svg>\n")
    with open(target, "w") as file:
        file.write("\n".join(parts))
    print(table(results))


def best_peer(rows):
    """Name and row of the fastest contender in single precision that is not convoke."""
    peers = ((name, row) for name, row in rows.items() if not name.startswith("convoke") and "bf16" not in name)
    return min(peers, key=lambda row: row[1]["seconds"])


def table(results):
    lines = ["| | best peer | its time | convoke | ratio | memory, peer | memory, convoke |", "|---|---|---:|---:|---:|---:|---:|"]
    for result in results:
        rows = result["contenders"]
        peer, theirs = best_peer(rows)
        ours = rows["convoke, fused"]
        lines.append(
            f"| `{result['model']}`, batch {result['batch']} | {peer} | {theirs['seconds'] * 1e3:.0f} ms "
            f"| {ours['seconds'] * 1e3:.0f} ms | {ours['seconds'] / theirs['seconds']:.2f} "
            f"| {theirs['bytes'] / 1e9:.2f} GB | {ours['bytes'] / 1e9:.2f} GB |"
        )
    return "\n".join(lines)


def panel(x, y, values, texts):
    """The bars of a peer and of convoke, as long as their values, each with its text in it if there is room, else beside it."""
    most = max(values)
    for place, (kind, value, text) in enumerate(zip(["peer", "convoke"], values, texts)):
        width, top = PANEL * value / most, y + place * (BAR + 3)
        yield f'<rect class="{kind}" x="{x}" y="{top}" width="{width:.1f}" height="{BAR}" rx="2"/>'
        inside = width > 7.2 * len(text) + 12
        style, start = ('class="on"', x + 7) if inside else ("", x + width + 6)
        yield f'<text {style} x="{start:.1f}" y="{top + 13}" style="font-size: 12px">{escape(text)}</text>'


if __name__ == "__main__":
    main()

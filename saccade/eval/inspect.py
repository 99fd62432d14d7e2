"""Pictures of what each head read in prefill and in decode, over the attention it would have paid when dense."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from saccade.engine.watch.maps import FLOOR, ROWS_PER_CELL, Inspection, Maps
from saccade.errors import SaccadeError
from saccade.eval.capture import check_layers, token_ids, watch
from saccade.eval.figures import MISSING, available, new_figure
from saccade.files import written_whole
from saccade.llm import LLM, Prompt
from saccade.methods.policy import PolicyLike

PANELS = 8  # heads of one picture, unless a layer alone has more

Array = np.ndarray[Any, np.dtype[Any]]
# Read: from light to dark blue; unread: from cream to red. A read cell is darker than an unread one at equal weight.
_READ = ((0.75, 0.85, 0.94), (0.03, 0.13, 0.38))
_UNREAD = ((0.97, 0.95, 0.90), (0.86, 0.22, 0.13))


def inspect(
    llm: LLM,
    prompt: Prompt,
    out: Path,
    policy: PolicyLike = None,
    *,
    layers: Sequence[int] | None = None,
    max_tokens: int = 33,
    pixels: int = 160,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Path], Inspection]:
    """Run a prompt under a policy and write its maps as PNG files, and their numbers as heads.csv, into the folder
    ``out`` (made if need be).

    One picture holds whole layers, about ``PANELS`` heads. Without matplotlib there is none, and a warning says so.
    Raises SaccadeError for layers the model lacks, ``pixels`` out of range, a prompt that is too long or a folder that
    cannot be made, and as ``capture.watch``.
    """
    chosen = check_layers(layers, llm.model.spec.layers)
    ids = token_ids(llm, prompt)
    llm.engine.checks.prompt(ids)
    maps = Maps(len(ids), max_tokens - 1, chosen, pixels)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SaccadeError(f"the folder {out} cannot be made: {error.strerror}; give another one") from None
    watch(llm, ids, maps, policy, max_tokens=max_tokens, progress=progress)
    paths = [write_numbers(maps.seen, out / "heads.csv")]
    if not available():
        warnings.warn(MISSING, stacklevel=2)
        return paths, maps.seen
    heads = llm.model.spec.heads
    per_page = max(1, PANELS // heads)
    for first in range(0, len(chosen), per_page):
        page = chosen[first : first + per_page]
        runs = page[-1] - page[0] == len(page) - 1 > 0
        named = f"{page[0]:02d}-{page[-1]:02d}" if runs else "_".join(f"{layer:02d}" for layer in page)
        paths.append(out / f"layers_{named}.png")
        title = f"{llm.policy.text if policy is None else policy} on {len(ids):,} tokens"
        draw(maps.seen, page, paths[-1], title)
    return paths, maps.seen


def write_numbers(seen: Inspection, path: Path) -> Path:
    """Each head's density and retained mass by layer and phase, as csv."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("layer", "phase", "head", "density", "retained_mass"))
        for (phase, layer), found in sorted(seen.maps.items(), key=lambda one: (one[0][1], one[0][0] != "prefill")):
            for head, (density, mass) in enumerate(zip(found.density.tolist(), found.mass.tolist())):
                writer.writerow((layer, phase, head, f"{density:.6f}", f"{mass:.6f}"))
    return path


def shade(read: Array, unread: Array, share: Array) -> Array:
    """RGB [rows, columns, 3] of one head's map. A cell's ground shows how much of it was read (cream to light blue);
    its greatest weight darkens it on a log scale from ``FLOOR`` to 1, towards blue where that key was read and towards
    red where it was not. Cells without a causal pair are white."""
    ground = _mix(np.array(_UNREAD[0]), np.array(_READ[0]), np.sqrt(np.nan_to_num(share)))
    was_read = read >= unread
    ink = np.where(was_read[..., None], _READ[1], _UNREAD[1])
    colour = _mix(ground, ink, _log_scale(np.maximum(read, unread)))
    return np.where(np.isnan(share)[..., None], 1.0, colour)


def draw(seen: Inspection, layers: Sequence[int], path: Path, title: str) -> None:
    """Write one picture: a panel per head of ``layers``, its prefill map above its decode steps, and a key."""
    heads = next(iter(seen.maps.values())).read.shape[0]
    panels = [(layer, head) for layer in layers for head in range(heads)]
    columns = min(len(panels), 4 if heads < 8 else 8)
    lines = -(-len(panels) // columns)
    steps = any(phase == "decode" for phase, _ in seen.maps)
    height = 2.7 + (1.25 if steps else 0.0)
    size = (max(2.6 * columns + 0.8, 7.0), height * lines + 1.45)
    figure = new_figure(figsize=size, dpi=110, facecolor="white")
    margin = 1 / size[1]
    outer = figure.add_gridspec(
        lines, columns, left=0.62 / size[0], right=1 - 0.25 / size[0], top=1 - 0.9 * margin, bottom=0.92 * margin,
        hspace=0.2 if steps else 0.26, wspace=0.1,
    )  # fmt: skip
    figure.suptitle(title, fontsize=11, y=1 - 0.16 * margin, va="top", wrap=True)
    cell = next(iter(seen.maps.values())).cell
    note = "reads: keys read of those visible; keeps: true attention on them"
    rows = round(cell / max(1, cell // ROWS_PER_CELL))
    pooled = f"; a cell shows the greatest weight of {cell} keys x {rows} rows" if cell > 1 else ""
    figure.text(0.5, 1 - 0.38 * margin, note + pooled, fontsize=7.5, color="0.35", ha="center", va="top")
    for index, (layer, head) in enumerate(panels):
        line, column = divmod(index, columns)
        inner = outer[line, column].subgridspec(
            2 if steps else 1, 1, height_ratios=[2.1, 0.75][: 1 + steps], hspace=0.34
        )
        for row, phase in enumerate(("prefill", "decode")[: 1 + steps]):
            axes = figure.add_subplot(inner[row])
            last = index + columns >= len(panels) and (row == 1 or not steps)
            _panel(axes, seen, phase, layer, head, first=column == 0, last=last)
    _key(figure, size)
    with written_whole(path) as aside:
        figure.savefig(aside, format=path.suffix.removeprefix("."))


def _panel(axes: Any, seen: Inspection, phase: str, layer: int, head: int, first: bool, last: bool) -> None:
    found = seen.maps.get((phase, layer))
    top, bottom = (0, seen.prompt) if phase == "prefill" else (0, seen.total - seen.prompt)
    if found is None:
        axes.set_axis_off()
        return
    picture = shade(*(part[head].numpy() for part in (found.read, found.unread, found.share)))
    picture = (
        picture if phase == "prefill" else picture[:bottom]
    )  # an end token may come before the last step asked for
    reach = (picture.shape[1] * found.cell, picture.shape[0] * found.cell if phase == "prefill" else bottom)
    axes.imshow(picture, extent=(0, reach[0], reach[1], 0), aspect="auto", interpolation="nearest")
    axes.set_xlim(0, seen.total)
    axes.set_ylim(bottom, top)
    name = f"layer {layer}  head {head}\n" if phase == "prefill" else ""
    axes.set_title(
        f"{name}{phase}: reads {_percent(found.density[head])}, keeps {_percent(found.mass[head])}", fontsize=7.5, pad=3
    )
    axes.tick_params(labelsize=6.5, length=2, pad=1.5)
    axes.set_xticks([0, seen.prompt // 2, seen.prompt])
    axes.set_yticks([0, bottom // 2, bottom])
    if not last:
        axes.set_xticklabels([])
    else:
        axes.set_xlabel("key position", fontsize=7, labelpad=1)
    if not first:
        axes.set_yticklabels([])
    else:
        axes.set_ylabel("query" if phase == "prefill" else "step", fontsize=7, labelpad=2)
    for side in axes.spines.values():
        side.set_linewidth(0.5)
        side.set_color("0.6")


def _key(figure: Any, size: tuple[float, float]) -> None:
    """Two ramps at the foot: true weight on keys that were read, and on keys that were not."""
    width, height = min(2.3, 0.3 * size[0]), 0.13
    scale = np.geomspace(FLOOR, 1.0, 128)[None, :]
    nothing, all_read = np.zeros_like(scale), np.ones_like(scale)
    ramps = (("read", shade(scale, nothing, all_read)), ("not read", shade(nothing, scale, nothing)))
    for index, (name, ramp) in enumerate(ramps):
        left = size[0] / 2 + (0.35 if index else -width - 0.35)
        axes = figure.add_axes((left / size[0], 0.3 / size[1], width / size[0], height / size[1]))
        axes.imshow(ramp, aspect="auto", extent=(-4, 0, 0, 1))
        axes.set_yticks([])
        axes.set_xticks([-4, -3, -2, -1, 0], ["≤0.0001", "0.001", "0.01", "0.1", "1"], fontsize=6.5)
        axes.tick_params(length=2, pad=1.5)
        axes.set_title(f"true attention weight, key {name}", fontsize=7, pad=2.5)
        for side in axes.spines.values():
            side.set_linewidth(0.5)


def _mix(a: Array, b: Array, share: Array) -> Array:
    return np.asarray(a + (b - a) * np.asarray(share)[..., None])


def _log_scale(weights: Array) -> Array:
    return np.asarray(1 - np.log10(np.clip(weights, FLOOR, 1.0)) / np.log10(FLOOR))


def _percent(value: Tensor) -> str:
    percent = 100 * float(value)
    return f"{percent:.0f} %" if percent >= 99.95 else f"{percent:.1f} %" if percent >= 1 else f"{percent:.2g} %"

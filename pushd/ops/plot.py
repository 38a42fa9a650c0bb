"""Small bar charts as inline SVG: no script, no asset, and a text for those who do not see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

BAR = 4  # units of the drawing; it is scaled to its place on the page
GAP = 1


def bars(series: Mapping[str, Sequence[int]], *, slots: int, height: int, label: str) -> str:
    """Stacked bars, the newest at the right end.

    Args:
        series: CSS class to counts, oldest first, all of one length; stacked in this order from the ground up.
        slots: places for bars; earlier counts are left out, missing ones leave the left end empty.
        height: of the drawing, in units of which a bar takes BAR.
        label: says in words what is drawn.
    """
    recent = {name: list(counts)[-slots:] for name, counts in series.items()}
    stacks = [sum(stack) for stack in zip(*recent.values(), strict=True)]
    top = max(stacks, default=0)
    width = slots * BAR
    drawn = "".join(_paths(recent, stacks, top, width, height)) if top else ""
    return (
        f'<svg class="plot" viewBox="0 0 {width} {height}" preserveAspectRatio="none" role="img"'
        f' aria-label="{escape(label)}"><path class="ground" d="M0 {height - 0.5}h{width}"/>{drawn}</svg>'
    )


def _paths(recent: Mapping[str, Sequence[int]], stacks: Sequence[int], top: int, width: int, height: int) -> list[str]:
    ground = [float(height)] * len(stacks)
    paths = []
    for name, counts in recent.items():
        steps = []
        for place, count in enumerate(counts):
            if not count:
                continue
            tall = max(1.0, count / top * height)  # one in ten thousand is still to be seen
            ground[place] = max(0.0, ground[place] - tall)
            left = width - (len(counts) - place) * BAR
            steps.append(f"M{left} {ground[place]:.1f}h{BAR - GAP}v{tall:.1f}h-{BAR - GAP}z")
        if steps:
            paths.append(f'<path class="{name}" d="{"".join(steps)}"/>')
    return paths

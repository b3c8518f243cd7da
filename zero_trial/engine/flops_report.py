"""A ModelProfile as text: totals, the heaviest kinds of modules at each depth, and every module as a tree."""

from __future__ import annotations

from collections import defaultdict

from zero_trial.engine.flops import ModelProfile, ModuleRow

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def render(
    profile: ModelProfile,
    *,
    title: str,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    recompute_fwd_factor: float = 0.0,
) -> str:
    """Several lines. ``module_depth`` -1 means the deepest; 0 is the whole model only."""
    deepest = max(row.depth for row in profile.rows)
    depth = deepest if module_depth < 0 else min(module_depth, deepest)
    parts = [title, *_totals(profile, recompute_fwd_factor), *_heaviest(profile, depth, top_modules)]
    if detailed:
        parts += _tree(profile, depth)
    return "\n".join(parts)


def shorten(number: float, unit: str) -> str:
    """``1.234 GFLOP``: four digits with the prefix of the unit."""
    for size, prefix in _PREFIXES:
        if abs(number) >= size:
            return f"{number / size:.4g} {prefix}{unit}".rstrip()
    return f"{number:.4g} {unit}".rstrip()


def _totals(profile: ModelProfile, factor: float) -> list[str]:
    lines = [f"  parameters   {profile.parameters:,}"]
    phases = [
        ("forward", profile.forward_flops, profile.forward_ms),
        ("backward", profile.backward_flops, profile.backward_ms),
    ]
    for name, flops, ms in phases:
        if flops or ms:
            rate = shorten(flops / (ms / 1e3), "FLOP/s") if ms else "-"
            lines.append(f"  {name:<11}  {shorten(flops, 'FLOP')} in {ms:.3f} ms: {rate}")
    lines.append(f"  achieved     {shorten(profile.achieved, 'FLOP/s')}")
    if factor:
        lines.append(
            f"  without recomputation ({factor:g} of forward)   {shorten(profile.model_flops(factor), 'FLOP')}"
        )
    peak = profile.peak
    lines.append(
        f"  MFU          {profile.utilisation(factor):.1%} of {shorten(peak.per_second, 'FLOP/s')} ({peak.source})"
    )
    lines.append("  Matrix products, convolutions and attention are counted, a multiply-add as two.")
    return lines


def _heaviest(profile: ModelProfile, depth: int, top: int) -> list[str]:
    """At each depth, the kinds of modules that do most operations."""
    lines = [
        f"  heaviest kinds of modules (top {top} per depth; operations of forward and backward, parameters, ms of forward):"
    ]
    for level in range(depth + 1):
        kinds: dict[str, list[ModuleRow]] = defaultdict(list)
        for row in profile.rows:
            if row.depth == level:
                kinds[row.kind].append(row)
        ordered = sorted(kinds.items(), key=lambda item: -sum(_flops(row) for row in item[1]))
        for kind, rows in ordered[:top]:
            flops, parameters = sum(map(_flops, rows)), sum(row.parameters for row in rows)
            ms = sum(row.milliseconds or 0.0 for row in rows)
            lines.append(
                f"    depth {level}: {kind} x {len(rows)}: {shorten(flops, 'FLOP')}, {parameters:,}, {ms:.3f} ms"
            )
    return lines


def _tree(profile: ModelProfile, depth: int) -> list[str]:
    cells = [("module", "parameters", "forward", "backward", "share", "ms")]
    total = profile.forward_flops + profile.backward_flops
    for row in profile.rows:
        if row.depth <= depth:
            label = "  " * row.depth + (row.name.rpartition(".")[2] + ": " if row.name else "") + row.kind
            share = f"{_flops(row) / total:.1%}" if total else "-"
            ms = f"{row.milliseconds:.3f}" if row.milliseconds is not None else "-"
            flops = (shorten(row.forward_flops, "FLOP"), shorten(row.backward_flops, "FLOP"))
            cells.append((label, f"{row.parameters:,}", *flops, share, ms))
    widths = [max(len(row[column]) for row in cells) for column in range(6)]
    return [
        f"    {row[0]:<{widths[0]}}  "
        + "  ".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in cells
    ]


def _flops(row: ModuleRow) -> int:
    return row.forward_flops + row.backward_flops

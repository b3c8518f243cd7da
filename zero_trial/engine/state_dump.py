"""``dump_state``: what an engine starts with, as text: its whole configuration, its mesh, and how its parameters lie in units."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from zero_trial.config.report import render_report
from zero_trial.config.sections import DsConfig
from zero_trial.zero.unit import Unit

if TYPE_CHECKING:
    from zero_trial.engine.engine import Engine


def describe_state(engine: Engine) -> str:
    """Several lines. Pure but for reading ``engine``."""
    shape, batch = engine.mesh.shape, engine.wiring.batch
    policy = engine.wiring.policy
    dtypes = ", ".join(f"{name} {str(dtype).removeprefix('torch.')}" for name, dtype in _dtypes(policy).items())
    return "\n".join(
        [
            "configuration:",
            render_report(_without_secrets(engine.config), everything=True),
            f"mesh: {shape}",
            f"batch: {batch.train_batch_size} = {batch.micro_batch_size} x {batch.accumulation} x {engine.dp_world_size} ranks",
            f"plan: {engine.wiring.plan.describe()}",
            f"dtypes: {dtypes}",
            units_table(engine.sharded.units),
        ]
    )


def _without_secrets(config: DsConfig) -> DsConfig:
    if config.comet.api_key is None:
        return config
    return dataclasses.replace(config, comet=dataclasses.replace(config.comet, api_key="(not shown)"))


def units_table(units: list[Unit]) -> str:
    """One row per unit: parameters, elements, elements of this rank's shard, dtype, how long it lives."""
    rows = [("unit", "parameters", "elements", "shard", "dtype", "lives")]
    for unit in units:
        layout = unit.layout
        dtype = str(unit.dtype).removeprefix("torch.")
        rows.append(
            (
                unit.name,
                f"{len(unit.params):,}",
                f"{layout.numel:,}",
                f"{layout.shard_numel:,}",
                dtype,
                unit.plan.params.value,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _dtypes(policy: object) -> dict[str, object]:
    names = {"parameters": "param", "gradients": "grad", "wire": "comm", "masters": "master", "buffers": "buffer"}
    return {word: getattr(policy, name) or "as they are" for word, name in names.items()}

"""What an engine starts with, as text."""

from __future__ import annotations

from tests.support.models import TinyLM, make_engine
from zero_trial.engine.observe import describe_state, groups_table


def test_configuration_and_units():
    zero = {"stage": 3, "param_persistence_threshold": 0}
    engine = make_engine(TinyLM, {"zero_optimization": zero, "bf16": {"enabled": True}, "gradient_clipping": 0.5})
    text = describe_state(engine.config, engine.resolved, engine.mesh, engine.sharded.groups)
    assert "gradient_clipping " in text and "scheduler" not in text
    assert "zero_optimization.reduce_bucket_size" in text  # defaults too
    assert "batch: 8 = 8 x 1 x 1 ranks" in text
    assert "parameters bfloat16, gradients bfloat16, wire bfloat16, masters float32, buffers bfloat16" in text
    rows = groups_table(engine.sharded.groups).splitlines()
    assert rows[0].split() == ["unit", "parameters", "elements", "shard", "dtype", "lives"]
    assert len(rows) == 1 + len(engine.sharded.groups) and text.endswith("\n".join(rows))
    assert sum(int(row.split()[2].replace(",", "")) for row in rows[1:]) >= sum(
        p.numel() for p in engine.module.parameters()
    )


def test_secrets_are_not_shown():
    engine = make_engine(TinyLM, {"comet": {"api_key": "topsecret"}})
    text = describe_state(engine.config, engine.resolved, engine.mesh, engine.sharded.groups)
    assert "topsecret" not in text and "(not shown)" in text

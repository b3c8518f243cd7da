"""One spelling per key."""

from __future__ import annotations

from typing import Any

import pytest

from zero_trial.ds_config.canonical import Canonical
from zero_trial.schema.document import Document, Location


def run(value: dict[str, Any]) -> tuple[dict[str, Any], list[str], list[str]]:
    result = Canonical(Document.of(value))
    return result.value, [str(fault) for fault in result.faults], result.notes


def test_aliases_and_old_keys():
    value, faults, notes = run(
        {"bfloat16": {"enabled": True}, "zero_optimization": {"stage3_max_live_parameters": 5, "cpu_offload": False}}
    )
    assert value == {"bf16": {"enabled": True}, "zero_optimization": {"max_live_parameters": 5}}
    assert faults == [] and notes == ["bfloat16: read as bf16."]


def test_lines_follow_their_keys():
    places = {
        ("zero_optimization", "stage3_max_live_parameters"): Location("f", 3),
        ("optimizer", "params", "lr"): Location("f", 9),
    }
    value = {"zero_optimization": {"stage3_max_live_parameters": 5}, "optimizer": {"params": {"lr": 1}}}
    document = Canonical(Document(value, places)).document
    assert document.at(("zero_optimization", "max_live_parameters")).line == 3
    assert document.at(("optimizer", "params", "lr")).line == 9


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (
            {"zero_optimisation": {}},
            'zero_optimisation: unknown key. Did you mean "zero_optimization"? (DeepSpeed would ignore this and train without ZeRO.)',
        ),
        ({"qqq": 1}, "qqq: unknown key. (DeepSpeed would ignore this.)"),
        ({"fp16": {"qqq": 1}}, "fp16.qqq: unknown key"),
        ({"pipeline": {"seed_layer": True}}, 'pipeline.seed_layer: unknown key. Did you mean "seed_layers"? (DeepSpeed would ignore this.)'),
        ({"fp16": True}, 'fp16: not a section: got true, expected an object. Write {"enabled": true}.'),
        ({"pipeline": 3}, "pipeline: not a section: got 3, expected an object"),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, "bfloat16: the same section as bf16. Keep one of them."),
        ({"zero_optimization": {"cpu_offload": 3}}, "zero_optimization.cpu_offload: wrong value: got 3, expected true or false"),
        ({"amp": True}, "amp: not a section"),
        ({"amp": {"enabled": 3}}, "amp.enabled: wrong value"),
        (
            {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optimizer.device: the same key as zero_optimization.cpu_offload. Keep device and remove the other.",
        ),
    ],
)  # fmt: skip
def test_faults(value: dict[str, Any], fault: str):
    assert run(value)[1][0].startswith(fault)


def test_null_is_left_out_and_an_empty_section_stays():
    assert run({"train_batch_size": None, "optimizer": {}, "fp16": None}) == ({"optimizer": {}}, [], [])


def test_an_auto_switch_of_apex_is_off():
    assert run({"amp": {"enabled": "auto", "opt_level": "auto"}}) == ({}, [], [])


def test_limits_that_trl_writes_beside_the_section_are_not_read():
    beside = {"zero_optimization.reduce_bucket_size": 9, "zero_optimization.stage3_prefetch_bucket_size": 8.1}
    value, faults, notes = run({"zero_optimization": {"stage": 3, "reduce_bucket_size": 4}} | beside)
    assert value == {"zero_optimization": {"stage": 3, "reduce_bucket_size": 4}}
    assert faults == []
    assert [note.partition(":")[0] for note in notes] == list(beside)
    assert len(run({"zero_optimization.stage": 3})[1]) == 1

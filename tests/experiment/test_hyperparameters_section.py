"""``hyperparameters``: what is accepted, what is not, and how a nested "type" is to be written."""

from __future__ import annotations

import pytest

from tests.experiment.written import judge, refused, section
from zero_trial.experiment.hyperparameters import NESTED_TYPE, NO_COUNT, check_counts


@pytest.mark.parametrize(
    ("space", "fault"),
    [
        ("{}", None),
        ("null", None),
        ("{a: 1, b: x, c: [1, x], d: true, e: null, f: 0.5}", None),
        ("{a: {b: {c: {}}}}", None),
        ("{a: {type: int, minval: -3, maxval: 3}}", None),
        ("{a: {type: int, minval: 0, maxval: 3, count: 4}}", None),
        ("{a: {type: double, minval: 0, maxval: 1.5, count: null}}", None),
        ("{a: {type: log, base: 10, minval: -5, maxval: -1.5}}", None),
        ("{a: {type: categorical, vals: [1, x, null, {type: Adam}]}}", None),
        ("{a: {type: const, val: {type: Adam, params: {}}}}", None),
        ("{a: {type: const, val: null}}", None),
        ("{a: [1, {b: c}, [x], {type: const, val: 3}]}", None),
        ("{type: Adam}", None),
        ("{global_batch_size: 64}", None),
        ("{global_batch_size: many}", None),
        ("{a: [{type: Adam}, {type: int, minval: 0}]}", None),
        ("{global_batch_size: {type: int, minval: 1, maxval: 64}}", None),
        ("{global_batch_size: {type: const, val: 64}}", None),
        ("{global_batch_size: {type: categorical, vals: [16, 32]}}", None),
        ("[]", "hyperparameters: [] is not a map"),
        ("5", "hyperparameters: 5 is not a map"),
        ("{a: {type: Adam}}", f"hyperparameters.a: {NESTED_TYPE}"),
        ("{a: {type: null}}", f"hyperparameters.a: {NESTED_TYPE}"),
        ("{a: {type: 3}}", f"hyperparameters.a: {NESTED_TYPE}"),
        ("{a: {type: Int, minval: 0, maxval: 1}}", f"hyperparameters.a: {NESTED_TYPE}"),
        ("{a: {b: {type: {type: categorical, vals: [x]}}}}", f"hyperparameters.a.b: {NESTED_TYPE}"),
        ("{a: {type: int, minval: 0}}", "hyperparameters.a.maxval: is a required property"),
        ("{a: {type: int, minval: 0, maxval: 1.5}}", "hyperparameters.a.maxval: 1.5 is not an integer"),
        ("{a: {type: int, minval: 3, maxval: 3}}", "hyperparameters.a: minval must be less than maxval"),
        ("{a: {type: int, minval: 4, maxval: 3}}", "hyperparameters.a: minval must be less than maxval"),
        ("{a: {type: int, minval: 0, maxval: 3, count: 0}}", "hyperparameters.a.count: 0 is less than 1"),
        ("{a: {type: int, minval: 0, maxval: 3, step: 2}}", "hyperparameters.a.step: unknown property."),
        ("{a: {type: double, minval: zero, maxval: 3}}", 'hyperparameters.a.minval: "zero" is not a number'),
        ("{a: {type: double, minval: 0, maxval: 3, base: 2}}", "hyperparameters.a.base: unknown property."),
        ("{a: {type: log, minval: 0, maxval: 3}}", "hyperparameters.a.base: is a required property"),
        ("{a: {type: log, base: 0, minval: 0, maxval: 3}}", "hyperparameters.a.base: 0 is not more than 0"),
        (
            "{a: {type: log, base: 10, minval: 0, maxval: 400}}",
            "hyperparameters.a: base to the power of minval or maxval is not a finite number",
        ),
        ("{a: {type: double, minval: -1.7e+308, maxval: 1.7e+308}}", "hyperparameters.a: the range is not finite"),
        ("{a: {type: categorical}}", "hyperparameters.a.vals: is a required property"),
        ("{a: {type: categorical, vals: []}}", "hyperparameters.a.vals: [] is not a list of values"),
        ("{a: {type: categorical, vals: x}}", 'hyperparameters.a.vals: "x" is not a list of values'),
        ("{a: {type: categorical, vals: [1], minval: 0}}", "hyperparameters.a.minval: unknown property."),
        ("{a: {type: const}}", "hyperparameters.a.val: is a required property"),
        ("{a: {type: const, val: 1, vals: [1]}}", 'hyperparameters.a.vals: unknown property. Did you mean "val"?'),
    ],
)
def test_spaces(space: str, fault: str | None):
    judge(f"hyperparameters: {space}", fault)


@pytest.mark.parametrize(
    ("ds_config", "accepted"),
    [
        ("{optimizer: {type: Adam, params: {lr: 0.1}}}", False),
        ("{optimizer: {type: {type: categorical, vals: [Adam, Lamb]}}}", False),
        ("{optimizer: {type: const, val: {type: Adam, params: {lr: 0.1}}}}", True),
        ("{type: const, val: {optimizer: {type: Adam}, scheduler: {type: WarmupLR}}}", True),
        ("{optimizer: {type: categorical, vals: [{type: Adam, params: {}}, {type: Lamb}]}}", True),
        ("{optimizer: {params: {lr: {type: log, base: 10, minval: -5, maxval: -3}}}}", True),
        ("{optimizer: {type_: Adam}}", True),
        ("{optimizer: {type_: {type: categorical, vals: [Adam, Lamb]}}}", True),
    ],
)
def test_the_forms_of_a_ds_config(ds_config: str, accepted: bool):
    judge(
        f"hyperparameters: {{ds_config: {ds_config}}}",
        None if accepted else f"hyperparameters.ds_config.optimizer: {NESTED_TYPE}",
    )


def test_anything_goes_under_data():
    assert section("data: {ds_config: {optimizer: {type: Adam}}, type: x}", "data")["type"] == "x"


def test_a_nested_type_is_explained():
    words, form = refused("hyperparameters: {ds_config: {optimizer: {type: Adam, params: {lr: 0.1}}}}")
    assert words == (
        '<config>.hyperparameters.ds_config.optimizer: if a hyperparameter object\'s ["type"] is set, '
        'it must be one of "int", "double", "log", const", or "categorical"'
    )
    assert "Write optimizer: {type_: Adam, ...} for ds_config's type" in form
    assert 'or optimizer: {type: const, val: {type: "Adam", params: ' in form
    _, elsewhere = refused("hyperparameters: {loss: {type: focal}}")
    assert elsewhere.endswith('Write loss: {type: const, val: {type: "focal"}}')


@pytest.mark.parametrize(
    ("space", "where"),
    [
        ("{a: {type: double, minval: 0, maxval: 1}}", "a"),
        ("{a: {b: {type: int, minval: 0, maxval: 1, count: null}}}", "a.b"),
        ("{a: {type: log, base: 2, minval: 0, maxval: 1}}", "a"),
        ("{a: [{type: int, minval: 0, maxval: 1}]}", "a[0]"),
        ("{a: {type: double, minval: 0, maxval: 1, count: 3}, b: {type: categorical, vals: [1]}, c: 3}", None),
    ],
)
def test_a_grid_needs_counts(space: str, where: str | None):
    fault = None if where is None else f"hyperparameters.{where}: {NO_COUNT}"
    judge(f"searcher: {{name: grid, metric: loss}}\nhyperparameters: {space}", fault)


def test_counts_are_not_looked_for_in_a_const():
    assert check_counts({"type": "const", "val": {"type": "int"}}, ("x",)) == []

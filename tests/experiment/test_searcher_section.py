"""``searcher``: what is accepted, what is not."""

from __future__ import annotations

import pytest

from tests.experiment.written import judge, refused, section

LR = "hyperparameters: {lr: {type: double, minval: 0, maxval: 1, count: 2}}\n"
UNION = 'searcher: is not an object where object["name"] is one of single, random, grid or adaptive_asha'
LENGTH = 'searcher.max_length: a length object must have one attribute named "batches", "records", or "epochs", with a positive integer'
REQUIRED = "searcher: max_time and time_metric are required. Write "
ASHA = "name: adaptive_asha, metric: loss, max_trials: 8"


@pytest.mark.parametrize(
    ("searcher", "fault"),
    [
        ("{name: single, metric: loss}", None),
        ("{name: single, metric: loss, smaller_is_better: false}", None),
        ("{name: single, metric: loss, smaller_is_better: null}", None),
        ("{name: single, metric: loss, max_length: {batches: 5}}", None),
        ("{name: single, metric: loss, max_length: {epochs: 5}}", None),
        ("{name: single, metric: loss, max_length: {records: 5}}", None),
        ("{name: single, metric: loss, max_length: 5}", None),
        ("{name: single, metric: loss, max_length: null}", None),
        ("{name: single, metric: loss, source_trial_id: 4}", None),
        ("{name: single, metric: loss, source_checkpoint_uuid: abc}", None),
        ("{name: random, metric: loss, max_trials: 3}", None),
        ("{name: random, metric: loss, max_trials: 3, max_concurrent_trials: 0, max_length: {epochs: 1}}", None),
        ("{name: grid, metric: loss}", None),
        ("{name: grid, metric: loss, max_concurrent_trials: 2}", None),
        (f"{{{ASHA}, max_time: 100, time_metric: batches}}", None),
        (f"{{{ASHA}, max_time: 100, time_metric: batches, max_length: {{batches: 100}}}}", None),
        (f"{{{ASHA}, max_time: 100, time_metric: batches, max_length: 100, stop_once: true}}", None),
        (f"{{{ASHA}, max_time: 9, time_metric: epochs, mode: aggressive, divisor: 2.5, max_rungs: 3}}", None),
        (f"{{{ASHA}, max_time: 9, time_metric: epochs, bracket_rungs: [2, 1], max_concurrent_trials: 2}}", None),
        ("{metric: loss}", "searcher.name: is a required property"),
        ("{name: single}", "searcher.metric: is a required property"),
        ("{name: single, metric: null}", "searcher.metric: is a required property"),
        ("{name: single, metric: 5}", "searcher.metric: 5 is not a string"),
        ("{name: singel, metric: loss}", UNION),
        ("{name: 5, metric: loss}", UNION),
        ("[]", "searcher: [] is not a map"),
        ("null", "searcher: is a required property"),
        (
            '{name: single, metric: loss, smaller_is_better: "yes"}',
            'searcher.smaller_is_better: "yes" is neither true nor false',
        ),
        ("{name: single, metric: loss, max_trials: 3}", "searcher.max_trials: unknown property."),
        ("{name: single, metric: loss, max_time: 3}", "searcher.max_time: unknown property."),
        ("{name: single, metric: loss, metrics: x}", 'searcher.metrics: unknown property. Did you mean "metric"?'),
        ("{name: single, metric: loss, max_length: {batches: 0}}", LENGTH),
        ("{name: single, metric: loss, max_length: {steps: 1}}", LENGTH),
        ("{name: single, metric: loss, max_length: {batches: 1, epochs: 1}}", LENGTH),
        ("{name: single, metric: loss, max_length: {batches: 1.5}}", LENGTH),
        ("{name: single, metric: loss, max_length: {}}", LENGTH),
        ("{name: single, metric: loss, max_length: 0}", LENGTH),
        ('{name: single, metric: loss, max_length: "100"}', LENGTH),
        (
            "{name: single, metric: loss, source_trial_id: 4, source_checkpoint_uuid: abc}",
            "searcher: at most one of source_trial_id or source_checkpoint_uuid may be set",
        ),
        ("{name: single, metric: loss, source_trial_id: four}", 'searcher.source_trial_id: "four" is not an integer'),
        ("{name: random, metric: loss}", "searcher.max_trials: is a required property"),
        ("{name: random, metric: loss, max_trials: 0}", "searcher.max_trials: 0 is less than 1"),
        ("{name: random, metric: loss, max_trials: 2.0}", None),
        ("{name: random, metric: loss, max_trials: 2.5}", "searcher.max_trials: 2.5 is not an integer"),
        ("{name: random, metric: loss, max_trials: true}", "searcher.max_trials: true is not an integer"),
        (
            "{name: random, metric: loss, max_trials: 3, max_concurrent_trials: -1}",
            "searcher.max_concurrent_trials: -1 is less than 0",
        ),
        ("{name: grid, metric: loss, max_trials: 3}", "searcher.max_trials: unknown property."),
        (
            f"{{{ASHA}}}",
            f"{REQUIRED}max_time: 1000 and time_metric: batches",
        ),
        (
            f"{{{ASHA}, max_time: 5}}",
            f"{REQUIRED}max_time: 1000 and time_metric: batches",
        ),
        (
            f"{{{ASHA}, time_metric: batches}}",
            f"{REQUIRED}max_time: 1000 and time_metric: batches",
        ),
        (
            f"{{{ASHA}, max_length: {{records: 5}}}}",
            f"{REQUIRED}max_time: 5 and time_metric: records instead of max_length",
        ),
        (f"{{{ASHA}, max_length: 5}}", f"{REQUIRED}max_time: 5 and time_metric: batches instead of max_length"),
        (f"{{{ASHA}, max_time: 0, time_metric: batches}}", "searcher.max_time: 0 is less than 1"),
        (
            "{name: adaptive_asha, metric: loss, max_time: 5, time_metric: b}",
            "searcher.max_trials: is a required property",
        ),
        (
            f"{{{ASHA}, max_time: 5, time_metric: b, mode: brave}}",
            'searcher.mode: "brave" is not one of aggressive, standard, conservative',
        ),
        (f"{{{ASHA}, max_time: 5, time_metric: b, divisor: 1}}", "searcher.divisor: 1 is not more than 1"),
        (f"{{{ASHA}, max_time: 5, time_metric: b, max_rungs: 0}}", "searcher.max_rungs: 0 is less than 1"),
        (f"{{{ASHA}, max_time: 5, time_metric: b, bracket_rungs: [0]}}", "searcher.bracket_rungs[0]: 0 is less than 1"),
        (f"{{{ASHA}, max_time: 5, time_metric: b, bracket_rungs: 2}}", "searcher.bracket_rungs: 2 is not a list"),
        (f"{{{ASHA}, max_time: 5, time_metric: b, stop_once: 1}}", "searcher.stop_once: 1 is neither true nor false"),
    ],
)
def test_searchers(searcher: str, fault: str | None):
    judge(f"{LR}searcher: {searcher}", fault)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("adaptive", "Use adaptive_asha with max_trials instead of budget."),
        ("adaptive_simple", "Use adaptive_asha with the same max_trials."),
        ("sync_halving", "Use adaptive_asha with bracket_rungs: [num_rungs]."),
        ("async_halving", "Use adaptive_asha with bracket_rungs: [num_rungs]."),
        ("pbt", "Use adaptive_asha, or random."),
        ("custom", "Use single, random, grid or adaptive_asha."),
    ],
)
def test_searchers_that_are_gone_say_what_to_write(name: str, instead: str):
    (message,) = refused(f"searcher: {{name: {name}, metric: loss, max_trials: 3, num_rungs: 2}}")
    assert message.startswith("<config>.searcher.name: ") and message.endswith(instead)


def test_defaults():
    assert section(f"{LR}searcher: {{{ASHA}, max_time: 9, time_metric: epochs}}", "searcher") == {
        "name": "adaptive_asha",
        "metric": "loss",
        "smaller_is_better": True,
        "source_trial_id": None,
        "source_checkpoint_uuid": None,
        "max_trials": 8,
        "max_time": 9,
        "time_metric": "epochs",
        "max_concurrent_trials": 16,
        "mode": "standard",
        "divisor": 4,
        "max_rungs": 5,
        "bracket_rungs": [],
    }
    rungs = f"{LR}searcher: {{{ASHA}, max_time: 9, time_metric: epochs, bracket_rungs: [1, 3, 2]}}"
    assert section(rungs, "searcher")["bracket_rungs"] == [3, 2, 1]
    assert section("searcher: {name: random, metric: loss, max_trials: 3}", "searcher")["max_concurrent_trials"] == 16

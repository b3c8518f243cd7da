"""The trial's ds_config: base, overlay, batch sizes that agree."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.in_memory import InMemoryPlatform
from tests.trial.fake_engine import FakeEngine
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.errors import ConfigError, InvalidHP
from zero_trial.experiment.experiment import read_experiment
from zero_trial.master.search import pruning
from zero_trial.schema.config_source import open_source
from zero_trial.trial.ds_config import reconcile_config, reconcile_engine, source_line, trial_ds_config, with_stages
from zero_trial.trial.runtime.protocols import Distributed

GRID: dict[str, Any] = {"searcher": {"name": "grid"}}


def platform(tmp_path: Path, ranks: int = 1, **options: Any) -> InMemoryPlatform:
    return InMemoryPlatform(distributed=Distributed(0, ranks), storage=tmp_path, model_dir=tmp_path, **options)


def test_the_overrides_of_determineds_examples_lie_over_the_file(tmp_path: Path) -> None:
    """A DeepSpeedTrial lays ``overwrite_deepspeed_args`` over its file; moved to ZeroTrial, whose
    ``context.initialize`` reads the file, it must not lose them."""
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8, "gradient_clipping": 1.0}')
    over = {"overwrite_deepspeed_args": {"train_batch_size": 4, "gradient_clipping": 2.0}}
    hparams = {"deepspeed_config": "ds.json", **over}
    around = platform(tmp_path, hparams=hparams)
    assert trial_ds_config(None, around).value == {"train_batch_size": 4, "gradient_clipping": 2.0}
    assert trial_ds_config({"train_batch_size": 16}, around).value == {"train_batch_size": 16}  # given by its code
    both = platform(tmp_path, hparams={**hparams, "ds_config": {"train_batch_size": 2}})
    assert trial_ds_config(None, both).value == {"train_batch_size": 2, "gradient_clipping": 2.0}
    experiment = read_experiment(
        {
            "entrypoint": "m:T",
            "searcher": {"name": "single", "metric": "m", "max_length": {"batches": 1}},
            "hyperparameters": hparams,
        }
    )
    assert experiment.ds_config(tmp_path).value == {"train_batch_size": 4, "gradient_clipping": 2.0}
    swept = {**hparams, "overwrite_deepspeed_args": {"train_batch_size": 5}}
    unmoved = experiment.raw | {"entrypoint": "python3 -m zero_trial.as_determined m:T"}
    assert read_experiment(unmoved).ds_config(tmp_path).value["train_batch_size"] == 8  # its code lays them
    config = {"resources": {"slots_per_trial": 2}}
    files = {"ds.json": (tmp_path / "ds.json").read_bytes()}
    assert pruning.reason(config, hparams, files) is None
    assert "train_batch_size 5" in str(pruning.reason(config, swept, files))
    assert pruning.reason({**config, **unmoved}, swept, files) is None
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}
    base = {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}, "scheduler": schedule}
    rate = {"overwrite_deepspeed_args": {"optimizer": {"params": {"lr": 0.2}}}}
    around = platform(tmp_path, experiment={"data": {"ds_config": base}}, hparams=rate)
    with pytest.raises(InvalidHP, match=r"overwrite_deepspeed_args\.optimizer\.params\.lr"):
        read_ds_config(trial_ds_config(None, around), search=True)  # the schedule replaces the swept rate


@pytest.mark.parametrize(
    ("given", "data", "hparams", "batch"),
    [
        ({"train_batch_size": 1}, {"train_batch_size": 2}, {"deepspeed_config": "ds.json"}, 1),
        (None, {"train_batch_size": 2}, {"deepspeed_config": "ds.json"}, 2),
        (None, None, {"deepspeed_config": "ds.json"}, 3),
        (None, None, {"ds_config": "ds.json"}, 3),
        (None, None, {"ds_config": {"train_batch_size": 4}}, 4),
        ("ds.json", None, {"ds_config": {"train_batch_size": 4}}, 4),
    ],
)
def test_where_the_base_comes_from(tmp_path: Path, given: Any, data: Any, hparams: Any, batch: int) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 3}')
    around = platform(tmp_path, experiment={"data": {"ds_config": data}}, hparams=hparams)
    assert trial_ds_config(given, around).value["train_batch_size"] == batch


def test_no_ds_config_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no ds_config is given"):
        trial_ds_config(None, platform(tmp_path))


def test_a_misspelled_global_batch_size_is_named(tmp_path: Path) -> None:
    around = platform(tmp_path, hparams={"global_batch_sise": 24})
    with pytest.raises(ConfigError, match=r"global_batch_sise: not a batch size. Did you mean global_batch_size\?"):
        reconcile_config(open_source({"zero_optimization": {"stage": 1}}), around)


def test_the_hyperparameter_is_the_train_batch_size(tmp_path: Path) -> None:
    around = platform(tmp_path, 2, hparams={"global_batch_size": 24, "data_parallel_world_size": 2})
    filled, table = reconcile_config(open_source({"train_micro_batch_size_per_gpu": 4}), around)
    assert (filled.train_batch_size, filled.gradient_accumulation_steps) == (24, 3)
    assert str(table).startswith("global batch 24 = micro 4 x accumulation 3 x data-parallel ranks 2\n")
    assert "global_batch_size" in table.table


@pytest.mark.parametrize(
    ("config", "hparams"),
    [
        ({"train_batch_size": 6, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}, {}),
        ({"train_batch_size": 8}, {"global_batch_size": 16}),
        ({"train_batch_size": 8}, {"data_parallel_world_size": 4}),
    ],
)
def test_contradictions_end_a_single_run_and_only_the_point_of_a_search(
    tmp_path: Path, config: dict[str, Any], hparams: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as single:
        reconcile_config(open_source(config), platform(tmp_path, 2, hparams=hparams))
    assert not isinstance(single.value, InvalidHP)
    with pytest.raises(InvalidHP):
        reconcile_config(open_source(config), platform(tmp_path, 2, hparams=hparams, experiment=GRID))


def test_auto_steps_come_from_the_length_of_the_run(tmp_path: Path) -> None:
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 2}},
    }
    around = platform(tmp_path, experiment={"searcher": {"name": "single", "max_length": {"batches": 70}}})
    filled = reconcile_config(open_source(config), around)[0]
    assert filled.scheduler is not None and filled.scheduler.params["total_num_steps"] == 70


def test_an_engines_own_numbers(tmp_path: Path) -> None:
    import torch

    engine = FakeEngine(torch.nn.Linear(1, 1), {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3})
    assert reconcile_engine(engine, platform(tmp_path, hparams={"global_batch_size": 12})).train_batch_size == 12
    with pytest.raises(
        ConfigError, match=r"hyperparameters.global_batch_size: differs from the engine's value: got 16, expected 12"
    ):
        reconcile_engine(engine, platform(tmp_path, hparams={"global_batch_size": 16}))
    with pytest.raises(InvalidHP, match="data_parallel_world_size"):
        reconcile_engine(engine, platform(tmp_path, hparams={"data_parallel_world_size": 2}, experiment=GRID))


class Staged:
    """A model that brings its number of pipeline stages along; None leaves it to ds_config."""

    def __init__(self, num_stages: int | None) -> None:
        self.num_stages = num_stages


def test_the_stages_of_a_model_decide_how_many_ranks_share_data(tmp_path: Path) -> None:
    config = open_source({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3})
    filled, table = reconcile_config(with_stages(config, Staged(2)), platform(tmp_path, ranks=4))
    assert (filled.mesh.pipe, table.data_parallel, table.train_batch_size) == (2, 2, 12)
    assert "mesh.pipe                       2   PipelineModule(num_stages=2)" in table.table


@pytest.mark.parametrize("model", [None, object(), Staged(None), Staged(1)])
def test_a_model_without_stages_changes_nothing(model: Any) -> None:
    config = open_source({"train_batch_size": 2})
    assert with_stages(config, model) is config


@pytest.mark.parametrize("said", [{"mesh": {"pipe": 4}}, {"pipeline": {"stages": 4}}])
def test_the_stages_of_a_model_must_agree(said: dict[str, Any]) -> None:
    assert with_stages(open_source(said), Staged(4)).value == said
    with pytest.raises(
        ConfigError, match=r"a different number of pipeline stages: got 4, expected 2, as in PipelineModule"
    ):
        with_stages(open_source(said), Staged(2))


def test_a_file_that_is_not_there_says_how_to_send_it(tmp_path: Path) -> None:
    around = platform(tmp_path, experiment={"data": {"ds_config": "ds_config.json"}})
    with pytest.raises(ConfigError, match=r"data\.ds_config: ds_config\.json does not exist in .*--include"):
        trial_ds_config(None, around)


def test_the_first_line_tells_two_ds_configs_apart(tmp_path: Path) -> None:
    """The file, a hash that only the values change, stage and precision; the same from a file and
    written out."""
    values = {"train_batch_size": 8, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(values))

    def line(given: Any) -> str:
        source = trial_ds_config(given, platform(tmp_path))
        return source_line(source, reconcile_config(source, platform(tmp_path))[0])

    named, written, other = (line(given) for given in ("ds.json", values, {**values, "gradient_clipping": 0.5}))
    assert re.fullmatch(r"ds_config ds\.json [0-9a-f]{8}: ZeRO-3, bf16", named)
    noted = {"ds_config": values, "zero_trial": {"ds_config": "ds.json"}}  # as `zero-trial run` locks it
    source = trial_ds_config(None, platform(tmp_path, experiment={"data": noted}))
    assert source_line(source, reconcile_config(source, platform(tmp_path))[0], noted) == named
    assert written.split()[-3:] == named.split()[-3:] and other.split()[-3:] != named.split()[-3:]


def test_a_preset_takes_the_zero_section_of_any_base_and_leaves_lie_over_it(tmp_path: Path) -> None:
    base = {"train_batch_size": 4, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    around = platform(tmp_path, hparams={"trainer": "zero_2_offload", "ds_config": {"zero_optimization.stage": 1}})
    for given in (base, None):
        found = trial_ds_config(given, around).value
        assert found["zero_optimization"] == {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    named = platform(tmp_path, hparams={"ds_config": "zero_3_offload"})
    assert trial_ds_config(None, named).value["zero_optimization"]["stage"] == 3

"""DeepSpeed's and Megatron's names: mesh units, pipeline grid, script arguments, loaders."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from zero_trial.comm import Mesh, world_size
from zero_trial.comm.mesh import AXES
from zero_trial.ds_config.batch import solve_batch
from zero_trial.ds_config.key_rules import hint_names
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.table import DsConfig
from zero_trial.engine.resolved_config import mesh_shape
from zero_trial.errors import ConfigError, DataError
from zero_trial.pipeline.module import PipeModelDataParallelTopology, ProcessTopology
from zero_trial.sharding.optimizer import ShardedOptimizer

_MICS = "zero_optimization.mics_shard_size"


class _ByStage(type):
    """Implements ``isinstance`` by the stage of an engine's optimizer: one class serves all."""

    frees: bool

    def __instancecheck__(cls, instance: object) -> bool:
        if not isinstance(instance, ShardedOptimizer):
            return False
        state, _, params = instance.cuts
        return params if cls.frees else state and not params


class DeepSpeedZeroOptimizer(metaclass=_ByStage):
    """The optimizers of stages 1 and 2, for ``isinstance``."""

    frees = False


class DeepSpeedZeroOptimizer_Stage3(metaclass=_ByStage):
    """The optimizers of stage 3, for ``isinstance``."""

    frees = True


class FP16_Optimizer:
    """DeepSpeed's 16-bit optimizer at stage 0, for ``isinstance``: no optimizer here is one."""


BF16_Optimizer = FP16_UnfusedOptimizer = FP16_Optimizer


class EngineMpu:
    """DeepSpeed's ``grid``/``mpu`` calls, answered from the mesh's coordinates."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def get_data_parallel_rank(self) -> int:
        return self._mesh.data.index

    def get_data_parallel_world_size(self) -> int:
        return self._mesh.data.size

    def get_data_parallel_group(self) -> Any:
        return self._mesh.data.group

    def get_pipe_parallel_rank(self) -> int:
        return self._mesh.coordinates["pipe"]

    def get_pipe_parallel_world_size(self) -> int:
        return self._mesh.shape.pipe

    def get_model_parallel_rank(self) -> int:
        return self._mesh.coordinates["model"]

    def get_model_parallel_world_size(self) -> int:
        return self._mesh.shape.model

    # DeepSpeed calls the model axis "slice" in the context of a pipeline.
    get_slice_parallel_rank = get_model_parallel_rank
    get_slice_parallel_world_size = get_model_parallel_world_size

    def get_global_rank(self) -> int:
        return self._mesh.rank


class PipelineParallelGrid(EngineMpu):
    """DeepSpeed's ``PipelineParallelGrid``, from the mesh. ``data`` is replica and shard."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        shape = mesh.shape
        self.pipe_parallel_size = shape.pipe
        self.data_parallel_size = shape.data_parallel_size
        self.model_parallel_size = self.slice_parallel_size = shape.model
        self.global_rank = mesh.rank
        self.world_size = shape.world_size
        self.stage_id = self.get_stage_id()
        self.data_parallel_id = self.get_data_parallel_rank()
        # attributes, as in DeepSpeed; the engine's are methods
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self._topology = PipeModelDataParallelTopology(shape.pipe, shape.model, shape.data_parallel_size)

    def get_stage_id(self) -> int:
        """Return this rank's pipeline stage."""
        return self.get_pipe_parallel_rank()

    def get_data_parallel_id(self) -> int:
        return self.get_data_parallel_rank()

    def get_pipe_parallel_group(self) -> Any:
        return self._mesh.pipe.group

    def get_model_parallel_group(self) -> Any:
        return self._mesh.model.group

    get_slice_parallel_group = get_model_parallel_group

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank at ``stage_id`` of this rank's pipeline, or of the given one."""
        here = self._topology.get_coord(self.global_rank)
        at = {"pipe": stage_id, "data": here.data, "model": here.model} | kwargs
        return self._topology.get_rank(**at)

    def topology(self) -> ProcessTopology:
        """Return the same as a topology with the axes pipe, data and model."""
        return self._topology


# --- script arguments -----------------------------------------------------------------------------


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` (a flag that is accepted and changes nothing) and ``--deepspeed_config
    FILE`` with our alias ``--zero_trial_config``. Returns the parser, as DeepSpeed does."""
    group = parser.add_argument_group("zero_trial", "configuration of zero_trial.initialize")
    group.add_argument(
        "--deepspeed",
        "--zero_trial",
        default=False,
        action="store_true",
        help="accepted for compatibility, without effect",
    )
    group.add_argument(
        "--deepspeed_config", "--zero_trial_config", metavar="FILE", type=str, default=None, help="ds_config in JSON"
    )
    return parser


def DeepSpeedConfig(config: Mapping[str, Any] | str | Path, mpu: Any = None, mesh_device: Any = None) -> DsConfig:
    """Read a ds_config (dict, path or base64) and return it with all three batch sizes, solved for
    the current ranks.

    Args:
        mpu: has ``get_data_parallel_world_size``, if ranks share data in another way.
        mesh_device: accepted and ignored; ``mesh`` in ds_config sets the axes.
    """
    found = read_ds_config(config)
    ranks = (
        mpu.get_data_parallel_world_size() if mpu is not None else mesh_shape(found, world_size()).data_parallel_size
    )
    given = (found.train_batch_size, found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps)
    return solve_batch(*given, ranks).filled(found)


def require_mesh(mesh_param: Any, mesh: Mesh, config: DsConfig) -> None:
    """Raise ConfigError if ``initialize(mesh_param=(data, sequence))`` does not match the ranks of
    ``mesh`` (sequence parallelism is not supported), or if ds_config's axes do not match those of
    an ``mpu``."""
    asked = {f"mesh.{axis}": getattr(config.mesh, axis) for axis in AXES}
    for path, size in (asked | {_MICS: config.zero_optimization.mics_shard_size}).items():
        axis = "shard" if path == _MICS else path.removeprefix("mesh.")
        if size not in (None, -1, getattr(mesh.shape, axis)) and not config.source(path).is_default:
            raise ConfigError(
                "ds_config and the mpu disagree about the ranks",
                where=path,
                got=size,
                expected=f"{getattr(mesh.shape, axis)}, the size of the mpu's {axis} axis",
                fix=f"Remove {path}, or leave mpu= out: the engine then builds the groups itself.",
            )
    if mesh_param is not None and tuple(mesh_param) != (mesh.data.size, 1):
        raise ConfigError(
            "mesh_param differs from the mesh of the ranks",
            where="initialize(mesh_param)",
            got=tuple(mesh_param),
            expected=f"{(mesh.data.size, 1)}: all data-parallel ranks, no sequence parallelism",
            fix='Omit mesh_param, and set "mesh" in ds_config for hybrid sharding, pipelines and model parallelism.',
        )


def hints_of(args: Any, model: Any = None) -> dict[str, Any]:
    """Return values for "auto", under the names used by Hugging Face's TrainingArguments and plain
    scripts. ``args``: an object with attributes, or None. Hugging Face models declare their width
    in ``model.config``.

    Values that mean "not set" are skipped: None, ``max_steps=-1``, and ``warmup_steps=0`` together
    with a ``warmup_ratio``. TrainingArguments' ``train_batch_size`` is per device, which has a
    different name here.
    """
    described = getattr(model, "config", None)
    widths = [getattr(described, name, None) for name in ("hidden_size", "d_model", "n_embd")]
    found: dict[str, Any] = {}
    if (width := next((size for size in widths if isinstance(size, int)), None)) is not None:
        found["hidden_size"] = width
    found |= {name: value for name in hint_names() if (value := getattr(args, name, None)) is not None}
    if "per_device_train_batch_size" in found:
        found.pop("train_batch_size", None)
    for name in ("max_steps", "num_training_steps", "total_num_steps"):
        if isinstance(found.get(name), int) and found[name] < 1:
            found.pop(name)
    if not found.get("warmup_steps") and found.get("warmup_ratio"):
        found.pop("warmup_steps", None)
    return {name: value for name, value in found.items() if isinstance(value, (bool, int, float, str, list, tuple))}


# --- loaders: ``initialize(training_data=...)`` and ``engine.deepspeed_io`` -----------------------


ROUTES = ("train", "eval", "predict")


class ShardedLoader(DataLoader[Any]):
    """A DataLoader over one rank's part, reshuffled at every pass in the same way on all ranks."""

    def __init__(self, dataset: Any, sampler: DistributedSampler[Any], **options: Any) -> None:
        self._passes = 0
        self._own_sampler = sampler
        super().__init__(dataset, sampler=sampler, **options)

    def __iter__(self) -> Any:
        self._own_sampler.set_epoch(self._passes)
        self._passes += 1
        return super().__iter__()


class RepeatingLoader:
    """Repeat ``loader`` endlessly. Raises DataError if it yields nothing at all."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        for _ in range(2):
            for batch in self._batches:
                return batch
            self._batches = iter(self.loader)
        raise DataError(
            "the loader returned no batch",
            where=f"RepeatingLoader({type(self.loader).__name__})",
            expected="at least one batch",
        )


def rank_loader(
    dataset: Any,
    batch_size: int,
    mesh: Mesh,
    config: DsConfig,
    *,
    route: str = "train",
    sampler: Any = None,
    **options: Any,
) -> DataLoader[Any]:
    """Return this rank's part of ``dataset`` in batches of ``batch_size``, for ``training_data``
    and ``engine.deepspeed_io``. ``shuffle`` (default for training): use a different order at each
    pass, the same on all ranks. Iterable data sets shard themselves; a ``sampler`` chooses this
    rank's samples itself."""
    if route not in ROUTES:
        raise ConfigError("no such route", where="deepspeed_io(route)", got=repr(route), expected=", ".join(ROUTES))
    if isinstance(dataset, DataLoader):
        fix = "Give loader.dataset, and its collate_fn as collate_fn=; ds_config has the batch size."
        raise DataError(
            "this is a DataLoader, and the engine makes its own", where="initialize(training_data)", fix=fix
        )
    options.setdefault("drop_last", config.dataloader_drop_last)
    shuffle = options.pop("shuffle", route == "train")
    if sampler is None and not isinstance(dataset, IterableDataset):
        ranks = {"num_replicas": mesh.data.size, "rank": mesh.data.index}
        own: DistributedSampler[Any] = DistributedSampler(
            dataset, **ranks, shuffle=shuffle, drop_last=options["drop_last"]
        )
        loader = ShardedLoader(dataset, own, batch_size=batch_size, **options)
        if route == "train" and not len(loader):
            least = mesh.data.size * batch_size if options["drop_last"] else 1
            raise DataError(
                "the training data yields no batch",
                where="initialize(training_data)",
                got=f"{len(dataset)} samples",
                expected=f"at least {least}: batches of {batch_size} on {mesh.data.size} ranks",
                fix="Use more data, a smaller batch, or dataloader_drop_last: false." if options["drop_last"] else None,
            )
        return loader
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, **options)

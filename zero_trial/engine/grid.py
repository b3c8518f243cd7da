"""The grid of a pipeline: which rank is at which stage, replica and slice, under DeepSpeed's names."""

from __future__ import annotations

from typing import Any

from zero_trial.engine.mpu import EngineMpu
from zero_trial.mesh import Mesh
from zero_trial.pipeline.topology import PipeModelDataParallelTopology, ProcessTopology


class PipelineParallelGrid(EngineMpu):
    """DeepSpeed's ``PipelineParallelGrid``, answered from the mesh. ``data`` counts replica and shard together."""

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
        self._topology = PipeModelDataParallelTopology(shape.pipe, shape.model, shape.data_parallel_size)

    def get_stage_id(self) -> int:
        """This rank's pipeline stage."""
        return self.get_pipe_parallel_rank()

    def get_data_parallel_id(self) -> int:
        return self.get_data_parallel_rank()

    def get_pipe_parallel_group(self) -> Any:
        return self._mesh.pipe.group

    def get_model_parallel_group(self) -> Any:
        return self._mesh.model.group

    get_slice_parallel_group = get_model_parallel_group

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """The rank at stage ``stage_id`` of this rank's pipeline; ``data`` or ``model`` name another pipeline."""
        here = self._topology.get_coord(self.global_rank)
        at = {"pipe": stage_id, "data": here.data, "model": here.model} | kwargs
        return self._topology.get_rank(**at)

    def topology(self) -> ProcessTopology:
        """The same as a topology with the axes pipe, data and model."""
        return self._topology

    def is_first_stage(self) -> bool:
        return self.get_stage_id() == 0

    def is_last_stage(self) -> bool:
        return self.get_stage_id() == self.pipe_parallel_size - 1

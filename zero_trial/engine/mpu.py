"""The questions that Megatron-style code and the trial ask of an engine's mesh, under DeepSpeed's names."""

from __future__ import annotations

from typing import Any

from zero_trial.mesh import Mesh


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

    # DeepSpeed calls the model axis "slice" where a pipeline is about.
    get_slice_parallel_rank = get_model_parallel_rank
    get_slice_parallel_world_size = get_model_parallel_world_size

    def get_global_rank(self) -> int:
        return self._mesh.rank

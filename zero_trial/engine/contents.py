"""What an engine's checkpoint holds: the names of its logical tensors, and which of them this rank's part of the model has.

    param/<name>           every parameter; its master where there is one
    state/<kind>/<name>    optimizer state with one value per element (exp_avg ...)
    buffer/<name>          buffers of the first rank that has them
    rank<i>/...            what differs between ranks: random generators, buffers that are not the first rank's

Nothing names a shard. Where models are parallel themselves (``mesh.model``, or a client's ``mpu`` with several data-parallel groups) ranks hold other
tensors under the same names; then the first three stand below ``part<i>of<n>/``, and are read only by as many parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zero_trial.checkpoint.dtypes import dtype_name
from zero_trial.mesh import AxisComm
from zero_trial.zero.facts import parameter_names

if TYPE_CHECKING:
    from zero_trial.engine.engine import Engine


class Contents:
    """The names and tensors of ``engine`` as they are now."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.part, self.parts = engine.mesh.model_part
        self._place = f"part{self.part}of{self.parts}/" if self.parts > 1 else ""

    def param(self, name: str) -> str:
        return f"{self._place}param/{name}"

    def state(self, kind: str, name: str) -> str:
        return f"{self._place}state/{kind}/{name}"

    def buffer(self, name: str) -> str:
        return f"{self._place}buffer/{name}"

    @property
    def twins(self) -> AxisComm:
        """The ranks that have built the same modules: all, or those of one pipeline stage and one part of a parallel model."""
        mesh = self._engine.mesh
        return mesh.data if mesh.pipe.size > 1 or self.parts > 1 else mesh.world

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """The persistent buffers: those that a state dict would hold."""
        found = []
        for prefix, module in self._engine.module.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    found.append((f"{prefix}.{name}" if prefix else name, buffer))
        return found

    def aliases(self) -> dict[str, str]:
        """Tied names of the whole model, or of this part of it. Collective over pipe."""
        own = {alias: name for name, (_, names) in parameter_names(self._engine.module).items() for alias in names[1:]}
        stages = self._engine.mesh.pipe.gather_json(own, "tied names")
        return {alias: name for stage in stages for alias, name in stage.items()}

    def dtypes(self) -> dict[str, str]:
        """In which dtype the model computes with a parameter, for those that are not float32: masters do not tell. Collective over pipe."""
        named = parameter_names(self._engine.module).items()
        own = {name: dtype_name(param.dtype) for name, (param, _) in named if param.dtype != torch.float32}
        return {
            name: kind for stage in self._engine.mesh.pipe.gather_json(own, "dtypes") for name, kind in stage.items()
        }

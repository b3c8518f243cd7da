"""The weights and buffers that DeepSpeed's file of model states holds, under the names that our checkpoints give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from zero_trial.checkpoint.slice import Slice
from zero_trial.errors import CheckpointError
from zero_trial.importing.findings import Wishes
from zero_trial.importing.values import Stored, as_shape

State = Mapping[Any, Any]


class ModelStates:
    """``contents``: the file's content, at stage 3 one per rank. Names are the model's own: prefixes are stripped as was wished."""

    def __init__(self, contents: Sequence[State], wishes: Wishes, where: str) -> None:
        self.where = where
        self.first = contents[0]
        self._contents = contents
        self._wishes = wishes
        module = self.first.get("module")
        if not isinstance(module, dict):
            raise CheckpointError(
                "there are no weights in the file of model states",
                where=where,
                got=f"module is {type(module).__name__}",
                fix="Save a whole state dict with the model's own code, and import that.",
            )
        self.tensors = {wishes.own(str(name)): value for name, value in module.items() if isinstance(value, Stored)}
        self.not_tensors = [str(name) for name, value in module.items() if not isinstance(value, Stored)]
        if len(self.tensors) + len(self.not_tensors) != len(module):
            raise CheckpointError("two tensors have one name without the prefix", where="--strip", got=wishes.strip)
        buffers = self.first.get("buffer_names")
        self.buffers = {wishes.own(str(name)) for name in buffers} if isinstance(buffers, list) else set()
        self.aliases = self._aliases()

    @property
    def parameters(self) -> list[str]:
        """Every parameter by its first name, in the model's order."""
        return [name for name in self.tensors if name not in self.buffers and name not in self.aliases]

    def frozen_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what the optimizer does not have, where DeepSpeed says (stages 2 and 3)."""
        found = self.first.get("frozen_param_shapes")
        return (
            {
                self._wishes.own(str(name)): as_shape(shape, f"{self.where}, frozen_param_shapes, {name}")
                for name, shape in found.items()
            }
            if isinstance(found, dict)
            else {}
        )

    def weights(self, but: set[str], sharded: bool) -> list[list[Slice]]:
        """Parameters that are not among ``but``, and buffers: one row per file of model states; ``sharded`` is stage 3.

        Raises CheckpointError for a parameter of which there are no values.
        """
        rows: list[list[Slice]] = [[] for _ in self._contents]
        frozen = self.frozen_shapes() if sharded else {}
        for name in self.parameters:
            if name in but:
                continue
            if name in frozen:
                self._fragments(name, frozen[name], rows)
            elif sharded and self.tensors[name].numel == 0:
                raise CheckpointError("there are no values of a parameter", where=self.where, got=name)
            else:
                rows[0].append(Slice.whole(f"param/{name}", self.tensors[name].tensor()))
        rows[0] += [
            Slice.whole(f"buffer/{name}", tensor.tensor())
            for name, tensor in self.tensors.items()
            if name in self.buffers
        ]
        return rows

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """The optimizer and the module mean the same tensors. Raises CheckpointError."""
        for name, shape in shapes.items():
            held = self.tensors.get(name)
            if held is None or (held.shape != shape and held.numel != 0):
                got = "no such parameter" if held is None else f"shape {held.shape}"
                raise CheckpointError(
                    f"{name} differs in the module and the optimizer", where=self.where, got=got, expected=shape
                )

    def _fragments(self, name: str, shape: tuple[int, ...], rows: list[list[Slice]]) -> None:
        """A frozen parameter of stage 3: each rank's file has its part of it."""
        numel = prod(shape)
        share = -(-numel // len(rows))
        if numel == 0:
            rows[0].append(Slice(f"param/{name}", shape, 0, 0, torch.empty(0)))
        for rank, row in enumerate(rows):
            start, stop = min(rank * share, numel), min((rank + 1) * share, numel)
            if start < stop:
                row.append(Slice(f"param/{name}", shape, start, stop, self._fragment(name, rank, stop - start)))

    def _fragment(self, name: str, rank: int, size: int) -> torch.Tensor:
        fragments = self._contents[rank].get("frozen_param_fragments")
        own = (
            {self._wishes.own(str(key)): value for key, value in fragments.items()}
            if isinstance(fragments, dict)
            else {}
        )
        fragment = own.get(name)
        if not isinstance(fragment, Stored) or fragment.numel < size:
            raise CheckpointError(
                "a part of a frozen parameter is missing", where=self.where, got=f"{name}, rank {rank}"
            )
        return fragment.tensor().reshape(-1)[:size].contiguous()

    def _aliases(self) -> dict[str, str]:
        """Tied names: those that DeepSpeed lists, and at stages 0 to 2 those that lie on the same elements."""
        shared = self.first.get("shared_params")
        found = (
            {self._wishes.own(str(alias)): self._wishes.own(str(name)) for alias, name in shared.items()}
            if isinstance(shared, dict)
            else {}
        )
        seen: dict[Stored, str] = {}
        for name, tensor in self.tensors.items():
            if tensor.numel and name not in self.buffers:
                first = seen.setdefault(tensor, name)
                if first != name:
                    found.setdefault(name, first)
        return found

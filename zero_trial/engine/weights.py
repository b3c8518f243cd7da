"""First values from safetensors files: ``initialize(model, weights="folder")``. Each rank reads the
ranges of its shards; see ``read_shard`` in ``sharding/build_groups.py``."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from torch import nn

from zero_trial.checkpoint.reader import compare_tensors
from zero_trial.checkpoint.weights import WeightsReader
from zero_trial.comm import AxisComm, Mesh, fail_together
from zero_trial.errors import ConfigError
from zero_trial.sharding.grouping import ManualGroups, parameter_names, saved_buffers
from zero_trial.sharding.meta import initialize_buffers, initialize_meta, place_absent


class StoredWeights:
    """The values of a model's parameters and persistent buffers in safetensors files, by the
    model's names: a :class:`~zero_trial.sharding.build_groups.FirstValues`.

    Construction reads the headers alone. Collective over the world.

    Args:
        source: a file, or a folder with one or with several and an index.
        prefix: stands before all of the model's names in the file; where no name in the file has
            it, before all of the file's names in the model. Names in the file without it are not
            read.

    Raises ConfigError with every name that is missing, superfluous or of another shape.
    """

    def __init__(
        self, model: nn.Module, source: str | Path, prefix: str, mesh: Mesh, manual_groups: ManualGroups
    ) -> None:
        if mesh.model_part[1] > 1:
            raise ConfigError(
                "each rank of a model that is parallel itself holds parts that only its own code can cut",
                where="initialize(weights)",
                got=f"{mesh.model_part[1]} parts",
                fix="Load the parts into the model before initialize().",
            )
        self.source = source
        self._reader = fail_together(mesh.world, lambda: WeightsReader(source), "open weights")
        shapes = self._reader.shapes
        everything = shapes | {alias: shapes[name] for alias, name in self._reader.aliases.items() if name in shapes}
        in_file = any(name.startswith(prefix) for name in everything)

        def stored_as(name: str) -> str:
            return prefix + name if in_file else name.removeprefix(prefix)

        tensors: dict[str, tuple[torch.Tensor, tuple[str, ...]]] = dict(parameter_names(model))
        tensors |= {name: (model.get_buffer(name), (name,)) for name in saved_buffers(model)}
        # a copy of another pipeline stage's tensor gets that stage's values
        tied = {name: names for name, (_, names) in tensors.items() if not manual_groups.is_copy(name)}
        sizes = {name: tuple(tensors[name][0].shape) for name in tied}
        wanted: dict[str, tuple[int, ...]] = {}
        known: set[str] = set()  # what the file may have: every name of a tied tensor
        for sizes_there, tied_there in mesh.pipe.gather_json([sizes, tied], "weights to read"):
            for name, shape in sizes_there.items():
                names = [stored_as(each) for each in tied_there[name]]
                known.update(names)
                wanted[next((each for each in names if each in everything), names[0])] = tuple(shape)
        self._name_of = {
            name: next((each for each in map(stored_as, names) if each in everything), stored_as(name))
            for name, names in tied.items()
        }
        relevant = {name: shape for name, shape in everything.items() if not in_file or name.startswith(prefix)}
        superfluous = relevant.keys() - known
        stored = {name: shape for name, shape in relevant.items() if name in wanted or name in superfluous}
        difference = compare_tensors(stored, wanted)
        if difference.missing or difference.extra or difference.shapes:
            self._reader.close()
            raise ConfigError(
                difference.describe().replace("checkpoint has", "the file has", 1),
                where=f"initialize(weights): {source}",
                fix="Build the model that the weights belong to; weights_prefix= names what stands before all names on one side.",
            )

    @property
    def bytes_read(self) -> int:
        """From the files by this rank, headers included."""
        return self._reader.bytes_read

    def read_into(self, name: str, start: int, stop: int, out: torch.Tensor, through: torch.dtype) -> None:
        """See :class:`FirstValues`."""
        stored = self._name_of[name]
        self._reader.read_into(self._reader.aliases.get(stored, stored), start, stop, out, through)

    def close(self) -> None:
        self._reader.close()


def give_values(model: nn.Module, data: AxisComm, device: torch.device, *, by_files: bool) -> None:
    """Prepare a model that is, in part, on the meta device for an engine: with the values that
    building it would have given, or ``by_files`` with absent ones for what files hold. Collective
    over ``data``. Raises ConfigError."""
    if not any(tensor.is_meta for tensor in itertools.chain(model.parameters(), model.buffers())):
        return
    unsaved = {name for name, buffer in model.named_buffers() if buffer.is_meta} - set(saved_buffers(model))
    if by_files:
        place_absent(model, device)
        if unsaved:
            initialize_buffers(model, sorted(unsaved), data)
    else:
        place_absent(model, torch.device("cpu"))  # random numbers are the host's, as when building it
        initialize_meta(model, data)

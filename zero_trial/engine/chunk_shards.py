"""What a pipeline schedule's sharding actions do: chunks and tied modules as domains of one sharded model."""

from __future__ import annotations

from collections.abc import Mapping

from zero_trial.mesh import AxisComm, Mesh, part_of_pipe
from zero_trial.pipeline.module import PipelineModule
from zero_trial.zero import ShardedModel
from zero_trial.zero.domain import Domain


def chunk_domain(chunk: int) -> str:
    """The name of a chunk's domain."""
    return f"chunk{chunk}"


def tied_domain(key: str) -> str:
    """The name of a tied module's domain."""
    return f"tied.{key}"


def domains_of(module: PipelineModule, mesh: Mesh) -> list[Domain]:
    """One domain for each chunk of this rank and for each of its tied modules. Collective over the world where weights are tied."""
    placement = module.placement
    found = []
    tied: set[int] = set()
    for key, chunks in module.ties.items():
        holders = [placement.ranks[chunk] for chunk in chunks] if placement is not None else [0]
        stages = sorted(set(holders))
        copies: AxisComm | None = None
        if len(stages) > 1:
            copies = part_of_pipe(mesh, tuple(stages), f"tied.{key}")
        if module.stage_id in stages:
            own = frozenset(id(param) for param in module.tied_modules[key].parameters())
            tied |= own
            owner = stages.index(holders[0])  # with the first of its layers: the one that is built in an uncut model
            found.append(Domain(tied_domain(key), own, copies, owner, f"tied_modules.{key}"))
    for number, chunk in module.chunks.items():
        params = frozenset(id(param) for param in chunk.parameters()) - tied
        found.append(Domain(chunk_domain(number), params))
    return found


class ChunkShards:
    """The actions of one rank. A tied module of several chunks here is freed with the last of them, and reduced with the last of them."""

    def __init__(self, model: ShardedModel, module: PipelineModule, *, every_micro_batch: bool) -> None:
        self._model = model
        self._every_micro_batch = every_micro_batch
        mine = set(module.chunks)
        self._keys = list(module.ties)  # tie number -> key
        self._tied: Mapping[int, list[str]] = {
            chunk: [tied_domain(key) for key, chunks in module.ties.items() if chunk in chunks] for chunk in mine
        }
        self._holders = {tied_domain(key): mine & set(chunks) for key, chunks in module.ties.items()}
        self._open: set[int] = set()
        self._reduced: set[int] = set()

    def unshard(self, chunk: int) -> None:
        self._open.add(chunk)
        for domain in self._domains(chunk):
            self._model.gatherer.start(domain)

    def need(self, chunk: int) -> None:
        for domain in self._domains(chunk):
            self._model.gatherer.ensure(domain, record=False)

    def reshard(self, chunk: int) -> None:
        self._open.discard(chunk)
        for domain in self._domains(chunk):
            if not self._holders.get(domain, set()) & self._open:
                self._model.gatherer.release(domain)

    def landed(self, chunk: int) -> None:
        for domain in self._domains(chunk):
            self._model.landed(domain)

    def reduce(self, chunk: int) -> None:
        self._model.reduce(chunk_domain(chunk))
        self._reduced.add(chunk)
        for domain in self._tied[chunk]:
            if self._every_micro_batch or self._holders[domain] <= self._reduced:
                self._model.reduce(domain)

    def tied_reduce(self, tie: int) -> None:
        self._model.sum_copies(tied_domain(self._keys[tie]))

    def start_step(self) -> None:
        """A new step begins, or one was broken off."""
        self._open.clear()
        self._reduced.clear()

    def _domains(self, chunk: int) -> list[str]:
        return [chunk_domain(chunk), *self._tied[chunk]]

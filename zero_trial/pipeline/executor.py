"""Read the input of a pipeline step, and perform one rank's row of a schedule on it. The caller
implements the sharding actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch

from zero_trial.comm import AxisComm, Mesh
from zero_trial.errors import DataError, TrialError, ZeroTrialError
from zero_trial.pipeline.channel import Payload, ReceiveChannel, SendChannel, WithLabel, local_payload, tensors_in
from zero_trial.pipeline.schedule import NONE, RECEIVES, Action, ActionKind, ChunkPlacement, Schedule
from zero_trial.pipeline.stage import Item, Loss, Stage
from zero_trial.util.failures import known_fault, user_frame

# --- the input of a step --------------------------------------------------------------------------
#
# The first chunk's rank reads inputs. The last chunk's rank reads labels if it has its own
# iterator, which must return the same batches; otherwise labels are sent through the pipeline.
# Before anything runs, all ranks exchange their numbers of micro-batches and samples, so that all
# ranks detect the end of any rank's data and none hangs.

HAS_ITERATOR, GOT, SAMPLES, LEAST, MOST = range(5)

Read = Callable[[Any], tuple[Any, Any]]
"""Converts an item of the iterator to (inputs, label) on the device."""


@dataclass(frozen=True)
class StepInput:
    """This rank's input of a step, and the numbers that all ranks have exchanged.

    Args:
        inputs: by micro-batch, only on the first chunk's rank.
        labels: by micro-batch, only on ranks that use or send them.
        samples: number of samples of each micro-batch, on ranks with ``inputs``.
        labels_travel: whether labels are sent through the pipeline with the activations.
        micro_batches: number of micro-batches of the step, the same on all ranks.
        total: number of samples of all reading ranks together.
        alike: whether all micro-batches of all ranks have the same number of samples.
        lines: number of ranks that read inputs: data-parallel ranks times model-parallel ranks
            (which read the same inputs).
    """

    inputs: Sequence[Any] = ()
    labels: Sequence[Any] = ()
    samples: Sequence[int] = ()
    labels_travel: bool = False
    micro_batches: int = 0
    total: int = 0
    alike: bool = True
    lines: int = 1

    def share(self, samples: int) -> float:
        """Return a micro-batch's fraction of the samples that all lines read. The sum is 1."""
        if self.alike:
            return 1.0 / (self.micro_batches * self.lines)
        return samples / self.total


def read_step(
    iterator: Iterator[Any] | None, wanted: int, mesh: Mesh, placement: ChunkPlacement, split: Read
) -> StepInput:
    """Read at most ``wanted`` micro-batches, the same number on every reading rank. Collective over
    the world.

    Raises StopIteration on all ranks if no rank has data; DataError if one rank has fewer
    micro-batches than another, or if the first stage has no iterator.
    """
    here = mesh.coordinates["pipe"]
    first, last = placement.ranks[0], placement.ranks[-1]
    reads = iterator is not None and here in (first, last)
    inputs: list[Any] = []
    labels: list[Any] = []
    if reads and iterator is not None:
        for _ in range(wanted):
            try:
                value, label = split(next(iterator))
            except StopIteration:
                break
            inputs.append(value)
            labels.append(label)
    samples = [sample_count(value) for value in inputs] if here == first else []
    row = [int(reads), len(inputs), sum(samples), min(samples, default=0), max(samples, default=0)]
    table = mesh.world.gather_row(row, "what each rank has read")
    stage_of = [mesh.shape.coordinates(rank)["pipe"] for rank in range(mesh.world.size)]
    count = _agreed(table, stage_of, first)
    rows = [row for row, stage in zip(table, stage_of, strict=True) if stage == first]
    last_row = table[mesh.pipe.ranks[last]]
    travel = first != last and not last_row[HAS_ITERATOR]
    keeps_labels = here == last if not travel else here == first
    return StepInput(
        inputs if here == first else [],
        labels if keeps_labels else [],
        samples,
        travel,
        micro_batches=count,
        total=sum(row[SAMPLES] for row in rows),
        alike=min(row[LEAST] for row in rows) == max(row[MOST] for row in rows),
        lines=len(rows),
    )


def sample_count(value: Any) -> int:
    """Return the length of the first tensor's first dimension; 1 if there is none."""
    tensors = tensors_in(value)
    return int(tensors[0].shape[0]) if tensors and tensors[0].dim() else 1


def _agreed(table: Sequence[Sequence[int]], stage_of: Sequence[int], first: int) -> int:
    """Return the common number of micro-batches. Raises StopIteration, or DataError."""
    without = [rank for rank, row in enumerate(table) if stage_of[rank] == first and not row[HAS_ITERATOR]]
    if without:
        raise DataError(
            "the rank of the first layer has no data iterator",
            where=f"rank {without[0]}",
            got="no iterator",
            fix="Pass an iterator to train_batch() or eval_batch() there, or call engine.set_dataiterator().",
        )
    got = {rank: row[GOT] for rank, row in enumerate(table) if row[HAS_ITERATOR]}
    if max(got.values()) == 0:
        raise StopIteration
    if len(set(got.values())) > 1:
        fewest = min(got, key=lambda rank: got[rank])
        counts = ", ".join(f"rank {rank} {count}" for rank, count in got.items())
        raise DataError(
            "an iterator ended before those of the other ranks",
            where=f"rank {fewest}",
            got=f"micro-batches: {counts}",
            expected="equally many micro-batches on every rank that reads",
            fix="Use loaders of equal length, or drop the last batches.",
        )
    return next(iter(got.values()))


# --- one step -------------------------------------------------------------------------------------

FORWARD, BACKWARD = "forward", "backward"


class ChunkSharding(Protocol):
    """Performs a schedule's sharding actions on the chunks of this rank."""

    def unshard(self, chunk: int) -> None:
        """Start unsharding the chunk's parameters; ``need`` waits for them."""

    def need(self, chunk: int) -> None: ...

    def reshard(self, chunk: int) -> None: ...

    def backward_done(self, chunk: int) -> None: ...

    def reduce(self, chunk: int) -> None:
        """Start reducing the chunk's gradients, which are complete for the step or micro-batch."""

    def tied_reduce(self, tie: int) -> None:
        """Sum the reduced gradients of a tied weight over all ranks that hold it."""


@dataclass
class LastStageResult:
    """Losses, samples and outputs by micro-batch on the last chunk's rank."""

    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    weights: dict[int, torch.Tensor] = field(default_factory=dict)  # only if losses have weights
    samples: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepOptions:
    """What a run computes. ``scale``: the factor for each micro-batch's share of the loss before
    backward, or for the whole loss if ``weight`` is set."""

    training: bool = True
    loss: Loss | None = None  # None: no losses are computed
    weight: Callable[[Any, Any], float | torch.Tensor] | None = None
    keep_outputs: bool = False
    scale: float = 1.0


class Executor:
    """Runs schedules on pipeline rank ``comm.index``. ``phase`` measures a phase of a micro-batch;
    ``channel`` separates its messages from those of other engines in the process."""

    def __init__(
        self,
        comm: AxisComm,
        stage: Stage,
        shards: ChunkSharding,
        device: torch.device,
        phase: Callable[[str], AbstractContextManager[Any]],
        *,
        channel: int,
    ) -> None:
        self.comm = comm
        self.stage = stage
        self._shards = shards
        self._device = device
        self._phase = phase
        others = [index for index in range(comm.size) if index != comm.index]
        self._out = {index: SendChannel(comm, index, channel) for index in others}
        self._in = {index: ReceiveChannel(comm, index, channel, device) for index in others}
        self._verbs: Mapping[ActionKind, Callable[[Action], None]] = {
            ActionKind.F: self._forward,
            ActionKind.B: lambda action: self._pass_back(action, self.stage.backward),
            ActionKind.I: lambda action: self._pass_back(action, self.stage.backward_inputs),
            ActionKind.W: self._backward_weights,
            ActionKind.SEND_F: self._send,
            ActionKind.SEND_B: self._send,
            ActionKind.RECV_F: self._receive,
            ActionKind.RECV_B: self._receive,
            ActionKind.UNSHARD: lambda action: self._shards.unshard(action.chunk),
            ActionKind.RESHARD: lambda action: self._shards.reshard(action.chunk),
            ActionKind.REDUCE: lambda action: self._shards.reduce(action.chunk),
            ActionKind.TIED_REDUCE: lambda action: self._shards.tied_reduce(action.micro_batch),
            ActionKind.STEP: lambda action: None,  # the engine steps after this
        }
        self._run: _Run

    def run(self, schedule: Schedule, batch: StepInput, options: StepOptions) -> LastStageResult:
        """Perform the row. On return, reductions and messages may still be in flight:
        :meth:`finish` waits for the messages.

        Raises TrialError if a layer raises (naming rank, micro-batch and action), PeerFailed if a
        layer of another rank raised, MeshError if a rank is lost.
        """
        self._run = run = _Run(schedule.placement, batch, options)
        action = None
        try:
            row = schedule.rows[self.comm.index]
            for source, channel in self._in.items():
                channel.prepare(sum(self._peer(action) == source for action in row if action.kind in RECEIVES))
            for action in row:
                self._verbs[action.kind](action)
        except Exception as error:
            self._fail(error, schedule.placement.stages, action)
        finally:
            self.stage.forget()
        return run.outcome

    def finish(self) -> None:
        """Wait until every message of this rank is sent."""
        for channel in self._out.values():
            channel.finish()

    # --- computations -----------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        run, chunk, number = self._run, action.chunk, action.micro_batch
        label = None
        if chunk == 0:
            payload, run.samples[number] = Payload(run.batch.inputs[number]), run.batch.samples[number]
        else:
            payload = run.inputs.pop((chunk, number))
            if run.batch.labels_travel:
                payload, label = _without_label(payload)
        self._shards.need(chunk)
        with self._phase(FORWARD):
            compute = self.stage.forward if run.options.training else self.stage.evaluate
            output = compute(chunk, number, payload)
            if chunk == run.place.last:
                self._finish_forward(chunk, number, output, label)
            else:
                self._hand_on(action, output, label)

    def _hand_on(self, action: Action, output: Any, label: Any) -> None:
        """Pass the output to the next chunk, on this rank or by a message."""
        run, chunk, number = self._run, action.chunk, action.micro_batch
        if chunk == 0 and run.batch.labels_travel:
            label = run.batch.labels[number]
        if run.options.training:
            self.stage.keep(chunk, number, [tensor for tensor in tensors_in(output) if tensor.requires_grad])
        value = WithLabel(output, label) if run.batch.labels_travel else output
        if (send := run.place.send(action)) is not None:
            run.leaving[send] = value
        else:
            run.inputs[chunk + 1, number] = local_payload(value)

    def _finish_forward(self, chunk: int, number: int, output: Any, label: Any) -> None:
        run = self._run
        run.outcome.samples[number] = run.samples[number]
        if run.options.keep_outputs:
            run.outcome.outputs[number] = output
        if run.options.loss is None:
            return
        if not run.batch.labels_travel and run.batch.labels:
            label = run.batch.labels[number]
        loss = run.options.loss(output, label)
        if not (
            isinstance(loss, torch.Tensor) and loss.numel() == 1 and (loss.requires_grad or not run.options.training)
        ):
            raise loss_error(loss, "PipelineModule(loss_fn)", "Compute the loss from the last layer's output.")
        run.outcome.losses[number] = loss.detach()
        share = run.batch.share(run.samples[number])
        if run.options.weight is not None:
            weight, share = torch.as_tensor(run.options.weight(output, label), dtype=torch.float64), 1.0
            run.outcome.weights[number] = weight.detach().to(self._device).reshape(())
        if run.options.training:
            self.stage.keep(chunk, number, [loss])
            factor = run.options.scale * share
            run.gradients[chunk, number] = [torch.full_like(loss, factor)]

    def _backward_weights(self, action: Action) -> None:
        self._shards.need(action.chunk)
        with self._phase(BACKWARD):
            self.stage.backward_weights(action.chunk, action.micro_batch)
        self._shards.backward_done(action.chunk)

    def _pass_back(self, action: Action, compute: Callable[..., list[torch.Tensor | None]]) -> None:
        run, chunk, number = self._run, action.chunk, action.micro_batch
        gradients = run.gradients.pop((chunk, number))
        self._shards.need(chunk)
        with self._phase(BACKWARD):
            found = compute(chunk, number, gradients)
        if (send := run.place.send(action)) is not None:
            run.leaving[send] = found
        elif chunk > 0:
            run.gradients[chunk - 1, number] = found
        self._shards.backward_done(chunk)

    # --- messages ---------------------------------------------------------------------------------

    def _peer(self, action: Action) -> int:
        """Return the pipeline rank at the other end of a message."""
        return self._run.place.ranks[action.other_end.chunk]

    def _send(self, action: Action) -> None:
        run = self._run
        value = run.leaving.pop(action)
        self._out[self._peer(action)].send(action, value, run.samples[action.micro_batch])

    def _receive(self, action: Action) -> None:
        run, item = self._run, (action.chunk, action.micro_batch)
        payload, samples = self._in[self._peer(action)].take(action)
        if action.kind is ActionKind.RECV_F:
            run.inputs[item] = payload
            run.samples[item[1]] = samples
        else:
            run.gradients[item] = list(payload.value)

    # --- faults -----------------------------------------------------------------------------------

    def _fail(self, error: Exception, stages: int, action: Action | None) -> NoReturn:
        """Send the error in ``action`` to the other pipeline ranks, then raise it."""
        fault = error if isinstance(error, ZeroTrialError) else known_fault(error)
        if fault is None:
            world_rank = self.comm.ranks[self.comm.index]
            fault = layer_fault(error, world_rank, self.comm.index, stages, action)
        for channel in self._out.values():
            channel.fail(str(fault))
        for channel in self._out.values():
            channel.linger()
        if fault is error:
            raise error
        raise fault from error


@dataclass
class _Run:
    """Values of a run that wait for their action, by chunk and micro-batch or by send."""

    place: ChunkPlacement
    batch: StepInput
    options: StepOptions
    outcome: LastStageResult = field(default_factory=LastStageResult)
    inputs: dict[Item, Payload] = field(default_factory=dict)
    gradients: dict[Item, list[torch.Tensor | None]] = field(default_factory=dict)
    leaving: dict[Action, Any] = field(default_factory=dict)
    samples: dict[int, int] = field(default_factory=dict)


def _without_label(payload: Payload) -> tuple[Payload, Any]:
    """Separate activations (whose tensors are first) from the label sent with them."""
    value, label = payload.value
    count = len(tensors_in(value))
    return Payload(value, payload.tensors[:count], payload.differentiable[:count]), label


def layer_fault(error: Exception, rank: int, stage: int, stages: int, action: Action | None) -> TrialError:
    """Return the error for an exception that a layer or the loss function raised."""
    where = f"rank {rank}, pipeline stage {stage} of {stages}"
    if action is not None:
        number = f", micro-batch {action.micro_batch}" if action.micro_batch != NONE else ""
        where += f"{number}, action {action}"
    text = str(error).strip().splitlines()
    got = f"{type(error).__name__}: {text[0] if text else ''}".rstrip(": ")
    frame = user_frame(error)
    place = f"It was raised in {frame.filename}, line {frame.lineno}: {frame.line}" if frame is not None else None
    return TrialError("a pipeline stage failed", where=where, got=got, fix=place)


def loss_error(loss: Any, where: str, with_grad: str) -> TrialError:
    """Return the error for a loss that cannot be differentiated, with ``with_grad`` as fix."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return TrialError("the loss does not require grad", where=where, fix=with_grad)
    if isinstance(loss, torch.Tensor):
        got = f"a tensor of shape {tuple(loss.shape)}"
        fix = "Use loss.mean(). Without a loss_fn, the output of a PipelineModule's last layer is the loss."
    else:
        got = type(loss).__name__
        fix = "Remove .item()." if isinstance(loss, (int, float)) else "Extract the loss from the model's output."
    return TrialError("the loss is not a scalar", where=where, got=got, expected="a tensor with one element", fix=fix)

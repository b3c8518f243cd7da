"""Random sequences of what user code does between engine calls: reads, edits, exceptions inside
contexts, copies, saves. After each action all ranks have the values of dense training in one
process, or the rank that did it gets a TrialError, which ends the sequence. A sequence follows from
its number, as do stage, mesh, precision, optimizer, offload and accumulation. On four ranks half of
them are of a pipeline, in which each rank has the parameters of its stage.
"""

from __future__ import annotations

import copy
import functools
import io
import random
import traceback
import zlib
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.dense import STAGES, Case, Turn, build_engine
from tests.support.models import ADAMW, adamw
from tests.support.pool import Pools
from tests.support.whole_optimizers import MuonAndAdamW
from zero_trial import PipelineModule, zero
from zero_trial.errors import TrialError
from zero_trial.sharding.guards.freed import FreedParameter

STEPS, DECAY, MOMENT = 3, 0.75, "exp_avg"
HOW = ["data", "in-place", "replace", "vector"]
MUON = {"type": "Muon", "params": {"muon_lr": 2e-3, "adam_lr": 1e-3, "eps": 1e-3, "weight_decay": 0.1}}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EDITS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda p: p.clamp(-0.05, 0.05),
    lambda p: p * 0.5,
    lambda p: p.flip(0),
    lambda p: p.flatten().sort().values.view_as(p),
    lambda p: torch.linspace(-0.3, 0.3, p.numel()).view_as(p).to(p),
]


class Net(nn.Module):
    """Matrices that stage 3 frees, vectors that it keeps, a frozen layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 16), nn.LayerNorm(16)
        self.middle, self.last = nn.Linear(16, 16), nn.Linear(16, 3)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.register_buffer("gain", torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.frozen(x + torch.tanh(self.middle(self.norm(x))) * self.gain)))


def pipeline(stages: int) -> PipelineModule:
    layers = [nn.Linear(5, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh()]
    layers += [nn.Linear(16, 16).requires_grad_(False), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3)]
    return PipelineModule(layers, num_stages=stages, loss_fn=distance)


def distance(output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (output.float() - wanted).square().mean()


def loss_of(model: Any, turn: Turn) -> torch.Tensor:
    like = next(model.parameters())
    return distance(model(turn.normal(4, 5).to(like)), torch.ones(4, 3, device=like.device))


@torch.no_grad()
def assign(p: nn.Parameter, value: torch.Tensor, how: str = "data") -> None:
    if how == "replace":
        p.data = value
    elif how == "vector":
        nn.utils.vector_to_parameters(value.flatten(), [p])
    else:
        (p.data if how == "data" else p).copy_(value)


class Dense:
    """Plain torch: the mean over the batches of all ranks, fp32 masters and their average."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, muon: bool, ranks: int) -> None:
        self.ranks = ranks
        self.weights = {n: nn.Parameter(p.detach().clone()) for n, p in model.named_parameters() if p.requires_grad}
        self.model, self.optimizer = model.to(dtype), (MuonAndAdamW if muon else adamw)(list(self.weights.values()))
        self.parts = self.optimizer.parts if isinstance(self.optimizer, MuonAndAdamW) else [self.optimizer]
        self.params = dict(self.model.named_parameters())
        self.masters = {name: weight.data for name, weight in self.weights.items()}
        self.grads = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        self.average: dict[str, torch.Tensor] = {}

    def backward(self, step: int, turn: int, turns: int) -> None:
        for rank in range(self.ranks):
            (loss_of(self.model, Turn(step, turn, rank)) / (self.ranks * turns)).backward()
        for name, grad in self.grads.items():
            grad += self.params[name].grad.float()  # type: ignore[union-attr]
            self.params[name].grad = None

    def step(self) -> None:
        self.take_edits()
        for name, weight in self.weights.items():
            weight.grad = self.grads[name].clone()
            self.grads[name].zero_()
        self.optimizer.step()
        for name, master in self.masters.items():
            self.average.setdefault(name, master.clone()).lerp_(master, 1 - DECAY)
            self.params[name].data.copy_(master)

    def take_edits(self) -> None:
        for name, master in self.masters.items():
            now = self.params[name].data
            master.copy_(torch.where(now != master.to(now.dtype), now.float(), master))


class End(Exception):
    """A rank was told of its edit."""


class Play:
    """An engine and its dense twin. Each method without arguments below is an action on both."""

    def __init__(self, number: int, standin: bool, folder: Path, trace: list[str]) -> None:
        self.trace, self.rng, self.stages = trace, (rng := random.Random(number)), [[]]
        stage, self.turns, size = rng.choice(list(STAGES)), rng.choice([1, 1, 2]), dist.get_world_size()
        self.piped = size == 4 and rng.random() < 0.5
        precision = rng.choices(list(DTYPES), [6, 2, 2])[0]
        self.half, self.fp16, self.folder = precision != "fp32", precision == "fp16", str(folder / str(number))
        disk = {"device": "nvme", "nvme_path": str(folder)}
        places = {"offload_optimizer": disk, "offload_param": disk | {"max_in_cpu": 0, "buffer_count": 2}}
        away = {key: rng.choice([disk, {"device": "cpu"}]) for key, disk in places.items() if rng.random() < 0.25}
        self.muon = not away and rng.random() < 0.25
        mesh = {"mics_shard_size": size // 2} if stage != "zero0" and not self.piped and rng.random() < 0.3 else {}
        sharded = stage.startswith("zero3") and not self.piped and rng.random() < 0.3
        self.whole_grads = stage in ("zero0", "zero1")
        trace[0] += f" {stage} {mesh} {[(key, place['device']) for key, place in away.items()]} {precision}"
        trace[0] += f" pipeline {self.piped} Muon {self.muon} zero.Init {sharded} turns {self.turns}"
        config: dict[str, Any] = {"ema": {"decay": DECAY}, "comm_timeout_seconds": 10.0}
        config["train_micro_batch_size_per_gpu"] = 4
        if self.half:
            config[precision] = {"enabled": True} | ({"loss_scale": 64} if self.fp16 else {})
        torch.manual_seed(number)
        self.dtype, self.ranks, self.one = DTYPES[precision], range(size // 2 if self.piped else size), rng.randrange(2)
        self.dense = Dense(pipeline(1) if self.piped else Net(), self.dtype, self.muon, len(self.ranks))
        torch.manual_seed(number)
        with zero.Init() if sharded else nullcontext():
            model = pipeline(2) if self.piped else Net()
        self.params, self.rank = dict(model.named_parameters()), dist.get_rank()
        with suppress(End):
            self.block() if sharded else None
        self.dense.take_edits()
        optimizer = MUON if self.muon else ADAMW
        case = Case(lambda: model, loss_of, optimizer=optimizer, config=config, accumulation=self.turns)
        self.engine: Any = build_engine(case, STAGES[stage] | mesh | away | {"overlap_comm": rng.random() < 0.5})
        self.params, self.rank = dict(self.engine.module.named_parameters()), self.engine.mpu.get_data_parallel_rank()
        live = [name for name, param in self.params.items() if not isinstance(param, FreedParameter)]
        dist.all_gather_object(found := [[]] * size, (list(self.params), live))  # type: ignore[list-item]
        self.stages = [names for names, _ in found]
        self.live = list(dict.fromkeys(name for _, names in found for name in names))
        self.views: list[tuple[torch.Tensor, torch.Tensor]] = []  # that a hook keeps of freed weights
        if stage == "zero3-free" and rng.random() < 0.4:
            layers = [module for module in self.engine.module.modules() if isinstance(module, nn.Linear)]
            layers[0].register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: object, output: object) -> None:
        view = module.weight.detach()  # type: ignore[operator]
        self.views.append((view, view.clone()))

    def pick(self, options: Sequence[Any]) -> Any:
        number = self.rng.randrange(len(options))
        self.trace[-1] += f" {options[number] if isinstance(options[number], str) else number}"
        return options[number]

    def some(self, names: Collection[str]) -> list[str]:
        chosen = [name for name in names if self.rng.random() < 0.4]
        self.trace[-1] += f" {','.join(chosen)}"
        for stage in self.stages:  # a parameter of each
            chosen += [name for name in names if name in stage][:1] * (not {*chosen} & {*stage})
        return chosen

    def here(self, names: Collection[str]) -> list[str]:
        return [name for name in names if name in self.params]

    def also_dense(self, names: Sequence[str], edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for name in names:
            assign(self.dense.params[name], edit(self.dense.params[name].detach()))

    def same(self, what: str, got: Any, wanted: torch.Tensor) -> None:
        got, wanted = got.detach().float().cpu(), wanted.detach().float()
        gap = (got - wanted).abs().max().item()
        limit = (2e-2 if self.half else 1e-3 if self.muon else 1e-5) * max(1.0, wanted.abs().max().item())
        assert gap <= limit, f"{what} is {gap:.3g} off, more than {limit:.3g}: {got}, {wanted}"

    def check(self) -> None:
        """Compare parameters, gathered or not (which leaves another state), and note their bits."""
        crc, names = 0, self.rng.choice([self.live, list(self.params)])
        with nullcontext() if names is self.live else zero.GatheredParameters(self.engine.module):
            for name in self.here(names):
                self.same(name, self.params[name], self.dense.params[name])
                crc = zlib.crc32(bytes(self.params[name].detach().cpu().flatten().view(torch.uint8).tolist()), crc)
        assert all(torch.equal(*pair) for pair in self.views)
        self.trace[-1] += "" if self.piped else f": {crc:x}"

    def block(self) -> None:
        edit, how, names = self.pick(EDITS), self.pick(HOW), self.some(self.dense.params)
        modifier, said, groups = self.pick([None, 0, 1]), "", [[], [self.one], self.ranks]
        writers, raisers = self.pick(groups), self.pick([*groups, []])
        try:
            with zero.GatheredParameters([self.params[name] for name in self.here(names)], modifier_rank=modifier):
                for name in self.here(names) if self.rank in writers else []:
                    assign(self.params[name], edit(self.params[name].detach()) + (self.rank != modifier), how)
                if self.rank in raisers:
                    raise KeyError("as user code does")
        except (KeyError, TrialError) as error:
            said = str(error)
        others = "another rank raised" if raisers and modifier is not None else ""
        expected = "as user code does" if self.rank in raisers else others
        expected = "which only reads" if modifier is None and self.rank in writers else expected
        assert expected in said and bool(expected) == bool(said), f"{said!r} instead of {expected!r}"
        if modifier is None and writers:
            raise End
        if modifier in writers and not raisers:
            self.also_dense(names, edit)

    def edit_live(self) -> None:
        edit, names = self.pick(EDITS), self.some(self.live)
        how = self.pick(HOW)
        self.also_dense(names, edit)
        for name in self.here(names):
            assign(self.params[name], edit(self.params[name].detach()), how)

    def edit_on_one(self) -> None:
        """A save notices every edit of one rank; a step does not see frozen parameters."""
        if not self.live or self.rng.random() < 0.95:
            return
        step = functools.partial(self.give_batch, 0) if self.piped else self.engine.step
        end = self.pick([step, lambda: self.engine.save_checkpoint(self.folder)])
        seen = [name for name in self.live if name in self.dense.masters] if end is step else self.live
        names, how = self.some(seen)[-1:], self.pick(HOW)
        for name in self.here(names) if self.rank == self.one else ():
            assign(self.params[name], self.params[name].detach() + 1, how)
        with pytest.raises(TrialError, match="on some ranks only"):
            end()
        raise End

    def exchange(self) -> None:
        pair = [name for name in self.live if tuple(self.params[name].shape) == (16,)][:2]
        for params in (self.params, self.dense.params) if pair else ():
            one, other = (params[name] for name in pair)
            one.data, other.data = other.data.clone(), one.data.clone()

    def copies(self) -> None:
        freed = any(isinstance(param, FreedParameter) for param in self.params.values())
        with pytest.raises(TrialError, match="GatheredParameters") if freed else nullcontext():
            for name, param in copy.deepcopy(self.engine.module).named_parameters():
                self.same(name, param, self.dense.params[name])
        torch.save({name: self.params[name] for name in self.live}, file := io.BytesIO())
        file.seek(0)
        for name, value in {**self.engine.module_state_dict(), **torch.load(file, map_location="cpu")}.items():
            self.same(name, value, self.dense.model.state_dict()[name])

    def load(self) -> None:
        edit, names, state = self.pick(EDITS), self.some(self.dense.params), self.engine.module_state_dict()
        load = self.rng.choice([self.engine.load_module_state_dict, self.engine.module.load_state_dict])
        load(state | {name: edit(state[name].clone()) for name in self.here(names)})
        self.also_dense(names, edit)

    def states(self) -> None:
        self.dense.take_edits()
        names, edit, known = self.some(self.dense.masters)[-2:], self.pick(EDITS), self.dense.optimizer.state
        for name in names:
            param, master = self.params.get(name), self.dense.masters[name]
            if param is not None:
                self.same(f"master of {name}", zero.safe_get_full_fp32_param(param), master)
                zero.safe_set_full_fp32_param(param, edit(master))
            self.dense.params[name].data.copy_(master.copy_(edit(master.clone())))
            if self.dense.weights[name] in known and not self.muon:
                moment = known[self.dense.weights[name]][MOMENT]
                if param is not None:
                    self.same(f"{MOMENT} of {name}", zero.safe_get_full_optimizer_state(param, MOMENT), moment)
                    zero.safe_set_full_optimizer_state(param, moment.flip(0) / 2, MOMENT)
                moment.copy_(moment.flip(0) / 2)

    def settings(self) -> None:
        for model, optimizers in ((self.engine.module, [self.engine.optimizer]), (self.dense.model, self.dense.parts)):
            for buffer in model.buffers():
                buffer.mul_(0.9)
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] *= 0.9
        self.engine.optimizer.load_state_dict(self.engine.optimizer.state_dict())
        self.engine.offload_states()
        self.engine.reload_states()

    def averages(self) -> None:
        """Reads, or a permutation on all ranks or on one: an error there, or nothing is left."""
        self.dense.take_edits()
        average, names, fails, told = self.dense.average, self.some(self.live), self.rng.random() < 0.3, False
        writers = self.rng.choice([[], [self.one], self.ranks]) if average else []
        try:
            with self.engine.ema_weights(), torch.no_grad():
                for name, value in self.engine.module_state_dict().items():
                    if name in self.dense.masters:
                        self.same(f"average of {name}", value, (average or self.dense.masters)[name])
                for name in {*self.here(names)} & {*average} if self.rank in writers else ():
                    self.params[name].copy_(self.params[name].flip(0))
                if fails:
                    raise KeyError("as user code does")
        except (KeyError, TrialError) as error:
            told = "the averages have the change" in str(error)
            assert told or fails
        dist.all_reduce(anyone := torch.tensor(told), dist.ReduceOp.MAX)
        if anyone:
            raise End
        for name in self.here(average):
            now = zero.safe_get_full_optimizer_state(self.params[name], "ema")
            self.same(f"average of {name}", now, average[name])

    def checkpoint(self) -> None:
        self.engine.save_checkpoint(self.folder, tag="one")
        with zero.GatheredParameters(self.engine.module, modifier_rank=self.one):
            for param in self.params.values():
                assign(param, param.detach() + 1)
        self.engine.load_checkpoint(self.folder, tag="one")

    def grads(self) -> None:
        name = self.rng.choice(list(self.dense.masters))
        param, grad, value = self.params[name], self.dense.grads[name], zero.safe_get_full_grad(self.params[name])
        self.same(f"gradient of {name}", value, grad)
        how = self.pick(["full", "drop", "direct", "direct" if self.fp16 else "clip"])  # scaled gradients
        if param.grad is None:
            return
        if how in ("direct", "clip") and not self.whole_grads:
            with pytest.raises(TrialError, match="full gradients do not live"):
                param.grad.mul_(0.5)  # type: ignore[union-attr]
        elif how == "clip":
            nn.utils.clip_grad_norm_(self.params.values(), 0.01)
            norm = torch.stack([each.norm() for each in self.dense.grads.values()]).norm().item()
            for each in self.dense.grads.values():
                each *= min(1.0, 0.01 / (norm + 1e-6))
        else:
            grad *= 0 if how == "drop" else 0.5
            if how == "full":
                zero.safe_set_full_grad(param, value.flip(0) / 2)  # type: ignore[union-attr]
                grad.copy_(grad.flip(0))
            elif how == "drop":
                param.grad = None
            else:
                param.grad.mul_(0.5)  # type: ignore[union-attr]

    def act(self, most: int, actions: Sequence[Callable[[], None]]) -> None:
        for _ in range(self.rng.randint(0, most)):
            action = self.rng.choice(actions)
            self.trace.append(action.__name__)
            action()
            self.check()

    def train(self) -> None:
        anytime = [self.edit_live, self.load, self.states, self.settings, self.averages] + [self.block] * 4
        anytime += [] if self.piped else [self.exchange, self.copies]
        for step in range(STEPS):
            self.take_batch(step) if self.piped else self.take_turns(step, anytime)
            self.trace.append("step")
            self.dense.step()
            self.check()
            self.act(3, [*anytime, self.checkpoint])

    def take_turns(self, step: int, anytime: Sequence[Callable[[], None]]) -> None:
        for turn in range(self.turns):
            self.trace.append("backward")
            self.dense.backward(step, turn, self.turns)
            self.engine.backward(loss_of(self.engine, Turn(step, turn, self.rank)))
            self.act(2, [*anytime] + [self.grads] * 4 * (turn == self.turns - 1))
            if turn == self.turns - 1:
                self.edit_on_one()
            self.engine.step()

    def take_batch(self, step: int) -> None:
        self.edit_on_one()
        for turn in range(self.turns):
            self.dense.backward(step, turn, self.turns)
        self.give_batch(step)

    def give_batch(self, step: int) -> None:
        turns = (Turn(step, turn, self.rank) for turn in range(self.turns))
        self.engine.train_batch((turn.normal(4, 5).to(self.dtype), torch.ones(4, 3)) for turn in turns)


def sequences(numbers: range, standin: bool, folder: Path) -> list[tuple[list[str], str]]:
    found: list[tuple[list[str], str]] = []  # for each number the bits after each action, and the error
    for number in numbers:
        found.append((trace := [str(number)], ""))
        try:
            play = Play(number, standin, folder, trace)
            with suppress(End):
                play.train()
            play.engine.destroy()
        except Exception:
            return [*found[:-1], (trace, traceback.format_exc())]
    return found


# (ranks, on the stand-in device, numbers)
RUNS = [
    (2, False, range(10, 60)),
    (4, False, range(2000, 2020)),
    (2, True, range(1002, 1014)),
]
SLOW = [pytest.param(*run, marks=pytest.mark.slow) for run in RUNS]
MORE = pytest.param(2, False, range(60, 110), marks=pytest.mark.extended)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("size", "standin", "numbers"), [(2, False, range(10)), (2, True, range(1000, 1002)), *SLOW, MORE]
)
def test_sequences(ranks: Pools, devices: Pools, size: int, standin: bool, numbers: range, tmp_path: Path) -> None:
    print(f"{len(numbers)} sequences of user actions, from number {numbers.start}")
    found = (devices if standin else ranks)(size).run(sequences, numbers, standin, tmp_path)
    for each in zip(*found, strict=False):  # one sequence on all ranks
        assert not any(fault for _, fault in each), "\n".join(line for trace, fault in each for line in (*trace, fault))
        assert all(trace == each[0][0] for trace, _ in each), "\n".join(line for trace, _ in each for line in trace)
    assert [len(each) for each in found] == [len(numbers)] * size

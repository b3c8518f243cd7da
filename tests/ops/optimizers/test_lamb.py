"""LAMB on whole tensors, and on pieces that cut through tensors, over several ranks in one
process."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.support.thread_ranks import ThreadRank, on_ranks
from zero_trial.ops.optimizers.lamb import FusedLamb
from zero_trial.ops.optimizers.shard_step import ShardUpdate, TensorPart
from zero_trial.ops.reference import AdamResult, _adam_moments

SHAPES = [(4, 3), (5,), (2, 2, 2), (1,)]
SETTINGS = {"lr": 0.1, "weight_decay": 0.1, "eps": 1e-6}


def lamb_step(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    t: float,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    bias_correction: bool = True,
    max_coeff: float = 10.0,
    min_coeff: float = 0.01,
) -> AdamResult:
    """You et al. 2020, Algorithm 2, on one whole tensor; phi is the identity and the ratio is
    clamped as in DeepSpeed."""
    m, v = _adam_moments(g, m, v, betas)
    c1, c2 = (1 - betas[0] ** t, 1 - betas[1] ** t) if bias_correction else (1.0, 1.0)
    r = (m / c1) / ((v / c2).sqrt() + eps)
    update = r + weight_decay * p
    w_norm, u_norm = p.norm(), update.norm()
    ratio = torch.where(
        (w_norm > 0) & (u_norm > 0), (w_norm / u_norm).clamp(min_coeff, max_coeff), torch.ones_like(w_norm)
    )
    return AdamResult(p - lr * ratio * update, m, v)


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in SHAPES]


def gradients(steps: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [[torch.randn(shape, dtype=torch.float64, generator=generator) for shape in SHAPES] for _ in range(steps)]


def reference_run(steps: int, multiplier: float = 1.0) -> list[Tensor]:
    out = []
    for i, p in enumerate(tensors()):
        m, v = torch.zeros_like(p), torch.zeros_like(p)
        for t, step in enumerate(gradients(steps), start=1):
            p, m, v = lamb_step(p, step[i] * multiplier, m, v, t, **SETTINGS)  # type: ignore[arg-type]
        out.append(p)
    return out


@pytest.mark.parametrize("multiplier", [1.0, 0.25])
def test_unbound_each_parameter_is_one_tensor(multiplier: float) -> None:
    params = [torch.nn.Parameter(p) for p in tensors()]
    lamb = FusedLamb([{"params": params[:2]}, {"params": params[2:]}], **SETTINGS)  # type: ignore[arg-type]
    for step in gradients(5):
        for p, g in zip(params, step, strict=True):
            p.grad = g
        lamb.step(multiplier=multiplier)
    for p, expected in zip(params, reference_run(5, multiplier), strict=True):
        torch.testing.assert_close(p.detach(), expected)


def flat(parts: list[Tensor], padding: int) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts] + [torch.zeros(padding, dtype=torch.float64)])


def segments_of(start: int, stop: int) -> list[TensorPart]:
    """The parts of [start, stop) of all tensors laid end to end, relative to ``start``."""
    out, offset = [], 0
    for index, p in enumerate(tensors()):
        low, high = max(start, offset), min(stop, offset + p.numel())
        if low < high:
            out.append(TensorPart(index, low - offset, low - start, high - start))
        offset += p.numel()
    return out


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_pieces_that_cut_tensors_give_the_same_as_whole_tensors(ranks: int) -> None:
    numel = sum(p.numel() for p in tensors())
    padding = -numel % (ranks * 2)
    size = (numel + padding) // ranks
    calls: list[int] = []

    def train(rank: ThreadRank) -> Tensor:
        def all_reduce(part: Tensor) -> None:
            calls.append(rank.index)
            part.copy_(torch.tensor(rank.gather_row(part.tolist(), "part"), dtype=part.dtype).sum(0))

        start = rank.index * size
        cuts = [start, start + size // 2, start + size]  # two pieces per rank
        whole = flat(tensors(), padding)
        pieces = [torch.nn.Parameter(whole[a:b].clone()) for a, b in itertools.pairwise(cuts)]
        lamb = FusedLamb([{"params": [piece]} for piece in pieces], **SETTINGS)  # type: ignore[arg-type]
        bound = {id(p): segments_of(a, b) for p, a, b in zip(pieces, cuts, cuts[1:], strict=False)}
        lamb.bind(bound, len(SHAPES), all_reduce)
        for step in gradients(5):
            g = flat(step, padding)
            for piece, a, b in zip(pieces, cuts, cuts[1:], strict=False):
                piece.grad = g[a:b].clone()
            lamb.step()
        return torch.cat([piece.detach() for piece in pieces])

    torch.testing.assert_close(torch.cat(on_ranks(ranks, train)), flat(reference_run(5), padding))
    assert len(calls) == 5 * ranks  # one collective per step


def test_one_pass_from_16_bit_gradients_to_a_16_bit_copy() -> None:
    """Two tensors in one piece, with padding before, between and behind them, which stays as it
    is."""
    piece = torch.nn.Parameter(torch.linspace(-1, 1, 12))
    lamb = FusedLamb([piece], **SETTINGS)  # type: ignore[arg-type]
    lamb.bind({id(piece): [TensorPart(0, 0, 1, 5), TensorPart(1, 0, 6, 11)]}, 2, lambda _: None)
    before = piece.detach().clone()
    wanted = [
        (before[a:b].double(), torch.zeros(b - a).double(), torch.zeros(b - a).double()) for a, b in ((1, 5), (6, 11))
    ]
    out = torch.full((12,), 7.0, dtype=torch.bfloat16)
    for t in (1, 2):
        g = torch.linspace(2, -1, 12).mul(t).bfloat16()
        lamb.step(updates=[ShardUpdate(piece, g, out, 0)], multiplier=0.5)
        wanted = [
            lamb_step(p, g[a:b].double() * 0.5, m, v, t, **SETTINGS)  # type: ignore[arg-type]
            for (p, m, v), (a, b) in zip(wanted, ((1, 5), (6, 11)), strict=True)
        ]
    for (p, m, v), (a, b) in zip(wanted, ((1, 5), (6, 11)), strict=True):
        for got, want in ((piece, p), (lamb.state[piece]["exp_avg"], m), (lamb.state[piece]["exp_avg_sq"], v)):
            torch.testing.assert_close(got.detach()[a:b].double(), want, rtol=1e-6, atol=1e-7)
        assert torch.equal(out[a:b], piece.detach()[a:b].bfloat16())
    gaps = [0, 5, 11]
    assert torch.equal(piece.detach()[gaps], before[gaps]) and (out[gaps] == 7.0).all()
    assert float(lamb.state[piece]["step"]) == 2.0


def test_groups_differ_in_everything() -> None:
    """Rate, betas, eps, decay, clamp and bias correction are each group's own, in one step."""
    own = [
        {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1, "bias_correction": False},
        {"lr": 0.2, "betas": (0.8, 0.999), "eps": 1e-3, "weight_decay": 0.0, "max_coeff": 0.3},
    ]
    params = [torch.nn.Parameter(p) for p in tensors()[:2]]
    lamb = FusedLamb([{"params": [p]} | settings for p, settings in zip(params, own, strict=True)])
    for p, g in zip(params, gradients(1)[0], strict=False):
        p.grad = g
    lamb.step()
    for p, before, g, settings in zip(params, tensors(), gradients(1)[0], own, strict=False):
        zeros = torch.zeros_like(before)
        want = lamb_step(before, g, zeros, zeros, 1, **settings).p  # type: ignore[arg-type]
        # the ratio is rounded to fp32
        torch.testing.assert_close(p.detach(), want, rtol=1e-6, atol=1e-6)


def test_a_tensor_of_zeros_steps_with_ratio_one() -> None:
    """Not with 1 clamped: as in the paper's implementations, and in DeepSpeed."""
    p = torch.nn.Parameter(torch.zeros(4))
    p.grad = torch.ones(4)
    FusedLamb([p], lr=0.1, max_coeff=0.5).step()
    torch.testing.assert_close(p.detach(), torch.full((4,), -0.1))

"""Optimizers as users write them, whose update of an element depends on more than that element."""

from __future__ import annotations

from typing import Any

import torch


class _Own(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self.direction(param, group), alpha=group["lr"])

    def direction(self, param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        raise NotImplementedError


class MuonLike(_Own):
    """The momentum of a matrix, orthogonalized by an exact decomposition."""

    def direction(self, param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        momentum = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
        momentum.lerp_(param.grad, 0.1)
        if param.dim() != 2:
            return momentum / (1 + momentum.abs())
        norm = momentum.norm() + 1e-2
        x = momentum / norm
        return 1.5 * x - 0.5 * x @ x.T @ x


class ShampooLike(_Own):
    """A matrix of squares for each dimension, in a list, and a count that is a number."""

    def direction(self, param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        state = self.state[param]
        if not state:
            state["step"] = 0
            state["factors"] = [torch.eye(size) for size in param.shape]
        state["step"] += 1
        moved = param.grad.clone()
        for dim, factor in enumerate(state["factors"]):
            flat = param.grad.movedim(dim, 0).reshape(len(factor), -1)
            factor.lerp_(flat @ flat.T, 1.0 / (1 + state["step"]))
            moved = torch.tensordot(torch.linalg.inv(factor + torch.eye(len(factor))), moved, ([1], [dim])).movedim(
                0, dim
            )
        return moved


class LayerWise(_Own):
    """As long as the weight, along the gradient (LARS)."""

    def direction(self, param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return param.grad * ((param.norm() + 0.1) / (param.grad.norm() + 0.1))


class Noisy(_Own):
    """Random numbers in the step (SGLD)."""

    def direction(self, param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return param.grad + torch.randn_like(param)


class GlobalNorm(_Own):
    """Divides by the norm of all gradients together, and counts its steps in the group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"]]
        norm = torch.stack([param.grad.square().sum() for param in params]).sum().sqrt()
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for param in group["params"]:
                param.sub_(param.grad / (norm + 0.1), alpha=group["lr"] / group["steps"] ** 0.5)


class Unprobed(GlobalNorm):
    """Steps only what it was built with sizes of: the small tensors of a probe make it raise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not any(param.shape == (11, 11) for group in self.param_groups for param in group["params"]):
            raise RuntimeError("not the model that this optimizer is for")
        super().step(closure)


class LateCoupling(_Own):
    """Sums all gradients into a number of its group, which grows for long before it changes a step
    (D-adaptation)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["total"] = group.get("total", 0.0) + sum(p.grad.abs().sum().item() for p in group["params"])
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["lr"] * max(1.0, group["total"] / 1e6))


class ScheduleFree(_Own):
    """SGD of Defazio et al. 2024: trains at y, between the iterate z and its mean x; evaluates at
    x. Counts its steps in the group."""

    beta = 0.9

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group.update(train_mode=False, k=0)

    @torch.no_grad()
    def train(self) -> None:
        self._move(True, 1 - self.beta)

    @torch.no_grad()
    def eval(self) -> None:
        self._move(False, 1 - 1 / self.beta)

    def _move(self, mode: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not mode:
                for param in group["params"]:
                    if "z" in self.state[param]:
                        param.lerp_(self.state[param]["z"], weight)
                group["train_mode"] = mode

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call optimizer.train() before the first step")
            group["k"] += 1
            for param in group["params"]:
                z = self.state[param].setdefault("z", param.clone())
                x = param.lerp(z, 1 - 1 / self.beta)
                z.sub_(param.grad, alpha=group["lr"])
                x.lerp_(z, 1 / group["k"])
                param.copy_(x.lerp(z, 1 - self.beta))


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's two in one, by the number of dimensions; ``params`` are parameters or groups."""

    def __init__(self, params: Any, by_muon: Any = lambda param: param.dim() == 2, lr: float = 1e-3) -> None:
        super().__init__(params, {})
        found = [param for group in self.param_groups for param in group["params"]]
        self.parts = [
            torch.optim.Muon([p for p in found if by_muon(p)], lr=2 * lr, weight_decay=0.1),
            torch.optim.AdamW(
                [p for p in found if not by_muon(p)], lr=lr, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1
            ),
        ]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


class MuonByGroup(torch.optim.Optimizer):
    """Muon and AdamW written out in one step, by the groups' ``use_muon``. As it is published, it
    insists on that key, and takes groups alone."""

    def __init__(self, param_groups: Any, lr: float = 1e-3) -> None:
        for group in param_groups:
            assert "use_muon" in group
        super().__init__(param_groups, {"lr": lr, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["step"] = 0
                    state["momentum"] = torch.zeros_like(param)
                    if not group["use_muon"]:
                        state["square"] = torch.zeros_like(param)
                state["step"] += 1
                state["momentum"].lerp_(param.grad, 0.1)
                if group["use_muon"]:
                    x = state["momentum"] / (state["momentum"].norm() + 1e-2)
                    for _ in range(3):
                        x = 1.5 * x - 0.5 * x @ x.mT @ x
                else:
                    state["square"].lerp_(param.grad.square(), 0.05)
                    first = state["momentum"] / (1 - 0.9 ** state["step"])
                    x = first / ((state["square"] / (1 - 0.95 ** state["step"])).sqrt() + 1e-3)
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(x, alpha=group["lr"])


def muon_by_group(params: Any, lr: float = 1e-3) -> torch.optim.Optimizer:
    """Return the same over two groups: matrices by Muon, the others by AdamW."""
    found = [param for group in params for param in group["params"]] if isinstance(params[0], dict) else list(params)
    matrices, others = [p for p in found if p.dim() == 2], [p for p in found if p.dim() != 2]
    groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    return MuonByGroup([group for group in groups if group["params"]], lr=lr)

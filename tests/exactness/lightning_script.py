"""Trainings by Lightning's Trainer, one after the other: ``lightning_script.py OUT DEVICES JSON``,
under a launcher. JSON has the cases by name; OUT gets the losses of rank 0, or the error."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch import nn

from zero_trial.errors import ZeroTrialError
from zero_trial.lightning import ZeroTrialStrategy


class Net(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, told: dict[str, Any]) -> None:
        super().__init__()
        self.automatic_optimization = not told.get("manual", False)
        self.told = told
        self.net: Any = None
        self.losses: list[float] = []
        self.val: list[float] = []
        self.norms: list[float] = []

    def _built(self) -> nn.Module:
        # a bias before BatchNorm would have the rounding of 0 for a gradient
        first = (nn.Linear(8, 32, bias=False), nn.BatchNorm1d(32)) if self.told.get("buffers") else (nn.Linear(8, 32),)
        return nn.Sequential(*first, nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(3)
            self.net = self._built()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        return out

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor | None:
        x, y = batch
        loss = nn.functional.mse_loss(self(x).float(), y)
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        if "clip" in self.told:
            self.clip_gradients(optimizer, gradient_clip_val=self.told["clip"], gradient_clip_algorithm="norm")
        optimizer.step()
        return None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.told.get("hooked"):
            self.norms.append(sum(float(param.grad.norm()) for param in self.parameters() if param.grad is not None))

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val", nn.functional.mse_loss(self(x).float(), y), sync_dist=True)

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("test", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.val.append(float(self.trainer.callback_metrics["val"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def run(told: dict[str, Any], devices: int) -> dict[str, Any]:
    """Train one case."""
    torch.manual_seed(1)
    x = torch.randn(32, 8)
    if told.get("same"):  # where Lightning goes on in the data is its own affair
        x = x[:1].repeat(32, 1)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
    torch.manual_seed(2)
    net = Net(told)
    if not told.get("late", False):
        net.configure_model()
    strategy = "ddp" if told.get("stage") is None else ZeroTrialStrategy(config=_config(told))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    try:
        trainer = _trainer(
            told, devices, strategy, callbacks=[StochasticWeightAveraging(0.01)] if "swa" in told else []
        )
        trainer.fit(net, loader, loader, ckpt_path=told.get("resume"))
        tested = _fit_again(told, devices, net, loader) if told.get("again") else 0.0
    except ZeroTrialError as error:
        return {"error": str(error)}
    if told.get("save"):
        trainer.save_checkpoint(told["save"])
    trainer.strategy.barrier()
    found = {"losses": net.losses, "val": net.val, "norms": net.norms, "test": tested}
    return {**found, "steps": trainer.global_step}


def _trainer(told: dict[str, Any], devices: int, strategy: Any, **options: Any) -> lightning.Trainer:
    return lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_steps=told.get("steps", 8),
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **{"enable_checkpointing": False, **options, **told.get("trainer", {})},
    )


def _fit_again(told: dict[str, Any], devices: int, net: Net, loader: Any) -> float:
    """Fit the module once more, by another Trainer, whose strategy is given by name; return the
    loss of its best checkpoint. Raise where it has not kept the best and the last."""
    kept = ModelCheckpoint(Path(told["again"]) / "kept", monitor="val", save_top_k=1, save_last=True)
    again = _trainer(told, devices, told["again"], callbacks=[kept], enable_checkpointing=True)
    again.fit(net, loader, loader)
    names = {path.name for path in (Path(told["again"]) / "kept").iterdir()}
    if names != {"last.ckpt", Path(kept.best_model_path).name}:
        raise ValueError(names)
    return float(again.test(net, loader, ckpt_path="best", verbose=False)[0]["test"])


def main() -> None:
    out, devices = Path(sys.argv[1]), int(sys.argv[2])
    cases: dict[str, dict[str, Any]] = json.loads(sys.argv[3])
    torch.set_num_threads(1)
    found = {name: run(told, devices) for name, told in cases.items()}
    if int(os.environ.get("RANK", "0")) == 0:
        out.write_text(json.dumps(found))


def _config(told: dict[str, Any]) -> dict[str, Any]:
    zero = {"stage": told["stage"], "stage3_param_persistence_threshold": 0}
    return {"zero_optimization": zero, **told.get("config", {})}


if __name__ == "__main__":
    main()

"""Letters from noise: a generator and a discriminator, two engines in one trial, each with its own
ds_config and accumulation."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from distance import Features, frechet_distance, gaussian_like
from model import Discriminator, GanConfig, Generator, seeded
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import TensorDataset

from zero_trial import DataLoader, ZeroTrial, ZeroTrialContext
from zero_trial.data import GlyphImages, glyph_images, image_folder

SHOWN = 64  # letters on a sheet, always from the same noise


class DCGANTrial(ZeroTrial):
    """Reports both losses, and how far the generated letters are from those of fonts that were
    never trained on."""

    def __init__(self, context: ZeroTrialContext) -> None:
        self.context, data = context, context.get_data_config()
        self.config = GanConfig(**context.get_hparams().model)
        self.seed = context.get_trial_seed()
        self.train_images, self.val_images = (
            letters(data, self.config.size, split) for split in ("train", "validation")
        )
        # The first engine fixes the loader's micro-batch: it is the discriminator that sees
        # letters.
        self.discriminator = context.initialize(
            model=seeded(Discriminator, self.config, self.seed), config=data["discriminator"]
        )
        self.generator = context.initialize(
            model=seeded(Generator, self.config, self.seed + 1), config=data["generator"]
        )
        # each engine takes as many micro-batches as its own ds_config says
        context.disable_auto_grad_accumulation()
        self.features = Features().to(context.device)
        self.real = self.features(pixels(self.val_images.images).to(context.device))

    def build_training_data_loader(self) -> DataLoader:
        dataset = TensorDataset(pixels(self.train_images.images), self.train_images.labels)
        return DataLoader(dataset, self.context.get_train_micro_batch_size_per_gpu(), shuffle=True, drop_last=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(
            TensorDataset(self.val_images.labels), len(self.val_images)
        )  # the letters' features are known

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Tensor]:
        """Train one optimizer step of each engine, the discriminator first; the loss is not
        saturating (Goodfellow et al. 2014, section 3).
        """
        return {
            "discriminator_loss": self.train_discriminator(dataloader_iter, batch_idx),
            "loss": self.train_generator(batch_idx),
        }

    def train_discriminator(self, batches: Any, step: int) -> Tensor:
        losses = []
        for micro in range(self.discriminator.gradient_accumulation_steps()):
            real, _ = self.context.to_device(next(batches))
            with torch.no_grad():
                made = self.generator(self.noise(len(real), step, micro))
            answers = self.discriminator(
                torch.cat([real, made])
            )  # one pass over both: an engine's forward is of one micro-batch
            truth = torch.cat([torch.full_like(answers[: len(real)], 0.9), torch.zeros_like(answers[len(real) :])])
            loss = binary_cross_entropy_with_logits(answers, truth)
            self.discriminator.backward(loss)
            self.discriminator.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def train_generator(self, step: int) -> Tensor:
        losses = []
        for micro in range(self.generator.gradient_accumulation_steps()):
            noise = self.noise(self.generator.train_micro_batch_size_per_gpu(), step, 1000 + micro)
            with frozen(self.discriminator.module):
                answers = self.discriminator(self.generator(noise))
                loss = binary_cross_entropy_with_logits(answers, torch.ones_like(answers))
                self.generator.backward(loss)
            self.generator.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def noise(self, count: int, step: int, micro: int) -> Tensor:
        """Draw (count, latent) numbers from seed, rank, step and micro-batch, so that a resumed run
        draws the same."""
        name = ((self.seed * 1_000_003 + step) * 2003 + micro) * 4099 + self.context.distributed.rank
        generator = torch.Generator().manual_seed(name % 2**63)
        return torch.randn(count, self.config.latent, generator=generator).to(self.context.device)

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, float]:
        """Return the distance of as many generated letters as there are held-out ones, from noise
        that is always the same.
        """
        made = self.made(len(self.real))
        if self.context.distributed.rank == 0:
            self.show(made[:SHOWN])
        return {"frechet_distance": frechet_distance(self.features(made), self.real)}

    def made(self, count: int) -> Tensor:
        noise = torch.randn(count, self.config.latent, generator=torch.Generator().manual_seed(self.seed))
        return torch.cat([self.generator(part.to(self.context.device)) for part in noise.split(256)]).float()

    def show(self, made: Tensor) -> None:
        """Write a sheet of generated letters into ``samples/`` beside the TensorBoard folder and
        into TensorBoard itself.
        """
        step = self.context.current_train_batch() if self.context.position is not None else 0
        sheet = contact_sheet(((made.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu())
        write_png(self.context.get_tensorboard_path().parent / "samples" / f"step-{step:06d}.png", sheet)
        if has_tensorboard():
            self.context.get_tensorboard_writer().add_image("samples", sheet, step)

    def summary(self) -> dict[str, Any]:
        """Return the distance of blots with the right mean and covariance, and of letters of the
        training fonts."""
        real = pixels(self.train_images.images)
        count = len(self.real)
        blots = gaussian_like(real, count, self.seed).to(self.context.device)
        some = real[torch.randperm(len(real), generator=torch.Generator().manual_seed(self.seed))[:count]]
        return {
            "gaussian_frechet_distance": frechet_distance(self.features(blots), self.real),
            "train_fonts_frechet_distance": frechet_distance(self.features(some.to(self.context.device)), self.real),
            "train_data": self.train_images.describe(),
            "validation_data": self.val_images.describe(),
        }


@contextmanager
def frozen(module: torch.nn.Module) -> Iterator[None]:
    """Let gradients pass through ``module`` without reaching its parameters, which another engine
    trains."""
    module.requires_grad_(False)
    try:
        yield
    finally:
        module.requires_grad_(True)


def letters(data: dict[str, Any], size: int, split: str) -> GlyphImages:
    """Return letters of fonts, whole families held out, or a folder of images where ``data.source``
    names one."""
    if data.get("source"):
        return image_folder(data["source"], size, split)  # type: ignore[arg-type]
    variants = data.get("variants", 8)
    return glyph_images(size, data["characters"], split, variants=variants, fonts=data.get("fonts"))  # type: ignore[arg-type]


def pixels(images: Tensor) -> Tensor:
    """Convert uint8 to float32 from -1 to 1."""
    return images.to(torch.float32) / 127.5 - 1


def has_tensorboard() -> bool:
    """Return whether TensorBoard is installed; without it the pictures are files only."""
    return importlib.util.find_spec("tensorboard") is not None


def contact_sheet(images: Tensor, columns: int = 8) -> Tensor:
    """Arrange images [N, 1, S, S] uint8 in rows: [1, rows * S, columns * S]; the rest is 0."""
    count, _, height, width = images.shape
    rows = -(-count // columns)
    sheet = images.new_zeros(rows * columns, height, width)
    sheet[:count] = images[:, 0]
    return sheet.view(rows, columns, height, width).permute(0, 2, 1, 3).reshape(1, rows * height, columns * width)


def write_png(path: Path, image: Tensor) -> None:
    """Write a grey image [1, H, W] uint8 as a PNG file and make its folder."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    _, height, width = image.shape
    Image.frombytes("L", (width, height), image.cpu().contiguous().numpy().tobytes()).save(path)

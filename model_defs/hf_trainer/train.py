"""A small Llama on local text by Hugging Face's Trainer, with a ds_config, as a trial of
Determined: DetCallback reports its metrics and checkpoints."""

from __future__ import annotations

import importlib.util
import logging
import sys
from dataclasses import dataclass
from typing import Any

import determined as det
import torch
from torch.utils.data import Dataset

from zero_trial.data import ByteDataset, local_corpus, unigram_bits_per_byte
from zero_trial.ds_config.overlay import overwrite_ds_config

_MISSING = [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]
if _MISSING:
    sys.exit(f"model_defs/hf_trainer needs {' and '.join(_MISSING)}: pip install transformers accelerate")

from determined.transformers import DetCallback  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed  # noqa: E402


@dataclass
class Arguments(TrainingArguments):
    """TrainingArguments with the one option that DetCallback of determined 0.38.1 reads when a
    trial resumes, and that transformers 5 has dropped."""

    overwrite_output_dir: bool = False


class Callback(DetCallback):
    """DetCallback with the list that its constructor fills under adaptive_asha, and that determined
    0.38.1 does not make."""

    def __init__(self, context: det.core.Context, arguments: TrainingArguments) -> None:
        self.required_metrics: list[str] = []
        super().__init__(context, arguments)


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Windows of text as Trainer takes them; the model shifts the labels itself."""

    def __init__(self, windows: ByteDataset) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        inputs, _ = self.windows[index]
        return {"input_ids": inputs, "labels": inputs}


def train(context: det.core.Context, info: det.ClusterInfo) -> None:
    """Train one point of the search, from its latest checkpoint if it has one."""
    hparams, data = info.trial.hparams, info.user_data
    shape: dict[str, Any] = dict(hparams["model"])
    sequence = shape.pop("sequence")
    # each trial of a search has a seed of its own in info.trial; here all stages begin alike
    set_seed(hparams["training_arguments"]["seed"])
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=sequence, **shape))
    arguments = Arguments(
        output_dir="trainer",
        deepspeed=overwrite_ds_config(data["ds_config"], hparams.get("ds_config", {})),
        learning_rate=hparams["learning_rate"],
        **hparams["training_arguments"],
        report_to=[],
        disable_tqdm=True,
    )
    callback = Callback(context, arguments)
    corpus = local_corpus(data["source"], max_bytes=data["max_bytes"])
    validation = ByteDataset(corpus.val, sequence, data["validation_windows"])
    if context.distributed.rank == 0:
        nats = unigram_bits_per_byte(corpus.train, validation.predicted_bytes()) * torch.log(torch.tensor(2.0))
        logging.info("byte frequencies alone have eval_loss %.4f", nats)

    trainer = Trainer(
        model,
        arguments,
        train_dataset=Samples(ByteDataset(corpus.train, sequence)),
        eval_dataset=Samples(validation),
        callbacks=[callback],
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)


def main() -> None:
    """Find the trial that this process is a rank of."""
    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    info = det.get_cluster_info()
    if info is None:
        sys.exit("model_defs/hf_trainer is a trial: det experiment create experiments/hf_trainer/const.yaml ...")
    with det.core.init(distributed=det.core.DistributedContext.from_torch_distributed()) as context:
        train(context, info)


if __name__ == "__main__":
    main()

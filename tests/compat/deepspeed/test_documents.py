"""Code of public documents about DeepSpeed and Determined, as it is written there: the blocks run
in one process under the stand-in; what a document leaves open ("...") is filled in around them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Each block stands between lines of "#": the document's own text. The rest is what its reader has.
INTRODUCTION = """
import zero_trial.as_deepspeed
import deepspeed, pathlib, torch
import numpy as np
torch.manual_seed(0)
########
print(f"Numpy version: {np.__version__}")
print(f"PyTorch version: {torch.__version__}")
print(f"DeepSpeed version: {deepspeed.__version__}")
########
batch_size, checkpoint_every, start_step, exp_dir = 4, 1000, 1, pathlib.Path("experiments")
exp_dir.mkdir()
model = torch.nn.Linear(3, 1)
########
ds_config = {
  "train_micro_batch_size_per_gpu": batch_size,
  "optimizer": {
      "type": "Adam",
      "params": {
          "lr": 1e-4
      }
  },
  "fp16": {
      "enabled": True
  },
  "zero_optimization": {
      "stage": 1,
      "offload_optimizer": {
         "device": "cpu"
      }
  }
}
model, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
########
def read():
    global loss  # the document's loop leaves its forward to the reader
    for _ in range(3):
        loss = model(torch.ones(4, 3, dtype=torch.half)).float().mean()
        yield loss
data_iterator = read()
########
for step, batch in enumerate(data_iterator, start=start_step):
    model.backward(loss)
    model.step()
########
assert model.global_steps == 3
########
if step % checkpoint_every != 0:
    model.save_checkpoint(save_dir=exp_dir, client_state={'checkpoint_step': step})
########
_, client_state = model.load_checkpoint(exp_dir)
assert client_state["checkpoint_step"] == 3
"""

CLUSTER = """
import zero_trial.as_determined
import argparse, torch
from attrdict import AttrDict
########
import deepspeed
########
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--backend")
parser.add_argument("--pipeline_parallel_size", type=int)
args = parser.parse_args("--deepspeed_config=ds_config.json --backend gloo --pipeline_parallel_size 1".split())
dataset = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(2, (64,)))
train_iters = 3
criterion = torch.nn.CrossEntropyLoss()
net = torch.nn.Linear(8, 2)
def get_layers(net):
    return [net, torch.nn.Tanh()]
########
deepspeed.init_distributed(dist_backend=args.backend) # backend usually nccl
########
model_engine, optimizer, lr_scheduler, dataloader = deepspeed.initialize(
    args=args, # args has deepspeed_config as an attribute
    net=net,
    dataset=dataset,
)
########
dataloader = lr_scheduler  # the document confuses the two: DeepSpeed, too, returns the loader as the third
########
for idx, batch in enumerate(dataloader):
    inputs, targets = batch
    outputs = model_engine(inputs)
    loss = criterion(outputs, targets)
    model_engine.backward(loss)
    model_engine.step()
########
assert model_engine.global_steps == 64 // 16
model_engine.destroy()
from deepspeed import PipelineModule
########
net = PipelineModule(
    layers=get_layers(net), # get_layers is a user provided function that will return layers of a network.
    loss_fn=torch.nn.CrossEntropyLoss(),
    num_stages=args.pipeline_parallel_size,
)
model_engine, _, _, _ = deepspeed.initialize(
    args=args,
    model=net,
    dataset=dataset, # optional
)
########
dataloader = train_dataloader = torch.utils.data.DataLoader(dataset, batch_size=4)
########
for _ in range(train_iters):
    # The model_engine will automatically perform forward, backward, and optimizer update on
    # batches requested internally from the dataloader and interleave.
    model_engine.train_batch(dataloader)
########
for _ in range(train_iters):
    model_engine.train_batch(train_dataloader)
########
assert model_engine.global_steps == 2 * train_iters
model_engine.destroy()
from typing import Any, Dict, Iterable
class MyModel(PipelineModule):
    def __init__(self):
        super().__init__(layers=get_layers(torch.nn.Linear(8, 2)), loss_fn=criterion, num_stages=1)
########
import deepspeed
from determined.pytorch import DataLoader, DeepSpeedTrial, DeepSpeedTrialContext, DeepSpeedMPU

class MyTrial(DeepSpeedTrial):
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.args = AttrDict(self.context.get_hparams())
        model = MyModel()
        self.model_engine, _, _, _ = deepspeed.initialize(
            args=self.args,
            model=model,
        )
        model_engine = self.model_engine
        self.mpu = self.context.wrap_mpu(DeepSpeedMPU(model_engine.mpu))
        self.model_engine = self.context.wrap_model_engine(model_engine)
        config = deepspeed.DeepSpeedConfig(args.deepspeed_config,)
        assert (config.train_batch_size, config.gradient_accumulation_steps) == (16, 4)
        self.context.reconcile_ds_config(model_engine._config)

    def build_training_data_loader(self) -> Any:
        trainset = dataset
        return DataLoader(trainset, batch_size=self.args.train_micro_batch_size_per_gpu, shuffle=True)

    def build_validation_data_loader(self) -> Any:
        valset = dataset
        return DataLoader(valset, batch_size=self.args.train_micro_batch_size_per_gpu, shuffle=False)

    def train_batch(
        self, iter_dataloader: Iterable[DataLoader], epoch_idx: int, batch_idx: int
    ) -> Dict[str, torch.Tensor]:
        loss = self.model_engine.train_batch(iter_dataloader)
        return {"loss": float(loss)}

    def evaluate_batch(self, iter_dataloader: Iterable[DataLoader]) -> Dict[str, Any]:
        loss = self.model_engine.eval_batch(iter_dataloader)
        return {"loss": loss}
########
from determined import pytorch
from determined.pytorch import deepspeed as det_ds
hparams = {"global_batch_size": 16, "data_parallel_world_size": 1, "deepspeed_config": "ds_config.json"}
hparams["train_micro_batch_size_per_gpu"] = 4
with det_ds.init(hparams=hparams) as context:
    outcome = det_ds.Trainer(MyTrial(context), context).fit(max_length=pytorch.Batch(3), checkpoint_policy="none")
assert outcome.step == 3
"""
DS_CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
}


@pytest.mark.smoke
@pytest.mark.parametrize("text", [INTRODUCTION, CLUSTER], ids=["introduction", "cluster"])
def test_the_code_of_a_document_runs_as_it_is_written(text: str, tmp_path: Path) -> None:
    sizes = DS_CONFIG if text is CLUSTER else {}
    (tmp_path / "ds_config.json").write_text(json.dumps(sizes))
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

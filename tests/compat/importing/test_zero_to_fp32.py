"""Whole fp32 weights from checkpoints of both programs, under DeepSpeed's names."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.compat.importing.checkpoints import go_on, resumed, unpack
from tests.compat.importing.traveller import Traveller
from tests.support.pool import Pools
from zero_trial.compat.importing.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from zero_trial.errors import CheckpointError
from zero_trial.zero import safe_get_full_fp32_param

# Of names, dtypes, shapes and bytes that DeepSpeed 0.19.8's own zero_to_fp32 gives for these
# checkpoints without their frozen weight (which it leaves out at stage 1 in any case, and keeps in
# 16 bits elsewhere).
OF_DEEPSPEED = {
    "bf16-stage1-ranks3": "e79b2ddb3deb7b41",
    "bf16-stage3-ranks3": "9cd072ce21f28b08",
    "fp16-stage2-ranks2": "676950b3e6c41b32",
    "fp32-stage1-ranks2": "9dd11e4e94b4c1db",
    "fp32-stage2-ranks3": "06ac2fb2833d8325",
    "fp32-stage3-ranks2": "6488e1eae87574c1",
    "fp32-stage1-ranks2-universal": "9dd11e4e94b4c1db",
    "fp32-stage3-ranks2-universal": "6488e1eae87574c1",
}
WHOLE = {"fp32-stage2-ranks3": "fe73904da73f3cca", "fp32-stage3-ranks2": "4b369ec35c98776d"}


def digest(state: Mapping[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(state):
        found.update(f"{name} {state[name].dtype} {tuple(state[name].shape)};".encode())
        found.update(state[name].numpy().tobytes())
    return found.hexdigest()[:16]


@pytest.mark.parametrize("name", [*OF_DEEPSPEED, "bf16-stage0-ranks1", "fp32-stage0-ranks2"])
def test_deepspeeds_checkpoints_give_its_bits_the_frozen_weight_and_tied_names(name: str, tmp_path: Path) -> None:
    folder = unpack(name, tmp_path)
    state = get_fp32_state_dict_from_zero_checkpoint(folder, next(p.name for p in folder.iterdir() if p.is_dir()))
    model = Traveller()
    assert state.keys() == model.state_dict().keys()
    assert state["head.weight"] is state["emb.weight"]
    assert state["frozen.weight"].dtype == torch.float32
    assert name not in WHOLE or digest(state) == WHOLE[name]
    if name in OF_DEEPSPEED:  # the bits of DeepSpeed's own script
        assert digest(get_fp32_state_dict_from_zero_checkpoint(folder, None, True)) == OF_DEEPSPEED[name]
    assert load_state_dict_from_zero_checkpoint(model, folder) is model
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def save_on_a_rank(stage: int, kind: str, folder: str) -> bool:
    engine = resumed(stage, kind)
    go_on(engine, engine.mesh.rank, 2)
    masters = {
        name: safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters() if param.requires_grad
    }
    engine.save_checkpoint(folder, tag="one")
    state = get_fp32_state_dict_from_zero_checkpoint(folder)
    good = state.keys() == engine.module_state_dict().keys()
    good &= all(torch.equal(state[name], value) for name, value in masters.items())
    good &= all(value.dtype == torch.float32 for name, value in state.items() if name != "seen")
    good &= state["head.weight"] is state["emb.weight"]
    few = get_fp32_state_dict_from_zero_checkpoint(folder, "one", exclude_frozen_parameters=True)
    return good and state.keys() - few.keys() == {"frozen.weight"}


@pytest.mark.parametrize(("stage", "kind"), [(0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "bf16")])
def test_our_own_give_the_masters(ranks: Pools, stage: int, kind: str, tmp_path: Path) -> None:
    assert ranks(2).run(save_on_a_rank, stage, kind, str(tmp_path)) == [True, True]


def test_files_in_hugging_faces_layout(tmp_path: Path) -> None:
    folder = unpack("bf16-stage1-ranks3", tmp_path)
    state = get_fp32_state_dict_from_zero_checkpoint(folder)
    one, many, safe = (tmp_path / name for name in ("one", "many", "safe"))
    convert_zero_checkpoint_to_fp32_state_dict(folder, one)
    loaded = torch.load(one / "pytorch_model.bin", weights_only=True)
    assert loaded["head.weight"].data_ptr() == loaded["emb.weight"].data_ptr()
    assert digest(loaded) == digest(state)

    convert_zero_checkpoint_to_fp32_state_dict(folder, many, max_shard_size="600B")
    index = json.loads((many / "pytorch_model.bin.index.json").read_text())
    files = sorted(path.name for path in many.glob("*.bin"))
    assert files == [f"pytorch_model-{number:05d}-of-{len(files):05d}.bin" for number in range(1, len(files) + 1)]
    assert len(files) > 2
    joined = {name: value for file in files for name, value in torch.load(many / file, weights_only=True).items()}
    assert digest(joined) == digest(state)
    assert index["weight_map"].keys() == state.keys()
    tied = state["head.weight"].nbytes
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in state.values()) - tied

    convert_zero_checkpoint_to_fp32_state_dict(folder, safe, safe_serialization=True, max_shard_size=None)
    kept = load_file(safe / "model.safetensors")
    assert state.keys() - kept.keys() in ({"head.weight"}, {"emb.weight"})
    assert all(torch.equal(kept[name], state[name]) for name in kept)


def test_what_is_refused_and_a_model_that_has_only_a_part(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Stage 0 of DeepSpeed does not say what is frozen."""
    with pytest.raises(CheckpointError, match="exclude_frozen_parameters"):
        get_fp32_state_dict_from_zero_checkpoint(unpack("fp32-stage0-ranks2", tmp_path), exclude_frozen_parameters=True)
    folder = unpack("fp32-stage2-ranks3", tmp_path)
    with pytest.raises(CheckpointError, match="absent"):
        get_fp32_state_dict_from_zero_checkpoint(folder, "absent")
    with pytest.raises(CheckpointError, match=r"Pass the module that was passed to initialize"):
        load_state_dict_from_zero_checkpoint(nn.Conv2d(1, 1, 1), folder)
    model = nn.ModuleDict({"body": nn.Linear(8, 25)})
    with caplog.at_level(logging.WARNING, logger="zero_trial"):
        load_state_dict_from_zero_checkpoint(model, folder)
    assert "emb.weight" in caplog.text
    assert torch.equal(model["body"].weight, get_fp32_state_dict_from_zero_checkpoint(folder)["body.weight"])

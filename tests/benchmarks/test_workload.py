"""The workload is the same everywhere: weights from the seed, batches from rank and step."""

from __future__ import annotations

import torch

from benchmarks.workload import Workload

TINY = Workload("tiny", micro_batch=4, layers=23, width=8)
GPT = Workload("gpt", micro_batch=2, sequence=16, layers=1, width=64)


def test_weights_and_batches_do_not_depend_on_the_random_state() -> None:
    for workload in (TINY, GPT):
        first, second = workload.build().state_dict(), workload.build().state_dict()
        assert all(torch.equal(first[name], second[name]) for name in first)
        torch.rand(1)
        assert all(torch.equal(*pair) for pair in zip(workload.batch(1, 5), workload.batch(1, 5), strict=True))
        assert not torch.equal(workload.batch(0, 5)[0], workload.batch(1, 5)[0])


def test_the_tiny_model_has_two_tensors_per_layer() -> None:
    model = TINY.build()
    assert len(list(model.parameters())) == 46
    assert len(model.blocks) == 3  # type: ignore[arg-type]
    model(*TINY.batch(0, 0)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_gpt_predicts_the_next_token_of_its_batch() -> None:
    inputs, targets = GPT.batch(0, 0)
    assert inputs.shape == targets.shape == (2, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])

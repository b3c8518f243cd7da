"""Numbers on their way from the device."""

from __future__ import annotations

import pytest
import torch

from zero_trial.engine.step import PinnedReadback


def test_what_is_received_is_what_was_there_when_it_was_sent():
    courier = PinnedReadback(torch.device("cpu"), 3)
    courier.there.copy_(torch.tensor([1.0, 2.0, 3.0]))
    courier.send()
    courier.there.zero_()
    assert courier.received == 0
    assert courier.receive().tolist() == [1.0, 2.0, 3.0]
    assert courier.received == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sending_from_a_busy_device_does_not_wait():
    courier = PinnedReadback(torch.device("cuda", 0), 1)
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = torch.nn.functional.normalize(busy @ busy)
    courier.there.copy_(busy[0, :1])
    torch.cuda.set_sync_debug_mode("error")
    try:
        courier.send()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert courier.receive().item() == busy[0, 0].item()

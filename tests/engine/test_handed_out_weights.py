"""``engine.named_full_parameters``: the whole model for a program that does not train."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.engine.test_weights import Net, start
from tests.support.pipelines import layers, make_engine
from tests.support.pool import Pools
from zero_trial.errors import TrialError
from zero_trial.zero import GatheredParameters

ROOT = Path(__file__).parents[2]

# A model behind HTTP whose load_weights() takes names and tensors, as vLLM's models do: an unknown
# name is an error, parts may come in any order, and all of them must come.
RECEIVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, urlparse
import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)).bfloat16()
missing = {name for name, _ in model.named_parameters()}

def load_weights(weights):
    params = dict(model.named_parameters())
    for name, value in weights:
        assert params[name].shape == value.shape, name
        params[name].data.copy_(value)
        missing.discard(name)

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        given = {key: value[0] for key, value in parse_qs(urlparse(self.path).query).items()}
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            value = torch.frombuffer(bytearray(body), dtype=getattr(torch, given["dtype"]))
            load_weights([(given["name"], value.view(json.loads(given["shape"])))])
            answer, status = b"", 200
        except Exception as error:
            answer, status = repr(error).encode(), 400
        self.answer(status, answer)

    def do_GET(self):
        said = model(torch.eye(8).bfloat16()).flatten().tolist()
        self.answer(200, json.dumps({"missing": sorted(missing), "said": said}).encode())

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass

server = HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.fixture
def receiver() -> Iterator[str]:
    with subprocess.Popen([sys.executable, "-c", RECEIVER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


def send(url: str, name: str, value: torch.Tensor) -> None:
    facts = {"name": name, "dtype": str(value.dtype).removeprefix("torch."), "shape": json.dumps(list(value.shape))}
    body = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    urlopen(Request(f"{url}/update?{urlencode(facts)}", data=body, method="POST")).read()


def train_and_send(url: str, stage: int) -> list[float]:
    """Take a step, hand the weights to a server, and return what the model says on this rank."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    engine = start(model, f"zero{stage}", bf16=True)
    engine.backward(engine(torch.eye(8)[dist.get_rank() :]).sum())
    engine.step()
    for name, value in engine.named_full_parameters(torch.bfloat16):
        if dist.get_rank() == 0:
            send(url, name, value)
    said: list[float] = engine(torch.eye(8)).flatten().tolist()
    engine.destroy()
    return said


@pytest.mark.parametrize("stage", [1, 3])
def test_a_server_computes_with_the_weights_that_it_was_sent(ranks: Pools, receiver: str, stage: int) -> None:
    assert len(json.loads(urlopen(receiver).read())["missing"]) == 4
    said, _ = ranks(2).run(train_and_send, receiver, stage)
    found = json.loads(urlopen(receiver).read())
    assert found == {"missing": [], "said": said} and len(set(said)) > 1


def whole_and_handed_out(cases: list[dict[str, Any]]) -> list[tuple[bool, bool, int, int]]:
    """Return whether names and values are those of the model, those of a collected dict too, and
    how many elements that do not always live are there at most while the largest group has."""
    found = []
    for case in cases:
        torch.manual_seed(5)
        engine = start(Net(), **case)
        expected, most, same = dict(engine.module_state_dict()), 0, True
        unsharder, base = engine.sharded.unsharder, engine.sharded.unsharder.live_numel()
        seen = []
        for name, value in engine.named_full_parameters():
            most = max(most, unsharder.live_numel() - base)
            same = same and torch.equal(value, expected[name]) and value.dtype == expected[name].dtype
            seen.append(name)
        collected = dict(engine.named_full_parameters(torch.float64))  # each tensor outlives its turn
        kept = all(torch.equal(value, expected[name].double()) for name, value in collected.items())
        kept = kept and all(
            torch.equal(value, expected[name]) for name, value in dict(engine.named_full_parameters()).items()
        )
        largest = max((group.layout.numel for group in engine.sharded.groups if not group.live), default=0)
        found.append((same and sorted(seen) == sorted(dict(engine.module.named_parameters())), kept, most, largest))
        engine.destroy()
    return found


def test_values_are_those_of_the_model_one_group_at_a_time(ranks: Pools) -> None:
    """Trained, frozen, tied, cut and small ones; tied ones come once."""
    cases: list[dict[str, Any]] = [{"section": f"zero{stage}", "bf16": stage % 2 == 1} for stage in range(4)]
    for answer in ranks(2).run(whole_and_handed_out, cases):
        for same, kept, most, largest in answer:
            assert same and kept
            assert most == largest
        assert [largest > 0 for *_, largest in answer] == [False, False, False, True]


def left_early(how: str) -> tuple[int, bool]:
    """Count what each rank has seen where rank 0 ends its loop early; training goes on."""
    engine = start(Net(), "zero3")
    seen = 0
    try:
        for _ in engine.named_full_parameters():
            seen += 1
            if dist.get_rank() == 0 and seen == 2:
                if how == "error":
                    raise ConnectionError("the server is gone")
                break
    except ConnectionError:
        pass
    weights = engine.named_full_parameters()
    with closing(weights), GatheredParameters([engine.module.frozen.weight]):
        next(weights)  # in a block that ends before the gather of the generator
    again = {name: value.clone() for name, value in engine.named_full_parameters()}
    same = all(torch.equal(value, engine.module_state_dict()[name]) for name, value in again.items())
    freed = engine.sharded.unsharder.live_numel()
    engine.destroy()
    return seen, same and freed == 0


@pytest.mark.parametrize("how", ["break", "error"])
def test_a_rank_that_leaves_early_gathers_with_the_others(ranks: Pools, how: str) -> None:
    (first, free), (second, also) = ranks(2).run(left_early, how, timeout=60)
    assert first == 2 < second and free and also


def refusals() -> list[str]:
    engine = start(Net(), "zero3")
    texts = []

    def refuse(act: Callable[[], object]) -> None:
        with pytest.raises(TrialError) as error:
            act()
        texts.append(str(error.value))

    def edit() -> None:
        for name, value in engine.named_full_parameters():
            if name == "embed.weight":
                value.zero_()

    refuse(edit)
    engine.destroy()
    refuse(lambda: next(engine.named_full_parameters()))
    return texts


def test_edits_and_values_that_only_rank_0_has_are_refused(ranks: Pools) -> None:
    for edited, destroyed in ranks(2).run(refusals):
        assert "embed.weight" in edited and "are lost" in edited
        assert "the engine was destroyed" in destroyed


def handed_out_of_stages() -> dict[str, torch.Tensor]:
    engine = make_engine(layers(2), 2, {"stage": 3, "stage3_param_persistence_threshold": 0}, 1)
    own = {name: value.clone() for name, value in engine.module_state_dict().items()}
    found = {}
    for name, value in engine.named_full_parameters():
        assert name not in found
        found[name] = value.clone()
    assert own.keys() <= found.keys() and all(torch.equal(found[name], value) for name, value in own.items())
    engine.destroy()
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_of_a_pipeline_gets_the_layers_of_all_stages(ranks: Pools, size: int) -> None:
    answers = ranks(size).run(handed_out_of_stages)
    names = answers[0].keys()
    for answer in answers:
        assert answer.keys() == names and len(names) > 10
        assert all(torch.equal(value, answers[0][name]) for name, value in answer.items())

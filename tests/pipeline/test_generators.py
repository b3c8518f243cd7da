"""The schedules by name: their pictures, their prices, and their limits."""

from __future__ import annotations

import pytest

from tests.pipeline.lowered import drawn, parse, report
from zero_trial.errors import ConfigError
from zero_trial.pipeline.schedule import Action, ActionKind, ChunkPlacement, ParameterLifetime, build, even_groups
from zero_trial.pipeline.simulator import Costs, grid

PICTURES = [
    ("gpipe", 3, Costs(), """
        rank 0  F0 F1 F2 .  .  .  B0 -  B1 -  B2 -
        rank 1  .  F0 F1 F2 B0 -  B1 -  B2 -  .  ."""),
    ("1f1b", 3, Costs(), """
        rank 0  F0 F1 .  .  B0 -  F2 B1 -  .  B2 -
        rank 1  .  F0 B0 -  F1 B1 -  F2 B2 -  .  ."""),
    ("1f1b", 3, Costs(), """
        rank 0  F0 F1 F2 .  .  .  .  B0 -  .  B1 -  .  B2 -
        rank 1  .  F0 F1 .  .  B0 -  F2 B1 -  .  B2 -  .  .
        rank 2  .  .  F0 B0 -  F1 B1 -  F2 B2 -  .  .  .  ."""),
    ("1f1b", 2, Costs(2, 2, 1, 1), """
        rank 0  F0 -  F1 -  .  .  .  .  .  B0 -  -  .  .  B1 -  -
        rank 1  .  .  .  F0 -  B0 -  -  F1 -  B1 -  -  .  .  .  ."""),
    ("interleaved", 2, Costs(), """
        rank 0  0F0 0F1 2F0 2F1 .   .   2B0 -   .   2B1 -   0B0 -   0B1 -
        rank 1  .   1F0 1F1 3F0 3B0 -   3F1 3B1 -   1B0 -   1B1 -   .   ."""),
    ("looped_bfs", 2, Costs(), """
        rank 0  0F0 0F1 2F0 2F1 .   .   .   2B0 -   2B1 -   0B0 -   0B1 -
        rank 1  .   1F0 1F1 3F0 3F1 3B0 -   3B1 -   1B0 -   1B1 -   .   ."""),
    ("zb_h1", 3, Costs(), """
        rank 0  F0 F1 F2 .  .  I0 W0 I1 W1 I2 W2
        rank 1  .  F0 F1 .  I0 F2 I1 W0 I2 W1 W2
        rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 W1 W2"""),
    ("zb_v", 4, Costs(), """
        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3 .
        rank 1  .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3"""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "micro_batches", "costs", "expected"), PICTURES)
def test_pictures(name: str, micro_batches: int, costs: Costs, expected: str):
    stages = expected.count("rank ")
    assert grid(report(name, stages, micro_batches, costs=costs)) == drawn(expected)


def test_a_picture_of_many_ranks_is_aligned_and_one_of_half_units_is_refused():
    lines = grid(report("gpipe", 11, 12)).splitlines()
    assert lines[0].startswith("rank 0   F0  F1 ") and lines[10].startswith("rank 10  .   .  ")
    with pytest.raises(ConfigError, match="integer times"):
        grid(report("1f1b", 2, 2, costs=Costs(forward=1.5)))


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 1), (2, 8), (4, 2), (4, 8), (5, 7)])
def test_prices_gpipe(stages: int, micro_batches: int):
    got = report("gpipe", stages, micro_batches)
    assert got.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    assert [rank.peak_activations for rank in got.ranks] == [micro_batches] * stages


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 1), (2, 8), (4, 2), (4, 8), (5, 7)])
@pytest.mark.parametrize("costs", [Costs(), Costs(1, 2, 2), Costs(3, 1, 1)])
def test_prices_one_f_one_b(stages: int, micro_batches: int, costs: Costs):
    got = report("1f1b", stages, micro_batches, costs=costs)
    assert got.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    assert [rank.peak_activations for rank in got.ranks] == [
        min(stages - rank, micro_batches) for rank in range(stages)
    ]


@pytest.mark.parametrize(
    ("stages", "micro_batches", "chunks"), [(2, 2, 2), (2, 8, 2), (4, 8, 2), (4, 8, 3), (4, 6, 2), (3, 7, 4), (1, 5, 2)]
)
def test_prices_interleaved(stages: int, micro_batches: int, chunks: int):
    got = report("interleaved", stages, micro_batches, chunks)
    group = max(map(len, even_groups(micro_batches, stages)))
    assert got.bubble == pytest.approx((stages - 1) / (chunks * micro_batches + stages - 1))
    for rank, counts in enumerate(got.ranks):
        most = (chunks - 1) * group + 2 * (stages - rank - 1) + 1
        assert counts.peak_activations == min(most, chunks * micro_batches)


def test_groups_are_even_and_never_too_small():
    assert [list(group) for group in even_groups(7, 3)] == [[0, 1, 2, 3], [4, 5, 6]]
    assert [list(group) for group in even_groups(2, 4)] == [[0, 1]]
    assert [len(group) for group in even_groups(11, 4)] == [6, 5]


@pytest.mark.parametrize(("stages", "micro_batches", "chunks"), [(2, 2, 2), (2, 8, 2), (4, 8, 2), (4, 5, 3)])
def test_prices_looped_bfs(stages: int, micro_batches: int, chunks: int):
    got = report("looped_bfs", stages, micro_batches, chunks, parameters=ParameterLifetime.CHUNK)
    assert got.bubble == pytest.approx((stages - 1) / (chunks * micro_batches + stages - 1))
    for rank in got.ranks:
        assert rank.peak_activations == chunks * micro_batches and rank.gathers == 2 * chunks - 1
        assert (rank.peak_parameters, rank.peak_gradients) == (1, 1)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 2), (2, 8), (4, 4), (4, 9), (6, 12)])
def test_prices_zb_h1(stages: int, micro_batches: int):
    got = report("zb_h1", stages, micro_batches)
    assert got.makespan == 3 * micro_batches + stages - 1
    assert all(got.idle(rank) == stages - 1 for rank in range(stages))
    assert [rank.peak_activations for rank in got.ranks] == [min(stages, micro_batches)] * stages


@pytest.mark.parametrize("costs", [Costs(4, 5, 3), Costs(2, 3, 2), Costs(1, 1, 1)])
def test_idle_time_by_costs(costs: Costs):
    """(P-1)(F+I-W), as the paper has it; 1F1B's is (P-1)(F+I+W)."""
    idle = 3 * (costs.forward + costs.input_gradient - costs.weight_gradient)
    assert report("zb_h1", 4, 12, costs=costs).idle(0) == idle
    assert report("1f1b", 4, 12, costs=costs).idle(0) == idle + 3 * 2 * costs.weight_gradient


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (2, 9), (3, 6), (4, 8), (4, 16), (6, 12)])
def test_prices_zb_v(stages: int, micro_batches: int):
    got = report("zb_v", stages, micro_batches)
    assert got.makespan == 6 * micro_batches + stages - 1
    assert [rank.peak_activations for rank in got.ranks] == [2 * stages] * stages
    assert sum(rank.messages for rank in got.ranks) == 2 * micro_batches * (2 * stages - 2)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4])
def test_fewer_micro_batches_than_fill_the_pipe(stages: int, micro_batches: int):
    got = report("zb_v", stages, micro_batches)
    assert all(rank.busy == 6 * micro_batches for rank in got.ranks)
    assert max(rank.peak_activations for rank in got.ranks) <= 2 * min(stages, micro_batches)


def test_an_unknown_name():
    with pytest.raises(ConfigError, match=r"got 'pipedream', expected one of gpipe, 1f1b"):
        build("pipedream", 2, 2)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 2), ("zb_v", 1), ("gpipe", 3)])
def test_chunks_that_cannot_be_chosen(name: str, chunks: int):
    with pytest.raises(ConfigError, match=r"fixed number of chunks.*accept a number: interleaved, looped_bfs"):
        build(name, 2, 4, chunks)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (2, 2, 0), (-1, 1, None)])
def test_sizes_below_one(sizes: tuple[int, int, int | None]):
    with pytest.raises(ConfigError, match="1 or more"):
        build("interleaved", *sizes)


TEXTS = {
    "2F0": Action(ActionKind.F, 2, 0),
    "10I3": Action(ActionKind.I, 10, 3),
    "2SEND_B7": Action(ActionKind.SEND_B, 2, 7),
    "3UNSHARD": Action(ActionKind.UNSHARD, 3),
    "3REDUCE": Action(ActionKind.REDUCE, 3),
    "3REDUCE1": Action(ActionKind.REDUCE, 3, 1),
    "0TIED_REDUCE1": Action(ActionKind.TIED_REDUCE, 0, 1),
    "STEP": Action(ActionKind.STEP),
}


@pytest.mark.parametrize("text", TEXTS)
def test_the_text_of_an_action(text: str):
    assert str(TEXTS[text]) == text and parse(text) == TEXTS[text]


@pytest.mark.parametrize(("send", "receive"), [("1SEND_F0", "2RECV_F0"), ("2SEND_B7", "1RECV_B7")])
def test_the_ends_of_a_message(send: str, receive: str):
    assert parse(send).other_end == parse(receive) and parse(receive).other_end == parse(send)


PLACEMENTS = {
    "a loop": (ChunkPlacement.loop(3, 2), [(0, 3), (1, 4), (2, 5)], [True] * 5 + [False], [False] + [True] * 5),
    "a V turns without a message": (
        ChunkPlacement.v(3),
        [(0, 5), (1, 4), (2, 3)],
        [True, True, False, True, True, False],
        [False, True, True, False, True, True],
    ),
    "one rank sends nothing": (ChunkPlacement.loop(1, 3), [(0, 1, 2)], [False] * 3, [False] * 3),
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_placements(name: str):
    place, of, forward, backward = PLACEMENTS[name]
    assert [place.of(rank) for rank in range(place.stages)] == of
    assert (place.chunks, place.last) == (len(forward), len(forward) - 1)
    assert [place.sends_forward(chunk) for chunk in range(place.chunks)] == forward
    assert [place.sends_backward(chunk) for chunk in range(place.chunks)] == backward

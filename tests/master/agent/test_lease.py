"""An allocation is run by one process at most."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zero_trial.master.agent.lease import Exit, acquire, exists, exit_of, owner, record_exit
from zero_trial.master.agent.processes import Identity


def test_the_first_claim_holds(tmp_path: Path) -> None:
    assert not exists(tmp_path) and owner(tmp_path) is None
    assert acquire(tmp_path, Identity(1, "2"))
    assert not acquire(tmp_path, Identity(3, "4")) and not acquire(tmp_path, None)
    assert owner(tmp_path) == Identity(1, "2") and exists(tmp_path)


def test_a_void_one_belongs_to_nobody_for_ever(tmp_path: Path) -> None:
    assert acquire(tmp_path, None)
    assert exists(tmp_path) and owner(tmp_path) is None and not acquire(tmp_path, Identity(1, "2"))


def test_of_many_at_once_one_wins(tmp_path: Path) -> None:
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        with ThreadPoolExecutor(4) as pool:
            won = list(pool.map(lambda _: acquire(folder, None), range(4)))  # noqa: B023
        assert won.count(True) == 1 and [path.name for path in folder.iterdir()] == ["claim.json"]


def test_an_exit_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert exit_of(tmp_path) is None
    record_exit(tmp_path, Exit(3, 5.0, killed=True, why="so"))
    assert exit_of(tmp_path) == Exit(3, 5.0, killed=True, why="so")
    assert [path.name for path in tmp_path.iterdir()] == ["exit.json"]


def test_files_that_a_power_cut_left_empty_are_a_claim_without_an_owner(tmp_path: Path) -> None:
    for content in ("", '{"pid"', "\0\0\0", "3"):
        (tmp_path / "claim.json").write_text(content)
        (tmp_path / "exit.json").write_text(content)
        assert exists(tmp_path) and owner(tmp_path) is None and exit_of(tmp_path) is None

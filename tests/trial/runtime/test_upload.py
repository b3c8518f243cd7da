"""Uploads to object storage during training: Determined's storage managers, in a separate
process."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.storing import ObjectStorage
from zero_trial.errors import CheckpointError
from zero_trial.trial.runtime import upload
from zero_trial.trial.runtime.determined import DeterminedCheckpoints
from zero_trial.trial.runtime.protocols import JsonDistributed, OpenCheckpoint

determined = pytest.importorskip("determined")


@pytest.fixture
def bucket() -> Iterator[ObjectStorage]:
    storage = ObjectStorage()
    yield storage
    storage.close()


def begin_in(bucket: ObjectStorage, core: Any) -> OpenCheckpoint:
    """A checkpoint with one file, whose upload has begun."""
    opened = DeterminedCheckpoints(core, JsonDistributed(), bucket.section).begin({"steps_completed": 1})
    (opened.path / "model0").mkdir()
    (opened.path / "model0" / "weights").write_bytes(b"w" * 3000)
    opened.begin_commit()
    assert bucket.asked.wait(60)
    return opened


def test_an_upload_leaves_the_random_numbers_of_training_alone(bucket: ObjectStorage) -> None:
    """The harness's storage managers put Python's random state back when they are done, and boto3
    draws from it: an upload in a thread would let training draw the same numbers twice."""
    with determined.core.init(checkpoint_storage=bucket.section) as core:
        random.seed(5)
        drawn = [random.random() for _ in range(6)]
        random.seed(5)
        opened = begin_in(bucket, core)
        assert not opened.committed(wait=False) and bucket.objects == {}
        found = [random.random() for _ in range(3)]
        bucket.open.set()
        assert opened.committed(wait=True)
        assert found + [random.random() for _ in range(3)] == drawn
        assert sorted(bucket.objects) == [
            f"{opened.storage_id}/{name}" for name in ("metadata.json", "model0/", "model0/weights")
        ]
        assert not opened.path.exists()
        store = DeterminedCheckpoints(core, JsonDistributed(), bucket.section)
        with store.restore_path(opened.storage_id) as path:
            assert (path / "model0/weights").read_bytes() == b"w" * 3000


def test_an_upload_that_the_storage_refuses(bucket: ObjectStorage) -> None:
    bucket.refuses = True
    bucket.open.set()
    with determined.core.init(checkpoint_storage=bucket.section) as core:
        opened = begin_in(bucket, core)
        with pytest.raises(CheckpointError, match=r"type s3: a checkpoint could not be uploaded.*AccessDenied"):
            opened.committed(wait=True)
        assert not opened.path.exists()


def test_an_upload_that_is_given_up_ends_at_once(bucket: ObjectStorage) -> None:
    with determined.core.init(checkpoint_storage=bucket.section) as core:
        opened = begin_in(bucket, core)
        opened.abandon()
        assert bucket.objects == {} and not opened.path.exists()


@pytest.mark.parametrize("begins", [True, False])
def test_no_temporary_copy_and_no_other_way_to_upload_stay(
    bucket: ObjectStorage, monkeypatch: pytest.MonkeyPatch, begins: bool
) -> None:
    """Where the commit fails before the upload, and where it never begins."""
    with determined.core.init(checkpoint_storage=bucket.section) as core:
        manager = core.checkpoint._storage_manager
        opened = DeterminedCheckpoints(core, JsonDistributed(), bucket.section).begin({"steps_completed": 1})
        assert manager.upload.__self__ is not manager
        if begins:
            monkeypatch.setattr(core.checkpoint, "_write_metadata_file", lambda *given: 1 / 0)
            opened.begin_commit()
            with pytest.raises(CheckpointError, match="ZeroDivisionError"):
                opened.committed(wait=True)
        else:
            opened.abandon()
        assert not opened.path.exists() and manager.upload.__self__ is manager


def test_an_upload_ends_with_rank_0(bucket: ObjectStorage, tmp_path: Any) -> None:
    """Whose end closes the pipe."""
    (tmp_path / "weights").touch()
    request = {"storage": bucket.section, "src": str(tmp_path), "dst": "there", "paths": None}
    command = [sys.executable, "-m", upload.__name__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        assert bucket.asked.wait(60)
        process.stdin.close()
        assert process.wait(60) == 1
    assert bucket.objects == {}


def test_a_process_that_cannot_begin(bucket: ObjectStorage, tmp_path: Any) -> None:
    """Its last words are in the error, and no broken pipe."""
    given = upload.UploadProcess({"type": "s3", "bucket": "x", "no such key": 1})
    with pytest.raises(CheckpointError, match="no such key"):
        given.upload(tmp_path, "there")
    given.give_up()
    with pytest.raises(CheckpointError, match="given up"):
        given.upload(tmp_path, "there")

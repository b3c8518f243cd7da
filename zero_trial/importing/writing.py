"""Writes what a reader found as a checkpoint of ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from zero_trial.checkpoint.disk import Disk
from zero_trial.checkpoint.manifest import MANIFEST_NAME
from zero_trial.checkpoint.slice import Slice
from zero_trial.checkpoint.tree import encode
from zero_trial.checkpoint.writer import begin, check_tag, merge, publish, require_files, write_manifest, write_rank
from zero_trial.errors import CheckpointError
from zero_trial.importing.findings import Findings


def write_findings(findings: Findings, directory: Path, tag: str | None = None, disk: Disk | None = None) -> Path:
    """``<directory>/<tag>``: one file per shard, each tensor read from the source's memory map as it is written.

    There is no state of single ranks in it: their random generators are another program's. Raises CheckpointError, and leaves nothing behind;
    also where a checkpoint has that name: a run may have gone on from an earlier import of it.
    """
    disk = disk or Disk()
    final = directory / check_tag(tag or findings.tag)
    if (final / MANIFEST_NAME).exists():
        raise CheckpointError(
            "there is a checkpoint of that name already",
            where=str(final),
            fix="Give the new one another with --as TAG, or move that one away: it is not overwritten.",
        )
    state, tensors = encode(dict(findings.state), "engine")
    folder = begin(final, disk)
    try:
        reports = []
        for index, shard in enumerate(findings.shards):
            extra = [Slice.whole(name, tensor) for name, tensor in tensors.items()] if index == 0 else []
            reports.append(write_rank(folder, index, [*shard, *extra], None, disk))
        world = {"model_parts": 1, **findings.world}
        manifest = replace(merge(reports, findings.step, state, world), rank_state=())
        require_files(folder, manifest)
        write_manifest(folder, manifest, disk)
        publish(folder, final, disk)
    except BaseException:
        disk.remove_folder(folder)
        raise
    return final

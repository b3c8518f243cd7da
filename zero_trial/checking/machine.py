"""What the experiment asks of this machine: slots and precision against its GPUs and cores."""

from __future__ import annotations

from zero_trial.checking.finding import Area, Finding, Severity, findings_of, remark
from zero_trial.config.sections import DsConfig
from zero_trial.errors import ConfigError
from zero_trial.launch.devices import Devices, check_slots


def check_machine(slots: int, where: str, devices: Devices, config: DsConfig | None) -> list[Finding]:
    """Findings about ``slots`` ranks (named at ``where``) of ``config`` on ``devices``. Pure.

    More ranks than GPUs is a fault, as ``zero-trial run`` would refuse it; more ranks than cores works, slowly.
    """
    found: list[Finding] = []
    try:
        check_slots(slots, devices, where)
    except ConfigError as error:
        found += findings_of(Area.SLOTS, error)
    if not devices.gpus and slots > devices.cores:
        what = f"{slots} ranks share {devices.cores} cores of this machine, which has no GPU"
        fix = f"Use --slots {devices.cores} to try it here."
        found.append(remark(Area.SLOTS, Severity.WARNING, what, where=where, fix=fix))
    if config is not None and config.fp16.enabled and not devices.gpus:
        what = "fp16 on a machine without a GPU: it is slow there, and its gradients need a loss scale"
        fix = 'Use "bf16": {"enabled": true} in its place; the processor supports it.'
        place = config.sources.get("fp16.enabled", "")
        where = f"{place} fp16.enabled" if place not in ("", "given", "default") else "fp16.enabled"
        found.append(remark(Area.DS_CONFIG, Severity.WARNING, what, where=where, fix=fix))
    return found

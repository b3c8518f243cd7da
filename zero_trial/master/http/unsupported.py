"""What Determined can do and this master cannot, with what to do instead: one line for each part of the API."""

from __future__ import annotations

from collections.abc import Mapping

_NO_TASKS = "notebooks, shells, commands and TensorBoard tasks are not run by the embedded master"
_PLAIN = "run the program itself; it is on this machine"
_NO_ROLES = "there are no roles, groups and policies in the embedded master, only users and administrators"

REASONS: Mapping[str, str] = {
    "/api/v1/notebooks": f"{_NO_TASKS}: {_PLAIN}",
    "/api/v1/shells": f"{_NO_TASKS}: {_PLAIN}",
    "/api/v1/commands": f"{_NO_TASKS}: {_PLAIN}",
    "/api/v1/tensorboards": f"{_NO_TASKS}: run 'tensorboard --logdir' on the experiment's tensorboard directory",
    "/api/v1/generic-tasks": "generic tasks are not run by the embedded master: submit an experiment",
    "/api/v1/templates": "templates are not kept by the embedded master: write what they say into the experiment's configuration",
    "/api/v1/models": "there is no model registry in the embedded master: download the checkpoint by its UUID",
    "/api/v1/model": "there is no model registry in the embedded master: download the checkpoint by its UUID",
    "/api/v1/webhooks": "the embedded master sends no webhooks",
    "/api/v1/groups": _NO_ROLES,
    "/api/v1/roles": _NO_ROLES,
    "/api/v1/permissions": _NO_ROLES,
    "/api/v1/config-policies": _NO_ROLES,
    "/api/v1/tokens": "access tokens are not made over HTTP: the local user's lies in the master's directory",
    "/api/v1/workspaces": "there is one workspace, Uncategorized, with one project; others are not made by the embedded master",
    "/api/v1/projects": "there is one workspace, Uncategorized, with one project; others are not made by the embedded master",
    "/api/v1/resource-pools": "there is one resource pool; it is bound to the one workspace for good",
    "/api/v1/resources": "the embedded master keeps no account of used resources",
    "/resources": "the embedded master keeps no account of used resources",
    "/api/v1/master/config": "the master's configuration is given to 'zero-trial master up'",
    "/api/v1/master/cluster_message": "the embedded master has no message of the day",
    "/api/v1/master/telemetry": "the embedded master sends no telemetry",
    "/api/v1/preview-hp-search": "searches are previewed by 'zero-trial simulate EXPERIMENT.yaml', which needs no master",
    "/api/v1/task": "logs are deleted with their experiment, not before",
    "/api/v1/tasks": "tasks are steered through their experiment: det experiment pause, activate, kill",
    "/api/v1/cleanup_logs": "logs are deleted with their experiment, not before",
    "/api/v1/trial-source-info": "the embedded master does not track which trial used which checkpoint",
    "/oauth2": "the embedded master has no single sign-on",
    "/saml": "the embedded master has no single sign-on",
    "/oidc": "the embedded master has no single sign-on",
    "/scim": "the embedded master has no single sign-on",
    "/proxy": "ports of tasks are not forwarded: they are on this machine",
}
_ENDINGS: Mapping[str, str] = {
    "/retain_logs": "logs are kept until their experiment is deleted",
    "/move": "there is one project; experiments stay in it",
    "/tensorboard-files": "TensorBoard files are deleted with their experiment, not before",
    "/metadata": "metadata of checkpoints is not changed after they were saved",
    "/all_gather": "only containers of one machine are run, which need no all-gather",
    "/proxy_address": "ports of tasks are not forwarded: they are on this machine",
}


def reason(path: str) -> str | None:
    """Why a path is not answered although Determined has it; None for a path that nobody knows."""
    path = path.rstrip("/")
    for ending, why in _ENDINGS.items():
        if path.endswith(ending):
            return why
    while path:
        if path in REASONS:
            return REASONS[path]
        path = path.rpartition("/")[0]
    return None

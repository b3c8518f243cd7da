"""Configuration: ds_config and the experiment YAML, read strictly into frozen dataclasses. Imports no torch."""

from zero_trial.config.auto import resolve_auto
from zero_trial.config.batch import BatchTriple, solve_batch
from zero_trial.config.document import Document
from zero_trial.config.experiment import ExperimentConfig, SearcherConfig
from zero_trial.config.experiment_reader import examine_experiment, read_experiment
from zero_trial.config.overlay import overwrite_ds_config
from zero_trial.config.period import Period
from zero_trial.config.reader import read_ds_config
from zero_trial.config.reconcile import AxisSizes, Reconciliation, reconcile, solve_axes
from zero_trial.config.report import config_report, render_report, report_json, resolved_ds_config, short_report
from zero_trial.config.sections import DsConfig

__all__ = [
    "AxisSizes",
    "BatchTriple",
    "Document",
    "DsConfig",
    "ExperimentConfig",
    "Period",
    "Reconciliation",
    "SearcherConfig",
    "config_report",
    "examine_experiment",
    "overwrite_ds_config",
    "read_ds_config",
    "read_experiment",
    "reconcile",
    "render_report",
    "report_json",
    "resolve_auto",
    "resolved_ds_config",
    "short_report",
    "solve_axes",
    "solve_batch",
]

"""Which test fails when a supported ds_config key is ignored. Checked by doing it: python -m
tests.ds_config.exercised [KEY ...]

For each key its field is held at the default in every process, and its test is run: a test that
passes all the same is reported.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from zero_trial.ds_config.key import Support
from zero_trial.ds_config.table import TABLE

ROOT = Path(__file__).parents[2]

_WIRED = "ds_config/test_exercised.py::test_a_key_changes_what_is_wired"
_MESHED = "ds_config/test_exercised.py::test_a_key_changes_the_mesh"
_KEYS, _OBSERVE, _PRECISION = "engine/test_keys.py", "engine/test_observe.py", "engine/test_behaviour_precision.py"
_MONITORS = "engine/test_monitors.py"
_PROFILER, _VOLUME = "engine/test_profile.py", "sharding/test_volume.py"
_PIPELINE = "engine/test_pipeline_build.py"
_CHECKPOINTING = "engine/test_activation_checkpointing.py"
_OFFLOAD = "engine/test_offload.py"


def _below(section: str, test: str, *names: str) -> dict[str, str]:
    return {f"{section}.{name}" if section else name: test for name in names}


EXERCISED: dict[str, str] = {
    **_below(
        "",
        _WIRED,
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    ),
    **_below("optimizer", "engine/test_behaviour_optimizers.py::test_optimizer_by_name", "type", "params"),
    **_below("scheduler", "engine/test_behaviour_optimizers.py::test_torch_schedule_by_name", "type", "params"),
    "zero_optimization.gather_16bit_weights_on_model_save": "engine/test_saving.py::test_the_whole_model_on_rank_0_for_libraries",
    "fp16.enabled": f"{_PRECISION}::test_an_overflow_on_one_rank_acts_on_all",
    "fp16.loss_scale": f"{_PRECISION}::test_a_static_scale_stays",
    **_below(
        "fp16",
        _WIRED,
        "initial_scale_power",
        "loss_scale_window",
        "hysteresis",
        "consecutive_hysteresis",
        "min_loss_scale",
    ),
    "bf16.enabled": f"{_KEYS}::test_grad_accum_dtype",
    "bf16.check_grad_overflow": f"{_PRECISION}::test_without_the_check_the_step_is_taken",
    **_below("torch_autocast", f"{_KEYS}::test_torch_autocast", "enabled", "dtype"),
    "data_types.grad_accum_dtype": f"{_KEYS}::test_grad_accum_dtype",
    "data_types.param_dtype": "ds_config/test_exercised.py::test_the_dtype_of_parameters_is_that_of_the_precision_mode",
    "data_types.buffer_dtype": f"{_KEYS}::test_buffer_dtype",
    **dict.fromkeys(
        ("data_types.optimizer_states", "bf16.bf16_optimizer_states"),
        "engine/test_optimizer_states.py::test_bytes_per_parameter",
    ),
    **_below(
        "ema",
        "engine/test_ema.py::test_what_the_keys_say",
        *("decay", "update_after_step", "update_every", "use_ema_warmup", "inv_gamma", "power"),
    ),
    **_below(
        "autotuning",
        "planning/test_tune_search.py::test_the_autotuning_section_sets_the_defaults",
        *("fast", "tuner_type", "tuner_num_trials", "start_profile_step", "end_profile_step"),
    ),
    **_below(
        "autotuning",
        "planning/test_tune_search.py::test_what_the_tuner_does_not_do_is_refused",
        *("max_train_batch_size", "min_train_batch_size"),
    ),
    **_below(
        "autotuning",
        "cli/test_cmd_tune.py::test_the_autotuning_section_limits_the_micro_batches",
        *("max_train_micro_batch_size_per_gpu", "min_train_micro_batch_size_per_gpu", "num_tuning_micro_batch_sizes"),
    ),
    "ema.evaluate": "trial/test_with_engine.py::test_validation_with_the_averages_of_the_weights",
    "communication_data_type": f"{_KEYS}::test_communication_data_type",
    **_below(
        "",
        f"{_KEYS}::test_predivision_scales_what_is_sent_and_not_the_mean",
        "prescale_gradients",
        "gradient_predivide_factor",
    ),
    "gradient_allreduce_op": f"{_KEYS}::test_gradient_allreduce_op_sum",
    **_below("compile", "engine/test_behaviour_access.py::test_compile_in_ds_config", "enabled", "backend", "kwargs"),
    "managed_gradient_accumulation": f"{_KEYS}::test_the_caller_owns_the_boundary",
    "zero_optimization.stage": f"{_VOLUME}::test_stages_1_and_2_move_2_psi",
    **_below(
        "zero_optimization",
        _WIRED,
        "reduce_bucket_size",
        "overlap_comm",
        "prefetch_bucket_size",
        "param_persistence_threshold",
    ),
    **_below("zero_optimization", _WIRED, "model_persistence_threshold", "max_live_parameters", "max_reuse_distance"),
    **_below("zero_optimization", _WIRED, "module_granularity_threshold"),
    **_below("zero_optimization.leaf_module", _WIRED, "classes", "names", "name_suffixes"),
    "zero_optimization.ignore_unused_parameters": "sharding/guards/test_model_parameters.py::"
    "test_an_unused_parameter_ends_the_step_where_ds_config_forbids_it",
    "zero_optimization.reduce_every": f"{_VOLUME}::test_reducing_every_micro_batch_moves_g_plus_1_psi",
    "zero_optimization.reshard_after": f"{_VOLUME}::test_stage_3_that_frees_after_forward_moves_at_most_3_psi",
    "zero_optimization.set_grads_to_none": "engine/test_oracle.py::test_loss_traces_of_all_stages_are_bit_equal",
    "zero_optimization.elementwise_optimizer": (
        "engine/test_behaviour_whole_tensors.py::test_ds_config_can_say_that_an_optimizer_is_elementwise"
    ),
    "zero_optimization.mics_shard_size": _MESHED,
    **_below(
        "zero_optimization",
        f"{_OFFLOAD}::test_what_the_sections_say",
        "offload_optimizer.device",
        "offload_optimizer.nvme_path",
        "offload_optimizer.buffer_count",
    ),
    "zero_optimization.sub_group_size": f"{_OFFLOAD}::test_sub_group_size_bounds_a_buffer",
    "zero_optimization.offload_optimizer.pin_memory": f"{_OFFLOAD}::test_a_gpu_gets_a_mover_and_pinned_buffers_where_asked",
    "zero_optimization.offload_optimizer.ratio": f"{_OFFLOAD}::test_a_part_of_the_state_goes_to_the_file",
    "zero_optimization.offload_param.device": f"{_OFFLOAD}::test_host_memory_is_where_it_lives_already",
    **_below(
        "zero_optimization.offload_param",
        "engine/test_behaviour_offload_params.py::test_what_the_section_says",
        "nvme_path",
        "buffer_count",
        "buffer_size",
    ),
    "zero_optimization.offload_param.pin_memory": f"{_OFFLOAD}::test_parameters_that_leave_a_gpu_are_updated_where_their_master_is",
    "zero_optimization.offload_param.max_in_cpu": "engine/test_behaviour_offload_params.py::test_so_many_elements_stay_in_memory",
    **_below("aio", f"{_OFFLOAD}::test_what_the_sections_say", "block_size", "queue_depth", "intra_op_parallelism"),
    **_below("mesh", _MESHED, "shard", "replica", "model", "pipe"),
    **_below(
        "pipeline",
        f"{_PIPELINE}::test_a_key_changes_the_settings",
        "schedule",
        "zero_policy",
        "partition_method",
        "activation_checkpoint_interval",
    ),
    "pipeline.chunks_per_rank": f"{_PIPELINE}::test_chunks_per_rank",
    "steps_per_print": f"{_OBSERVE}::test_steps_per_print_and_throughput",
    "timers.throughput.enabled": f"{_OBSERVE}::test_steps_per_print_and_throughput",
    "timers.throughput.synchronized": "ds_config/test_exercised.py::test_the_device_is_waited_for",
    "wall_clock_breakdown": f"{_OBSERVE}::test_wall_clock_breakdown",
    "memory_breakdown": f"{_OBSERVE}::test_details_without_steps_per_print_come_every_ten_steps",
    "dump_state": f"{_OBSERVE}::test_dump_state",
    "disable_python_gc": f"{_OBSERVE}::test_disable_python_gc",
    "dataloader_drop_last": f"{_KEYS}::test_dataloader_drop_last",
    "log_level": f"{_KEYS}::test_log_level",
    "comm_transport": "ds_config/test_exercised.py::test_ranks_share_memory_by_default",
    "comm_timeout_seconds": "ds_config/test_exercised.py::test_the_mesh_waits_no_longer_than_asked",
    **_below("tensorboard", f"{_MONITORS}::test_several_at_once", "enabled", "output_path"),
    "tensorboard.job_name": "ds_config/test_exercised.py::test_tensorboard_files_lie_in_the_folder_of_the_job",
    **_below("csv_monitor", f"{_OBSERVE}::test_monitors_get_the_events_of_a_run", "enabled", "output_path", "job_name"),
    **_below("wandb", f"{_MONITORS}::test_the_section_and_the_events_arrive", "group", "team", "project"),
    **_below("wandb", f"{_MONITORS}::test_a_missing_package_is_an_error_on_every_rank", "enabled"),
    **_below("comet", f"{_MONITORS}::test_a_missing_package_is_an_error_on_every_rank", "enabled"),
    **_below(
        "comet",
        f"{_MONITORS}::test_what_the_section_says_is_passed_on",
        "project",
        "workspace",
        "api_key",
        "experiment_key",
    ),
    **_below("comet", f"{_MONITORS}::test_what_the_section_says_is_passed_on", "online", "mode", "experiment_name"),
    "comet.samples_log_interval": f"{_MONITORS}::test_the_interval_is_per_name",
    **_below(
        "flops_profiler", f"{_PROFILER}::test_counted_in_one_step_and_timed_in_the_next", "enabled", "profile_step"
    ),
    **_below(
        "flops_profiler",
        f"{_PROFILER}::test_what_the_section_says",
        "module_depth",
        "top_modules",
        "detailed",
        "output_file",
    ),
    **_below("flops_profiler", f"{_PROFILER}::test_what_the_section_says", "recompute_fwd_factor"),
    "comms_logger.enabled": f"{_OBSERVE}::test_comms_logger",
    **_below("comms_logger", f"{_OBSERVE}::test_comms_logger_of_some_collectives", "prof_all", "prof_ops"),
    "checkpoint.tag_validation": f"{_KEYS}::test_tag_validation",
    "checkpoint.writer.decoupled": "engine/test_background_saving.py::test_the_key_and_the_argument",
    "activation_checkpointing.partition_activations": f"{_CHECKPOINTING}::test_partition_activations_over_the_model_axis",
    "activation_checkpointing.cpu_checkpointing": f"{_CHECKPOINTING}::test_cpu_checkpointing_moves_the_inputs_and_nothing_else",
}


BY_THE_READER = frozenset({"data_types.param_dtype"})
"""Honoured by being refused where it contradicts the precision mode; no part reads its field."""


def supported_keys() -> list[str]:
    """The keys that change something and have a value of their own."""
    return [row.path for row in TABLE.values() if row.support is Support.SUPPORTED and not row.is_section]


# Runs in every process that Python starts below the test, the ranks of a pool too.
IGNORE = """
import dataclasses, os
from zero_trial.ds_config.table import TABLE, DsConfig

*above, name = os.environ["IGNORED_KEY"].split(".")
kind = TABLE[".".join(above)].section if above else DsConfig
field = next(item for item in dataclasses.fields(kind) if item.name == name)
if field.default is not dataclasses.MISSING:
    default = field.default
elif field.default_factory is not dataclasses.MISSING:
    default = field.default_factory()
else:
    default = {"OptimizerSection": "SGD", "SchedulerSection": "ConstantLR"}[kind.__name__]
build = kind.__init__

def ignoring(self, *arguments, **named):
    build(self, *arguments, **named)
    object.__setattr__(self, name, default)

kind.__init__ = ignoring
"""


def ignoring(key: str, folder: Path) -> dict[str, str]:
    """The environment of a process in which the key is ignored, by a file in ``folder`` that Python
    reads when it starts."""
    (folder / "sitecustomize.py").write_text(IGNORE)
    path = os.pathsep.join([str(folder), str(ROOT)])
    return {
        **os.environ,
        "IGNORED_KEY": key,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def passes_all_the_same(key: str, folder: Path) -> bool:
    """Whether the key's test passes although the key is ignored."""
    env = ignoring(key, folder)
    where = [f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}", f"{ROOT}/tests/{EXERCISED[key]}"]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *where]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{key}: {EXERCISED[key]} could not be run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0


def main(keys: Iterable[str]) -> int:
    """The command line: how many tests did not notice."""
    unnoticed = 0
    with tempfile.TemporaryDirectory() as folder:
        for key in list(keys) or [key for key in supported_keys() if key not in BY_THE_READER]:
            noticed = not passes_all_the_same(key, Path(folder))
            unnoticed += not noticed
            print(f"{'noticed' if noticed else 'NOT NOTICED'}  {key}  {EXERCISED[key]}", flush=True)
    return unnoticed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

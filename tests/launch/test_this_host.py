"""The environment of ranks."""

from __future__ import annotations

from zero_trial.launch.this_host import rank_environment


def test_what_is_missing_is_filled_in_and_what_is_set_stands():
    env = rank_environment({"A": "1", "OMP_NUM_THREADS": "7"}, threads=2, interface="lo")
    assert (env["A"], env["OMP_NUM_THREADS"], env["GLOO_SOCKET_IFNAME"]) == ("1", "7", "lo")
    assert rank_environment({}, threads=2, interface=None)["OMP_NUM_THREADS"] == "2"
    assert rank_environment({"MALLOC_TRIM_THRESHOLD_": "9"}, threads=2, interface=None)["MALLOC_TRIM_THRESHOLD_"] == "9"
    assert int(rank_environment({}, threads=2, interface=None)["MALLOC_TRIM_THRESHOLD_"]) > 2**27
    assert "GLOO_SOCKET_IFNAME" not in rank_environment({}, threads=2, interface=None)


def test_a_rank_may_start_a_run_of_its_own():
    env = rank_environment(
        {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "TORCHELASTIC_RUN_ID": "y"}, threads=1, interface=None
    )
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"} & set(env)

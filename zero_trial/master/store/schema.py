"""The tables, as numbered steps from an empty file to the newest form; a step that was released is never changed."""

from __future__ import annotations

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);

    CREATE TABLE experiments (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        state TEXT NOT NULL,
        config TEXT NOT NULL,
        original_config TEXT NOT NULL,
        owner TEXT NOT NULL,
        job_id TEXT NOT NULL,
        created REAL NOT NULL,
        ended REAL,
        parent_id INTEGER,
        archived INTEGER NOT NULL DEFAULT 0,
        name TEXT NOT NULL,
        description TEXT NOT NULL DEFAULT '',
        labels TEXT NOT NULL DEFAULT '[]',
        notes TEXT NOT NULL DEFAULT '',
        progress REAL,
        error TEXT NOT NULL DEFAULT '',
        snapshot TEXT NOT NULL DEFAULT '{}',
        collect INTEGER NOT NULL DEFAULT 0
    );
    CREATE TABLE contexts (experiment_id INTEGER PRIMARY KEY, tgz BLOB NOT NULL);

    CREATE TABLE trials (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        experiment_id INTEGER NOT NULL,
        request_id TEXT NOT NULL,
        task_id TEXT NOT NULL UNIQUE,
        state TEXT NOT NULL,
        hparams TEXT NOT NULL,
        seed INTEGER NOT NULL,
        created REAL NOT NULL,
        ended REAL,
        run_id INTEGER NOT NULL DEFAULT 0,
        restarts INTEGER NOT NULL DEFAULT 0,
        steps_completed INTEGER NOT NULL DEFAULT 0,
        latest_checkpoint TEXT,
        warm_start_checkpoint TEXT,
        progress REAL,
        runner_state TEXT NOT NULL DEFAULT '',
        reason TEXT NOT NULL DEFAULT '',
        pruned INTEGER NOT NULL DEFAULT 0,
        early_exit TEXT NOT NULL DEFAULT '',
        metadata TEXT NOT NULL DEFAULT '{}',
        UNIQUE (experiment_id, request_id)
    );
    CREATE INDEX trials_experiment ON trials (experiment_id, id);

    CREATE TABLE allocations (
        id TEXT PRIMARY KEY,
        trial_id INTEGER NOT NULL,
        experiment_id INTEGER NOT NULL,
        task_id TEXT NOT NULL,
        run_id INTEGER NOT NULL,
        state TEXT NOT NULL,
        slots TEXT NOT NULL DEFAULT '[]',
        created REAL NOT NULL,
        resources_id TEXT NOT NULL,
        container_id TEXT NOT NULL,
        started REAL,
        ended REAL,
        exit_code INTEGER,
        preempt INTEGER NOT NULL DEFAULT 0,
        acked INTEGER NOT NULL DEFAULT 0,
        ready INTEGER NOT NULL DEFAULT 0,
        killing INTEGER NOT NULL DEFAULT 0,
        deadline REAL,
        accelerators TEXT NOT NULL DEFAULT '{}'
    );
    CREATE INDEX allocations_trial ON allocations (trial_id, run_id);
    CREATE INDEX allocations_live ON allocations (state) WHERE state != 'TERMINATED';

    CREATE TABLE metrics (
        id INTEGER PRIMARY KEY,
        trial_id INTEGER NOT NULL,
        run_id INTEGER NOT NULL,
        grp TEXT NOT NULL,
        steps INTEGER,
        metrics TEXT NOT NULL,
        batch_metrics TEXT,
        reported REAL NOT NULL,
        searcher_metric REAL,
        archived INTEGER NOT NULL DEFAULT 0
    );
    CREATE INDEX metrics_trial ON metrics (trial_id, grp, steps);

    CREATE TABLE checkpoints (
        uuid TEXT PRIMARY KEY,
        state TEXT NOT NULL,
        trial_id INTEGER,
        experiment_id INTEGER,
        task_id TEXT NOT NULL,
        allocation_id TEXT NOT NULL,
        reported REAL NOT NULL,
        metadata TEXT NOT NULL,
        resources TEXT NOT NULL,
        size INTEGER NOT NULL,
        steps INTEGER NOT NULL,
        storage_id INTEGER,
        doomed INTEGER NOT NULL DEFAULT 0
    );
    CREATE INDEX checkpoints_trial ON checkpoints (trial_id, steps);
    CREATE INDEX checkpoints_experiment ON checkpoints (experiment_id);
    CREATE INDEX checkpoints_doomed ON checkpoints (doomed) WHERE doomed = 1;

    CREATE TABLE users (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        name TEXT NOT NULL UNIQUE,
        admin INTEGER NOT NULL,
        active INTEGER NOT NULL,
        password TEXT NOT NULL,
        display_name TEXT NOT NULL DEFAULT ''
    );
    CREATE TABLE tokens (digest TEXT PRIMARY KEY, user_id INTEGER, allocation_id TEXT, expires REAL);
    CREATE INDEX tokens_allocation ON tokens (allocation_id);

    CREATE TABLE disabled_slots (number INTEGER PRIMARY KEY);
    """,
)

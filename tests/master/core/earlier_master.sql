BEGIN TRANSACTION;
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
INSERT INTO "allocations" VALUES('1.c818622d-11ba-4552-bc4d-7f5a94b07a53.1',1,1,'1.c818622d-11ba-4552-bc4d-7f5a94b07a53',1,'STARTING','[0]',1000.0,'97656039-3e49-4610-8bbc-ea42cbdcc18c','4dade08b-fd44-489c-9721-7216ddc6b9b7',1000.0,NULL,NULL,0,0,0,0,NULL,'{}');
INSERT INTO "allocations" VALUES('1.98c5ba8f-af26-4742-8809-2552286f942e.1',2,1,'1.98c5ba8f-af26-4742-8809-2552286f942e',1,'STARTING','[1]',1000.0,'2b1ce816-775f-4672-aa58-5104c8c0b4f4','594c1909-ac99-42fa-955b-45fbfc00a83c',1000.0,NULL,NULL,0,0,0,0,NULL,'{}');
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
CREATE TABLE contexts (experiment_id INTEGER PRIMARY KEY, tgz BLOB NOT NULL);
INSERT INTO "contexts" VALUES(1,X'1F8B0800E724036B02FFEDCD310AC2401404D07F144F209BB0E8712490582906578BDCDE8F95D82B84BCD7CC30CD5C6FE374398DD3793F2FF123251D6A7D67FACE543F7AEE5DE9FB63EC4AFCC1B33D867BDEC736CD436B010000000000000000C0EABC004FC7F98C00280000');
INSERT INTO "contexts" VALUES(2,X'1F8B0800E724036B02FFEDCD310AC2401404D07F144F209BB0E8712490582906578BDCDE8F95D82B84BCD7CC30CD5C6FE374398DD3793F2FF123251D6A7D67FACE543F7AEE5DE9FB63EC4AFCC1B33D867BDEC736CD436B010000000000000000C0EABC004FC7F98C00280000');
CREATE TABLE disabled_slots (number INTEGER PRIMARY KEY);
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
INSERT INTO "experiments" VALUES(1,'ACTIVE','{"name":"test","description":null,"labels":[],"workspace":null,"project":null,"entrypoint":"python3 train.py","data":{},"hyperparameters":{"lr":{"base":10,"maxval":-1,"minval":-4.5,"type":"log"}},"searcher":{"name":"random","metric":"val","smaller_is_better":true,"source_trial_id":null,"source_checkpoint_uuid":null,"max_length":null,"max_trials":5,"max_concurrent_trials":2},"resources":{"slots_per_trial":1,"max_slots":null,"weight":1,"priority":null,"resource_pool":"","is_single_node":null,"native_parallel":false,"shm_size":null,"devices":[],"slots":null,"agent_label":null},"environment":{"image":{"cpu":null,"cuda":null,"rocm":null},"environment_variables":{"cpu":[],"cuda":[],"rocm":[]},"ports":{},"proxy_ports":[],"force_pull_image":false,"registry_auth":null,"pod_spec":null,"add_capabilities":[],"drop_capabilities":[]},"bind_mounts":[],"checkpoint_storage":{"type":"shared_fs","host_path":"@ROOT@/storage","storage_path":null,"propagation":"rprivate","container_path":null,"checkpoint_path":null,"tensorboard_path":null,"save_experiment_best":0,"save_trial_best":1,"save_trial_latest":1},"checkpoint_policy":"best","min_checkpoint_period":{"batches":0},"min_validation_period":{"batches":0},"perform_initial_validation":false,"scheduling_unit":100,"records_per_epoch":0,"max_restarts":1,"preemption_timeout":3600,"reproducibility":{"experiment_seed":7},"profiling":{"enabled":false,"begin_on_batch":0,"end_after_batch":null,"sync_timings":true},"optimizations":{"aggregation_frequency":1,"auto_tune_tensor_fusion":false,"average_aggregated_gradients":true,"average_training_metrics":true,"gradient_compression":false,"grad_updates_size_file":null,"mixed_precision":"O0","tensor_fusion_cycle_time":5,"tensor_fusion_threshold":64},"log_policies":[],"retention_policy":null,"integrations":null,"slurm":{"slots_per_node":null,"gpu_type":null,"sbatch_args":[]},"pbs":{"slots_per_node":null,"gpu_type":null,"pbsbatch_args":[]},"debug":false,"data_layer":{"type":"shared_fs","host_storage_path":null,"container_storage_path":null},"security":null,"tensorboard_storage":null,"internal":null}','entrypoint: python3 train.py
hyperparameters:
  lr:
    base: 10
    maxval: -1
    minval: -4.5
    type: log
max_restarts: 1
name: test
reproducibility:
  experiment_seed: 7
resources:
  slots_per_trial: 1
searcher:
  max_concurrent_trials: 2
  max_trials: 5
  metric: val
  name: random
','somebody','7cc7c88e-89cb-454b-90b1-4c2a88fa66e7',1000.0,NULL,NULL,0,'test','','[]','',NULL,'','{"kind":"random","draws":{"seed":7,"drawn":2},"trials":{"3374ff6a-28e9-4116-8d43-d6330e19aa54":"running","54743781-7a72-4f65-9250-db67a9b4accf":"running"},"over":false}',0);
INSERT INTO "experiments" VALUES(2,'PAUSED','{"name":"test","description":null,"labels":[],"workspace":null,"project":null,"entrypoint":"python3 train.py","data":{},"hyperparameters":{"lr":{"base":10,"count":4,"maxval":-1,"minval":-4.5,"type":"log"}},"searcher":{"name":"grid","metric":"val","smaller_is_better":true,"source_trial_id":null,"source_checkpoint_uuid":null,"max_length":null,"max_concurrent_trials":2},"resources":{"slots_per_trial":1,"max_slots":null,"weight":1,"priority":null,"resource_pool":"","is_single_node":null,"native_parallel":false,"shm_size":null,"devices":[],"slots":null,"agent_label":null},"environment":{"image":{"cpu":null,"cuda":null,"rocm":null},"environment_variables":{"cpu":[],"cuda":[],"rocm":[]},"ports":{},"proxy_ports":[],"force_pull_image":false,"registry_auth":null,"pod_spec":null,"add_capabilities":[],"drop_capabilities":[]},"bind_mounts":[],"checkpoint_storage":{"type":"shared_fs","host_path":"@ROOT@/storage","storage_path":null,"propagation":"rprivate","container_path":null,"checkpoint_path":null,"tensorboard_path":null,"save_experiment_best":0,"save_trial_best":1,"save_trial_latest":1},"checkpoint_policy":"best","min_checkpoint_period":{"batches":0},"min_validation_period":{"batches":0},"perform_initial_validation":false,"scheduling_unit":100,"records_per_epoch":0,"max_restarts":1,"preemption_timeout":3600,"reproducibility":{"experiment_seed":7},"profiling":{"enabled":false,"begin_on_batch":0,"end_after_batch":null,"sync_timings":true},"optimizations":{"aggregation_frequency":1,"auto_tune_tensor_fusion":false,"average_aggregated_gradients":true,"average_training_metrics":true,"gradient_compression":false,"grad_updates_size_file":null,"mixed_precision":"O0","tensor_fusion_cycle_time":5,"tensor_fusion_threshold":64},"log_policies":[],"retention_policy":null,"integrations":null,"slurm":{"slots_per_node":null,"gpu_type":null,"sbatch_args":[]},"pbs":{"slots_per_node":null,"gpu_type":null,"pbsbatch_args":[]},"debug":false,"data_layer":{"type":"shared_fs","host_storage_path":null,"container_storage_path":null},"security":null,"tensorboard_storage":null,"internal":null}','entrypoint: python3 train.py
hyperparameters:
  lr:
    base: 10
    count: 4
    maxval: -1
    minval: -4.5
    type: log
max_restarts: 1
name: test
reproducibility:
  experiment_seed: 7
resources:
  slots_per_trial: 1
searcher:
  max_concurrent_trials: 2
  metric: val
  name: grid
','somebody','1a4235e4-3fb6-4488-b2fa-79581ae53b2c',1000.0,NULL,NULL,0,'test','','[]','',NULL,'','{"kind":"grid","draws":{"seed":7,"drawn":2},"trials":{"3374ff6a-28e9-4116-8d43-d6330e19aa54":"running","54743781-7a72-4f65-9250-db67a9b4accf":"running"},"over":false}',0);
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
INSERT INTO "meta" VALUES('master_id','def0bf2f-d648-4268-9f3e-140c1fb0d6b6');
INSERT INTO "meta" VALUES('cluster_id','65540051-380c-4854-9414-89a5496561c6');
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
CREATE TABLE tokens (digest TEXT PRIMARY KEY, user_id INTEGER, allocation_id TEXT, expires REAL);
INSERT INTO "tokens" VALUES('d506e779e1a9fbff8be0e87d82c3281051233c41e69a0eebe91180b00b3f8d67',NULL,'1.c818622d-11ba-4552-bc4d-7f5a94b07a53.1',NULL);
INSERT INTO "tokens" VALUES('2e405cf376e00a929713afc01f578a68ddc08d3dcc813974ccd0e48729605e31',NULL,'1.98c5ba8f-af26-4742-8809-2552286f942e.1',NULL);
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
INSERT INTO "trials" VALUES(1,1,'3374ff6a-28e9-4116-8d43-d6330e19aa54','1.c818622d-11ba-4552-bc4d-7f5a94b07a53','ACTIVE','{"lr":0.0006360898750815843}',1306895071,1000.0,NULL,1,0,0,NULL,NULL,NULL,'','',0,'','{}');
INSERT INTO "trials" VALUES(2,1,'54743781-7a72-4f65-9250-db67a9b4accf','1.98c5ba8f-af26-4742-8809-2552286f942e','ACTIVE','{"lr":0.0008530930017897643}',2051392805,1000.0,NULL,1,0,0,NULL,NULL,NULL,'','',0,'','{}');
INSERT INTO "trials" VALUES(3,2,'3374ff6a-28e9-4116-8d43-d6330e19aa54','2.95c35640-b3c3-45a5-8e0e-e4b50f134fd7','PAUSED','{"lr":0.1}',1306895071,1000.0,NULL,0,0,0,NULL,NULL,NULL,'','',0,'','{}');
INSERT INTO "trials" VALUES(4,2,'54743781-7a72-4f65-9250-db67a9b4accf','2.3d84f651-dd4a-4379-acac-f8a92d4c9e5e','PAUSED','{"lr":0.006812920690579615}',2051392805,1000.0,NULL,0,0,0,NULL,NULL,NULL,'','',0,'','{}');
CREATE TABLE users (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        name TEXT NOT NULL UNIQUE,
        admin INTEGER NOT NULL,
        active INTEGER NOT NULL,
        password TEXT NOT NULL,
        display_name TEXT NOT NULL DEFAULT ''
    );
CREATE INDEX trials_experiment ON trials (experiment_id, id);
CREATE INDEX allocations_trial ON allocations (trial_id, run_id);
CREATE INDEX allocations_live ON allocations (state) WHERE state != 'TERMINATED';
CREATE INDEX metrics_trial ON metrics (trial_id, grp, steps);
CREATE INDEX checkpoints_trial ON checkpoints (trial_id, steps);
CREATE INDEX checkpoints_experiment ON checkpoints (experiment_id);
CREATE INDEX checkpoints_doomed ON checkpoints (doomed) WHERE doomed = 1;
CREATE INDEX tokens_allocation ON tokens (allocation_id);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('experiments',2);
INSERT INTO "sqlite_sequence" VALUES('trials',4);
COMMIT;
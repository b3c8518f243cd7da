"""What a training run will need in memory, known before it starts: rehearsed on one imagined rank."""

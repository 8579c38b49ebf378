"""One worker's model runner: models, scheduler, sampler, text. Knows nothing of sockets or peers."""

"""Ray owns the processes: sessions, workers, progress bars and the order of the stages.

driver (this machine's terminal)                 Ray workers
stages.run_stages -> RunFolder, base/            worker.setup -> WorkerContext
    session.ray_session                              posttrain.sft.train(recipe, run_path, context)     TorchTrainer, N ranks
    one bar a stage  <- ProgressBoard (actor) <-     posttrain.grpo.train(recipe, run_path, context)    one actor
    Ctrl-C -> board.request_stop ------------->      posttrain.evaluation.evaluate(...)                 one actor
"""

"""How weights travel: tensors in buckets (buckets.py), a process group that comes and goes with its members (group.py), the
learner's side (sender.py) and a generator's (receiver.py).

One publication, number n; all talk goes through a store (TCP) that the learner's process hosts:

    learner                                               each generator, in a thread beside its engine
    publish/n: version, names and shapes         ->       compares them with its own model
    waits for ready/n/i, drops who is late       <-       ready/n/i: ok, have (this very one), or what is wrong
    go/n: who takes part                         ->
    fills a bucket, broadcasts it, ...           ->       receives into buffers of its own; the engine decodes meanwhile
    the checksums of all buckets                 ->       compares them, got/n/i: ok, or what is wrong

The engine stands still only while it copies the buffers into its model. A generator that dies cannot hang the learner: before the
broadcast it does not answer, during it the deadline aborts the group, and the others get the version again in a new one. NCCL
refuses two ranks on one GPU: a generator on the learner's copies from the learner's own buckets, which it maps (CUDA IPC).
"""

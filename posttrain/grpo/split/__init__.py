"""GRPO with the generators in processes of their own, running ahead of the learner.

                     slots (numbers of groups, in the run's data order)
      +---------------------------------------------------------------------------------+
      v                                                                                 |
    GeneratorActor x E --completions--> RewardActor x R --scores--> GeneratorActor --put--> ExperienceBuffer (actor)
      ^                                                                                 |  journal in RUN/grpo/buffer
      |        WeightBoard (actor)                                                      | lease(batch), ack(batch), commit
      +------- buckets, version n <------------- Learner (SplitExperience) <------------+

groups.py     a group with its scores, and as one line of text
journal.py    segments of such lines, one a batch
partial.py    tokens of unfinished groups, in case their generator dies
buffer.py     ExperienceBuffer: who makes which slot, what is admitted, what the learner gets
deal.py       a batch dealt to the ranks of a learner
weights.py    WeightSender, WeightReceiver: a state dict through Ray's object store
plan.py       slot -> prompt and request
generator.py  GeneratorActor and RewardActor
experience.py the learner's side: publishes, leases, acknowledges
pool.py       watches generators, replaces dead ones
stage.py      from a recipe to all that; the learner's callback

Slot s is candidate s mod W of generation batch s div W, whatever machine makes it and whenever: P groups a batch, and W - P extra
ones that may take the place of flat ones (`posttrain.grpo.dynamic`). Version n is the
policy that has trained batches 0..n-1, so batch b is always trained at version b.

The deal:
- Order: the learner gets batch b as the uninterrupted, colocated run would: the same prompts in the same order, with the same
  seeds. With `max_staleness: 0` the same tokens too, for a sample depends on (weights, prompt, seed, parameters) alone.
- Staleness: no token of batch b is older than version b - max_staleness. The buffer hands no slot to a generator whose weights
  are too old for it, and refuses (and counts) a group that breaks the rule all the same; its slot is then made again.
- Once: a group is admitted whole and on disk, or not at all. A batch goes to the living learner once, and is acknowledged after
  its optimiser steps. A learner that died continues from its checkpoint and gets every batch after that again from the journal,
  the very same groups: the steps it had taken since then died with it. What a checkpoint contains is never handed out again.
- Deaths (`kill -9` included): of a generator, its slots go to the others and a new one starts; of the buffer, the board or the
  reward actor, Ray restarts it and repeats its callers' messages, which all of them bear; of the learner or the driver, all ends,
  and resuming finds each admitted group in the journal. Unfinished groups of a dead generator are continued by another one from
  the tokens that the buffer has of them; where generator and buffer die together they begin again from their prompts.
- Waits: every one has a deadline, and its message says which slots are missing, who holds them and since when.
"""

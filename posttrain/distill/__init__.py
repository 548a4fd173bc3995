"""A teacher's traces, from problems to the rows that SFT reads.

    problems.py   source -> clean problems (decontaminated, readable gold answers), fixed for the run
    teacher.py    the backend that a recipe names: a server, or engines (vLLM, posttrain's own), several as Ray actors
    refusals.py   one problem that the server refuses, told from a server that refuses every request
    prompts.py    problem -> prompt, and the settings that a trace depends on
    journal.py    every trace on disk as it arrives, graded; what a restart continues from
    grade.py      text -> Trace: thinking tags, rewards, tokens
    filters.py    Trace -> None, or the reason why it is left out
    balance.py    accepted traces -> those of the set, so many of each difficulty
    dataset.py    journal -> distill/final/part-*.parquet with provenance, and the account of everything left out
    stage.py      the above in order, as the stage `distill`

The journal is the truth: the account and the set are computed from it alone, so they cannot drift from it over restarts, and
other filters or another balance cost no second visit to the teacher.
"""

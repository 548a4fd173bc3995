"""Rows in, token ids out: sources, filters, decontamination, chat templates and packing.

A row is a dict with `id`, `problem`, `answer`, `source` and, where they exist, `solution`, `level` and columns of its own.

    load.py           JSONL, a `datasets` hub id, parquet or the generator -> rows, with column mapping
    arithmetic.py     the procedural task: rows without end, training and evaluation problems disjoint
    filters.py        length, verified answer, column values; every dropped row has a counted reason
    decontaminate.py  drops rows that repeat an evaluation problem
    tokenizer.py      the arithmetic tokenizer, loading and checking of any other
    chat.py           row -> prompt ids, or ids with labels on the completion only
    packing.py        samples -> rows of at most `max_length` tokens
    collate.py        rows -> tensors (the only file here that imports torch)
    prepare.py        all of the above in order, for SFT and for prompts
"""

#!/usr/bin/env python
"""Trains a byte-level BPE tokenizer with the tagged chat template on JSONL files.

python scripts/train_tokenizer.py train.jsonl.gz --output tokenizer/ --vocab-size 4096
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a plain checkout

from posttrain.data.load import read_files
from posttrain.data.tokenizer import train_bpe_tokenizer
from posttrain.errors import DataError, PosttrainError


def texts(files: list[str], columns: list[str]) -> Iterator[str]:
    """The text of `columns` of every row; a column that a file never has is an error."""
    for file in files:
        found: set[str] = set()
        for _, row in read_files(file):
            for column in columns:
                if isinstance(row.get(column), str):
                    found.add(column)
                    yield row[column]
        if missing := sorted(set(columns) - found):
            raise DataError(f"{file}: no row has text in {', '.join(missing)}; choose others with --columns")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help=".jsonl, .jsonl.gz or .parquet files, or folders of them")
    parser.add_argument("--output", required=True, help="folder to save the tokenizer to")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--columns", nargs="+", default=["problem", "solution"])
    arguments = parser.parse_args()
    try:
        # A list, so that a bad row fails here and not inside the trainer's thread.
        tokenizer = train_bpe_tokenizer(list(texts(arguments.files, arguments.columns)), arguments.vocab_size)
    except (PosttrainError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    tokenizer.save_pretrained(arguments.output)
    print(f"{len(tokenizer)} tokens -> {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

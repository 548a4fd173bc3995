"""A package, so that test files import what several of them need: `from tests.sft_runs import recipe`."""

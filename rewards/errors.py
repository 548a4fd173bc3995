"""Errors of the reward package."""


class RewardError(Exception):
    """A reward that cannot be built, raised, or returned something unusable; the message names it and the sample.

    It carries `exit_code` as the pipeline's own errors do, so that the command line can print it without a traceback.
    """

    exit_code = 2

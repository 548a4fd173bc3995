"""Errors that a user can act on."""


class PosttrainError(Exception):
    """A mistake in the input or the environment: the message says what was given, what is allowed and what to do.

    The command line prints the message without a traceback and exits with `exit_code`.
    """

    exit_code = 2


class ConfigError(PosttrainError):
    """A recipe or an override that cannot be used."""


class DataError(PosttrainError):
    """A dataset that is missing, empty, or lacks what the recipe asks of it."""


class CheckpointError(PosttrainError):
    """A checkpoint that is missing, incomplete, or of another model family."""


class RunFolderError(PosttrainError):
    """A run folder that is in use, or belongs to another recipe."""

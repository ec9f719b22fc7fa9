# SPDX-License-Identifier: Apache-2.0
"""Every error a user can meet: what was found, what was expected, where, and what to do next.

The class decides the exit code of the recipe (DESIGN: exit codes) and the outcome in `run.json`.
Assertions guard our own invariants; these classes are for users, data, disks and networks.
"""


class RecipeError(Exception):
    """A failure with an address: found, expected, where, action.

    Args:
        found: what was found, with its value.
        expected: what would have been right.
        where: the option, file and line, step or rank it was found at.
        action: the next thing to type or change.
    """

    exit_code = 1
    outcome = "failed"

    def __init__(self, found: str, *, expected: str, where: str, action: str) -> None:
        self.found, self.expected, self.where, self.action = found, expected, where, action
        super().__init__(f"{where}: {found}\n  expected: {expected}\n  next: {action}")

    def __reduce__(self):  # keyword-only arguments do not survive the default pickling
        return _rebuild, (type(self), self.found, self.expected, self.where, self.action)


def _rebuild(kind: type[RecipeError], found: str, expected: str, where: str, action: str):
    return kind(found, expected=expected, where=where, action=action)


class ConfigError(RecipeError, ValueError):
    """An option, a config file or their combination is refused; nothing was started."""

    exit_code = 2
    outcome = "refused"


class DataError(ConfigError):
    """The training data is malformed, missing or too small."""


class RunFolderBusy(ConfigError):
    """Another live process holds the lease of this run folder."""


class RunFinished(RecipeError):
    """The run already reached its last step; there is nothing left to do."""

    exit_code = 0
    outcome = "finished"


class CheckpointError(RecipeError, OSError):
    """A checkpoint could not be written; the ones before it are untouched."""


class VerificationError(RecipeError, ValueError):
    """Bytes on disk are not the bytes the manifest promises, or the manifest is not one."""

    exit_code = 3
    outcome = "refused"


class NoTrustedCheckpoint(RecipeError, ValueError):
    """Checkpoints exist and none of them verifies."""

    exit_code = 3
    outcome = "refused"


class ContractRefused(RecipeError, ValueError):
    """The new launch is not the run that was interrupted, and no flag allows the difference."""

    exit_code = 3
    outcome = "refused"


class ResumeHalted(RecipeError, RuntimeError):
    """A resumed run behaved differently from the run that was interrupted."""

    exit_code = 4
    outcome = "halted"


class NumericsError(RecipeError, ArithmeticError):
    """A loss, gradient or weight is not finite, beyond what the policy allows."""

    exit_code = 5
    outcome = "numerics"


class FellBack(RecipeError):
    """Numbers failed, and the next launch goes one rung down; `fallback` in run.json says which."""

    exit_code = 75
    outcome = "fell_back"
    rung: dict | None = None

    def with_rung(self, rung: dict) -> "FellBack":
        """Gives the same error with what the next launch must do, as JSON values."""
        self.rung = rung
        return self


class OutOfMemory(RecipeError, MemoryError):
    """The device or the host ran out of memory."""

    outcome = "out_of_memory"


class Preempted(RecipeError):
    """The run was asked to stop, has saved, and can be launched again."""

    exit_code = 75
    outcome = "preempted"

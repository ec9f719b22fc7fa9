# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a file of a checkpoint, and what only keeps it from being read."""

from collections.abc import Sequence
from dataclasses import dataclass

from mprecipes.checkpoint.contents import listed
from mprecipes.checkpoint.storage import UnreachableFile
from mprecipes.errors import CheckpointError, VerificationError


@dataclass(frozen=True)
class Problem:
    """One file that is not what it should be.

    Attributes:
        tensors: those the file holds, or held as far as that can be known: all are doubtful.
        unreachable: it could not be read, and may be as good as ever.
    """

    path: str
    found: str
    expected: str
    tensors: tuple[str, ...] = ()
    unreachable: bool = False

    @classmethod
    def of(cls, error: VerificationError, path: str, tensors: Sequence[str] = ()) -> "Problem":
        """Gives what an error says of one file."""
        unreachable = isinstance(error, UnreachableFile)
        return cls(path, error.found, error.expected, tuple(tensors), unreachable)

    def __str__(self) -> str:
        text = f"{self.path}: {self.found}, expected {self.expected}"
        return f"{text} (in it: {listed(self.tensors)})" if self.tensors else text


def check_reachable(name: str, problems: Sequence[Problem], place: str = "") -> None:
    """Refuses to judge a checkpoint by what could not be read.

    Raises:
        CheckpointError: some of it could not be, for a reason that is not its own.
    """
    if found := [str(problem) for problem in problems if problem.unreachable]:
        raise CheckpointError(
            "; ".join(found),
            expected="files that can be read, whatever is in them",
            where=f"checkpoints/{name}{place}",
            action="look at the mount, the permissions and the limits of this machine, then launch "
            "again; nothing was moved and nothing older was taken instead",
        )

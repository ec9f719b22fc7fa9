# SPDX-License-Identifier: Apache-2.0
"""When a run wants to save: every so many steps, at milestones, after a time, or when asked."""

from collections.abc import Callable
from pathlib import Path

from mprecipes.checkpoint.policy import CheckpointPolicy
from mprecipes.identity.request import RequestFile


class SaveSchedule:
    """One rank's opinion; time and file count on ranks that write in the run folder.

    Args:
        save_file: its existence asks for one save; it is looked for at most once a second.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        policy: CheckpointPolicy,
        save_file: Path,
        *,
        writes_here: bool,
        clock: Callable[[], float],
    ) -> None:
        self._policy, self._writes_here, self._clock = policy, writes_here, clock
        self._request, self._saved_at = RequestFile(save_file, clock), clock()

    def is_due(self, step: int) -> bool:
        """Whether a save is wanted after this step."""
        if self._writes_here:
            minutes = self._policy.save_minutes
            if self._request.asked or (minutes and self._clock() - self._saved_at >= 60 * minutes):
                return True
        return step % self._policy.save_steps == 0 or step in self._policy.milestone_steps

    def begun(self) -> None:
        """A save has begun: the time runs anew, and who asked has been answered."""
        self._saved_at = self._clock()
        if self._writes_here:
            self._request.answer()

# SPDX-License-Identifier: Apache-2.0
"""All ranks succeed together or fail together, so that none waits for a peer that gave up."""

from collections.abc import Callable
from typing import TypeVar

from mprecipes.compute.ranks import Ranks
from mprecipes.errors import CheckpointError, NumericsError, RecipeError

T = TypeVar("T")


def agree(ranks: Ranks, doing: tuple[str, str, str], work: Callable[[], T]) -> list[T]:
    """Collective: gives all ranks' values of `work`, or raises on every rank if any rank failed.

    Args:
        doing: where, expected and action of the error when what went wrong is not one of ours.
        work: communicates with nobody.

    Raises:
        CheckpointError: some rank failed; the rank and its error are named.
        RecipeError: of the kind a rank raised.
    """
    value: T | None = None
    error: RecipeError | None = None
    try:
        value = work()
    except RecipeError as problem:
        error = problem
    except (Exception, SystemExit) as problem:  # noqa: BLE001 - peers that wait must hear of it
        where, expected, action = doing
        found = f"rank {ranks.rank}: {type(problem).__name__}: {problem}"
        error = CheckpointError(found, expected=expected, where=where, action=action)
        error.__cause__ = problem
    answers = ranks.gather((error, value))
    if errors := [each for each, _ in answers if each is not None]:
        raise error or errors[0]
    return [each for _, each in answers]  # type: ignore[misc]


def check_state(step: int, not_finite: list[str], replicas: list[dict[str, str]]) -> None:
    """Refuses state that is not finite, and replicas that differ; the same on every rank.

    Args:
        not_finite: tensors of any rank that hold NaN or infinity.
        replicas: digests by kind of state, of what all ranks hold alike, by rank.

    Raises:
        NumericsError: naming the tensors, or the kinds of state that differ.
    """
    if bad := sorted(set(not_finite)):
        raise NumericsError(
            f"{len(bad)} tensors hold NaN or infinity: {', '.join(bad)}",
            expected="finite weights and optimizer state; nothing was published",
            where=f"saving step {step}",
            action="launch again to go back to the last good checkpoint; look at the steps before",
        )
    items = [set(digests.items()) for digests in replicas]
    if differing := sorted({kind for other in items for kind, _ in other ^ items[0]}):
        raise NumericsError(
            f"replicas differ in {', '.join(differing)}",
            expected="the same bits on every rank; nothing was published",
            where=f"saving step {step}",
            action="launch again to go back to the last good checkpoint; buffers that each rank "
            "updates by itself (batch norm) are not supported, else suspect a faulty machine",
        )

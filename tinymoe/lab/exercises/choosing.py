"""Exercises on which way to take through the experts."""

from collections.abc import Sequence
from typing import Any

from tinymoe.lab.exercises.judge import Verdict, attempt, shown

EXPERTS, TOP_K = 16, 2  # of the recorded layers: the bundled model's routes at another model's widths
MEAN, WORST = 0.02, 0.10


def path(answer, recorded: Sequence[dict[str, Any]]) -> Verdict:
    """07.2: choose(tokens, num_experts, top_k) -> the name of an expert path, judged by what was recorded on a GPU.

    recorded: the controls of a selection results file. Regret is the time of the chosen path over that of the fastest, less
    one, for each recorded batch: at most MEAN on average and WORST anywhere.
    """
    if not callable(answer):
        return Verdict(False, f"write a function choose, got {type(answer).__name__}")
    batches: dict[tuple[int, float], dict[str, float]] = {}
    for row in recorded:
        if row["kind"] == "cost":
            batches.setdefault((row["tokens"], row["skew"]), {})[row["path"]] = row["us"]
    steps = [(row["tokens"], row["us"]) for row in recorded if row["kind"] == "step"]
    if not batches or not steps:
        return Verdict(False, "the recording holds no costs; it needs the controls of selection_h200.json")
    chosen: dict[int, Any] = {}
    for tokens in sorted({tokens for tokens, _ in batches} | {tokens for tokens, _ in steps}):
        call = f"choose({tokens}, {EXPERTS}, {TOP_K})"
        chosen[tokens], failure = attempt(answer, tokens, EXPERTS, TOP_K)
        if failure:
            return Verdict(False, f"{call} {failure}")
        times = [us for (count, _), us in batches.items() if count == tokens] or [
            us for count, us in steps if count == tokens
        ]
        if not isinstance(chosen[tokens], str) or chosen[tokens] not in times[0]:
            measured = ", ".join(times[0])
            return Verdict(False, f"{call} gave {shown(chosen[tokens])}; measured there: {measured}")
    regrets = {cell: us[chosen[cell[0]]] / min(us.values()) - 1 for cell, us in batches.items()}
    cell = max(regrets, key=regrets.__getitem__)
    mean, worst = sum(regrets.values()) / len(regrets), regrets[cell]
    if worst > WORST:
        us, (tokens, skew) = batches[cell], cell
        best = min(us, key=us.__getitem__)
        return Verdict(
            False,
            f"choose({tokens}, {EXPERTS}, {TOP_K}) gave {chosen[tokens]!r}: {us[chosen[tokens]]:.1f} us with routes of skew "
            f"{skew:g}, where {best!r} took {us[best]:.1f}; nowhere more than {WORST:.0%} above the fastest is wanted",
        )
    if mean > MEAN:
        return Verdict(
            False,
            f"mean regret {mean:.1%} over {len(regrets)} recorded batches; at most {MEAN:.0%} is wanted",
        )
    served = sum(us[chosen[tokens]] / min(us.values()) - 1 for tokens, us in steps) / len(steps)
    return Verdict(
        True,
        f"mean regret {mean:.1%} over {len(regrets)} recorded batches, worst {worst:.1%}; "
        f"on {len(steps)} steps of the bundled model {served:.1%}",
    )

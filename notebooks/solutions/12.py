"""Reference solutions of notebook 12, and answers that must be refused. Injected by tests/test_exercises.py.

12.1 asks for the first three steps of the notebook's own recording: `events` is a variable of the notebook.
"""

SOLUTIONS = {
    "12.1": """
plan = [
    {e.seq: e.stop - e.start for e in events if e.kind == 'chunk' and e.step == step}
    for step in sorted({e.step for e in events if e.kind == 'chunk'})[:3]
]
""",
}

WRONG = {
    "12.1": [
        "plan = [{'A': 1}, {'A': 1}, {'A': 1}]",
        "plan = [{'A': 10**6}, {}, {}]",
        "plan = [{'Z': 1}, {}, {}]",
        "plan = {'A': 1}",
    ],
}

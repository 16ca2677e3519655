"""Reference solutions of notebook 00, and answers that must be refused. Injected by tests/test_exercises.py."""

SOLUTIONS = {
    "00.1": """
def first_token_step(events, request):
    return next((e.step for e in events if e.kind == "sample" and e.request == request), None)
""",
}

WRONG = {
    "00.1": [
        # the first chunk of the prompt, which yields no token unless it is also the last one
        """
def first_token_step(events, request):
    seqs = {e.seq for e in events if e.kind == "arrive" and e.request == request}
    return next((e.step for e in events if e.kind == "chunk" and e.seq in seqs), None)
""",
        # anybody's first token
        """
def first_token_step(events, request):
    return next((e.step for e in events if e.kind == "sample"), None)
""",
        # the number of the event
        """
def first_token_step(events, request):
    return next((e.index for e in events if e.kind == "sample" and e.request == request), None)
""",
        # a sequence is not a request
        """
def first_token_step(events, request):
    return next((e.step for e in events if e.kind == "sample" and e.seq == request), None)
""",
        # no answer for a request without a token
        """
def first_token_step(events, request):
    return next(e.step for e in events if e.kind == "sample" and e.request == request)
""",
    ],
}

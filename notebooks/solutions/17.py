"""Reference solutions of notebook 17, and answers that must be refused. Injected by tests/test_exercises.py."""

SOLUTIONS = {
    "17.1": """
def best_depth(alpha, a, b, c, d, U, most):
    best, fastest = 0, 0.0
    for depth in range(most + 1):
        n = depth + 1
        tokens = sum(alpha**i for i in range(n))
        speed = tokens / (a + b * U[n] + c * n + d * depth)
        if speed > fastest:
            best, fastest = depth, speed
    return best
""",
}

WRONG = {
    "17.1": [
        # more is always better
        """
def best_depth(alpha, a, b, c, d, U, most):
    return most
""",
        # never tries
        """
def best_depth(alpha, a, b, c, d, U, most):
    return 0
""",
        # 0 is not allowed
        """
def best_depth(alpha, a, b, c, d, U, most):
    def speed(k):
        return sum(alpha**i for i in range(k + 1)) / (a + b * U[k + 1] + c * (k + 1) + d * k)
    return max(range(1, most + 1), key=speed)
""",
        # a dense model's cost: more tokens visit no more experts
        """
def best_depth(alpha, a, b, c, d, U, most):
    def speed(k):
        return sum(alpha**i for i in range(k + 1)) / (a + b * U[1] + c * (k + 1) + d * k)
    return max(range(most + 1), key=speed)
""",
        # forgets the token behind the drafts
        """
def best_depth(alpha, a, b, c, d, U, most):
    def speed(k):
        return sum(alpha**i for i in range(1, k + 1)) / (a + b * U[k + 1] + c * (k + 1) + d * k)
    return max(range(most + 1), key=speed)
""",
        # a step of k tokens, not of k + 1
        """
def best_depth(alpha, a, b, c, d, U, most):
    def speed(k):
        n = max(1, k)
        return sum(alpha**i for i in range(k + 1)) / (a + b * U[n] + c * n + d * k)
    return max(range(most + 1), key=speed)
""",
        # the draft is free
        """
def best_depth(alpha, a, b, c, d, U, most):
    def speed(k):
        return sum(alpha**i for i in range(k + 1)) / (a + b * U[k + 1] + c * (k + 1))
    return max(range(most + 1), key=speed)
""",
        # every draft counts alpha, wherever it stands
        """
def best_depth(alpha, a, b, c, d, U, most):
    def speed(k):
        return (1 + alpha * k) / (a + b * U[k + 1] + c * (k + 1) + d * k)
    return max(range(most + 1), key=speed)
""",
        # divides by zero where every draft is kept
        """
def best_depth(alpha, a, b, c, d, U, most):
    def speed(k):
        return (1 - alpha ** (k + 1)) / (1 - alpha) / (a + b * U[k + 1] + c * (k + 1) + d * k)
    return max(range(most + 1), key=speed)
""",
        "best_depth = 3",
    ],
}

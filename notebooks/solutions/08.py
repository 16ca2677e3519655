"""Reference solutions of notebook 08, and answers that must be refused. Injected by tests/test_exercises.py."""

SOLUTIONS = {
    "08.1": """
def kv_bytes_per_token(layers, query_heads, kv_heads, head_width, bytes_per_number):
    return 2 * layers * kv_heads * head_width * bytes_per_number
""",
    "08.2": """
def tokens_computed(prompt, new):
    return new * prompt + new * (new - 1) // 2, prompt + new - 1
""",
}

WRONG = {
    "08.1": [
        # query heads keep nothing
        """
def kv_bytes_per_token(layers, query_heads, kv_heads, head_width, bytes_per_number):
    return 2 * layers * query_heads * head_width * bytes_per_number
""",
        # keys, but no values
        """
def kv_bytes_per_token(layers, query_heads, kv_heads, head_width, bytes_per_number):
    return layers * kv_heads * head_width * bytes_per_number
""",
        # one layer
        """
def kv_bytes_per_token(layers, query_heads, kv_heads, head_width, bytes_per_number):
    return 2 * kv_heads * head_width * bytes_per_number
""",
        "kv_bytes_per_token = 3072",
    ],
    "08.2": [
        # the last token is sampled, but never run
        """
def tokens_computed(prompt, new):
    return sum(prompt + i for i in range(new)), prompt + new
""",
        # as if the sequence had its full length from the first step on
        """
def tokens_computed(prompt, new):
    return new * (prompt + new), prompt + new - 1
""",
        # the prompt is run again as well
        """
def tokens_computed(prompt, new):
    return new * prompt + new * (new - 1) // 2, new * prompt
""",
    ],
}

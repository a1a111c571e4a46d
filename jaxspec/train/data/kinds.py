"""Host. What users ask: how a question of each kind may begin, and what is asked of a text that is there already."""

import numpy as np

# The model goes on from here in the user's voice. An empty beginning leaves everything to it.
BEGINNINGS = {
    "chat": (
        "", "", "", "What is", "What are", "How do I", "How can I", "Why do", "Can you explain", "I have been",
        "I want to", "My friend", "Tell me about", "Give me some advice on", "Write a short story about",
        "Write an email to", "What is the difference between", "Describe", "I am planning a trip to", "Imagine that",
        "Compare", "Who was", "What happened in", "Help me", "Is it true that", "Give me a list of", "My boss",
        "I'm feeling", "Explain to a child", "What would happen if", "Suggest", "Write a poem about",
    ),
    "code": (
        "Write a Python function that", "Write a Python class for", "Write a function in JavaScript that",
        "Write a Python program to", "Implement", "Write a SQL query that", "Write a bash script that",
        "Explain this Python code:\n\n```python\ndef", "How do I use", "Write unit tests for a function that",
        "Write a recursive function that", "In Python, how can I", "Write a C function that",
        "Fix the bug in this code:\n\n```python\ndef", "Write HTML for",
    ),
    "json": (
        "Give me a JSON object that describes", "Return a JSON array of", "Write a JSON record for",
        "Answer in JSON only. List", "Create a JSON file with", "Generate a JSON configuration for",
        "Extract the names and dates as JSON from this text:", "Give me three products as a JSON list, with",
        "Represent the following as JSON:", "Produce a JSON schema for",
    ),
}  # fmt: skip

_SUMMARIES = (
    "Summarise the following passage in {n} sentences.", "Give me a short summary of this text.",
    "What are the main points of the text below?", "Summarize this in one paragraph.", "TL;DR of the following:",
    "List the {n} most important points of this passage.",
)  # fmt: skip
_EDITS = (
    "Correct the spelling and grammar of the following text and change nothing else.",
    "Rewrite the following text in the past tense. Keep the rest as it is.",
    "Rewrite this in a more formal tone.", "Repeat the following text, but replace every number by a word.",
    "Make this text a little shorter, and keep its wording where you can.",
    "Rewrite the text below in simpler words.", "Add a title to the following text and repeat it unchanged.",
    "Rewrite the following in the first person.", "Format the following text as a bulleted list.",
)  # fmt: skip
_CODE_EDITS = (
    "Add type hints to this code and change nothing else.", "Add comments to the following code.",
    "Rename the variables in this code so that they are easier to understand.",
    "Add a docstring to every function below.", "Add error handling to this code.",
)  # fmt: skip


def beginning(kind: str, rng: np.random.Generator) -> str:
    """How a question of a kind that needs no text begins."""
    choices = BEGINNINGS[kind]
    return choices[rng.integers(len(choices))]


def about_a_text(kind: str, text: str, rng: np.random.Generator) -> str:
    """A question of kind "summary" or "editing" about a text."""
    if kind == "summary":
        asked = _SUMMARIES
    else:
        asked = _CODE_EDITS if "```" in text else _EDITS
    return asked[rng.integers(len(asked))].format(n=("two", "three", "four")[rng.integers(3)]) + "\n\n" + text

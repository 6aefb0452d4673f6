"""Rows of training data and files of them."""

import json
from pathlib import Path


def chat_row(question: str, answer: str) -> dict:
    """Return a row of one question and one answer."""
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    """Write rows one a line, making the folder if needed; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path

"""Reading one config file; every way it can fail is a `UserError` that names the file."""

import tomllib
from pathlib import Path
from typing import Any

from trainer.errors import UserError


def read_config_file(path: str) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        UserError: the file cannot be read, or is not TOML (names the line).
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"@ {path}: no such file; check the path ({_nearby(path)})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"@ {path}: not UTF-8 text ({error}); save it as UTF-8") from None
    except (OSError, ValueError) as error:
        raise UserError(f"@ {path}: cannot be read ({error}); give a TOML file") from None
    try:
        # With the closing newline, an error in the last line is reported by its number.
        return tomllib.loads(text + "\n")
    except tomllib.TOMLDecodeError as error:
        last_line = f"line {len(text.splitlines())}, the last"
        place = str(error).replace("end of document", last_line)
        raise UserError(f"@ {path}: not valid TOML: {place}; correct that place") from None
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, lists in lists by the thousand.
        raise UserError(f"@ {path}: cannot be read ({error}); give a TOML file") from None


def _nearby(path: str) -> str:
    folder = Path(path).parent
    if not folder.is_dir():
        return f"there is no folder {folder} under {Path.cwd()}"
    names = sorted(entry.name for entry in folder.glob("*.toml"))[:8]
    return f"{folder} holds {', '.join(names) or 'no .toml file'}"

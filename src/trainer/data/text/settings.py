"""What the settings of a source are called where the user gave them: in a config, or as options."""

COMMAND_LINE = "SRC"
"""The source of `trainer tokenize`."""


def setting(field: str, name: str) -> str:
    """Return what a person changes.

    Args:
        field: the source's name, such as `data.source.sources[1]`, or `COMMAND_LINE`.
        name: of the setting, as in the config.

    Example:
        >>> setting("data.source", "on_bad_row"), setting(COMMAND_LINE, "on_bad_row")
        ('data.source.on_bad_row', '--on-bad-row')
    """
    if field != COMMAND_LINE:
        return f"{field}.{name}"
    return field if name == "path" else f"--{name.replace('_', '-')}"

"""When something that happens every n steps is due."""


def is_due(interval: int, step: int, max_steps: int) -> bool:
    """Return whether it happens after `step`: every `interval` steps and at the end, not before."""
    return step == max_steps or (interval > 0 and step > 0 and step % interval == 0)

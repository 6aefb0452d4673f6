from trainer.progress import Progress


def test_a_skipped_step_is_consumed_but_not_applied():
    progress = Progress()
    progress.advance(100, 40)
    progress.settle(applied=True)
    for _ in range(2):
        progress.advance(100, 40)
        progress.settle(applied=False)
    assert (progress.step, progress.num_applied) == (3, 1)
    assert (progress.num_skipped, progress.skipped_in_row) == (2, 2)
    assert (progress.num_tokens, progress.trained_tokens) == (300, 120)


def test_an_applied_step_ends_the_row_of_skipped_ones():
    progress = Progress(step=3, num_applied=1, num_skipped=2, skipped_in_row=2)
    progress.advance(1, 1)
    progress.settle(applied=True)
    assert (progress.num_skipped, progress.skipped_in_row) == (2, 0)


def test_state_round_trips():
    progress = Progress(5, 4, 1, 0, 5, 100, 90)
    assert Progress.from_state(progress.state_dict()) == progress
